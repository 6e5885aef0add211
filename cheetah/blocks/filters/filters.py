"""Filters of what may be sampled: top-k, top-p and min-p, of each sequence by itself.

Meaning: `kept` in `cheetah.models.sampling`. Let d be how far a token's logit over the temperature lies below the
highest: its weight is exp(-d), and all that the filters keep lies nearer than all that they do not. A draw from what
they keep is the token with the most noisy logit among it. Mostly the blocks' short lists say which one that is
(`lists`); else it is found in rounds (`rounds`).
"""

from __future__ import annotations

from cheetah import lang as ch
from cheetah.blocks.adjustments import Adjustments
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.filters.columns import WarpColumns
from cheetah.blocks.filters.lists import ShortLists
from cheetah.blocks.filters.rounds import Rounds
from cheetah.blocks.linear.interface import Rows
from cheetah.plan.kv.tables import FILTERED


class Filters:
    """The filters of a launch's sequences. `weighed`: f32 [batch, vocab, 2], each row written and read by the block
    that makes its logit."""

    def __init__(self, exchange: Exchange, adjustments: Adjustments, weighed: ch.Expr) -> None:
        self.adjustments, self.weighed = adjustments, weighed
        self.machine = adjustments.columns.machine
        warps = WarpColumns(adjustments.columns, adjustments)
        self.lists, self.rounds = ShortLists(warps, exchange, weighed), Rounds(warps, exchange, weighed)

    @property
    def is_asked(self) -> ch.Expr:
        """Whether any sequence of the launch is filtered."""
        return self.adjustments.asked(FILTERED)

    @ch.function
    def keep_weighed(self, rows: Rows, token: ch.Expr, scaled: ch.Expr, noisy: ch.Expr) -> None:
        """Write a logit down, as it is compared without filters: one row a lane, in the adder role."""
        is_filtered = (self.adjustments.of(rows.column, "options") & FILTERED) != 0
        with ch.if_(is_filtered):
            with ch.if_(self.adjustments.is_sampled(rows.column)):
                place = (self.adjustments.weighed_row(rows.column) + token) * 2
                self.weighed[place] = scaled
                self.weighed[place + 1] = noisy

    def publish(self, epoch: ch.Expr, step: ch.Expr) -> None:
        """Let all blocks know what this one has to say of the filtered columns, before the candidates. A barrier of the
        consumer warps must lie between the head and this."""
        with ch.if_(self.is_asked), ch.outline("publish_lists"):
            self.lists.publish(epoch, step)

    def choose(self, epoch: ch.Expr, step: ch.Expr) -> None:
        """In the region `chosen` the most noisy token of all becomes, for a filtered column, the most noisy one of what
        is kept. Begins and ends behind a barrier of the consumer warps."""
        with ch.if_(self.is_asked), ch.outline("filter"):
            self.lists.choose(epoch, step, self.rounds.begin_rounds)
            self.machine.meet()
            self.rounds.run(epoch)
