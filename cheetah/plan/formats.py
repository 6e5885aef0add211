"""How much room weights take in each format, for who lays them out. What their bytes mean is not known here.

A format has three homes, and a line of a registry in each: its sizes (here), its bytes (`models/formats`: packing, its
inverse, meaning) and its fragments on the device (`blocks/linear/formats`).
"""

from __future__ import annotations

from dataclasses import dataclass

from cheetah.plan.errors import PlanError, require_positive

M_TILE_ROWS = 16
"""Rows of an M-tile: the rows of the `mma.m16n8k16` weight operand."""
VECTOR_COLUMNS = 32
"""Columns that a vector is padded to, and that a K-tile has some of whole."""
TILE_ALIGNMENT = 16
"""Bytes that a K-tile is a multiple of: what a bulk copy moves."""


@dataclass(frozen=True)
class TileFormat:
    """The K-tile of a format: 16 rows x `columns` weights in `tile_bytes`, with all that they need (scales too)."""

    name: str
    columns: int
    tile_bytes: int

    def __post_init__(self) -> None:
        place = f"weight format {self.name!r}"
        require_positive(place, columns=self.columns, tile_bytes=self.tile_bytes)
        if self.columns % VECTOR_COLUMNS or self.tile_bytes % TILE_ALIGNMENT:
            raise PlanError(
                f"{place}: a tile of {self.columns} columns in {self.tile_bytes} bytes: give multiples of "
                f"{VECTOR_COLUMNS} columns and of {TILE_ALIGNMENT} bytes"
            )


BF16 = TileFormat("bf16", 32, 1024)
"""Two 16 x 16 tiles, so that one 16-byte load feeds both with activations."""

TILE_FORMATS: dict[str, TileFormat] = {one.name: one for one in (BF16,)}


def tile_format(name: str) -> TileFormat:
    """The format of that name; PlanError lists the names there are."""
    if name not in TILE_FORMATS:
        raise PlanError(f"there is no weight format {name!r}: there are {', '.join(TILE_FORMATS)}")
    return TILE_FORMATS[name]
