"""A chunk of an M-tile in a full stage, times the vectors beside it: what a consumer warp does of it.

Where a warp has registers for its tiles of a chunk, the stage is given back before they are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
from cheetah.blocks.linear.formats import accumulators_of, fragments_class, fragments_of
from cheetah.blocks.linear.formats.block_tiles import LotFragments, about_lot
from cheetah.blocks.linear.fragments import Activations, Held, groups_of
from cheetah.blocks.linear.lists import List, list_accumulators
from cheetah.blocks.linear.parts import Part
from cheetah.blocks.ring import Ring, Stage
from cheetah.blocks.timeline import Timeline
from cheetah.lang import prim, ty
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import BF16, NO_BLOCK, WINDOW_BLOCKS, BlockRows


class Chunks:
    """How the chunks of all matrices are multiplied, in the consumer role. `place` is in what follows the number that
    the vectors beside a chunk have in shared memory, where they lie one after another."""

    def __init__(self, columns: Columns, ring: Ring, timeline: Timeline) -> None:
        self.machine, self.columns, self.ring, self.timeline = columns.machine, columns, ring, timeline

    def new_sums(self, layout: MatrixLayout, name: str = "sums") -> ch.Expr:
        """Sums of an M-tile, zero: f32 [accumulators, 4]."""
        tokens = self.columns.limit
        count = accumulators_of(layout, tokens) + list_accumulators(layout, tokens)
        return ch.array(ty.f32, count, 4, zero=True, name=name)

    @ch.inline
    def use_all(self, layout: MatrixLayout, part: Part, sums: Any, is_first: ch.Value) -> None:
        """Chunks of an M-tile, as many as a part of the input lies beside. See `use`."""
        if isinstance(layout.format, BlockRows):
            self._use_lots(layout, part, _argument(part.first), _argument(part.end), _argument(part.offset), sums)
            return
        if type(part) is Part and type(part.offset) is int:
            self._use_chunks(layout, part, _argument(part.first), _argument(part.end), sums, is_first)
            return
        if part.ahead is not None:
            with self.ring.use_ahead(part.ahead, ch.argument(self.machine.plan.consumer_warps)) as stage:
                self.timeline.stamp_first("first_chunk")
                self._multiply_alone(layout, part, stage, sums)
            return
        with ch.for_(part.first, part.end, unroll=2) as chunk:
            self.use(layout, chunk, part.place(chunk), part, sums, is_first)

    @ch.function
    def _use_chunks(
        self, layout: MatrixLayout, part: Part, first: ch.Expr, end: ch.Expr, sums: Any, is_first: ch.Value
    ) -> None:
        """Chunks [first, end) of an M-tile in the next stages, by the part of the input that lies beside them."""
        part = replace(part, first=first, end=end)
        with ch.for_(first, end, unroll=2) as chunk:
            self.use(layout, chunk, part.place(chunk), part, sums, is_first)

    @ch.function
    def _use_lots(
        self, layout: MatrixLayout, part: Part, first: ch.Expr, end: ch.Expr, offset: ch.Expr, sums: Any
    ) -> None:
        """The lots of an M-tile that have blocks of windows [first, end), in the next stages, by the part of the input
        that lies beside these: the last is the one behind which no such block follows."""
        beside = part.vectors(self.columns, layout, offset)
        blocks = None if layout.slices == 1 else (ty.u32(first * WINDOW_BLOCKS), ty.u32(end * WINDOW_BLOCKS))
        following = ch.var(ty.u32, 0)
        with ch.while_(following < (NO_BLOCK if blocks is None else blocks[1])):
            with self.ring.use() as stage:
                self.timeline.stamp_first("first_chunk")
                lot = LotFragments(stage, self.machine.lane, layout.format)
                warps = self.machine.plan.consumer_warps
                following.set(lot.multiply_share(self.machine.warp, warps, beside, blocks, sums))
                lot.finish_chunk()

    @ch.function
    def skip_lots(self) -> None:
        """Use up those of an M-tile, that were fetched in vain."""
        following = ch.var(ty.u32, 0)
        with ch.while_(following < NO_BLOCK):
            with self.ring.use() as stage:
                about = ch.const(ty.u32, about_lot(stage.address), name="about")
                following.set(about >> 16)
                stage.has_read(about)

    @ch.inline
    def use(
        self, layout: MatrixLayout, chunk: ch.Expr, place: ch.Expr, part: Part, sums: Any, is_first: ch.Value
    ) -> None:
        """The next stage, chunk `chunk` of an M-tile, by the vectors of a part of the input. is_first: whether this is
        the block's first M-tile that is multiplied by them."""
        if layout.sums_bytes(self.columns.limit) and is_first is not False:
            with ch.if_(layout.waves == 1 or is_first):
                self._sum_chunk(layout, chunk, place, part)
        held = self._room_for_tiles(layout)
        with self.ring.use() as stage:
            self.timeline.stamp_first("first_chunk")
            if held is None:
                self._multiply_chunk(layout, chunk, place, part, stage, sums)
            else:
                self._hold_chunk(layout, chunk, place, part, stage, held)
                if layout.format.list_units:
                    self._add_list(layout, chunk, place, part, stage, sums)
        if held is not None:
            self._multiply_held(layout, chunk, held, sums)

    def _room_for_tiles(self, layout: MatrixLayout) -> Held | None:
        """Registers for a warp's tiles of a chunk. Not for bf16 tiles where other weights are quantised, and not in
        slices where a last chunk has fewer tiles: words spilled then (qwen3-4b; 100 of them, smollm3-3b, 8 tokens)."""
        is_mixed = layout.format == BF16 and bool(self.machine.model.formats)
        is_crowded = layout.last_chunk_tiles < layout.tiles_per_chunk and layout.slices > 1
        if groups_of(self.columns.limit, layout.halves) > 1 or is_mixed or is_crowded:
            return None
        tiles = layout.tiles_per_chunk // self.machine.plan.consumer_warps
        return fragments_class(layout, self.columns.limit).room(layout.format, tiles)

    @contextmanager
    @ch.inline
    def _own_tiles(self, layout: MatrixLayout, chunk: ch.Expr) -> Iterator[tuple[ch.Expr, ch.Expr]]:
        """This warp's tiles of a chunk: (its number among them, its number in the chunk)."""
        machine = self.machine
        with ch.for_(layout.tiles_per_chunk // machine.plan.consumer_warps, unroll=True) as turn:
            pair = turn * machine.plan.consumer_warps + machine.warp
            full = layout.last_chunk_tiles == layout.tiles_per_chunk
            with ch.if_(full or self._is_tile(layout, chunk, turn, pair)):
                yield turn, pair

    def _is_tile(self, layout: MatrixLayout, chunk: ch.Expr, turn: ch.Expr, pair: ch.Expr) -> Any:
        """Whether a chunk has this tile; not asked where the last one has as many and a matrix has slices: what is
        in registers from one to the next spilled (qwen3-4b)."""
        sure = layout.last_chunk_tiles // self.machine.plan.consumer_warps
        has_tile = pair < layout.chunk_tiles(chunk)
        return (turn < sure) | has_tile if sure and layout.slices > 1 else has_tile

    def _beside(self, layout: MatrixLayout, place: ch.Expr, pair: ch.Expr, part: Part) -> Activations:
        """The vectors beside tile `pair` of a chunk."""
        return part.vectors(self.columns, layout, place * layout.tiles_per_chunk + pair)

    @ch.function
    def _hold_chunk(
        self, layout: MatrixLayout, chunk: ch.Expr, place: ch.Expr, part: Part, stage: Stage, held: Held
    ) -> None:
        """This warp's tiles of a chunk, and what they are multiplied with, to registers."""
        fragments = fragments_of(layout, self.columns.limit, stage, self.machine.lane)
        fragments.begin_holding()
        with self._own_tiles(layout, chunk) as (turn, pair):
            fragments.hold(pair, self._beside(layout, place, pair, part), held, turn)
        if layout.format.factor_bytes:
            with ch.if_(chunk == layout.chunks - 1):
                fragments.hold_factors(layout.last_chunk_tiles, held)
        fragments.finish_chunk()

    @ch.function
    def _multiply_held(self, layout: MatrixLayout, chunk: ch.Expr, held: Held, sums: Any) -> None:
        """The products of what `hold_chunk` brought."""
        with self._own_tiles(layout, chunk) as (turn, _):
            held.multiply(turn, sums)
        if layout.format.factor_bytes:
            with ch.if_(chunk == layout.chunks - 1):
                held.finish_rows(sums)

    @ch.function
    def _sum_chunk(self, layout: MatrixLayout, chunk: ch.Expr, place: ch.Expr, part: Part) -> None:
        """What zero points need of this warp's vectors beside a chunk."""
        fragments = fragments_class(layout, self.columns.limit)
        with self._own_tiles(layout, chunk) as (_, pair):
            fragments.sum_vectors(self._beside(layout, place, pair, part), self.machine.lane, layout.format)
        prim.warp_barrier()  # all lanes read what the first four have stored

    @ch.function
    def _multiply_chunk(
        self, layout: MatrixLayout, chunk: ch.Expr, place: ch.Expr, part: Part, stage: Stage, sums: Any
    ) -> None:
        """Chunk `chunk` of an M-tile by the vectors in shared memory, in which it is number `place`."""
        numbers = self._list_of(layout, chunk, place, part, stage, sums)
        fragments = fragments_of(layout, self.columns.limit, stage, self.machine.lane)
        with self._own_tiles(layout, chunk) as (_, pair):
            fragments.multiply(pair, self._beside(layout, place, pair, part), sums)
        if numbers is not None:
            numbers.multiply()
        if layout.format.factor_bytes:
            with ch.if_(chunk == layout.chunks - 1):
                fragments.finish_rows(layout.last_chunk_tiles, self.columns, sums, numbers)
        elif numbers is not None:
            with ch.if_(chunk == layout.chunks - 1):
                numbers.finish()
        fragments.finish_chunk()
        if numbers is not None:
            numbers.finish_chunk(stage)

    def _list_of(
        self, layout: MatrixLayout, chunk: ch.Expr, place: ch.Expr, part: Part, stage: Stage, sums: Any
    ) -> List | None:
        """What is listed beside a chunk, if anything is, to be multiplied behind its tiles."""
        if not layout.format.list_units:
            return None
        units = self._beside(layout, place, ch.argument(0), part).units
        listed = List(layout, self.columns, units, sums, accumulators_of(layout, self.columns.limit))
        listed.load(chunk, stage)
        return listed

    @ch.function
    def _multiply_alone(self, layout: MatrixLayout, part: Part, stage: Stage, sums: Any) -> None:
        """An M-tile of one chunk by the vectors in shared memory, by this warp alone."""
        fragments = fragments_of(layout, self.columns.limit, stage, self.machine.lane)
        with ch.for_(layout.k_tiles, unroll=True, name="tile") as tile:
            fragments.multiply(tile, part.vectors(self.columns, layout, tile), sums)
        fragments.finish_rows(layout.k_tiles, self.columns, sums)
        fragments.finish_chunk()

    @ch.function
    def _add_list(
        self, layout: MatrixLayout, chunk: ch.Expr, place: ch.Expr, part: Part, stage: Stage, sums: Any
    ) -> None:
        """The products of what is listed beside a chunk; behind the last, their sums to those of the M-tile."""
        numbers = self._list_of(layout, chunk, place, part, stage, sums)
        assert numbers is not None
        numbers.multiply()
        with ch.if_(chunk == layout.chunks - 1):
            numbers.finish()
        numbers.finish_chunk(stage)


def _argument(chunk: ch.Value) -> ch.Expr:
    return chunk if isinstance(chunk, ch.Expr) else ch.argument(int(chunk))
