"""What the launches of every kernel over a KV cache have in common: from their parts to their end.

A `Launch` is a launch that is prepared, under way or over; `KernelLaunches` says how it comes from one to the next, and
what a failure or an interrupt means. Knows no kernel's parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.models.rounding import widen
from cheetah.plan import Plan
from cheetah.plan.formats import KV_TILE_TOKENS
from cheetah.runtime import interrupts
from cheetah.runtime.background import Started
from cheetah.runtime.device.interface import LaunchCancelled
from cheetah.runtime.engine.drafting import NOTHING_DRAFTED, Drafted, Drafting
from cheetah.runtime.engine.kv_cache import CachedSequence, PageCopy
from cheetah.runtime.engine.launch_tables import Geometry, Sampling
from cheetah.runtime.engine.page_copies import copy_pages
from cheetah.runtime.engine.watching import Mask

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Argument, Buffer, Device, Kernel

POLL_SECONDS = 1e-4  # a step takes half a millisecond at least

NOT_A_NUMBER = (
    "no token can be chosen for position {position}: none of its logits is a number above -infinity. Look for NaN and "
    "infinities in the checkpoint's weights (a broken download or conversion)"
)


@dataclass(frozen=True)
class Part:
    """One sequence's part of a launch: `total` tokens go through the model, `inputs` first, then the sampled ones.

    One input more than `total` samples nothing. per_step: how many tokens a step takes; above 1 all must be inputs, or
    `drafting` says how it comes by the others. known, prompt: all ids up to the last input, and how many of them are
    the prompt's; penalties ask for them, and drafts that are looked up.
    followed: so many steps more are made by the same tables, in launches behind this one.
    mask: which tokens may be sampled, of those that `sampling` allows; see `watching`. stepwise: the launch after this
    one will have one step. wanted: of a pass over prompts, how many of the last tokens' hidden states it shall leave.
    """

    cache: CachedSequence
    inputs: Sequence[int]
    total: int
    sampling: Sampling = field(default_factory=Sampling)
    per_step: int = 1
    known: Sequence[int] = ()
    prompt: int = 0
    mask: Mask | None = None
    stepwise: bool = False
    wanted: int = 0
    drafting: Drafting | None = None
    followed: int = 0

    @property
    def steps(self) -> int:
        """Of the launch, at most."""
        return -(-self.total // self.per_step) if self.drafting is None else self.drafting.rounds

    @property
    def samples(self) -> bool:
        """Whether a token is sampled after the last input."""
        return len(self.inputs) <= self.total

    @property
    def first_sample(self) -> int:
        """The first step after which a token is sampled; `steps` if there is none."""
        return (len(self.inputs) - 1) // self.per_step if self.samples else self.steps


@dataclass(frozen=True)
class LaunchResult:
    """What a launch did for one sequence: `token_ids` were sampled, the last may be a stop id. All its sequences
    together took `steps` steps and `seconds` by the host's clock.

    has_failed: after these ids none could be chosen, since no logit was a number: what is cached may be none either.
    drafted: what came of its drafts.
    """

    token_ids: tuple[int, ...]
    steps: int
    seconds: float
    has_failed: bool = False
    drafted: Drafted = NOTHING_DRAFTED


class Launch:
    """A launch from its preparation to its end. placed: its parts in the order of its rows, order: their numbers.
    given, has_ended, drafted: of each row, how many of its tokens `fresh` has given, whether the last was among them,
    and what they say of drafts."""

    def __init__(
        self,
        placed: Sequence[Part],
        order: Sequence[int],
        geometry: Geometry,
        arguments: dict[str, Argument],
    ) -> None:
        self.placed, self.order, self.geometry = placed, order, geometry
        self.arguments, self.epoch = arguments, int(cast(int, arguments.get("epoch", 0)))
        self.given, self.has_ended = [0] * len(placed), [False] * len(placed)
        self.drafted = [NOTHING_DRAFTED] * len(placed)
        self.started = self._seen = time.perf_counter()
        self._ended: float | None = None

    @property
    def seconds(self) -> float:
        """From its preparation to now, or to its end."""
        return (time.perf_counter() if self._ended is None else self._ended) - self.started

    def see(self) -> None:
        """It has not ended yet."""
        self._seen = time.perf_counter()

    def end(self, is_watched: bool) -> None:
        """It has ended: now, or, if nobody was watching, at some time since it was seen last, which is then taken."""
        self._ended = time.perf_counter() if is_watched else self._seen

    def given_of(self, number: int) -> int:
        """How many tokens of part `number` have been given."""
        return self.given[self.order.index(number)]

    def drafted_of(self, number: int) -> Drafted:
        """What those tokens say of its drafts."""
        return self.drafted[self.order.index(number)]

    def next_place(self, row: int) -> int:
        """Where in its row the next token will be."""
        return len(self.placed[row].inputs) + self.given[row]


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on a device over its buffers, of a model. kernel: or what waits for it, which the first launch does.
    buffers: by parameter name; who launches alone writes the tables among them. timeout_s: of a launch, if any."""

    device: Device
    kernel: Kernel | Started[Kernel]
    manifest: Manifest
    config: ModelConfig
    buffers: Mapping[str, Buffer]
    timeout_s: float | None = None


