"""What is made of time stamps, on stamps whose answers are known, and on those of the demo in the emulator."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cheetah.blocks.timeline import EVENTS
from cheetah.errors import CheetahError
from cheetah.models.registry import preset
from cheetah.runtime.device import open_device
from cheetah.tools.bench import DecodeBench
from cheetah.tools.timeline import Spans, kind_of, layer_of, spans_of, summarise
from cheetah.tools.trace_events import LayerRange, write_trace
from tests.tiers import tiered

PHASES = ("layer 0 qkv", "layer 0 attention", "layer 1 qkv", "layer 1 attention", "lm_head")
ZERO = 1_795_218_784_212_232_192  # what a GPU's clock says: nanoseconds since 1970
STALE = ZERO - 1000


def stamps_of(*blocks: list[dict[str, float]]) -> NDArray[np.uint64]:
    """[1 launch, blocks, phases, events] from the microseconds of each block's phases."""
    stamps = np.zeros((1, len(blocks), len(blocks[0]), len(EVENTS)), np.uint64)
    for block, phases in enumerate(blocks):
        for phase, events in enumerate(phases):
            for event, microseconds in events.items():
                stamps[0, block, phase, EVENTS.index(event)] = ZERO + round(1000 * microseconds)
    return stamps


def phase(begin: float, ready: float, done: float, **more: float) -> dict[str, float]:
    return {"begin": begin, "ready": ready, "done": done, **more}


@pytest.fixture
def spans() -> Spans:
    """Two blocks, by hand. The second has no item of attention in layer 1."""
    first = [
        phase(0, 1, 10, first_chunk=2, last_chunk=9),
        phase(10, 13, 20, first_chunk=13, last_chunk=17, attended=18),
        phase(21, 24, 30, first_chunk=24, last_chunk=29),  # after a rendezvous: that was waiting too
        phase(30, 32, 40, first_chunk=33, last_chunk=38, attended=39),
        phase(40, 45, 100, first_chunk=45, last_chunk=99),
    ]
    second = [
        phase(2, 3, 8, first_chunk=4, last_chunk=6),
        phase(8, 13, 16, first_chunk=14, last_chunk=15, attended=15),
        phase(16, 22, 32, first_chunk=25, last_chunk=31),
        {"begin": 32, "attended": 32, "done": 44},
        phase(44, 46, 90, first_chunk=46, last_chunk=89),
    ]
    return spans_of(stamps_of(first, second), PHASES)


def test_attention_is_two_phases(spans: Spans) -> None:
    assert [kind_of(name) for name in spans.names] == ["qkv", "attention", "merge"] * 2 + ["lm_head"]
    assert [layer_of(name) for name in spans.names] == [0, 0, 0, 1, 1, 1, None]
    np.testing.assert_array_equal(spans.done[0], [[10, 18, 20, 30, 39, 40, 100], [8, 15, 16, 32, 32, 44, 90]])
    np.testing.assert_array_equal(spans.start[0], [[0, 10, 18, 20, 30, 39, 40], [2, 8, 15, 16, 32, 32, 44]])
    nan = np.nan
    np.testing.assert_array_equal(spans.ready[0], [[1, 13, nan, 24, 32, nan, 45], [3, 13, nan, 22, nan, nan, 46]])


def test_all_of_a_blocks_time_is_waiting_or_work(spans: Spans) -> None:
    total = np.nansum(spans.wait, axis=2) + spans.work.sum(axis=2)
    np.testing.assert_allclose(total, [[100, 88]])


def test_every_figure_of_the_table(spans: Spans) -> None:
    summary = summarise(spans)
    qkv, attention, merge, head = summary.kinds
    assert (qkv.kind, qkv.runs, merge.kind, head.runs) == ("qkv", 2, "merge", 1)
    assert qkv.wait == np.median([1, 4, 1, 6]) and qkv.work == np.median([9, 6, 5, 10])
    assert qkv.slowest == np.median([9, 10]) and qkv.slowest_block == 0  # 15 us in both runs, the first on ties
    assert qkv.spread == np.median([2, 2])
    assert qkv.trip == np.median([24, 22]) - 20  # of layer 1 alone: nothing comes before layer 0
    assert qkv.starved == np.median([1, 1, 0, 3]) and qkv.tail == np.median([1, 2, 1, 1])
    assert attention.wait == np.median([3, 5, 2]) and attention.work == np.median([5, 2, 7, 0])
    assert attention.trip == np.median([13 - 10, 32 - 32])
    assert (merge.wait, merge.trip, merge.starved, merge.tail) == (None, None, None, None)
    assert merge.work == np.median([2, 1, 1, 12]) and merge.slowest_block == 1
    assert head.trip == 45.5 - 44


