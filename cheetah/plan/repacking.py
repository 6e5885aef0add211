"""What a device that packs weights is told: how much, and where in its staging memory everything lies."""

from dataclasses import dataclass

NOTHING = 2**32 - 1
"""In a table of offsets: there is no such row, or column; its codes are zero."""
PLACE_BYTES = 16
"""What places of chunks count."""


@dataclass(frozen=True)
class Repacking:
    """Some M-tiles of a matrix that are to be packed. What ends in `_at` is a byte of the staging memory.

    target: byte of the weights where the matrix begins. m_tiles, k_tiles: how many. code_bits, code_columns,
    code_bytes: of a K-tile, see `WeightFormat`; tile_bytes: of a whole one. tiles_per_chunk: K-tiles of every chunk but
    the last.
    behind_bytes: behind the codes of a tile; factor_bytes: behind the last tile of an M-tile. is_f16: 1 where weights
    are f16, to be rounded to bf16, else 0.
    order_at: u32, `code_order`. rows_at: u32 [rows, 2], where the row's codes begin, or NOTHING, and the first of its
    entries at columns_at: u32 [tensors, k_tiles * code_columns], what to add for a column, or NOTHING. places_at: u32
    [m_tiles, chunks], where a chunk begins, in PLACE_BYTES from the matrix' beginning. scales_at: u8 [m_tiles,
    k_tiles * behind_bytes + factor_bytes]. codes_at: what offsets count from, in codes.
    """

    target: int
    m_tiles: int
    k_tiles: int
    code_bits: int
    code_columns: int
    code_bytes: int
    tile_bytes: int
    tiles_per_chunk: int
    behind_bytes: int
    factor_bytes: int
    is_f16: int
    order_at: int
    rows_at: int
    columns_at: int
    places_at: int
    scales_at: int
    codes_at: int

    @property
    def packed_bytes(self) -> int:
        """That are written."""
        return self.m_tiles * (self.k_tiles * self.tile_bytes + self.factor_bytes)
