"""`cheetah tune`: the search on made-up times, the whole command in the emulator, and what is then used, and when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import cheetah, refused

from cheetah import manifest
from cheetah.errors import CheetahError
from cheetah.generate import choose_plan
from cheetah.models.registry import preset
from cheetah.plan import Plan, gpu_named
from cheetah.runtime.assembly.kernels import shared_buffers
from cheetah.runtime.assembly.sources import sources_of
from cheetah.runtime.assembly.tuned import GENERATOR, SEARCHED, TunedPlan, generator_hash, stored_plan, with_tuned
from cheetah.runtime.device import open_device
from cheetah.tools.plan_variants import Variants, open_variants
from cheetah.tools.tune import MARGIN, Space, choice_of, chosen, descend

CONFIG, H200 = preset("llama-3.1-8b"), gpu_named("h200")
SPACE = Space(CONFIG, H200, {"max_context": 8192})
QUICK = ("--device", "emulator", "--contexts", "5", "--steps", "2", "--repetitions", "1", "--search", "sync")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No record of the user's is read, and none is written."""
    monkeypatch.setattr("cheetah.runtime.assembly.tuned.cache_folder", lambda: tmp_path)
    return tmp_path


def record(**changes: Any) -> TunedPlan:
    plan: dict[str, int | str] = {"stage_bytes": 8192, "in_flight": 2, "sync": "barrier"}
    shape = preset("demo").shape.describe()
    demo = TunedPlan("demo", shape, "emulator", "emulator", generator_hash(), "c", plan, {}, {})
    return replace(demo, **changes)


def used(plan: dict[str, Any], device: str | None = "emulator") -> tuple[dict[str, Any], str]:
    """(what a kernel is then made with, what was said)."""
    said: list[str] = []
    return with_tuned(preset("demo"), gpu_named("emulator"), device, plan, said.append), "\n".join(said)


class Times:
    """Made-up times: a cost for every field's value, and a count of what was measured."""

    def __init__(self, **best: Any) -> None:
        self.best = best
        self.groups: list[list[Plan]] = []

    def __call__(self, plans: Sequence[Plan]) -> list[float]:
        self.groups.append(list(plans))
        return [1 + sum(0.1 for name, value in self.best.items() if getattr(plan, name) != value) for plan in plans]


@pytest.mark.parametrize(
    "best",
    [
        {"stage_bytes": 32768, "in_flight": 3},
        {"stage_bytes": 8192, "in_flight": 12, "sync": "barrier", "kv_chunk_min": 64},
        {"consumer_warps": 4, "kv_chunk_min": 512, "in_flight": 6},
        {},
    ],
)
def test_the_descent_finds_the_best_of_separable_times(best: dict[str, Any]) -> None:
    times = Times(**best)
    winner = descend(SPACE, times)
    assert {name: getattr(winner, name) for name in best} == best
    assert {len({plan.stage_bytes for plan in group}) for group in times.groups} <= {1, 2, 3}
    if not best:
        assert winner == SPACE.rule and len(times.groups) == len(SEARCHED)  # one pass, and nothing measured twice


def test_groups_begin_with_the_best_so_far() -> None:
    times = Times(sync="barrier")
    descend(SPACE, times)
    assert times.groups[0][0] == SPACE.rule
    assert all(len(set(group)) == len(group) > 1 for group in times.groups)


def test_what_no_machine_can_run_is_left_out() -> None:
    """16 consumer warps take 16 KB at least, so that 8 KB stages have 8 or 4."""
    small = choose_plan(CONFIG, H200, max_context=8192, stage_bytes=8192)
    assert {plan.consumer_warps for plan in SPACE.around(small, "consumer_warps")} == {4}
    assert {plan.consumer_warps for plan in SPACE.around(SPACE.rule, "consumer_warps")} == {4, 16}


def test_stages_of_another_size_keep_the_bytes_in_flight() -> None:
    plans = SPACE.around(SPACE.rule, "stage_bytes")
    assert {plan.stage_bytes for plan in plans} == {8192, 32768}
    assert {plan.stage_bytes * plan.in_flight for plan in plans} == {SPACE.rule.stage_bytes * SPACE.rule.in_flight}


