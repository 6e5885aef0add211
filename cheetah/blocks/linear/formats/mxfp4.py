"""MXFP4 weights: e2m1 codes in groups of 32 columns, whose scales are powers of two; and NVFP4 weights, the same codes
in groups of 16, whose scales are numbers of e4m3. Codes lie as those of int4 do.

A code's bits are the sign, two of exponent and one of mantissa: in a bf16's sign, its two lowest bits of exponent and
its highest of mantissa they are the code's number times 2^-126, also where that is subnormal. A product with two powers
of two puts a nibble to both places at once.

A group of 16 columns is no operand of an `mma`, which takes every second four columns of 32; but a lane has columns of
one group alone. A code times a scale has 6 bits at most: it is a bf16 number exactly, and so sums are not scaled.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.formats.integers import HIGH_NIBBLES, LOW_NIBBLES, make_fragment, words_of_part
from cheetah.blocks.linear.formats.quantized import ChainedFragments
from cheetah.blocks.linear.formats.sizes import EXPONENT_AT
from cheetah.lang import prim, ty
from cheetah.plan.formats import M_TILE_ROWS, RAISED_BY, SCALE_BIAS

NUMBERS = ch.bits("E2M1_BITS", 0x81C081C0)
"""The bits of two bf16 numbers that codes give."""
PLACES = {
    LOW_NIBBLES: ch.named("PLACES_OF_LOW_NIBBLES", 1 << 12 | 1 << 6),
    HIGH_NIBBLES: ch.named("PLACES_OF_HIGH_NIBBLES", 1 << 8 | 1 << 2),
}
"""What nibbles are multiplied by, so that their signs come to the upper place and the rest to the lower one."""
EXPONENTS = ch.bits("EXPONENTS_OF_PAIR", 0x00800080)
"""What a biased exponent is multiplied by, to be a power of two twice, as bf16."""
CODES_SMALLER_BY = 126
SCALES_LARGER_BY = 100
"""What scales of nvfp4 are raised by, which have so much room: with codes as they are products are no subnormals."""
SCALE_PLACES = ch.named("SCALE_PLACES", 1 << 4 | 1 << 20)
"""What a scale's byte is multiplied by, to lie below the exponents of two bf16 numbers."""
SCALE_EXPONENTS = ch.named("SCALE_EXPONENTS", (127 - SCALE_BIAS + SCALES_LARGER_BY) * (1 << 7 | 1 << 23))
"""What they lack."""


class Mxfp4Fragments(ChainedFragments):
    """With a scale for each part of a tile, which is a group. The vector is bf16, raised."""

    parts_of_load = 2
    codes_smaller_by = CODES_SMALLER_BY
    smaller_by = CODES_SMALLER_BY - RAISED_BY

    def codes_of(self, part: int) -> tuple[Any, Any]:
        rows = words_of_part(self.words, part)
        return self._fragment(rows, 0), self._fragment(rows, 8)

    @staticmethod
    def _fragment(rows: tuple[Any, Any], shift: int) -> ch.Expr:
        moved = [ch.const(ty.u32, row >> shift, name="moved") if shift else row for row in rows]
        return make_fragment(
            [
                prim.multiplied_u32(row & nibbles, factor) & NUMBERS
                for nibbles, factor in PLACES.items()
                for row in moved
            ]
        )

    def scales(self, first: Any, index: int) -> tuple[Any, Any] | None:
        """The smallest scale, 2^-127, is taken as 0: a float has no normal number for it."""
        pair = self._exponents(first, index)
        return prim.bits_float((pair & 0xFF) << EXPONENT_AT), prim.bits_float((pair >> 8) << EXPONENT_AT)

    def exact_scales(self, first: Any, index: int) -> tuple[Any, Any] | None:
        pair = self._exponents(first, index)
        low, high = (ch.const(ty.u32, byte * EXPONENTS, name="scale") for byte in (pair & 0xFF, pair >> 8))
        return low, high

    def _exponents(self, first: Any, index: int) -> ch.Expr:
        pairs = ch.reinterpret(ty.ptr(ty.u16), first + (self.format.scales_at + index * M_TILE_ROWS))
        pair = ch.const(ty.u32, ty.u32(pairs[self.lane // 4]), name="exponents")
        self.read(pair)
        return pair


class Nvfp4Fragments(Mxfp4Fragments):
    """Codes times the scale of the lane's group of each part. The vector is bf16 as it is."""

    codes_smaller_by = smaller_by = CODES_SMALLER_BY - SCALES_LARGER_BY

    @property
    def scaled_groups(self) -> int:
        return 1

    def begin_parts(self, first: Any, part: int) -> None:
        of_lane = self.lane % 4 // 2 * (M_TILE_ROWS // 2) + self.lane // 4
        pairs = ch.reinterpret(ty.ptr(ty.u16), first + self.format.scales_at)
        self.pairs = pairs + (of_lane + part * M_TILE_ROWS)

    def codes_of(self, part: int) -> tuple[Any, Any]:
        left, right = super().codes_of(part)
        pair = ch.const(ty.u32, ty.u32(self.pairs[part * M_TILE_ROWS]), name="scale_pair")
        self.read(pair)
        raised = (byte * SCALE_PLACES + SCALE_EXPONENTS for byte in (pair & 0xFF, pair >> 8))
        scales = [ch.const(ty.u32, scale, name="scale") for scale in raised]
        return self._scaled(left, scales), self._scaled(right, scales)

    @staticmethod
    def _scaled(codes: Any, scales: list[Any]) -> ch.Expr:
        """Rows g and g + 8 take turns."""
        words = (prim.multiply_bf16x2(getattr(codes, word), scales[index % 2]) for index, word in enumerate("xyzw"))
        return ch.const(ty.u32x4, prim.make_u32x4(*words), name="scaled")

    def scales(self, first: Any, index: int) -> None:
        """None beside the codes'."""

    def exact_scales(self, first: Any, index: int) -> None:
        """None beside the codes'."""
