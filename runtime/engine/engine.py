"""The engine: requests in, events out, one launch a step, of up to `batch` sequences together.

A launch has one way: `scheduler` decides it, `running` carries it out and makes events of it, `scheduler` settles what
follows from it. Here they are put one after the other, with what others ask for meanwhile in between.

How steps are grouped into launches changes no bits. Who else is decoded changes how attention splits the keys, thus
the last bits of its sums; with a plan of a fixed `kv_chunk` not even those, and then neither what the prefix cache
holds nor who had to give pages back changes a bit (see `prefill_rules`).
Knows nothing of text, checkpoints, who asks, or the kernel's parameters (`launcher` does).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.models.logprobs import TokenLogprobs
from cheetah.runtime import interrupts
from cheetah.runtime.device.interface import LaunchCancelled
from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.draft_model import DraftModel
from cheetah.runtime.engine.drafting import Speculation
from cheetah.runtime.engine.embedding import pooled_states
from cheetah.runtime.engine.kv_cache import pages_for
from cheetah.runtime.engine.launch_order import LaunchOrder, LogitsBuffers
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.launches import Part
from cheetah.runtime.engine.prefill import Prefill
from cheetah.runtime.engine.prefill_rules import FewestSteps, SameSteps
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.prompt_passes import PassLauncher
from cheetah.runtime.engine.queues import Queues
from cheetah.runtime.engine.requests import Event, Load, Request
from cheetah.runtime.engine.running import RunningLaunch, Untold
from cheetah.runtime.engine.scheduler import Scheduler
from cheetah.runtime.engine.step_time import StepTime

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer


class Engine:
    """Makes completions, up to `launcher.batch` at a time.

    launch_steps: most steps of one launch (default: what the kernel allows); for tests and for finding faults.
    prefixes: keeps the pages of prompts and completions for later ones that begin alike, which then read only the rest;
    with a plan of a fixed `kv_chunk` those of prompts.
    prompts: launches of another kernel over the same caches, that reads prompts; by default the same.
    solo: launches of another kernel over the same caches, for one sequence by itself; by default the same.
    passes: launches of kernels that read many tokens of a prompt at once, with room for fewest first; without them, or
    of a few tokens, `prompts` does.
    chunk_tokens: most tokens of a prompt in a launch while others decode, who wait for it; by default what takes about
    a tenth of a second. 0: all that a launch takes, and they wait until the prompt is read.
    speculation: how tokens are drafted, which `launcher` verifies; no token is another for it.
    logits: gives buffer 0 or 1 for the logits of launches in which somebody wants logprobs, in the host's memory;
    without it nobody may.

    Requests wait in line for a place and for pages: a completion is begun when there are pages for what is known of it
    and for its next launch. `add` and `abort` may be called by any thread at any time, also while another one is in
    `step` and by what is collected in the middle of one; they never wait. Nothing is lost to a KeyboardInterrupt but
    the events of the step in which it came: who must have those steps within `interrupts.deferred`.
    """

    def __init__(
        self,
        launcher: Launcher,
        launch_steps: int | None = None,
        prefixes: PrefixCache | None = None,
        prompts: Launcher | None = None,
        chunk_tokens: int | None = None,
        solo: Launcher | None = None,
        logits: Callable[[int], Buffer] | None = None,
        passes: Sequence[PassLauncher] = (),
        speculation: Speculation | None = None,
        draft_model: DraftModel | None = None,
    ):
        prompts = prompts or launcher
        self.launcher, self.prefixes, self._passes = launcher, prefixes, passes
        self.launch_steps = min(launch_steps or launcher.max_steps, launcher.max_steps, prompts.max_steps)
        rule_of = SameSteps if launcher.kv_chunk else FewestSteps
        rule = rule_of(prompts.tokens, launcher.cache.page_size, bool(passes))
        self._numbers = count()
        self._changes: deque[Callable[[], None]] = deque()  # that wait for the end of the launch under way
        self._lock = threading.Lock()  # of everything below, and of the device
        self._arrived: deque[Completion] = deque()  # they are in line at the end of the launch under way
        self._logits = LogitsBuffers(logits)
        launch_tokens = self.launch_steps * (1 + (speculation.drafts if speculation else 0))
        self._queues = Queues(launcher, launch_tokens, prefixes, rule)
        self._scheduler = Scheduler(
            self._queues,
            Prefill(self._queues, prompts, passes, self._logits, self.launch_steps, chunk_tokens),
            launcher,
            solo or launcher,
            self._logits,
            StepTime(self.launch_steps),
            speculation,
            draft_model,
        )
        self._is_closed, self._draft_model = False, draft_model
        self._running: RunningLaunch | None = None
        self._events: list[Event] = []
        self._untold: list[Untold] = []

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        is_at_work = self._changes or self._running or not self._queues.is_empty
        return not (is_at_work or self._events or self._untold)

    def load(self) -> Load:
        """What is going on, as far as it can be told without waiting for a step."""
        return replace(self._queues.load(), decoded=self._scheduler.decoded, latest=self._scheduler.latest)

    def check(self, request: Request) -> None:
        """CheetahError for a request that can never fit."""
        assert self._logits.are_there or not request.wants_logits, "there is no buffer for logits"
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
        read: list[TokenLogprobs] = []
        completions = [Completion(next(self._numbers), request, index, read) for index in range(request.count)]
        self._arrived.extend(completions)
        self._change(self._put_in_line)
        return tuple(one.id for one in completions)

    def abort(self, ids: Iterable[int]) -> None:
        """Takes completions out, wherever they are, and gives their pages back: those in a launch end within a few
        steps, and leave at its end. Nothing for one that has ended."""
        wanted = set(ids)
        if (running := self._running) is not None:
            running.cancel(wanted)
        self._change(lambda: self._queues.drop(wanted))

    def step(self) -> list[Event]:
        """What a launch has made since the last step: it waits until there is something, or for the launch's end.

        Without a launch under way it starts the next: of the next prompt, as far as there is room, or of all who run. A
        prompt of several launches lets those make tokens in between. A device that does not return before a launch has
        ended makes all of it in one step. An empty list if nothing was made, or there is nothing to do."""
        events: list[Event] = []
        with self._locked(), interrupts.deferred(), contextlib.suppress(LaunchCancelled):
            # A launch that is cancelled has changed nothing, and the interrupt comes behind it.
            if not self._events:
                self._advance()
            events, self._events = self._events, []
        return events

    # A launch's way ---------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Goes on with the launch under way, or with the next, until something was made or it has ended, and with it
        those that belong to it."""
        known = len(self._events)
        if self._running is None:
            self._start_next()
        while self._running is not None and len(self._events) == known and self._goes_to_its_end(self._running):
            if self._scheduler.is_amid:
                self._start_next()

    def _start_next(self) -> None:
        """Decides and starts the next launch, if there is one. What waits for logprobs is told meanwhile."""
        order = self._scheduler.next_launch()
        self._events += self._queues.take_failures()
        if order is not None:
            with self._giving_up(order):
                running = self._running = RunningLaunch(order)
                running.start()
        untold, self._untold = self._untold, []
        for one in untold:
            self._events += one.told()

    def _goes_to_its_end(self, running: RunningLaunch) -> bool:
        """Takes what was made, up to its end if that has come; else False: something was made, or an interrupt
        waits."""
        order = running.order
        with self._giving_up(order):
            if not running.has_ended():
                self._events += running.fresh()
                if self._arrived and self._scheduler.shall_make_way(order, running.made):
                    running.end_early()
                return False
            results = running.finish()
            self._running = None
            if self._draft_model is not None:
                self._draft_model.keep(order, running.launch, running.starts)
        events, untold = running.rest(results)
        self._events += events
        self._untold += untold
        self._scheduler.settle(order, results)
        return True

    @contextlib.contextmanager
    def _giving_up(self, order: LaunchOrder) -> Iterator[None]:
        """What ends a launch otherwise has all be as before it."""
        try:
            yield
        except BaseException:
            self._running = None
            self._scheduler.give_up(order)
            raise

    def _end_launch(self) -> None:
        """Waits for the end of the launch under way; what it made is said by the next step."""
        while not self._is_between_launches:
            self._advance()

    def score(self, token_ids: Sequence[int], logits: Buffer) -> npt.NDArray[np.float32] | None:
        """float32 [len(token_ids), vocab]: row i are the logits after the ids 0 .. i. None, with nothing done, while
        others hold the pages: try again after a step."""
        launcher = self.launcher
        launcher.cache.check_fits(len(token_ids))
        most = min(launcher.score_tokens(logits), self.launch_steps * launcher.tokens)
        most = self._passes[-1].tokens if self._passes else most
        with self._locked():
            self._end_launch()
            pages = pages_for(len(token_ids), launcher.cache.page_size)
            if not self.is_idle and pages > self._queues.unclaimed_pages():
                return None
            launcher.restart()
            parts: list[npt.NDArray[np.float32]] = []
            try:
                for first in range(0, len(token_ids), most):
                    with interrupts.deferred():
                        parts += self._score(token_ids[first : first + most], logits)
            finally:
                launcher.restart()
        return np.concatenate(parts)

    def _score(self, token_ids: Sequence[int], logits: Buffer) -> Iterable[npt.NDArray[np.float32]]:
        """The logits after each of the next tokens of the launcher's own cache, by a pass where there are any: together
        a gigabyte of 2048 tokens, which is put together once."""
        launcher = self.launcher
        if not self._passes:
            return [launcher.score(token_ids, logits)]
        passes, count = self._passes[-1], len(token_ids)
        part = Part(launcher.cache, token_ids, count, per_step=passes.tile_tokens, wanted=count)
        passes.launch_together([part])
        return passes.head.score(launcher.cache, range(count), logits)

    def embed(self, prompts: Sequence[Sequence[int]], is_mean: bool) -> list[npt.NDArray[np.float32]] | None:
        """float32 [hidden] of each of the first prompts, of as many as a pass reads, or of the first one by itself: the
        last layer's output behind its norm, of the last token, or on average. None, with nothing done, while others
        hold the pages: try again after a step."""
        if not self._passes:
            raise CheetahError("embeddings are made by passes over prompts, of which there are none: see prompt_passes")
        with self._locked():
            self._end_launch()
            count = self._fit_for_embedding(prompts)
            if not count:
                return None
            caches = [self.launcher.cache.fork() for _ in range(count)]
            try:
                for cache in caches:
                    cache.clear()
                return pooled_states(self._passes, prompts[:count], caches, is_mean)
            finally:
                for cache in caches:
                    cache.clear()

    def _fit_for_embedding(self, prompts: Sequence[Sequence[int]]) -> int:
        """How many of the first prompts are read together. An idle engine takes one at least."""
        room, page_size, count = self._queues.unclaimed_pages(), self.launcher.cache.page_size, 0
        longest, states = self._passes[-1], self.launcher.cache.pool.states
        starts, lengths = [0] * len(prompts), [len(prompt) for prompt in prompts]
        for number, tokens in enumerate(longest.fitting(starts, lengths, longest.tokens)):
            room -= pages_for(lengths[number], page_size)
            lacks_state = states.count > 0 and number >= states.free
            if room < 0 or lacks_state or (number and tokens < lengths[number]):
                break
            count += 1
        return count or int(self.is_idle)

    def reset_prefixes(self) -> None:
        """Forgets the pages of prompts and completions that have ended, at the end of the launch under way."""
        if self.prefixes is not None:
            self._change(self.prefixes.clear)

    def close(self) -> None:
        """Refuses every later call; a launch that runs is waited for."""
        with self._lock:
            self._is_closed = True
            with contextlib.suppress(CheetahError):
                self._end_launch()

    # Changes from outside ---------------------------------------------------------------------------------------------

    @property
    def _is_between_launches(self) -> bool:
        return self._running is None and not self._scheduler.is_amid

    def _change(self, change: Callable[[], None]) -> None:
        """Has something done between two launches: now if none runs."""
        self._changes.append(change)
        self._try_changes()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The engine for one's own, while it is open and with all changes made."""
        try:
            with self._lock:
                self.check_open()
                with interrupts.deferred():
                    self._make_changes()
                yield
        finally:
            self._try_changes()

    def _try_changes(self) -> None:
        """Makes the changes that were asked for, unless somebody else has the lock: who has it looks again after giving
        it back. This may be that very thread, collecting a generator, so nobody waits here."""
        with interrupts.deferred():
            while self._changes and self._is_between_launches and self._lock.acquire(blocking=False):
                try:
                    self._make_changes()
                finally:
                    self._lock.release()

    def _make_changes(self) -> None:
        while self._changes and self._is_between_launches:
            self._changes.popleft()()

    def _put_in_line(self) -> None:
        while self._arrived:
            self._queues.waiting.append(self._arrived.popleft())
