"""Who owns which strips: a rule, not a table. Knows nothing of matrices or memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.index import Index, ceil_div


@dataclass(frozen=True)
class Split:
    """`strips` dealt to `blocks` in rounds, the first strip to the block whose position is 0.

    Strip `s` lies in round `s // blocks` at position `s % blocks`; block `b` stands at position `(b + start) % blocks`
    in every round. So every strip has exactly one owner and shares differ by at most one strip.
    """

    strips: int
    blocks: int
    start: int = 0

    def __post_init__(self) -> None:
        require_positive("Split", strips=self.strips, blocks=self.blocks)
        if not 0 <= self.start < self.blocks:
            raise PlanError(f"Split: start is {self.start} with {self.blocks} blocks: give 0 to {self.blocks - 1}")

    @property
    def rounds(self) -> int:
        """Rounds, the last one possibly incomplete."""
        return ceil_div(self.strips, self.blocks)

    def position(self, block: Index) -> Index:
        """Where `block` stands in every round; also for device expressions."""
        return (block + self.start) % self.blocks

    def width(self, round: int) -> int:
        """How many strips `round` holds: `blocks`, or what is left for the last."""
        return min(self.blocks, self.strips - round * self.blocks)

    def owner(self, strip: int) -> int:
        """The block that owns `strip`."""
        if not 0 <= strip < self.strips:
            raise PlanError(f"Split: strip {strip} does not exist: there are strips 0 to {self.strips - 1}")
        return (strip - self.start) % self.blocks

    def owned(self, block: int) -> Sequence[int]:
        """The strips of `block`, ascending."""
        if not 0 <= block < self.blocks:
            raise PlanError(f"Split: block {block} does not exist: there are blocks 0 to {self.blocks - 1}")
        return range((block + self.start) % self.blocks, self.strips, self.blocks)

    def count(self, block: int) -> int:
        """How many strips `block` owns; 0 where there are fewer strips than blocks."""
        return len(self.owned(block))

    @property
    def imbalance(self) -> float:
        """The largest share over the mean share, less 1: 0.0 when all are equal."""
        return self.rounds * self.blocks / self.strips - 1.0
