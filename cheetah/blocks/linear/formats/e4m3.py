"""e4m3 weights: a code's bits, put at the low end of a bf16's exponent and mantissa, are its value times 2^-120.

That holds for subnormal codes too, because tensor cores honour subnormal numbers. The vector is multiplied by 2^64
beforehand, and a row's factor brings the rest back. The words of a tile are arranged so that four codes take five
instructions: see `cheetah.models.formats.quantized_tiles`.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.formats.quantized import PARTS, QuantizedFragments
from cheetah.blocks.linear.fragments import Activations
from cheetah.lang import prim, ty

PART_LOADS = 32
"""16-byte words of a part: one a lane, 4 codes for each of its rows and halves of its 8 columns."""
FIRST_PAIR = 0x87F087F0
"""Where a word has the sign and the seven other bits of the first pair of codes."""
SECOND_HIGH, SECOND_LOW = 0x87808780, 0x00700070
"""Where the sign and the upper four bits of the second pair are in the word turned right by 4, and its lower three in
the word moved left by 4."""


class E4m3Fragments(QuantizedFragments):
    """With scales in the tile (a block's) or without (a row's factor says all)."""

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        groups = activations.columns.tiles
        first = self.begin_tile(tile)
        if self.format.group_columns is None:
            self._multiply_codes(first, activations, sums)
        else:
            scales = ch.reinterpret(ty.ptr(ty.f32x2), first + self.format.scales_at)[0]
            self.read(prim.float_bits(scales.x))
            with self.scaled(sums, groups, (scales.x, scales.y)) as of_block:
                self._multiply_codes(first, activations, of_block)
        self.end_tile()

    def _multiply_codes(self, first: ch.Expr, activations: Activations, sums: Any) -> None:
        codes = ch.reinterpret(ty.ptr(ty.u32x4), first)
        units = activations.units
        for part in range(PARTS):
            words = codes[self.lane + part * PART_LOADS]
            self.read(words.x)
            left = self._fragment(words.x, words.y)
            right = self._fragment(words.z, words.w)
            for group, values in self.operands(activations, units, part):
                prim.mma_bf16(sums[group], left, values.x, values.y)
                prim.mma_bf16(sums[group], right, values.z, values.w)

    def _fragment(self, row: Any, next_row: Any) -> Any:
        """The A operand of four columns: their pairs, of row g and of row g + 8."""
        fragment = prim.make_u32x4(first_pair(row), first_pair(next_row), second_pair(row), second_pair(next_row))
        return ch.const(ty.u32x4, fragment, name="fragment")


def first_pair(word: Any) -> Any:
    return word & FIRST_PAIR


def second_pair(word: Any) -> Any:
    turned = (word >> 4) | (word << 28)
    return (turned & SECOND_HIGH) | ((word << 4) & SECOND_LOW)
