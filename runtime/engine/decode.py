"""The decode loop: prompts and budgets in, token ids out, some at a time, of up to `batch` sequences together.

Decides who is launched together, how many tokens each launch makes and when a completion ends. A completion joins
between two launches: its prompt is read in launches of its own, then it decodes along with the others, until it ends
and the next in line takes its place. How steps are grouped into launches changes no bits. Who else is decoded changes
how attention splits the keys, thus the last bits of its sums; with a plan of a fixed `kv_chunk` not even those, and
then what the prefix cache holds changes no bit either (see `prompt_reading`).
Knows nothing of text, checkpoints or the kernel's parameters (`launcher` does).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.runtime import interrupts
from cheetah.runtime.engine.kv_cache import CachedSequence, pages_for
from cheetah.runtime.engine.launcher import NOT_A_NUMBER, Launcher, LaunchResult, Part, Sampling
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.prompt_reading import FewestSteps, SameSteps
from cheetah.runtime.outputs import Timings
from cheetah.runtime.sampling import seed_of

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer

LAUNCH_SECONDS = 0.1
"""About how long one decode launch takes: short enough to stream, long enough that launching costs nothing."""

OVERTAKEN = (
    "another request began before this stream was finished, and took its KV cache: finish a stream (or collect it in a "
    "list) before the next request, or open the LLM with a batch above 1"
)
INTERRUPTED = "the launch that read this completion's prompt was interrupted: ask again"


class LaunchPace:
    """How many tokens the next decode launch makes: what takes about LAUNCH_SECONDS at the pace seen so far."""

    def __init__(self, max_steps: int, target_s: float = LAUNCH_SECONDS):
        self._max_steps = max_steps
        self._target_s = target_s
        self._step_s = target_s

    def note(self, steps: int, seconds: float) -> None:
        """Remembers how long a launch took."""
        self._step_s = seconds / steps

    def steps(self, wanted: int) -> int:
        """Steps of the next launch, at most `wanted`."""
        fitting = int(self._target_s / self._step_s) if self._step_s > 0 else self._max_steps
        return max(1, min(wanted, self._max_steps, fitting))


@dataclass(frozen=True)
class Request:
    """Completions to make of one prompt, `count` of them: at most `max_tokens` each, ended by a stop id but not before
    `min_tokens`. Number i draws with `seed_of(sampling.seed, i)`."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    min_tokens: int = 0
    count: int = 1

    @property
    def most_cached(self) -> int:
        """Tokens that a completion may have in the cache; the last one that is made needs no place there."""
        return len(self.prompt_ids) + self.max_tokens - 1


