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
from typing import Any, NamedTuple

from cheetah import lang as ch
from cheetah.blocks.exchange_vectors import (
    COUNTER_BYTES,
    EXCHANGED,
    VECTOR_ALIGNMENT,
    RecordedVector,
    Vector,
    word_of_input,
)
from cheetah.blocks.machine import Machine
from cheetah.blocks.vector_copies import CopySource, VectorCopies
from cheetah.lang import prim, ty
from cheetah.lang.primitive import GPU_SCOPE, SYSTEM_SCOPE
from cheetah.plan.sections import Sections


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
    whether a lane waits for its warp before all lanes poll; not in the first `late_warps`, which come when it is
    there."""

    exchange: Exchange
    name: str
    epoch: ch.Expr
    one_waits: bool = True
    late_warps: int = 0

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
        if self.late_warps:
            is_early = self.exchange.machine.warp >= self.late_warps
            when = is_early if when is True else is_early & when
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
