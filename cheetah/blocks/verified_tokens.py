"""The tokens of a launch in which tokens are drafted: the step that takes a draft in says whether it was right.

A sequence has neighbouring columns: its first one has a token that is known, those behind it what was drafted. The
token that is chosen behind a column is right if all columns up to it had the right tokens, and the next column has the
right one if it has what was chosen. So a step makes as many tokens as there are columns up to the first wrong draft.

All blocks choose alike (`cheetah.blocks.sampling`), and judge by what they chose and drafted alike: so none asks
another, nor the host. Keys and values of wrong drafts lie behind those that are counted as cached: nobody reads them,
and who has those positions next writes them again.
"""

from __future__ import annotations

from typing import Any, Protocol

from cheetah import lang as ch
from cheetah.blocks.adjustments import Adjustments
from cheetah.blocks.advance import ByAcceptance
from cheetah.blocks.columns import CANCELLED_TOKEN, NO_TOKEN, NUMBER, SEQUENCE, STOPPED, Columns
from cheetah.blocks.lookup import Lookup
from cheetah.blocks.tokens import LaunchTokens, Tokens
from cheetah.lang import prim, ty
from cheetah.plan.kv.tables import EMITTED_COUNT_BITS, PENALISED, ROUND_WORDS
from cheetah.plan.plan import EMITTED_BITS


class LaunchDrafts(LaunchTokens, Protocol):
    """What a launch that verifies drafts knows of its tokens: parameters of the kernel."""

    @property
    def history(self) -> ch.Expr: ...
    @property
    def judges(self) -> ch.Expr: ...
    @property
    def rounds(self) -> ch.Expr: ...