class Completion:
    """One completion of a request while it is decoded. Iterate to get the sampled ids, some at a time; the last may be
    a stop id, which `stop_id` then names.

    It begins when it is iterated (or submitted), and goes on whenever any completion of its decoder is waited for. One
    that is not iterated to its end gives its place up when its iterator is closed or collected.
    """

    def __init__(self, decoder: Decoder, request: Request, index: int = 0):
        self._decoder, self.request, self.index = decoder, request, index
        self.sampling = replace(request.sampling, seed=seed_of(request.sampling.seed, index))
        self.cache: CachedSequence | None = None
        self.ids = list(request.prompt_ids)
        self.stop_id: int | None = None
        self.refusal: str | None = None
        self.has_failed = False
        self.cached_tokens = 0
        self._taken = len(self.ids)
        self._prefill_s = self._decode_s = 0.0
        self._launches = 0

    @property
    def made(self) -> int:
        """Ids sampled so far."""
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def is_complete(self) -> bool:
        """Whether no more ids will be sampled."""
        return self.stop_id is not None or self.made >= self.request.max_tokens

    @property
    def finished(self) -> bool:
        """Whether no more ids will come."""
        return self.is_complete and self._taken == len(self.ids)

    @property
    def is_ready(self) -> bool:
        """Whether the iterator has something to give, be it an error, without a launch."""
        return self._taken < len(self.ids) or self.is_complete or self.refusal is not None

    def timings(self, completion_tokens: int) -> Timings:
        """Seconds so far; `completion_tokens` of the ids made are in the caller's output."""
        seconds = (self._prefill_s, self._decode_s)
        return Timings(len(self.request.prompt_ids), completion_tokens, *seconds, self._launches, self.cached_tokens)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return self.parts()

    def parts(self) -> Generator[tuple[int, ...], None, None]:
        """What iterating it gives; close it to give the rest up."""
        self._decoder.submit([self])
        try:
            while not self.finished:
                self._decoder.check_open()
                while not self.is_ready:
                    self._decoder.step()
                if self._taken == len(self.ids):
                    raise CheetahError(self.refusal or INTERRUPTED)
                token_ids, self._taken = tuple(self.ids[self._taken :]), len(self.ids)
                yield token_ids
        finally:
            self._decoder.drop(self)

    def most_steps(self) -> int:
        """Steps of the next decode launch at most: stop ids count in all of it or in none."""
        unstoppable = self.request.min_tokens - 1 - self.made
        wanted = self.request.max_tokens - self.made
        return min(wanted, unstoppable) if unstoppable > 0 else wanted

    def part(self, cache: CachedSequence, inputs: Sequence[int], total: int, per_step: int = 1) -> Part:
        """Its part of a launch. Stop ids count only where all tokens that it samples may be the last."""
        making = total + 1 - len(inputs)
        sampling = self.sampling
        if self.made + making < self.request.min_tokens:
            sampling = replace(sampling, stop_ids=())
        return Part(cache, inputs, total, sampling, per_step)

    def take(self, part: Part, result: LaunchResult) -> None:
        """Takes in what a launch of `part` did."""
        if self.made:
            self._decode_s += result.seconds
        else:
            self._prefill_s += result.seconds
        self._launches += 1
        self.ids += result.token_ids
        if result.token_ids and result.token_ids[-1] in part.sampling.stop_ids:
            self.stop_id = result.token_ids[-1]
        if result.has_failed:
            self.has_failed = True
            self.refusal = NOT_A_NUMBER.format(position=len(self.ids))


