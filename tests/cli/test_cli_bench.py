"""`cheetah bench` in the emulator: the records' fields and arithmetic; what it says is never called a speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from commands import cheetah, refused

from cheetah.cli.bench import parsed_works, usual_contexts
from cheetah.errors import CheetahError
from cheetah.generate import choose_plan
from cheetah.models.registry import preset
from cheetah.plan import gpu_named
from cheetah.runtime.device import open_device
from cheetah.runtime.device.emulator import EmulatorDevice
from cheetah.runtime.engine.launcher import Launcher, LaunchResult
from cheetah.tools.bench import DecodeBench, Measurement, Work, record, room_for, room_needed
from cheetah.tools.measured_ceiling import ReadCeiling
from cheetah.tools.random_buffers import fill_with, random_bits, random_cache
from cheetah.tools.regenerate import generate_named

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels_made_once")]
QUICK = ("--device", "emulator", "--steps", "3", "--repetitions", "2", "--warmup", "1")
FIELDS = (
    "commit gpu driver clocks model weights batch context kernel system tokens_per_s ms_per_step bytes_per_step "
    "gb_per_s ceiling_gb_per_s share repetitions steps plan ms_per_step_samples host_tokens_per_s contexts shared "
    "per_step rest_s measured"
).split()


@pytest.fixture(scope="module")
def records(kernels_made_once: None) -> list[dict[str, Any]]:
    result = cheetah("bench", "random:demo", "--contexts", "5,200", "--json", "-", *QUICK)
    assert result.exit_code == 0
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_a_record_has_every_field(records: list[dict[str, Any]]) -> None:
    assert [line["context"] for line in records] == [5, 200]
    assert [(line["contexts"], line["shared"], line["per_step"]) for line in records] == [([5], 0, 1), ([200], 0, 1)]
    for line in records:
        assert set(FIELDS) <= set(line)
        assert (line["model"], line["weights"], line["batch"], line["system"]) == ("demo", "bf16 random", 1, "cheetah")
        assert (line["repetitions"], line["steps"], len(line["ms_per_step_samples"])) == (2, 3, 2)
        assert line["rest_s"] == 0.0


@pytest.mark.slow
def test_a_record_adds_up(records: list[dict[str, Any]]) -> None:
    config = preset("demo")
    generated = generate_named(config, "demo", "emulator", {})
    for line in records:
        assert line["ms_per_step"] == pytest.approx(np.median(line["ms_per_step_samples"]), rel=1e-5)
        assert line["tokens_per_s"] == pytest.approx(1000 / line["ms_per_step"], rel=1e-5)
        kv = line["context"] * config.kv_bytes_per_token
        assert line["bytes_per_step"] == generated.manifest.weight_bytes + kv
        assert line["gb_per_s"] == pytest.approx(line["bytes_per_step"] / line["ms_per_step"] / 1e6, rel=1e-5)
        assert line["kernel"] == generated.manifest.text_sha256[:16]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "contexts", "shared", "per_step", "cached", "room"),
    [
        pytest.param(("--contexts", "5", "--batch", "3"), [5, 5, 5], 0, 1, 15, (3, 4), marks=pytest.mark.exhaustive),
        pytest.param(("--contexts", "20+9"), [20, 9], 0, 1, 29, (2, 2), marks=pytest.mark.exhaustive),
        (("--contexts", "40+50", "--shared", "32"), [40, 50], 32, 1, 58, (2, 2)),
        (("--contexts", "4", "--per-step", "6"), [4], 0, 6, 4, (1, 8)),
    ],
)
def test_a_record_of_several_tokens_a_step(
    arguments: tuple[str, ...], contexts: list[int], shared: int, per_step: int, cached: int, room: tuple[int, int]
) -> None:
    result = cheetah("bench", "random:demo", *arguments, "--json", "-", *QUICK)
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout)
    assert (line["contexts"], line["shared"], line["per_step"]) == (contexts, shared, per_step)
    assert (line["batch"], line["context"]) == (len(contexts), contexts[0])
    assert (line["plan"]["batch"], line["plan"]["tokens"]) == room
    tokens = len(contexts) * per_step
    assert line["tokens_per_s"] == pytest.approx(1000 * tokens / line["ms_per_step"], rel=1e-5)
    config = preset("demo")
    weights = generate_named(config, "demo", "emulator", {}).manifest.weight_bytes
    assert line["bytes_per_step"] == weights + cached * config.kv_bytes_per_token


def test_works_are_read_and_told() -> None:
    works = parsed_works("128,500+1000", batch=2, shared=64)
    assert works == [Work((128, 128), 64), Work((500, 1000), 64)]
    assert [str(work) for work in works] == ["128, 64 shared", "500+1000, 64 shared"]
    assert str(Work((7,), per_step=3)) == "7, 3 a step"
    config = preset("demo")  # of 512 positions
    assert [usual_contexts(config, {}, tokens) for tokens in (64, 400, 600)] == ["128", "112", "0"]
    assert usual_contexts(preset("llama-3.1-8b"), {"max_context": 2048}, 64) == "128,1024"
    assert Work((128,), 64).cached_tokens == 128 and works[0].cached_tokens == 64 + 2 * 64


def test_room_is_made_for_all_works_together() -> None:
    config = preset("llama-3.1-8b")
    assert room_for([Work((128,))], config, 64) == {"max_context": 8192, "max_steps": 64, "batch": 1}
    room = room_for([Work((128,) * 3), Work((9000,), per_step=10)], config, 64)
    assert room == {"max_context": 9640, "max_steps": 64, "batch": 4, "tokens": 16}


@pytest.mark.slow
def test_a_cache_of_codes_has_no_nan() -> None:
    plan = choose_plan(preset("demo"), gpu_named("emulator"))
    codes = random_cache(replace(plan, kv_dtype="e4m3")).view(np.uint8)
    assert not np.isnan(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)).any()
    assert len(set(codes.tolist())) == 128
    np.testing.assert_array_equal(random_cache(plan), random_bits(1.0))


@pytest.mark.slow
def test_the_emulator_gives_no_speed(records: list[dict[str, Any]]) -> None:
    for line in records:
        assert line["note"] == "emulated: not a speed"
        assert line["ceiling_gb_per_s"] is None and line["share"] is None


@pytest.mark.slow
def test_table(tmp_path: Path) -> None:
    """Of the model's own weights, with the records appended to a file."""
    target = tmp_path / "results.jsonl"
    target.write_text("{}\n")
    result = cheetah("bench", "demo", "--contexts", "5", "--rest", "0.01", "--json", target, *QUICK)
    assert result.exit_code == 0 and "emulated: not a speed" in result.stdout
    assert "before each launch the GPU rested for 0.01 s\n" in result.stdout
    assert "demo, batch 1, weights bf16\n" in result.stdout
    lines = target.read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[1])["weights"] == "bf16" and json.loads(lines[1])["rest_s"] == 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("random:demo", "--contexts", "a,b"), "--contexts a,b: expected numbers of tokens"),
        (("random:demo", "--contexts", "510"), "context 510 and 3 steps: the model has positions for 512 tokens"),
        (("random:demo", "--contexts", "5+x"), "--contexts 5+x: expected numbers of tokens"),
        (("random:demo", "--contexts", "1+" * 8 + "1"), "9 sequences: at most 8 share a step"),
        (("random:demo", "--contexts", "5", "--batch", "9"), "9 sequences: at most 8 share a step"),
        (("random:demo", "--contexts", "1+2+3", "--batch", "2"), "context 1+2+3: 3 sequences, and batch is 2"),
        (("random:demo", "--contexts", "5", "--per-step", "4", "--tokens", "2"), "4 tokens a step, and tokens is 2"),
        (("random:demo", "--contexts", "8+20", "--shared", "16"), "more tokens are shared than the shortest sequence"),
        (("random:demo", "--contexts", "20+20", "--shared", "5"), "whole pages are shared: use a multiple of 16"),
        (("random:demo", "--contexts", "5", "--max-steps", "2"), "3 steps, and max_steps is 2: use fewer --steps"),
        (("random:demo", "--contexts", "9", "--max-context", "11"), "context 9 and 3 steps: max_context is 11"),
        (("random:demo", "--contexts", "500", "--per-step", "5"), "context 500 and 15 steps: the model has positions"),
        (("llama-3.1-8b",), "a preset has no weights: use random:llama-3.1-8b"),
        (
            ("random:demo", "--contexts", "5", "--json", "/nowhere/x.jsonl"),
            "--json /nowhere/x.jsonl: cannot be written",
        ),
        (("random:demo", "--prompts", "5", "--contexts", "5"), "--prompts 5: measures the time to the first token"),
        (("random:demo", "--prompts", "5", "--speculative", "3:2"), "leave out --speculative"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused("bench", *arguments, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("bench",), ("bench", "--prompts", "128"), ("trace",), ("trace", "--prompt", "9")]
)
def test_hours_of_emulation_are_only_spent_when_asked_for(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cheetah.runtime.device.cuda.why_not_cuda", lambda: "none is there")
    command, *options = arguments
    message = refused(command, "random:llama-3.1-8b", *options)
    assert "no GPU to measure on (none is there)" in message and "--device emulator" in message
    assert 1 < float(message.partition("some ")[2].partition(" hours")[0]) < 200


def test_memory_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatorDevice, "allocate", lambda *_: pytest.fail("allocated"))
    assert "are needed" in refused("bench", "random:llama-3.1-70b", *QUICK)


