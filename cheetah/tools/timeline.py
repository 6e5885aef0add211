"""What the time stamps of a traced kernel say: where a step's time goes, by phase and by block.

Numbers alone: knows nothing of devices and files. Stamps are those of `cheetah.blocks.timeline`, of one step of each of
a few launches. A block waits in a phase from the end of its last phase until the input is there, then it works; so
all of its time is one or the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cheetah.blocks.timeline import EVENTS
from cheetah.errors import CheetahError

Times = NDArray[np.float64]
NANOSECONDS = 1e3  # in a microsecond, the unit of everything here


@dataclass(frozen=True)
class Spans:
    """When each block was where: microseconds since the step's first block began, f64 [launches, blocks, phases].

    names: of the phases; attention is two, "layer 3 attention" for the block's items and "layer 3 merge". start: the
    end of the block's phase before. ready: the input is there. first_chunk: a chunk to work on has landed. last_chunk:
    all of them are used. done: the phase's end. What did not happen is NaN. tick_ns: the least step of the clock.
    """

    names: tuple[str, ...]
    start: Times
    ready: Times
    first_chunk: Times
    last_chunk: Times
    done: Times
    tick_ns: int

    @cached_property
    def wait(self) -> Times:
        """NaN where a block had nothing to wait for."""
        return self.ready - self.start

    @cached_property
    def work(self) -> Times:
        """From the input, or where there was none from the start, to the end."""
        return self.done - np.where(np.isnan(self.ready), self.start, self.ready)

    @cached_property
    def last_done(self) -> Times:
        """The end of each phase's last block, [launches, phases]."""
        return np.asarray(self.done.max(axis=1))

    @cached_property
    def advance(self) -> Times:
        """How much later than the last phase's last block this one's ends, [launches, phases]: they add up to the
        step."""
        return np.diff(self.last_done, axis=1, prepend=0.0)

    @property
    def step(self) -> Times:
        """From the first block's begin to the last block's end, [launches]."""
        return np.asarray(self.last_done[:, -1])


def spans_of(stamps: NDArray[np.uint64], phases: Sequence[str]) -> Spans:
    """`stamps`: nanoseconds, u64 [launches, blocks, phases, events], the events being the first of EVENTS.

    Of one rank: its first block's begin is zero. CheetahError where a block never began or ended a phase.
    """
    times = stamps.astype(np.int64)
    begin, done = times[..., EVENTS.index("begin")], times[..., EVENTS.index("done")]
    _require_whole(begin, done, phases)
    zero = begin[:, :, 0].min(axis=1)[:, None, None]

    def event(name: str) -> Times:
        """NaN where it was not stamped, or in an earlier step."""
        index = EVENTS.index(name)
        if index >= times.shape[-1]:
            return np.full(begin.shape, np.nan)
        found = times[..., index]
        return np.where((found >= begin) & (found <= done), (found - zero) / NANOSECONDS, np.nan)

    spans = Spans(
        tuple(phases),
        np.concatenate([event("begin")[:, :, :1], event("done")[:, :, :-1]], axis=2),
        event("ready"),
        event("first_chunk"),
        event("last_chunk"),
        event("done"),
        _tick(times[begin > 0]),
    )
    return _split_attention(spans, event("attended"))


def _require_whole(begin: NDArray[np.int64], done: NDArray[np.int64], phases: Sequence[str]) -> None:
    missing = np.argwhere((begin <= 0) | (done < begin))
    if missing.size:
        _, block, phase = missing[0]
        raise CheetahError(f"block {block} has no whole stamps of phase {phases[phase]!r}: the step did not come there")


def _tick(times: NDArray[np.int64]) -> int:
    steps = np.diff(np.unique(times[times > 0]))
    return int(steps.min()) if steps.size else 0


