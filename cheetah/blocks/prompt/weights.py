"""The weights of a stage: how they are brought, and how a warp makes operands A of its M-tile's, by format.

Packed bf16 fragments are operands as they are. Quantised codes become bf16 numbers by the same bits as in decoding
(`cheetah.blocks.linear.formats`). There what is too much of an integer, and scales of groups, come behind the products.
Here the products of a tile's 256 tokens would cost too much, so a code's number is made in f32, exactly, times the
scale of its group, and rounded to bf16: once, and not at all where the row's factor is the only scale, which multiplies
the sums. A weight is off by 2^-9 of itself at most, as an activation is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import combinations
from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.formats import FRAGMENTS
from cheetah.blocks.linear.formats.digits import LOWER_NIBBLES
from cheetah.blocks.linear.formats.e4m3 import E4m3Fragments
from cheetah.blocks.linear.formats.integers import MIDDLE_NIBBLE
from cheetah.blocks.linear.formats.names import format_with_names
from cheetah.blocks.linear.formats.quantized import sum_of
from cheetah.blocks.linear.formats.sizes import raised
from cheetah.blocks.linear.lots import LINES_OF_LOT
from cheetah.blocks.patterns import HIGH_HALVES, LOW_HALVES
from cheetah.blocks.prompt.ring import TileRing
from cheetah.lang import prim, ty
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import (
    BF16,
    BLOCKS_OF_TILE,
    LOT_BLOCKS,
    LOT_LINE_BYTES,
    VECTOR_COLUMNS,
    WINDOW_BLOCKS,
    ZERO_BLOCKS,
    BlockRows,
    BlockTiles,
    QuantizedTiles,
    SparseQuantizedTiles,
    SparseTiles,
    TileFormat,
)
from cheetah.plan.prompt import STAGE_TILES, stage_format

STEPS_PER_TILE = 2
"""Products of 16 k for 32 columns."""
LOAD_BYTES = 32 * 16
"""Of a warp."""
LINES_OF_BLOCK = BF16.tile_bytes // LOT_LINE_BYTES
GROUP = 4
"""Columns of which two are there."""
BYTES_OF_FIRST, BYTES_OF_SECOND, NO_BYTES = 0x10, 0x32, 0x44
"""Which bytes of a pair of numbers, and of 0, a permutation takes."""
UPPER_BITS, OTHER_BITS = ch.bits("UPPER_BITS", 0x88888888), ch.bits("OTHER_BITS", 0x77777777)
"""Of nibbles."""
FIRST_BYTES, SECOND_BYTES = ch.bits("FIRST_BYTES", 0x6240), ch.bits("SECOND_BYTES", 0x7351)
"""Of two words: the first bytes of their lower halves, then of their upper ones; and the second."""
EVEN_BYTES = ch.bits("EVEN_BYTES", 0x6420)


class StageWeights(ABC):
    """Weights of one format. lane: of the warp."""

    stages_of_tile = 1
    """In which a K-tile is read, that comes with the first of them."""

    def __init__(self, format: Any, lane: ch.Expr) -> None:
        self.format, self.lane = format, lane
        self.slot: Any = format_with_names(stage_format(format, self.stages_of_tile > 1), " slot")

    @ch.inline
    def copy(self, ring: TileRing, source: Any, tiles: Any, count: Any, halves: int = 1) -> None:
        """In the weights role: K-tiles that lie side by side from `source` on, in as many stages as they fill, for
        `count` lanes. halves: of a K-tile, see `MatrixLayout`; of a narrow M-tile half as many lie in a stage, beside
        those of its neighbour."""
        tile_bytes, at_once = self.format.tile_bytes, self.slot.columns // (self.format.columns * halves)
        with ch.for_(0, tiles, at_once, unroll=1, name="k_tile") as k_tile:
            size = ch.minimum(tiles - k_tile, at_once) * tile_bytes
            with ring.fill_weights(size * count, count) as (stage, barrier):
                prim.bulk_copy(stage + self.lane * (at_once * tile_bytes), source + k_tile * tile_bytes, size, barrier)

    @abstractmethod
    def load(self, stage: Any, warp: Any, turn: int, steps: int, fragments: Any) -> None:
        """In the consumer role: `steps` operands A of a warp's M-tile of a full stage, the M-tile's stages taking turns
        0 and 1. stage: that with which the weights came."""

    def place(self, stage: ch.Expr, index: ch.Expr) -> Any:
        """Where the weights of the stage's M-tile `index` begin."""
        return stage + index * self.slot.tile_bytes


