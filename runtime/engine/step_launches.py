"""Launches of kernels of steps: their columns and sequences by name, epochs, tokens in and out.

What is the same of a whole decode step and of its head alone. The kernel's parameters and their meaning are the
manifest's. Knows nothing of prompts, completions or text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.plan import Plan
from cheetah.plan.index import ceil_div
from cheetah.plan.kv.tables import (
    CANCELLED_TOKEN,
    COLUMNS_MASKED,
    EMITTED_COUNT_BITS,
    MASKED,
    NO_TOKEN,
    NOT_YET,
    ROUND_WORDS,
    ColumnRecord,
    SequenceRecord,
    encode,
    epochs_of_step,
)
from cheetah.plan.plan import EMITTED_BITS
from cheetah.runtime.background import Started
from cheetah.runtime.engine.drafting import NOTHING_DRAFTED, Drafted
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launch_tables import Geometry, column_records, sequence_record, stop_lists
from cheetah.runtime.engine.launches import KernelLaunches, Launch, LaunchResult, LoadedKernel, Part
from cheetah.runtime.engine.request_rows import RequestRows, options_of

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Argument, Buffer, MappedBuffer

EPOCH_LIMIT = 2**32 - 1
FEATURE_STEPS = "feature_steps"
"""Of a head that drafts, steps in which some column has features: those of inputs."""
REWRITTEN = ("sequences", "tiles", FEATURE_STEPS)
"""Tables that another kernel brings up to date between launches that are made `again`."""


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


class StepLaunches(KernelLaunches):
    """Launches of a kernel of steps over one to `batch` sequences.

    A launch takes up to `max_steps` steps, a step up to `tokens` columns. columns: of the last launch, (part, number in
    the part) of each.
    """

    def __init__(self, loaded: LoadedKernel):
        plan, config = Plan.from_dict(loaded.manifest.plan), loaded.config
        super().__init__(loaded, plan)
        self.vocab_size = config.vocab_size
        self.batch, self.tokens, self.max_steps = plan.batch, plan.tokens, plan.max_steps
        self.launch_tokens, self.verifies = plan.launch_tokens, plan.drafts > 0
        self.columns: list[tuple[int, int]] = []
        self._epochs = Epochs(epochs_of_step(config.layers))
        self._stop_room = self._buffers["stop_ids"].nbytes // 4
        self._emitted = words_of(self._buffers["emitted"]).reshape(plan.batch, -1)
        self._cancelled = words_of(self._buffers["cancelled"])
        self._rows = RequestRows(self._buffers, config.vocab_size, plan.batch)

    def score_steps(self, logits: Buffer) -> int:
        """Most steps of a launch with this buffer."""
        return min(self.max_steps, logits.nbytes // (4 * self.tokens * self.vocab_size))

    def logits_after(self, launch: Launch, number: int, tokens: range) -> Iterator[npt.NDArray[np.float32]]:
        logits = cast("MappedBuffer", launch.arguments["logits"]).array.view(np.float32).reshape(-1, self.vocab_size)
        for judge in self.rows_of(launch, number, tokens):
            yield logits[judge]

    def rows_of(self, launch: Launch, number: int, tokens: range) -> list[int]:
        row = launch.order.index(number)
        if self.verifies and launch.arguments["steps"] != 1:  # in one step all that counts are its first columns
            return [int(judge) for judge in self._row_of("judges", row, tokens.stop + 1)[tokens.start + 1 :]]
        _, per_step, first_column = launch.geometry.placed()[row]
        return [token // per_step * self.tokens + first_column + token % per_step for token in tokens]

    def _row_of(self, name: str, row: int, words: int) -> npt.NDArray[np.int32]:
        """The first words of a row [batch, token_room]."""
        first = row * (self.launch_tokens + 1)
        return self._buffers[name].download(np.int32, (first + words,))[first:]

    def prepare(self, parts: Sequence[Part], logits: Buffer | None = None) -> Launch:
        """Everything that a launch needs, before it is started; see `launch_together`."""
        self._be_ready()
        self._check(parts)
        geometry, order = self._arrange(parts)
        placed = [parts[number] for number in order]
        self.columns = [(order[column.sequence], column.number) for column in column_records(geometry)]
        arguments = self._prepare(placed, geometry, logits)
        self._emitted[: len(parts)] = NOT_YET
        return Launch(placed, order, geometry, arguments)

    def fresh(self, launch: Launch) -> list[tuple[int, ...]]:
        """What each part has sampled since this was asked last, in the order of the parts; up to a stop id."""
        found: list[tuple[int, ...]] = [()] * len(launch.placed)
        for row, number in enumerate(launch.order):
            ids: list[int] = []
            while self._is_fresh(launch, row):
                token = self._taken(launch, row, int(self._emitted[row, launch.next_place(row)]))
                is_last = token >= CANCELLED_TOKEN or token in launch.placed[row].sampling.stop_ids
                if token < CANCELLED_TOKEN:
                    ids.append(token)
                    launch.given[row] += 1
                launch.has_ended[row] = is_last
            found[number] = tuple(ids)
        return found

    def _taken(self, launch: Launch, row: int, word: int) -> int:
        """The token of a word that the kernel emitted, which also says what came of drafts."""
        if not self.verifies or word >= NOT_YET:
            return word
        launch.drafted[row] += drafted_of_word(word)
        return token_of_word(word)

    def cancel(self, launch: Launch, number: int) -> None:
        """Ends part `number` within a few steps. By any thread, at any time: nothing once it has ended."""
        # The word of this launch alone: an order that comes late means nothing to the next one.
        self._cancelled[launch.order.index(number)] = launch.epoch

    def finish(self, launch: Launch) -> list[LaunchResult]:
        """Waits for its end; what it did, in the order of the parts, with all ids that it sampled."""
        self._await_end(launch)
        with self._noting_failures():
            steps, sampled, drafted = self._read(launch.placed)
        seconds = launch.seconds
        results = {}
        for number, part, (reached, token_ids), of_part in zip(
            launch.order, launch.placed, sampled, drafted, strict=True
        ):
            self._advance(part, token_ids, reached)
            made = token_ids if token_ids[-1:] < (CANCELLED_TOKEN,) else token_ids[:-1]
            if token_ids[-1:] == (CANCELLED_TOKEN,):
                self._rows.forget(part.cache)  # its column may have gone on for a step, for nobody
            else:
                self._rows.note(part.cache, made)
            results[number] = LaunchResult(made, steps, seconds, token_ids[-1:] == (NO_TOKEN,), of_part)
        return [results[number] for number in range(len(launch.placed))]

    def again(self, launch: Launch) -> None:
        """Starts a prepared launch, of one that was made before too, by what its tables say by then."""
        assert not isinstance(self._kernel, Started), "a launch is prepared before it is started"
        for name in REWRITTEN:
            self._uploaded.pop(name, None)  # whoever goes on from it on the device changes them
        epoch, restarted = self._epochs.take(cast(int, launch.arguments["steps"]))
        if restarted or self._plan.sync == "flags":
            self._buffers["exchange"].fill(0)
        if self.verifies:
            self._buffers["rounds"].fill(0)
        with self._noting_failures():
            self._device.launch(self._kernel, {**launch.arguments, "epoch": epoch})

    def note(self, owner: CachedSequence, token_ids: Sequence[int] | None) -> None:
        """Launches that were made `again` have sampled these of a sequence; None: what they have counted is not
        known."""
        if token_ids is None:
            self._rows.forget(owner)
        else:
            self._rows.note(owner, token_ids)

    def _arrange(self, parts: Sequence[Part]) -> tuple[Geometry, list[int]]:
        """The launch's geometry and the order of its parts."""
        raise NotImplementedError

    def _place(self, parts: Sequence[Part], geometry: Geometry, steps: int) -> dict[str, int]:
        """Uploads where the parts' keys lie, if the kernel reads any; gives the scalars that say so."""
        return {}

    def _advance(self, part: Part, token_ids: tuple[int, ...], reached: int) -> None:
        """A launch has ended, `reached` tokens of a part behind it, and has sampled these."""

    def _begin_again(self) -> None:
        self._epochs.begin_again()
        self._rows.forget()

    def _has_fresh(self, launch: Launch) -> bool:
        return any(self._is_fresh(launch, row) for row in range(len(launch.placed)))

    def _is_fresh(self, launch: Launch, row: int) -> bool:
        """Whether the next token of a row is there, and wanted."""
        place = launch.next_place(row)
        is_over = launch.has_ended[row] or place > launch.placed[row].total
        return not is_over and self._emitted[row, place] != NOT_YET

    def _check(self, parts: Sequence[Part]) -> None:
        """What the caller must see to."""
        assert 1 <= len(parts) <= self.batch and sum(part.per_step for part in parts) <= self.tokens, len(parts)
        steps = parts[0].steps
        for part in parts:
            inputs = len(part.inputs)
            assert 1 <= inputs <= part.total + 1 and part.steps == steps <= self.max_steps, (inputs, part.total, steps)
            assert part.total <= steps * part.per_step, (part.total, steps, part.per_step)
            assert (
                part.drafting is None
                or not part.drafting.masks
                or (steps == 1 and len(part.drafting.masks) == len(part.drafting.drafts) == part.per_step - 1)
            ), "masks are those of one step"
            if part.drafting is None:
                assert part.per_step == 1 or inputs >= part.total, "with several tokens a step all must be inputs"
            else:
                assert self.verifies, "this kernel verifies no drafts"

    def _prepare(self, parts: Sequence[Part], geometry: Geometry, logits: Buffer | None) -> dict[str, Argument]:
        """Uploads what changed; gives the arguments by parameter name."""
        steps = parts[0].steps
        stop_ids, stops = stop_lists([part.sampling.stop_ids for part in parts], self._stop_room)
        slots = self._rows.place([part.cache for part in parts])
        asked = [(_options_of(part) if part.samples else 0, slot) for part, slot in zip(parts, slots, strict=True)]
        for part, slot, (_, _, first) in zip(parts, slots, geometry.placed(), strict=True):
            if part.samples:
                self._rows.fill(slot, part.sampling, part.known, part.prompt, part.mask)
            if part.drafting is not None and part.drafting.ngrams[1]:
                self._rows.fill_history(slot, [*part.drafting.ahead, *part.known])
            if part.drafting is not None and part.drafting.masks:
                self._rows.fill_columns(first, part.sampling, [part.mask, *part.drafting.masks])
        columns = column_records(geometry)
        drafts = [_drafts_of(part) for part in parts]
        records = [
            sequence_record(place, len(part.inputs), part.total, part.sampling, stop, ask, draft)
            for part, place, stop, ask, draft in zip(parts, geometry.placed(), stops, asked, drafts, strict=True)
        ]
        scalars = self._place(parts, geometry, steps)
        self._upload("sequences", encode(records, SequenceRecord))
        self._upload("columns", encode(columns, ColumnRecord))
        self._upload("stop_ids", np.array(stop_ids, np.int32))
        if FEATURE_STEPS in self._buffers:
            feature_steps = max(ceil_div(len(part.inputs), part.per_step) for part in parts)
            self._upload(FEATURE_STEPS, np.array([feature_steps], np.int32))
        self._upload_inputs(parts)
        if self.verifies:
            self._buffers["rounds"].fill(0)
        self._buffers["progress"].fill(0xFF)  # what a block has not written yet says "not started"
        epoch, restarted = self._epochs.take(steps)
        if restarted or self._plan.sync == "flags":  # whose tags repeat: see cheetah.blocks.exchange_kinds
            self._buffers["exchange"].fill(0)
        scalars |= {
            "steps": steps,
            "head_from": min(part.first_sample for part in parts),
            "column_count": len(columns),
            "options": reduce(or_, (options for options, _ in asked)),
            "epoch": epoch,
        }
        return self._arguments({**scalars, "logits": logits})

    def _upload_inputs(self, parts: Sequence[Part]) -> None:
        """All rows in one copy: to begin one takes longer than the copy."""
        rows = np.zeros((len(parts), self.launch_tokens + 1), np.int32)
        for row, part in zip(rows, parts, strict=True):
            known = [*part.inputs, *(part.drafting.drafts if part.drafting is not None else ())]
            row[: len(known)] = known
        used = rows.size - rows.shape[1] + len(known)
        self._buffers["tokens"].upload(rows.reshape(-1)[:used])

    def _read(self, parts: Sequence[Part]) -> tuple[int, list[tuple[int, tuple[int, ...]]], list[Drafted]]:
        """(steps done, how many tokens of each part are behind it and the ids that were sampled, what came of its
        drafts). The token after token k is sampled if it is not given."""
        steps = parts[0].steps
        done = int(self._buffers["status"].download(np.int32, (8,))[0])
        if not 1 <= done <= steps:
            raise LaunchFault(f"the kernel reports {done} of {steps} steps done: it did not run as its manifest says")
        reached, drafted = self._reached(parts, done)
        row = self.launch_tokens + 1
        tokens = self._buffers["tokens"].download(np.int32, ((len(parts) - 1) * row + parts[-1].total + 1,))
        sampled = []
        for number, (part, count) in enumerate(zip(parts, reached, strict=True)):
            ids = tokens[number * row + len(part.inputs) : number * row + count + 1]
            made = _up_to_stop(tuple(int(token) & NO_TOKEN for token in ids), part.sampling.stop_ids)
            if any(self.vocab_size <= token < CANCELLED_TOKEN for token in made):
                vocabulary = f"0..{self.vocab_size - 1}"
                raise LaunchFault(f"the kernel sampled {made}, outside the vocabulary {vocabulary}")
            sampled.append((count, made))
        return done, sampled, drafted

    def _reached(self, parts: Sequence[Part], steps: int) -> tuple[list[int], list[Drafted]]:
        """How many tokens of each part are behind it after so many steps, and what came of its drafts."""
        if not self.verifies:
            return [min(steps * part.per_step, part.total) for part in parts], [NOTHING_DRAFTED] * len(parts)
        words = (
            self._buffers["rounds"].download(np.int32, (self.batch, ROUND_WORDS + self.tokens))[: len(parts)].tolist()
        )
        for part, (reached, *_) in zip(parts, words, strict=True):
            if not 1 <= reached <= min(steps * part.per_step, part.total):
                raise LaunchFault(f"the kernel reports {reached} of {part.total} tokens done in {steps} steps")
        return [row[0] for row in words], [_drafted_of(row) for row in words]


