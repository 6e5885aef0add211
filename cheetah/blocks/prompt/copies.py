"""What brings the operands of a pass's products into the ring: weights in one role, activations in another.

Both loops are one text for all matrices that are cut alike: what differs between them is a record, an argument whose
numbers the compiler folds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.prompt.cases import Given, row_tile_and_part
from cheetah.blocks.prompt.expert_tiles import ExpertTiles
from cheetah.blocks.prompt.machine import ACCUMULATOR_BYTES, GROUP_BYTES, PassMachine
from cheetah.blocks.prompt.ring import TileRing
from cheetah.blocks.prompt.weights import LotWeights, Window, stage_weights
from cheetah.lang import prim, ty
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import WINDOW_BLOCKS
from cheetah.plan.prompt import STAGE_TILES

MATRIX = ty.struct(
    "Matrix",
    **dict.fromkeys(("m_tiles", "row_tiles", "parts", "k_tiles", "waves", "last_wave_width", "wave_bytes"), ty.u32),
    **dict.fromkeys(("chunks", "chunk_bytes", "last_chunk_bytes", "pieces", "piece_tiles"), ty.u32),
)
"""A `MatrixLayout` as a pass cuts it: its M-tiles; rows of tiles, of all parts of k; these parts; K-tiles of one that
are multiplied; waves, M-tiles of the last, and bytes from wave to wave; chunks of an M-tile, bytes of one and of the
last; pieces of a part, and K-tiles of one."""


@dataclass(frozen=True, eq=False)
class CutMatrix:
    """A `MatrixLayout` whose sizes are read from its record; what decides about the text is the layout's own."""

    layout: MatrixLayout
    record: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.record if name in MATRIX.fields else self.layout, name)

    def wave_address(self, wave: ch.Expr) -> ch.Expr:
        return wave * ty.u64(self.record.wave_bytes)

    def wave_width(self, wave: ch.Expr) -> Any:
        if self.layout.waves == 1:
            return self.record.last_wave_width
        is_last = wave // (self.record.waves - 1)
        return self.layout.blocks - is_last * (self.layout.blocks - self.record.last_wave_width)

    def chunk_bytes(self, chunk: ch.Expr) -> Any:
        layout, record = self.layout, self.record
        if layout.chunks == 1 or layout.full_chunk_bytes == layout.last_chunk_bytes:
            return record.last_chunk_bytes
        return record.chunk_bytes + chunk // (record.chunks - 1) * (record.last_chunk_bytes - record.chunk_bytes)

    def chunk_address(self, chunk: ch.Expr, position: ch.Expr, width: ch.Expr) -> Any:
        return width * chunk * self.record.chunk_bytes + position * self.chunk_bytes(chunk)

    def piece_address(self, piece: ch.Expr, position: ch.Expr, width: ch.Expr) -> Any:
        if not self.layout.is_narrow:
            return self.chunk_address(piece, position, width)
        in_chunk = piece % 2 * (self.record.piece_tiles * self.layout.format.tile_bytes)
        return self.chunk_address(piece // 2, position, width) + in_chunk

    def tiles_of_piece(self, piece: ch.Expr) -> Any:
        layout = self.layout
        is_whole = layout.k_tiles % layout.piece_tiles == 0
        return self.record.piece_tiles if is_whole else layout.tiles_of_piece(piece)


class TileCopies:
    """The copies of a pass's products. token_tiles: of this launch (u32), the same in all roles."""

    def __init__(self, machine: PassMachine, ring: TileRing, token_tiles: ch.Expr) -> None:
        self.machine, self.ring, self.token_tiles = machine, ring, token_tiles
        self.residual_groups = machine.plan.residual_groups(ring.format)

    def bring_weights(self, matrix: MatrixLayout, given: Given) -> None:
        """In the weights role: those of all tiles."""
        self.machine.plan.check(matrix)
        self._copy_weights(matrix, self._record(matrix, given), given.offset, given)

    def bring_activations(self, matrix: MatrixLayout, given: Given) -> None:
        """In the activations role: those of all tiles."""
        self._copy_activations(matrix, self._record(matrix, given), given.input, given)

    def _record(self, matrix: MatrixLayout, given: Given) -> ch.Expr:
        plan = self.machine.plan
        return ch.record(
            MATRIX,
            matrix.name.upper(),
            **{name: getattr(matrix, name) for name in ("m_tiles", "waves", "last_wave_width", "chunks")},
            row_tiles=plan.row_tiles(matrix, given.height) * given.parts,
            parts=given.parts,
            k_tiles=plan.vector_tiles(matrix) // given.parts,
            wave_bytes=matrix.blocks * matrix.m_tile_bytes,
            chunk_bytes=matrix.full_chunk_bytes,
            last_chunk_bytes=matrix.last_chunk_bytes,
            pieces=matrix.pieces // given.parts,
            piece_tiles=matrix.piece_tiles,
        )

    @ch.function
    def _copy_weights(self, layout: MatrixLayout, matrix: ch.Expr, offset: ch.Expr, given: Given) -> None:
        """In the weights role: a lane an M-tile, 64 columns a stage."""
        packed = given.packed + offset
        lane, plan, slots = self.machine.weights_lane, self.machine.plan, given.tiles
        known = CutMatrix(layout, matrix)
        with self.machine.tiles(matrix.row_tiles, self.token_tiles if slots is None else slots.count) as tile:
            row = tile // self.token_tiles if slots is None else tile % matrix.row_tiles
            row_tile, part = row_tile_and_part(row, matrix.parts)
            # Narrow M-tiles are twice as many, and two of them fill the room of one.
            height = (given.height or plan.tile_m_tiles) * layout.halves
            first = row_tile * height
            count = ch.minimum(matrix.m_tiles - first, height)
            m_tile = ch.minimum(first + lane, matrix.m_tiles - 1)
            wave = m_tile // layout.blocks
            position = m_tile % layout.blocks
            width = known.wave_width(wave)
            wave_bytes = known.wave_address(ty.u64(wave))
            if slots is not None:
                expert = slots.tile(tile // matrix.row_tiles).expert
                wave_bytes = ch.const(ty.u64, wave_bytes + ty.u64(expert) * layout.expert_bytes, name="wave_bytes")
            name = "piece" if layout.is_narrow else "chunk"
            with ch.for_(part * matrix.pieces, (part + 1) * matrix.pieces, unroll=1, name=name) as piece:
                weights = stage_weights(layout.format, self.machine.weights_lane, plan.whole_tiles)
                if isinstance(weights, LotWeights):
                    window = Window.of(packed, layout, m_tile, piece)
                    blocks = ch.minimum(matrix.k_tiles - piece * WINDOW_BLOCKS, WINDOW_BLOCKS)
                    weights.copy_window(self.ring, packed, layout.index_bytes, window, blocks, count)
                else:
                    source = packed + (wave_bytes + ty.u64(known.piece_address(piece, position, width)))
                    weights.copy(self.ring, source, ty.u32(0) + known.tiles_of_piece(piece), count, layout.halves)
            if given.residual is not None:
                with ch.for_(plan.tile_groups // self.residual_groups, unroll=1):
                    with self.ring.fill_weights(0, lanes=1):
                        pass
            self.ring.end_weights()

    @ch.function
    def _copy_activations(self, layout: MatrixLayout, matrix: ch.Expr, input: ch.Expr, given: Given) -> None:
        """In the activations role."""
        plan = self.machine.plan
        if given.tiles is not None:
            return self._copy_of_slots(matrix, input, given.tiles)
        tile_bytes = self.machine.activation_tile_bytes
        with self.machine.tiles(matrix.row_tiles, self.token_tiles) as tile:
            token_tile = tile % self.token_tiles
            row_tile, part = row_tile_and_part(tile // self.token_tiles, matrix.parts)
            source = input + token_tile * tile_bytes
            end = (part + 1) * matrix.k_tiles
            with ch.for_(part * matrix.k_tiles, end, STAGE_TILES, unroll=1, name="k_tile") as k_tile:
                count = ch.minimum(end - k_tile, STAGE_TILES)
                with self.ring.fill_activations(count * tile_bytes) as (stage, barrier):
                    with ch.for_(count, unroll=1) as index:
                        place = stage + (self.ring.weights_bytes + index * tile_bytes)
                        k_bytes = ty.u64(k_tile + index) * (plan.groups * GROUP_BYTES)
                        prim.bulk_copy(place, source + k_bytes, tile_bytes, barrier)
            if given.residual is not None:
                self._copy_residual(layout, given.residual, row_tile, token_tile)

    @ch.inline
    def _copy_of_slots(self, matrix: ch.Expr, input: ch.Expr, slots: ExpertTiles) -> None:
        """The same of the slots of a tile's expert, as many groups as it has: what a stage has behind them, of others,
        makes sums that nobody finishes."""
        with self.machine.tiles(matrix.row_tiles, slots.count) as tile:
            of_slots = slots.tile(tile // matrix.row_tiles)
            tile_bytes = ch.const(ty.u32, of_slots.groups * GROUP_BYTES, name="tile_bytes")
            source = input + ty.u64(of_slots.first_group) * GROUP_BYTES
            with ch.for_(0, matrix.k_tiles, STAGE_TILES, unroll=1, name="k_tile") as k_tile:
                count = ch.minimum(matrix.k_tiles - k_tile, STAGE_TILES)
                with self.ring.fill_activations(count * tile_bytes) as (stage, barrier):
                    with ch.for_(count, unroll=1) as index:
                        place = stage + (self.ring.weights_bytes + index * self.machine.activation_tile_bytes)
                        k_bytes = ty.u64(k_tile + index) * (slots.plan.groups * GROUP_BYTES)
                        prim.bulk_copy(place, source + k_bytes, tile_bytes, barrier)

    @ch.inline
    def _copy_residual(self, layout: MatrixLayout, residual: ch.Expr, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        """Behind the last k: what the sums are added to, some groups of tokens of every M-tile a stage."""
        plan, groups = self.machine.plan, self.residual_groups
        first = row_tile * plan.tile_m_tiles
        m_tiles = ch.minimum(ty.u32(layout.full_m_tiles) - first, plan.tile_m_tiles)
        size = groups * ACCUMULATOR_BYTES
        with ch.for_(0, plan.tile_groups, groups, unroll=1, name="group") as group:
            with self.ring.fill_activations(m_tiles * size) as (stage, barrier):
                with ch.for_(m_tiles, unroll=1, name="m_tile") as m_tile:
                    place = ty.u64(first + m_tile) * plan.groups + ty.u64(token_tile * plan.tile_groups + group)
                    source = ch.reinterpret(ty.ptr(ty.u8), residual) + place * ACCUMULATOR_BYTES
                    prim.bulk_copy(stage + m_tile * size, source, size, barrier)
