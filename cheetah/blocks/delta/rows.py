"""What becomes of the rows of the product of Gated DeltaNet: published as they are, to be mixed by who reads them."""

from __future__ import annotations

from dataclasses import dataclass

from cheetah import lang as ch
from cheetah.blocks.exchange import Published
from cheetah.blocks.linear.epilogue import PublishedRows, pair_of_rows
from cheetah.blocks.linear.interface import Rows


@dataclass(frozen=True, eq=False)
class PublishedPairs(PublishedRows):
    """Rows as pairs of bf16, [column][row]. rows: of a column, with those that fill the last M-tile. first: the row
    that the product's rows begin with."""

    into: Published
    rows: int
    first: int = 0

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.into.name,)

    @ch.inline
    def __call__(self, rows: Rows) -> None:
        place = rows.column * self.rows + rows.m_tile * rows.count + rows.row
        store = self.into.publish_later((place + self.first if self.first else place) // 2)
        pair = pair_of_rows(rows.sum())
        with ch.if_(rows.is_own & (rows.row % 2 == 0)):
            store(pair)
