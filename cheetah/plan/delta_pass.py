"""How a pass over prompts lays out what Gated DeltaNet makes of its rows: plain numbers.

Between the phases of a layer lie, all in f32, `tokens` of a pass side by side:

keys [key head][token][query, then key]: mixed of the rows of four tokens, of their lengths.
values [value head][part][token][COLUMNS]: mixed too; once they have been taken, what heads make of them.
numbers [key head][token][words]: of query and key the product; of the key and the three keys before it in its run of
    four tokens, the nearest first; of the query and those; nothing; of each value head how much is written to its
    memory, then of each how much of that is kept. Runs are counted from a segment's first token.

So what a share needs of neighbouring tokens is 2 + `shared` stretches of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from cheetah.plan.delta import COLUMNS, DIMS, DeltaHeads
from cheetah.plan.errors import PlanError
from cheetah.plan.index import round_up

MOST_TOKENS = 32
"""Of a stage."""
RUN = 4
"""Tokens that the scan takes together."""
OF_KEY_HEAD = 2 * RUN
"""Numbers of a key head's token; behind them two of each value head."""


@dataclass(frozen=True)
class DeltaPass:
    """Of passes with room for `tokens` tokens, whose stages have `stage_bytes`."""

    heads: DeltaHeads
    tokens: int
    stage_bytes: int

    @property
    def numbers(self) -> int:
        """Words of a key head's token, whole 16 bytes."""
        return round_up(OF_KEY_HEAD + 2 * self.heads.shared, 4)

    @property
    def run_bytes(self) -> tuple[int, ...]:
        """Of a token in each of the runs that a share needs: keys, the columns of each value head, numbers."""
        return 4 * 2 * DIMS, *[4 * COLUMNS] * self.heads.shared, 4 * self.numbers

    @property
    def stage_tokens(self) -> int:
        """Tokens of a stage, a power of two; PlanError where no whole run fits."""
        count = MOST_TOKENS
        while count * sum(self.run_bytes) > self.stage_bytes:
            if count == RUN:
                raise PlanError(f"a stage of {self.stage_bytes} bytes has no room for {RUN} tokens of Gated DeltaNet")
            count //= 2
        return count

    @property
    def run_at(self) -> tuple[int, ...]:
        """Where each run begins in a stage."""
        each = [self.stage_tokens * size for size in self.run_bytes]
        return tuple(sum(each[:number]) for number in range(len(each)))

    @property
    def sections(self) -> dict[str, int]:
        """Bytes of what lies between the phases: the product's rows (bf16 [token][row]), then as above."""
        heads, tokens = self.heads, self.tokens
        return {
            "mixed": 2 * tokens * heads.mixed_rows,
            "delta_keys": 4 * tokens * heads.key_heads * 2 * DIMS,
            "delta_values": 4 * tokens * heads.value_rows,
            "delta_numbers": 4 * tokens * heads.key_heads * self.numbers,
        }