class VerifiedTokens(Tokens):
    """The tokens of the columns in use, step after step, some of them drafted."""

    launch: LaunchDrafts

    def __init__(self, columns: Columns, launch: LaunchDrafts, rows: int | None, adjustments: Adjustments) -> None:
        super().__init__(columns, launch, rows)
        assert isinstance(columns.advance, ByAcceptance)
        self.advance, self.adjustments = columns.advance, adjustments
        self.lookup = Lookup(columns, self.advance, launch.history, self.rows)

    @ch.inline
    def take_first(self) -> None:
        """The first tokens that are given, and that nothing is behind any sequence. A block barrier must follow."""
        Tokens.take_first(self)
        machine = self.machine
        with ch.outline("begin_counting"):
            with ch.if_(machine.thread < self.columns.count):
                self.columns.states[machine.thread].sequence = self.columns.record(machine.thread, "sequence")
                self.columns.states[machine.thread].number = self.columns.record(machine.thread, "number")
            with ch.if_(machine.thread <= machine.plan.batch):
                self.advance.copy(0)[machine.thread] = 0

    @ch.inline
    def draft_first(self) -> None:
        """In the consumer role, behind that barrier: the drafts of the first step."""
        first = ch.const(ty.u32, 0, name="first_step")
        self._draft(first)
        self.machine.meet()

    @ch.function
    def _take_tokens(self, step: Any) -> None:
        """One warp judges what was chosen, a column a lane, and finds whether to go on; then all warps look drafts up,
        and go on together. The producer lane and the adding warps need no drafts, and do not wait for them."""
        machine = self.machine
        with ch.if_(machine.warp == 0):
            with ch.if_(machine.lane == 0):
                # The producer lane and the adding warps have seen the end of the last step: so they are done with the
                # words of that step, over which those of the next one are written.
                prim.mbarrier_wait(self.step_taken, (step + 1) % 2)
            prim.warp_barrier()  # the other lanes write behind that wait
            going_on = self._judge(step)
            prim.warp_barrier()  # every lane's words are written before lane 0 lets them be read
            with ch.if_(machine.thread == 0):
                with ch.if_(machine.block == 0):
                    self.launch.status[0] = ty.i32(step + 1)
                self.next_token[self.columns.limit] = ch.select(going_on == 0, ty.u32(1), ty.u32(0))
                prim.fence_proxy_async()  # what other blocks wrote to the cache, before our copy engine reads it
                prim.mbarrier_arrive(self.step_done)
        machine.meet()
        with ch.if_((self.next_token[self.columns.limit] == 0) & (step + 1 < self.launch.steps)):
            self._draft(step + 1)
            machine.meet()

    # -- judging ------------------------------------------------------------------------------------------------------

    @ch.inline
    def _judge(self, step: Any) -> Any:
        """By the first warp, a column a lane: note what was made, and where every sequence goes on. Whether one does.

        A column *leads* to the next if what was chosen behind it is what the next one has; the first that does not is
        its sequence's last one in this step."""
        machine, columns = self.machine, self.columns
        is_column = machine.lane < columns.count
        column = ch.minimum(machine.lane, columns.count - 1)
        sequence = ch.const(ty.u32, columns.state(column, SEQUENCE), name="sequence")
        number = ch.const(ty.u32, columns.state(column, NUMBER), name="number")
        stopped = ch.const(ty.u32, columns.state(column, STOPPED), name="stopped")
        sampled = ch.const(ty.u32, machine.chosen[column], name="sampled")
        given = ch.const(ty.u32, columns.sequence(sequence, "given"), name="given")
        total = ch.const(ty.u32, columns.sequence(sequence, "total"), name="total")
        first = ch.const(ty.u32, columns.sequence(sequence, "first_column"), name="first")
        per_step = ch.const(ty.u32, columns.sequence(sequence, "per_step"), name="per_step")
        following = number + 1
        is_wanted = (following >= given) & (number < total) & (stopped == 0)
        ends = ch.var(ty.u32, stopped)
        self._look_for_end(sequence, sampled, is_wanted, ends)
        next_input = ch.const(ty.u32, self.next_token[ch.minimum(column + 1, columns.limit - 1)], name="next_input")
        has_next = is_column & (column + 1 < first + per_step) & (following < total)
        leads = has_next & (ends == 0) & ((following < given) | (next_input == sampled))
        bit = ty.u32(1) << column
        leading = prim.warp_sum_u32(ch.select(leads, bit, ty.u32(0)))
        before = bit - (ty.u32(1) << first)
        is_right = is_column & ((leading & before) == before)
        is_last = is_right & ~leads
        prim.warp_barrier()  # all have read the columns' inputs and whether they had stopped
        with ch.if_(self.adjustments.asked(PENALISED)):
            self._count(prim.warp_sum_u32(ch.select(is_right & (stopped == 0), bit, ty.u32(0))))
            prim.warp_barrier()  # it asks whether columns had stopped, which is written below
        with ch.if_((machine.block == 0) & is_right & (stopped == 0)):
            place = ch.const(ty.u32, sequence * machine.sequence_tokens + following, name="place")
            self.launch.judges[place] = ch.cast(ty.u32, step) * columns.limit + column
            with ch.if_(is_wanted):
                self._note(sequence, place, following, column - first, sampled)
            self._tally(sequence, column - first, number, ch.select(is_last, ty.u32(1), ty.u32(0)))
        going_on = ch.var(ty.u32, 0)
        plan_step = ch.var(ty.u32, 0)
        with ch.if_(is_last):
            done = ch.const(ty.u32, ch.select(stopped == 0, following, number), name="done")
            self.advance.copy(step + 1)[sequence] = done
            plan_step.set((done + (per_step - 1)) // per_step)
            is_over = (ends != 0) | (following >= total)
            with ch.for_(per_step, unroll=1) as index:
                self.columns.states[first + index].stopped = ch.select(is_over, ty.u32(1), ty.u32(0))
            with ch.if_(~is_over):
                going_on.set(1)
            with ch.if_(following < given):
                self.next_token[first] = self._given(sequence, following)
            with ch.else_():
                # No logit was a number: the host is told so, and an address in the embedding must be one.
                self.next_token[first] = ch.minimum(sampled, self.rows - 1)
        furthest = prim.warp_maximum_u32(plan_step)
        with ch.if_(machine.lane == 0):
            self.advance.copy(step + 1)[machine.plan.batch] = furthest
        goes_on = prim.warp_maximum_u32(going_on)
        return goes_on

    @ch.function
    def _look_for_end(self, sequence: Any, sampled: Any, is_wanted: Any, ends: Any) -> None:
        """Whether a chosen token ends its sequence: a stop id, none at all, or the host's word."""
        with ch.if_(sampled == CANCELLED_TOKEN):
            ends.set(1)
        with ch.if_(is_wanted):
            with ch.if_(sampled == NO_TOKEN):
                ends.set(1)
            first_stop = ch.const(ty.u32, self.columns.sequence(sequence, "stop_first"), name="first_stop")
            stop_count = ch.const(ty.u32, self.columns.sequence(sequence, "stop_count"), name="stop_count")
            with ch.for_(stop_count, unroll=1) as stop:
                with ch.if_(ty.u32(self.launch.stop_ids[first_stop + stop]) == sampled):
                    ends.set(1)

    @ch.function
    def _count(self, right: Any) -> None:
        """What was made counts for penalties: by one lane, since a sequence may have made a token twice. right: a bit a
        column."""
        chosen = self.machine.chosen
        with ch.if_(self.machine.lane == 0), ch.for_(self.columns.count, unroll=1, name="column") as column:
            with ch.if_(((right >> column) & 1) != 0):
                self.adjustments.count(column, ch.const(ty.u32, chosen[column], name="token"))

    @ch.function
    def _note(self, sequence: Any, place: Any, number: Any, index: Any, sampled: Any) -> None:
        """In block 0: what was chosen as token `number` of a sequence, by its column `index`. place: in `tokens`."""
        self.launch.tokens[place] = ty.i32(sampled)
        known = ch.const(ty.u32, ch.maximum(self.columns.sequence(sequence, "given"), number - index), name="known")
        counts = self.drafted[sequence] | (number - known) << EMITTED_COUNT_BITS
        self._emit(place, ch.select(sampled < CANCELLED_TOKEN, sampled | counts << EMITTED_BITS, sampled))
        with ch.if_((self.columns.sequence(sequence, "ngram_max") != 0) & (sampled < CANCELLED_TOKEN)):
            self.lookup.append(sequence, number, sampled)

    @ch.function
    def _tally(self, sequence: Any, index: Any, number: Any, is_last: Any) -> None:
        """In block 0: how far a sequence has come, and how its drafts fared. index: of a right column among its
        sequence's, number: its token."""
        plan, given = self.machine.plan, self.columns.sequence(sequence, "given")
        words = self.launch.rounds + sequence * (ROUND_WORDS + plan.tokens)
        drafted = ch.const(ty.u32, self.drafted[sequence], name="drafted")
        known = ch.const(ty.u32, ch.maximum(given, number - index + 1), name="known")
        with ch.if_((number >= known) & (number - known < drafted)):
            words[ROUND_WORDS + (number - known)] += 1
        with ch.if_(is_last != 0):
            words[0] = number + 1
            with ch.if_(drafted != 0):
                words[1] += 1
                words[2] += drafted

    # -- drafting -----------------------------------------------------------------------------------------------------

    @property
    def drafted(self) -> ch.Expr:
        """How many tokens were drafted for each sequence in this step (u32*); the first consumer warp's."""
        return self.machine.region("done", ty.u32) + 2 * (self.machine.plan.batch + 1)

    @ch.inline
    def _draft(self, following: Any) -> None:
        """In the consumer role: the tokens of step `following` behind each sequence's first column. Those of the
        launch, else what lies behind the same tokens earlier; none is as good as token 0. A barrier must follow."""
        with ch.if_(self.machine.warp == 0):
            self._propose(following)
        self.lookup.draft(following, self.next_token, self.drafted)

    @ch.function
    def _propose(self, following: Any) -> None:
        """By the first warp, a column a lane: inputs and drafts of the launch."""
        columns = self.columns
        with ch.if_(self.machine.lane < columns.count):
            column = self.machine.lane
            sequence = ch.const(ty.u32, columns.state(column, SEQUENCE), name="sequence")
            index = ch.const(ty.u32, column - columns.sequence(sequence, "first_column"), name="index")
            done = ch.const(ty.u32, self.advance.done(sequence, following), name="done")
            with ch.if_(index != 0):
                self.next_token[column] = self._given(sequence, done + index)
            with ch.else_():
                known = ch.const(ty.u32, ch.maximum(columns.sequence(sequence, "given"), done + 1), name="known")
                proposed = ch.minimum(
                    columns.sequence(sequence, "drafted"), done + columns.sequence(sequence, "per_step")
                )
                self.drafted[sequence] = ch.select(proposed > known, proposed - known, ty.u32(0))

    @ch.function
    def _given(self, sequence: ch.Expr, index: ch.Expr) -> ch.Expr:
        """An input of a sequence or what the launch drafts, or 0 where it has neither left."""
        launch = self.launch
        token = ch.var(ty.u32, 0)
        with ch.if_(index < self.columns.sequence(sequence, "drafted")):
            place = sequence * self.machine.sequence_tokens + index
            token.set(ch.minimum(ty.u32(launch.tokens[place]), self.rows - 1))
        return token
