"""The engine: requests in, events out, one launch a step, of up to `batch` sequences together.

Decides who is launched together, how many tokens each launch makes and when a completion ends. A completion joins
between two launches: its prompt is read in launches of its own, then it decodes along with the others, until it ends
and the next in line takes its place. How steps are grouped into launches changes no bits. Who else is decoded changes
how attention splits the keys, thus the last bits of its sums; with a plan of a fixed `kv_chunk` not even those, and
then what the prefix cache holds changes no bit either (see `prompt_reading`).
Knows nothing of text, checkpoints, who asks, or the kernel's parameters (`launcher` does).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.manifest import NO_PAGE
from cheetah.runtime import interrupts
from cheetah.runtime.device.interface import LaunchCancelled
from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.kv_cache import CachedSequence, pages_for
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.pace import LaunchPace
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.prompt_reading import FewestSteps, SameSteps
from cheetah.runtime.engine.requests import Event, Failed, Load, Request

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer


class Engine:
    """Makes completions, up to `launcher.batch` at a time.

    launch_steps: most steps of one launch (default: what the kernel allows); for tests and for finding faults.
    prefixes: keeps the pages of prompts and completions for later ones that begin alike, which then read only the rest;
    with a plan of a fixed `kv_chunk` those of prompts.
    prompts: launches of another kernel over the same caches, that reads prompts; by default the same.

    Requests wait in line for a place and for pages: a completion is begun when all that it may need is there, whatever
    the others will need. `add` and `abort` may be called by any thread at any time, also while another one is in `step`
    and by what is collected in the middle of one; they never wait. Nothing is lost to a KeyboardInterrupt but the
    events of the step in which it came: who must have those steps within `interrupts.deferred`.
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
        manner = SameSteps if launcher.kv_chunk else FewestSteps
        self._manner = manner(self._prompts.tokens, launcher.cache.page_size)
        self._pace = LaunchPace(self.launch_steps)
        self._numbers = count()
        self._orders: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # of everything below, and of the device
        self._waiting: deque[Completion] = deque()
        self._reading: list[Completion] = []  # of one request; the first has the cache
        self._running: list[Completion] = []
        self._others_are_due = False
        self._is_closed = False
        self._tokens_looked_up = self._tokens_found = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._orders or self._waiting or self._reading or self._running)

    def load(self) -> Load:
        """What is going on, as far as it can be told without waiting for a step."""
        begun = [*self._reading, *self._running]
        held = {page for one in begun if (cache := one.cache) is not None for page in [*cache.pages]} - {NO_PAGE}
        used = len(held) / self.launcher.cache.pool.pages
        return Load(len(begun), len(self._waiting), used, self._tokens_looked_up, self._tokens_found)

    def check(self, request: Request) -> None:
        """CheetahError for a request that can never fit."""
        cache = self.launcher.cache
        cache.check_fits(request.most_cached)
        pages = pages_for(request.most_cached, cache.page_size)
        if pages > cache.pool.pages:
            raise CheetahError(
                f"{request.most_cached} tokens of prompt and completion need {pages} pages of the KV cache, there are "
                f"{cache.pool.pages}: use a smaller max_tokens"
            )

    def check_open(self) -> None:
        """CheetahError once the device's memory was given back."""
        if self._is_closed:
            raise CheetahError("this LLM is closed: open a new one")

    def add(self, request: Request) -> tuple[int, ...]:
        """Puts a request in line; gives the ids of its completions. CheetahError if it can never fit.

        Those that begin together read the prompt once, and share its pages until they write to them.
        """
        self.check_open()
        self.check(request)
        completions = [Completion(next(self._numbers), request, index) for index in range(request.count)]
        self._order(lambda: self._waiting.extend(completions))
        return tuple(one.id for one in completions)

    def abort(self, ids: Iterable[int]) -> None:
        """Takes completions out, wherever they are, and gives their pages back. Nothing for one that has ended."""
        wanted = set(ids)
        self._order(lambda: self._drop(wanted))

    def step(self) -> list[Event]:
        """One launch, and what it made: of the next prompt, as far as there is room, or of all who run. A prompt of
        several launches lets those make tokens in between. An empty list if there is nothing to do."""
        events: list[Event] = []
        with self._locked(), interrupts.deferred(), contextlib.suppress(LaunchCancelled):
            # A launch that is cancelled has changed nothing, and the interrupt comes behind it.
            self._launch_next(events)
        return events

    def score(self, token_ids: Sequence[int], logits: Buffer) -> npt.NDArray[np.float32] | None:
        """float32 [len(token_ids), vocab]: row i are the logits after the ids 0 .. i. None, with nothing done, while
        others hold the pages: try again after a step."""
        launcher = self.launcher
        launcher.cache.check_fits(len(token_ids))
        most = min(launcher.score_tokens(logits), self.launch_steps * launcher.tokens)
        with self._locked():
            if not self.is_idle and pages_for(len(token_ids), launcher.cache.page_size) > self._unclaimed_pages():
                return None
            launcher.restart()
            parts = []
            try:
                for first in range(0, len(token_ids), most):
                    with interrupts.deferred():
                        parts.append(launcher.score(token_ids[first : first + most], logits))
            finally:
                launcher.restart()
        return np.concatenate(parts)

    def close(self) -> None:
        """Refuses every later call; a step that runs is waited for."""
        with self._lock:
            self._is_closed = True

    # Orders from outside ----------------------------------------------------------------------------------------------

    def _order(self, order: Callable[[], None]) -> None:
        """Has something done between two steps: now if none runs."""
        self._orders.append(order)
        self._settle()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The engine for one's own, while it is open and with all orders carried out."""
        try:
            with self._lock:
                self.check_open()
                with interrupts.deferred():
                    self._carry_out()
                yield
        finally:
            self._settle()

    def _settle(self) -> None:
        """Carries out what was ordered, unless somebody else has the lock: who has it looks again after giving it back.
        This may be that very thread, collecting a generator, so nobody waits here."""
        with interrupts.deferred():
            while self._orders and self._lock.acquire(blocking=False):
                try:
                    self._carry_out()
                finally:
                    self._lock.release()

    def _carry_out(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def _drop(self, ids: set[int]) -> None:
        self._waiting = deque(one for one in self._waiting if one.id not in ids)
        for one in [one for one in (*self._reading, *self._running) if one.id in ids]:
            self._leave(one)

    # Who runs ---------------------------------------------------------------------------------------------------------

    def _launch_next(self, events: list[Event]) -> None:
        """The next launch."""
        if not self._reading:
            self._reading = self._next_group(events)
        if self._reading and not (self._running and self._others_are_due):
            self._read(events)
        elif self._running:
            self._others_are_due = False
            steps = self._pace.steps(min(one.most_steps() for one in self._running))
            self._go_on(self._running, steps, events)

    def _next_group(self, events: list[Event]) -> list[Completion]:
        """As many completions of the first request in line as can begin now, out of the line; the first has a cache
        with what is known of the prompt. Who cannot begin though nobody runs who might make room has failed."""
        places = self.launcher.batch - len(self._running)
        while self._waiting and places:
            first = self._waiting[0]
            alike = [one for one in self._waiting if one.request is first.request][:places]
            first.cache = self._sequence_of(first.ids)
            missing = pages_for(first.request.most_cached, first.cache.page_size) - len(first.cache.pages)
            of_each_other = missing + len(first.cache.pages) - (len(first.ids) - 1) // first.cache.page_size
            spare = self._unclaimed_pages() - missing
            if spare >= 0:
                first.cached_tokens = first.cache.length
                self._tokens_looked_up += len(first.ids)
                self._tokens_found += first.cached_tokens
                group = alike[: 1 + spare // of_each_other]
                self._waiting = deque(one for one in self._waiting if one not in group)
                return group
            first.cache.clear()
            first.cache = None
            if self._running:
                break
            self._waiting.popleft()
            message = f"{missing} pages of the KV cache are needed, there are {spare + missing}"
            events.append(Failed(first.id, f"{message}: somebody outside of the engine holds the others"))
        return []

    def _sequence_of(self, prompt_ids: Sequence[int]) -> CachedSequence:
        """A new sequence with the pages that are known to hold the beginning of a prompt."""
        sequence = self.launcher.cache.fork()
        sequence.clear()
        if self._prefixes is not None:
            pages, tokens = self._prefixes.lookup(prompt_ids)
            reused = self._manner.reused(tokens)
            sequence.adopt(pages[: reused // sequence.page_size], reused)
        return sequence

    def _unclaimed_pages(self) -> int:
        """Pages that nobody who has begun holds or may yet need."""
        page_size = self.launcher.cache.page_size
        claimed = sum(
            pages_for(one.request.most_cached, page_size) - (len(one.cache.pages) if one.cache is not None else 0)
            for one in (*self._reading, *self._running)
        )
        return self.launcher.cache.pool.available_pages - claimed

    def _leave(self, completion: Completion) -> None:
        """Frees the place and the pages of one who has begun; its tokens are kept for later ones if there is room."""
        if completion in self._running:
            self._running.remove(completion)
        else:
            self._reading.remove(completion)
            if self._reading and self._reading[0].cache is None:  # the prompt is read on for the others
                self._reading[0].cache, completion.cache = completion.cache, None
                self._reading[0].cached_tokens = completion.cached_tokens
        if completion.cache is not None:
            self._remember(completion)
            completion.cache.clear()
            completion.cache = None

    def _remember(self, completion: Completion) -> None:
        cache = completion.cache
        if self._prefixes is not None and cache is not None and not completion.has_failed:
            kept = self._manner.kept(len(completion.request.prompt_ids), cache.length)
            self._prefixes.insert(completion.ids[:kept], cache.pages)

    # What is launched -------------------------------------------------------------------------------------------------

    def _read(self, events: list[Event]) -> None:
        """One launch of the prompt that is read; behind its last token each completion samples its first."""
        group = self._reading
        prompt, cache = len(group[0].ids), group[0].cache
        assert cache is not None
        end = self._manner.end(prompt, len(group))
        if cache.length < end:
            self._read_some(end, events)
        else:
            for other in group[1:]:
                other.cache, other.cached_tokens = cache.fork(), group[0].cached_tokens
            self._go_on(group, 1, events)
        self._others_are_due = cache.length < end
        if group[0].made or group[0].has_ended:
            self._remember(group[0])
            self._reading, begun = [], group
            self._running += begun
            self._let_go(begun)

    def _read_some(self, end: int, events: list[Event]) -> None:
        """Brings tokens of a prompt, up to its first `end`, into the cache by one launch."""
        first = self._reading[0]
        assert first.cache is not None
        length = first.cache.length
        tokens = min(self.launch_steps * self._prompts.tokens, end - length)
        # One input more than tokens, where there is one: nothing is sampled, and the head need not run.
        inputs = first.request.prompt_ids[length : length + tokens + 1]
        part = first.part(inputs, tokens, self._manner.columns_of_step(tokens))
        result = self._prompts.launch_together([part])[0]
        self._pace.note(result.steps, result.seconds)
        for completion in self._reading:
            events += completion.take(part, result)

    def _go_on(self, completions: list[Completion], steps: int, events: list[Event]) -> None:
        """One launch that goes on from the last id of each."""
        parts = [one.part(one.ids[-1:], steps) for one in completions]
        results = self.launcher.launch_together(parts)
        self._pace.note(results[0].steps, results[0].seconds)
        for completion, part, result in zip(completions, parts, results, strict=True):
            events += completion.take(part, result)
        self._let_go(completions)

    def _let_go(self, completions: Sequence[Completion]) -> None:
        """Ends those that are complete, or cannot go on."""
        for completion in list(completions):
            if completion.has_ended and completion in self._running:
                self._leave(completion)
