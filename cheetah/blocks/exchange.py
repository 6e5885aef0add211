"""Exchanges: vectors that all blocks make together and all blocks need, passed through global memory (in practice, L2).

Payload words are 32 bits: two bf16, or one f32. Two implementations behind one interface; the plan chooses.

Reuse of a vector (both kinds): each vector is written once a layer. The inputs of its writers depend, through the chain
of exchanges of that layer, on every block that reads it in the layer before having finished reading: each reader
publishes its part of the next vector only after a block barrier that follows all its reads (an adding warp that reads
sums of squares: its own part after its own reads), and the next phase waits for all parts. Blocks that own no part of a
phase do not read its input. A step's embeddings are published once all blocks' candidates of the step before are read.
So no vector is overwritten under a reader.

Several GPUs (ranks) make vectors together as the blocks of one do: who makes a word stores it into the exchange of
every rank, at the same place, and everybody polls the exchange of its own rank alone. "Block" above is then a block of
any rank. Who waits for a word that another rank stores has it by that rank's store at system scope.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from cheetah import lang as ch
from cheetah.blocks.linear.formats.vectors import is_raised, raised_word
from cheetah.blocks.machine import Machine
from cheetah.blocks.vector_copies import CopySource, VectorCopies
from cheetah.lang import prim, ty
from cheetah.lang.primitive import GPU_SCOPE, SYSTEM_SCOPE
from cheetah.lang.primitives.exchange import UNITS
from cheetah.plan.formats import BF16_VECTOR
from cheetah.plan.halves import PAGE_BYTES, PART_BYTES, parts_in_half
from cheetah.plan.sections import Sections

COUNTER_BYTES = 256
"""The grid barrier's counter has cache lines of its own."""
VECTOR_ALIGNMENT = 256
PARTS_IN_HALF = 8
"""Inputs of more parts lie together: in one half of L2 their parts would be far apart."""


@dataclass(frozen=True)
class Vector:
    """A named part of the workspace: `words` 32-bit payload words, each in a `word` of memory, the first at number
    `offset`. Each PART_BYTES of it begin `apart` times as many bytes after those before them."""

    name: str
    words: int
    offset: int
    word: ty.Scalar
    apart: int = 1

    @property
    def part_words(self) -> int:
        """Words that lie together."""
        return ch.named("PART_WORDS", PART_BYTES // self.word.bytes)

    def with_name(self) -> Vector:
        """Its offset under a name in the text."""
        return replace(self, offset=ch.named(f"EXCHANGE_{self.name.upper()}", self.offset))

    def number(self, index: Any) -> Any:
        """The number in the workspace of payload word `index`."""
        if self.apart == 1:
            return index + self.offset
        part, place = index // self.part_words, index % self.part_words
        return part * (self.apart * self.part_words) + place + self.offset

    def distance(self, words: int) -> int | None:
        """How far apart payload words lie whose numbers differ by `words`, if that is the same everywhere."""
        return words * self.apart if self.apart == 1 or words % self.part_words == 0 else None

    @property
    def byte_ranges(self) -> list[tuple[int, int, str]]:
        """(first, end, name) of each of its parts in the workspace."""
        parts = range(0, self.words, self.part_words if self.apart > 1 else self.words)
        sizes = ((self.number(first), min(self.words - first, parts.step)) for first in parts)
        return [(number * self.word.bytes, (number + words) * self.word.bytes, self.name) for number, words in sizes]


EXCHANGED = ty.struct("Exchanged", **dict.fromkeys(("offset", "apart", "exponent"), ty.u32))
"""A vector as readers and writers of several may share their text: see `Vector` and `Exchange.inputs`."""


@dataclass(frozen=True, eq=False)
class RecordedVector:
    """A `Vector` of words that lies where the device says: `where` is a record (EXCHANGED), or, of one that is no input
    of a product and lies together, the number of its first word."""

    vector: Vector
    where: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.vector, name)

    @property
    def is_input(self) -> bool:
        return bool(self.where.type == EXCHANGED)

    @property
    def apart(self) -> int | None:
        return None if self.is_input else 1

    @property
    def offset(self) -> Any:
        return self.where.offset if self.is_input else self.where

    def distance(self, words: int) -> Any:
        same = self.vector.distance(words)
        return same if same is None or not self.is_input else self.where.apart * words