def _split_attention(spans: Spans, attended: Times) -> Spans:
    """Where `attended` was stamped, a phase becomes two: what comes after it is the merge."""
    split = np.asarray(~np.isnan(attended).all(axis=(0, 1)))
    if not split.any():
        return spans
    order = np.repeat(np.arange(len(split)), np.where(split, 2, 1))
    second = np.concatenate([[False], order[1:] == order[:-1]])
    first = split[order] & ~second
    middle = attended[..., order]
    return Spans(
        tuple(
            _kind_replaced(spans.names[p], "merge") if s else spans.names[p] for p, s in zip(order, second, strict=True)
        ),
        np.where(second, middle, spans.start[..., order]),
        np.where(second, np.nan, spans.ready[..., order]),
        np.where(second, np.nan, spans.first_chunk[..., order]),
        np.where(second, np.nan, spans.last_chunk[..., order]),
        np.where(first, middle, spans.done[..., order]),
        spans.tick_ns,
    )


def kind_of(phase: str) -> str:
    """ "layer 3 qkv" -> "qkv"."""
    return phase.rpartition(" ")[2]


def layer_of(phase: str) -> int | None:
    """ "layer 3 qkv" -> 3; None for head and sampling."""
    words = phase.split()
    return int(words[1]) if words[0] == "layer" else None


def _kind_replaced(phase: str, kind: str) -> str:
    return f"{phase.rpartition(' ')[0]} {kind}"


@dataclass(frozen=True)
class KindSummary:
    """All phases of a kind, microseconds; None where there is nothing to tell.

    runs: in a step. wait, work: medians over blocks and phases. slowest: the median over phases of the block that
    worked longest; slowest_block: the one that works longest on average. spread: from the first block's end to the
    last's. trip: from the end of the last phase's last block until the median block has its input. starved: from the
    input until the first chunk has landed. tail: from the last chunk's use to the end. advance: what the kind adds to
    a step, see `Spans.advance`. waiting: its waits' share of all blocks' time in the step.
    """

    kind: str
    runs: int
    wait: float | None
    work: float
    slowest: float
    slowest_block: int
    spread: float
    trip: float | None
    starved: float | None
    tail: float | None
    advance: float
    waiting: float


@dataclass(frozen=True)
class Summary:
    """A step. step: its microseconds, the mean over launches. waiting: the share of all blocks' time, 0 to 1."""

    kinds: tuple[KindSummary, ...]
    step: float
    waiting: float


def summarise(spans: Spans) -> Summary:
    """The table of a step, by kinds of phases in the order in which they come."""
    kinds = [kind_of(name) for name in spans.names]
    rows = tuple(
        _summary_of(spans, kind, np.flatnonzero([kind == one for one in kinds])) for kind in dict.fromkeys(kinds)
    )
    return Summary(rows, float(spans.step.mean()), sum(row.waiting for row in rows))


def _summary_of(spans: Spans, kind: str, phases: NDArray[np.intp]) -> KindSummary:
    work, done = spans.work[..., phases], spans.done[..., phases]
    ready, last_chunk = spans.ready[..., phases], spans.last_chunk[..., phases]
    all_time = (spans.done[..., -1] - spans.start[..., 0]).sum()
    return KindSummary(
        kind=kind,
        runs=len(phases),
        wait=_median(spans.wait[..., phases]),
        work=float(np.median(work)),
        slowest=float(np.median(work.max(axis=1))),
        slowest_block=int(work.mean(axis=(0, 2)).argmax()),
        spread=float(np.median(done.max(axis=1) - done.min(axis=1))),
        trip=_trip(spans, phases),
        starved=_median(spans.first_chunk[..., phases] - ready),
        tail=_median(done - last_chunk),
        advance=float(spans.advance[:, phases].sum(axis=1).mean()),
        waiting=float(np.nansum(spans.wait[..., phases]) / all_time),
    )


def _trip(spans: Spans, phases: NDArray[np.intp]) -> float | None:
    """The step's first phase has no other before it."""
    later = phases[phases > 0]
    has_input = later[~np.isnan(spans.ready[..., later]).all(axis=(0, 1))]
    if not has_input.size:
        return None
    return _median(np.nanmedian(spans.ready[..., has_input], axis=1) - spans.last_done[:, has_input - 1])


def _median(times: Times) -> float | None:
    known = times[~np.isnan(times)]
    return float(np.median(known)) if known.size else None
