"""The studies from end to end in the emulator: what they check, what they write, what the tables say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.studies import __main__ as command
from benchmarks.studies import linear, measuring, model, paper, ring, stacks
from benchmarks.studies.linear import Network
from benchmarks.studies.measuring import WARMUP, Study, StudyError, in_graph, require_close
from benchmarks.studies.report import report
from benchmarks.studies.stacks import StackReference
from benchmarks.studies.step_kernels import OnePhase, Piece
from cheetah import lang as ch
from cheetah.lang import ty
from cheetah.plan import M_TILE_ROWS
from cheetah.runtime.device.driver import DriverError
from cheetah.runtime.device.emulator import EmulatorDevice
from tests.tiers import tiered

pytestmark = pytest.mark.slow

Records = list[dict[str, Any]]
ROUNDING = 0.015
"""Largest error that rounding to bf16 explains (seen: 0.009)."""


def tiny(run: Callable[[Study], None], scheduler: str | None = None) -> Records:
    """The records of a study with small sizes."""
    records: Records = []
    device = EmulatorDevice(scheduler=scheduler, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "WARMUP", 0)  # nothing is warm here
        run(Study(run.__module__.rpartition(".")[2], device, records.append, repetitions=2, tiny=True))
    return records


@pytest.mark.compiler
def test_linear_writes_a_record_of_every_variant_and_depth() -> None:
    records = tiny(linear.run)
    assert len(records) == len(linear.TINY_SIZES) * len(linear.TINY_DEPTHS) * 5
    for record in records:
        case = record["case"]
        padded = -(-case["size"] // 32) * 32
        assert record["bytes"] == case["layers"] * case["size"] * padded * 2
        assert len(record["ms_samples"]) == 2 and record["ceiling_gb_per_s"] is None


@pytest.mark.slow
@pytest.mark.compiler
def test_a_stack_agrees_with_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of GLU blocks alone, for which there are no contexts."""
    monkeypatch.setattr(stacks, "TINY_CONTEXTS", ())
    monkeypatch.setattr(stacks, "TINY_DEPTHS", (2,))
    records = tiny(stacks.run)
    assert len(records) == 2 and all(0 < record["relative_error"] < ROUNDING for record in records)


@pytest.mark.exhaustive
@pytest.mark.compiler
@pytest.mark.parametrize("scheduler", ["random", "priority"])
def test_stacks_agree_with_float32_and_with_each_other(scheduler: str) -> None:
    records = tiny(stacks.run, scheduler)
    assert {record["case"]["stack"] for record in records} == {"attention", "glu"}
    assert all(0 < record["relative_error"] < ROUNDING for record in records)


@pytest.mark.exhaustive
@pytest.mark.compiler
def test_a_vector_that_every_thread_reads_is_waited_for_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole warps wait before they poll: in a stack, for the layer before."""
    monkeypatch.setattr(stacks, "TINY", replace(stacks.TINY, hidden_size=1024, vocab_size=16))
    monkeypatch.setattr(stacks, "TINY_CONTEXTS", (5,))
    assert all(0 < record["relative_error"] < ROUNDING for record in tiny(stacks.run))


@pytest.mark.compiler
def test_the_unfused_step_makes_the_fused_kernel_s_logits() -> None:
    assert [record["relative_error"] for record in tiny(model.run)] == [0.0] * 4


@pytest.mark.exhaustive
@pytest.mark.compiler
def test_every_ring_that_fits_is_measured() -> None:
    assert [record["system"] for record in tiny(ring.run)] == [
        "8 x 4 KB, 3 in flight",
        "2 x 4 KB, 1 in flight",
        "4 x 8 KB, 2 in flight",
    ]


# -- what is wrong is not timed ---------------------------------------------------------------------------------------


@pytest.mark.compiler
def test_a_chain_with_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Network.expected
    monkeypatch.setattr(Network, "expected", lambda self, first, depth: right(self, first + 1, depth))
    with pytest.raises(StudyError, match="unfused, 1 layers of 64: relative error .* nothing was timed"):
        tiny(linear.run)


@pytest.mark.compiler
@pytest.mark.parametrize("kind", tiered([Piece, OnePhase], [Piece]))
def test_a_stack_that_skips_its_residual_is_found(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_with_nothing(self: Any, *arguments: Any) -> None:
        right(self, *arguments)
        with ch.if_(self.machine.thread < M_TILE_ROWS):
            self.machine.region("residual", ty.f32)[self.machine.thread] = 0.0

    right = kind.publish_embeddings
    monkeypatch.setattr(kind, "publish_embeddings", start_with_nothing)
    with pytest.raises(StudyError):
        tiny(stacks.run)


@pytest.mark.compiler
def test_a_stack_is_compared_with_the_right_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    right = StackReference.output
    monkeypatch.setattr(StackReference, "output", lambda self, stack, context: right(self, "attention", context))
    with pytest.raises(StudyError, match="unfused stack glu, 2 layers"):
        tiny(stacks.run)


def test_errors_that_are_no_numbers_are_refused() -> None:
    good = np.ones(4, np.float32)
    assert require_close("x", good, good) == 0
    with pytest.raises(StudyError, match="x: relative error nan"):
        require_close("x", np.full(4, np.nan, np.float32), good)
    with pytest.raises(StudyError, match="x: relative error 0.03"):
        require_close("x", good * 1.03, good)


# -- timing -----------------------------------------------------------------------------------------------------------


class GraphDevice:
    """Captures by running the work once; refuses if told so."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def capture(self, work: Callable[[], None]) -> Any:
        if self.refuses:
            raise DriverError("cuStreamEndCapture", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: not in a graph")
        work()
        return type("Graph", (), {"launch": staticmethod(lambda: None)})


def test_work_that_cannot_be_captured_is_launched_as_it_is() -> None:
    calls: list[int] = []
    captured = in_graph(GraphDevice(refuses=False), lambda: calls.append(1))
    captured()
    assert captured.from_graph and calls == [1]  # while it was captured
    direct = in_graph(GraphDevice(refuses=True), lambda: calls.append(2))
    direct()
    assert not direct.from_graph and calls == [1, 2]


def test_variants_take_turns_and_warm_up_is_not_counted() -> None:
    study = Study("linear", EmulatorDevice(), lambda record: None, repetitions=3)
    order: list[str] = []
    samples = study._samples({"a": lambda: order.append("a"), "b": lambda: order.append("b")})
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}
    assert len(order) == 2 * 2 * (3 + WARMUP)  # one launch before each that is timed
    assert order[:8] == list("bbaaaabb")