class Decoder:
    """Decodes up to `launcher.batch` completions together.

    launch_steps: most steps of one launch (default: what the kernel allows); for tests and for finding faults.
    prefixes: keeps the pages of prompts and completions for later ones that begin alike, which then read only the rest;
    with a plan of a fixed `kv_chunk` those of prompts.
    prompts: launches of another kernel over the same caches, that reads prompts; by default the same.

    With a batch of 1, a request ends an unfinished one. With more, requests wait for a place and for pages: one is
    begun when all that it may need is there, whatever the others will need. Use it from one thread.
    """

    def __init__(
        self,
        launcher: Launcher,
        launch_steps: int | None = None,
        prefixes: PrefixCache | None = None,
        prompts: Launcher | None = None,
    ):
        self.launcher, self._prompts = launcher, prompts or launcher
        self.launch_steps = min(launch_steps or launcher.max_steps, launcher.max_steps, self._prompts.max_steps)
        self._prefixes = prefixes
        reading = SameSteps if launcher.kv_chunk else FewestSteps
        self._reading = reading(self._prompts.tokens, launcher.cache.page_size)
        self._pace = LaunchPace(self.launch_steps)
        self._waiting: deque[Completion] = deque()
        self._running: list[Completion] = []
        self._dropped: list[Completion] = []
        self._is_stepping = False
        self.closed = False

    def complete(self, request: Request) -> Completion:
        """The completion of a request of one, begun when it is iterated. CheetahError at once if it can never fit."""
        return self.complete_several(request)[0]

    def complete_several(self, request: Request) -> list[Completion]:
        """The completions of a request, `count` of them. CheetahError at once if one can never fit.

        Those that begin together read the prompt once, and share its pages until they write to them.
        """
        cache = self.launcher.cache
        cache.check_fits(request.most_cached)
        pages = pages_for(request.most_cached, cache.page_size)
        if pages > cache.pool.pages:
            raise CheetahError(
                f"{request.most_cached} tokens of prompt and completion need {pages} pages of the KV cache, there are "
                f"{cache.pool.pages}: use a smaller max_tokens"
            )
        return [Completion(self, request, index) for index in range(request.count)]

    def submit(self, completions: Sequence[Completion]) -> None:
        """Puts completions in line, those that are not there yet. They may overtake others, but not each other."""
        self.check_open()
        new = [one for one in completions if not (one.is_ready or one in self._waiting or one in self._running)]
        if new and self.launcher.batch == 1:
            self._overtake()
        self._waiting.extend(new)

    def step(self) -> None:
        """Lets those who wait begin, as far as there is room: their prompts are read. If none does, all who run make
        some tokens, in one launch."""
        self.check_open()
        with self._stepping():
            if not self._admit():
                self._decode()

    def drop(self, completion: Completion) -> None:
        """Takes a completion out, wherever it is, and gives its pages back; nothing if it is out already."""
        if self._is_stepping:  # an iterator may be collected at any time: pages that are being written stay until after
            self._dropped.append(completion)
            return
        if completion in self._waiting:
            self._waiting.remove(completion)
        if completion in self._running:
            self._leave(completion)

    def score(self, token_ids: Sequence[int], logits: Buffer) -> npt.NDArray[np.float32]:
        """float32 [len(token_ids), vocab]: row i are the logits after the ids 0 .. i."""
        self.check_open()
        launcher = self.launcher
        launcher.cache.check_fits(len(token_ids))
        if launcher.batch == 1:
            self._overtake()
        while self._running and pages_for(len(token_ids), launcher.cache.page_size) > self._unclaimed_pages():
            with self._stepping():
                self._decode()
        most = min(launcher.score_tokens(logits), self.launch_steps * launcher.tokens)
        launcher.restart()
        parts = []
        try:
            for first in range(0, len(token_ids), most):
                with self._stepping():
                    parts.append(launcher.score(token_ids[first : first + most], logits))
        finally:
            launcher.restart()
        return np.concatenate(parts)

    def check_open(self) -> None:
        """CheetahError once the device's memory was given back."""
        if self.closed:
            raise CheetahError("this LLM is closed: open a new one")

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """While pages are being written, those who drop out keep theirs, and interrupts wait."""
        self._is_stepping = True
        try:
            with interrupts.deferred():
                yield
        finally:
            self._is_stepping = False
            while self._dropped:
                self.drop(self._dropped.pop())

    # Who runs ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Begins those first in line for whom there are places and pages; says whether there were any."""
        admitted = False
        while self._waiting and len(self._running) < self.launcher.batch and (group := self._next_group()):
            for completion in group:
                self._waiting.remove(completion)
            self._running += group
            self._begin(group)
            admitted = True
        return admitted

    def _next_group(self) -> list[Completion]:
        """As many completions of the first request in line as can begin now; the first has a cache with what is known
        of the prompt. CheetahError if not even one can and nobody runs who might make room."""
        first = self._waiting[0]
        places = self.launcher.batch - len(self._running)
        group = [one for one in self._waiting if one.request is first.request][:places]
        first.cache = self._sequence_of(first.ids)
        missing = pages_for(first.request.most_cached, first.cache.page_size) - len(first.cache.pages)
        of_each_other = missing + len(first.cache.pages) - (len(first.ids) - 1) // first.cache.page_size
        spare = self._unclaimed_pages() - missing
        if spare >= 0:
            first.cached_tokens = first.cache.length
            return group[: 1 + spare // of_each_other]
        first.cache.clear()
        first.cache = None
        if not self._running:
            self._waiting.remove(first)
            first.refusal = f"{missing} pages of the KV cache are needed, there are {spare + missing}"
            raise CheetahError(first.refusal)
        return []

    def _sequence_of(self, prompt_ids: Sequence[int]) -> CachedSequence:
        """A new sequence with the pages that are known to hold the beginning of a prompt."""
        sequence = self.launcher.cache.fork()
        sequence.clear()
        if self._prefixes is not None:
            pages, tokens = self._prefixes.lookup(prompt_ids)
            reused = self._reading.reused(tokens)
            sequence.adopt(pages[: reused // sequence.page_size], reused)
        return sequence

    def _unclaimed_pages(self) -> int:
        """Pages that nobody who runs holds or may yet need."""
        claimed = 0
        for one in self._running:
            assert one.cache is not None
            claimed += pages_for(one.request.most_cached, one.cache.page_size) - len(one.cache.pages)
        return self.launcher.cache.pool.available_pages - claimed

    def _leave(self, completion: Completion) -> None:
        """Frees the place and the pages of one who runs; its tokens are kept for later ones if there is room."""
        self._running.remove(completion)
        if completion.cache is not None:
            self._remember(completion)
            completion.cache.clear()
            completion.cache = None

    def _remember(self, completion: Completion) -> None:
        cache = completion.cache
        if self._prefixes is not None and cache is not None and not completion.has_failed:
            kept = self._reading.kept(len(completion.request.prompt_ids), cache.length)
            self._prefixes.insert(completion.ids[:kept], cache.pages)

    def _overtake(self) -> None:
        """Ends all who run or wait."""
        for other in [*self._running, *self._waiting]:
            other.refusal = OVERTAKEN
            self.drop(other)

    # What is launched -------------------------------------------------------------------------------------------------

    def _begin(self, group: list[Completion]) -> None:
        """Reads the prompt of completions of one request, once, and makes the first token of each."""
        prompt = len(group[0].ids)
        end = self._reading.end(prompt, len(group))
        try:
            self._read(group, end)
            if end < prompt:
                self._fork(group)
                self._launch(group, [1] * len(group), self.launcher)
            self._remember(group[0])
        except BaseException:
            for completion in group:
                completion.refusal = INTERRUPTED
                if completion in self._running:
                    self._leave(completion)
            raise
        self._let_go(group)

    def _fork(self, group: list[Completion]) -> None:
        first = group[0].cache
        assert first is not None
        for other in group[1:]:
            other.cache, other.cached_tokens = first.fork(), group[0].cached_tokens

    def _read(self, group: list[Completion], end: int) -> None:
        """Brings the first `end` tokens of a prompt into the cache, in as few launches as may be."""
        ids, cache = group[0].ids, group[0].cache
        assert cache is not None
        most = self.launch_steps * self._prompts.tokens
        prompt = len(ids)
        while cache.length < end:
            count = min(most, end - cache.length)
            # One input more than tokens, where there is one: nothing is sampled, and the head need not run.
            inputs = ids[cache.length : min(cache.length + count + 1, prompt)]
            part = group[0].part(cache, inputs, count, self._reading.columns_of_step(count))
            result = self._prompts.launch_together([part])[0]
            self._pace.note(result.steps, result.seconds)
            for completion in group:
                completion.take(part, result)

    def _decode(self) -> None:
        """One launch over all who run."""
        if self._running:
            steps = self._pace.steps(min(one.most_steps() for one in self._running))
            running = list(self._running)
            self._launch(running, [steps] * len(running), self.launcher)
            self._let_go(running)

    def _launch(self, completions: list[Completion], totals: list[int], launcher: Launcher) -> None:
        """One launch that goes on from the last id of each."""
        parts = []
        for completion, total in zip(completions, totals, strict=True):
            assert completion.cache is not None
            parts.append(completion.part(completion.cache, completion.ids[-1:], total))
        results = launcher.launch_together(parts)
        self._pace.note(results[0].steps, results[0].seconds)
        for completion, part, result in zip(completions, parts, results, strict=True):
            completion.take(part, result)

    def _let_go(self, completions: Sequence[Completion]) -> None:
        """Ends those that are complete, or cannot go on."""
        for completion in completions:
            if (completion.is_complete or completion.has_failed) and completion in self._running:
                self._leave(completion)