class KernelLaunches:
    """Launches of one kernel over sequences' caches. plan: of the kernel that decodes, whose caches they are.

    After a launch that failed or did not end, nothing can be launched any more.
    """

    def __init__(self, loaded: LoadedKernel, plan: Plan):
        manifest = loaded.manifest
        self._device, self._kernel, self._buffers, self._plan = loaded.device, loaded.kernel, {**loaded.buffers}, plan
        self.window = loaded.config.window(plan.max_context)
        self._timeout_s = loaded.timeout_s
        self._step_bytes: Mapping[str, int] = manifest.step_bytes
        self._parameters = [parameter.name for parameter in manifest.parameters]
        self._uploaded: dict[str, npt.NDArray[np.int32]] = {}
        self._under_way: Sequence[Part] = ()  # of the launch that was started last
        self._pool_shape = next((buffer.shape for buffer in manifest.buffers if buffer.name == "kv"), ())
        self._tap_shape = next((buffer.shape for buffer in manifest.buffers if buffer.name == "taps"), ())
        self._hidden_size = loaded.config.hidden_size
        self._broken: str | None = None
        self.copied_beside: Callable[[Sequence[PageCopy]], None] | None = None
        """Copies what else lies by the pages of the cache."""

    @property
    def taps(self) -> Buffer | None:
        """What tapped layers left of the last launch's tokens, bf16 [rows, taps, hidden]; None of a kernel without."""
        return self._buffers["taps"] if self._tap_shape else None

    @property
    def tap_bytes(self) -> int:
        """Of `taps`, what one token has."""
        return 2 * math.prod(self._tap_shape[1:])

    @property
    def plan(self) -> Plan:
        """Of the kernel that decodes."""
        return self._plan

    def launch_together(self, parts: Sequence[Part], logits: Buffer | None = None) -> list[LaunchResult]:
        """One launch over several sequences, each of which has a token in every step. Results in the order of `parts`.

        logits: f32 [steps, tokens, vocab], wanted of every column; `columns` then says which those were: (part, number
        in the part). Sequences that share their first pages are neighbours, and the pages are read once for all.
        A launch ends early once each sequence has sampled a stop id of its own. After one that was interrupted the
        caches are as before it.
        """
        launch = self.prepare(parts, logits)
        self.start(launch)
        return self.finish(launch)

    def prepare(self, parts: Sequence[Part], logits: Buffer | None = None) -> Launch:
        """Everything that a launch needs, before it is started. logits: where they are to lie, if somebody wants
        them."""
        raise NotImplementedError

    def logits_after(self, launch: Launch, number: int, tokens: range) -> Iterator[npt.NDArray[np.float32]]:
        """Of a launch that has ended, and had a buffer for logits in the host's memory: float32 [vocab] after each of
        these tokens of part `number`, of which 0 is the first input. They lie in that buffer."""
        raise NotImplementedError

    def rows_of(self, launch: Launch, number: int, tokens: range) -> list[int]:
        """Of a launch that has ended, the rows of what it keeps of these tokens of part `number` (0: the first input),
        in `logits` and `taps`."""
        raise NotImplementedError

    def tapped(self, launch: Launch, number: int, tokens: range) -> npt.NDArray[np.float32]:
        """float32 [len(tokens), taps, hidden]: what tapped layers left of these tokens, of the last launch, which has
        ended."""
        rows, (_, *row) = self.rows_of(launch, number, tokens), self._tap_shape
        bits = self._buffers["taps"].download(np.uint16, (max(rows) + 1, *row))
        return widen(bits[rows][:, :, : self._hidden_size])

    def start(self, launch: Launch) -> None:
        """Starts it; returns at once on a GPU. No other may be started before it is finished."""
        assert not isinstance(self._kernel, Started), "a launch is prepared before it is started"
        self._under_way = launch.placed
        with self._noting_failures():
            self._device.launch(self._kernel, launch.arguments)

    def wait(self, launch: Launch) -> bool:
        """Waits until it has ended: True; or until there are tokens that `fresh` has not given: False."""
        with self._noting_failures():
            is_watched = not any(launch.given)
            while not self._device.is_done():
                launch.see()
                if interrupts.is_pending() or self._has_fresh(launch):
                    return False
                if self._timeout_s is not None and launch.seconds > self._timeout_s:
                    return True  # `finish` waits no longer, and says which phase each block has reached
                time.sleep(POLL_SECONDS)
                is_watched = True
        launch.end(is_watched)
        return True

    def fresh(self, launch: Launch) -> list[tuple[int, ...]]:
        """What each part has sampled since this was asked last, in the order of the parts."""
        return [()] * len(launch.placed)

    def cancel(self, launch: Launch, number: int) -> None:
        """Ends part `number` as soon as may be. By any thread, at any time: nothing once it has ended."""

    def finish(self, launch: Launch) -> list[LaunchResult]:
        """Waits for its end; what it did, in the order of the parts, with all ids that it sampled."""
        raise NotImplementedError

    def bytes_read(self, parts: Sequence[Part], steps: int) -> int:
        """Of the device's memory, by a launch that made so many steps of these parts, which has ended: weights, and
        keys and values of each sequence's tokens, those that several share once each."""
        per_token, seen = self._step_bytes.get("kv_per_token", 0), self.window or self._plan.max_context
        tokens = sum(min(seen, max(0, part.cache.length - steps // 2)) for part in parts)
        states = len(parts) * self._step_bytes.get("state", 0)
        return steps * (self._step_bytes["weights"] + tokens * per_token + states)

    def _be_ready(self) -> None:
        """CheetahError after a launch that failed. Waits for the kernel's compiler: that is no part of a launch, nor of
        its time limit."""
        if self._broken is not None:
            raise CheetahError(f"an earlier launch failed, the device's state is lost: open a new LLM ({self._broken})")
        if isinstance(self._kernel, Started):
            self._kernel = self._kernel()

    def _await_end(self, launch: Launch) -> None:
        with self._noting_failures():
            limit = self._timeout_s if self._timeout_s is None else max(0.0, self._timeout_s - launch.seconds)
            self._device.synchronize(limit)

    def _has_fresh(self, launch: Launch) -> bool:
        """Whether `fresh` would give something."""
        return False

    def _begin_again(self) -> None:
        """A launch was ended in the middle: what the kernel counts is not what it was told."""
        raise NotImplementedError

    def _forget_states(self) -> None:
        """What sequences of the last launch remember may be of more tokens than they have: they are read again."""
        for part in self._under_way:
            if part.cache.state is not None:
                part.cache.clear()

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """What ends a launch in the middle is noted: an interrupt, as if it had not been made; else that it failed."""
        try:
            yield
        except (LaunchCancelled, KeyboardInterrupt):  # nothing that is counted was written
            self._begin_again()
            raise
        except Exception as error:
            self._broken = str(error).partition("\n")[0]
            raise

    def make_room(self, cache: CachedSequence, tokens: int) -> None:
        """Pages for `tokens` more tokens of a sequence, which a launch would otherwise take. PagesExhausted, with none
        taken, if there are too few.

        Before that, pages that the window has left behind are given back: the plan rounds what is read outward, to
        whole items where tokens are drafted.
        """
        if self.window is not None:
            first = max(0, cache.length + 1 - self.window)
            unit = self._plan.kv_chunk or KV_TILE_TOKENS
            cache.drop_before(first // unit * unit)
        cache.reserve(cache.length + tokens)

    def _make_room(self, parts: Sequence[Part]) -> None:
        """Pages for what each part will cache, and the copies of those that it held together with others."""
        for part in parts:
            self.make_room(part.cache, part.total)
        for part in parts:
            copies = part.cache.take_copies()
            copy_pages(self._buffers["kv"], self._pool_shape, self._plan.kv_element_bytes, copies)
            if self.copied_beside is not None:
                self.copied_beside(copies)
        if (buffer := self._buffers.get("states")) is None:
            return  # a model that drafts over the same pool remembers nothing: the copies wait for the other one
        states = parts[0].cache.pool.states
        for source, target in states.take_copies():
            nbytes = buffer.nbytes // states.count
            buffer.copy(source * nbytes, target * nbytes, nbytes)

    def _upload(self, name: str, words: npt.NDArray[np.int32]) -> None:
        """Writes the beginning of a table, if it is not there already."""
        if words.size and not np.array_equal(self._uploaded.get(name, np.empty(0)), words):
            self._uploaded.pop(name, None)  # until the upload has ended it is not known what lies there
            self._buffers[name].upload(words)
            self._uploaded[name] = words.copy()

    def _arguments(self, others: Mapping[str, Argument]) -> dict[str, Argument]:
        """The arguments of a launch by parameter name: its buffers, and these."""
        pool = {"kv_pages": self._pool_shape[1]} if self._pool_shape else {}
        known: dict[str, Argument] = {**self._buffers, **pool, **others}
        return {name: known[name] for name in self._parameters if name in known}
