"""The float32 reference: against a trained model's golden output, against transformers, and against its own algebra."""

import json
import math
from dataclasses import replace
from functools import reduce

import ml_dtypes
import numpy as np
import pytest

from cheetah.models.dense import reference as ref
from cheetah.models.dense.weights import tensor_shapes
from cheetah.models.llama import LlamaConfig
from cheetah.models.rope import Rope
from cheetah.models.rounding import round_to_bf16

TINY = LlamaConfig(
    hidden_size=48,
    intermediate_size=40,
    layers=2,
    query_heads=4,
    kv_heads=2,
    head_dim=64,
    vocab_size=50,
    rope=Rope(5e5, "llama3", 8.0, 1.0, 4.0, 32),
)


def random_tensors(config, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(0, shape[-1] ** -0.5, shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in tensor_shapes(config).items()
    }


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.slow
def test_trained_model_reproduces_its_golden_output(trained_checkpoint):
    from safetensors.numpy import load_file

    tensors = load_file(trained_checkpoint / "model.safetensors")
    model = ref.Reference(LlamaConfig.from_json(trained_checkpoint / "config.json"), tensors)
    for case in json.loads((trained_checkpoint / "golden.json").read_text())["cases"]:
        golden = case["stored_weights_fp32"]
        prompt, wanted = case["prompt_ids"], golden["greedy_ids"]
        logits = model.forward(prompt + wanted[:-1])[len(prompt) - 1 :]
        assert logits.argmax(axis=1).tolist() == wanted
        second, first = np.sort(logits, axis=1)[:, -2:].T
        assert first - second == pytest.approx(golden["margins"], abs=2e-4)
        for token, value in golden["first_logits_top5"]:
            assert logits[0, token] == pytest.approx(value, abs=1e-4)


def test_generate_is_greedy_forward_and_stops():
    model = ref.Reference(TINY, random_tensors(TINY))
    made = model.generate([1, 2, 3], 20)
    logits = model.forward([1, 2, 3, *made[:-1]])[2:]
    assert logits.argmax(axis=1).tolist() == made
    stop = made[4]
    assert model.generate([1, 2, 3], 20, stop_ids=[stop]) == made[: made.index(stop) + 1]
    assert model.generate([1, 2, 3], 0) == []


ROPES = [
    TINY.rope,
    Rope(1e4),
    Rope(1e4, "linear", 2.0),
    Rope(1e4, "yarn", 4.0, original_max_position_embeddings=64),
    Rope(1e4, "yarn", 4.0, original_max_position_embeddings=64, truncate=False, mscale=1.0, mscale_all_dim=0.5),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.rope_type)
@pytest.mark.parametrize("tied", [False, True])
def test_against_transformers(rope, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = replace(TINY, rope=rope, tied_embeddings=tied)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_dict())).float().eval()
    tensors = random_tensors(config)
    theirs.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()}, strict=not tied)
    theirs.tie_weights()
    ids = np.random.default_rng(1).integers(0, config.vocab_size, 100).tolist()
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0].numpy()
    assert ref.Reference(config, tensors).forward(ids) == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.rope_type)
def test_a_model_saved_by_transformers_opens_without_a_note(tmp_path, rope):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from cheetah.runtime.checkpoint.loading import open_checkpoint

    config = replace(TINY, rope=rope)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_dict())).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == config and checkpoint.notes == ()
    stored = theirs.state_dict()["model.norm.weight"].view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(checkpoint.tensor("model.norm.weight"), stored)


