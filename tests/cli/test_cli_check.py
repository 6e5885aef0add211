"""`cheetah check`, and one kernel by itself: a right kernel passes, wrong ones are found, each in its way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from commands import cheetah, refused

from cheetah.cli.check import shrunk
from cheetah.emulator import SCHEDULERS
from cheetah.errors import CheetahError
from cheetah.generate import generate_kernel
from cheetah.models.llama import LlamaConfig
from cheetah.models.registry import preset
from cheetah.package import Generated
from cheetah.runtime.checkpoint.random_weights import random_tensors
from cheetah.tools import check, step_course
from cheetah.tools.check import Case, Verdict, _step_makers, explored, find_races, raced
from cheetah.tools.judged_steps import JudgedSteps
from cheetah.tools.rig import Rig
from cheetah.tools.subjects import Subject, awkward_subject
from tests.program.joined import choose, joined

pytestmark = pytest.mark.compiler

CONFIG = LlamaConfig(72, 104, 2, 4, 2, 64, 300, max_position_embeddings=96)
SUBJECT = Subject("a small model", CONFIG, random_tensors(CONFIG))


@cache
def generated(gpu: str = "emulator-2") -> Generated:
    return generate_kernel(CONFIG, gpu)


def changed(kernel: Generated, pattern: str, replacement: str) -> Generated:
    """The kernel with the first match of `pattern` replaced, and a manifest that fits."""
    text, count = re.subn(pattern, replacement, kernel.text, count=1)
    assert count == 1, f"the kernel has no {pattern}"
    return kernel.with_text(text)


def check_kernel(
    made: Generated, subject: Subject, seeds: int, schedulers: Sequence[str] = SCHEDULERS, *, sanitizer: bool
) -> Verdict:
    """One kernel under every scheduler with so many seeds, and once under the race detector."""
    case = Case(subject, (made,), JudgedSteps)
    verdict = explored(case, case.launches(watched=True), seeds, schedulers)
    return replace(verdict, race=raced(case, case.launches(sanitize=True)).race) if sanitizer else verdict


def checked(kernel: Generated, seeds: int = 2, sanitizer: bool = False) -> Verdict:
    return check_kernel(kernel, SUBJECT, seeds, sanitizer=sanitizer)


WRONG = {
    "a wait for ever": (r"layer_epoch - 1\b", "layer_epoch + 1"),
    "a count": (r"status\[0\] = [^;]*;", "status[0] = 99;"),
}


@cache
def right_and_wrong() -> Generated:
    """The kernel as it is and the wrong ones, in one text that is compiled once."""
    return joined(generated(), [changed(generated(), *change) for change in WRONG.values()])


def checked_as(name: str, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """What is said of one of the wrong ones."""

    def rig(*arguments: Any, **options: Any) -> Rig:
        made = Rig(*arguments, **options)
        choose(made, [*WRONG].index(name) + 1)
        return made

    monkeypatch.setattr(check, "Rig", rig)
    return checked(right_and_wrong(), seeds=1)


@pytest.mark.exhaustive
def test_a_right_kernel_passes() -> None:
    """Without the command, of which `make test` has it."""
    verdict = checked(generated(), seeds=1)
    assert verdict.ok, str(verdict)
    assert verdict.exploration is not None and verdict.agreement is not None and verdict.exploration.runs == 3
    assert 0 < verdict.agreement.error < verdict.agreement.tolerance and not verdict.findings


@pytest.mark.exhaustive
def test_wrong_arithmetic_disagrees_with_float32() -> None:
    """Without the command, which `make test` has find the same."""
    verdict = checked(changed(generated(), r"1\.0f \+ exp_f32\(-", "2.0f + exp_f32(-"), seeds=1)
    assert verdict.exploration.ok and not verdict.ok
    assert "from float32, allowed is" in "".join(verdict.findings)


@pytest.mark.slow
def test_a_wait_for_what_never_comes_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report names the function that each waits in, and the phase that each block had reached."""
    verdict = checked_as("a wait for ever", monkeypatch)
    assert not verdict.ok and verdict.agreement is None and verdict.exploration is not None
    assert {failure.kind for failure in verdict.exploration.failures} == {"Deadlock"}
    (found, *_) = verdict.findings
    assert re.search(r"decode_step\.cu:\d+ \(sum_of_lane(_in_1)?\)", found)
    assert "reached: blocks 0-1: step 0, phase layer 0 qkv" in found


