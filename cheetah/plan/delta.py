"""Gated DeltaNet in a step: which rows its heads have, and which part of its state a block keeps.

What a sequence remembers in a layer is a matrix [DIMS, DIMS] a value head. It is dealt to blocks by *shares*: a share
is COLUMNS columns of the matrix of each value head that belongs to one key head, so a key head has PARTS of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.index import round_up
from cheetah.plan.world import Rank

DIMS = 128
"""Elements of a query, a key or a value."""
PARTS = 8
COLUMNS = DIMS // PARTS
TAPS = 4
"""Tokens that a channel is mixed of."""
KEPT_WORDS = 2
"""Words of a channel's numbers of the tokens before: pairs of bf16, the oldest first, the last one unused."""
GROUP = 8
MOST_SHARED = 4
"""Value heads of a key head: a thread keeps 8 numbers of each in registers."""


def state_slots(batch: int) -> int:
    """States that there is room for: of a batch, and of one sequence more that nobody decodes."""
    return batch + 1


@dataclass(frozen=True)
class DeltaHeads:
    """`key_heads` heads of queries and of keys, `value_heads` of values and their gates, in the layers `layers`. The
    rows of their product: queries, keys, values, gates of values (z), then b and a, each filled up to a group."""

    key_heads: int
    value_heads: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        require_positive("DeltaHeads", key_heads=self.key_heads, value_heads=self.value_heads)
        if self.value_heads % self.key_heads or self.shared > MOST_SHARED:
            raise PlanError(
                f"DeltaHeads: {self.value_heads} value heads on {self.key_heads} key heads: supported are 1 to "
                f"{MOST_SHARED} value heads for each"
            )

    def of_rank(self, size: int) -> DeltaHeads:
        """What one of `size` GPUs has of them: key heads with their value heads. PlanError where they cannot be dealt
        evenly."""
        if self.key_heads % size:
            raise PlanError(f"{self.key_heads} key heads of Gated DeltaNet cannot be dealt evenly to {size} GPUs")
        return replace(self, key_heads=self.key_heads // size, value_heads=self.value_heads // size)

    def is_among(self, layers: int) -> bool:
        """Whether they are some of so many layers, but not all."""
        return 0 < len(self.layers) < layers and all(0 <= layer < layers for layer in self.layers)

    @property
    def shared(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def key_rows(self) -> int:
        """Of the queries, and of the keys."""
        return self.key_heads * DIMS

    @property
    def value_rows(self) -> int:
        """Of the values, of their gates, and of what all heads make."""
        return self.value_heads * DIMS

    @property
    def channels(self) -> int:
        """Rows of queries, keys and values."""
        return 2 * self.key_rows + self.value_rows

    def channels_of(self, rank: Rank) -> tuple[range, ...]:
        """Which of the channels a rank has: its queries, keys and values."""
        keys, values = rank.part(self.key_rows), rank.part(self.value_rows)
        parts = (0, keys), (self.key_rows, keys), (2 * self.key_rows, values)
        return tuple(range(first + part.start, first + part.stop) for first, part in parts)

    @property
    def z_row(self) -> int:
        """The first row of the values' gates."""
        return self.channels

    @property
    def b_row(self) -> int:
        return self.channels + self.value_rows

    @property
    def a_row(self) -> int:
        return self.b_row + round_up(self.value_heads, GROUP)

    @property
    def mixed_rows(self) -> int:
        """Of the whole product, with those that fill its last M-tile."""
        return round_up(self.a_row + self.value_heads, 2 * GROUP)

    @property
    def shares(self) -> int:
        """Of a sequence's state in a layer."""
        return self.key_heads * PARTS

    @property
    def memory_words(self) -> int:
        """Of a share's part of the matrices: f32 [value heads of the key head][COLUMNS][DIMS]."""
        return self.shared * COLUMNS * DIMS

    @property
    def share_channels(self) -> int:
        """Channels that a share mixes: its head's query and key, and its columns of values."""
        return 2 * DIMS + self.shared * COLUMNS

    @property
    def share_words(self) -> int:
        """32-bit words of a share: its part of the matrices, then what it keeps of its channels."""
        return self.memory_words + self.share_channels * KEPT_WORDS

    @property
    def record_words(self) -> int:
        """32-bit words of what a column would change in a share: its key, what that is times in each column of each
        value head, how much of each head is kept (f32, filled up to 4), and a pair of bf16 of each two channels."""
        return DIMS + self.shared * COLUMNS + round_up(self.shared, 4) + self.share_channels // 2

    @property
    def numbers(self) -> int:
        """Numbers of a layer that are kept in f32: of each value head its rate of forgetting, then its bias of that,
        then the weights of the norm of a head."""
        return 2 * self.value_heads + DIMS

    @property
    def state_words(self) -> int:
        """Words of a sequence's state, of all layers."""
        return len(self.layers) * self.shares * self.share_words
