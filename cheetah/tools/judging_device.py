"""An emulated device on which launches are judged: it lays traps where a kernel may not look, and holds what a launch
tells the host to what it has done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.emulator import EmulatorError
from cheetah.manifest import NO_PAGE
from cheetah.models.dense import program, prompt
from cheetah.plan import step_matrices
from cheetah.plan.kv.tables import (
    CANCELLED_TOKEN,
    COLUMN_WORDS,
    NOT_YET,
    PENALISED,
    SEQUENCE_WORDS,
    TILE_WORDS,
    ColumnRecord,
    SequenceRecord,
    TileRecord,
    word,
)
from cheetah.runtime.device.emulator import EmulatorBuffer, EmulatorDevice, EmulatorKernel
from cheetah.runtime.device.group import EmulatorGroup
from cheetah.tools.explained import explained
from cheetah.tools.published import Filled, History, Launched, LaunchedSequence
from cheetah.tools.rig import Rig

LAUNCH_TIMEOUT_S = 120.0
EXCHANGE, WORKSPACE = "exchange", "workspace"
"""The buffers through which blocks exchange vectors, in steps and in passes."""
MANY_CHUNKS = 2
"""Copies of a launch, for each block and chunk in flight, from which on they must come as far ahead as they may."""


class KernelFault(EmulatorError):
    """A launch that ended, but not as the runtime is promised: a number of steps or a token that cannot be."""


@dataclass
class Pace:
    """How many chunks a kernel's blocks had under way in the launches so far. in_flight: how many its plan wants."""

    in_flight: int
    most_chunks: int = 0
    has_enough: bool = False

    def note(self, stats: Any, blocks: int) -> None:
        """The counts of one launch."""
        self.most_chunks = max(self.most_chunks, stats.most_chunks)
        self.has_enough = self.has_enough or stats.copies > MANY_CHUNKS * blocks * self.in_flight

    def problem(self) -> str:
        """That the copies never came as far ahead as the plan lets them, where there was enough to copy."""
        if not self.has_enough or self.most_chunks >= self.in_flight:
            return ""
        return (
            f"a block never had more than {self.most_chunks} chunks under way, its plan lets it have {self.in_flight}: "
            "the producer lane waits for a chunk that it need not wait for yet"
        )


