"""A step as a file for Perfetto (ui.perfetto.dev) or chrome://tracing: JSON trace events, one row a block; of several
GPUs processes of each, by its own clock.

The format: Chrome's "Trace Event Format", complete events ("X"), times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cheetah.errors import CheetahError, writing
from cheetah.manifest import write_atomically
from cheetah.tools.timeline import Spans, kind_of, layer_of

GRID, BLOCKS = 0, 1
"""Process ids: the whole grid's row, and the blocks' rows; those of each further rank behind them."""


@dataclass(frozen=True)
class LayerRange:
    """Layers first to end - 1; without an end also head and sampling."""

    first: int = 0
    end: int | None = None

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """ "2:5" -> layers 2, 3 and 4; either end may be left out. CheetahError for anything else."""
        first, colon, end = text.partition(":")
        try:
            chosen = cls(int(first or 0), int(end) if end else None)
        except ValueError:
            chosen = cls(0, 0)
        if not colon or chosen.first < 0 or (chosen.end is not None and chosen.end <= chosen.first):
            raise CheetahError(
                f"--layers {text}: expected the first layer and the one after the last, e.g. --layers 2:5"
            )
        return chosen

    def check(self, layers: int) -> None:
        """CheetahError unless a model of so many layers has them."""
        if self.first >= layers or (self.end or 0) > layers:
            end = "" if self.end is None else self.end
            raise CheetahError(f"--layers {self.first}:{end}: the model has layers 0 to {layers - 1}")

    def contains(self, layer: int | None) -> bool:
        """`layer` is None for head and sampling."""
        if layer is None:
            return self.end is None
        return layer >= self.first and (self.end is None or layer < self.end)


def write_trace(
    path: Path, ranks: Sequence[Spans], launch: int, layers: LayerRange, title: str, circumstances: dict[str, Any]
) -> int:
    """Write one launch's step; the file appears whole or not at all. Returns the number of slices."""
    events = [
        event | {"pid": event["pid"] + 2 * rank}
        for rank, spans in enumerate(ranks)
        for event in trace_events(spans, launch, layers, title if len(ranks) == 1 else f"{title}, rank {rank}")
    ]
    document = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": circumstances}
    text = json.dumps(document, separators=(",", ":"))
    with writing(path):
        write_atomically(path, text.encode())
    return sum(event["ph"] == "X" for event in events)


def trace_events(spans: Spans, launch: int, layers: LayerRange, title: str) -> Iterator[dict[str, Any]]:
    """Names of processes and rows, then the slices of every block and phase: the phase, in it its wait and work."""
    yield _name("process_name", GRID, 0, f"{title}: each phase until its last block's end")
    yield _name("process_name", BLOCKS, 0, f"{title}: blocks")
    yield _name("thread_name", GRID, 0, "whole grid")
    chosen = [phase for phase, name in enumerate(spans.names) if layers.contains(layer_of(name))]
    for phase in chosen:
        end, length = spans.last_done[launch, phase], spans.advance[launch, phase]
        yield _slice(GRID, 0, spans.names[phase], kind_of(spans.names[phase]), end - length, end)
    for block in range(spans.done.shape[1]):
        yield _name("thread_name", BLOCKS, block, f"block {block}")
        for phase in chosen:
            yield from _phase_slices(spans, launch, block, phase)


def _phase_slices(spans: Spans, launch: int, block: int, phase: int) -> Iterator[dict[str, Any]]:
    at = (launch, block, phase)
    kind = kind_of(spans.names[phase])
    yield _slice(BLOCKS, block, spans.names[phase], kind, spans.start[at], spans.done[at])
    marks = (
        ("wait", spans.ready[at]),
        ("wait for the first chunk", spans.first_chunk[at]),
        ("work", spans.last_chunk[at]),
        ("work" if np.isnan(spans.last_chunk[at]) else "finish", spans.done[at]),
    )
    begin = spans.start[at]
    for name, end in marks:
        if not np.isnan(end) and end > begin:
            yield _slice(BLOCKS, block, name, kind, begin, end)
            begin = end


def _slice(process: int, row: int, name: str, kind: str, begin: float, end: float) -> dict[str, Any]:
    """Nanoseconds are kept: three decimals."""
    times = {"ts": round(float(begin), 3), "dur": round(float(end - begin), 3)}
    return {"ph": "X", "pid": process, "tid": row, "name": name, "cat": kind, **times}


def _name(what: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": row, "name": what, "args": {"name": name}}