@ch.function
def word_of_input(vector: ch.Expr, index: ch.Expr) -> Any:
    """The number in the workspace of payload word `index` of a vector (EXCHANGED) whose parts lie apart."""
    words = ch.named("PART_WORDS", PART_BYTES // 4)
    return index // words * (vector.apart * words) + index % words + vector.offset


def apart(vectors: dict[str, Vector]) -> dict[str, Vector]:
    """The vectors; AssertionError where words of two of them coincide."""
    ranges = sorted(one for vector in vectors.values() for one in vector.byte_ranges)
    for (_, end, name), (first, _, other) in pairwise(ranges):
        assert end <= first, f"{name} and {other} have words in common, from byte {first} on"
    return vectors


@dataclass(frozen=True, eq=False)
class Peers:
    """The other ranks: where their exchanges begin, that of the next rank first, so that not all ranks store to the
    first one first. own: vectors that a rank makes for itself."""

    exchanges: tuple[ch.Expr, ...] = ()
    own: Collection[str] = field(default_factory=tuple)

    def share(self, name: str) -> bool:
        """Whether all ranks make a vector together."""
        return bool(self.exchanges) and name not in self.own


ALONE = Peers()
"""One GPU by itself."""


class Whereabouts(NamedTuple):
    """Where a vector lies (see `RecordedVector`), and at which epoch it is published."""

    vector: Any
    epoch: Any


@dataclass(frozen=True, eq=False)
class Published:
    """A vector of an exchange at one epoch: what its writers publish and its readers wait for and read. one_waits:
    whether a lane waits for its warp before all lanes poll."""

    exchange: Exchange
    name: str
    epoch: ch.Expr
    one_waits: bool = True

    @property
    def when_and_where(self) -> Whereabouts:
        """What tells the vector from others, as arguments of functions that are one text for several."""
        return Whereabouts(self.exchange.where(self.name), self.epoch)

    @contextmanager
    def known_by(self, arguments: Whereabouts) -> Iterator[Published]:
        """Inside, the vector that such arguments tell of."""
        with self.exchange.lying(self.name, arguments.vector):
            yield replace(self, epoch=arguments.epoch)

    def publish(self, index: ch.Value, data: ch.Value) -> None:
        """Store payload word `index`."""
        self.exchange.publish(self.name, index, data, self.epoch)

    def publish_later(self, index: ch.Value) -> Callable[[ch.Value], None]:
        """Works out now where payload word `index` lies; what it gives stores data there."""
        return self.exchange.publish_later(self.name, index, self.epoch)

    def read(self, data: ch.Expr, unit: ch.Expr, count: int) -> None:
        """Units `unit`, `unit + consumer_threads`, ... (`count` of them) into the array `data`."""
        self.exchange.read_units(self.name, data, unit, self.exchange.machine.consumer_threads, count, self.epoch)

    @property
    def copied(self) -> CopySource | None:
        """What brings it into shared memory, where the copy engine does."""
        exchange = self.exchange
        if exchange.copies is None or self.name not in exchange.copied:
            return None
        kind = exchange.copied[self.name]
        return CopySource(exchange.copies, lambda unit: exchange.place(self.name, unit * 4), kind)

    def read_places(self, data: ch.Expr, places: ch.Expr, count: int) -> None:
        """The units that begin at payload words `places[0]`, `places[1]`, ... (`count` of them) into `data`."""
        self.exchange.read_places(self.name, data, places, count, self.epoch)

    @property
    def wait(self) -> Callable[[ch.Expr, ch.Value], None] | None:
        """Waits for one unit on behalf of a warp, before all of it is polled."""
        return self._wait if self.one_waits else None

    def _wait(self, unit: ch.Expr, when: ch.Value) -> None:
        self.exchange.wait_for_one(self.name, unit, self.epoch, when)


class Exchange(ABC):
    """What both kinds share: where vectors lie in the workspace. scope: the memory scope in which blocks of a GPU meet;
    those of several GPUs, of which peers are the others, do in that of the system. inputs: those of products, vectors
    of bf16 pairs, each with the exponent of a power of two: elements are below twice that; what is not, or is no
    number, may become as much. copied: vectors that the copy engine brings, where it can, and as what they are
    published then: BF16_VECTOR, RAISED or STAGGERED."""

    word: ty.Scalar
    input_word = ty.u32
    """What a payload word of a product's input is in memory."""
    copies: VectorCopies | None = None

    def __init__(
        self,
        machine: Machine,
        workspace: ch.Expr,
        sizes: dict[str, int],
        scope: str = GPU_SCOPE,
        inputs: Mapping[str, int] | None = None,
        copied: Mapping[str, str] | None = None,
        peers: Peers = ALONE,
    ) -> None:
        self.machine, self.scope, self.peers = machine, scope, peers
        self.inputs, self.copied = inputs or {}, copied or {}
        self.workspace = workspace
        self.vectors = {name: vector.with_name() for name, vector in self.lay_out(sizes, self.inputs).items()}
        self._declare()

    @classmethod
    def lay_out(
        cls, sizes: dict[str, int], inputs: Collection[str], offset_bytes: int = COUNTER_BYTES
    ) -> dict[str, Vector]:
        """Where vectors lie that follow one another from `offset_bytes` on."""
        words = {name: cls.input_word if name in inputs else cls.word for name in sizes}
        nbytes = {name: count * words[name].bytes for name, count in sizes.items()}
        offsets = Sections(nbytes, VECTOR_ALIGNMENT, offset_bytes).offsets
        return {name: Vector(name, sizes[name], offsets[name] // words[name].bytes, words[name]) for name in sizes}

    @classmethod
    def size_bytes(cls, sizes: dict[str, int], inputs: Collection[str] = ()) -> int:
        """Bytes of a workspace that holds vectors of these payload words."""
        vectors = cls.lay_out(sizes, inputs).values()
        used_bytes: int = max((vector.number(vector.words - 1) + 1) * vector.word.bytes for vector in vectors)
        return -(-used_bytes // VECTOR_ALIGNMENT) * VECTOR_ALIGNMENT

    @ch.inline
    def _declare(self) -> None:
        exchange_words = ch.reinterpret(ty.ptr_mut(self.word), self.workspace)
        self.words = {self.word: exchange_words}
        if self.inputs and self.input_word != self.word:
            input_words = ch.reinterpret(ty.ptr_mut(self.input_word), self.workspace)
            self.words[self.input_word] = input_words
        self.peer_words = {
            word: [ch.reinterpret(ty.ptr_mut(word), peer) for peer in self.peers.exchanges] for word in self.words
        }

    def scope_of(self, name: str) -> str:
        """The memory scope of those who make and need a vector."""
        return SYSTEM_SCOPE if self.peers.share(name) else self.scope

    def _peer_places(self, name: str, number: ch.Expr) -> list[ch.Expr]:
        """The addresses of word `number` of a vector in the exchanges of the other ranks that need it."""
        return [words + number for words in self.peer_words[self.vectors[name].word]] if self.peers.share(name) else []

    def _places(self, name: str, index: ch.Value) -> list[ch.Expr]:
        """The addresses of payload word `index` of a vector, in the exchange of every rank that needs it; here
        first."""
        if not self.peers.share(name):
            return [self.place(name, index)]
        number = ch.const(ty.u32, self._word(name, index), name="word")
        return [self._words_of(name) + number, *self._peer_places(name, number)]

    def where(self, name: str) -> Any:
        """Where a vector lies, as an argument of functions: see `RecordedVector`."""
        vector: Any = self.vectors[name]
        if isinstance(vector, RecordedVector):
            return vector.where
        if name not in self.inputs:
            return ch.argument(vector.offset)
        numbers = {"offset": vector.offset, "apart": vector.apart, "exponent": self.inputs[name]}
        return ch.record(EXCHANGED, f"EXCHANGED_{name.upper()}", **numbers)

    @contextmanager
    def lying(self, name: str, where: Any) -> Iterator[None]:
        """Inside, a vector lies where the device says; so that what is emitted is the same for several."""
        vector, inputs = self.vectors[name], self.inputs
        known: Any = RecordedVector(vector, where)
        self.vectors = {**self.vectors, name: known}
        self.inputs = {**inputs, name: where.exponent} if name in inputs else inputs
        yield
        self.vectors, self.inputs = {**self.vectors, name: vector}, inputs

    def at(self, name: str, epoch: ch.Expr) -> Published:
        """A vector as it is published at an epoch."""
        return Published(self, name, epoch)

    def place(self, name: str, index: ch.Value) -> ch.Expr:
        """The address of payload word `index` of a vector."""
        return self._words_of(name) + self._word(name, index)

    @ch.inline
    def publish_later(self, name: str, index: ch.Value, epoch: ch.Value) -> Callable[[ch.Value], None]:
        """Works out now where payload word `index` lies; what it gives stores data there."""
        published = prim.renewed_u32(self._word(name, index))  # else it would be worked out where it is used

        def publish(data: ch.Value) -> None:
            places = [self._words_of(name) + published, *self._peer_places(name, published)]
            self._publish_at(places, name, self._as_published(name, index, data), epoch)
            self._let_be_copied(name)

        return publish

    def _as_published(self, name: str, index: ch.Value, data: ch.Value) -> ch.Value:
        """What stands in memory for a payload word."""
        return data

    def _let_be_copied(self, name: str) -> None:  # noqa: B027 - flagged words are not copied
        """Behind stores of who calls no `meet`: the adding warps."""

    def _words_of(self, name: str) -> ch.Expr:
        return self.words[self.vectors[name].word]

    def _word(self, name: str, index: ch.Value) -> ch.Expr:
        vector, word = self.vectors[name], ch.cast(ty.u32, index)
        return word + vector.offset if vector.apart == 1 else self._number_in_parts(name, word)

    def _number_in_parts(self, name: str, index: ch.Value) -> ch.Expr:
        number: ch.Expr = word_of_input(self.where(name), ch.cast(ty.u32, index))
        return number

    def initialise(self) -> None:  # noqa: B027 - flagged words need nothing
        """Set barriers up, as `Ring.initialise`."""

    @abstractmethod
    def start(self) -> None:
        """In the consumer role, once a launch: make ready."""

    def publish(self, name: str, index: ch.Value, data: ch.Value, epoch: ch.Value) -> None:
        """Store one payload word."""
        self._publish_at(self._places(name, index), name, self._as_published(name, index, data), epoch)

    @abstractmethod
    def _publish_at(self, places: Sequence[ch.Expr], name: str, data: ch.Value, epoch: ch.Value) -> None:
        """Store the payload word of a vector that lies at these places."""

    @abstractmethod
    def publish_release(self, name: str, index: ch.Value, data: ch.Value, epoch: ch.Value) -> None:
        """The same, and whoever reads it with `read4_acquire` sees all that happened before."""

    @abstractmethod
    def meet(self, when: ch.Value = True) -> None:
        """Between the writers of a vector and its readers: called by all consumer warps. when: whether there are any,
        the same in all blocks."""

    @abstractmethod
    def read4(self, name: str, unit: ch.Value, epoch: ch.Value) -> ch.Expr:
        """Payload words 4*unit to 4*unit + 3 (u32x4)."""

    @abstractmethod
    def asked4(self) -> ch.Expr | None:
        """A place for a unit that is asked for before it is waited for."""

    @abstractmethod
    def ask4(self, asked: Any, name: str, unit: ch.Value) -> None:
        """Begin to read a unit into such a place, whether it is there or not; what follows hides the trip."""

    @abstractmethod
    def settle4(self, asked: Any, name: str, unit: ch.Value, epoch: ch.Value) -> ch.Expr:
        """The unit that was asked for (u32x4), waited for unless it was there."""

    @abstractmethod
    def read4_acquire(self, name: str, unit: ch.Value, epoch: ch.Value) -> ch.Expr:
        """The same, seeing all that happened before a `publish_release` of them."""

    @abstractmethod
    def wait_for_one(self, name: str, unit: ch.Value, epoch: ch.Value, when: ch.Value = True) -> None:
        """Called by whole warps: return once the unit of the warp's first lane is there (if it is to come: `when`); the
        others may not be."""

    @abstractmethod
    def read_units(self, name: str, data: Any, unit: ch.Value, stride: int, count: int, epoch: ch.Value) -> None:
        """Units `unit`, `unit + stride`, ... (`count` of them, at most UNITS) into the array `data`."""

    @abstractmethod
    def read_places(self, name: str, data: Any, places: Any, count: ch.Value, epoch: ch.Value) -> None:
        """The units that begin at payload words `places[0]`, `places[1]`, ... (`count` of them, at most UNITS) into the
        array `data`."""


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
