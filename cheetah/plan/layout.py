"""Where every weight of a packed bf16 matrix lies: strips, chunks and their byte addresses.

One layout serves three readers: the packer (numpy), the kernel generator (device expressions) and the report.
The order of the bytes inside a tile pair is the packer's business; here a pair is 1024 opaque bytes.
"""

from dataclasses import dataclass
from functools import cached_property

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.index import Index, ceil_div
from cheetah.plan.split import Split

STRIP_ROWS = 16
"""Rows of a strip: the rows of the `mma.m16n8k16` weight operand."""
PAIR_COLUMNS = 32
"""Columns of a tile pair: two 16 x 16 tiles, so that one 16-byte load feeds both with activations."""
PAIR_BYTES = STRIP_ROWS * PAIR_COLUMNS * 2
"""A packed tile pair of bf16 weights: 1024 bytes."""


@dataclass(frozen=True)
class MatrixLayout:
    """A bf16 matrix [rows, columns] cut into strips of 16 rows and chunks of one stage, in the order of reading.

    Memory order: for each round of the split, for each chunk of a strip, for each position in the round: that chunk. So
    the blocks read adjacent chunks side by side. All chunks of a strip but the last fill `stage_bytes`. Rows are padded
    to 16 and columns to 32 with zeros. `offset` is where the matrix (of layer 0) begins in the weights, in bytes.
    `slices` says in how many parts (of whole chunks) the vector is brought that the matrix is multiplied with: the
    chunks of a part are read for all strips of a block before those of the next part. Where they lie does not change.
    """

    name: str
    rows: int
    columns: int
    blocks: int
    stage_bytes: int
    start: int = 0
    offset: int = 0
    slices: int = 1

    def __post_init__(self) -> None:
        place = f"MatrixLayout({self.name!r})"
        require_positive(place, rows=self.rows, columns=self.columns, blocks=self.blocks, stage_bytes=self.stage_bytes)
        require_positive(place, slices=self.slices)
        if self.stage_bytes % PAIR_BYTES:
            raise PlanError(
                f"{place}: stage_bytes is {self.stage_bytes}: give a multiple of {PAIR_BYTES} (a tile pair)"
            )
        if not 0 <= self.start < self.blocks:
            raise PlanError(f"{place}: start is {self.start} with {self.blocks} blocks: give 0 to {self.blocks - 1}")
        if self.offset < 0 or self.offset % PAIR_BYTES:
            raise PlanError(f"{place}: offset is {self.offset}: give a multiple of {PAIR_BYTES} bytes, 0 or above")

    @cached_property
    def split(self) -> Split:
        """Who owns which strips."""
        return Split(self.strips, self.blocks, self.start)

    @property
    def strips(self) -> int:
        return ceil_div(self.rows, STRIP_ROWS)

    @property
    def rounds(self) -> int:
        return ceil_div(self.strips, self.blocks)

    @property
    def tile_pairs(self) -> int:
        """Tile pairs of a strip."""
        return ceil_div(self.columns, PAIR_COLUMNS)

    @property
    def padded_rows(self) -> int:
        return self.strips * STRIP_ROWS

    @property
    def padded_columns(self) -> int:
        return self.tile_pairs * PAIR_COLUMNS

    @property
    def pairs_per_chunk(self) -> int:
        """Tile pairs of every chunk but the last of a strip."""
        return self.stage_bytes // PAIR_BYTES

    @property
    def chunks(self) -> int:
        """Chunks of a strip."""
        return ceil_div(self.tile_pairs, self.pairs_per_chunk)

    @property
    def slice_chunks(self) -> int:
        """Chunks of a strip in every slice but perhaps the last."""
        return ceil_div(self.chunks, self.slices)

    def slice_range(self, number: int) -> tuple[int, int]:
        """The chunks [first, end) of slice `number`; empty where rounding left none."""
        first = min(number * self.slice_chunks, self.chunks)
        return first, min(first + self.slice_chunks, self.chunks)

    @property
    def strip_bytes(self) -> int:
        return self.tile_pairs * PAIR_BYTES

    @property
    def total_bytes(self) -> int:
        return self.strips * self.strip_bytes

    @property
    def last_chunk_pairs(self) -> int:
        return self.tile_pairs - (self.chunks - 1) * self.pairs_per_chunk

    @property
    def last_chunk_bytes(self) -> int:
        return self.last_chunk_pairs * PAIR_BYTES

    @property
    def last_round_width(self) -> int:
        """Strips of the last round."""
        return self.strips - (self.rounds - 1) * self.blocks

    def chunk_pairs(self, chunk: Index) -> Index:
        """Tile pairs of chunk `chunk` (0 <= chunk < chunks); also for device expressions."""
        return _last_differs(chunk, self.chunks, self.pairs_per_chunk, self.last_chunk_pairs)

    def chunk_bytes(self, chunk: Index) -> Index:
        """Bytes of chunk `chunk` (0 <= chunk < chunks); also for device expressions."""
        return _last_differs(chunk, self.chunks, self.stage_bytes, self.last_chunk_bytes)

    def round_width(self, round: Index) -> Index:
        """Strips of round `round` (0 <= round < rounds); also for device expressions."""
        return _last_differs(round, self.rounds, self.blocks, self.last_round_width)

    def position(self, block: Index) -> Index:
        """Where `block` stands in every round; also for device expressions."""
        return (block + self.start) % self.blocks

    def strip(self, round: Index, position: Index) -> Index:
        """The strip at `position` of `round`; also for device expressions."""
        return round * self.blocks + position

    def address(self, round: Index, chunk: Index, position: Index, width: Index) -> Index:
        """Byte address, inside the matrix, of the chunk; `width` is `round_width(round)`. A multiple of 1024.

        Also for device expressions; they must be 64 bits wide where `total_bytes` passes 2**32.
        """
        return self.round_address(round) + self.chunk_address(chunk, position, width)

    def round_address(self, round: Index) -> Index:
        """Where a round begins inside the matrix; 64 bits wide on a device where the matrix passes 2**32 bytes."""
        return round * (self.blocks * self.strip_bytes)

    def chunk_address(self, chunk: Index, position: Index, width: Index) -> Index:
        """Where a chunk begins inside its round, which is far below 2**32 bytes."""
        return width * chunk * self.stage_bytes + position * self.chunk_bytes(chunk)

    def strip_address(self, strip: int, chunk: int) -> int:
        """`address` of a chunk of `strip`, for the packer."""
        round, position = divmod(strip, self.blocks)
        return int(self.address(round, chunk, position, self.round_width(round)))

    def block_bytes(self, block: int) -> int:
        """Bytes of the matrix that `block` reads."""
        return self.split.count(block) * self.strip_bytes


def slice_columns(columns: int, stage_bytes: int, slices: int) -> int:
    """Elements of the longest of `slices` parts of a vector of `columns`, each whole chunks but the last."""
    chunk_columns = stage_bytes // PAIR_BYTES * PAIR_COLUMNS
    return min(columns, ceil_div(ceil_div(columns, chunk_columns), slices) * chunk_columns)


def _last_differs(index: Index, count: int, usual: int, last: int) -> Index:
    """`usual` for index 0 .. count-2 and `last` for count-1, without asking for the value of `index`."""
    if count == 1:
        return last
    if usual == last:
        return usual
    return usual - index // (count - 1) * (usual - last)
