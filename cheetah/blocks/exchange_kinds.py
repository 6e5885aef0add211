"""The two kinds of exchange: words that say themselves that they are there, and plain words behind a grid barrier."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.exchange import ALONE, Exchange, Peers
from cheetah.blocks.exchange_vectors import (
    COUNTER_BYTES,
    PARTS_IN_HALF,
    Vector,
    apart,
)
from cheetah.blocks.linear.formats.vectors import is_raised, raised_word, word_place
from cheetah.blocks.machine import Machine
from cheetah.blocks.vector_copies import VectorCopies
from cheetah.lang import prim, ty
from cheetah.lang.primitive import GPU_SCOPE
from cheetah.lang.primitives.exchange import UNITS
from cheetah.plan.formats import BF16_VECTOR
from cheetah.plan.halves import PAGE_BYTES, PART_BYTES, parts_in_half


class FlaggedExchange(Exchange):
    """Words say themselves that they are there; readers poll the data words.

    A flagged word is 8 bytes, 4 of data and a 4-byte epoch. Ordering: a 64-bit access is single-copy atomic, so a word
    with the right epoch has the right data: no other ordering is needed for the payload. The epoch grows with every
    layer of every step and is never used twice, so an old word is never taken for a new one.

    A tagged word, of the inputs of products, is 4 bytes: two bf16 numbers, made so small (times a power of two: exact
    but for those that become subnormal) that the highest bit of either exponent is free, and in those two bits a tag
    that follows from the epoch.
    It has half of the bytes. Ordering: a thread that reads a vector reads the same words of it each time that it is
    read, and by coherence never gets a word older than one that it has had. So a tag has to tell apart those published
    since the last one that was read, at most three with that one: epochs of a vector follow one another without
    gaps (modulo the tags, see `epochs_of_step`), and no two in a row go unread (a step without a head leaves one).
    Launches begin with all of it zeroed, which is no tag.

    Where: a thread that polls words of both halves of L2 sees them later than one that polls words of one half. So an
    input's parts lie in one half, those of the first input (`hidden` in a step) in another than those of the others: of
    all ways the one whose times depend least on which half that is. Not where an input has one part alone: there the
    ways are better or worse by which half it is. Where halves are others than `half_of` says, all of it is as right."""

    word = ty.u64

    @classmethod
    def lay_out(
        cls, sizes: dict[str, int], inputs: Collection[str], offset_bytes: int = COUNTER_BYTES
    ) -> dict[str, Vector]:
        part_words, in_half = PART_BYTES // cls.input_word.bytes, cls._parts_in_halves(sizes, inputs)
        placed = {
            name: Vector(name, sizes[name], parts[0] * part_words, cls.input_word, parts.step)
            for name, parts in in_half.items()
        }
        others = {name: words for name, words in sizes.items() if name not in placed}
        behind = max((parts[-1] + 1 for parts in in_half.values()), default=0) * PART_BYTES
        return apart(placed | super().lay_out(others, inputs, behind or offset_bytes))

    @classmethod
    def _parts_in_halves(cls, sizes: dict[str, int], inputs: Collection[str]) -> dict[str, range]:
        """The parts of a page that inputs lie in; none for those that lie as they come."""
        counts = {n: -(-words * cls.input_word.bytes // PART_BYTES) for n, words in sizes.items() if n in inputs}
        if min(counts.values(), default=1) == 1:
            return {}
        chosen: dict[str, range] = {}
        for name, count in counts.items():
            if count <= PARTS_IN_HALF:
                chosen[name] = parts_in_half(
                    count, int(bool(chosen)), {part for parts in chosen.values() for part in parts}
                )
        return chosen

    @classmethod
    def size_bytes(cls, sizes: dict[str, int], inputs: Collection[str] = ()) -> int:
        """At least a page where inputs lie in halves, so that the workspace begins with one."""
        least = PAGE_BYTES if cls._parts_in_halves(sizes, inputs) else 0
        return max(super().size_bytes(sizes, inputs), least)

    def start(self) -> None:
        pass

    def _publish_at(self, places: Sequence[ch.Expr], name: str, data: ch.Value, epoch: ch.Value) -> None:
        """An input's element that is not below its limit, or no number, becomes the largest that is."""
        for place in places:
            if name in self.inputs:
                prim.publish_tagged(place, data, self.inputs[name], epoch, scope=self.scope_of(name))
            else:
                prim.publish_flagged(place, data, epoch, scope=self.scope_of(name))

    def publish_release(self, name: str, index: ch.Value, data: ch.Value, epoch: ch.Value) -> None:
        for place in self._places(name, index):
            prim.publish_flagged_release(place, data, epoch, scope=self.scope_of(name))

    def meet(self, when: ch.Value = True) -> None:
        """Each word is waited for by itself."""

    def read4(self, name: str, unit: ch.Value, epoch: ch.Value) -> ch.Expr:
        words = self.place(name, ch.cast(ty.u32, unit) * 4)
        if name in self.inputs:
            return prim.wait_tagged4(words, self.inputs[name], epoch, scope=self.scope_of(name))
        return prim.wait_flagged4(words, epoch, scope=self.scope_of(name))

    @ch.inline
    def asked4(self) -> ch.Expr:
        asked = ch.array(ty.u64, 4)
        return asked

    def ask4(self, asked: ch.Expr, name: str, unit: ch.Value) -> None:
        prim.ask_flagged4(asked, self.place(name, ch.cast(ty.u32, unit) * 4), scope=self.scope_of(name))

    def settle4(self, asked: ch.Expr, name: str, unit: ch.Value, epoch: ch.Value) -> ch.Expr:
        return prim.settle_flagged4(
            asked, self.place(name, ch.cast(ty.u32, unit) * 4), epoch, scope=self.scope_of(name)
        )

    def read_units(self, name: str, data: ch.Expr, unit: ch.Value, stride: int, count: int, epoch: ch.Value) -> None:
        words, distance = self.place(name, ch.cast(ty.u32, unit) * 4), self.vectors[name].distance(stride * 4)
        if distance is None:
            with ch.for_(count, unroll=True) as index:
                data[index] = self.read4(name, unit + index * stride, epoch)
        elif name in self.inputs:
            prim.wait_tagged_units(data, words, distance, count, self.inputs[name], epoch, scope=self.scope_of(name))
        else:
            prim.wait_flagged_units(data, words, distance, count, epoch, scope=self.scope_of(name))

    def read_places(self, name: str, data: ch.Expr, places: ch.Expr, count: ch.Value, epoch: ch.Value) -> None:
        prim.wait_flagged_places(data, self.place(name, 0), places, count, epoch, scope=self.scope_of(name))

    def wait_for_one(self, name: str, unit: ch.Value, epoch: ch.Value, when: ch.Value = True) -> None:
        first = self.machine.lane == 0
        with ch.if_(first if when is True else first & when):
            self.read4(name, unit, epoch)
        prim.warp_barrier()

    def read4_acquire(self, name: str, unit: ch.Value, epoch: ch.Value) -> ch.Expr:
        return prim.wait_flagged4_acquire(self.place(name, ch.cast(ty.u32, unit) * 4), epoch, scope=self.scope_of(name))