class Bf16Weights(StageWeights):
    """Two K-tiles a stage, which lie side by side: operands as they are."""

    def load(self, stage: ch.Expr, warp: ch.Expr, turn: int, steps: int, fragments: ch.Expr) -> None:
        words = ch.reinterpret(ty.ptr(ty.u32x4), self.place(stage, warp))
        for step in range(steps):
            fragments[step] = words[step * 32 + self.lane]


class SparseWeights(StageWeights):
    """Of each four columns the two that are there go to their places, the others are zero. A stage has a K-tile.

    This lane's columns of a product are four side by side, number 2t + step of 32 columns' eight: of the first four
    of these or of the `others`, number `four`. So packed ones lie with lane 4g + four."""

    format: Any

    @ch.inline
    def load(self, stage: Any, warp: Any, turn: int, steps: int, fragments: Any) -> None:
        slot, row, quarter = self.place(stage, warp), self.lane // 4, self.lane % 4
        others = ch.const(ty.u32, quarter // 2, name="others")
        first_four = ch.const(ty.u32, quarter % 2 * STEPS_PER_TILE, name="first_four")
        self.begin(slot, row)
        places = self.places(slot, row, steps // STEPS_PER_TILE, first_four, others)
        upper = ch.const(ty.u32, places & UPPER_BITS, name="upper")
        indices = ch.const(ty.u32, places & OTHER_BITS ^ upper - (upper >> 3), name="indices")
        of_rows = [_Selectors(indices), _Selectors(indices >> 16)]
        for step in range(steps):
            four = first_four + step % STEPS_PER_TILE
            pairs = self.pairs(slot, row * 4 + four, step // STEPS_PER_TILE, others, turn)
            spread = [one.spread(pair, step) for one, pair in zip(of_rows, pairs, strict=True)]
            (low, low_behind), (high, high_behind) = spread
            operand = prim.make_u32x4(low, high, low_behind, high_behind)
            fragments[step] = self.finished(operand)

    def begin(self, slot: ch.Expr, row: ch.Expr) -> None:
        """Before the first operand of rows g and g + 8, g being `row`."""

    def pairs(self, slot: ch.Expr, lane: ch.Expr, part: int, others: ch.Expr, turn: int) -> tuple[Any, Any]:
        """The two bf16 numbers of rows g and g + 8, of 32 columns `part`, that the lane of them has."""
        words = ch.reinterpret(ty.ptr(ty.u32x2), slot)
        of_rows = ch.const(ty.u32x2, words[part * 64 + lane * 2 + others], name="of_rows")
        return of_rows.x, of_rows.y

    def places(self, slot: ch.Expr, row: ch.Expr, parts: int, first_four: ch.Expr, others: ch.Expr) -> ch.Expr:
        """Where the numbers of all steps belong: a nibble a step of row g, then as many of row g + 8."""
        of_lanes = ch.reinterpret(ty.ptr(ty.u32), slot + self.slot.places_at)
        words = [ch.const(ty.u32, of_lanes[row * 4 + part * 2 + others], name="places") for part in range(parts)]
        bytes_of_fours = ch.select(first_four == 0, ty.u32(FIRST_BYTES), ty.u32(SECOND_BYTES))
        return ch.const(ty.u32, prim.choose_bytes(words[0], words[-1], bytes_of_fours), name="of_steps")

    def finished(self, operand: ch.Expr) -> Any:
        return operand


class SparseE4m3Weights(SparseWeights):
    """The same of e4m3, times a power of two."""

    def pairs(self, slot: Any, lane: Any, part: int, others: Any, turn: int) -> tuple[Any, Any]:
        words = ch.reinterpret(ty.ptr(ty.u32x2), slot)
        of_rows = ch.const(ty.u32x2, words[lane * 2 + part], name="of_rows")
        both = [E4m3Fragments.converted(word) for word in (of_rows.x, of_rows.y)]
        low, high = (ch.select(others == 0, first, second) for first, second in both)
        return ch.const(ty.u32, low, name="pair"), ch.const(ty.u32, high, name="pair")

    def finished(self, operand: Any) -> ch.Expr:
        return raised(operand, E4m3Fragments.codes_smaller_by, E4m3Fragments.codes_smaller_by)


class SparseInt4Weights(SparseWeights):
    """The same of 4-bit codes, which become numbers times their scales in f32. A stage has half a K-tile: all codes and
    scales, and the half's places."""

    @ch.inline
    def copy(self, ring: TileRing, source: Any, tiles: Any, count: Any, halves: int = 1) -> None:
        before, half_places = self.format.places_at, (self.format.tile_bytes - self.format.places_at) // 2
        with ch.for_(tiles, unroll=1, name="k_tile") as k_tile:
            tile = source + k_tile * self.format.tile_bytes
            for half in range(2):
                with ring.fill_weights((before + half_places) * count, count) as (stage, barrier):
                    place = self.place(stage, self.lane)
                    prim.bulk_copy(place, tile, before, barrier)
                    prim.bulk_copy(place + before, tile + (before + half * half_places), half_places, barrier)

    def pairs(self, slot: Any, lane: Any, part: int, others: Any, turn: int) -> tuple[Any, Any]:
        words = ch.reinterpret(ty.ptr(ty.u32x2), slot)
        of_rows = ch.const(ty.u32x2, words[lane * 2 + part], name="of_rows")
        shift = others * 16 + (4 if turn == 0 else 0)
        low, high = (self._numbers(word >> shift, row, turn) for row, word in enumerate((of_rows.x, of_rows.y)))
        return low, high

    def begin(self, slot: Any, row: Any) -> None:
        self.scales: list[tuple[Any, Any]] = []
        if self.format.group_columns is not None:
            pairs = ch.reinterpret(ty.ptr(ty.u32), slot + self.slot.scales_at)
            for group in range(self.format.groups):
                pair = ch.const(ty.u32, pairs[group * 8 + row], name="scale_pair")
                self.scales.append((prim.f16x2_low(pair), prim.f16x2_high(pair)))

    def _numbers(self, codes: Any, row: int, turn: int) -> ch.Expr:
        """Two codes, in the lowest nibbles of the lowest bytes, as a pair of bf16."""
        values = [ty.f32(codes >> shift & 15 ^ MIDDLE_NIBBLE) - float(MIDDLE_NIBBLE) for shift in (0, 8)]
        if self.scales:
            scale = self.scales[turn * self.format.groups // 2][row]
            values = [value * scale for value in values]
        return ch.const(ty.u32, prim.pack_bf16x2(*values), name="pair")

    def places(self, slot: Any, row: Any, parts: int, first_four: Any, others: Any) -> ch.Expr:
        """A four has a byte, of which one nibble is of these columns."""
        of_lanes = ch.reinterpret(ty.ptr(ty.u32x2), slot + self.slot.places_at)
        words = [ch.const(ty.u32x2, of_lanes[row * 2 + part], name="places") for part in range(parts)]
        bytes_of_fours = ch.select(first_four == 0, ty.u32(LOW_HALVES), ty.u32(HIGH_HALVES))
        rows = []
        for member in "xy":
            pair = [getattr(word, member) for word in (words[0], words[-1])]
            fours = ch.const(
                ty.u32, prim.choose_bytes(*pair, bytes_of_fours) >> others * 4 & LOWER_NIBBLES, name="fours"
            )
            rows.append(ch.const(ty.u32, fours | fours >> 4, name="of_row"))
        return ch.const(ty.u32, prim.byte_permute(*rows, EVEN_BYTES), name="of_steps")


class _Selectors:
    """Where the two numbers of a step's four go, of four steps: which bytes of the pair, and of 0, a permutation takes.
    `indices` has in its lower half a nibble for each step: of its two places, see `_index_of`.

    That permutation also looks up: four of the eight bytes of a table at once."""

    def __init__(self, indices: Any) -> None:
        tables = [_table_of(column) for column in range(GROUP)]
        self.of_columns = [ch.const(ty.u32, prim.choose_bytes(*table, indices), name="of_column") for table in tables]

    def spread(self, pair: Any, step: int) -> list[Any]:
        """Two numbers as four columns, two words."""
        of_step = (4 + step) << 4 | step
        halves = (self.of_columns[:2], self.of_columns[2:])
        return [
            ch.const(ty.u32, prim.choose_bytes(pair, ty.u32(0), prim.byte_permute(*columns, of_step)), name="columns")
            for columns in halves
        ]


def _index_of(first: int, second: int) -> int:
    """A number below 8 for two places that come as a nibble: its upper bit flips the others."""
    nibble = first | second << 2
    return nibble ^ 15 if nibble & 8 else nibble


def _table_of(column: int) -> tuple[Any, Any]:
    """For each of eight indices, which bytes of a pair, or of 0, are those of a column: two words."""
    found = [NO_BYTES] * 8
    for first, second in combinations(range(GROUP), 2):
        if column in (first, second):
            found[_index_of(first, second)] = BYTES_OF_FIRST if column == first else BYTES_OF_SECOND
    words = [sum(one << 8 * place for place, one in enumerate(found[half : half + 4])) for half in (0, 4)]
    names = (f"BYTES_OF_COLUMN_{column}", f"MORE_BYTES_OF_COLUMN_{column}")
    low, high = (ch.bits(name, word) for name, word in zip(names, words, strict=True))
    return ty.u32(low), ty.u32(high)


class BlockWeights(StageWeights):
    """A K-tile of 128 columns in each of the two stages that it fills: of the blocks of a stage's columns those that
    are there, as they are, and zeros."""

    format: BlockTiles

    @ch.inline
    def copy(self, ring: TileRing, source: Any, tiles: Any, count: Any, halves: int = 1) -> None:
        tile_bytes = self.format.tile_bytes
        with ch.for_(tiles, unroll=1, name="k_tile") as k_tile:
            with ch.for_(BLOCKS_OF_TILE // STAGE_TILES, unroll=1, name="half"):
                with ring.fill_weights(tile_bytes * count, count) as (stage, barrier):
                    source_tile = source + k_tile * tile_bytes
                    prim.bulk_copy(self.place(stage, self.lane), source_tile, tile_bytes, barrier)

    @ch.inline
    def load(self, stage: Any, warp: Any, turn: int, steps: int, fragments: Any) -> None:
        slot = self.place(stage, warp)
        words = ch.reinterpret(ty.ptr(ty.u32x4), slot)
        of_tile = ch.reinterpret(ty.ptr(ty.u32), slot + self.format.numbers_at)
        numbers = ch.const(ty.u32, of_tile[0], name="numbers")
        for part in range(steps // STEPS_PER_TILE):
            wanted = turn * STAGE_TILES + part
            found = ch.const(ty.u32, self._place_of(numbers, wanted), name="found")
            for step in range(STEPS_PER_TILE):
                fragments[part * STEPS_PER_TILE + step] = prim.make_u32x4(*(ty.u32(0),) * 4)
            with ch.if_(found < self.format.kept):
                for step in range(STEPS_PER_TILE):
                    fragments[part * STEPS_PER_TILE + step] = words[(found * STEPS_PER_TILE + step) * 32 + self.lane]

    def _place_of(self, numbers: Any, wanted: int) -> Any:
        """Which of a K-tile's blocks has this number; `kept` if none has."""
        found: Any = ty.u32(self.format.kept)
        for block in range(self.format.kept):
            found = ch.select((numbers >> 8 * block & 0xFF) == wanted, ty.u32(block), found)
        return found


@dataclass(frozen=True, eq=False)
class Window:
    """What the index says of a window of an M-tile's columns: the line where the M-tile's lots begin, how many of its
    blocks lie before, and a bit for each that is there."""

    begin: ch.Expr
    before: ch.Expr
    there: ch.Expr

    @classmethod
    @ch.inline
    def of(cls, matrix: ch.Expr, layout: MatrixLayout, m_tile: ch.Expr, number: ch.Expr) -> Window:
        chunks, index = layout.chunks, ch.reinterpret(ty.ptr(ty.u32), matrix)
        slot = ch.const(ty.u32, prim.load_constant_u32(index + (m_tile + layout.m_tiles)), name="slot")
        entries = index + (slot * (chunks + 1) + 2 * layout.m_tiles)
        masks = index + (slot * chunks + layout.m_tiles * (chunks + 3))
        begin = ch.const(ty.u32, prim.load_constant_u32(entries), name="begin")
        of_windows = ch.const(ty.u32, prim.load_constant_u32(entries + number), name="of_windows")
        there = ch.const(ty.u32, prim.load_constant_u32(masks + number), name="there")
        return cls(begin, ch.const(ty.u32, ch.select(number == 0, ty.u32(0), of_windows), name="before"), there)

    def line(self, rank: Any) -> ch.Expr:
        """Of the matrix, where the block lies that has so many of its M-tile before it."""
        lot, within = rank // LOT_BLOCKS, rank % LOT_BLOCKS
        line: ch.Expr = self.begin + (lot * LINES_OF_LOT + within * LINES_OF_BLOCK + 1)
        return line


class LotWeights(Bf16Weights):
    """Two blocks a stage, each copied from where it is, or, if it is not there, from the matrix' blocks of zeros: so
    operands are those of dense weights. Both come in one copy where both are there, or neither is."""

    format: BlockRows

    @ch.inline
    def copy_window(
        self, ring: TileRing, matrix: ch.Expr, zeros: int, window: Window, blocks: ch.Expr, count: ch.Expr
    ) -> None:
        """In the weights role, for `count` lanes, the stages of the first `blocks` places of a window of each lane's
        M-tile. zeros: byte of the blocks of zeros."""
        size = BF16.tile_bytes
        with ch.for_(0, blocks, STAGE_TILES, unroll=1, name="first") as first:
            with ring.fill_weights(STAGE_TILES * size * count, count) as (stage, barrier):
                place = self.place(stage, self.lane)
                both = ch.const(ty.u32, window.there >> first & 3, name="both")
                before = prim.population_u32(window.there & (ty.u32(1) << first) - 1)
                rank = ch.const(ty.u32, window.before + before, name="rank")
                some = ty.u32(self.lane * (WINDOW_BLOCKS // STAGE_TILES) + first // STAGE_TILES)
                none = some % (ZERO_BLOCKS // STAGE_TILES) * (STAGE_TILES * LINES_OF_BLOCK) + zeros // LOT_LINE_BYTES
                is_pair = (both == 3) & (rank % LOT_BLOCKS != LOT_BLOCKS - 1)
                first_size = ch.select((both == 0) | is_pair, ty.u32(STAGE_TILES * size), ty.u32(size))
                first_size = ch.const(ty.u32, first_size, name="first_size")
                line = ch.select((both & 1) != 0, window.line(rank), none)
                prim.bulk_copy(place, matrix + ty.u64(line) * LOT_LINE_BYTES, first_size, barrier)
                with ch.if_(first_size == size):
                    line = ch.select((both & 2) != 0, window.line(rank + (both & 1)), none)
                    prim.bulk_copy(place + size, matrix + ty.u64(line) * LOT_LINE_BYTES, size, barrier)


class QuantizedWeights(StageWeights):
    """Half a K-tile a stage: its codes, then all scales and zero points of the K-tile."""

    format: QuantizedTiles

    @ch.inline
    def copy(self, ring: TileRing, source: Any, tiles: Any, count: Any, halves: int = 1) -> None:
        codes = self.slot.scales_at
        others = self.format.tile_bytes - self.format.scales_at
        with ch.for_(tiles, unroll=1, name="k_tile") as k_tile:
            tile = source + k_tile * self.format.tile_bytes
            for half in range(self.format.scales_at // codes):
                with ring.fill_weights((codes + others) * count, count) as (stage, barrier):
                    place = self.place(stage, self.lane)
                    prim.bulk_copy(place, tile + half * codes, codes, barrier)
                    if others:
                        prim.bulk_copy(place + codes, tile + self.format.scales_at, others, barrier)

    @ch.inline
    def load(self, stage: Any, warp: Any, turn: int, steps: int, fragments: Any) -> None:
        slot = self.place(stage, warp)
        # What was read need not be told: the stage is given back when the products of these registers are over.
        of_stage: Any = SimpleNamespace(address=slot)
        tiles: Any = FRAGMENTS[self.format.parts[0]](of_stage, self.lane, self.slot)
        codes = ch.reinterpret(ty.ptr(ty.u32x4), slot)
        each = self.slot.scales_at // LOAD_BYTES // self.stages_of_tile
        first = turn % self.stages_of_tile * each
        loads = range(first, first + each)
        tiles.words = [ch.const(ty.u32x4, codes[self.lane + index * 32], name="words") for index in loads]
        tiles.begin_parts(slot, turn * STAGE_TILES)
        groups, scales, excess, exact = self.format.groups, {}, {}, {}
        for part in range(steps // STEPS_PER_TILE):
            group = (turn * STAGE_TILES + part) * groups // (self.format.columns // VECTOR_COLUMNS)
            if group not in scales:
                exact[group] = tiles.exact_scales(slot, group)
                excess[group] = tiles.excess(slot, group)
                scales[group] = None if exact[group] is not None else tiles.scales(slot, group)
            for half, operand in enumerate(tiles.codes_of(part)):
                terms = [operand] if excess[group] is None else [operand, excess[group]]
                step = part * STEPS_PER_TILE + half
                if exact[group] is None:
                    fragments[step] = _operand(tiles, terms, scales[group])
                else:
                    fragments[step] = _scaled(_operand(tiles, terms, None), exact[group])


class WholeWeights(QuantizedWeights):
    """A K-tile comes whole, by one copy, for two stages: the first is given back behind the loads of the other."""

    stages_of_tile = 2

    @ch.inline
    def copy(self, ring: TileRing, source: Any, tiles: Any, count: Any, halves: int = 1) -> None:
        tile_bytes = self.format.tile_bytes
        with ch.for_(tiles, unroll=1, name="k_tile") as k_tile:
            with ring.fill_weights(tile_bytes * count, count) as (stage, barrier):
                prim.bulk_copy(self.place(stage, self.lane), source + k_tile * tile_bytes, tile_bytes, barrier)
            with ring.fill_weights(0, count):  # all of these lanes wait: a parity tells two passes by a stage apart
                pass


def _operand(tiles: Any, terms: list[Any], scales: tuple[Any, Any] | None) -> ch.Expr:
    """The sum of operands as the numbers that their codes stand for, times the scales of rows g and g + 8."""
    power = tiles.codes_smaller_by
    if scales is None and len(terms) == 1:
        return raised(terms[0], power, power)
    words = []
    for index, member in enumerate("xyzw"):
        # The whole power is no float: so half of it before the sum, which the excess of a group takes once.
        first = 2.0 ** (power // 2)
        rest = 2.0 ** (power - power // 2) / (tiles.second_factor if index >= 2 else 1)
        factor = rest if scales is None else scales[index % 2] * rest
        low = sum_of([prim.bf16x2_low(getattr(term, member)) * first for term in terms])
        high = sum_of([prim.bf16x2_high(getattr(term, member)) * first for term in terms])
        words.append(prim.pack_bf16x2(low * factor, high * factor))
    return prim.make_u32x4(*words)


def _scaled(operand: Any, scales: tuple[Any, Any]) -> ch.Expr:
    """An operand times the scales of rows g and g + 8, which are pairs of bf16."""
    operand = ch.const(ty.u32x4, operand, name="raised")
    words = (prim.multiply_bf16x2(getattr(operand, word), scales[index % 2]) for index, word in enumerate("xyzw"))
    return prim.make_u32x4(*words)


def pair_fragments(fragments: ch.Expr, paired: Any) -> None:
    """If `paired`: operands A of 64 columns of two narrow M-tiles, as they were loaded, become those of their 16 rows.

    Loaded are the first's for each 16 of k, then the second's; x and z are rows g by the first 32 columns, y and w
    rows g by the others. The operands have rows g of the second where those have its other columns.
    """
    if isinstance(paired, int) and not paired:
        return
    for step in range(STEPS_PER_TILE):
        of_first, of_second = fragments[step], fragments[step + STEPS_PER_TILE]
        for later, earlier in (("y", "x"), ("w", "z")):
            kept = ch.const(ty.u32, getattr(of_first, later), name="kept")
            other = ch.const(ty.u32, getattr(of_second, earlier), name="other")
            setattr(of_first, later, ch.select(paired != 0, other, kept))
            setattr(of_second, earlier, ch.select(paired != 0, kept, other))


def stage_weights(format: TileFormat, lane: ch.Expr, whole: bool = False) -> StageWeights:
    """How weights of a format come; whole: K-tiles of quantised ones."""
    if isinstance(format, BlockRows):
        return LotWeights(format, lane)
    if isinstance(format, BlockTiles):
        return BlockWeights(format, lane)
    if isinstance(format, SparseTiles):
        return SparseWeights(format, lane)
    if isinstance(format, SparseQuantizedTiles):
        return (SparseInt4Weights if format.kind == "int4" else SparseE4m3Weights)(format, lane)
    quantized = WholeWeights if whole else QuantizedWeights
    return (quantized if isinstance(format, QuantizedTiles) else Bf16Weights)(format, lane)
