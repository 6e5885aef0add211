"""RMSNorm's 1/rms of every token: the products of a vector that was multiplied by the norm's weights alone are
multiplied by it afterwards, by who finishes their rows. So no product waits for a sum over the whole vector.

Who publishes a hidden vector publishes the sums of squares of its M-tiles beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
from cheetah.blocks.exchange import Published, Whereabouts
from cheetah.blocks.linear.interface import ColumnScale, Rows
from cheetah.lang import prim, ty
from cheetah.lang.primitives.exchange import UNITS
from cheetah.plan import M_TILE_ROWS
from cheetah.plan.index import ceil_div, round_up

WORDS = 4
"""Of a unit of an exchange: sums of squares that are read together."""
UNITS_AT_ONCE = 2
"""Units that a lane asks for together: more spill where an adding warp has 64 registers a thread."""
TOO_LARGE = 2.0**64
"""A sum of squares that no vector of plausible numbers has. An element that was none makes all products NaN, so that it
is told, whatever the exchange made of it."""
TOO_LARGE_ELEMENT = 2.0**33
"""From here on an exchange of hidden vectors may make a plausible number of an element: then its squares are NaN."""
NAN = ch.bits("NAN_BITS", 0x7FC00000)


def squares_words(m_tiles: int, tokens: int) -> int:
    """Payload words of the sums of squares of a vector: for every token one an M-tile, padded to whole units."""
    return round_up(m_tiles, WORDS) * tokens


@dataclass(frozen=True, eq=False)
class PublishedSquares:
    """Sums of squares [token][M-tile] of a vector of `m_tiles` M-tiles, a vector of the exchange themselves. part: the
    M-tiles over which they are added up, whole units of them; None: all."""

    columns: Columns
    published: Published
    m_tiles: int
    part: range | None = None

    @property
    def waits(self) -> tuple[str, ...]:
        return (self.published.name,)

    def publish(self, rows: Rows, value: ch.Expr, published: ch.Expr) -> None:
        """The squares of an M-tile's rows, in the adder role; value: of the lane's row, published: what was of it."""
        place = self._first(rows.column) + rows.m_tile
        self._publish_squares(rows.count, value, published, rows.row, rows.is_own, place, self.published.when_and_where)
        if self.m_tiles % WORDS:
            with ch.if_(rows.is_own & (rows.row == 0) & (rows.m_tile == self.m_tiles - 1)):
                for behind in range(1, WORDS - self.m_tiles % WORDS + 1):
                    self.published.publish(place + behind, ty.u32(0))

    @ch.function
    def _publish_squares(
        self,
        count: int,
        value: ch.Expr,
        published: ch.Expr,
        row: ch.Expr,
        is_own: ch.Expr,
        place: ch.Expr,
        squares: Whereabouts,
    ) -> None:
        """The sum of the squares of an M-tile's rows, or NaN where one was published as what it is not."""
        is_plausible = (published < TOO_LARGE_ELEMENT) & (published > -TOO_LARGE_ELEMENT)
        told = ch.const(ty.f32, ch.select(is_plausible, value, prim.bits_float(NAN)), name="told")
        total = ch.var(ty.f32, told * told)
        mask = count // 2
        while mask:
            total += prim.shuffle_xor_f32(total, mask)
            mask //= 2
        with ch.if_(is_own & (row == 0)), self.published.known_by(squares) as vector:
            vector.publish(place, prim.float_bits(total))

    @ch.function
    def sum_of_lane(self, column: Any, lane: Any, lanes: int, squares: Whereabouts) -> ch.Expr:
        """A share of a column's sum of squares (f32), that of lane `lane` of so many."""
        part = self.part or range(self.m_tiles)
        units = ceil_div(len(part), WORDS) if self.part else self._of_column // WORDS
        total = ch.var(ty.f32, 0.0)
        with ch.for_(lane, round_up(units, lanes) + lane, UNITS_AT_ONCE * lanes, unroll=1) as first:
            count = min(UNITS_AT_ONCE, ceil_div(units, lanes))
            places, data = ch.array(ty.u32, UNITS), ch.array(ty.u32x4, UNITS)
            with ch.for_(count, unroll=True) as index:
                unit = ch.minimum(first + index * lanes, units - 1)
                places[index] = self._first(column) + unit * WORDS + part.start
            with self.published.known_by(squares) as vector:
                vector.read_places(data, places, count)
            with ch.for_(count, unroll=True) as index:
                words = data[index]
                low = prim.bits_float(words.x) + prim.bits_float(words.y)
                of_unit = low + (prim.bits_float(words.z) + prim.bits_float(words.w))
                total += ch.select(first + index * lanes < units, of_unit, 0.0)
        return total

    @property
    def _of_column(self) -> int:
        """Words of a column."""
        return round_up(self.m_tiles, WORDS)

    def _first(self, column: ch.Expr) -> Any:
        return column * self._of_column


def sum_of_lanes(total: ch.Expr, lanes: int) -> Any:
    """The sum of 16 or 32 neighbouring lanes' numbers, on all of them: of those furthest apart first."""
    if lanes == 32:
        return prim.warp_sum_f32(total)
    for mask in (8, 4, 2, 1):
        total += prim.shuffle_xor_f32(total, mask)
    return total


@dataclass(frozen=True, eq=False)
class InverseRms(ColumnScale):
    """elements: of the vector, over which the mean of squares runs. is_normed: else products are of the vector as it
    is, and the scale only tells whether it had an element that was no plausible number."""

    columns: Columns
    squares: PublishedSquares
    elements: int
    epsilon: float
    is_normed: bool = True

    @property
    def waits(self) -> tuple[str, ...]:
        return self.squares.waits

    @property
    def arguments(self) -> Whereabouts:
        return self.squares.published.when_and_where

    def of(self, column: ch.Expr, arguments: Whereabouts) -> ch.Expr:
        return self._inverse_rms(column, arguments)

    @ch.function
    def _inverse_rms(self, column: Any, arguments: Whereabouts) -> ch.Expr:
        """1 / rms of a column's vector, of the squares that all blocks made of it; NaN where it was implausible."""
        lanes = 32 if self.columns.limit == 1 else M_TILE_ROWS
        total = ch.var(ty.f32, 0.0)
        with self.columns.if_active(column):
            total.set(self._shares(column, lanes, arguments))
        total.set(sum_of_lanes(total, lanes))
        mean = prim.fma_f32(total, 1.0 / self.elements, self.epsilon)
        scale = prim.rsqrt_f32(mean) if self.is_normed else ty.f32(1.0)
        return ch.select(total < TOO_LARGE, scale, prim.bits_float(NAN))

    @ch.inline
    def _shares(self, column: Any, lanes: int, squares: Whereabouts) -> ch.Expr:
        """This lane's part of the sum. It has 32 shares, whatever lanes there are for a column: 16 lanes add two each,
        as 32 do first of all, so that the sum is the same in all kernels."""
        lane = self.columns.machine.lane if lanes == 32 else self.columns.machine.lane % lanes
        shares = [self.squares.sum_of_lane(column, lane + first, 32, squares) for first in range(0, 32, lanes)]
        return shares[0] if len(shares) == 1 else shares[0] + shares[1]