class BarrierExchange(Exchange):
    """Plain words and an atomic grid barrier between writing and reading: the simple reference.

    Ordering: every thread's stores come before the block barrier; one thread then adds to the counter with release
    (cumulative over the block barrier), polls it with acquire until all blocks of this round have added, and a second
    block barrier passes that on. So all stores of all blocks before `meet` are seen by all loads after it. The counter
    only grows, by exactly one a block and meeting, so rounds cannot be confused and nothing is reset between launches.
    """

    word = ty.u32

    def _declare(self) -> None:
        super()._declare()
        if self.copied:
            self.copies = VectorCopies(self.machine)

    def initialise(self) -> None:
        if self.copies is not None:
            self.copies.initialise()

    @ch.inline
    def start(self) -> None:
        """Learn the counter's present round: it stands at a multiple of the grid size between two meetings."""
        counter = ch.reinterpret(ty.ptr_mut(ty.u64), self.workspace)
        arrivals_due = ch.var(ty.u64, 0)
        self.counter, self.arrivals_due = counter, arrivals_due
        with ch.if_(self.machine.thread == 0):
            ticket = prim.fetch_add_release_u64(counter, 1, scope=self.scope)
            arrivals_due.set((ticket // self.machine.world.blocks + 1) * self.machine.world.blocks)
            prim.wait_at_least_u64(counter, arrivals_due, scope=self.scope)
        if self.copies is not None:
            self.copies.start()
        self.machine.meet()

    def _publish_at(self, places: Sequence[ch.Expr], name: str, data: ch.Value, epoch: ch.Value) -> None:
        (place,) = places
        place[0] = data

    def _word(self, name: str, index: ch.Value) -> ch.Expr:
        return super()._word(name, word_place(index, self.copied.get(name, BF16_VECTOR)))

    def _as_published(self, name: str, index: ch.Value, data: ch.Value) -> ch.Value:
        kind = self.copied.get(name, BF16_VECTOR)
        return raised_word(data, index, kind) if is_raised(kind) else data

    def _let_be_copied(self, name: str) -> None:
        if self.copies is not None and name in self.copied:
            prim.fence_proxy_async_global()  # others' copies read what was stored

    def publish_release(self, name: str, index: ch.Value, data: ch.Value, epoch: ch.Value) -> None:
        self.publish(name, index, data, epoch)

    def meet(self, when: ch.Value = True) -> None:
        ch.comment("grid barrier")
        with ch.if_(when):
            if self.copies is not None:
                prim.fence_proxy_async_global()  # others' copies read what was stored
            self.machine.meet()
            with ch.if_(self.machine.thread == 0):
                self.arrivals_due += self.machine.world.blocks
                prim.add_release_u64(self.counter, 1, scope=self.scope)
                prim.wait_at_least_u64(self.counter, self.arrivals_due, scope=self.scope)
            self.machine.meet()

    @ch.inline
    def read4(self, name: str, unit: ch.Value, epoch: ch.Value) -> ch.Expr:
        words = ch.reinterpret(ty.ptr(ty.u32x4), self.place(name, ch.cast(ty.u32, unit) * 4))[0]
        return words

    read4_acquire = read4

    def asked4(self) -> None:
        """None: all of a vector is there after `meet`, so nothing has to be asked for."""

    def ask4(self, asked: Any, name: str, unit: ch.Value) -> None:
        """Nothing; see `asked4`."""

    def settle4(self, asked: Any, name: str, unit: ch.Value, epoch: ch.Value) -> ch.Expr:
        return self.read4(name, unit, epoch)

    def wait_for_one(self, name: str, unit: ch.Value, epoch: ch.Value, when: ch.Value = True) -> None:
        """All of it is there after `meet`."""

    @ch.inline
    def read_units(self, name: str, data: Any, unit: ch.Value, stride: int, count: int, epoch: ch.Value) -> None:
        with ch.for_(count, unroll=True) as index:
            data[index] = self.read4(name, unit + index * stride, epoch)

    @ch.inline
    def read_places(self, name: str, data: Any, places: Any, count: ch.Value, epoch: ch.Value) -> None:
        with ch.for_(UNITS, unroll=True) as index:
            with ch.if_(index < count):
                data[index] = self.read4(name, places[index] // 4, epoch)


def exchange_kind(sync: str) -> type[Exchange]:
    """The kind that a plan names."""
    return {"flags": FlaggedExchange, "barrier": BarrierExchange}[sync]


def make_exchange(
    machine: Machine,
    workspace: ch.Expr,
    sizes: dict[str, int],
    scope: str = GPU_SCOPE,
    inputs: Mapping[str, int] | None = None,
    copied: Mapping[str, str] | None = None,
    peers: Peers = ALONE,
) -> Exchange:
    """The kind that the plan names. inputs, copied, peers: see `Exchange`."""
    return exchange_kind(machine.plan.sync)(machine, workspace, sizes, scope, inputs, copied, peers)
