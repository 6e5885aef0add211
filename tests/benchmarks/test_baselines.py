"""The baselines on the CPU: the plain model agrees with transformers, and both decode the same tokens, compiled or not.

Everything here needs torch, and most of it transformers: neither is a development dependency.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.baselines import plain_llama  # noqa: E402
from benchmarks.baselines.chain import run  # noqa: E402
from benchmarks.baselines.session import Session, make_system  # noqa: E402
from benchmarks.baselines.weights import random_weights, step_bytes  # noqa: E402
from cheetah.errors import CheetahError  # noqa: E402
from cheetah.models.llama import LlamaConfig  # noqa: E402
from cheetah.models.registry import preset, resolve_config  # noqa: E402
from cheetah.tools.regenerate import generate_named  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
OF_TESTS = ("plain", "transformers")
"""Systems that need nothing that their user fetches."""
TINY = {"hidden_size": 256, "intermediate_size": 512, "layers": 2, "query_heads": 8, "kv_heads": 2, "vocab_size": 512}


def tiny(like: str, head_dim: int) -> LlamaConfig:
    return dataclasses.replace(preset(like), **TINY, head_dim=head_dim)


TIED, UNTIED = tiny("llama-3.2-1b", 64), tiny("llama-3.1-8b", 128)


@pytest.mark.parametrize("config", [TIED, UNTIED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_model_agrees_with_transformers(config: LlamaConfig, dtype: Any) -> None:
    pytest.importorskip("transformers")
    from benchmarks.baselines.check import MOST_KL, agreement

    found = agreement(config, random_weights(config, "cpu", dtype), range(3, 99))
    assert found.kl < MOST_KL[dtype]
    assert found.same > 0.95


def test_a_wrong_rotation_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from benchmarks.baselines.check import MOST_KL, agreement

    monkeypatch.setattr(plain_llama, "rotate", lambda x, turn: x)
    found = agreement(TIED, random_weights(TIED, "cpu", torch.bfloat16), range(3, 99))
    assert found.kl > 4 * MOST_KL[torch.bfloat16]


def test_both_systems_make_the_same_tokens() -> None:
    pytest.importorskip("transformers")
    # A cache that begins empty, as random keys are other ones in each system.
    made = [run(make_system(kind, TIED, "cpu", compiled=False).chain(0, 24), 24, "cpu").tokens for kind in OF_TESTS]
    assert len(set(made[0])) > 3, "tokens that never change would prove little"
    assert made[0] == made[1]


@pytest.mark.parametrize("kind", OF_TESTS)
def test_a_chain_begins_again_at_the_same_place(kind: str) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers")
    chain = make_system(kind, TIED, "cpu", compiled=False).chain(100, 8)
    first, short = run(chain, 8, "cpu").tokens, run(chain, 5, "cpu").tokens
    assert len(first) == 8 and first[:5] == short


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("kind", OF_TESTS)
def test_compiled_steps_make_the_tokens_of_plain_ones(kind: str) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers")
    made = []
    for compiled in (False, True):
        torch.manual_seed(1)
        made.append(run(make_system(kind, TIED, "cpu", compiled).chain(0, 6), 6, "cpu").tokens)
    assert made[0] == made[1]


GPT_FAST = {
    "model.py": """
import dataclasses
import torch

@dataclasses.dataclass
class ModelArgs:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_local_heads: int
    dim: int
    intermediate_size: int
    norm_eps: float

