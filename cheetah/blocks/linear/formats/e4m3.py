"""e4m3 weights: a word is 4 columns of a row, bytes 0 and 2 the first two, bytes 1 and 3 the others. One instruction
turns two bytes that lie side by side into f16 numbers, exactly.

The vector is f16 then, too: its elements are multiplied by a power of two so that none overflows, one for each part of
32 columns and token, which the sums of that part are multiplied by in turn. Numbers 2^28 below the largest of a part
lose bits. Vectors of more than two tokens, or of no multiple of 256 elements, are raised bf16, and the codes small bf16
numbers: exponent and mantissa of a code, at the low end of a bf16's, stand for its value times 2^-120, also where it is
subnormal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import UNITS_PER_TILE, Columns
from cheetah.blocks.linear.formats.quantized import CHAINS, PARTS, ChainedFragments
from cheetah.blocks.linear.formats.sizes import biased_exponent, power_of_two, stored_power
from cheetah.blocks.linear.fragments import Activations, Beside, Held
from cheetah.lang import prim, ty
from cheetah.plan.formats import RAISED_BY

SIGNS = ch.bits("SIGNS", 0x80808080)
"""Of four codes. Those of two take the sign bits of bf16 numbers, the others what belongs to MAGNITUDES."""
MAGNITUDES, CODES_SMALLER_BY = ch.bits("MAGNITUDES", 0x07F007F0), 120
"""Of small bf16 numbers."""
LARGEST_POWER = 14
"""An element is below 2^15: f16 ends at 65504."""


class E4m3Fragments(ChainedFragments):
    """With scales in the tile (a block's) or without (a row's factor says all). The vector is bf16, raised."""

    codes_smaller_by = CODES_SMALLER_BY
    smaller_by = CODES_SMALLER_BY - RAISED_BY

    @classmethod
    def chains(cls, format: Any, groups: int) -> int:
        return 1 if format.group_columns is not None else max(1, CHAINS // groups)

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        if self.format.group_columns is not None:
            return super().multiply(tile, activations, sums)
        first = self.tiles + tile * self.format.tile_bytes
        units, groups = activations.units, activations.columns.tiles
        self.load(first)
        for part in range(PARTS):
            of_chain = part % self.chains(self.format, groups) * groups
            for group in range(groups):
                values = activations.operand(units, group, part)
                multiply_part(sums[of_chain + group], self.words[part], values)

    @ch.inline
    def finish_rows(self, tiles: int, columns: Columns, sums: Any, numbers: Beside | None = None) -> None:
        add_chains(sums, columns.tiles, self.chains(self.format, columns.tiles))
        super().finish_rows(tiles, columns, sums, numbers)

    @classmethod
    def room(cls, format: Any, tiles: int) -> Held | None:
        return HeldCodes.of(tiles, format.group_columns is not None)

    @ch.inline
    def hold(self, tile: ch.Expr, activations: Activations, held: HeldCodes, index: ch.Expr) -> None:
        first = self.tiles + tile * self.format.tile_bytes
        self.load(first)
        units = activations.units
        for part in range(PARTS):
            held.words[index][part] = self.words[part]
            held.values[index][part] = activations.operand(units, 0, part)
        for half, scale in enumerate(self.scales(first, 0) or ()):
            held.scales[index][half] = scale

    @ch.inline
    def hold_factors(self, tiles: int, held: HeldCodes) -> None:
        low, high = self.row_factors(tiles)
        held.factors[0] = low
        held.factors[1] = high

    def codes_of(self, part: int) -> tuple[Any, Any]:
        words = self.words[part]
        return self.fragment(words.x, words.y), self.fragment(words.z, words.w)

    def scales(self, first: ch.Expr, index: int) -> tuple[Any, Any] | None:
        if self.format.group_columns is None:
            return None
        of_halves = ch.reinterpret(ty.ptr(ty.f32x2), first + self.format.scales_at)
        pair = ch.const(ty.f32x2, of_halves[0], name="scales")
        self.read(prim.float_bits(pair.x))
        return pair.x, pair.y

    @staticmethod
    def converted(codes: ch.Expr) -> tuple[Any, Any]:
        """The first two of four codes, and the others, as bf16 numbers times 2^-120."""
        # Once for both pairs: of a mask the compiler makes two, one behind the shift. And shifts to the left are
        # products, since those to the right and masks keep their pipe busy.
        signs = ch.const(ty.u32, prim.select_bits_u32(SIGNS, codes, 0), name="signs")
        low, low_signs = prim.multiplied_u32(codes, 1 << 4), prim.multiplied_u32(signs, 1 << 8)
        first = prim.select_bits_u32(MAGNITUDES, low, low_signs)
        return first, prim.select_bits_u32(MAGNITUDES, codes >> 4, signs)

    @classmethod
    def fragment(cls, row: ch.Expr, next_row: ch.Expr) -> ch.Expr:
        """The A operand of four columns: their pairs, of row g and of row g + 8."""
        (low, low_behind), (high, high_behind) = cls.converted(row), cls.converted(next_row)
        return ch.const(ty.u32x4, prim.make_u32x4(low, high, low_behind, high_behind), name="fragment")


def multiply_part(products: Any, words: Any, values: Any) -> None:
    """products [4] += a lane's codes of a part (u32x4) x its operands."""
    prim.mma_bf16(products, E4m3Fragments.fragment(words.x, words.y), values.x, values.y)
    prim.mma_bf16(products, E4m3Fragments.fragment(words.z, words.w), values.z, values.w)


