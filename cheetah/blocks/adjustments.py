"""What a sequence asks of its logits before any are compared: a mask of tokens, biases, penalties for repeating.

Meaning: `adjusted` in `cheetah.models.sampling`. Each logit is adjusted by the block that made it. How often a sequence
has a token is counted by that block too, so no other block ever sees the count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cheetah import lang as ch
from cheetah.blocks.columns import NUMBER, PROMPT_TOKEN, SEQUENCE, STOPPED, TOTAL, Columns
from cheetah.lang import prim, ty
from cheetah.plan import M_TILE_ROWS, MatrixLayout
from cheetah.plan.index import ceil_div
from cheetah.plan.kv.tables import BIASED, COLUMNS_MASKED, MASKED, PENALISED

MASK_BITS = 32


def mask_words(vocab: int) -> int:
    """Words of a sequence's mask: a bit a token, the lowest first."""
    return ceil_div(vocab, MASK_BITS)


class RequestBuffers(Protocol):
    """Parameters of the kernel: what sequences ask for, a row a slot."""

    @property
    def options(self) -> ch.Expr: ...
    @property
    def masks(self) -> ch.Expr: ...
    @property
    def logit_bias(self) -> ch.Expr: ...
    @property
    def token_counts(self) -> ch.Expr: ...


@dataclass(frozen=True, eq=False)
class Adjustments:
    """The adjustments of a launch's sequences; `head` is the matrix that makes logits."""

    columns: Columns
    launch: RequestBuffers
    head: MatrixLayout

    @property
    def vocab(self) -> int:
        return ch.named("VOCAB", self.columns.machine.model.vocab)

    def asked(self, bits: int) -> ch.Expr:
        """Whether any sequence of the launch has one of these options: the same in all threads of the grid."""
        return (self.launch.options & bits) != 0

    def of(self, column: ch.Expr, name: str) -> Any:
        """A field of the record of a column's sequence (u32)."""
        return self.columns.sequence(self.columns.state(column, SEQUENCE), name)

    def row(self, column: ch.Expr) -> Any:
        """The element of [batch, vocab] at which the row of a column's sequence begins."""
        return self.of(column, "slot") * self.vocab

    def weighed_row(self, column: ch.Expr) -> ch.Expr:
        """The same of a column's row of `weighed`: [batch, vocab], or [tokens, vocab] where several columns of a
        sequence may be filtered."""
        return column * self.vocab if self.columns.machine.plan.drafts else self.row(column)

    @property
    def own_rows(self) -> int:
        """Rows of the head that a block has, at the most."""
        return ch.named("OWN_ROWS", self.head.waves * M_TILE_ROWS)

    def token_of_row(self, row: ch.Expr, position: ch.Expr) -> Any:
        """The token of a row of those that the block at a position has of the head."""
        m_tile = self.head.m_tile(row // M_TILE_ROWS, position)
        return self.head.of_all(m_tile, self.columns.machine.rank) * M_TILE_ROWS + row % M_TILE_ROWS

    def has_row(self, row: ch.Expr, position: ch.Expr, token: ch.Expr) -> Any:
        """Whether there is such a row, of this rank and of the vocabulary."""
        is_there = token < self.vocab
        if self.head.ranks == 1:
            return is_there
        return is_there & (self.head.m_tile(row // M_TILE_ROWS, position) < self.head.m_tiles)

    @ch.inline
    def is_sampled(self, column: ch.Expr) -> Any:
        """Whether the token after a column's is chosen in this step, and wanted."""
        following = self.columns.state(column, NUMBER) + 1
        wanted = (following >= self.of(column, "given")) & (following <= self.columns.state(column, TOTAL))
        return wanted & (self.columns.state(column, STOPPED) == 0)

    @ch.function
    def adjust(self, column: ch.Expr, token: ch.Expr, logit: ch.Expr) -> ch.Expr:
        """The logit of a token below the vocabulary's end, as its column's sequence wants it."""
        options = ch.const(ty.u32, self.of(column, "options"), name="options")
        adjusted = ch.var(ty.f32, logit)
        with ch.if_((options & MASKED) != 0):
            place = self._mask(column) * ch.named("MASK_WORDS", mask_words(self.vocab)) + token // MASK_BITS
            with ch.if_(((prim.load_constant_u32(self.launch.masks + place) >> (token % MASK_BITS)) & 1) == 0):
                adjusted.set(-float("inf"))
        with ch.if_((options & BIASED) != 0):
            adjusted += prim.bits_float(prim.load_constant_u32(self.launch.logit_bias + (self.row(column) + token)))
        with ch.if_((options & PENALISED) != 0):
            self._penalise(column, token, adjusted)
        return adjusted

    def _mask(self, column: ch.Expr) -> Any:
        """A column's row of `masks`: its sequence's, or its own, where what is drafted before it decides."""
        plan, slot = self.columns.machine.plan, self.of(column, "slot")
        if not plan.drafts:
            return slot
        has_own = (self.of(column, "options") & COLUMNS_MASKED) != 0
        return ch.select(has_own, plan.batch + column, slot)

    @ch.function
    def _penalise(self, column: ch.Expr, token: ch.Expr, adjusted: Any) -> None:
        found = ch.const(ty.u32, self._found(column, token), name="found")
        count = found & (PROMPT_TOKEN - 1)
        with ch.if_(found != 0):
            repetition = ch.const(ty.f32, prim.bits_float(self.of(column, "repetition")), name="repetition")
            quotient = prim.divide_f32(adjusted, repetition)
            adjusted.set(ch.select(adjusted > 0.0, quotient, adjusted * repetition))
        with ch.if_(count != 0):
            adjusted -= prim.bits_float(self.of(column, "frequency")) * ty.f32(count)
            adjusted -= prim.bits_float(self.of(column, "presence"))

    def _found(self, column: ch.Expr, token: ch.Expr) -> ch.Expr:
        """How often a column's sequence has a token, as in `token_counts`."""
        counted = self.launch.token_counts[self.row(column) + token]
        return counted + self._drafted_before(column, token) if self.columns.machine.plan.drafts else counted

    @ch.function
    def _drafted_before(self, column: ch.Expr, token: ch.Expr) -> ch.Expr:
        """How often a token was drafted in this step before it is judged by a column, if the column is to count."""
        times = ch.var(ty.u32, 0)
        next_token = self.columns.machine.region("next_token", ty.u32)
        with ch.for_(self.of(column, "first_column") + 1, column + 1, unroll=1, name="other") as other:
            is_draft = self.columns.state(other, NUMBER) >= self.of(column, "given")
            with ch.if_(is_draft & (next_token[other] == token)):
                times += 1
        return times

    @ch.function
    def count(self, column: ch.Expr, token: ch.Expr) -> None:
        """One thread of each block: count a token that was chosen, in the block that makes its logit.

        That block's barriers between here and the head of the next step order the store before its next reading."""
        machine = self.columns.machine
        is_ours = self.head.position_of_owner(token // M_TILE_ROWS) == self.head.position_of_all(machine.number)
        with ch.if_(((self.of(column, "options") & PENALISED) != 0) & is_ours & (token < self.vocab)):
            with ch.if_(self.is_sampled(column)):
                self.launch.token_counts[self.row(column) + token] += 1