# -- the command and the tables ---------------------------------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.exhaustive
def test_a_study_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "STUDIES", {"no-such-study": ring.run, "ring": ring.run})
    file = tmp_path / "studies.jsonl"
    assert command.main(["all", "--device", "emulator", "--repetitions", "1", "--json", str(file)]) == 1
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == 3
    out, err = capfd.readouterr()
    assert "failed: no-such-study" in err and out.startswith("## Depth and stage size of the ring")
    assert command.main(["report", str(file)]) == 0
    assert capfd.readouterr().out == out


def record(study: str, case: dict[str, Any], system: str, ms: float, **more: Any) -> dict[str, Any]:
    usual = {"clocks": {"sm_mhz": 1980.0}, "gpu": "H200", "driver": "CUDA 13", "commit": "abc", "repetitions": 20}
    rates = {"gb_per_s": 1.0, "ceiling_gb_per_s": 4700.0, "share": 0.5, "bytes": 15_010_000_000}
    return {"study": study, "case": case, "system": system, "ms": ms, **usual, **rates, **more}


def test_tables_put_variants_side_by_side_and_the_last_record_counts() -> None:
    case = {"size": 4096, "layers": 4}
    text = report(
        [
            record("linear", case, "unfused", 0.9),
            record("linear", case, "fused, overlap", 0.02),
            record("linear", case, "unfused", 0.05, share=0.25),
        ]
    )
    assert "| size | layers | unfused | fused, overlap | overlap / unfused |" in text
    assert "| 4096 | 4 | 50.0 us (25.0%) | 20.0 us (50.0%) | 2.50 |" in text
    assert "H200; CUDA 13; commit abc; sm_mhz 1980; ceiling 4700 to 4700 GB/s in the same run; medians of 20" in text


def test_the_paper_s_figure_stands_only_where_there_is_one() -> None:
    cases = [{"model": name, "context": 128} for name in ("llama-3.1-8b", "llama-3.2-1b")]
    text = report([record("model", case, "fused, overlap", 3.4) for case in cases])
    assert "| llama-3.1-8b | 128 | 294 (50.0%) |  | 168 / 146 / 184 (82.4%) |" in text
    assert "| llama-3.2-1b | 128 | 294 (50.0%) |  |  |" in text


def test_the_paper_s_batches_are_in_the_results() -> None:
    """Figures of others are copied once; the page is held to them."""
    page = (Path(__file__).parents[2] / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    for (sequences, prompt), figures in paper.BATCH_TOKENS_PER_S.items():
        assert f"| {sequences} x {prompt} | {' | '.join(map(str, figures))} |" in page


def test_the_tables_that_are_kept_are_those_of_the_records() -> None:
    """With the paper's figures in a column of their own."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    records = command.read_records([results / "2026-11-21-h200-studies.jsonl"])
    text = report(records)
    assert text + "\n" == (results / "2026-11-21-h200-studies.md").read_text(encoding="utf-8")
    assert "| 4096 | 32 | 311.3 us" in text and "| 675 us / 423 us / 423 us |" in text
    assert not any("paper" in record["system"] for record in records)


def test_attention_s_benchmark_begins() -> None:
    """Its launches need a GPU; its imports and its options do not."""
    script = Path(__file__).parents[2] / "benchmarks" / "attention.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
