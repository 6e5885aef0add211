"""`cheetah trace` in the emulator: the table, the file, and that nothing there is called a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import cheetah, refused

from cheetah.generate import generate_kernel
from cheetah.models.registry import preset

QUICK = ("--device", "emulator", "--context", "40", "--steps", "2", "--repetitions", "1", "--warmup", "0")
KINDS = ["qkv", "attention", "merge", "o", "gate_up", "down", "lm_head", "sampling", "all"]


@pytest.mark.slow
@pytest.mark.compiler
def test_table_and_file(tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    result = cheetah("trace", "demo", "-o", target, "--layers", "1:2", *QUICK)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    heading = next(number for number, line in enumerate(lines) if line.startswith("phase "))
    rows = [line.split() for line in lines[heading + 1 : heading + 1 + len(KINDS)]]
    assert [row[0] for row in rows] == KINDS
    assert [row[1] for row in rows[:-1]] == ["3"] * 6 + ["1"] * 2
    assert sum(float(row[-2]) for row in rows[:-1]) == pytest.approx(float(rows[-1][-2]), abs=1)
    assert "counts of the scheduler's switches, not times" in result.stdout

    document = json.loads(target.read_text())
    assert document["otherData"]["context"] == 40 and "not times" in document["otherData"]["note"]
    names = {event["name"] for event in document["traceEvents"] if event["ph"] == "X"}
    assert names >= {f"layer 1 {kind}" for kind in KINDS[:6]} | {"wait", "work"}
    assert not any(name.startswith(("layer 0", "layer 2", "lm_head")) for name in names)
    assert f"wrote {target}" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.slow
@pytest.mark.compiler
def test_without_a_file_and_of_a_plan(tmp_path: Path) -> None:
    result = cheetah("trace", "random:demo", "--sync", "barrier", *QUICK)
    assert result.exit_code == 0 and "wrote" not in result.stdout
    assert result.stdout.startswith("demo, batch 1, weights bf16 random, context 40")


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.exhaustive
def test_a_batch_has_that_many_sequences_and_each_rank_a_timeline(tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    result = cheetah("trace", "random:demo", "--batch", "2", "-o", target, "--tensor-parallel-size", "2", *QUICK)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("demo, batch 2, weights bf16 random, context 40")
    assert "rank 0 of 2" in result.stdout and "rank 1 of 2" in result.stdout
    document = json.loads(target.read_text())
    assert document["otherData"]["batch"] == 2 and {event["pid"] for event in document["traceEvents"]} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layers", "4"), "--layers 4: expected the first layer and the one after the last"),
        (("--layers", "2:9"), "--layers 2:9: the model has layers 0 to 2"),
        (("--layers", "3:"), "--layers 3:: the model has layers 0 to 2"),
        (("-o", "/nowhere/trace.json"), "/nowhere/trace.json: cannot be written"),
        (("--context", "511"), "context 511 and 2 steps: the model has positions for 512 tokens"),
    ],
)
def test_what_cannot_be_traced_is_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused("trace", "demo", *QUICK, *arguments)


@pytest.mark.slow
def test_the_kernel_without_stamps_has_nothing_of_them() -> None:
    plain, traced = (generate_kernel(preset("demo"), "h200", traced=is_traced) for is_traced in (False, True))
    for word in ("global_timer", "timeline", "noted"):
        assert word not in plain.text and word in traced.text
    assert "timeline" not in {buffer.name for buffer in plain.manifest.buffers}


@pytest.mark.slow
def test_a_traced_kernels_command_makes_it_again(tmp_path: Path) -> None:
    result = cheetah("generate", "demo", "--trace", "--no-compile", "-o", tmp_path)
    assert result.exit_code == 0
    text = (tmp_path / "demo-h200-trace.cu").read_text()
    assert "Regenerate with: cheetah generate demo --trace\n" in text


@pytest.mark.slow
@pytest.mark.compiler
def test_a_pass_over_a_prompt_is_traced_by_its_phases(tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    arguments = ("demo", "--prompt", "21", "--context", "9", "-o", target, "--device", "emulator")
    result = cheetah("trace", *arguments, "--repetitions", "2", "--warmup", "0", "--tensor-parallel-size", "2")
    assert result.exit_code == 0, result.output
    assert "rank 0 of 2" in result.stdout and "rank 1 of 2" in result.stdout
    assert result.stdout.startswith("demo, a pass over 21 tokens, weights bf16, context 9")
    assert "not times" in result.stdout
    table = result.stdout.partition("phase ")[2].partition("all ")[0].splitlines()[1:]
    rows = {row[0]: int(row[1]) for row in map(str.split, table) if row}
    layers = preset("demo").layers
    behind = dict.fromkeys(("attention", "o", "o-sums", "gate_up", "down"), layers - 1)
    assert rows == {"embedding": 1, "qkv": layers, **behind}
    names = {event["name"] for event in json.loads(target.read_text())["traceEvents"] if event["ph"] == "X"}
    assert any("layer 1 gate_up" in name for name in names), names
