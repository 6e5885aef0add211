"""The committed demo model: its files agree with each other, and its weights write what its grammar accepts.

The forward pass here is plain float32 numpy over the checkpoint's own tensors, on purpose independent of the project's
packing, reference and kernels: when one of those disagrees with this, the model is not to blame.
"""

import itertools
import json
import random
from functools import cache

import jinja2
import ml_dtypes  # noqa: F401  (registers bfloat16 for safetensors)
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from cheetah.models.demo import grammar as demo_grammar
from cheetah.models.demo.format import ASSISTANT, BEGIN, END, SPECIALS, marked
from cheetah.models.llama import LlamaConfig
from cheetah.models.registry import DEMO_FOLDER

Array = NDArray[np.float32]
MAX_BYTES = 4 * 2**20
PROMPTS = (
    "One morning,",
    "Once upon a time",
    "In the winter, Leo the owl",
    "Rosa was a",
    "On a cold day,",
    "There was",
)


def test_folder_is_small_and_whole() -> None:
    sizes = {path.name: path.stat().st_size for path in DEMO_FOLDER.iterdir()}
    assert sum(sizes.values()) < MAX_BYTES
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= sizes.keys()
    assert {"special_tokens_map.json", "model.safetensors", "README.md"} <= sizes.keys()


def test_tensors_are_those_of_the_config() -> None:
    config, tensors = demo_config(), load_file(DEMO_FOLDER / "model.safetensors")
    assert sum(tensor.size for tensor in tensors.values()) == config.parameter_count
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"bfloat16"}
    assert config.tied_embeddings and "lm_head.weight" not in tensors


def test_tokenizer_gives_every_text_back() -> None:
    for text in ("Mia was very sad.", "naïve 東京 🐆 x\n\n  1234", '"Where is my red kite?" asked Mia.'):
        ids = tokenizer().encode(text).ids
        assert ids[0] == 0 and 0 not in ids[1:]
        assert tokenizer().decode(ids) == text
    assert [tokenizer().token_to_id(mark) for mark in SPECIALS] == [0, 1, 2, 3]
    assert tokenizer().get_vocab_size() == demo_config().vocab_size


def test_chat_template_writes_what_was_trained() -> None:
    talk = demo_grammar.conversation(random.Random(2))
    messages = [{"role": turn.role, "content": turn.text} for turn in talk]
    assert chat_text(messages) == marked(talk)
    assert chat_text(messages[:1], add_generation_prompt=True) == marked(talk[:1]) + ASSISTANT


@pytest.mark.slow
def test_greedy_stories_are_grammatical() -> None:
    stories = [prompt + complete(BEGIN + prompt) for prompt in PROMPTS]
    sentences = list(itertools.chain.from_iterable(map(demo_grammar.read, stories)))
    accepted = [sentence for sentence in sentences if sentence.pattern]
    assert len(sentences) >= 5 * len(PROMPTS)
    assert len(accepted) >= 0.95 * len(sentences), "\n".join(stories)


@pytest.mark.slow
def test_questions_are_answered() -> None:
    rng = random.Random(11)
    talks = [demo_grammar.questions_about_facts(rng) for _ in range(20)]
    answers = [(complete(marked(talk[:1]) + ASSISTANT), talk[1].text) for talk in talks]
    assert sum(said == expected for said, expected in answers) >= 18, answers


@cache
def demo_config() -> LlamaConfig:
    return LlamaConfig.from_json(DEMO_FOLDER / "config.json")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))


@cache
def weights() -> dict[str, Array]:
    stored = load_file(DEMO_FOLDER / "model.safetensors")
    return {name.removeprefix("model."): tensor.astype(np.float32) for name, tensor in stored.items()}


@cache
def turns() -> Array:
    return demo_config().rope_table(demo_config().max_position_embeddings)


def chat_text(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    settings = json.loads((DEMO_FOLDER / "tokenizer_config.json").read_text())
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(settings["chat_template"])
    marks = {"bos_token": BEGIN, "eos_token": END}
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **marks)


def complete(prompt: str, limit: int = 320) -> str:
    """The greedy continuation of a prompt that carries its marks, up to END or `limit` tokens in all."""
    ids = tokenizer().encode(prompt, add_special_tokens=False).ids
    start = len(ids)
    cache_of_layers: list[tuple[list[Array], list[Array]]] = [([], []) for _ in range(demo_config().layers)]
    for position in itertools.count():
        logits = step(ids[position], position, cache_of_layers)
        if position + 1 == len(ids):
            ids.append(int(logits.argmax()))
            if ids[-1] == 1 or len(ids) == limit:
                return str(tokenizer().decode(ids[start:]))
    raise AssertionError


def step(token: int, position: int, cache_of_layers: list[tuple[list[Array], list[Array]]]) -> Array:
    """Logits after one token, whose keys and values are added to the cache."""
    w = weights()
    x = w["embed_tokens.weight"][token]
    for number, (keys, values) in enumerate(cache_of_layers):
        name = f"layers.{number}."
        x = x + attention(norm(x, w[name + "input_layernorm.weight"]), name + "self_attn.", position, keys, values)
        h = norm(x, w[name + "post_attention_layernorm.weight"])
        gate, up = w[name + "mlp.gate_proj.weight"] @ h, w[name + "mlp.up_proj.weight"] @ h
        x = x + w[name + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    return w["embed_tokens.weight"] @ norm(x, w["norm.weight"])


def norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt(np.mean(x * x) + np.float32(demo_config().rms_norm_eps)) * weight


def attention(x: Array, name: str, position: int, keys: list[Array], values: list[Array]) -> Array:
    config, w = demo_config(), weights()
    q, k, v = ((w[f"{name}{part}_proj.weight"] @ x).reshape(-1, config.head_dim) for part in "qkv")
    keys.append(rotated(k, position))
    values.append(v)
    heads = []
    for head, query in enumerate(rotated(q, position)):
        scores = np.stack(keys)[:, head // config.group] @ query / np.sqrt(np.float32(config.head_dim))
        shares = np.exp(scores - scores.max())
        heads.append(shares / shares.sum() @ np.stack(values)[:, head // config.group])
    return w[f"{name}o_proj.weight"] @ np.concatenate(heads)


def rotated(heads: Array, position: int) -> Array:
    cosine, sine = turns()[position].T
    low, high = np.split(heads, 2, axis=1)
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=1)