class NotingDevice(EmulatorDevice):
    """An emulated device with a limit of time. published: gets each launch of steps or of a pass, with what its blocks
    published. Of several ranks the first one's device notes all."""

    def __init__(self, rig: Rig, scheduler: str, seed: int, published: list[Launched | Filled] | None = None) -> None:
        super().__init__(scheduler=scheduler, seed=seed)
        self._schedule["timeout_s"] = LAUNCH_TIMEOUT_S
        self._published, self._plan, self._vocab = published, rig.plan, rig.config.vocab_size
        self._kv = rig.manifest.buffer("kv")
        self._steps, self._pass = program.KERNEL_NAME, prompt.KERNEL_NAME
        if published is not None:
            self._schedule["noted"] = EXCHANGE if self._steps in rig.made else WORKSPACE

    def launch_together(self, kernel: EmulatorKernel, arguments: Sequence[Mapping[str, Any]]) -> None:
        """A launch, with the arguments of each rank."""
        super().launch_together(kernel, arguments)
        self._note(kernel, arguments)

    def _note(self, kernel: EmulatorKernel, arguments: Sequence[Mapping[str, Any]]) -> None:
        if self._published is None:
            return
        if kernel.manifest.kernel == self._steps:
            self._published.append(self._launched(arguments))
        elif kernel.manifest.kernel == self._pass:
            is_whole = arguments[0]["wanted_count"] > 0
            self._published.append(Launched(self._histories(arguments, WORKSPACE), is_whole=is_whole))

    def _launched(self, of_ranks: Sequence[Mapping[str, Any]]) -> Launched:
        arguments = of_ranks[0]
        tokens = _words(arguments["tokens"]).reshape(-1, self._plan.launch_tokens + 1)
        tables = _words(arguments["page_table"]).reshape(self._plan.batch, -1)
        pool = np.concatenate([self._pool_of(own) for own in of_ranks], axis=3)
        stop_ids, sequences = _words(arguments["stop_ids"]), list[LaunchedSequence]()
        for row, record in enumerate(_sequences(arguments)):
            reached = min(int(_words(arguments["status"])[0]) * record.per_step, record.total)
            sampled = tokens[row, record.given : reached + 1]
            tokens_made = sampled[: len([*takewhile(lambda token: token < self._vocab, sampled)])]
            known = [*_until_stop(tokens_made, stop_ids[record.stop_first :][: record.stop_count])]
            count = min(reached, record.given + len(known))
            positions = np.arange(record.length, record.length + count)
            pages, places = tables[row][positions // self._plan.page_size], positions % self._plan.page_size
            cached = pool[:, pages, :, :, places].transpose(1, 2, 3, 0, 4)
            last_page = int(tables[row, (record.length - 1) // self._plan.page_size]) if record.length else None
            own = tuple(int(page) for page in tables[row] if page < len(pool[0]))
            ids = tuple(map(int, tokens[row, :count]))
            sequences.append(LaunchedSequence(record, own, last_page, ids, cached))
        return Launched(self._histories(of_ranks, EXCHANGE), tuple(sequences))

    def _histories(self, of_ranks: Sequence[Mapping[str, Any]], name: str) -> tuple[History, ...]:
        overwritten = self.stats.overwritten
        return tuple(History(overwritten[rank], _words(own[name]).copy()) for rank, own in enumerate(of_ranks))

    def _pool_of(self, arguments: Mapping[str, Any]) -> NDArray[Any]:
        """A rank's cache [layers, pages, 2, kv_heads, page_size, head_dim], as it is stored."""
        array: NDArray[Any] = arguments["kv"].array
        return array.view(np.uint8 if self._kv.dtype == "u8" else np.uint16).reshape(self._kv.shape)


class JudgingDevice(NotingDevice):
    """One which notes the pace of launches, on which attention's tiles look their
    pages up in tables of their own, in which nothing stands behind the keys that are cached when a launch ends: the
    emulator tells who looks there. What a launch of steps tells the host, and counts, must be what it has sampled. Of
    several ranks the first one's device judges all: see `judging`."""

    def __init__(
        self,
        rig: Rig,
        scheduler: str,
        seed: int,
        pace: Pace | None = None,
        published: list[Launched | Filled] | None = None,
    ) -> None:
        super().__init__(rig, scheduler, seed, published)
        self._pace, self._made = pace, rig.made
        self._head_rows = step_matrices(rig.config.shape, rig.plan, rig.gpu).head.rows

    def launch_together(self, kernel: EmulatorKernel, arguments: Sequence[Mapping[str, Any]]) -> None:
        """A launch, with the arguments of each rank."""
        is_of_steps, first = kernel.manifest.kernel == self._steps, arguments[0]
        trapped = [{**own, **self._traps(own)} if is_of_steps else own for own in arguments]
        counted = self._counted(arguments) if is_of_steps else None
        try:
            EmulatorDevice.launch_together(self, kernel, trapped)
        except EmulatorError as error:
            reached = first["progress"].array.view(np.uint32) if "progress" in first else None
            raise type(error)(explained(str(error), self._made[kernel.manifest.kernel], reached)) from error
        if self._pace is not None and self.stats is not None:
            self._pace.note(self.stats, kernel.manifest.launch.blocks * len(arguments))
        self._note(kernel, arguments)
        if counted is not None:
            self._require_told(arguments, counted)

    def _require_told(self, of_ranks: Sequence[Mapping[str, Any]], counted: NDArray[np.uint32]) -> None:
        """KernelFault where the host was told other tokens than the launch has sampled, or other tokens were counted.
        counted: before it; becomes what should be now."""
        row, arguments = self._plan.launch_tokens + 1, of_ranks[0]
        told, tokens = (_words(arguments[name]).reshape(-1, row) for name in ("emitted", "tokens"))
        for number, sequence in enumerate(_sequences(arguments)):
            ended = min(int(_words(arguments["status"])[0]) * sequence.per_step, sequence.total)
            sampled = tokens[number, sequence.given : ended + 1]
            expected = np.full(row, NOT_YET, np.uint32)
            expected[sequence.given : ended + 1] = sampled
            if not np.array_equal(told[number], expected):
                raise KernelFault(f"the host was not told of the tokens of sequence {number} as they were sampled")
            stop_ids = _words(arguments["stop_ids"])[sequence.stop_first :][: sequence.stop_count]
            for token in _until_stop(sampled, stop_ids):
                if token >= self._vocab:
                    raise KernelFault(f"sequence {number} sampled token {token}: there are {self._vocab}")
                if sequence.options & PENALISED:
                    counted[sequence.slot, token] += 1
        if not np.array_equal(self._counted(of_ranks), counted):
            raise KernelFault("what is counted of the tokens that sequences have is not what they have sampled")

    def _counted(self, of_ranks: Sequence[Mapping[str, Any]]) -> NDArray[np.uint32]:
        """A copy of how often each slot's sequence has each token, u32 [batch, vocab], by the ranks that make the
        tokens' logits."""
        every = [_words(own["token_counts"]).reshape(self._plan.batch, -1) for own in of_ranks]
        starts = [rank * self._head_rows for rank in range(1, len(every))]
        parts = [np.split(one, starts, axis=1)[rank] for rank, one in enumerate(every)]
        return np.concatenate(parts, axis=1)

    def _traps(self, arguments: Mapping[str, Any]) -> dict[str, EmulatorBuffer]:
        """The tables with what tells in them."""
        words = self._plan.batch * self._plan.pages_per_sequence
        tiles = arguments["tiles"].download(np.int32, (arguments["tiles"].nbytes // (4 * TILE_WORDS), TILE_WORDS))
        table = arguments["page_table"].download(np.int32, words)
        traps = {
            "page_table": np.concatenate([table, self._own_tables(table, tiles, arguments["steps"])]),
            "tiles": tiles + np.eye(TILE_WORDS, dtype=np.int32)[word(TileRecord, "table")] * words,
        }
        return {name: self._uploaded(array) for name, array in traps.items()}

    def _own_tables(self, table: NDArray[np.int32], tiles: NDArray[np.int32], steps: int) -> NDArray[np.int32]:
        """The tables up to the pages with keys that some tile finds cached; what earlier launches left in `tiles` at
        most keeps a trap from being laid."""
        own = np.full_like(table, NO_PAGE)
        first, length, stride = (tiles[:, word(TileRecord, name)] for name in ("table", "length", "stride"))
        for begin, keys in zip(first, length.astype(np.int64) + (steps - 1) * stride.astype(np.int64), strict=True):
            if 0 <= begin < len(table) and keys >= 0:
                end = begin + -(-int(keys) // self._plan.page_size)
                own[begin:end] = table[begin:end]
        return own

    def _uploaded(self, array: NDArray[np.int32]) -> EmulatorBuffer:
        buffer = self.allocate(array.nbytes)
        buffer.upload(array)
        return buffer


def judging(
    rig: Rig, scheduler: str, seed: int, pace: Pace | None = None, published: list[Launched | Filled] | None = None
) -> EmulatorDevice | EmulatorGroup:
    """Such a device, or one of as many ranks as the rig's machine has."""
    return _of_ranks([JudgingDevice(rig, scheduler, seed, pace, published) for _ in range(rig.gpu.ranks)])


def noting(
    rig: Rig, scheduler: str, seed: int, published: list[Launched | Filled] | None = None
) -> EmulatorDevice | EmulatorGroup:
    """A device that lays no traps, or one of as many ranks."""
    return _of_ranks([NotingDevice(rig, scheduler, seed, published) for _ in range(rig.gpu.ranks)])


def _of_ranks(devices: Sequence[EmulatorDevice]) -> EmulatorDevice | EmulatorGroup:
    return devices[0] if len(devices) == 1 else EmulatorGroup(devices)


def _sequences(arguments: Mapping[str, Any]) -> Iterator[SequenceRecord]:
    """The records of a launch's sequences."""
    columns = _words(arguments["columns"])[: COLUMN_WORDS * arguments["column_count"]].reshape(-1, COLUMN_WORDS)
    count = int(columns[:, word(ColumnRecord, "sequence")].max()) + 1
    for record in _words(arguments["sequences"])[: SEQUENCE_WORDS * count].reshape(-1, SEQUENCE_WORDS):
        yield SequenceRecord(*(int(number) for number in record[: len(fields(SequenceRecord))]))


def _until_stop(sampled: NDArray[np.uint32], stop_ids: NDArray[np.uint32]) -> Iterator[int]:
    """The tokens that a sequence has sampled, up to the one that stops it."""
    for token in sampled:
        if token < CANCELLED_TOKEN:
            yield int(token)
        if token == CANCELLED_TOKEN or token in stop_ids:
            return


def _words(buffer: EmulatorBuffer) -> NDArray[np.uint32]:
    words: NDArray[np.uint32] = buffer.array.view(np.uint32)
    return words
