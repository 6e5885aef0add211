"""Launches of a generated Llama kernel: its arguments by name, epochs, KV plans, tables, tokens in and out.

The kernel's parameters and their meaning are the manifest's. Knows nothing of prompts, completions or text: `decode`
decides what is launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from math import lcm
from operator import or_
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.plan import Plan
from cheetah.plan.kv import KvPlanLayout, kv_plans_for_launch, launch_tiles, max_plans
from cheetah.plan.kv.tables import (
    CANCELLED_TOKEN,
    NO_TOKEN,
    NOT_YET,
    ColumnRecord,
    SequenceRecord,
    TileRecord,
    encode,
    epochs_of_step,
)
from cheetah.runtime.engine.flights import NOT_A_NUMBER, Flight, KernelLaunches, LaunchResult, Part
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launch_tables import (
    Geometry,
    Sampling,
    column_records,
    sequence_record,
    share_prefixes,
    stop_lists,
)
from cheetah.runtime.engine.request_rows import RequestRows, options_of

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Argument, Buffer, Device, Kernel, MappedBuffer

__all__ = [
    "EPOCH_LIMIT",
    "NOT_A_NUMBER",
    "Epochs",
    "Flight",
    "LaunchFault",
    "LaunchResult",
    "Launcher",
    "Part",
    "Sampling",
]

EPOCH_LIMIT = 2**32 - 1


class LaunchFault(CheetahError):
    """A launch that ended, and left what no right kernel leaves: a count of steps or a token that cannot be."""


class Epochs:
    """The numbers that flagged words carry: a launch takes as many as it may need, and none is used twice.

    They start at 1; before they would pass 2**32-1 the exchange must be zeroed and they start again.
    """

    def __init__(self, per_step: int, first: int = 1):
        self._per_step = per_step
        self._next = first

    def begin_again(self) -> None:
        """From the start at the next `take`: a launch ended in the middle, and with it what blocks count."""
        self._next = EPOCH_LIMIT

    def take(self, steps: int) -> tuple[int, bool]:
        """(first epoch of a launch of `steps` steps, whether the exchange must be zeroed before it)."""
        needed = steps * self._per_step
        restarted = self._next + needed > EPOCH_LIMIT
        first = 1 if restarted else self._next
        self._next = first + needed
        return first, restarted


class Launcher(KernelLaunches):
    """Launches of one kernel over the caches of one to `batch` sequences; over one, `cache`, where none is named.

    `buffers` holds the device buffers by parameter name; the launcher alone writes the tables among them. A launch
    takes up to `max_steps` steps, a step up to `tokens` tokens. Of the tokens that were launched, those up to a stop id
    are counted in a cache's `length`. After a launch that failed or did not end, nothing can be launched any more.
    """

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        manifest: Manifest,
        config: ModelConfig,
        buffers: Mapping[str, Buffer],
        cache: CachedSequence,
        timeout_s: float | None = None,
    ):
        plan = Plan.from_dict(manifest.plan)
        super().__init__(device, kernel, manifest, config, plan, buffers, timeout_s)
        self.cache, self.vocab_size = cache, config.vocab_size
        self.batch, self.tokens, self.max_steps = plan.batch, plan.tokens, plan.max_steps
        self.launch_tokens, self.kv_chunk = plan.launch_tokens, plan.kv_chunk
        self.columns: list[tuple[int, int]] = []
        self._plans = _Plans(manifest, config, plan)
        self._epochs = Epochs(epochs_of_step(config.layers))
        self._stop_room = buffers["stop_ids"].nbytes // 4
        self._emitted = _words(self._buffers["emitted"]).reshape(plan.batch, -1)
        self._cancelled = _words(self._buffers["cancelled"])
        self._rows = RequestRows(self._buffers, config.vocab_size, plan.batch)

    def restart(self) -> None:
        """Begins another sequence in `cache`: forgets what is cached."""
        self.cache.clear()

    def launch(self, inputs: Sequence[int], steps: int, sampling: Sampling, per_step: int = 1) -> LaunchResult:
        """`steps` tokens of `cache` go through the model, `per_step` a step: `inputs`, then the sampled ones.

        One input more than `steps` samples nothing. A sampled stop id ends the launch early. CheetahError where none
        could be sampled.
        """
        result = self.launch_together([Part(self.cache, inputs, steps, sampling, per_step)])[0]
        if result.has_failed:
            raise LaunchFault(NOT_A_NUMBER.format(position=self.cache.length))
        return result

    def score(self, inputs: Sequence[int], logits: Buffer, per_step: int | None = None) -> npt.NDArray[np.float32]:
        """float32 [len(inputs), vocab]: the logits after each input, `per_step` (default: `tokens`) of them a step.

        At most `score_tokens(logits)` inputs of `cache`. Every step has all its columns, so the logits after an input
        do not depend on how many follow it, where `kv_chunk` is fixed.
        """
        per_step = per_step or self.tokens
        part = Part(self.cache, inputs, len(inputs), Sampling(), per_step)
        self.launch_together([part], logits)
        found = logits.download(np.float32, (part.steps, self.tokens, self.vocab_size))
        return found[:, :per_step].reshape(-1, self.vocab_size)[: len(inputs)]

    def score_tokens(self, logits: Buffer) -> int:
        """How many inputs `score` takes with this buffer, where it has room for one step at least."""
        return self.score_steps(logits) * self.tokens

    def score_steps(self, logits: Buffer) -> int:
        """Most steps of a launch with this buffer."""
        return min(self.max_steps, logits.nbytes // (4 * self.tokens * self.vocab_size))

    def logits_after(self, flight: Flight, number: int, tokens: range) -> Iterator[npt.NDArray[np.float32]]:
        _, per_step, first_column = flight.geometry.placed()[flight.order.index(number)]
        logits = cast("MappedBuffer", flight.arguments["logits"]).array.view(np.float32).reshape(-1, self.vocab_size)
        for token in tokens:
            step, column = divmod(token, per_step)
            yield logits[step * self.tokens + first_column + column]

    def prepare(self, parts: Sequence[Part], logits: Buffer | None = None) -> Flight:
        """Everything that a launch needs, before it is started; see `launch_together`."""
        self._check_usable()
        self._check(parts)
        geometry, order = self._arrange(parts)
        placed = [parts[number] for number in order]
        self.columns = [(order[column.sequence], column.number) for column in column_records(geometry)]
        arguments = self._prepare(placed, geometry, logits)
        self._emitted[: len(parts)] = NOT_YET
        return Flight(placed, order, geometry, arguments)

    def start(self, flight: Flight) -> None:
        """Starts it; returns at once on a GPU. No other may be started before it is finished."""
        super().start(flight)
        with self._noting_failures():
            self._prepare_next(flight.placed, flight.geometry)  # while the kernel runs

    def fresh(self, flight: Flight) -> list[tuple[int, ...]]:
        """What each part has sampled since this was asked last, in the order of the parts; up to a stop id."""
        found: list[tuple[int, ...]] = [()] * len(flight.placed)
        for row, number in enumerate(flight.order):
            ids: list[int] = []
            while self._is_fresh(flight, row):
                token = int(self._emitted[row, flight.next_place(row)])
                is_last = token >= CANCELLED_TOKEN or token in flight.placed[row].sampling.stop_ids
                if token < CANCELLED_TOKEN:
                    ids.append(token)
                    flight.given[row] += 1
                flight.has_ended[row] = is_last
            found[number] = tuple(ids)
        return found

    def cancel(self, flight: Flight, number: int) -> None:
        """Ends part `number` within a few steps. By any thread, at any time: nothing once it has ended."""
        # The word of this launch alone: an order that comes late means nothing to the next one.
        self._cancelled[flight.order.index(number)] = flight.epoch

    def finish(self, flight: Flight) -> list[LaunchResult]:
        """Waits for its end; what it did, in the order of the parts, with all ids that it sampled."""
        self._await_end(flight)
        with self._noting_failures():
            steps, sampled = self._read(flight.placed)
        seconds = flight.seconds
        results = {}
        for number, part, token_ids in zip(flight.order, flight.placed, sampled, strict=True):
            part.cache.length += _cached(part, token_ids, steps)
            made = token_ids if token_ids[-1:] < (CANCELLED_TOKEN,) else token_ids[:-1]
            self._rows.note(part.cache, made)
            results[number] = LaunchResult(made, steps, seconds, token_ids[-1:] == (NO_TOKEN,))
        return [results[number] for number in range(len(flight.placed))]

    def _begin_again(self) -> None:
        self._epochs.begin_again()
        self._rows.forget()

    def _has_fresh(self, flight: Flight) -> bool:
        return any(self._is_fresh(flight, row) for row in range(len(flight.placed)))

    def _is_fresh(self, flight: Flight, row: int) -> bool:
        """Whether the next token of a row is there, and wanted."""
        place = flight.next_place(row)
        is_over = flight.has_ended[row] or place > flight.placed[row].total
        return not is_over and self._emitted[row, place] != NOT_YET

    def _check(self, parts: Sequence[Part]) -> None:
        """What the caller must see to."""
        assert 1 <= len(parts) <= self.batch and sum(part.per_step for part in parts) <= self.tokens, len(parts)
        steps = parts[0].steps
        for part in parts:
            inputs = len(part.inputs)
            assert 1 <= inputs <= part.total + 1 and part.steps == steps <= self.max_steps, (inputs, part.total, steps)
            assert part.per_step == 1 or inputs >= part.total, "with several tokens a step all must be inputs"

    def _arrange(self, parts: Sequence[Part]) -> tuple[Geometry, list[int]]:
        """The launch's geometry and the order of its parts, once each has pages of its own for what it will cache."""
        self._make_room(parts)
        plan = self._plan
        order, shared = share_prefixes(
            [part.cache for part in parts],
            unit=lcm(plan.page_size, plan.kv_align),
            # With fixed items no sequence's bits depend on its company, and a window leaves prefixes behind: then
            # nothing is shared.
            minimum=plan.max_context + 1 if plan.kv_chunk or self.window else plan.kv_chunk_min,
        )
        return Geometry(tuple((parts[i].cache.length, parts[i].per_step) for i in order), shared), order

    def _prepare(self, parts: Sequence[Part], geometry: Geometry, logits: Buffer | None) -> dict[str, Argument]:
        """Uploads what changed; gives the arguments by parameter name."""
        steps = parts[0].steps
        columns = column_records(geometry)
        stop_ids, stops = stop_lists([part.sampling.stop_ids for part in parts], self._stop_room)
        slots = self._rows.place([part.cache for part in parts])
        asked = [
            (options_of(part.sampling, part.mask) if part.samples else 0, slot)
            for part, slot in zip(parts, slots, strict=True)
        ]
        for part, slot in zip(parts, slots, strict=True):
            if part.samples:
                self._rows.fill(slot, part.sampling, part.known, part.prompt, part.mask)
        records = [
            sequence_record(place, len(part.inputs), part.total, part.sampling, *of_part)
            for part, place, *of_part in zip(parts, geometry.placed(), stops, asked, strict=True)
        ]
        tiles, plans = self._plans.encode(geometry, steps)
        pages = self._plan.pages_per_sequence
        self._upload("page_table", np.stack([part.cache.table(pages) for part in parts]))
        self._upload("sequences", encode(records, SequenceRecord))
        self._upload("columns", encode(columns, ColumnRecord))
        self._upload("tiles", tiles)
        self._upload("kv_plans", plans)
        self._upload("stop_ids", np.array(stop_ids, np.int32))
        self._upload_inputs(parts)
        self._buffers["progress"].fill(0xFF)  # what a block has not written yet says "not started"
        epoch, restarted = self._epochs.take(steps)
        if restarted:
            self._buffers["exchange"].fill(0)
        scalars = {
            "steps": steps,
            "head_from": min(part.first_sample for part in parts),
            "column_count": len(columns),
            "plan_count": len(plans),
            "options": reduce(or_, (options for options, _ in asked)),
            "epoch": epoch,
        }
        return self._arguments({**scalars, "logits": logits})

    def _upload_inputs(self, parts: Sequence[Part]) -> None:
        """All rows in one copy: to begin one takes longer than the copy."""
        rows = np.zeros((len(parts), self.launch_tokens + 1), np.int32)
        for row, part in zip(rows, parts, strict=True):
            row[: len(part.inputs)] = part.inputs
        used = rows.size - rows.shape[1] + len(parts[-1].inputs)
        self._buffers["tokens"].upload(rows.reshape(-1)[:used])

    def _prepare_next(self, parts: Sequence[Part], geometry: Geometry) -> None:
        """Makes the schedules of the launch that follows if this one makes all its steps and goes on as it is."""
        following = Geometry(
            tuple((part.cache.length + part.total, 1 if part.samples else part.per_step) for part in parts),
            geometry.shared,
        )
        steps = min(
            (part.cache.context - length) // per_step
            for part, (length, per_step) in zip(parts, following.sequences, strict=True)
        )
        if steps > 0:
            most = 1 if any(part.stepwise for part in parts) else self.max_steps
            self._plans.prepare(following, min(steps, most))

    def _read(self, parts: Sequence[Part]) -> tuple[int, list[tuple[int, ...]]]:
        """(steps done, sampled ids of each part). The token after token k is sampled if it is not given."""
        steps = parts[0].steps
        done = int(self._buffers["status"].download(np.int32, (8,))[0])
        if not 1 <= done <= steps:
            raise LaunchFault(f"the kernel reports {done} of {steps} steps done: it did not run as its manifest says")
        row = self.launch_tokens + 1
        tokens = self._buffers["tokens"].download(np.int32, ((len(parts) - 1) * row + parts[-1].total + 1,))
        sampled = []
        for number, part in enumerate(parts):
            reached = min(done * part.per_step, part.total)
            ids = tokens[number * row + len(part.inputs) : number * row + reached + 1]
            sampled.append(_up_to_stop(tuple(int(token) & NO_TOKEN for token in ids), part.sampling.stop_ids))
            if any(self.vocab_size <= token < CANCELLED_TOKEN for token in sampled[-1]):
                vocabulary = f"0..{self.vocab_size - 1}"
                raise LaunchFault(f"the kernel sampled {sampled[-1]}, outside the vocabulary {vocabulary}")
        return done, sampled


