"""The tokens of a step that drafts a block: first such as are known, of which rows were made of
another model's hidden states; behind them the block, its anchor and masks.

What is known has a row of `known_rows` in the place of an embedding: its id says which, from KNOWN on.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
from cheetah.blocks.tokens import LaunchTokens, Tokens
from cheetah.lang import ty
from cheetah.plan.known import KNOWN


class BlockTokens(Tokens):
    """mask: the id that stands where no input is. known: rows of the tokens that are, bf16 [slots][hidden]."""

    def __init__(self, columns: Columns, launch: LaunchTokens, mask: int, known: ch.Expr, slots: ch.Expr) -> None:
        super().__init__(columns, launch)
        self.mask, self.known_rows, self.slots = mask, known, slots

    def is_known(self, column: Any) -> Any:
        """Whether a column has such a row."""
        return self.next_token[column] >= KNOWN

    @ch.function
    def _given(self, sequence: ch.Expr, index: ch.Expr) -> ch.Expr:
        """An input of a sequence, or a mask where it has none left."""
        token = ch.var(ty.u32, self.mask)
        with ch.if_(index < self.columns.sequence(sequence, "given")):
            place = sequence * self.machine.sequence_tokens + index
            token.set(ty.u32(self.launch.tokens[place]))
            with ch.if_(token < KNOWN):
                token.set(ch.minimum(token, self.model.vocab - 1))
            with ch.else_():
                token.set(ch.minimum(token, self.slots + (KNOWN - 1)))
        return token

    def embedding(self, column: ch.Expr) -> ch.Expr:
        """The embedding of a column's token, or its row."""
        token, hidden = self.next_token[column], self.columns.machine.hidden
        of_known = self.known_rows + ty.u64(token - KNOWN) * hidden
        return ch.select(token >= KNOWN, of_known, self.launch.embedding + ty.u64(token) * hidden)
