"""What the blocks of a launch published, vector by vector, step by step and layer by layer, and where it is off from
float32 first.

A watched run notes each store to the exchange with what it overwrote (`LaunchStats.overwritten`): so each word's
history is there when the launch has ended. A word of a vector is stored once a layer, so its turn says of which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.exchanged import ExchangedVector
from cheetah.models.rounding import F32
from cheetah.plan.kv.tables import SequenceRecord

LEAST_OFF = 0.06
"""Relative error (L2) from which on a vector is off, unless more is allowed."""
GROSSLY_OFF, OFF = 0.5, 0.1
"""A vector is off, too, where one of its numbers differs from float32's by so much of its own size and of the vector's.
In one that is off the first number is named that differs by so much."""


class History:
    """What the words of a buffer held in a launch. overwritten: see `LaunchStats`; last: u32, what they hold now."""

    def __init__(self, overwritten: NDArray[np.void], last: NDArray[np.uint32]) -> None:
        order = np.argsort(overwritten["word"], kind="stable")
        self._words, self._before, self._last = overwritten["word"][order], overwritten["before"][order], last

    def after(self, places: NDArray[np.int64], turn: int) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """(what the store number `turn` to each of these words left, whether there was such a store)."""
        ends, number = np.searchsorted(self._words, places, "right"), np.searchsorted(self._words, places) + turn
        left = self._before[np.minimum(number + 1, len(self._before) - 1)] if len(self._before) else self._last[places]
        return np.where(number + 1 < ends, left, self._last[places]), number < ends


@dataclass(frozen=True)
class LaunchedSequence:
    """What a launch did of a sequence. pages: all of its cache; last_page: that of the last token before, if there is
    one; ids: the tokens that went through the model, from position `record.length` on; cached: the bits of what it has
    of them, [layers, 2, kv_heads, len(ids), head_dim]."""

    record: SequenceRecord
    pages: tuple[int, ...]
    last_page: int | None
    ids: tuple[int, ...]
    cached: NDArray[Any]

    def place_of(self, number: int) -> tuple[int, int]:
        """(step, column) of one of its tokens."""
        return number // self.record.per_step, self.record.first_column + number % self.record.per_step


@dataclass(frozen=True)
class Launched:
    """A launch that is over. ranks: each one's exchange, or workspace. sequences: of steps. is_whole: it does all of
    the last layer, not up to its keys and values alone."""

    ranks: tuple[History, ...]
    sequences: tuple[LaunchedSequence, ...] = ()
    is_whole: bool = True


@dataclass(frozen=True)
class Filled:
    """A sequence's cache was filled with the first keys and values of the filling."""

    pages: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class Token:
    """One that went through the model. exchanged: the reference's, see `Reference`. found, wanted: what is cached
    of it and what should be, f32 [layers, 2, kv_heads, head_dim]. is_decided: whether its vectors must be those."""

    step: int
    column: int
    position: int
    exchanged: list[dict[str, F32]]
    found: F32
    wanted: F32
    is_decided: bool = True


class Texts:
    """What each sequence's cache was made of, by its pages: how much of it is the filling's, and the ids behind."""

    def __init__(self) -> None:
        self._known: dict[int | None, tuple[int, tuple[int, ...]]] = {}

    def note(self, what: Filled | LaunchedSequence) -> None:
        """A sequence has what its launch or its filling gave it."""
        if isinstance(what, Filled):
            known: tuple[int, tuple[int, ...]] = what.length, ()
        else:
            filled, before = self.before(what)
            known = filled, (*before, *what.ids)
        self._known |= dict.fromkeys(what.pages, known)

    def before(self, sequence: LaunchedSequence) -> tuple[int, tuple[int, ...]]:
        """(tokens of the filling, ids behind them) that a sequence had when it was launched."""
        length = sequence.record.length
        filled, ids = self._known.get(sequence.last_page, (0, ()))
        filled = min(filled, length)
        return filled, ids[: length - filled]


