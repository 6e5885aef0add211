"""Launches of what drafts blocks: of the rows that are made of taps, of its steps, and of its Markov head.

A step takes tokens that are known, by their rows, and behind them a block. All lie on the device's stream one behind
the other: the host waits for none but the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cheetah.models.rounding import Bits
from cheetah.plan.known import KNOWN, MOST_KNOWN, ROWS_BEGIN, SLOTS_BEGIN
from cheetah.plan.kv.tables import TILE_WORDS, TileRecord, word
from cheetah.runtime.background import Started
from cheetah.runtime.engine.kv_cache import CachedSequence, PageCopy
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.launches import Launch, LaunchResult, LoadedKernel, Part

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Argument, Buffer


class Small:
    """A kernel that is launched beside others, over buffers of its own."""

    def __init__(self, loaded: LoadedKernel) -> None:
        self._loaded, self._kernel = loaded, loaded.kernel
        self.buffers = loaded.buffers

    def launch(self, **arguments: Argument) -> None:
        """Starts it, behind what was started before."""
        if isinstance(self._kernel, Started):
            self._kernel = self._kernel()
        self._loaded.device.launch(self._kernel, {**self.buffers, **arguments})


class KnownRows(Small):
    """Makes what a drafter knows of tokens. known_rows: where that lies, by pages."""

    def __init__(self, loaded: LoadedKernel, known_rows: Buffer, page_bytes: int) -> None:
        super().__init__(loaded)
        self._known_rows, self._page_bytes = known_rows, page_bytes

    def make(self, taps: Buffer, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Of the tokens with these rows of `taps`, to these slots."""
        for first in range(0, len(rows), MOST_KNOWN):
            part = slice(first, first + MOST_KNOWN)
            known = np.zeros(SLOTS_BEGIN + len(rows[part]), np.uint32)
            known[0] = len(rows[part])
            known[ROWS_BEGIN : ROWS_BEGIN + len(rows[part])], known[SLOTS_BEGIN:] = rows[part], slots[part]
            self.buffers["known"].upload(known)
            self.make_listed(taps)

    def make_listed(self, taps: Buffer) -> None:
        """Of the tokens that `known` lists by then."""
        self.launch(taps=taps, known_rows=self._known_rows)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """The same copies as of keys and values."""
        for source, target in copies:
            begins = source * self._page_bytes, target * self._page_bytes
            self._known_rows.copy_of(self._known_rows, *begins, self._page_bytes)


class MarkovChain(Small):
    """Chooses the tokens of blocks, one behind the other, in the place of those that the drafter's head has chosen.
    logits: of the drafter's columns."""

    def __init__(self, loaded: LoadedKernel, logits: Buffer) -> None:
        super().__init__(loaded)
        self.logits = logits

    def choose(self, sequence: int, count: int, room: int, launch: Launch) -> None:
        """Starts the choice of `count` tokens behind the last input of a sequence of the drafter's launch. room: of a
        row of its `tokens`."""
        tables = {name: launch.arguments[name] for name in ("sequences", "tokens")}
        for place in range(count + 1):
            self.launch(**tables, logits=self.logits, place=place, count=count, sequence=sequence, room=room)


class BlockLauncher(Launcher):
    """Launches of the steps of what drafts blocks. A part's inputs are known tokens, by the numbers of their rows from
    KNOWN on, and, if it shall draft, an anchor; as many columns of the step as are left are a block's."""

    def __init__(self, loaded: LoadedKernel, cache: CachedSequence) -> None:
        super().__init__(loaded, cache)
        assert loaded.config.block is not None
        self.block = loaded.config.block
        self._markov: MarkovChain | None = None

    def chain(self, markov: MarkovChain) -> None:
        """Has that choose behind its columns, in the place of its own head."""
        self._markov = markov

    def prepare(self, parts: Sequence[Part], logits: Buffer | None = None) -> Launch:
        """Of parts that draft, or of one that reads."""
        assert logits is None, "nobody wants its logits"
        is_chained = self._markov is not None and drafts(parts[0])
        return super().prepare(parts, self._markov.logits if self._markov is not None and is_chained else None)

    def start(self, launch: Launch) -> None:
        super().start(launch)
        self._choose(launch)

    def again(self, launch: Launch) -> None:
        super().again(launch)
        self._choose(launch)

    def _choose(self, launch: Launch) -> None:
        if self._markov is None or not drafts(launch.placed[0]):
            return
        with self._noting_failures():
            for number, part in enumerate(launch.placed):
                count = part.total - len(part.inputs) + 1
                self._markov.choose(number, count, self.launch_tokens + 1, launch)

    def finish(self, launch: Launch) -> list[LaunchResult]:
        """What it did, in the order of the parts; `token_ids` are the drafts."""
        found, ahead = super().finish(launch), self.block.ahead
        if not drafts(launch.placed[0]):
            return found
        return [replace(result, token_ids=result.token_ids[ahead:], has_failed=False) for result in found]

    def _seen(self, parts: Sequence[Part], tiles: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """A block sees its part's columns, not those that later launches by the same tables may have beside them."""
        totals = np.array([part.total for part in parts], np.int32)
        seen, new = tiles.reshape(-1, TILE_WORDS).copy(), word(TileRecord, "new")
        row = seen[:, word(TileRecord, "table")] // self._plan.pages_per_sequence
        seen[:, new] = np.minimum(seen[:, new], totals[row])
        return seen

    def _check(self, parts: Sequence[Part]) -> None:
        """What the caller must see to."""
        assert 1 <= len(parts) <= self.batch and sum(part.per_step for part in parts) <= self.tokens, len(parts)
        for part in parts:
            assert part.steps == parts[0].steps <= self.max_steps and len(part.inputs) <= part.total + 1, part
            assert not drafts(part) or part.steps == 1, "a block is that of one step"

    def _advance(self, part: Part, token_ids: tuple[int, ...], reached: int) -> None:
        part.cache.length += known_tokens(part)


def known_tokens(part: Part) -> int:
    """How many tokens of a part are known."""
    return sum(1 for token in part.inputs[: part.total] if token >= KNOWN)


def drafts(part: Part) -> bool:
    """Whether a part has a block."""
    return known_tokens(part) < part.total


def padded_rows(bits: Bits, rows: int, parts: int, width: int) -> Bits:
    """A matrix of bf16 bits [rows, parts * columns] with zeros behind its rows and behind each part's columns: uint16
    [rows, parts, width]."""
    found = np.zeros((rows, parts, width), np.uint16)
    columns = bits.shape[1] // parts
    found[: len(bits), :, :columns] = bits.reshape(len(bits), parts, columns)
    return found