@pytest.mark.exhaustive
def test_a_missing_wait_gives_other_bits_or_a_misuse() -> None:
    verdict = checked(changed(generated(), r"mbarrier_wait\(full \+ use_stage, use_parity\);", ""), seeds=3)
    assert not verdict.exploration.ok, str(verdict)


@pytest.mark.slow
def test_a_wrong_count_of_steps_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = checked_as("a count", monkeypatch)
    assert verdict.exploration is not None
    assert {failure.kind for failure in verdict.exploration.failures} == {"KernelFault"}


@pytest.mark.exhaustive
def test_the_race_detector_runs_on_the_same_launches() -> None:
    config = LlamaConfig(16, 16, 1, 1, 1, 64, 16, max_position_embeddings=96)
    right = generate_kernel(config, "emulator-2", consumer_warps=2, stage_bytes=4096)
    subject = Subject("a tiny model", config, random_tensors(config))
    wrong = changed(right, r"mbarrier_wait\(full \+ use_stage, use_parity\);", "")
    verdict = check_kernel(right, subject, 1, ("random",), sanitizer=True)
    assert verdict.ok and verdict.race == "", str(verdict)
    assert find_races(JudgedSteps(Rig(subject.weights, wrong, sanitize=True))).startswith("Race: race")


@pytest.mark.exhaustive
def test_the_command_checks_the_demo_model_as_it_is() -> None:
    result = cheetah("check", "demo", "--seeds", "1", "--schedulers", "round_robin,random", "--no-sanitizer")
    assert result.exit_code == 0, result.output
    assert "checking demo: an awkward small model of its kind (hidden 72, ffn 296, vocab 148" in result.stdout
    assert "checking demo: the whole model\nschedules: 2 launches, no error, the same bits in all" in result.stdout
    assert "kernels looked at have: a cache in 8 bits, a cache in 8 bits, in passes, a single" in result.stdout
    assert result.stdout.endswith("verdict: nothing found\n")


@pytest.mark.exhaustive
def test_the_command_checks_steps_that_two_gpus_make_together() -> None:
    which = ("--seeds", "1", "--schedulers", "random", "--no-sanitizer")
    result = cheetah("check", "demo", "--gpu", "emulator-2", "--tensor-parallel-size", "2", *which)
    assert result.exit_code == 0, result.output
    assert "checking demo: an awkward small model of its kind (hidden 88, ffn 304, vocab 148" in result.stdout
    assert "checking demo: one with a cache in 8 bits of its kind" in result.stdout
    assert "checking demo: passes over prompts, one of many tokens" in result.stdout
    assert result.stdout.endswith("verdict: nothing found\n")


@pytest.mark.exhaustive
def test_steps_of_two_gpus_of_which_one_hears_nothing_of_the_other_are_found() -> None:
    """As the check runs them: the awkward model, shared out."""
    subject = awkward_subject(
        LlamaConfig(64, 64, 2, 2, 2, 64, 64, max_position_embeddings=128), {"max_context": 96}, ranks=2
    )
    right = generate_kernel(subject.config, "emulator-2x2", **subject.plan)
    wrong = changed(right, r"publish_flagged_sys\(.*peer_1.*;", ";")
    verdict = check_kernel(wrong, subject, 1, ("random",), sanitizer=False)
    assert verdict.exploration is not None
    assert {failure.kind for failure in verdict.exploration.failures} == {"Deadlock"}
    assert any("rank 1, block 0: " in found for found in verdict.findings)


