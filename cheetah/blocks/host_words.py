"""Words that the host reads and writes while a launch runs: tokens as they are chosen, and sequences that are to end.

Both lie in the host's memory, mapped for the device. Each word stands for itself, so nothing orders one after another.
Block 0 (of the first rank) alone looks at them: a trip to the host's memory takes longer than an exchange, so it asks
while it waits for the candidates of a step, and says the answer with its candidates of the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cheetah import lang as ch
from cheetah.blocks.columns import CANCELLED, CANCELLED_TOKEN, SEQUENCE, Columns
from cheetah.lang import prim, ty

SYSTEM = "sys"


class HostBuffers(Protocol):
    """Parameters of the kernel."""

    @property
    def emitted(self) -> ch.Expr: ...
    @property
    def cancelled(self) -> ch.Expr: ...
    @property
    def epoch(self) -> ch.Expr: ...


@dataclass(frozen=True, eq=False)
class HostWords:
    """The words of a launch. `cancelled`: a sequence's is the launch's epoch if it is to end in this launch."""

    columns: Columns
    launch: HostBuffers

    @ch.inline
    def emit(self, place: ch.Expr, token: ch.Expr) -> None:
        """Let the host have a token; `place` as in the buffer `tokens`."""
        prim.store_relaxed_u32(self.launch.emitted + place, token, scope=SYSTEM)

    @ch.inline
    def ask(self) -> Any:
        """Asks which columns are to end; what follows is not kept waiting for the answer."""
        answer = ch.var(ty.u32, 0)
        with ch.if_(self._asks):
            sequence = self.columns.state(self.columns.machine.thread, SEQUENCE)
            answer.set(prim.load_relaxed_u32(self.launch.cancelled + sequence, scope=SYSTEM))
        return answer

    @ch.inline
    def take(self, answer: ch.Expr) -> None:
        """A barrier of the consumer warps must lie between the last `instead_of` and this, and between this and the
        next."""
        thread = self.columns.machine.thread
        with ch.if_(self._asks & (answer == self.launch.epoch)):
            self.columns.states[thread].cancelled = 1

    @ch.inline
    def instead_of(self, column: ch.Expr, best: ch.Expr, token: ch.Expr) -> tuple[Any, Any]:
        """This block's candidate of a column, or, of a sequence that is to end, the one that all blocks will choose."""
        is_cancelled = (self.columns.machine.number == 0) & (self.columns.state(column, CANCELLED) != 0)
        value = ch.select(is_cancelled, prim.float_bits(ty.f32(float("inf"))), prim.float_bits(best))
        return value, ch.select(is_cancelled, ty.u32(CANCELLED_TOKEN), token)

    @property
    def _asks(self) -> ch.Expr:
        machine = self.columns.machine
        return (machine.number == 0) & (machine.thread < self.columns.count)
