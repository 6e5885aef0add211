"""The tokens of a launch from step to step: who takes which token next, when a step is over, when the launch ends.

Two mbarriers pass the end of a step from the consumer warps to the others: `step_done` says that every block has
written its keys and values, `step_taken` that the producer lane and the adding warps have seen that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cheetah import lang as ch
from cheetah.blocks.columns import CANCELLED_TOKEN, NUMBER, SEQUENCE, STOPPED, TOTAL, Columns
from cheetah.blocks.host_words import HostBuffers, HostWords
from cheetah.lang import prim, ty


class LaunchTokens(HostBuffers, Protocol):
    """What a launch knows of its tokens: parameters of the kernel."""

    @property
    def tokens(self) -> ch.Expr: ...
    @property
    def stop_ids(self) -> ch.Expr: ...
    @property
    def status(self) -> ch.Expr: ...
    @property
    def steps(self) -> ch.Expr: ...
    @property
    def embedding(self) -> ch.Expr: ...


class Tokens:
    """The tokens of the columns in use, step after step. rows: of the embedding, by default one a token id."""

    def __init__(self, columns: Columns, launch: LaunchTokens, rows: int | None = None) -> None:
        self.machine, self.columns, self.launch = columns.machine, columns, launch
        self.host = HostWords(columns, launch)
        self.model = self.machine.model
        self.rows = rows or ch.named("VOCAB", self.model.vocab)

    @ch.inline
    def declare(self) -> None:
        """Name what lies in shared memory."""
        step_done = self.machine.region("step_done", ty.u64)
        next_token = self.machine.region("next_token", ty.u32)
        self.step_done, self.step_taken, self.next_token = step_done, step_done + 1, next_token

    @ch.inline
    def initialise(self) -> None:
        """Set the barriers up; one thread does, and a block barrier must follow before anyone uses them."""
        prim.mbarrier_init(self.step_done, 1)
        prim.mbarrier_init(self.step_taken, 1 + self.machine.plan.adding_warps)

    @ch.function
    def take_first(self) -> None:
        """The first token of every column. A block barrier must follow."""
        machine = self.machine
        with ch.if_(machine.thread < self.columns.count):
            sequence = ch.const(ty.u32, self.columns.record(machine.thread, "sequence"), name="sequence")
            index = ch.const(ty.u32, self.columns.record(machine.thread, "number"), name="index")
            self.next_token[machine.thread] = self._given(sequence, index)
            self.columns.states[machine.thread].stopped = 0
            self.columns.states[machine.thread].cancelled = 0

    @ch.function
    def launch_is_over(self, step: Any) -> Any:
        """In the producer role: wait for the end of the last step, and see whether it was the launch's last.

        No key or value of that step is fetched before all blocks have written theirs: the consumer warps arrive at
        `step_done` after the rendezvous of all blocks that ends a step (release by each block after its stores, acquire
        by this one); the fence orders those ordinary stores before the copy engine's reads. Weights of the first layer
        are requested before this, so the memory stays busy. If the launch is over, the consumer warps use those up and
        the producer lane leaves."""
        prim.mbarrier_wait(self.step_done, (step + 1) % 2)
        prim.fence_proxy_async()
        stop = ch.const(ty.u32, self.next_token[self.columns.limit])
        prim.mbarrier_arrive(self.step_taken)
        return stop != 0

    @ch.inline
    def leave_after(self, step: Any) -> None:
        """In the adder role: wait for the end of a step, and leave the loop of steps if it was the launch's last. None
        of the adding warps is a step ahead of the others then, also where it had no M-tile."""
        prim.mbarrier_wait(self.step_done, step % 2)
        stop = ch.var(ty.u32, 0)
        with ch.if_(self.machine.lane == 0):
            stop.set(self.next_token[self.columns.limit])
            prim.mbarrier_arrive(self.step_taken)
        with ch.if_(prim.shuffle_u32(stop, 0) != 0):
            ch.break_()

    @ch.inline
    def end_step(
        self, step: Any, use_up: Callable[[], None] | None = None, settle: Callable[[], None] | None = None
    ) -> None:
        """In the consumer role: the next tokens, and the end of the launch where nobody wants one. `use_up` uses what
        the producer lane has fetched of the next step by then, if it has; `settle` does what is due behind the last
        step."""
        self._take_tokens(step)
        if settle is not None:
            with ch.if_((self.next_token[self.columns.limit] != 0) | (step + 1 == self.launch.steps)):
                settle()
        with ch.if_(self.next_token[self.columns.limit] != 0):
            if use_up is not None:
                ch.comment("the producer lane has fetched what it does not need the tokens for: use it up")
                with ch.if_(step + 1 < self.launch.steps):
                    use_up()
            ch.break_()

    @ch.function
    def _take_tokens(self, step: Any) -> None:
        """One warp takes every column's next token, given or chosen, and finds whether to go on; then all warps go on
        together, and the producer lane with them."""
        machine = self.machine
        with ch.if_(machine.warp == 0):
            going_on = ch.var(ty.u32, 0)
            with ch.for_(machine.lane, self.columns.count, 32, unroll=1, name="column") as column:
                self._take_token(column, going_on)
            with ch.for_(5, unroll=1) as level:
                going_on |= prim.shuffle_xor_u32(going_on, ty.u32(16) >> level)
            prim.warp_barrier()  # every lane's tokens are written before lane 0 lets them be read
            with ch.if_(machine.thread == 0):
                with ch.if_(machine.block == 0):
                    self.launch.status[0] = ty.i32(step + 1)
                # The producer lane and the adding warps have seen the end of the last step: in a block with nothing to
                # fetch the consumer warps could come two steps ahead of them, and a parity tells two neighbouring
                # phases apart only. Long since true for the others.
                prim.mbarrier_wait(self.step_taken, (step + 1) % 2)
                self.next_token[self.columns.limit] = ch.select(going_on == 0, ty.u32(1), ty.u32(0))
                prim.fence_proxy_async()  # what other blocks wrote to the cache, before our copy engine reads it
                prim.mbarrier_arrive(self.step_done)
        machine.meet()

    @ch.function
    def _take_token(self, column: ch.Expr, going_on: Any) -> None:
        """One lane, one column: note what was sampled after its token, and the token that it has in the next step."""
        machine, launch, columns = self.machine, self.launch, self.columns
        sequence = ch.const(ty.u32, columns.state(column, SEQUENCE), name="sequence")
        index = ch.const(ty.u32, columns.state(column, NUMBER), name="index")
        total = ch.const(ty.u32, columns.state(column, TOTAL), name="total")
        given = ch.const(ty.u32, columns.sequence(sequence, "given"), name="given")
        per_step = ch.const(ty.u32, columns.sequence(sequence, "per_step"), name="per_step")
        sampled = ch.const(ty.u32, machine.chosen[column], name="sampled")
        stopped = ch.var(ty.u32, columns.state(column, STOPPED))
        with ch.if_((index + 1 >= given) & (index < total)):
            with ch.if_(machine.block == 0):
                place = sequence * machine.sequence_tokens + index + 1
                launch.tokens[place] = ty.i32(sampled)
                self._emit(place, sampled)
            first_stop = ch.const(ty.u32, columns.sequence(sequence, "stop_first"), name="first_stop")
            stop_count = ch.const(ty.u32, columns.sequence(sequence, "stop_count"), name="stop_count")
            with ch.for_(stop_count, unroll=1) as stop:
                with ch.if_(ty.u32(launch.stop_ids[first_stop + stop]) == sampled):
                    stopped.set(1)
        following = index + per_step
        with ch.if_((following >= total) | (sampled == CANCELLED_TOKEN)):
            stopped.set(1)
        self.columns.states[column].stopped = stopped
        with ch.if_(stopped == 0):
            going_on.set(1)
        with ch.if_((following >= given) & (per_step == 1)):
            # No logit was a number: the host is told so, and an address in the embedding must be one.
            self.next_token[column] = ch.minimum(sampled, self.rows - 1)
        with ch.else_():
            self.next_token[column] = self._given(sequence, following)

    def _emit(self, place: ch.Expr, token: ch.Expr) -> None:
        """The host hears of a token once."""
        if self.machine.world.size == 1:
            return self.host.emit(place, token)
        with ch.if_(self.machine.number == 0):
            self.host.emit(place, token)

    @ch.function
    def _given(self, sequence: ch.Expr, index: ch.Expr) -> ch.Expr:
        """An input of a sequence, or 0 where it has none left."""
        launch = self.launch
        token = ch.var(ty.u32, 0)
        with ch.if_(index < self.columns.sequence(sequence, "given")):
            place = sequence * self.machine.sequence_tokens + index
            token.set(ch.minimum(ty.u32(launch.tokens[place]), self.rows - 1))
        return token

    def embedding(self, column: ch.Expr) -> ch.Expr:
        """The embedding of a column's token."""
        return self.launch.embedding + ty.u64(self.next_token[column]) * self.columns.machine.hidden