class Comparison:
    """Of what launches published with the reference. allowed: the relative error (L2) of logits."""

    def __init__(self, config: ModelConfig, vectors: Sequence[ExchangedVector], allowed: float) -> None:
        self.config, self.vectors, self.allowed = config, vectors, max(2 * allowed, LEAST_OFF)

    def first_off(self, launch: Launched, tokens: Sequence[Token]) -> str:
        """The first vector of a launch that is off, in words, by step, layer, phase and token; "" where none is.

        Of layers, what a token's last vector does not show is not looked at: among many keys rounding may decide what
        attention takes."""
        in_order = sorted(tokens, key=lambda token: (token.step, token.column))
        for _, together in groupby(in_order, lambda token: token.step):
            for problem in self._of_step(launch, [token for token in together if token.is_decided]):
                return problem
        return ""

    def _of_step(self, launch: Launched, tokens: Sequence[Token]) -> Iterator[str]:
        for vector, token in product(self._of_hidden, tokens):
            yield from self._vector(launch, token, vector, -1)
        off = [token for token in tokens if self._ends_off(launch, token)]
        attention = self.config.table.attention.name
        for layer in range(self.config.layers):
            for vector in self.vectors:
                for token in tokens if vector.phase == attention else ():
                    yield from self._cached(token, layer)
                for token in off if layer in self._layers(launch) else ():
                    yield from self._vector(launch, token, vector, layer)

    def _layers(self, launch: Launched) -> range:
        """Those of which a launch publishes all vectors."""
        return range(self.config.layers - (not launch.is_whole))

    def _ends_off(self, launch: Launched, token: Token) -> bool:
        """Whether the hidden vector that a token has at the end is off."""
        last = len(self._layers(launch)) - 1
        return any(True for vector in self._of_hidden for _ in self._vector(launch, token, vector, last))

    @property
    def _of_hidden(self) -> list[ExchangedVector]:
        """With which layers begin, and which they leave."""
        return [vector for vector in self.vectors if vector.begins]

    def _vector(self, launch: Launched, token: Token, vector: ExchangedVector, layer: int) -> Iterator[str]:
        """What is wrong with a token's vector, of a layer or (-1) of the embedding."""
        wanted, ranks = token.exchanged[layer + 1][vector.name], launch.ranks
        turn = vector.turn(token.step, self.config.layers, layer)
        phase = vector.phase if layer >= 0 else "embedding"
        where = f"layer {layer}, phase {phase}" if layer >= 0 else f"phase {phase}"
        for rank, history in enumerate(ranks):
            words, is_there = history.after(vector.places[token.column], turn)
            found = vector.numbers(words)[: len(wanted)]
            own = self._heads_of(wanted, rank, len(ranks)) if vector.is_own else wanted
            if not is_there.all():
                yield f"{where}: of {vector.name} of position {token.position} not all words were published"
            if (problem := self._off(found, own)) is not None:
                first, numbers = problem
                of_rank = f" in rank {rank}'s exchange" if len(ranks) > 1 else ""
                what = f"{vector.name} of position {token.position}{of_rank}"
                yield f"{where}: {what}, {self._element(vector.name, first, len(ranks))}: {numbers}"

    def _heads_of(self, wanted: F32, rank: int, ranks: int) -> F32:
        """A rank's part of all queries, keys and values. Of fewer KV heads than ranks each is on several of these."""
        config = self.config
        ends = np.cumsum([config.query_rows, config.kv_rows])
        queries, keys, values = (part.reshape(-1, config.head_dim) for part in np.split(wanted, ends))
        kv_heads = max(1, config.kv_heads // ranks)
        first = rank * config.kv_heads // ranks
        own = np.array_split(queries, ranks)[rank], keys[first:][:kv_heads], values[first:][:kv_heads]
        return np.concatenate(own).ravel()

    def _cached(self, token: Token, layer: int) -> Iterator[str]:
        """What is wrong with a token's cached keys or values in a layer."""
        by = self.config.table.heads.name if self.config.head_norms is None else self.config.table.attention.name
        for kind, name in enumerate(("keys", "values")):
            problem = self._off(token.found[layer, kind].ravel(), token.wanted[layer, kind].ravel())
            if problem is not None:
                head, dim = divmod(problem[0], self.config.head_dim)
                what = f"what is cached as {name} of position {token.position}, head {head}, dim {dim}"
                yield f"layer {layer}, phase {by}: {what}: {problem[1]}"

    def _off(self, found: F32, wanted: F32) -> tuple[int, str] | None:
        """(the first number that is off, both numbers and how many are), or None."""
        with np.errstate(invalid="ignore", over="ignore"):
            wrong = np.abs(found - wanted)
            sizes = np.abs(wanted) + np.sqrt(np.mean(wanted * wanted, dtype=np.float32))
            is_right = np.linalg.norm(wrong) <= self.allowed * np.linalg.norm(wanted)
            if is_right and (wrong <= GROSSLY_OFF * sizes).all():
                return None
            off = ~(wrong <= OFF * sizes)
        if not off.any():
            off[np.argmax(wrong)] = True
        first = int(np.argmax(off))
        count = f"; {off.sum()} of {len(off)} are off" if len(off) > 1 else ""
        return first, f"{found[first]:.6g}, float32 has {wanted[first]:.6g}{count}"

    def _element(self, name: str, number: int, ranks: int) -> str:
        """A place in a vector, in words; of those that ranks have for themselves, in the rank's."""
        config, attention = self.config, self.config.table.attention
        head, dim = divmod(number, config.head_dim)
        if name == attention.output.name:
            return f"head {head}, dim {dim}"
        if name != attention.input.name:
            return f"element {number}"
        for kind, count in (("query", config.query_heads), ("key", config.kv_heads)):
            heads = max(1, count // ranks)
            if head < heads:
                return f"{kind} head {head}, dim {dim}"
            head -= heads
        return f"value head {head}, dim {dim}"
