"""Which block owns which M-tiles: a rule, not a table. Knows nothing of matrices or memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.index import Index, ceil_div


@dataclass(frozen=True)
class Split:
    """`m_tiles` dealt to `blocks` in waves, the first M-tile to the block whose position is 0.

    M-tile `s` lies in wave `s // blocks` at position `s % blocks`; block `b` stands at position `(b + start) % blocks`
    in every wave. So every M-tile has exactly one owner and shares differ by at most one M-tile.
    """

    m_tiles: int
    blocks: int
    start: int = 0

    def __post_init__(self) -> None:
        require_positive("Split", m_tiles=self.m_tiles, blocks=self.blocks)
        if not 0 <= self.start < self.blocks:
            raise PlanError(f"Split: start is {self.start} with {self.blocks} blocks: give 0 to {self.blocks - 1}")

    @property
    def waves(self) -> int:
        """Waves, the last one possibly incomplete."""
        return ceil_div(self.m_tiles, self.blocks)

    def position(self, block: Index) -> Index:
        """Where `block` stands in every wave; also for device expressions."""
        return (block + self.start) % self.blocks

    def width(self, wave: int) -> int:
        """How many M-tiles `wave` holds: `blocks`, or what is left for the last."""
        return min(self.blocks, self.m_tiles - wave * self.blocks)

    def owner(self, m_tile: int) -> int:
        """The block that owns `m_tile`."""
        if not 0 <= m_tile < self.m_tiles:
            raise PlanError(f"Split: M-tile {m_tile} does not exist: there are M-tiles 0 to {self.m_tiles - 1}")
        return (m_tile - self.start) % self.blocks

    def owned(self, block: int) -> Sequence[int]:
        """The M-tiles of `block`, ascending."""
        if not 0 <= block < self.blocks:
            raise PlanError(f"Split: block {block} does not exist: there are blocks 0 to {self.blocks - 1}")
        return range((block + self.start) % self.blocks, self.m_tiles, self.blocks)

    def count(self, block: int) -> int:
        """How many M-tiles `block` owns; 0 where there are fewer M-tiles than blocks."""
        return len(self.owned(block))

    @property
    def light_blocks(self) -> int:
        """How many blocks the last wave leaves out, which then own an M-tile less than the others."""
        return -self.m_tiles % self.blocks

    @property
    def light_from(self) -> int:
        """The first of these blocks; the others follow, behind the last block the first one. 0 where there are none."""
        return (self.m_tiles - self.start) % self.blocks if self.light_blocks else 0

    @property
    def imbalance(self) -> float:
        """The largest share over the mean share, less 1: 0.0 when all are equal."""
        return self.waves * self.blocks / self.m_tiles - 1.0