def test_whole_model_against_plain_loops():
    """An independent writing of the same model, all positions at once, in float64."""
    tensors = {name: value.astype(np.float64) for name, value in random_tensors(TINY).items()}
    ids = [3, 1, 4, 1, 5, 9, 2, 6] * 10
    x = np.stack([tensors["model.embed_tokens.weight"][token] for token in ids])

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + TINY.rms_norm_eps) * tensors[name]

    from cheetah.models.rope import frequencies

    turns = np.exp(1j * np.arange(len(ids))[:, None] * frequencies(TINY.rope, 64).astype(np.float64))

    def turned(head):
        pairs = (head[:, :32] + 1j * head[:, 32:]) * turns
        return np.concatenate([pairs.real, pairs.imag], axis=1)

    for i in range(TINY.layers):
        at = f"model.layers.{i}."
        normed = norm(x, at + "input_layernorm.weight")
        q, k, v = (normed @ tensors[f"{at}self_attn.{part}_proj.weight"].T for part in "qkv")
        outputs = []
        for h in range(4):
            kv = slice(h // 2 * 64, h // 2 * 64 + 64)
            logits = turned(q[:, h * 64 : h * 64 + 64]) @ turned(k[:, kv]).T / 8
            logits[np.triu_indices(len(ids), 1)] = -np.inf
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            outputs.append(weights / weights.sum(-1, keepdims=True) @ v[:, kv])
        x = x + np.concatenate(outputs, axis=1) @ tensors[at + "self_attn.o_proj.weight"].T
        normed = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (normed @ tensors[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ tensors[at + "mlp.down_proj.weight"].T
    wanted = norm(x, "model.norm.weight") @ tensors["lm_head.weight"].T
    found = ref.Reference(TINY, random_tensors(TINY)).forward(ids)
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 1e-5


def test_rounding_to_bf16_changes_little_and_is_the_libraries():
    values = np.concatenate([normal(10_000) * 1e3, [0.0, -0.0, 1.00390625, 1.01171875]]).astype(np.float32)
    assert np.array_equal(round_to_bf16(values), values.astype(ml_dtypes.bfloat16).astype(np.float32))
    tensors, ids = random_tensors(TINY), [1, 2, 3, 4]
    exact = ref.Reference(TINY, tensors).forward(ids)
    rounded = ref.Reference(TINY, tensors, round_to_bf16).forward(ids)
    assert 1e-4 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 2e-2


def test_widen_reads_bits_and_floats():
    values = normal(100).astype(ml_dtypes.bfloat16)
    assert np.array_equal(ref.widen(values.view(np.uint16)), values.astype(np.float32))
    assert np.array_equal(ref.widen(values), values.astype(np.float32))


def test_wrong_shapes_and_tokens_are_refused():
    tensors = random_tensors(TINY)
    with pytest.raises(ValueError, match="token 50 is outside the vocabulary of 50"):
        ref.Reference(TINY, tensors).step(50)
    tensors["model.norm.weight"] = np.ones(47, np.float32)
    with pytest.raises(ValueError, match=r"model.norm.weight: shape \[47\], expected \[48\]"):
        ref.Reference(TINY, tensors)


@pytest.mark.parametrize("cuts", [[0, 37], [0, 1, 2, 37], [0, 0, 16, 16, 37], [0, 36, 37]])
def test_any_split_merges_to_the_whole(cuts):
    queries, keys, values = normal((3, 64)), normal((37, 64), 1), normal((37, 64), 2)
    whole = ref.attention_state(queries, keys, values)
    parts = [ref.attention_state(queries, keys[a:b], values[a:b]) for a, b in zip([0, *cuts], [*cuts, 37], strict=True)]
    merged = reduce(ref.merge, parts)
    assert merged.output == pytest.approx(whole.output, abs=1e-6)
    assert merged.lse == pytest.approx(whole.lse, abs=1e-6)


def test_identity_merges_bit_for_bit():
    state = ref.attention_state(normal((3, 64)), normal((9, 64), 1), normal((9, 64), 2))
    nothing = ref.identity_state((3, 64))
    for merged in (ref.merge(state, nothing), ref.merge(nothing, state)):
        assert np.array_equal(merged.output, state.output) and np.array_equal(merged.lse, state.lse)
    both = ref.merge(nothing, nothing)
    assert not both.output.any() and np.all(np.isneginf(both.lse))


def test_states_use_the_natural_logarithm():
    keys, values = np.zeros((5, 64), np.float32), np.ones((5, 64), np.float32)
    state = ref.attention_state(normal((2, 64)), keys, values)
    assert state.lse == pytest.approx(math.log(5)) and state.output == pytest.approx(1)


def test_needle():
    queries, keys, values = normal((1, 64)), np.zeros((40, 64), np.float32), normal((40, 64), 2)
    keys[17] = queries[0] * 60 * 8 / np.dot(queries[0], queries[0])
    assert ref.attention_state(queries, keys, values).output[0] == pytest.approx(values[17], abs=1e-6)


def test_silu_survives_large_gates():
    gate = np.array([-200.0, 0.0, 200.0], np.float32)
    assert ref.silu(gate).tolist() == [0.0, 0.0, 200.0]