def test_what_phases_add_is_the_step(spans: Spans) -> None:
    summary = summarise(spans)
    assert [kind.advance for kind in summary.kinds] == [10 + 12, 8 + 7, 2 + 5, 56]
    assert sum(kind.advance for kind in summary.kinds) == summary.step == 100
    waits = (1 + 3 + 4 + 2 + 5) + (1 + 5 + 6 + 2)
    assert summary.waiting == pytest.approx(waits / (100 + 88))


def test_launches_are_each_from_their_own_beginning(spans: Spans) -> None:
    one = stamps_of([phase(0, 1, 3)], [phase(1, 2, 5)])
    two = stamps_of([phase(50, 51, 60)], [phase(51, 52, 53)])
    both = spans_of(np.concatenate([one, two]), ("lm_head",))
    assert both.step.tolist() == [5, 10]
    assert summarise(both).step == 7.5


def test_an_event_of_an_earlier_step_did_not_happen() -> None:
    stamps = stamps_of([phase(0, 1, 3, first_chunk=2)])
    stamps[0, 0, 0, EVENTS.index("first_chunk")] = STALE
    assert np.isnan(spans_of(stamps, ("lm_head",)).first_chunk).all()


def test_three_events_are_enough() -> None:
    """Of a kernel that stamps less; its attention stays one phase."""
    stamps = stamps_of([phase(0, 1, 3), phase(3, 4, 8)])[..., :3]
    spans = spans_of(stamps, ("layer 0 qkv", "layer 0 attention"))
    assert spans.names == ("layer 0 qkv", "layer 0 attention")
    assert summarise(spans).kinds[1].starved is None


@pytest.mark.parametrize("value", [0, 2**64 - 1])
def test_a_phase_that_was_not_reached_is_named(value: int) -> None:
    stamps = stamps_of([phase(0, 1, 3), phase(3, 4, 8)])
    stamps[0, 0, 1, EVENTS.index("done")] = value
    with pytest.raises(CheetahError, match="block 0 has no whole stamps of phase 'lm_head'"):
        spans_of(stamps, ("layer 0 qkv", "lm_head"))


def test_the_clocks_step() -> None:
    stamps = stamps_of([phase(0, 0.032, 0.128)])
    assert spans_of(stamps, ("lm_head",)).tick_ns == 32


# -- the file ---------------------------------------------------------------------------------------------------------