@pytest.mark.slow
def test_a_kernel_that_makes_other_tokens_each_time_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = iter(range(100))
    plain = Launcher.launch_together

    def launch(*arguments: Any) -> list[LaunchResult]:
        first, *others = plain(*arguments)
        return [LaunchResult((*first.token_ids[:-1], next(counter)), first.steps, first.seconds), *others]

    monkeypatch.setattr(Launcher, "launch_together", launch)
    with open_device("emulator", say=lambda line: None) as device:
        bench = DecodeBench(preset("demo"), "demo", None, device, [5], 3)
        with pytest.raises(CheetahError, match="its speed is worth nothing"):
            bench.measure(5, 3, 2, 0)


@pytest.mark.slow
def test_the_ceiling_counts_every_byte_of_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the emulator, with a clock that advances by 1 ms a launch: 2 rounds of 64 KB for each of 4 blocks a launch."""

    class Clock(EmulatorDevice):
        launches = 0

        def launch(self, *arguments: Any) -> None:
            super().launch(*arguments)
            self.launches += 1

        def record(self) -> Any:
            return self.launches

        def elapsed_ms(self, start: Any, end: Any) -> float:
            return float(end - start)

    monkeypatch.setattr("cheetah.tools.measured_ceiling.CEILING_ROUNDS", 2)
    device, gpu = Clock(), gpu_named("emulator")
    ceiling = ReadCeiling(device, gpu, device.allocate(2**20))
    assert ceiling.gb_per_s() == pytest.approx(2 * 4 * 65536 / 1e6)


def test_a_share_is_of_the_mean_of_both_ceilings() -> None:
    work = Work((100,))
    measurement = Measurement(work, 64, (2.0, 1.0, 4.0), (3.0, 2.0, 5.0), 8_000_000_000, (4900.0, 5100.0), {})
    assert (measurement.ms_per_step, measurement.tokens_per_s, measurement.gb_per_s) == (2.0, 500.0, 4000.0)
    assert (measurement.ceiling_gb_per_s, measurement.share) == (5000.0, 0.8)
    assert measurement.host_tokens_per_s == pytest.approx(1000 / 3)
    together = replace(measurement, work=Work((100, 200)))
    assert (together.tokens_per_s, together.host_tokens_per_s) == (1000.0, pytest.approx(2000 / 3))


def test_more_room_is_made_only_where_it_is_needed() -> None:
    config = preset("llama-3.1-8b")
    assert room_needed(config, 1000, 64) == {"max_context": 8192, "max_steps": 64}
    assert room_needed(config, 40000, 100) == {"max_context": 40000, "max_steps": 100}


@pytest.mark.slow
def test_a_buffer_is_filled_to_its_last_byte() -> None:
    buffer = EmulatorDevice().allocate(1000)
    tile = random_bits(1.0)[:77]
    fill_with(buffer, tile)
    np.testing.assert_array_equal(buffer.download(np.uint16, 500), np.resize(tile, 500))
    assert not np.isnan(random_bits(1.0).view(np.uint16).astype(np.uint32) << 16).any()


@pytest.mark.slow
def test_record_names_no_share_that_was_not_measured() -> None:
    with open_device("emulator", say=lambda line: None) as device:
        bench = DecodeBench(preset("demo"), "demo", None, device, [5], 3)
        line = record(bench.measure(5, 3, 1, 0), bench, {"commit": "abc"})
    assert line["commit"] == "abc" and line["share"] is None and line["clocks"] == {}
