"""Matrix times vectors on tensor cores: the weights are the 16-row operand of `mma.m16n8k16`, tokens its 8 columns.

The producer lane brings the block's M-tiles chunk by chunk; in each chunk every consumer warp multiplies its K-tiles
and keeps partial sums of the M-tile's 16 rows, which go to the adding warps (see `reductions`).

Where the vectors of several tokens do not fit into shared memory whole, the matrix is multiplied slice by slice: all
the block's M-tiles by the first part of the vectors, then by the next, with the sums of all its M-tiles in registers.
The parts are waited for one by one, so the first is multiplied before the last one exists.

The loops over M-tiles and chunks stay (almost) rolled: unrolled, the kernel is twice as long and no faster (H200).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
from cheetah.blocks.linear.adding import Adding
from cheetah.blocks.linear.chunks import Chunks
from cheetah.blocks.linear.fragments import groups_of
from cheetah.blocks.linear.interface import Epilogue, Prologue
from cheetah.blocks.linear.lots import LotWalk
from cheetah.blocks.linear.matrix import RecordedShare, record_of, recorded
from cheetah.blocks.linear.parts import Arrival, Part
from cheetah.blocks.linear.reductions import Reductions
from cheetah.blocks.linear.share import Run, Share
from cheetah.blocks.ring import Ring
from cheetah.blocks.timeline import NO_TIMELINE, Timeline
from cheetah.lang import prim, ty
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import BlockRows


class Matvec:
    """The products of a kernel, in all roles: what is fetched, what is done with it, and what becomes of it. They share
    the ring and the reductions."""

    def __init__(self, columns: Columns, ring: Ring, weights: ch.Expr, timeline: Timeline = NO_TIMELINE) -> None:
        self.machine, self.columns, self.ring = columns.machine, columns, ring
        self.weights, self.timeline = weights, timeline
        self.layer_offset: ch.Expr = ch.argument(0, ty.u64)
        self.layer: tuple[ch.Expr, int] = ch.argument(0), 0
        self.reductions = Reductions(columns)
        self.adding = Adding(self.reductions)
        self.chunks = Chunks(columns, ring, timeline)
        self.arrival = Arrival(ring, timeline, self.reductions.loaded)

    def initialise(self) -> None:
        """Set the barriers up, as `Ring.initialise`."""
        self.reductions.initialise()

    @ch.inline
    def begin_layer(self, layer: ch.Expr, layer_stride: int) -> None:
        """In the producer role: the products that follow are of this layer, `layer_stride` bytes after the one
        before."""
        self.layer = layer, layer_stride
        layer_offset = ty.u64(layer) * ch.named("LAYER_BYTES", layer_stride)
        self.layer_offset = layer_offset

    def end_layers(self) -> None:
        """The products that follow belong to no layer."""
        self.layer_offset = ch.argument(0, ty.u64)

    def __call__(self, matrix: MatrixLayout, prologue: Prologue, epilogue: Epilogue, when: ch.Value = True) -> None:
        """The matrix of the present layer times the step's vectors; `when`: only if that holds."""
        self.of_share(Share(self.machine, matrix), prologue, epilogue, when)

    def of_share(self, share: Share, prologue: Prologue, epilogue: Epilogue, when: ch.Value = True) -> None:
        """The same of a matrix, or of several, whose M-tiles the blocks share in another way."""
        with self.machine.producer, ch.if_(when):
            self.copy(share)
        with self.machine.consumer:
            prologue.prepare()
            with ch.if_(when):
                self.multiply(share, prologue)
                self.timeline.stamp_here("done")
        with self.machine.adding(), ch.if_(when):
            self.adding.finish(share, epilogue, prologue.scale_of_products(), self._dealt(share.matrix))

    def _dealt(self, layout: MatrixLayout) -> ch.Expr | None:
        """In the adder role, of a matrix of the present layer: which M-tile lies in each slot, if they are dealt."""
        if not layout.is_dealt:
            return None
        layer, stride = self.layer
        offset = ty.u64(layer) * ch.named("LAYER_BYTES", stride) + layout.offset
        return ch.reinterpret(ty.ptr(ty.u32), self.weights + offset)

    @ch.inline
    def copy(self, share: Share) -> None:
        """In the producer role: fetch the block's M-tiles of a matrix of the present layer."""
        self.ring.fills(share.matrix.name)
        if type(share) is Share:
            self._fetch(share.matrix, record_of(share.matrix), self.layer_offset)
            return
        with ch.outline(f"fetch_{share.matrix.name}", share.about_fetch):
            share.begin(self.machine.producer)
            position = share.position
            matrix = self.weights + (self.layer_offset + share.matrix.offset)
            for run in share.runs(position):
                self._copy_run(share.matrix, matrix, run)
            share.end(self.machine.producer)

    @ch.function
    def _fetch(self, layout: MatrixLayout, matrix: ch.Expr, layer_offset: ch.Expr) -> None:
        """The block's M-tiles of a matrix, chunk by chunk, into the stages of the ring."""
        share = RecordedShare(self.machine, recorded(layout, matrix), layout)
        position = share.position
        first_byte = self.weights + (layer_offset + matrix.offset)
        if isinstance(layout.format, BlockRows):
            in_flight = self.machine.plan.in_flight_of(layout.is_once)
            return LotWalk(share.matrix, first_byte, self.ring, in_flight).copy(share, position)
        for run in share.runs(position):
            self._copy_run(share.matrix, first_byte, run)

    @ch.inline
    def _copy_run(self, layout: MatrixLayout, matrix: ch.Expr, run: Run) -> None:
        wave = run.m_tile // layout.blocks
        wave_bytes = layout.wave_address(ty.u64(wave), ty.u64(run.expert))
        width = layout.wave_width(wave)
        with ch.for_(run.first, run.end, unroll=1) as chunk:
            chunk_bytes = layout.chunk_bytes(chunk)
            source = matrix + (wave_bytes + ty.u64(layout.chunk_address(chunk, run.position, width)))
            plan, several = self.machine.plan, layout.chunks_at_once
            most = min(plan.in_flight_of(layout.is_once) * several, plan.stages - 1)
            at_least = plan.in_flight_waiting * several if several > 1 else 1
            with self.ring.fill(chunk_bytes, at_least, most) as (destination, barrier):
                prim.bulk_copy(destination, source, chunk_bytes, barrier)

    @ch.function
    def skip(self, layout: MatrixLayout) -> None:
        """In the consumer role: use up the block's chunks of a matrix that were fetched in vain."""
        with ch.for_(layout.position(self.machine.block), layout.m_tiles, layout.blocks, unroll=1):
            if isinstance(layout.format, BlockRows):
                return self.chunks.skip_lots()
            with ch.for_(layout.chunks, unroll=1):
                self.ring.discard()

    @ch.inline
    def multiply(self, share: Share, prologue: Prologue) -> None:
        """In the consumer role: multiply the block's M-tiles by the vectors that the prologue brings.

        A block without an M-tile loads nothing and waits for nobody.
        """
        layout = share.matrix
        self.ring.uses(layout.name)
        with share.if_any(share.position):
            prologue.begin(layout, self.arrival)
            if type(share) is Share and prologue.is_whole(layout):
                self._multiply_m_tiles(layout, record_of(layout))
                return self.reductions.wait_until_taken()
            position = share.position
            for strip in share.strips(position):
                of_strip = [(tile, self.chunks.new_sums(layout)) for tile in strip]
                of_parts: list[Any] = [None for _ in of_strip]
                for part in map(share.part_of, prologue.parts(layout, self.arrival)):
                    if part.begins and not part.ends and self._finishes_parts(share):
                        of_parts = [self.chunks.new_sums(layout, "own") for _ in of_strip]
                    for (tile, sums), of_part in zip(of_strip, of_parts, strict=True):
                        with ch.if_(tile.exists):
                            with ch.if_(tile.is_last), ch.if_(part.is_last):
                                self.ring.begin_waiting()  # the next wait is near
                            with self._added_to(share, sums, of_part, part.ends) as own:
                                self.chunks.use_all(layout, part, own, tile.is_first)
                self.timeline.stamp_here("last_chunk")
                for tile, sums in of_strip:
                    with ch.if_(tile.exists):
                        self.reductions.hand_over(layout, sums)
            # All rows are finished, for which every consumer warp has handed its sums over: everybody has read the
            # vectors, what the epilogues write is seen, and what they read may be replaced.
            self.reductions.wait_until_taken()

    @ch.function
    def _multiply_m_tiles(self, layout: MatrixLayout, matrix: ch.Expr) -> None:
        """The block's M-tiles of a matrix by vectors that are there whole."""
        known = recorded(layout, matrix, ("start", "m_tiles", "chunks"))
        share = RecordedShare(self.machine, known, layout)
        for m_tile in share.m_tiles(share.position):
            sums = self.chunks.new_sums(layout)
            if layout.waves > 1:
                with ch.if_(m_tile + layout.blocks >= matrix.m_tiles):
                    self.ring.begin_waiting()  # the next wait is near
            self.chunks.use_all(known, Part(0, matrix.chunks), sums, m_tile < layout.blocks)
            self.timeline.stamp_here("last_chunk")
            self.reductions.hand_over(layout, sums)

    @contextmanager
    @ch.inline
    def _added_to(self, share: Share, sums: Any, of_part: Any, ends: bool) -> Iterator[Any]:
        """Sums by a part of the input, which are added to those of all parts: other ones where the rows of its matrix
        have factors of their own. of_part: these, where a matrix is multiplied by several parts, of which the last
        `ends` it."""
        if not self._finishes_parts(share):
            yield sums
            return
        own = self.chunks.new_sums(share.matrix, "own") if of_part is None else of_part
        yield own
        if not ends:
            return
        for group in range(groups_of(self.columns.limit, share.matrix.halves)):
            for index in range(4):
                sums[group][index] = sums[group][index] + own[group][index]

    @staticmethod
    def _finishes_parts(share: Share) -> bool:
        """Whether what a part of the input makes is finished before it is added to what others make."""
        return share.is_of_several and bool(share.matrix.format.factor_bytes)