def _options_of(part: Part) -> int:
    """What a part asks of its logits; all columns of one that masks them have masks of their own."""
    has_own = part.drafting is not None and bool(part.drafting.masks)
    return options_of(part.sampling, part.mask) | (MASKED | COLUMNS_MASKED if has_own else 0)


def _drafts_of(part: Part) -> tuple[int, int, int, int]:
    """How many drafts a launch has of a part, behind which n-grams others are looked up, and how much text ahead."""
    drafting = part.drafting
    return (0, 0, 0, 0) if drafting is None else (len(drafting.drafts), *drafting.ngrams, len(drafting.ahead))


def _drafted_of(words: Sequence[int]) -> Drafted:
    """What a sequence's words in `rounds` say."""
    _, steps, tokens, *right = words
    while right and not right[-1]:
        right.pop()
    return Drafted(steps, tokens, tuple(right))


def token_of_word(word: int) -> int:
    """The token of a word that a kernel that verifies has emitted."""
    return word % (1 << EMITTED_BITS)


def drafts_of_word(word: int) -> int:
    """How many tokens were drafted in its step."""
    return (word >> EMITTED_BITS) % (1 << EMITTED_COUNT_BITS)


def place_of_word(word: int) -> int:
    """Behind which draft it was chosen, from 1 on; 0: behind none."""
    return word >> (EMITTED_BITS + EMITTED_COUNT_BITS)


def drafted_of_word(word: int) -> Drafted:
    """What it says of drafts."""
    return Drafted.of_token(drafts_of_word(word), place_of_word(word))


def words_of(buffer: Buffer) -> npt.NDArray[np.uint32]:
    """The words of a mapped buffer, as launches see them."""
    return cast("MappedBuffer", buffer).array.view(np.uint32)


def _up_to_stop(token_ids: tuple[int, ...], stop_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The ids up to the first stop id, CANCELLED_TOKEN or NO_TOKEN."""
    ends = (place for place, token in enumerate(token_ids) if token in stop_ids or token >= CANCELLED_TOKEN)
    return token_ids[: next(ends, len(token_ids)) + 1]
