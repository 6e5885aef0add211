"""The copy ring: fixed-size stages in shared memory through which every weight and every KV page of the model flows.

The producer lane fills stages with bulk copies and never waits for the model's dependencies; the consumer warps use the
stages in the same order. Two mbarriers a stage keep them apart:

* full[s]: one arrival (the producer lane's, announcing the bytes) and the bytes themselves. A consumer warp that has
  waited for it sees the copied data, because completion of the copy releases and the wait acquires.
* empty[s]: one arrival a consumer warp, made after the warp's last read of the stage (`warp_barrier` orders the
  other lanes' reads before it). A load that was issued has not read yet, and an arrival may overtake it where the
  memory pipeline is busy: so a stage takes what came of it (`Stage.has_read`), and one whose body says nothing is
  refused while the kernel is generated. The producer lane waits for it before it announces the next bytes, so a stage
  is never overwritten early. In attention the warps share stages out: who works on one arrives for the others too, and
  nobody else touches it. A warp that waits for a stage of its own cannot be a lap behind, since its arrival is needed.

At most `plan.in_flight` chunks are requested and not yet landed: more requests would delay the exchanges (8B on an
H200, 16 KB chunks, 3 / 4 / 5 / 6 in flight: 3.68 / 3.63 / 3.71 / 3.72 ms a step). Fewer are, `plan.in_flight_waiting`,
while the block waits for a vector, which its own copies delay most (worth 1.2 % on 8B, 1.9 % on 1B): the consumer warps
say so in a word of shared memory (`begin_waiting`, `end_waiting`) at which the producer lane looks before each request.
The word orders nothing: whatever it says, the copies are the same in the same order. Landed chunks pile up until they
are used. What passes through is read once, so the copies ask L2 to evict it first (1.4 % on 8B).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.machine import Machine
from cheetah.lang import UnusedStageError, prim, ty


class RingCursor:
    """A place in the ring: a stage and the parity of the present pass over it."""

    def __init__(self, stage: ch.Expr, parity: ch.Expr, stages: int) -> None:
        self.stage, self.parity, self.stages = stage, parity, stages

    def advance(self) -> None:
        _advance(self.stage, self.parity, ch.argument(self.stages))


@ch.function
def _advance(stage: Any, parity: Any, stages: ch.Expr) -> None:
    """The next stage of the ring; behind the last comes the first, in the next pass."""
    stage += 1
    with ch.if_(stage == stages):
        stage.set(0)
        parity ^= 1


class Stage:
    """A full stage in the hands of a consumer warp: its bytes begin at `address`, and end in the ring's `use`."""

    def __init__(self, address: ch.Expr) -> None:
        self.address = address
        self._is_read = False

    def has_read(self, word: ch.Value) -> None:
        """Go on once `word` (u32), which came of every load from the stage since the last call, is there.

        Each lane calls it behind its last loads; without, the next copy could land before they have read.
        """
        self._is_read = True
        prim.wait_for_u32(word)

    def require_read(self) -> None:
        """While generating: UnusedStageError if nothing was said of what was read."""
        if not self._is_read:
            raise UnusedStageError(
                "a stage of the ring is given back, and nothing says that its loads have read: call "
                "`stage.has_read(word)` with a word that came of them, or `ring.discard()` where nobody reads it"
            )


