"""e4m3 weights: a code's bits, put at the low end of a bf16's exponent and mantissa, are its value times 2^-120.

That holds for subnormal codes too, because tensor cores honour subnormal numbers. The vector is multiplied by 2^64
beforehand, and a row's factor brings the rest back. The words of a tile are arranged so that four codes take five
instructions: see `cheetah.models.formats.quantized_tiles`.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.formats.quantized import PARTS, ChainedFragments
from cheetah.lang import prim, ty

PART_LOADS = 32
"""16-byte words of a part: one a lane, 4 codes for each of its rows and halves of its 8 columns."""
FIRST_PAIR = 0x87F087F0
"""Where a word has the sign and the seven other bits of the first pair of codes."""
SECOND_HIGH, SECOND_LOW = 0x87808780, 0x00700070
"""Where the sign and the upper four bits of the second pair are in the word turned right by 4, and its lower three in
the word moved left by 4."""


class E4m3Fragments(ChainedFragments):
    """With scales in the tile (a block's) or without (a row's factor says all)."""

    def load(self, first: Any) -> None:
        codes = ch.reinterpret(ty.ptr(ty.u32x4), first)
        self.words = [ch.const(ty.u32x4, codes[self.lane + part * PART_LOADS], name="words") for part in range(PARTS)]
        for words in self.words:
            self.read(words.x)

    def fragments_of(self, first: Any, number: int, part: int) -> tuple[list[Any], list[Any]]:
        words = self.words[part]
        return [self._fragment(words.x, words.y)], [self._fragment(words.z, words.w)]

    def scales(self, first: Any, number: int) -> tuple[Any, Any] | None:
        if self.format.group_columns is None:
            return None
        of_halves = ch.reinterpret(ty.ptr(ty.f32x2), first + self.format.scales_at)
        pair = ch.const(ty.f32x2, of_halves[0], name="scales")
        self.read(prim.float_bits(pair.x))
        return pair.x, pair.y

    def _fragment(self, row: Any, next_row: Any) -> Any:
        """The A operand of four columns: their pairs, of row g and of row g + 8."""
        fragment = prim.make_u32x4(first_pair(row), first_pair(next_row), second_pair(row), second_pair(next_row))
        return ch.const(ty.u32x4, fragment, name="fragment")


def first_pair(word: Any) -> Any:
    return word & FIRST_PAIR


def second_pair(word: Any) -> Any:
    turned = (word >> 4) | (word << 28)
    return prim.and_or_u32(word << 4, SECOND_LOW, turned & SECOND_HIGH)