def _words(buffer: Buffer) -> npt.NDArray[np.uint32]:
    """The words of a mapped buffer, as launches see them."""
    return cast("MappedBuffer", buffer).array.view(np.uint32)


def _up_to_stop(token_ids: tuple[int, ...], stop_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The ids up to the first stop id, CANCELLED_TOKEN or NO_TOKEN."""
    ends = (place for place, token in enumerate(token_ids) if token in stop_ids or token >= CANCELLED_TOKEN)
    return token_ids[: next(ends, len(token_ids)) + 1]


def _cached(part: Part, token_ids: tuple[int, ...], steps: int) -> int:
    """How many tokens a part has in its cache after `steps` steps, with `token_ids` sampled: all but the last of those.
    What follows a stop id was computed for nobody."""
    return len(part.inputs) + len(token_ids) - 1 if token_ids else min(steps * part.per_step, part.total)


class _Plans:
    """The tiles and KV plans of a launch in device form; those of the next one can be made while the kernel runs."""

    def __init__(self, manifest: Manifest, config: ModelConfig, plan: Plan):
        self._layout = KvPlanLayout.for_step(plan, config.group, config.kv_heads, manifest.launch.blocks)
        self._placing: dict[str, Any] = {
            "group": config.group,
            "tile_columns": plan.tile_columns(config.group),
            "pages_per_sequence": plan.pages_per_sequence,
            "align": plan.kv_align,
            "window": config.window(plan.max_context),
        }
        self._scheduling = {
            "kv_heads": config.kv_heads,
            "blocks": manifest.launch.blocks,
            "align": plan.kv_align,
            "minimum": plan.kv_chunk_min,
            "chunk": plan.kv_chunk,
            "item_cost": plan.kv_item_cost,
        }
        self._geometry: Geometry | None = None
        moving = config.window(plan.max_context) is not None
        most = max_plans(plan.max_steps, plan.kv_align, self._layout.tiles, plan.tokens, windows=moving)
        room = manifest.buffer("kv_plans").shape
        if len(room) != 2 or room[0] < most or room[1] != self._layout.plan_words:
            needed = [most, self._layout.plan_words]
            raise CheetahError(f"manifest: buffer kv_plans is {list(room)}, a launch needs {needed}: generate it again")

    def encode(self, geometry: Geometry, steps: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """int32 [tiles, 8] and [plans, plan_words] for `steps` steps."""
        if self._geometry != geometry or self._steps < steps:
            self.prepare(geometry, steps)
        # The first word of a plan is its first step, ascending.
        return self._tiles, self._words[: np.searchsorted(self._words[:, 0], steps)]

    def prepare(self, geometry: Geometry, steps: int) -> None:
        """Makes the plans of a launch to come, of at most `steps` steps, ready for `encode`."""
        records, tiles = launch_tiles(geometry.placed(), shared=geometry.shared, **self._placing)
        self._words = self._layout.encode_launch(kv_plans_for_launch(tiles, steps, **self._scheduling))
        self._tiles = encode(records, TileRecord)
        self._geometry, self._steps = geometry, steps