@pytest.mark.slow
def test_what_no_kernel_has_that_the_named_plan_has_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The awkward model's alone are looked at, whose pages are runs of few tokens."""
    monkeypatch.setattr("cheetah.tools.check._MAKERS", {"steps": awkward_alone, "passes": lambda subject, gpu: []})
    result = cheetah("check", "qwen3-0.6b", "--seeds", "1", "--schedulers", "random", "--no-sanitizer")
    assert result.exit_code == 1 and "of the model's plan on an H200 no kernel had: " in result.stdout
    for name in ("registers moved between roles", "whole pages", "passes over prompts"):
        assert name in result.stdout.splitlines()[-2], name
    assert result.stdout.endswith("verdict: INCOMPLETE\n")


def awkward_alone(subject: Subject, gpu: str) -> list[Any]:
    return _step_makers(subject, gpu)[:1]


@pytest.mark.slow
def test_the_command_ends_with_1_if_something_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first wrong verdict, where the fault is, and the text that it is in."""

    def broken(*arguments: object, **options: object) -> Generated:
        return changed(generate_kernel(*arguments, **options), r"1\.0f \+ exp_f32\(-", "2.0f + exp_f32(-")

    monkeypatch.setattr("cheetah.tools.check.generate_kernel", broken)
    result = cheetah("check", "demo", "--first", "--schedulers", "round_robin")
    assert result.exit_code == 1 and "from float32" in result.stdout and result.stdout.count("checking demo") == 1
    assert "first off: layer 0, phase gate_up: gated of position" in result.stdout
    (text,) = (line.removeprefix("the kernel: ") for line in result.stdout.splitlines() if "the kernel: " in line)
    assert "2.0f + exp_f32(-" in Path(text).read_text()
    assert result.stdout.endswith("verdict: WRONG\n")


def test_each_run_is_told_as_it_begins_and_how_long_all_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter((0.0, 2.0))
    monkeypatch.setattr(check.time, "monotonic", lambda: next(moments))
    said = list[str]()
    clock = check._Clock(4, said.append)
    for seed in range(2):
        clock.of("an awkward small model")(f"random, seed {seed}")
    assert said == [
        "an awkward small model: random, seed 0",
        "an awkward small model: random, seed 1; about 6 s left",
    ]


OPTIONS = (
    "--kv-chunk 16 --batch 2 --kv-dtype e4m3",
    "--sync barrier --batch 4",
    "--kv-dtype e4m3",
    "--batch 4 --tokens 8 --page-size 5",
    "--stages 6 --in-flight 2",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", OPTIONS)
def test_a_right_kernel_passes_with_every_option_of_the_plan(options: str) -> None:
    result = cheetah("check", "demo", "--seeds", "1", "--schedulers", "random", "--no-sanitizer", *options.split())
    assert result.exit_code == 0 and result.stdout.endswith("verdict: nothing found\n"), result.output


@pytest.mark.slow
def test_an_error_of_the_checker_is_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise CheetahError("the checker is wrong")

    monkeypatch.setattr(step_course.CourseRun, "_fill", fail)
    with pytest.raises(CheetahError, match="the checker is wrong"):
        checked(right_and_wrong(), seeds=1)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"])
def test_shrinking_keeps_the_kind(name: str) -> None:
    config = preset(name)
    small = shrunk(config)
    assert (small.head_dim, small.group, small.rope) == (config.head_dim, config.group, config.rope)
    assert small.parameter_count < 2e6 and small.layers == 2


def test_shrinking_keeps_the_padding() -> None:
    odd = LlamaConfig(4104, 11000, 32, 32, 8, 128, 32003)
    small = shrunk(odd)
    for name in ("hidden_size", "intermediate_size", "vocab_size"):
        assert getattr(small, name) % 32 == getattr(odd, name) % 32


def test_a_small_model_stays_as_it_is() -> None:
    assert shrunk(CONFIG) == CONFIG


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "h200"), "check runs in the emulator: choose one of emulator"),
        (("--schedulers", "random,fair"), "no scheduler fair: there are round_robin, random, priority"),
        (("--max-context", "8"), "needs max_context and max_steps of at least"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_checked_is_refused(arguments: tuple[str, ...], words: str) -> None:
    result = refused("check", "demo", "--first", "--no-sanitizer", *arguments)
    assert words in result
