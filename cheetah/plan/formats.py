"""How much room weights take in each format, for the code that lays them out. What their bytes mean is not known here.

A format has three homes, and a line of a registry in each: its sizes (here), its bytes (`models/formats`: packing, its
inverse, meaning) and its fragments on the device (`blocks/linear/formats`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.index import ceil_div

M_TILE_ROWS = 16
"""Rows of an M-tile: the rows of the `mma.m16n8k16` weight operand."""
NARROW_ROWS = M_TILE_ROWS // 2
"""Rows of a narrow M-tile, which fill that operand with their weights in neighbouring columns, see `MatrixLayout`."""
VECTOR_COLUMNS = 32
"""Columns that a vector is padded to, and that a K-tile has some of whole."""
KV_TILE_TOKENS = 16
"""Keys of one mma tile: a KV stage holds whole tiles, and items of attention begin and end with one."""
TILE_ALIGNMENT = 16
"""Bytes that a K-tile is a multiple of: what a bulk copy moves."""
BF16_VECTOR, DIGITS, HALVES, RAISED, STAGGERED = "bf16", "digits", "halves", "raised", "staggered"
PLAIN_DIGITS, DIGITS_AND_NUMBERS = "plain digits", "digits and numbers"
SKEWED, RAISED_SKEWED = "skewed", "raised and skewed"
"""What a vector is multiplied as: bf16 numbers; integers of 18 bits, as digits, with a power of two for each K-tile,
or of 21 bits, in another order (plain), or of 18 with the bf16 numbers behind a K-tile's digits; f16 numbers with a
power of two for each 32 columns; bf16 numbers times 2^RAISED_BY, STAGGERED every second pair of them times
2^(RAISED_BY - 4). SKEWED, bf16 numbers or raised ones: a K-tile's four units of a token are exchanged,
see `cheetah.blocks.linear.formats.vectors`."""
SKEWED_TOKENS = 4
"""Vectors of a multiple of so many tokens are, where two of every four weights are multiplied by them."""
BY_WARPS = (DIGITS, PLAIN_DIGITS, DIGITS_AND_NUMBERS, HALVES)
"""Those that whole warps make of vectors, and that take another room than these."""
RAISED_BY = 64
"""Codes of weights stand in a bf16's lowest bits as they are, which makes them very small numbers: so vectors are
raised. Elements from 2^63 on are infinite then; those below 2^-43 lose bits."""
ROW_FACTOR_BYTES = 128
"""Behind the K-tiles of a quantised M-tile: 16 factors (f32), one a row, and zeros. A copy whose address or size is no
multiple of 128 bytes takes a quarter longer (H200)."""


@dataclass(frozen=True)
class TileFormat:
    """The K-tile of a format: 16 rows x `columns` weights in `tile_bytes`, with all that they need (scales too).

    factor_bytes: bytes behind an M-tile's last K-tile. list_units: of the list behind each chunk's K-tiles, whose
    products are added to theirs; 0: there is none. See `listed`.
    """

    name: str
    columns: int
    tile_bytes: int
    factor_bytes: int = 0
    list_units: int = 0

    def __post_init__(self) -> None:
        place = f"weight format {self.name!r}"
        require_positive(place, columns=self.columns, tile_bytes=self.tile_bytes)
        if self.columns % VECTOR_COLUMNS or self.tile_bytes % TILE_ALIGNMENT or self.factor_bytes % TILE_ALIGNMENT:
            raise PlanError(
                f"{place}: a tile of {self.columns} columns in {self.tile_bytes} bytes, {self.factor_bytes} an M-tile: "
                f"give multiples of {VECTOR_COLUMNS} columns and of {TILE_ALIGNMENT} bytes"
            )

    def vector_kind(self, columns: int, tokens: int, is_brief: bool = False, by_numbers: bool = False) -> str:
        """As what a product with a matrix of so many columns takes the vectors of `tokens` tokens: BF16_VECTOR, DIGITS,
        PLAIN_DIGITS, HALVES, RAISED or STAGGERED. is_brief: see `Product`; by_numbers: see `Plan`."""
        return BF16_VECTOR

    def vector_units(self, columns: int, tokens: int, is_brief: bool = False, by_numbers: bool = False) -> int:
        """16-byte units of shared memory that the vectors of a K-tile of such a matrix take."""
        digits = DIGIT_UNITS - self.columns // 8
        extra = {DIGITS: digits, PLAIN_DIGITS: digits, DIGITS_AND_NUMBERS: DIGIT_UNITS, HALVES: 1}
        return (self.columns // 8 + extra.get(self.vector_kind(columns, tokens, is_brief, by_numbers), 0)) * tokens

    def sums_bytes(self, columns: int, tokens: int, is_brief: bool = False, by_numbers: bool = False) -> int:
        """Bytes of shared memory of what is kept of the vectors of a K-tile, beside them, for zero points: none without
        any."""
        return 0

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the formats whose products are added up, in this order: of most weights one."""
        return tuple(self.name.split(PLUS))

    @property
    def list_bytes(self) -> int:
        """Behind the K-tiles of every chunk, and what ends an M-tile."""
        return self.list_units * LIST_UNIT_BYTES

    def chunk_bytes(self, stage_bytes: int, warps: int) -> int:
        """Bytes of the K-tiles of a full chunk: as many for each warp as a stage holds, with what ends an M-tile; with
        a list LISTED_TILES."""
        share = warps * self.tile_bytes
        if self.list_units:
            whole = LISTED_TILES * self.tile_bytes
            return whole if whole % share == 0 and stage_bytes >= self._listed_stage_bytes else 0
        return (stage_bytes - self.factor_bytes) // share * share

    def stage_bytes(self, least: int, warps: int) -> int:
        """The smallest stage that holds a full chunk of at least so many bytes of K-tiles."""
        share = warps * self.tile_bytes
        if self.list_units:
            if LISTED_TILES % warps:
                raise PlanError(
                    f"{self.name}: a chunk beside a list has {LISTED_TILES} K-tiles: give consumer warps that divide it"
                )
            return self._listed_stage_bytes
        return -(-least // share) * share + self.factor_bytes

    @property
    def _listed_stage_bytes(self) -> int:
        return LISTED_TILES * self.tile_bytes + self.factor_bytes + self.list_bytes


PLUS, LIST = "+", "list"
"""Between the formats of a sum of parts; what the name of a list begins with, its units follow."""
LIST_UNIT_BYTES = 128
"""A word a lane of a warp: bf16 number, row of two, column of the chunk."""
LISTED_TILES = 16
"""K-tiles of every full chunk beside a list, so that what a list has room for follows from the matrix alone."""
MOST_LIST_UNITS = 2048
BF16 = TileFormat("bf16", 32, 1024)
"""Two 16 x 16 tiles, so that one 16-byte load feeds both with activations."""


@dataclass(frozen=True)
class SparseTiles(TileFormat):
    """A K-tile of 16 rows x 64 columns of which two of every four neighbours are there: those as `TileFormat` has them,
    then, from byte `places_at` on, where each is in its four: 4 bits for two."""

    places_at: int = 0

    def vector_kind(self, columns: int, tokens: int, is_brief: bool = False, by_numbers: bool = False) -> str:
        return SKEWED if tokens % SKEWED_TOKENS == 0 else BF16_VECTOR


SPARSE = "2of4"
"""What the names of formats begin with that keep two of every four columns."""
TWO_OF_FOUR = SparseTiles(SPARSE, 64, 1024 + 128, places_at=1024)
"""bf16 weights: two 16 x 32 tiles of which the half is there, 512 bytes each. 9 bits a weight."""


@dataclass(frozen=True)
class BlockTiles(TileFormat):
    """A K-tile of 16 rows x 128 columns of whose four blocks of 32 columns `kept` are there, in bf16; then, from byte
    `numbers_at` on, which these are, a byte each."""

    kept: int = 0
    numbers_at: int = 0


BLOCKS_OF_TILE = 4
NUMBERS_BYTES = 16


def _blocks(kept: int) -> BlockTiles:
    numbers_at = kept * BF16.tile_bytes
    columns = BLOCKS_OF_TILE * BF16.columns
    return BlockTiles(f"blocks-{kept}of4", columns, numbers_at + NUMBERS_BYTES, kept=kept, numbers_at=numbers_at)


BLOCK_FORMATS: dict[str, BlockTiles] = {one.name: one for one in map(_blocks, range(1, BLOCKS_OF_TILE))}
"""blocks-2of4: 8.06 bits a weight, blocks-1of4 4.06."""


@dataclass(frozen=True)
class BlockRows(TileFormat):
    """Blocks of 16 rows x 32 columns in bf16, of which an M-tile stores those alone that are there, however many.

    They lie in *lots* of LOT_BLOCKS, the last of an M-tile's with fewer, see `models/formats/block_rows.py`. A lot
    fills a stage: `tile_bytes`. A K-tile is a window of 1024 columns: what inputs are divided by. part: so many of
    every 1024 blocks of the matrix are there in the layer that has most.
    """

    part: int = 0

    def chunk_bytes(self, stage_bytes: int, warps: int) -> int:
        """Of a lot, if a stage has room for it."""
        return self.tile_bytes if stage_bytes >= self.tile_bytes else 0

    def stage_bytes(self, least: int, warps: int) -> int:
        """Of a lot."""
        return self.tile_bytes

    def room(self, windows: int) -> int:
        """Blocks that there is room for in a matrix of so many windows."""
        return ceil_div(windows * WINDOW_BLOCKS * self.part, PARTS_OF_MATRIX)

    def bytes_of(self, m_tiles: int, blocks: int) -> int:
        """The most that so many M-tiles with so many blocks in all take."""
        return (blocks // LOT_BLOCKS + m_tiles) * LOT_LINE_BYTES + blocks * BF16.tile_bytes


WINDOW_BLOCKS, PARTS_OF_MATRIX = 32, 1024
LOT_BLOCKS, LOT_LINE_BYTES = 24, 128
"""Of a lot, and what it begins with."""
LOT_COUNT_AT, LOT_FOLLOWING_AT, NO_BLOCK = LOT_BLOCKS, LOT_BLOCKS + 1, 0xFFFF
"""Which u16 of a lot's line says how many blocks it has, which is the number of the block behind it; that of none."""
ZERO_BLOCKS = 64
"""That lie before a matrix' lots, side by side: passes copy one, or two, where blocks are not there. All SMs that
read the same one would read the same few lines of L2."""
BLOCKS = "blocks-"
"""What the names of formats begin with that keep some blocks only."""
_BLOCK_ROWS = re.compile(rf"{BLOCKS}([1-9]\d*)of{PARTS_OF_MATRIX}")


def block_rows(part: int) -> BlockRows:
    """The format for matrices of which at most `part` of every 1024 blocks are there. PlanError for a number that
    cannot be."""
    name = f"{BLOCKS}{part}of{PARTS_OF_MATRIX}"
    if not 0 < part <= PARTS_OF_MATRIX:
        raise PlanError(f"weight format {name!r}: give 1 to {PARTS_OF_MATRIX}")
    lot_bytes = LOT_LINE_BYTES + LOT_BLOCKS * BF16.tile_bytes
    return BlockRows(name, WINDOW_BLOCKS * BF16.columns, lot_bytes, part=part)


@dataclass(frozen=True)
class QuantizedTiles(TileFormat):
    """A K-tile of 16 x 128 codes of `bits` bits, then scales, then zero points; behind an M-tile a factor a row.

    kind: "int4", "int8", "fp8", "mxfp4" or "nvfp4". group_columns: columns of a row that share a scale of the tile,
    which divide 128; None: there is none beside the row's factor. is_asymmetric: each group of a row has a zero point.
    scales_at, zero_points_at: bytes from the beginning of the tile.
    """

    kind: str = ""
    bits: int = 8
    group_columns: int | None = None
    is_asymmetric: bool = False
    scales_at: int = 0
    zero_points_at: int = 0

    def vector_kind(self, columns: int, tokens: int, is_brief: bool = False, by_numbers: bool = False) -> str:
        """Elements are converted by whole warps, of units of 8, and tiles."""
        if self.kind == "nvfp4":  # a scale and a code become one number, which is not small
            return BF16_VECTOR
        is_whole = columns % QUANTIZED_COLUMNS == 0 and columns * tokens % (8 * 32) == 0 and not by_numbers
        if self.kind == "int4":
            is_digits = tokens <= (BRIEF_DIGIT_TOKENS if is_brief else DIGIT_TOKENS)
            if is_whole and is_digits:
                return DIGITS_AND_NUMBERS if self.list_units else DIGITS
            return STAGGERED
        return HALVES if self.kind == "fp8" and is_whole and tokens <= HALF_TOKENS else RAISED

    def sums_bytes(self, columns: int, tokens: int, is_brief: bool = False, by_numbers: bool = False) -> int:
        """[groups][columns] f32, whole groups of 8 columns. Digits have none: few tokens wait for the vector, not for
        its products."""
        if not self.kind.startswith("int") or self.vector_kind(columns, tokens, is_brief, by_numbers) in BY_WARPS:
            return 0
        return self.groups * ceil_div(tokens, 8) * 8 * 4

    @property
    def groups(self) -> int:
        """Groups of a row of a tile; 1 where the whole row shares what there is."""
        return self.columns // (self.group_columns or self.columns)


QUANTIZED_COLUMNS = 128
"""Columns of a quantised K-tile: the usual group."""
GROUP_COLUMNS = (32, 64, 128)
"""Columns of the groups that there are formats for."""
MX_COLUMNS, NV_COLUMNS = 32, 16
"""Of a group of MXFP4, of NVFP4."""
SCALE_BIAS = 10
"""Of the 5 bits of exponent of a scale of NVFP4: e4m3's lowest exponent, of its subnormal numbers, is -9."""
INTEGER_SCALE_BYTES = 2 * M_TILE_ROWS
"""The scales of a group, f16 [8 rows][row g, row g + 8]."""
ZERO_POINT_BYTES = M_TILE_ROWS
"""The zero points of a group, u8 in the same order."""
BLOCK_SCALE_BYTES = 16
"""Of an e4m3 tile in a block format: the scales (f32) of its first 8 rows and of the others, and 8 bytes of zeros."""
DIGIT_TOKENS, BRIEF_DIGIT_TOKENS = 2, 1
"""Tokens of a step up to which 4-bit weights are multiplied by digits: those of two fill 6 of the 8 columns of an
`mma`. For more, a nibble costs less as bf16. Products that take little more time than two vectors to become digits (q,
k and v, and o) take numbers there with two tokens (8B, H200: 1.432 to 1.415 ms a step; gate and up, and down, take 17
and 30 us longer so)."""
HALF_TOKENS = 2
"""The same for e4m3 and f16: where there are more vectors to convert, that takes longer than it saves (8B, 8 tokens,
H200: 3.11 ms a step)."""
DIGIT_COUNT = 3
"""Of an element: bytes -128 .. 127, of base 256. An element has 18 bits; what the digits are of, up to 23."""
DIGIT_UNITS = 2 * DIGIT_COUNT * 4 + 1
"""16-byte units of the digits of a tile's 128 elements: for each half of the tile, digit and lane of four one. Behind
them the unit of the power of two that the elements were divided by."""


def quantized_name(kind: str, group_columns: int | None, is_asymmetric: bool) -> str:
    """What formats are called: "int4-g128", "int8-asym", "fp8-block128"; see `QuantizationScheme.name`."""
    group = "" if group_columns is None else f"-{'block' if kind == 'fp8' else 'g'}{group_columns}"
    return f"{kind}{group}{'-asym' if is_asymmetric else ''}"


def _integers(kind: str, bits: int, group_columns: int | None, is_asymmetric: bool) -> QuantizedTiles:
    groups = QUANTIZED_COLUMNS // (group_columns or QUANTIZED_COLUMNS)
    scales_at = M_TILE_ROWS * QUANTIZED_COLUMNS * bits // 8
    zero_points_at = scales_at + (0 if group_columns is None else groups * INTEGER_SCALE_BYTES)
    return QuantizedTiles(
        quantized_name(kind, group_columns, is_asymmetric),
        QUANTIZED_COLUMNS,
        zero_points_at + (groups * ZERO_POINT_BYTES if is_asymmetric else 0),
        ROW_FACTOR_BYTES,
        kind=kind,
        bits=bits,
        group_columns=group_columns,
        is_asymmetric=is_asymmetric,
        scales_at=scales_at,
        zero_points_at=zero_points_at,
    )


def _e4m3(block_columns: int | None) -> QuantizedTiles:
    codes = M_TILE_ROWS * QUANTIZED_COLUMNS
    return QuantizedTiles(
        quantized_name("fp8", block_columns, False),
        QUANTIZED_COLUMNS,
        codes + (0 if block_columns is None else BLOCK_SCALE_BYTES),
        ROW_FACTOR_BYTES,
        kind="fp8",
        group_columns=block_columns,
        scales_at=codes,
    )


def _e2m1(kind: str, group_columns: int) -> QuantizedTiles:
    """The scales of a group are bytes, in the order of zero points."""
    codes = M_TILE_ROWS * QUANTIZED_COLUMNS // 2
    return QuantizedTiles(
        kind,
        QUANTIZED_COLUMNS,
        codes + QUANTIZED_COLUMNS // group_columns * M_TILE_ROWS,
        ROW_FACTOR_BYTES,
        kind=kind,
        bits=4,
        group_columns=group_columns,
        scales_at=codes,
    )


def _quantized() -> Iterator[QuantizedTiles]:
    for kind, bits in (("int4", 4), ("int8", 8)):
        for group_columns in (None, *GROUP_COLUMNS):
            for is_asymmetric in (False, True):
                yield _integers(kind, bits, group_columns, is_asymmetric)
    yield _e4m3(None)
    yield _e4m3(QUANTIZED_COLUMNS)
    yield _e2m1("mxfp4", MX_COLUMNS)
    yield _e2m1("nvfp4", NV_COLUMNS)


@dataclass(frozen=True)
class SparseQuantizedTiles(QuantizedTiles):
    """Symmetric codes of which two of every four neighbours are there, each row by row: those, the scales, and from
    byte `places_at` on where each is in its four. int4: 128 columns, a byte has a code of the first 64 and one of the
    others; fp8: 64 columns."""

    places_at: int = 0

    def vector_kind(self, columns: int, tokens: int, is_brief: bool = False, by_numbers: bool = False) -> str:
        kind = super().vector_kind(columns, tokens, is_brief, by_numbers)
        if kind == DIGITS:
            return PLAIN_DIGITS
        is_skewed = tokens % SKEWED_TOKENS == 0
        if self.kind == "int4":  # whose codes are no small numbers
            return SKEWED if is_skewed else BF16_VECTOR
        return RAISED_SKEWED if is_skewed else RAISED

    def sums_bytes(self, columns: int, tokens: int, is_brief: bool = False, by_numbers: bool = False) -> int:
        """None: what zero points take away differs from row to row, as the columns do that are there."""
        return 0

    def stage_bytes(self, least: int, warps: int) -> int:
        """With a power of two tiles a warp, so that rows of usual lengths end with a full chunk."""
        turns = 1
        while turns * warps * self.tile_bytes < least:
            turns *= 2
        return turns * warps * self.tile_bytes + self.factor_bytes


def _sparse_integers(group_columns: int | None) -> SparseQuantizedTiles:
    codes = M_TILE_ROWS * QUANTIZED_COLUMNS // 4
    groups = 0 if group_columns is None else QUANTIZED_COLUMNS // group_columns
    places_at = codes + groups * INTEGER_SCALE_BYTES
    return SparseQuantizedTiles(
        f"{SPARSE}-{quantized_name('int4', group_columns, False)}",
        QUANTIZED_COLUMNS,
        places_at + M_TILE_ROWS * QUANTIZED_COLUMNS // 8,
        ROW_FACTOR_BYTES,
        kind="int4",
        bits=4,
        group_columns=group_columns,
        scales_at=codes,
        zero_points_at=places_at,
        places_at=places_at,
    )


_SPARSE_E4M3 = SparseQuantizedTiles(
    f"{SPARSE}-fp8",
    TWO_OF_FOUR.columns,
    512 + 128,
    ROW_FACTOR_BYTES,
    kind="fp8",
    scales_at=512,
    zero_points_at=512,
    places_at=512,
)
QUANTIZED_FORMATS: dict[str, QuantizedTiles] = {one.name: one for one in _quantized()}
SPARSE_QUANTIZED_FORMATS: dict[str, SparseQuantizedTiles] = {
    one.name: one for one in (_sparse_integers(None), _sparse_integers(128), _sparse_integers(64), _SPARSE_E4M3)
}
SPARSE_FORMATS: dict[str, TileFormat] = {TWO_OF_FOUR.name: TWO_OF_FOUR, **SPARSE_QUANTIZED_FORMATS}
TILE_FORMATS: dict[str, TileFormat] = {BF16.name: BF16, **SPARSE_FORMATS, **BLOCK_FORMATS, **QUANTIZED_FORMATS}


def tile_format(name: str) -> TileFormat:
    """The format of that name, or of its parts; PlanError lists the names there are."""
    if found := _BLOCK_ROWS.fullmatch(name):
        return block_rows(int(found[1]))
    tiles, plus, units = name.partition(f"{PLUS}{LIST}")
    if tiles not in TILE_FORMATS or plus and not units.isdecimal():
        known = ", ".join(TILE_FORMATS)
        raise PlanError(f"there is no weight format {name!r}: there are {known}; behind some {PLUS}{LIST} and a number")
    return listed(TILE_FORMATS[tiles], int(units)) if plus else TILE_FORMATS[tiles]


def can_be_listed(tiles: TileFormat) -> bool:
    """Whether a list may lie beside K-tiles of this format."""
    is_integer = tiles.name in QUANTIZED_FORMATS and QUANTIZED_FORMATS[tiles.name].kind.startswith("int")
    return tiles == TWO_OF_FOUR or is_integer


def listed(tiles: TileFormat, units: int) -> TileFormat:
    """These K-tiles and a list of bf16 numbers behind the tiles of every chunk, whose products are added to theirs.

    units: of the list, LIST_UNIT_BYTES each: four numbers of each pair of an M-tile's rows r and r + 8. PlanError where
    a list cannot lie beside such tiles.
    """
    if not can_be_listed(tiles):
        raise PlanError(f"weight format {tiles.name!r}: lists lie beside {TWO_OF_FOUR.name}, int4 and int8 alone")
    if not 0 < units <= MOST_LIST_UNITS:
        raise PlanError(f"weight format {tiles.name!r}: a list of {units} units: give 1 to {MOST_LIST_UNITS}")
    return replace(tiles, name=f"{tiles.name}{PLUS}{LIST}{units}", list_units=units)