def test_the_first_of_a_group_stays_unless_another_is_clearly_faster() -> None:
    group = [SPACE.rule, replace(SPACE.rule, sync="barrier")]
    assert chosen(group, [1.0, 1 - MARGIN / 2]) == group[0]
    assert chosen(group, [1.0, 1 - 2 * MARGIN]) == group[1]
    assert chosen(group, [1.0, float("inf")]) == group[0]


def test_unknown_field() -> None:
    with pytest.raises(CheetahError, match="--search stages: choose from stage_bytes"):
        Space(CONFIG, H200, {}, ("stages",))


@pytest.mark.exhaustive
@pytest.mark.compiler
def test_the_emulator_ranks_and_stores_nothing(cache: Path) -> None:
    result = cheetah("tune", "demo", *QUICK)
    assert result.exit_code == 0
    assert "emulated times are not speeds" in result.stdout and "nothing stored" in result.stdout
    assert result.stdout.count("barrier") == 1 and result.stdout.count("winner") == 1
    assert not (cache / "tuned").exists()


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.usefixtures("kernels_made_once")
def test_a_stored_winner_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The barrier is made to win, so that what is used differs from the rule."""
    plain = Variants._launch

    def launch(self: Variants, variant: Any, context: int) -> float:
        plain(self, variant, context)
        return 1.0 if variant.plan.sync == "barrier" else 2.0

    monkeypatch.setattr(Variants, "_launch", launch)
    result = cheetah("tune", "demo", *QUICK, "--store")
    (path,) = (cache / "tuned").iterdir()
    stored = json.loads(path.read_text())
    assert f"stored the winner: {path}" in result.stdout
    assert (stored["plan"]["sync"], stored["ms_per_step"], stored["rule_ms_per_step"]) == (
        "barrier",
        {"5": 1},
        {"5": 2},
    )

    run = ("run", "demo", "One", "--device", "emulator", "--max-tokens", "1")
    assert "plan tuned for emulator: stage_bytes 4096, in_flight 3" in cheetah(*run).stderr
    assert "tuned" not in cheetah(*run, "--no-tuned").stderr
    assert "tuned" not in cheetah(*run, "--sync", "flags").stderr
    assert "demo-emulator-sync-barrier.cu" in cheetah("generate", "demo", "--gpu", "emulator", "-o", cache).stdout
    bench = ("bench", "random:demo", "--device", "emulator", "--contexts", "5", "--steps", "1", "--json", "-")
    assert json.loads(cheetah(*bench).stdout)["plan"]["sync"] == "barrier"
    assert json.loads(cheetah(*bench, "--no-tuned").stdout)["plan"]["sync"] == "flags"


@pytest.mark.slow
@pytest.mark.compiler
def test_scales_of_cached_keys_belong_to_all_plans() -> None:
    """Left to each plan's kernel they would be poison, and all its attention NaN."""
    config, device, gpu = preset("demo"), open_device("emulator"), gpu_named("emulator")
    with open_variants(config, "demo", device, gpu, contexts=(5,), steps=2, repetitions=1) as variants:
        variants.room["kv_dtype"] = "e4m3"
        rule = choose_plan(config, gpu, **variants.room)
        variants.fill(rule)
        variants.variant(rule)
        assert all("kv_scales" not in own for own in variants._own)
        assert set(variants._shared) == set(shared_buffers(config))
        scales = variants._shared["kv_scales"]
        assert (scales.download(np.float32, scales.nbytes // 4) == 1).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--contexts", "x"), "--contexts x: expected numbers of tokens"),
        (("demo", "--contexts", "512"), "context 512 and 16 steps: the model has positions for 512 tokens"),
        (("demo", "--search", "sync,pages"), "--search pages: choose from"),
        (("nowhere/model/at-all",), "nowhere/model/at-all"),
    ],
)
def test_refusals(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused("tune", *arguments, "--device", "emulator")


def test_a_record_is_used_beside_what_it_does_not_depend_on() -> None:
    record().store()
    plan, said = used({"max_context": 128, "page_size": 32, "sync": None})
    assert plan == {"max_context": 128, "page_size": 32, **record().plan}
    assert said.startswith("plan tuned for emulator: stage_bytes 8192, in_flight 2, sync barrier (--no-tuned")


@pytest.mark.parametrize("field", ["stage_bytes", "stages", "batch", "kv_align", "consumer_warps"])
def test_another_field_puts_it_aside(field: str) -> None:
    record().store()
    assert used({field: 1}) == ({field: 1}, "")


def test_another_device_or_shape_puts_it_aside() -> None:
    record(device="emulator of another make").store()
    assert used({}) == ({}, "")
    assert used({}, device=None)[0]
    assert stored_plan(CONFIG, H200) is None


def test_other_sources_put_it_aside_and_it_is_said() -> None:
    record(generator="0" * 16).store()
    plan, said = used({})
    assert plan == {} and "from other sources and is not used: run cheetah tune again" in said


def edited(**changes: Any) -> bytes:
    return json.dumps({**asdict(record()), **changes}).encode()


DAMAGED = {
    "empty": (b"", "cannot be read as JSON"),
    "list": (b"[]", "holds a JSON list, expected an object"),
    "string": (b'"plan"', "holds a JSON str, expected an object"),
    "nested": (b"[" * 90_000, "nested too deeply"),
    "no text": (b"\xff", "is not UTF-8 text"),
    "large": (b" " * 200_000, "has 200000 bytes, at most 100000 are read"),
    "nothing in it": (b"{}", "missing field model, shape, gpu"),
    "more in it": (edited(more=1), "unknown field more"),
    "plan is a list": (edited(plan=[]), ".plan must be of type dict, not list"),
    "plan of lists": (edited(plan={"stage_bytes": [8192]}), ".plan.stage_bytes has the wrong type list"),
    "plan of words": (edited(plan={"stage_bytes": "8192"}), "Plan: stage_bytes is '8192': give a whole number"),
    "plan of no machine": (edited(plan={"in_flight": 10**9}), "Plan: in_flight"),
    "other fields": (edited(plan={"max_context": 8}), "has fields of a plan that are not searched: ['max_context']"),
    "another model": (edited(shape={"layers": 1}), "is for another model: {'layers': 1}"),
    "a time is a word": (edited(ms_per_step={"5": "\x1b[2J"}), ".ms_per_step.5 must be of type float, not str"),
    "an escape": (edited(plan={"\x1b[2J": 1}), "['\\x1b[2J']"),
}


@pytest.mark.parametrize(("data", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_counts_as_none_with_a_note(data: bytes, reason: str) -> None:
    path = record().store()
    assert used({})[0]
    path.write_bytes(data)
    plan, said = used({})
    assert plan == {} and said.startswith(f"a tuned plan is not used: {path}" if "Plan" not in reason else "a tuned")
    assert reason in said and said.isprintable()


@pytest.mark.parametrize("target", ["/dev/zero", "pipe", "folder", "nowhere"])
def test_what_is_no_file_counts_as_none_with_a_note(cache: Path, target: str) -> None:
    path = record().store()
    path.unlink()
    os.mkfifo(cache / "pipe")
    (cache / "folder").mkdir()
    path.symlink_to(target if target.startswith("/") else cache / target)
    plan, said = used({})
    assert plan == {} and f"{path}: cannot be read: " in said


@pytest.mark.slow
def test_the_hash_of_sources_holds_all_that_the_generator_loads() -> None:
    """Asked of Python itself, after a kernel was generated and every family had its program."""
    program = (
        "import sys\nfrom cheetah.generate import generate_kernel\n"
        "from cheetah.models.registry import FAMILIES, preset\n"
        "generate_kernel(preset('demo'), 'emulator')\nprograms = [family.program for family in FAMILIES.values()]\n"
        "print(*(name for name in sys.modules if name.partition('.')[0] == 'cheetah'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    hashed = sources_of(GENERATOR, Path(manifest.__file__).parent)
    assert set(done.stdout.split()) - set(hashed) == set()
    assert {name for name in hashed if name.startswith(("cheetah.runtime", "cheetah.cli", "cheetah.emulator"))} == set()
    for path in hashed.values():
        assert path.is_file()


def test_a_record_holds_what_is_searched() -> None:
    assert tuple(choice_of(SPACE.rule)) == SEARCHED
