"""Where every weight of a packed matrix lies: M-tiles, chunks and their byte addresses.

One layout serves three readers: the packer (numpy), the kernel generator (device expressions) and the report. The bytes
of a K-tile are the format's business; here they are opaque.
"""

from dataclasses import dataclass
from functools import cached_property

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.formats import (
    BF16,
    M_TILE_ROWS,
    NARROW_ROWS,
    TILE_ALIGNMENT,
    ZERO_BLOCKS,
    BlockRows,
    TileFormat,
)
from cheetah.plan.index import Index, ceil_div, round_up
from cheetah.plan.split import Split

LINE_BYTES = 128


@dataclass(frozen=True)
class MatrixLayout:
    """A matrix [rows, columns] of a weight format, cut into M-tiles of 16 rows and chunks of one stage, as it is read.

    Memory order: for each wave of the split, for each chunk of an M-tile, for each position in the wave: that chunk. So
    the blocks read adjacent chunks side by side. All chunks of an M-tile but the last are `stage_bytes` of K-tiles; the
    last one may be shorter, and ends in `factor_bytes`. Behind each is its list, if the format has one. Rows are padded
    to 16 and columns to whole K-tiles with zeros. `offset` is the byte of the weights where it (of layer 0) begins.
    `slices` says in how many parts (of whole chunks) the vector is brought that the matrix is multiplied with: the
    chunks of a part are read for all M-tiles of a block before those of the next part. Where they lie does not change.

    tile_rows: of an M-tile, 16, or 8 of a *narrow* one. A K-tile of that holds twice as many columns of half as many
    rows: its rows 0 to 7 are the weights in its first half of columns, its rows 8 to 15 those of the same rows in the
    second. So the same bytes stand for a share of work half as high, of which more blocks can have as much.

    ranks: GPUs among which the M-tiles of the whole matrix are dealt: `rows` are one's, and its M-tiles follow those of
    the ranks before. 1 where a rank has rows of its own vectors, queries and the like.

    Of `BlockRows` lots lie one behind another, M-tile by M-tile, in the order of columns: behind an index (SparseTIR's
    indptr), see `index_bytes`, and ZERO_BLOCKS blocks of zeros. A chunk is a window of columns there.

    is_brief, is_once: see `Product`; by_numbers: see `Plan`. experts: so many such matrices, one behind the other.
    is_dealt: M-tiles differ in bytes and are dealt to blocks by these (`cheetah.plan.dealing`): what is said of M-tile
    m is said of a slot then, in which another M-tile lies."""

    name: str
    rows: int
    columns: int
    blocks: int
    stage_bytes: int
    start: int = 0
    offset: int = 0
    slices: int = 1
    format: TileFormat = BF16
    tile_rows: int = M_TILE_ROWS
    is_brief: bool = False
    is_once: bool = False
    experts: int = 1
    ranks: int = 1
    by_numbers: bool = False
    is_dealt: bool = False

    def __post_init__(self) -> None:
        place = f"MatrixLayout({self.name!r})"
        require_positive(place, rows=self.rows, columns=self.columns, blocks=self.blocks, stage_bytes=self.stage_bytes)
        require_positive(place, slices=self.slices)
        if self.stage_bytes % self.format.tile_bytes:
            raise PlanError(
                f"{place}: stage_bytes is {self.stage_bytes}: give a multiple of {self.format.tile_bytes} (a K-tile of "
                f"{self.format.name})"
            )
        if not 0 <= self.start < self.blocks:
            raise PlanError(f"{place}: start is {self.start} with {self.blocks} blocks: give 0 to {self.blocks - 1}")
        if self.tile_rows not in (M_TILE_ROWS, NARROW_ROWS) or self.is_narrow and self.format != BF16:
            raise PlanError(
                f"{place}: tile_rows is {self.tile_rows} with weights in {self.format.name}: give {M_TILE_ROWS}, or "
                f"{NARROW_ROWS} with those in {BF16.name}"
            )
        if isinstance(self.format, BlockRows) and (self.ranks > 1 or self.experts > 1):
            raise PlanError(f"{place}: blocks that are stored one by one belong to no experts, nor to several GPUs")
        if self.offset < 0 or self.offset % TILE_ALIGNMENT:
            raise PlanError(f"{place}: offset is {self.offset}: give a multiple of {TILE_ALIGNMENT} bytes, 0 or above")

    @cached_property
    def split(self) -> Split:
        """Which block owns which M-tiles."""
        return Split(self.m_tiles, self.blocks, self.start)

    @property
    def m_tiles(self) -> int:
        return ceil_div(self.rows, self.tile_rows)

    @property
    def all_m_tiles(self) -> int:
        """M-tiles of all ranks."""
        return self.m_tiles * self.ranks

    def of_all(self, m_tile: Index, rank: Index) -> Index:
        """The number among all ranks' M-tiles of one of a rank's; also for device expressions."""
        return m_tile if self.ranks == 1 else rank * self.m_tiles + m_tile

    def of_rank(self, number: Index, rank: Index) -> Index:
        """The number on its rank, from that among all ranks' M-tiles; also for device expressions."""
        return number if self.ranks == 1 else number - rank * self.m_tiles

    def position_of_all(self, number: Index) -> Index:
        """Where the block stands that is number `number` of all ranks', counted over the ranks; also for device
        expressions."""
        if self.ranks == 1:
            return self.position(number)
        return number // self.blocks * self.blocks + self.position(number % self.blocks)

    def position_of_owner(self, m_tile: Index) -> Index:
        """Where the owner stands of an M-tile, one of all ranks', as `position_of_all`; also for device expressions."""
        if self.ranks == 1:
            return m_tile % self.blocks
        return m_tile // self.m_tiles * self.blocks + m_tile % self.m_tiles % self.blocks

    @property
    def is_narrow(self) -> bool:
        return self.tile_rows == NARROW_ROWS

    @property
    def halves(self) -> int:
        """Groups of columns that lie below one another in a K-tile: 2 of a narrow one, else 1."""
        return M_TILE_ROWS // self.tile_rows

    @property
    def tile_columns(self) -> int:
        """Columns of a K-tile."""
        return self.format.columns * self.halves

    @property
    def full_m_tiles(self) -> int:
        """Of 16 rows: M-tiles, or pairs of narrow ones."""
        return ceil_div(self.rows, M_TILE_ROWS)

    @property
    def waves(self) -> int:
        return ceil_div(self.m_tiles, self.blocks)

    @property
    def k_tiles(self) -> int:
        """K-tiles of an M-tile."""
        return ceil_div(self.columns, self.tile_columns)

    @property
    def padded_rows(self) -> int:
        return self.m_tiles * self.tile_rows

    @property
    def padded_columns(self) -> int:
        return round_up(self.columns, self.tile_columns)

    def vector_kind(self, tokens: int) -> str:
        """As what the vectors of so many tokens come; see `TileFormat.vector_kind`."""
        return self.format.vector_kind(self.columns, tokens, self.is_brief, self.by_numbers)

    def vector_units(self, tokens: int) -> int:
        """16-byte units of shared memory that the vectors beside a K-tile take."""
        return self.format.vector_units(self.columns, tokens, self.is_brief, self.by_numbers) * self.halves

    def sums_bytes(self, tokens: int) -> int:
        """Bytes of what is kept of them for zero points."""
        return self.format.sums_bytes(self.columns, tokens, self.is_brief, self.by_numbers)

    @property
    def tiles_per_chunk(self) -> int:
        """K-tiles of every chunk but the last of an M-tile."""
        return self.stage_bytes // self.format.tile_bytes

    @property
    def chunks(self) -> int:
        """Chunks of an M-tile."""
        return ceil_div(self.k_tiles, self.tiles_per_chunk)

    @property
    def piece_tiles(self) -> int:
        """K-tiles of a piece: as much of a chunk as has the columns of a chunk of M-tiles that are not narrow."""
        return self.tiles_per_chunk // self.halves

    @property
    def pieces(self) -> int:
        """Pieces of an M-tile; the last one may be shorter."""
        return ceil_div(self.k_tiles, self.piece_tiles)

    @property
    def slice_chunks(self) -> int:
        """Chunks of an M-tile in every slice but perhaps the last."""
        return ceil_div(self.chunks, self.slices)

    def slice_range(self, number: int) -> tuple[int, int]:
        """The chunks [first, end) of slice `number`; empty where rounding left none."""
        first = min(number * self.slice_chunks, self.chunks)
        return first, min(first + self.slice_chunks, self.chunks)

    @property
    def m_tile_bytes(self) -> int:
        """Of `BlockRows` the mean."""
        if isinstance(self.format, BlockRows):
            return self.expert_bytes // self.m_tiles
        return self.k_tiles * self.format.tile_bytes + self.factor_bytes + self.chunks * self.format.list_bytes

    @property
    def factor_bytes(self) -> int:
        """Behind an M-tile's last K-tile: the format's, and among experts zeros up to whole lines of memory: copies
        whose addresses are none take longer. Their M-tiles are small, and those of most models without are whole."""
        if self.experts == 1 or not self.format.factor_bytes:
            return self.format.factor_bytes
        tiles = self.k_tiles * self.format.tile_bytes
        return round_up(tiles + self.format.factor_bytes, LINE_BYTES) - tiles

    @property
    def total_bytes(self) -> int:
        return self.experts * self.expert_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of one matrix, and to the next of several."""
        if isinstance(self.format, BlockRows):
            blocks = self.format.room(self.m_tiles * self.chunks)
            before = self.index_bytes + ZERO_BLOCKS * BF16.tile_bytes
            return before + self.format.bytes_of(self.m_tiles, blocks)
        return self.m_tiles * self.m_tile_bytes

    @property
    def index_bytes(self) -> int:
        """Of the index of `BlockRows`, u32: of each slot which M-tile lies there, of each M-tile in which slot it lies;
        [slots, chunks + 1], the line of 128 bytes where the M-tile's lots begin, then how many blocks it has up to the
        end of each chunk; [slots, chunks], a bit for each block that is there. What else of a matrix is asked for chunk
        by chunk means nothing there: lots are copied."""
        return round_up(4 * self.m_tiles * (2 * self.chunks + 3), LINE_BYTES)

    @property
    def last_chunk_tiles(self) -> int:
        return self.k_tiles - (self.chunks - 1) * self.tiles_per_chunk

    @property
    def full_chunk_bytes(self) -> int:
        """Of every chunk but the last of an M-tile."""
        return self.stage_bytes + self.format.list_bytes

    @property
    def last_chunk_bytes(self) -> int:
        return self.last_chunk_tiles * self.format.tile_bytes + self.factor_bytes + self.format.list_bytes

    @property
    def chunks_at_once(self) -> int:
        """So many chunks are requested in the place of one: those of small M-tiles of quantised experts, of which as
        many fill a stage."""
        if self.experts == 1 or not self.format.factor_bytes or self.chunks > 1:
            return 1
        return max(1, round(self.stage_bytes / self.last_chunk_bytes))

    @property
    def last_wave_width(self) -> int:
        """M-tiles of the last wave."""
        return self.m_tiles - (self.waves - 1) * self.blocks

    def chunk_tiles(self, chunk: Index) -> Index:
        """K-tiles of chunk `chunk` (0 <= chunk < chunks); also for device expressions."""
        return _last_differs(chunk, self.chunks, self.tiles_per_chunk, self.last_chunk_tiles)

    def tiles_of_piece(self, piece: Index) -> Index:
        """K-tiles of a piece (0 <= piece < pieces); also for device expressions."""
        last = self.k_tiles - (self.pieces - 1) * self.piece_tiles
        return _last_differs(piece, self.pieces, self.piece_tiles, last)

    def chunk_bytes(self, chunk: Index) -> Index:
        """Bytes of chunk `chunk` (0 <= chunk < chunks); also for device expressions."""
        return _last_differs(chunk, self.chunks, self.full_chunk_bytes, self.last_chunk_bytes)

    def wave_width(self, wave: Index) -> Index:
        """M-tiles of wave `wave` (0 <= wave < waves); also for device expressions."""
        return _last_differs(wave, self.waves, self.blocks, self.last_wave_width)

    def position(self, block: Index) -> Index:
        """Where `block` stands in every wave; also for device expressions."""
        return (block + self.start) % self.blocks

    @property
    def owners(self) -> set[int]:
        """The blocks that have M-tiles of it."""
        return {block for block in range(self.blocks) if self.position(block) < self.m_tiles}

    def m_tile(self, wave: Index, position: Index) -> Index:
        """The M-tile at `position` of `wave`; also for device expressions."""
        return wave * self.blocks + position

    def address(self, wave: Index, chunk: Index, position: Index, width: Index) -> Index:
        """Byte address, inside the matrix, of the chunk; `width` is `wave_width(wave)`. A multiple of 1024.

        Also for device expressions; they must be 64 bits wide where `total_bytes` passes 2**32.
        """
        return self.wave_address(wave) + self.chunk_address(chunk, position, width)

    def wave_address(self, wave: Index, expert: Index = 0) -> Index:
        """Where a wave begins inside the matrix, or that of an expert; 64 bits wide on a device where all of them pass
        2**32 bytes."""
        own = wave * (self.blocks * self.m_tile_bytes)
        return own if self.experts == 1 else expert * self.expert_bytes + own

    def chunk_address(self, chunk: Index, position: Index, width: Index) -> Index:
        """Where a chunk begins inside its wave, which is far below 2**32 bytes."""
        return width * chunk * self.full_chunk_bytes + position * self.chunk_bytes(chunk)

    def piece_address(self, piece: Index, position: Index, width: Index) -> Index:
        """Where a piece begins inside its wave, as `chunk_address`."""
        if not self.is_narrow:
            return self.chunk_address(piece, position, width)
        in_chunk = piece % 2 * (self.piece_tiles * self.format.tile_bytes)
        return self.chunk_address(piece // 2, position, width) + in_chunk

    def block_bytes(self, block: int) -> int:
        """Bytes of the matrix that `block` reads."""
        return self.split.count(block) * self.m_tile_bytes


def slice_columns(columns: int, stage_bytes: int, slices: int, format: TileFormat = BF16, halves: int = 1) -> int:
    """Elements of the longest of `slices` parts of a vector of `columns` (whole K-tiles), each whole chunks but the
    last. halves: of a K-tile, as in `MatrixLayout`."""
    chunk_columns = stage_bytes // format.tile_bytes * format.columns * halves
    return min(columns, ceil_div(ceil_div(columns, chunk_columns), slices) * chunk_columns)


def _last_differs(index: Index, count: int, usual: int, last: int) -> Index:
    """`usual` for index 0 .. count-2 and `last` for count-1, without asking for the value of `index`."""
    if count == 1:
        return last
    if usual == last:
        return usual
    is_last = index // (count - 1)
    return usual + is_last * (last - usual) if last > usual else usual - is_last * (usual - last)
