"""The engine: requests in, events out, one launch a step, of up to `batch` sequences together.

Decides whose turn it is and how many tokens each launch makes. Who has a place and pages is known to `roster`; prompts
are read by `reader`, with launches of those who decode in between; `courses` brings a launch from its parts to events.

How steps are grouped into launches changes no bits. Who else is decoded changes how attention splits the keys, thus
the last bits of its sums; with a plan of a fixed `kv_chunk` not even those, and then neither what the prefix cache
holds nor who had to give pages back changes a bit (see `prompt_reading`).
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
from cheetah.models.logprobs import TokenLogprobs
from cheetah.runtime import interrupts
from cheetah.runtime.device.interface import LaunchCancelled
from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.courses import Course, Courses, steps_with
from cheetah.runtime.engine.embedding import pooled_states
from cheetah.runtime.engine.flights import Part
from cheetah.runtime.engine.kv_cache import pages_for
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.pace import LaunchPace
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.prompt_passes import PassLauncher
from cheetah.runtime.engine.prompt_reading import FewestSteps, SameSteps
from cheetah.runtime.engine.reader import PromptReader
from cheetah.runtime.engine.requests import Event, Load, Request
from cheetah.runtime.engine.roster import Roster

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer


WORTH_ENDING_S = 0.02
FEWEST_STEPS = 4
"""A launch ends for somebody who comes only where its rest would take longer than the one, to end it costs a step and
a launch more, and after as many steps as the other, so that those who decode go on however many come."""


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
    ):
        self.launcher, self._prompts, self._solo = launcher, prompts or launcher, solo or launcher
        self._passes = passes
        self.launch_steps = min(launch_steps or launcher.max_steps, launcher.max_steps, self._prompts.max_steps)
        manner_of = SameSteps if launcher.kv_chunk else FewestSteps
        manner = manner_of(self._prompts.tokens, launcher.cache.page_size, bool(passes))
        self._numbers = count()
        self._orders: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # of everything below, and of the device
        self._arrived: deque[Completion] = deque()  # they are in line at the end of the launch under way
        self._pace = LaunchPace(self.launch_steps)
        self._roster = Roster(launcher, self.launch_steps, prefixes, manner)
        self._has_logits, self._courses = logits is not None, Courses(logits)
        self._reader = PromptReader(
            *(self._roster, self._courses, self._prompts, passes, self.launch_steps, chunk_tokens, self._pace)
        )
        self._is_closed = False
        self._course: Course | None = None
        self._course_events: list[Event] = []
        self._unsaid: list[Event] = []

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        is_at_work = self._orders or self._course or not self._roster.is_empty
        return not (is_at_work or self._unsaid) and self._courses.have_told_all

    def load(self) -> Load:
        """What is going on, as far as it can be told without waiting for a step."""
        return self._roster.load()

    def check(self, request: Request) -> None:
        """CheetahError for a request that can never fit."""
        assert self._has_logits or not request.wants_logits, "there is no buffer for logits"
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
        self._order(self._put_in_line)
        return tuple(one.id for one in completions)

    def abort(self, ids: Iterable[int]) -> None:
        """Takes completions out, wherever they are, and gives their pages back: those in a launch end within a few
        steps, and leave at its end. Nothing for one that has ended."""
        wanted = set(ids)
        self._courses.cancel(wanted)
        self._order(lambda: self._roster.drop(wanted))

    def step(self) -> list[Event]:
        """What a launch has made since the last step: it waits until there is something, or for the launch's end.

        Without a launch under way it starts the next: of the next prompt, as far as there is room, or of all who run. A
        prompt of several launches lets those make tokens in between. A device that does not return before a launch has
        ended makes all of it in one step. An empty list if nothing was made, or there is nothing to do."""
        events: list[Event] = []
        with self._locked(), interrupts.deferred(), contextlib.suppress(LaunchCancelled):
            # A launch that is cancelled has changed nothing, and the interrupt comes behind it.
            events, self._unsaid = self._unsaid, []
            if not events:
                events = self._advance()
        return events

    def _advance(self) -> list[Event]:
        """Goes on with the launch under way, or with the next, until something was made or it has ended."""
        if self._course is None:
            self._course_events = []
            self._course = self._launch_next(self._course_events)
        try:
            next(self._course)
        except BaseException as end:
            self._course = None
            if not isinstance(end, StopIteration):
                raise
        events = [*self._course_events]
        self._course_events.clear()
        return events

    def _end_course(self) -> None:
        """Waits for the end of the launch under way; what it made is said by the next step."""
        while self._course is not None:
            self._unsaid += self._advance()

    def score(self, token_ids: Sequence[int], logits: Buffer) -> npt.NDArray[np.float32] | None:
        """float32 [len(token_ids), vocab]: row i are the logits after the ids 0 .. i. None, with nothing done, while
        others hold the pages: try again after a step."""
        launcher = self.launcher
        launcher.cache.check_fits(len(token_ids))
        most = min(launcher.score_tokens(logits), self.launch_steps * launcher.tokens)
        most = self._passes[-1].tokens if self._passes else most
        with self._locked():
            self._end_course()
            pages = pages_for(len(token_ids), launcher.cache.page_size)
            if not self.is_idle and pages > self._roster.unclaimed_pages():
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
            self._end_course()
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
        room, page_size, count = self._roster.unclaimed_pages(), self.launcher.cache.page_size, 0
        longest = self._passes[-1]
        starts, lengths = [0] * len(prompts), [len(prompt) for prompt in prompts]
        for number, tokens in enumerate(longest.fitting(starts, lengths, longest.tokens)):
            room -= pages_for(lengths[number], page_size)
            if room < 0 or (number and tokens < lengths[number]):
                break
            count += 1
        return count or int(self.is_idle)

    def close(self) -> None:
        """Refuses every later call; a launch that runs is waited for."""
        with self._lock:
            self._is_closed = True
            with contextlib.suppress(CheetahError):
                self._end_course()

    # Orders from outside ----------------------------------------------------------------------------------------------

    def _order(self, order: Callable[[], None]) -> None:
        """Has something done between two launches: now if none runs."""
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
            while self._orders and self._course is None and self._lock.acquire(blocking=False):
                try:
                    self._carry_out()
                finally:
                    self._lock.release()

    def _carry_out(self) -> None:
        while self._orders and self._course is None:
            self._orders.popleft()()

    def _put_in_line(self) -> None:
        while self._arrived:
            self._roster.waiting.append(self._arrived.popleft())

    # What is launched -------------------------------------------------------------------------------------------------

    def _launch_next(self, events: list[Event]) -> Course:
        """The next launch; gives way when it has added to `events`, and ends with it.

        Behind one that has read prompts to their ends all make a token, the first one of those."""
        roster, reader = self._roster, self._reader
        reader.begin(events)
        if roster.running and reader.first_tokens_are_due:
            reader.first_tokens_are_due = False
            yield from self._go_on(1, events)
        elif roster.running and (reader.others_are_due or not roster.reading):
            reader.others_have_a_turn()
            most = min(one.most_steps() for one in roster.running)
            yield from self._go_on(self._pace.steps(most), events)
        elif roster.reading:
            yield from reader.read(events)
        else:
            self._courses.judge(events)

    def _go_on(self, steps: int, events: list[Event]) -> Course:
        """One launch of all who decode, from the ids of each that are not cached: the last, or more if it came back."""
        roster = self._roster
        completions = [*roster.running]
        logits = self._courses.logits_for(any(one.request.logprobs is not None for one in completions))
        steps = steps_with(logits, steps, self.launcher, self._solo)
        for one in sorted(completions, key=lambda one: one.id):
            roster.make_room(one, steps, events)
        together = [one for one in completions if one.cache is not None]
        parts = [one.part(one.uncached_ids(steps + 1), steps) for one in together]
        if not parts:
            return
        launcher, takers = self._solo if len(parts) == 1 else self.launcher, [[one] for one in together]
        results = yield from self._courses.fly(launcher, parts, takers, events, logits, shall_end=self._shall_make_way)
        for one in together:
            one.go_on_from_last()
        self._pace.note(results[0].steps, results[0].seconds)
        self._reader.note_decoding(results[0])
        roster.let_go(completions)

    def _shall_make_way(self, steps: int, made: int) -> bool:
        """Whether a launch of so many steps shall end for those who have come meanwhile, and can begin. While a prompt
        is read in parts it is the turn of those who decode."""
        roster = self._roster
        can_begin = self._arrived and not (roster.waiting or roster.reading) and roster.has_room
        return bool(can_begin) and made >= FEWEST_STEPS and (steps - made) * self._pace.step_s > WORTH_ENDING_S