class Transformer(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.embedding = torch.nn.Embedding(sizes.vocab_size, sizes.dim)
        self.output = torch.nn.Linear(sizes.dim, sizes.vocab_size, bias=False)

    def setup_caches(self, max_batch_size, max_seq_length):
        self.seen = torch.zeros(max_seq_length, self.embedding.weight.shape[1], dtype=torch.bfloat16)

    def forward(self, token, position):
        self.seen[position] = self.embedding(token[0])
        return self.output(self.seen[: int(position) + 1].sum(0)[None, None])
""",
    "tokenizer.py": "def get_tokenizer(): ...",
    "quantize.py": """
import torch
from model import Transformer
from tokenizer import get_tokenizer

class Int4(torch.nn.Module):
    def __init__(self, like, groupsize):
        super().__init__()
        self.in_features = like.in_features
        self.register_buffer("weight", torch.empty(like.out_features, like.in_features // 8, dtype=torch.int32))
        self.register_buffer("scales_and_zeros", torch.empty(like.in_features // groupsize, like.out_features, 2))

    def forward(self, x):
        codes = (self.weight[:, :, None] >> torch.arange(0, 32, 4)) & 15
        group = self.in_features // len(self.scales_and_zeros)
        scales, zeros = self.scales_and_zeros.permute(2, 1, 0).repeat_interleave(group, -1)
        return x @ ((codes.flatten(1) - 8) * scales + zeros).T.to(x.dtype)

class WeightOnlyInt4QuantHandler:
    def __init__(self, mod, groupsize, padding):
        assert isinstance(mod, Transformer) and not padding
        self.mod, self.groupsize = mod, groupsize

    def convert_for_runtime(self):
        self.mod.output = Int4(self.mod.output, self.groupsize)
        return self.mod
""",
}
"""What the recipe for gpt-fast knows of a clone, and no more."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name, text in GPT_FAST.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("format", "weights", "bytes_a_weight"), [
    ("", "bf16 random", 2.0), ("@int4-g128", "int4-g128 random, the head too", 0.53125),
])  # fmt: skip
def test_gpt_fast_is_measured_in_bf16_and_in_4_bits(
    clone: Path, format: str, weights: str, bytes_a_weight: float
) -> None:
    config = dataclasses.replace(resolve_config(f"llama-3.1-8b{format}"), **TINY, head_dim=64)
    session = Session("gpt-fast", config, "tiny", "cpu", compiled=False, told=None, say=lambda line: None, clone=clone)
    session.prepare(100, 8)
    record = session.measure(100, repetitions=2, warmup=0)
    chain = session.system.chain(100, 8)
    assert len(set(run(chain, 8, "cpu").tokens)) > 3, "tokens that never change would prove little"
    assert record["settings"]["same_tokens"] is True and record["weights"] == weights
    assert record["bytes_per_step"] == step_bytes(config, 100, bytes_a_weight)


def test_weights_that_a_system_is_not_measured_with_are_refused(clone: Path) -> None:
    fp8, int4 = (resolve_config(f"llama-3.1-8b@{format}") for format in ("fp8", "int4-g128"))
    with pytest.raises(CheetahError, match="plain: weights int4-g128"):
        make_system("plain", int4, "cpu")
    with pytest.raises(CheetahError, match="gpt-fast: weights fp8"):
        make_system("gpt-fast", fp8, "cpu", clone=clone)
    sys.modules.pop("tokenizer", None)
    (clone / "tokenizer.py").write_text("import nothing_of_that_name")
    with pytest.raises(CheetahError, match="requirements.txt"):
        make_system("gpt-fast", int4, "cpu", clone=clone)
    (clone / "quantize.py").unlink()
    with pytest.raises(CheetahError, match="has no quantize.py"):
        make_system("gpt-fast", int4, "cpu", clone=clone)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b"])
def test_bytes_are_counted_as_ours_are(name: str) -> None:
    config = preset(name)
    ours = generate_named(config, name, "h200", {}).manifest.step_bytes
    assert step_bytes(config, 128) == ours["weights"] + 128 * ours["kv_per_token"]


@pytest.mark.slow
def test_a_served_baseline_answers_records_and_errors() -> None:
    command = [sys.executable, "-m", "benchmarks.baselines", "plain", "random:demo", "--serve", "--eager"]
    command += ["--device", "cpu", "--contexts", "5", "--steps", "3", "--repetitions", "2", "--ceiling", "4700"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, input="5\n7\n5\n", capture_output=True, text=True, timeout=300
    )
    ready, first, error, second = (json.loads(line) for line in done.stdout.splitlines())
    assert ready == {"ready": [5]}
    assert "KeyError" in error["error"]
    for record in (first, second):
        assert (record["system"], record["context"], record["steps"]) == ("plain PyTorch + CUDA graphs", 5, 3)
        assert record["note"] == "on the CPU: not a speed"
        assert record["settings"]["same_tokens"] is True
        assert record["share"] == pytest.approx(record["gb_per_s"] / 4700, rel=1e-5)
        assert record["bytes_per_step"] == step_bytes(preset("demo"), 5)
        assert len(record["ms_per_step_samples"]) == 2