class Ring:
    """Stages, their barriers, and a cursor for each role."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.stages = machine.plan.stages
        self.stage_bytes = machine.plan.stage_bytes
        self.streams = ch.Streams("ring")
        self.keys: dict[str, int] = {}
        self._declare()

    @ch.inline
    def _declare(self) -> None:
        full = self.machine.region("ring_barriers", ty.u64)
        empty = full + self.stages
        ring = self.machine.region("ring", ty.u8)
        block_waits = self.machine.region("block_waits", ty.u32)
        self.full, self.empty, self.memory, self.block_waits = full, empty, ring, block_waits

    @ch.inline
    def initialise(self) -> None:
        """Set the barriers up; one thread does, and a block barrier must follow before anyone uses them."""
        with ch.for_(self.stages) as stage:
            prim.mbarrier_init(self.full + stage, 1)
            prim.mbarrier_init(self.empty + stage, self.machine.plan.consumer_warps)
        prim.store_shared_u32(self.block_waits, 0)

    @ch.inline
    def start(self) -> None:
        """Give each role its cursor."""
        with self.machine.producer:
            fill_stage = ch.var(ty.u32, 0)
            # A fresh barrier's previous phase has parity 1: the first pass finds every stage empty at once.
            fill_parity = ch.var(ty.u32, 1)
            landed_stage = ch.var(ty.u32, 0)
            landed_parity = ch.var(ty.u32, 0)
            under_way = ch.var(ty.u32, 0)
            self.filling = RingCursor(fill_stage, fill_parity, self.stages)
            self.landed = RingCursor(landed_stage, landed_parity, self.stages)
            self.under_way, _ = under_way, None
        with self.machine.consumer:
            use_stage = ch.var(ty.u32, 0)
            use_parity = ch.var(ty.u32, 0)
            self.using = RingCursor(use_stage, use_parity, self.stages)

    def fills(self, name: str) -> None:
        """While generating: the producer role's program fills stages with `name` here. Who never uses them is told."""
        self.keys[name] = self.streams.open(name)

    def uses(self, name: str) -> None:
        """While generating: the consumer role's program uses the stages that were filled with `name`."""
        self.streams.consume(self.keys.get(name, -1))

    @contextmanager
    @ch.inline
    def fill(self, chunk_bytes: Any, at_least: int = 1, most: int | None = None) -> Iterator[tuple[ch.Expr, ch.Expr]]:
        """In the producer role: the next stage, empty and with `chunk_bytes` announced; the body issues the copies.
        at_least: so many may be requested also while the block waits. most: so many else, by rule those of the plan."""
        prim.mbarrier_wait(self.empty + self.filling.stage, self.filling.parity)
        allowed, waiting = most or self.machine.plan.in_flight, self.machine.plan.in_flight_waiting
        while_waiting = min(max(waiting, at_least) if waiting else allowed, allowed)
        if while_waiting < allowed:
            self._bound_requests(ch.argument(while_waiting), ch.argument(allowed))
        else:
            self._bound_all_requests(ch.argument(allowed))
        barrier = self.full + self.filling.stage
        destination = self.memory + self.filling.stage * self.stage_bytes
        prim.mbarrier_arrive_expect_tx(barrier, chunk_bytes)
        yield destination, barrier
        self.filling.advance()

    @ch.function
    def _bound_requests(self, while_waiting: ch.Expr, allowed: ch.Expr) -> None:
        """The same where fewer are allowed while the block waits."""
        waits = prim.load_shared_u32(self.block_waits)
        self._bound_all_requests(ch.select(waits != 0, while_waiting, allowed))

    @ch.function
    def _bound_all_requests(self, most: ch.Expr) -> None:
        """In the producer role: let chunks land until one more may be requested."""
        with ch.for_(most, self.under_way + 1, unroll=1):
            prim.mbarrier_wait(self.full + self.landed.stage, self.landed.parity)
            self.landed.advance()
        self.under_way.set(ch.minimum(self.under_way + 1, most))

    def begin_waiting(self) -> None:
        """In the consumer role: the block waits for a vector, or will before it has used what lies in the ring."""
        self._tell(1)

    def end_waiting(self) -> None:
        """In the consumer role: the vector is there."""
        self._tell(0)

    def _tell(self, waits: int) -> None:
        if self.machine.plan.in_flight_waiting not in (0, self.machine.plan.in_flight):
            with ch.if_(self.machine.thread == 0):
                prim.store_shared_u32(self.block_waits, waits)

    @contextmanager
    def use(self) -> Iterator[Stage]:
        """In the consumer role: the next stage, full. The body says what it has read; then this warp gives it back."""
        with self._next_stage() as stage:
            yield stage
            stage.require_read()

    def discard(self) -> None:
        """In the consumer role: give the next stage back as soon as it is full; nobody reads it."""
        with self._next_stage():
            pass

    @contextmanager
    @ch.inline
    def _next_stage(self) -> Iterator[Stage]:
        prim.mbarrier_wait(self.full + self.using.stage, self.using.parity)
        chunk = self.memory + self.using.stage * self.stage_bytes
        yield Stage(chunk)
        prim.warp_barrier()  # orders every lane's reads of the stage before the arrival
        with ch.if_(self.machine.lane == 0):
            prim.mbarrier_arrive(self.empty + self.using.stage)
        self.using.advance()

    @contextmanager
    @ch.inline
    def use_ahead(self, ahead: ch.Expr, arrivals: ch.Expr, when: ch.Value = True) -> Iterator[Stage]:
        """In the consumer role, where the warps share stages out: the stage `ahead` of the cursor, full. After the
        body, which says what it has read, this warp arrives for `arrivals` warps; those that work on a stage make up
        for all others, which do not touch it. A parity tells two neighbouring passes apart only: a warp must not look
        at a stage before the pass that precedes has landed. It has, if the stage is at most `stages - in_flight` behind
        one that is known to have landed, because the producer lane waited for the chunk `in_flight` places before that
        one. `skip` moves the cursor. Unless `when` holds no stage is taken, and the body finds something else to work
        on."""
        place = self.using.stage + ahead
        stage = ch.const(ty.u32, place % self.stages, name="stage")
        with ch.if_(when):
            prim.mbarrier_wait(self.full + stage, (self.using.parity + place // self.stages) % 2)
        chunk = self.memory + stage * self.stage_bytes
        taken = Stage(chunk)
        yield taken
        taken.require_read()
        prim.warp_barrier()  # orders every lane's reads of the stage before the arrival
        with ch.if_(self.machine.lane == 0 if when is True else (self.machine.lane == 0) & when):
            prim.mbarrier_arrive_many(self.empty + stage, arrivals)

    @ch.inline
    def skip(self, stages: ch.Expr) -> None:
        """In the consumer role: move the cursor over stages that were used by `use_ahead`."""
        place = self.using.stage + stages
        self.using.parity.set((self.using.parity + place // self.stages) % 2)
        self.using.stage.set(place % self.stages)