def slices(path: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The slices of each row by (process, row), in file order."""
    rows = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    return dict(rows)


def test_a_row_tells_phases_and_in_them_waiting_and_work(tmp_path: Path, spans: Spans) -> None:
    target = tmp_path / "t.json"
    count = write_trace(target, [spans], 0, LayerRange(), "made up", {"commit": "abc"})
    rows = slices(target)
    assert count == sum(len(row) for row in rows.values()) and set(rows) == {(0, 0), (1, 0), (1, 1)}
    assert [(one["name"], one["ts"], one["dur"]) for one in rows[1, 0][:5]] == [
        ("layer 0 qkv", 0, 10),
        ("wait", 0, 1),
        ("wait for the first chunk", 1, 1),
        ("work", 2, 7),
        ("finish", 9, 1),
    ]
    merge = [one for one in rows[1, 1] if one["cat"] == "merge"]
    assert [(one["name"], one["ts"], one["dur"]) for one in merge[2:]] == [("layer 1 merge", 32, 12), ("work", 32, 12)]
    assert [(one["name"], one["ts"]) for one in rows[0, 0]][:2] == [("layer 0 qkv", 0), ("layer 0 attention", 10)]
    document = json.loads(target.read_text())
    assert document["otherData"] == {"commit": "abc"}
    names = {event["args"]["name"] for event in document["traceEvents"] if event["ph"] == "M"}
    assert {"block 0", "block 1", "whole grid", "made up: blocks"} <= names


def test_each_rank_has_rows_of_its_own(tmp_path: Path, spans: Spans) -> None:
    write_trace(tmp_path / "t.json", [spans, spans], 0, LayerRange(), "made up", {})
    rows = slices(tmp_path / "t.json")
    assert set(rows) == {(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)}
    assert [one["name"] for one in rows[3, 1]] == [one["name"] for one in rows[1, 1]]
    document = json.loads((tmp_path / "t.json").read_text())
    names = {event["args"]["name"] for event in document["traceEvents"] if event["ph"] == "M"}
    assert {"made up, rank 0: blocks", "made up, rank 1: blocks"} <= names


@pytest.mark.parametrize(
    ("text", "kept"),
    [(":", {"0", "1", "lm_head"}), ("0:1", {"0"}), ("1:", {"1", "lm_head"}), (":2", {"0", "1"}), ("1:2", {"1"})],
)
def test_only_some_layers(tmp_path: Path, spans: Spans, text: str, kept: set[str]) -> None:
    write_trace(tmp_path / "t.json", [spans], 0, LayerRange.parse(text), "made up", {})
    names = [one["name"].split() for one in slices(tmp_path / "t.json")[0, 0]]
    assert {words[1] if words[0] == "layer" else words[0] for words in names} == kept


@pytest.mark.parametrize("text", ["", "3", "a:b", "-1:2", "2:2", "3:1"])
def test_a_range_that_is_none(text: str) -> None:
    with pytest.raises(CheetahError, match="--layers .*: expected"):
        LayerRange.parse(text)


# -- the demo ---------------------------------------------------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.parametrize("sync", tiered(["flags", "barrier"], ["barrier"]))
@pytest.mark.slow
def test_the_demos_stamps(sync: str) -> None:
    """Every phase of every block is stamped, in order, by the kernel in the emulator."""
    with open_device("emulator", say=lambda line: None) as device:
        bench = DecodeBench(preset("demo"), "demo", None, device, [100], 2, traced=True, sync=sync)
        traced = bench.trace(100, 2, repetitions=2, warmup=0)
        phases = bench.manifest.phases
        bench.close()
    assert traced.stamps.shape == (1, 2, 4, len(phases), len(EVENTS)) and len(traced.step_ms) == 2
    assert " --trace" in bench.manifest.command and "True" not in bench.manifest.command
    spans = spans_of(traced.stamps[0], phases)
    begin, ready, done, first, last, attended = np.moveaxis(traced.stamps[0].astype(np.int64), 3, 0)
    assert (begin[..., 1:] >= done[..., :-1]).all()
    products = [kind_of(name) not in ("attention", "sampling") for name in phases]
    for earlier, later in ((begin, ready), (ready, first), (first, last), (last, done)):
        assert (earlier <= later)[..., products].all()
    many_chunks = [kind_of(name) in ("gate_up", "lm_head") for name in phases]
    assert (last - first > first - ready)[..., many_chunks].all()  # not each chunk's, but the first one's
    is_attention = [kind_of(name) == "attention" for name in phases]
    assert ((begin <= attended) & (attended <= done))[..., is_attention].all()
    has_input = ~np.isnan(spans.ready)
    assert has_input[..., [kind_of(name) == "sampling" for name in spans.names]].all()
    assert has_input[..., [kind_of(name) == "attention" for name in spans.names]].any(axis=1).all()
    assert [kind.kind for kind in summarise(spans).kinds] == [
        *("qkv", "attention", "merge", "o", "gate_up", "down"),
        *("lm_head", "sampling"),
    ]
    takes_all = [kind_of(name) in ("gate_up", "down", "lm_head") for name in phases]
    everywhere = np.roll(last.max(axis=1, keepdims=True), 1, axis=2)  # thread 0's stamp comes before any publishing
    assert (ready >= everywhere)[..., takes_all].all()
