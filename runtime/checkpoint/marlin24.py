"""Codes of which two of every four are there, in the order of one kernel: `marlin-24` of compressed-tensors.

Of a matrix [rows, columns], `weight_packed` int32 [columns / 32, rows * 16 / codes of a word] has the kept codes, plus
8 or 128; `scale_packed` [groups, rows]; and `meta` int16 [columns / 32, 2 * rows] where they belong, four nibbles a
word, each the first place and four times the second. Kept codes lie in tiles of 16 of them by 64 rows (a permutation of
1024, `_order_in_tiles`), words of `meta` as CUTLASS reorders them (`_meta_places`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.quantized import MIDDLE_CODE
from cheetah.models.repacking import StoredCodes, StoredMatrix
from cheetah.plan.index import round_up
from cheetah.runtime.checkpoint.packed_words import Codes, codes_of_words
from cheetah.runtime.checkpoint.quantized import StoredQuantized
from cheetah.runtime.checkpoint.safetensors_files import StoredTensor

GROUP, KEPT = 4, 2
TILE_ROWS, TILE_KEPT = 64, 16
NIBBLES_OF_WORD = 4
INTERLEAVED = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""In which order a word has its codes."""
SCALE_ORDER = np.array([8 * eight + place for eight in range(8) for place in (0, 4, 1, 5, 2, 6, 3, 7)])
"""Of the scales of groups of 64 rows; scales of rows are in their own order."""


class Marlin24Matrix(StoredQuantized):
    """A matrix in that order. Rows are read 64 at a time."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        rows, columns = self.shape
        self._words = self._tensors["weight_packed"].mapped()
        self._meta = self._tensors["meta"].mapped().reshape(-1)
        scales = self._scale_tensor.mapped()
        # Also of groups, if one has half of the columns or more: so the library asks.
        is_grouped = self.scheme.group_columns is not None and self.group_columns < columns // KEPT
        if is_grouped:
            unordered = np.empty_like(scales).reshape(-1, TILE_ROWS)
            unordered[:, SCALE_ORDER] = scales.reshape(-1, TILE_ROWS)
            scales = unordered.reshape(scales.shape)
        self._all_scales = scales

    @property
    def stored(self) -> StoredMatrix | None:  # type: ignore[override]
        """Codes lie in no order that offsets of rows and columns tell."""
        return None

    def _stored_codes(self) -> StoredCodes:
        raise NotImplementedError("marlin-24")

    def _whole_words(self, first: int, stop: int) -> tuple[int, int]:
        return first // TILE_ROWS * TILE_ROWS, min(round_up(stop, TILE_ROWS), self.shape[0])

    @property
    def _scale_tensor(self) -> StoredTensor:
        return self._tensors["scale_packed"]

    def _scales(self, first: int, stop: int) -> NDArray[Any]:
        return self._all_scales[:, first:stop].T

    def _codes(self, first: int, stop: int) -> Codes:
        rows, columns = stop - first, self.shape[1]
        kept, nibbles = self._kept(first, stop), self._nibbles(first, stop)
        codes = np.full((rows, columns // GROUP, GROUP), MIDDLE_CODE[self.scheme.kind], np.uint8)
        for number, places in enumerate((nibbles & 3, nibbles >> 2)):
            np.put_along_axis(codes, places[..., None].astype(np.intp), kept[..., number, None], 2)
        return codes.reshape(rows, columns)

    def _kept(self, first: int, stop: int) -> Codes:
        """uint8 [rows, columns / 4, 2]."""
        bits = int(self.scheme.kind.removeprefix("int"))
        of_row = TILE_KEPT * bits // 32
        words = np.ascontiguousarray(self._words[:, first * of_row : stop * of_row])
        tiles = codes_of_words(words, bits).reshape(len(words), (stop - first) // TILE_ROWS, TILE_KEPT * TILE_ROWS)
        kept = np.empty_like(tiles)
        kept[..., _order_in_tiles(bits)] = tiles
        # Tiles of 16 kept codes; of 64 rows; of 16 of these; kept code, row.
        axes = kept.reshape(len(words), (stop - first) // TILE_ROWS, TILE_ROWS // 16, TILE_KEPT, 16)
        return np.ascontiguousarray(axes.transpose(1, 2, 4, 0, 3)).reshape(stop - first, self.shape[1] // GROUP, KEPT)

    def _nibbles(self, first: int, stop: int) -> Codes:
        """uint8 [rows, columns / 4], checked."""
        rows, columns = self.shape
        words = self._meta[_meta_places(rows, columns // (GROUP * NIBBLES_OF_WORD), first, stop)]
        nibbles = (words[..., None] >> np.arange(0, 16, 4, dtype=np.uint16) & np.uint16(15)).astype(np.uint8)
        nibbles = nibbles.reshape(stop - first, columns // GROUP)
        wrong = (nibbles & 3) >= nibbles >> 2
        if wrong.any():
            row, group = np.argwhere(wrong)[0]
            raise self._error(
                self._tensors["meta"],
                f"row {first + row}, columns {GROUP * group} to {GROUP * group + 3}: places "
                f"{nibbles[row, group] & 3} and {nibbles[row, group] >> 2} are not in order: the file is damaged",
            )
        return nibbles


@cache
def _order_in_tiles(bits: int) -> NDArray[np.intp]:
    """Of a tile's codes as words have them, which of [16 rows each][kept][row] each is."""
    order = []
    for lane in range(32):
        column, quarter = lane // 4, lane % 4
        kept = (2 * quarter, 2 * quarter + 1, 2 * quarter + 8, 2 * quarter + 9)
        base = column // 2 * 256 + column % 2 * 8
        for row in range(4):
            order += [base + 16 * number + 4 * block + row for block in range(2) for number in kept]
    interleaved = INTERLEAVED[bits]
    return np.array(order).reshape(-1, len(interleaved))[:, interleaved].reshape(-1)


def _meta_places(rows: int, words: int, first: int, stop: int) -> NDArray[np.int64]:
    """Where the words of some rows lie: [rows, words of a row]."""
    row, word = np.arange(first, stop)[:, None], np.arange(words)[None]
    moved = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row % 64 // 8 * 4
    shift = ((moved % 2 == 0) & (word % 2 == 1)).astype(np.int64) - ((moved % 2 == 1) & (word % 2 == 0))
    moved, word = moved + shift, word - shift
    return np.asarray(word // 2 * (2 * rows) + moved * 2 + word % 2)
