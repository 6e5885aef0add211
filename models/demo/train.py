"""Train the demo model and write its folder: `python -m cheetah.models.demo.train [--steps N] [-o FOLDER]`.

The text comes from `demo_grammar`, the tokenizer is trained on it, the model is a Llama of 0.7 million parameters.
Needs the extra `train` (torch; a CPU is enough: a quarter of an hour on one core that has bf16 instructions).
Everything is drawn from SEED, so the same torch on the same processor gives the same files; others sum in another order
and give other bits of the same quality: what `measure` finds is written into the folder's README.md.
"""

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional

from cheetah.models.demo import grammar as demo_grammar
from cheetah.models.demo.format import ASSISTANT, BEGIN, CHAT_TEMPLATE, END, SPECIALS, SPLIT, marked, model_card
from cheetah.models.llama import LlamaConfig
from cheetah.models.registry import DEMO_FOLDER

SEED = 2026
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
STEP_TOKENS = 4096
LENGTHS = (256, 256, 256, 512)  # tokens of a sequence, step by step in turn: most documents are short
PEAK_RATE = 3e-3
WARMUP_STEPS = 80


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE in the manner of Llama 3: words of the vocabulary are not merged, and BEGIN goes in front."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    words = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for document in demo_grammar.documents(SEED, 6000) for text in spoken(document))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return tokenizer


def spoken(document: str | list[demo_grammar.Turn]) -> list[str]:
    """The texts of a document without any marks."""
    return [document] if isinstance(document, str) else [turn.text for turn in document]


def token_batches(tokenizer: Tokenizer, seed: int) -> Iterator[Tensor]:
    """Endless int64 [sequences, length + 1] of STEP_TOKENS predictions: documents one after another, cut anywhere."""
    waiting: list[int] = []
    seeds = itertools.count(seed)
    for length in itertools.cycle(LENGTHS):
        size = STEP_TOKENS // length * (length + 1)
        while len(waiting) < size:
            texts = [marked(document) for document in demo_grammar.documents(next(seeds), 300)]
            for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
                waiting += encoding.ids
        yield torch.tensor(waiting[:size]).view(-1, length + 1)
        del waiting[:size]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, tokens, head_dim] by table [tokens, head_dim/2, 2] (cosine, sine)."""
    cosine, sine = table.unbind(-1)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.hidden_size, config.query_rows, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_rows, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_rows, bias=False)
        self.o_proj = nn.Linear(config.query_rows, config.hidden_size, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, table), rotate(k, table)
        k, v = (tensor.repeat_interleave(self.config.group, 1) for tensor in (k, v))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), table)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Token ids [batch, tokens] to logits [batch, tokens, vocab]; parameters carry checkpoint names, less `model.`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        table = torch.from_numpy(config.rope_table(config.max_position_embeddings))
        self.register_buffer("table", table, persistent=False)
        self._initialise(config)

    def _initialise(self, config: LlamaConfig) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.05 / math.sqrt(2 * config.layers) if into_residual else 0.05)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.table[: ids.shape[1]])
        return functional.linear(self.norm(x), self.embed_tokens.weight)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    return PEAK_RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)))


def train(model: Llama, tokenizer: Tokenizer, steps: int) -> None:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.97))
    started = time.monotonic()
    for step, ids in zip(range(steps), token_batches(tokenizer, SEED), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - started:.0f} s", flush=True)


@torch.no_grad()
def complete(model: Llama, tokenizer: Tokenizer, prompt: str, temperature: float, limit: int = 320) -> str:
    """What the model writes after `prompt` (marks included) up to END; temperature 0 takes the likeliest token."""
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    start = len(ids)
    while len(ids) < limit and (len(ids) == start or ids[-1] != CONFIG["eos_token_id"]):
        logits = model(torch.tensor([ids]))[0, -1]
        likeliest = temperature == 0
        ids.append(int(logits.argmax() if likeliest else torch.multinomial((logits / temperature).softmax(-1), 1)))
    return tokenizer.decode(ids[start:])


def measure(model: Llama, tokenizer: Tokenizer, count: int = 100) -> dict[str, float]:
    """Shares of 0..1 over `count` new stories (sampled at temperature 0.8) and `count` new questions (greedy)."""
    torch.manual_seed(SEED)
    openings = itertools.islice(itertools.cycle((*demo_grammar.TIMES, "Once upon a time")), count)
    texts = [opening + complete(model, tokenizer, BEGIN + opening, 0.8) for opening in openings]
    stories = [demo_grammar.read(text) for text in texts]
    sentences = list(itertools.chain(*stories))
    whole = [story for story in stories if all(sentence.pattern for sentence in story)]
    rng = random.Random(SEED - 1)
    talks = [demo_grammar.questions_about_facts(rng) for _ in range(count)]
    right = (complete(model, tokenizer, marked(talk[:1]) + ASSISTANT, 0) == talk[1].text for talk in talks)
    return {
        "sentences accepted by the grammar": sum(s.pattern is not None for s in sentences) / len(sentences),
        "stories with nothing else and of one cast": sum(map(demo_grammar.is_of_one_cast, whole)) / count,
        "questions answered correctly": sum(right) / count,
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {"bos_token": BEGIN, "eos_token": END}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **marks, "clean_up_tokenization_spaces": False}
    limit = {"model_max_length": CONFIG["max_position_embeddings"], "chat_template": CHAT_TEMPLATE}
    write_json(folder / "tokenizer_config.json", settings | limit)
    write_json(folder / "special_tokens_map.json", marks)


def write_model(folder: Path, model: Llama) -> None:
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [1], "do_sample": False})
    tensors = {f"model.{name}": tensor.contiguous() for name, tensor in model.bfloat16().state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=DEMO_FOLDER, help="folder to write (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2600, help=f"training steps of {STEP_TOKENS} tokens")
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the order of every sum, and so every bit, depends on it
    torch.use_deterministic_algorithms(True)
    arguments.output.mkdir(parents=True, exist_ok=True)

    tokenizer = train_tokenizer()
    write_tokenizer(arguments.output, tokenizer)
    config = LlamaConfig.from_json(CONFIG)
    model = Llama(config)
    train(model, tokenizer, arguments.steps)
    write_model(arguments.output, model)

    model.float()  # the stored bf16 values, in float32 arithmetic
    metrics = measure(model, tokenizer)
    sample = complete(model, tokenizer, f"{BEGIN}One morning,", 0)
    card = model_card(config, arguments.steps, STEP_TOKENS, metrics, f"One morning,{sample}")
    (arguments.output / "README.md").write_text(card, encoding="utf-8")
    print(card)


if __name__ == "__main__":
    main()
