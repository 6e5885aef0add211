"""The input of a product in shared memory, part by part: what the loop over a block's M-tiles asks of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
from cheetah.blocks.linear.fragments import Activations, tile_units
from cheetah.blocks.ring import Ring
from cheetah.blocks.timeline import Timeline
from cheetah.lang import prim, ty
from cheetah.plan import MatrixLayout


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the input that is there: what chunks [first, end) of an M-tile are multiplied with. Beside the first
    of them the vectors lie that are number `offset` in the region, counted in chunks. is_last: whether no other part
    follows. begins, ends: whether it is the first, the last that a matrix is multiplied with. ahead: where a warp
    multiplies its only chunk by itself, while others have other parts, how many stages ahead that lies."""

    first: ch.Value
    end: ch.Value
    offset: ch.Value = 0
    is_last: ch.Value = True
    region: str = "vector"
    begins: bool = True
    ends: bool = True
    ahead: ch.Expr | None = None

    def place(self, chunk: ch.Expr) -> ch.Expr:
        """The number that the vectors beside a chunk have there."""
        return chunk - self.first + self.offset

    def vectors(self, columns: Columns, matrix: MatrixLayout, tile: ch.Expr) -> Activations:
        """Those beside the K-tile that is number `tile` there."""
        machine, limit = columns.machine, columns.limit
        units = machine.region(self.region, ty.u32x4) + tile * tile_units(matrix, limit)
        sums_bytes = matrix.sums_bytes(limit)
        sums = machine.region("vector_sums", ty.f32) + tile * (sums_bytes // 4) if sums_bytes else None
        return Activations(columns, units, matrix.halves, sums)


@dataclass(frozen=True, eq=False)
class Arrival:
    """Whom it concerns that the consumer warps wait for an input, and that it is there. loaded: see `Reductions`."""

    ring: Ring
    timeline: Timeline
    loaded: ch.Expr

    @contextmanager
    def awaited(self, is_first: bool = True) -> Iterator[None]:
        """The body waits for it, or for the `is_first` part of it."""
        self.ring.begin_waiting()
        yield
        self.end_waiting(is_first)

    def end_waiting(self, is_first: bool = True) -> None:
        self.ring.end_waiting()
        if is_first:
            self.timeline.stamp_here("ready")

    @ch.inline
    def tell_loaded(self) -> None:
        """The adding warps may look for the scales of its columns."""
        with ch.if_(self.ring.machine.thread == 0):
            prim.mbarrier_arrive(self.loaded)
