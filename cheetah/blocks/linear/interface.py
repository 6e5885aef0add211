"""What a product of the step is to the model: a matrix, what brings its input, what becomes of its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from cheetah import lang as ch
from cheetah.blocks.linear.parts import Arrival, Part
from cheetah.plan import M_TILE_ROWS, MatrixLayout


@dataclass(frozen=True, eq=False)
class Rows:
    """What an adding warp gets of an M-tile of `count` rows: lane `l` holds the sum of row `l % count` of a column,
    lanes from 16 on those of the next column; of a single one all hold the same.


    m_tile: its number among those of all ranks. wave counts the block's M-tiles of this matrix from 0. is_own: whether
    the lane's row is there (its column is in use) and no other lane's too, so that it is for this lane to write; the
    others only take part in shuffles. slot is which of its pairs of columns this is to the warp (static): a warp
    finishes the same columns of every M-tile. sum: called once, by all lanes, waits for the consumer warps' sums and
    gives the row's (f32), times its column's scale where the product has one. What can be worked out before should be:
    a warp that is by itself takes five cycles an instruction, and a phase's end waits for it.
    """

    m_tile: ch.Expr
    wave: ch.Expr
    row: ch.Expr
    column: ch.Expr
    is_own: ch.Expr
    slot: int
    sum: Callable[[], Any]
    count: int = M_TILE_ROWS


Epilogue = Callable[[Rows], None]
"""What becomes of the finished rows of an M-tile, of two columns: called by a whole adding warp."""


class ColumnScale(Protocol):
    """What all rows of a column are multiplied by, for who finishes them: in the adder role."""

    @property
    def waits(self) -> tuple[str, ...]:
        """The vectors of an exchange that it waits for."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What tells it from those of other products: values of the device, a named tuple."""

    def of(self, column: Any, arguments: Any) -> ch.Expr:
        """Called by whole warps with each lane's column, once the block has the input: its scale (f32), not 0. By the
        arguments of the scale that is wanted."""


class Prologue(ABC):
    """What brings the input of a product into shared memory, in the consumer role, and what its products lack."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Called when the phase begins, also by blocks that own no M-tile: what can be asked for early."""

    @property
    def waits(self) -> tuple[str, ...]:
        """The vectors of an exchange that it waits for."""
        return ()

    @property
    def makes(self) -> tuple[str, ...]:
        """The vectors of an exchange that it makes, beside."""
        return ()

    def scale_of_products(self) -> ColumnScale | None:
        """What the products are still to be multiplied by."""
        return None

    def begin(self, matrix: MatrixLayout, arrival: Arrival) -> None:  # noqa: B027 - most begin with the first part
        """Before the block's first M-tile of `matrix`: bring what is brought for all of them. What is said of columns
        (`scales`) is seen behind the next barrier of the consumer warps, or at the end of an M-tile."""

    def is_whole(self, matrix: MatrixLayout) -> bool:
        """Whether `begin` brings all of it, to where a `Part` lies by default."""
        return False

    @abstractmethod
    def parts(self, matrix: MatrixLayout, arrival: Arrival) -> Iterator[Part]:
        """The parts of the input of `matrix`, in the order of its slices: each is there for what is emitted in the body
        of a loop over them. How many there are may be known on the device alone."""


@dataclass(frozen=True, eq=False)
class Around(Prologue):
    """Another prologue, beside which something else is done."""

    inner: Prologue

    def prepare(self) -> None:
        self.inner.prepare()

    @property
    def waits(self) -> tuple[str, ...]:
        return self.inner.waits

    @property
    def makes(self) -> tuple[str, ...]:
        return self.inner.makes

    def scale_of_products(self) -> ColumnScale | None:
        return self.inner.scale_of_products()

    def begin(self, matrix: MatrixLayout, arrival: Arrival) -> None:
        self.inner.begin(matrix, arrival)

    def is_whole(self, matrix: MatrixLayout) -> bool:
        return self.inner.is_whole(matrix)

    def parts(self, matrix: MatrixLayout, arrival: Arrival) -> Iterator[Part]:
        return self.inner.parts(matrix, arrival)
