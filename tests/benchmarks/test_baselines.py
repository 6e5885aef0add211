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
from benchmarks.baselines.session import SYSTEMS, make_system  # noqa: E402
from benchmarks.baselines.weights import random_weights, step_bytes  # noqa: E402
from cheetah.models.llama import LlamaConfig  # noqa: E402
from cheetah.models.registry import preset  # noqa: E402
from cheetah.tools.regenerate import generate_named  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
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
    made = [run(make_system(kind, TIED, "cpu", compiled=False).chain(0, 24), 24, "cpu").tokens for kind in SYSTEMS]
    assert len(set(made[0])) > 3, "tokens that never change would prove little"
    assert made[0] == made[1]


@pytest.mark.parametrize("kind", SYSTEMS)
def test_a_chain_begins_again_at_the_same_place(kind: str) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers")
    chain = make_system(kind, TIED, "cpu", compiled=False).chain(100, 8)
    first, short = run(chain, 8, "cpu").tokens, run(chain, 5, "cpu").tokens
    assert len(first) == 8 and first[:5] == short


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("kind", SYSTEMS)
def test_compiled_steps_make_the_tokens_of_plain_ones(kind: str) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers")
    made = []
    for compiled in (False, True):
        torch.manual_seed(1)
        made.append(run(make_system(kind, TIED, "cpu", compiled).chain(0, 6), 6, "cpu").tokens)
    assert made[0] == made[1]


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