def add_chains(sums: ch.Expr, groups: int, chains: int) -> None:
    """sums [groups] += those of the other chains behind them."""
    for index in range(groups, groups * chains):
        for number in range(4):
            sums[index % groups][number] = sums[index % groups][number] + sums[index][number]


@dataclass(frozen=True, eq=False)
class HeldCodes(Held):
    """Of 16 x 128 codes, 16 registers each, and as many of operands; with the scales of the tile's rows, if it has
    some."""

    words: Any
    values: Any
    factors: Any
    scales: Any = None

    @classmethod
    @ch.inline
    def of(cls, tiles: int, has_scales: bool) -> HeldCodes:
        """Room for so many."""
        words = ch.array(ty.u32x4, tiles, PARTS)
        values = ch.array(ty.u32x4, tiles, PARTS)
        factors = ch.array(ty.f32, 2)
        scales = ch.array(ty.f32, tiles, 2) if has_scales else None
        return cls(words, values, factors, scales)

    @ch.inline
    def multiply(self, index: ch.Expr, sums: Any) -> None:
        if self.scales is None:
            return self._multiply(index, sums)
        products = ch.array(ty.f32, CHAINS, 4, zero=True)
        self._multiply(index, products)
        add_chains(products, 1, CHAINS)
        for number in range(4):
            sums[0][number] = sums[0][number] + self.scales[index][number // 2] * products[0][number]

    def _multiply(self, index: ch.Expr, sums: Any) -> None:
        words, values = self.words[index], self.values[index]
        for part in range(PARTS):
            multiply_part(sums[part % CHAINS], words[part], values[part])

    def finish_rows(self, sums: Any) -> None:
        if self.scales is None:
            add_chains(sums, 1, CHAINS)
        for index in range(4):
            sums[0][index] = sums[0][index] * self.factors[index // 2]


class HalfFragments(E4m3Fragments):
    """The same where the vector is f16."""

    codes_smaller_by = smaller_by = 0

    @classmethod
    def chains(cls, format: Any, groups: int) -> int:
        return 1  # the sums of every part are scaled

    @classmethod
    def room(cls, format: Any, tiles: int) -> None:
        return None

    @staticmethod
    def converted(codes: ch.Expr) -> tuple[Any, Any]:
        """Columns 0 and 2 of four, and 1 and 3: as `store_halves` pairs the vector's."""
        pairs = ch.const(ty.u32x2, prim.e4m3x4_to_f16(codes), name="pairs")
        return pairs.x, pairs.y

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        first = self.tiles + tile * self.format.tile_bytes
        units = activations.units
        self.load(first)
        scales = self.scales(first, 0)
        powers = _Powers(activations, units)
        for part in range(PARTS):
            left, right = self.codes_of(part)
            for group in range(activations.columns.tiles):
                values = activations.operand(units, group, part)
                products = ch.array(ty.f32, 4, zero=True, name="products")
                prim.mma_f16(products, left, values.x, values.y)
                prim.mma_f16(products, right, values.z, values.w)
                of_columns = powers.of_columns(part)
                for index in range(4):
                    power = of_columns[index % 2]
                    factor = power if scales is None else power * scales[index // 2]
                    sums[group][index] = prim.fma_f32(factor, products[index], sums[group][index])


class _Powers:
    """The powers of two of a tile's elements, [part][token] behind them; of a single token read at once."""

    def __init__(self, activations: Activations, units: ch.Expr) -> None:
        columns = activations.columns
        self.address = units + PARTS * UNITS_PER_TILE * columns.limit
        self.all: Any = None
        if columns.limit == 1:
            self.all = ch.const(ty.f32x4, ch.reinterpret(ty.ptr(ty.f32x4), self.address)[0], name="powers")

    def of_columns(self, part: int) -> tuple[Any, Any]:
        """Of both tokens; a single one stands for two."""
        if self.all is not None:
            power = getattr(self.all, "xyzw"[part])
            return power, power
        pairs = ch.reinterpret(ty.ptr(ty.f32x2), self.address)
        pair = ch.const(ty.f32x2, pairs[part], name="power")
        return pair.x, pair.y


@ch.function
def store_halves(vector: ch.Expr, unit: ch.Expr, words: ch.Expr, tokens: int) -> None:
    """Unit `unit` of the vectors of so many tokens (8 bf16 elements) as f16, in pairs of every second one of four. All
    lanes of a warp call it, with neighbouring units."""
    pairs = [getattr(words, member) for member in "xyzw"]
    exponent = biased_exponent(pairs, (1, 2))
    scale = ch.const(ty.f32, power_of_two(LARGEST_POWER, exponent), name="scale")
    halves = []
    for pair, behind in (pairs[:2], pairs[2:]):
        for half_of in (prim.bf16x2_low, prim.bf16x2_high):
            halves.append(prim.pack_f16x2(half_of(pair) * scale, half_of(behind) * scale))
    tile_units = PARTS * UNITS_PER_TILE * tokens
    tile = vector + unit // tile_units * (tile_units + tokens)
    place = ch.const(ty.u32, unit % tile_units, name="place")
    tile[place] = prim.make_u32x4(*halves)
    with ch.if_(unit % UNITS_PER_TILE == 0):
        powers = ch.reinterpret(ty.ptr_mut(ty.u32), tile + tile_units)
        powers[place // UNITS_PER_TILE] = stored_power(exponent, LARGEST_POWER)
