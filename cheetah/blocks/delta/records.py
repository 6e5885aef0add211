"""What the columns of a step would change in what is remembered, kept until it is known whose tokens count.

Where tokens are drafted, a state is of those alone that turned out right. A step does not store what its columns make
of it: each leaves a *record* beside it, its key, what is written by it and how much is kept, and its raw rows. The next
step loads the state and does what the records of those say whose tokens were right, before its own columns. That is the
arithmetic of doing it at once, of the same numbers in the same order, so the bits are the same. Behind the last step of
a launch the states are brought up to date in the same way: between launches there are none but states of tokens that
count.

A record is written and read by the same block. Of its words those of channels are of one thread; the others are read
behind barriers of the consumer warps that follow their writes, and written again behind one that follows their reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.advance import ByAcceptance
from cheetah.blocks.columns import Columns
from cheetah.lang import prim, ty
from cheetah.plan.delta import COLUMNS, DIMS, DeltaHeads


@dataclass(frozen=True, eq=False)
class Records:
    """words: u32 [layers][shares][columns][record_words]: see `DeltaHeads.record_words`."""

    columns: Columns
    heads: DeltaHeads
    words: ch.Expr
    advance: ByAcceptance

    def of(self, layer: Any, share: Any, column: Any) -> ch.Expr:
        """Where a column's record of a share lies (u32*)."""
        place = (ty.u64(layer) * self.heads.shares + ty.u64(share)) * self.columns.limit + ty.u64(column)
        record: ch.Expr = self.words + place * ch.named("RECORD_WORDS", self.heads.record_words)
        return record

    # -- the parts of a record ----------------------------------------------------------------------------------------

    @staticmethod
    def key(record: ch.Expr) -> ch.Expr:
        """f32* [DIMS]."""
        return ch.reinterpret(ty.ptr_mut(ty.f32), record)

    def written(self, record: ch.Expr) -> ch.Expr:
        """f32* [value heads of the key head][COLUMNS]: what each column's key is times."""
        return self.key(record) + DIMS

    def kept(self, record: ch.Expr) -> ch.Expr:
        """f32* [value heads of the key head]: how much of a head's memory is kept."""
        return self.key(record) + (DIMS + self.heads.shared * COLUMNS)

    def rows(self, record: ch.Expr) -> ch.Expr:
        """u32* of the pairs of channels: a token's raw rows."""
        return record + (self.heads.record_words - self.heads.share_channels // 2)

    @ch.inline
    def keep_key(self, record: ch.Expr, key: Any, lane: Any, pieces: Sequence[Any]) -> None:
        """By the lanes of one column: the numbers of the key that each of them has."""
        into = ch.reinterpret(ty.ptr_mut(ty.u32x4), record)
        for number, place in enumerate(pieces):
            into[lane + place] = prim.make_u32x4(*[prim.float_bits(key[number * 4 + index]) for index in range(4)])

    # -- whose tokens count -------------------------------------------------------------------------------------------

    @ch.inline
    def counted(self, sequence: Any, step: Any) -> tuple[Any, Any]:
        """(tokens of a sequence that its state is of, how many more there are in step `step`, in records of its first
        columns)."""
        now = self.advance.done(sequence, step)
        before = ch.select(step == 0, now, self.advance.done(sequence, step + 1))  # the copy of the step before
        behind = ch.const(ty.u32, before, name="behind")
        return self.columns.sequence(sequence, "length") + behind, ch.const(ty.u32, now - behind, name="more")
