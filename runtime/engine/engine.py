"""The engine: requests in, events out, one launch a step, of up to `batch` sequences together.

Decides who is launched together, how many tokens each launch makes and when a completion ends. A completion joins
between two launches, first come first served: its prompt is read, in passes together with the prompts of others, with
launches of those who decode in between, then it decodes along with them, until it ends and the next in line takes its
place. Where pages run out the one that came last gives its own back, and reads again what it had once there is room.

How steps are grouped into launches changes no bits. Who else is decoded changes how attention splits the keys, thus
the last bits of its sums; with a plan of a fixed `kv_chunk` not even those, and then neither what the prefix cache
holds nor who had to give pages back changes a bit (see `prompt_reading`).
Knows nothing of text, checkpoints, who asks, or the kernel's parameters (`launcher` does).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, repeat
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.manifest import NO_PAGE
from cheetah.models.logprobs import TokenLogprobs, token_logprobs
from cheetah.runtime import interrupts
from cheetah.runtime.device.interface import LaunchCancelled
from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.embedding import pooled_states
from cheetah.runtime.engine.flights import Flight, KernelLaunches, LaunchResult, Part
from cheetah.runtime.engine.heads import HeadLauncher
from cheetah.runtime.engine.kv_cache import CachedSequence, PagesExhausted, pages_for
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.pace import LAUNCH_SECONDS, LaunchPace
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.prompt_passes import PassLauncher
from cheetah.runtime.engine.prompt_reading import FewestSteps, SameSteps
from cheetah.runtime.engine.requests import Event, Failed, Load, Made, Request
from cheetah.runtime.engine.step_launches import StepLaunches

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer


WORTH_ENDING_S = 0.02
FEWEST_STEPS = 4
"""A launch ends for somebody who comes only where its rest would take longer than the one, to end it costs a step and
a launch more, and after as many steps as the other, so that those who decode go on however many come."""

Course = Generator[None, None, None]
"""The steps of a launch: gives way when there are new events."""

Group = list[Completion]
"""Completions of one request that begin together. While their prompt is read, the first has the cache."""


@dataclass(frozen=True)
class _Unjudged:
    """What a completion has made, but for the logprobs of its ids: `rows` of logits float32 [vocab], one of each, where
    the launch wrote them. They are read before another launch writes there."""

    events: Sequence[Event]
    rows: Sequence[npt.NDArray[np.float32]]
    count: int

    def judged(self) -> list[Event]:
        """The events as they are told."""
        return [replace(event, logprobs=self._of(event)) if isinstance(event, Made) else event for event in self.events]

    def _of(self, made: Made) -> tuple[TokenLogprobs, ...]:
        return tuple(
            token_logprobs(row, token, self.count) for row, token in zip(self.rows, made.token_ids, strict=True)
        )


@dataclass(frozen=True)
class _Flying:
    """The launch under way, and the ids of those who take each part of it."""

    launcher: KernelLaunches
    flight: Flight
    ids: Sequence[Sequence[int]]

    def cancel(self, ids: set[int]) -> None:
        """Ends the parts that nobody else wants."""
        for number, takers in enumerate(self.ids):
            if ids.issuperset(takers):
                self.launcher.cancel(self.flight, number)

    def end(self) -> None:
        """Ends it for all, who go on from there in another."""
        for number in range(len(self.ids)):
            self.launcher.cancel(self.flight, number)


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
        self._prefixes = prefixes
        manner = SameSteps if launcher.kv_chunk else FewestSteps
        self._manner = manner(self._prompts.tokens, launcher.cache.page_size, bool(passes))
        self._pace, self._reading_pace = LaunchPace(self.launch_steps), LaunchPace(self.launch_steps)
        self._pass_paces = [LaunchPace(one.tokens // one.tile_tokens) for one in passes]
        self._chunk_tokens, self._logits = chunk_tokens, logits
        self._numbers = count()
        self._orders: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # of everything below, and of the device
        self._arrived: deque[Completion] = deque()  # they are in line at the end of the launch under way
        self._waiting: deque[Completion] = deque()
        self._reading: list[Group] = []  # in the order in which they came
        self._running: list[Completion] = []
        self._first_tokens_are_due = False
        self._others_waited_s = 0.0  # for prompts to be read, since their last launch
        self._others_are_due = False
        self._is_closed = False
        self._course: Course | None = None
        self._course_events: list[Event] = []
        self._unsaid: list[Event] = []
        self._flying: _Flying | None = None
        self._unjudged: list[_Unjudged] = []
        self._turn = 0  # the buffer for logits that nobody reads
        self._tokens_looked_up = self._tokens_found = self._preemptions = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        is_at_work = self._orders or self._waiting or self._reading or self._running or self._course
        return not (is_at_work or self._unsaid or self._unjudged)

    def load(self) -> Load:
        """What is going on, as far as it can be told without waiting for a step."""
        begun = self._begun
        held = {page for one in begun if (cache := one.cache) is not None for page in [*cache.pages]} - {NO_PAGE}
        used = len(held) / self.launcher.cache.pool.pages
        prompts = (self._tokens_looked_up, self._tokens_found)
        return Load(len(begun), len(self._waiting), used, *prompts, self._preemptions)

    def check(self, request: Request) -> None:
        """CheetahError for a request that can never fit."""
        assert self._logits is not None or not request.wants_logits, "there is no buffer for logits"
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
        if (flying := self._flying) is not None:
            flying.cancel(wanted)
        self._order(lambda: self._drop(wanted))

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
            if not self.is_idle and pages_for(len(token_ids), launcher.cache.page_size) > self._unclaimed_pages():
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
        room, page_size, count = self._unclaimed_pages(), self.launcher.cache.page_size, 0
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
            self._waiting.append(self._arrived.popleft())

    def _drop(self, ids: set[int]) -> None:
        self._waiting = deque(one for one in self._waiting if one.id not in ids)
        for one in [one for one in self._begun if one.id in ids]:
            self._leave(one)

    # Who runs ---------------------------------------------------------------------------------------------------------

    @property
    def _begun(self) -> Group:
        """Those that have a place: who is read, then who decodes."""
        return [*chain(*self._reading), *self._running]

    def _launch_next(self, events: list[Event]) -> Course:
        """The next launch; gives way when it has added to `events`, and ends with it.

        Behind one that has read prompts to their ends all make a token, the first one of those."""
        self._begin_reading(events)
        if self._running and self._first_tokens_are_due:
            self._first_tokens_are_due = False
            yield from self._go_on(self._running, 1, events)
        elif self._running and (self._others_are_due or not self._reading):
            self._others_are_due, self._others_waited_s = False, 0.0
            most = min(one.most_steps() for one in self._running)
            yield from self._go_on(self._running, self._pace.steps(most), events)
        elif self._reading:
            yield from self._read(events)
        else:
            self._judge(events)

    def _begin_reading(self, events: list[Event]) -> None:
        """Takes who can begin now out of the line, first come first served: one request, and where there are passes
        more, as long as one has room for them."""
        while self._waiting and (not self._reading or self._can_be_read_along(self._waiting[0])):
            if not (group := self._next_group(events)):
                break
            self._reading.append(group)
            self._begin_to_decode()  # if only the last token of the prompt is left

    def _can_be_read_along(self, completion: Completion) -> bool:
        """Whether it takes a place in the pass that reads others. Not where it can wait for their pages and then has a
        tile of tokens less to read: a pass more costs no more than that."""
        if not self._passes:
            return False
        longest = self._passes[-1]
        if not longest.has_columns_for([*map(self._left_to_read, self._reading), 1]):
            return False
        if self._prefixes is None:
            return True
        known = self._prefixes.known(completion.ids) + longest.tile_tokens
        beginning = completion.ids[:known]
        return len(beginning) < known or all(group[0].ids[:known] != beginning for group in self._reading)

    def _next_group(self, events: list[Event]) -> list[Completion]:
        """As many completions of the first request in line as can begin now, out of the line; the first has a cache
        with what is known of its ids. Who cannot begin though nobody runs who might make room has failed."""
        places = self.launcher.batch - len(self._begun)
        while self._waiting and places:
            first = self._waiting[0]
            alike = [one for one in self._waiting if one.request is first.request and not one.made][:places]
            first.cache = self._sequence_of(first)
            missing = self._claim(first) - len(first.cache.pages)
            of_each_other = missing + len(first.cache.pages) - (len(first.ids) - 1) // first.cache.page_size
            spare = self._unclaimed_pages() - missing
            if spare >= 0:
                first.cached_tokens = first.cache.length
                self._tokens_looked_up += len(first.ids)
                self._tokens_found += first.cached_tokens
                group = [first] if first.made else alike[: 1 + spare // of_each_other]
                self._waiting = deque(one for one in self._waiting if one not in group)
                return group
            first.cache.clear()
            first.cache = None
            if self._begun:
                break
            self._waiting.popleft()
            message = f"{missing} pages of the KV cache are needed, there are {spare + missing}"
            events.append(Failed(first.id, f"{message}: somebody outside of the engine holds the others"))
        return []

    def _sequence_of(self, completion: Completion) -> CachedSequence:
        """A new sequence with the pages that are known to hold the beginning of its ids, unless all must be read."""
        sequence = self.launcher.cache.fork()
        sequence.clear()
        if self._prefixes is not None and not completion.reads_logprobs:
            pages, tokens = self._prefixes.lookup(completion.ids)
            reused = self._manner.reused(tokens)
            sequence.adopt(pages[: reused // sequence.page_size], reused)
        return sequence

    def _claim(self, completion: Completion) -> int:
        """Pages that it shall have: for all its ids and its next launch. One that had to give its pages back claims all
        that it may need, so that it seldom has to again."""
        request = completion.request
        soon = len(completion.ids) - 1 + self.launch_steps
        tokens = request.most_cached if completion.preemptions else min(request.most_cached, soon)
        return pages_for(tokens, self.launcher.cache.page_size)

    def _unclaimed_pages(self) -> int:
        """Pages that nobody who has begun holds or claims."""
        claimed = sum(
            max(0, self._claim(one) - (len(one.cache.pages) if one.cache is not None else 0)) for one in self._begun
        )
        return self.launcher.cache.pool.available_pages - claimed

    def _make_room(self, completion: Completion, tokens: int, events: list[Event]) -> bool:
        """Pages for `tokens` more of it, if need be those of whoever came last. False if that is itself, or if nobody
        else could give any, so that it has failed: then it has no cache any more."""
        while completion.cache is not None:
            try:
                self.launcher.make_room(completion.cache, tokens)
                return True
            except PagesExhausted as shortage:
                holders = [one for one in self._begun if one.cache is not None]
                if len(holders) > 1:
                    self._preempt(max(holders, key=lambda one: one.id))
                    continue
                completion.has_ended = completion.has_failed = True
                events.append(Failed(completion.id, str(shortage)))
                self._leave(completion)
        return False

    def _preempt(self, completion: Completion) -> None:
        """Back in line, before all that came later. Its pages are kept for it as long as nobody takes them."""
        self._preemptions += 1
        completion.preemptions += 1
        self._leave(completion)
        self._waiting = deque(sorted([*self._waiting, completion], key=lambda one: one.id))

    def _leave(self, completion: Completion) -> None:
        """Frees the place and the pages of one who has begun; its tokens are kept for later ones if there is room."""
        if completion in self._running:
            self._running.remove(completion)
        else:
            group = next(group for group in self._reading if completion in group)
            group.remove(completion)
            if group and group[0].cache is None:  # the prompt is read on for the others
                group[0].cache, completion.cache = completion.cache, None
                group[0].cached_tokens = completion.cached_tokens
            self._reading = [group for group in self._reading if group]
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

    def _read(self, events: list[Event]) -> Course:
        """One launch of what is read."""
        others_wait, way = bool(self._running), self._next_pass()
        yield from self._read_in_steps(self._reading[0], events) if way is None else self._read_in_pass(*way, events)
        self._begin_to_decode()
        waited_enough = self._others_waited_s >= LAUNCH_SECONDS
        self._others_are_due = others_wait and self._chunk_tokens != 0 and (waited_enough or bool(self._reading))

    def _known(self, group: Group) -> int:
        """How many of its ids are read as a prompt."""
        return self._manner.read_as_prompt(len(group[0].request.prompt_ids), len(group[0].ids))

    def _left_to_read(self, group: Group) -> int:
        """Tokens that are left to be read as a prompt."""
        cache = group[0].cache
        assert cache is not None
        return self._manner.left(self._known(group), cache.length)

    def _begin_to_decode(self) -> None:
        """Those whose prompt has been read."""
        for group in [group for group in self._reading if not self._left_to_read(group)]:
            self._part_ways(group)
            self._reading.remove(group)
            self._remember(group[0])
            self._running += group
            self._first_tokens_are_due |= not group[0].made
            self._let_go(group)

    def _part_ways(self, group: Group) -> None:
        """Gives each of a group a cache: the first has that of all, the others forks of it."""
        first, cache = group[0], group[0].cache
        assert cache is not None
        for other in group[1:]:
            if other.cache is None:
                other.cache, other.cached_tokens = cache.fork(), first.cached_tokens

    def _unread_last_token(self, group: Group) -> None:
        """A prompt that has been read to its end, with nothing chosen behind it, is as if its last token had not."""
        first, others = group[0], group[1:]
        assert first.cache is not None
        first.cache.truncate(len(first.ids) - 1)
        for other in others:
            if other.cache is not None:
                other.cache.clear()
                other.cache = None

    def _left_in_pass(self, group: Group) -> int:
        """Tokens that are left to be read, or as many as can be judged by one launch, where others wait for it."""
        left, first = self._left_to_read(group), group[0]
        if not (first.reads_logprobs and self._running and self._chunk_tokens != 0):
            return left
        head = self._passes[0].head
        return min(left, self._fitting(self._logits_for(True), self.launch_steps, head) * head.tokens)

    def _next_pass(self) -> tuple[PassLauncher, LaunchPace, list[tuple[Group, int]]] | None:
        """The pass that reads the next tokens of those who are read, in order: who launches, the pace that this keeps,
        and how many tokens of each. None where steps read the first one's."""
        if not self._passes:
            return None
        left = [self._left_in_pass(group) for group in self._reading]
        number = next((i for i, one in enumerate(self._passes) if one.has_columns_for(left)), -1)
        passes, pace = self._passes[number], self._pass_paces[number]
        starts = [group[0].cache.length for group in self._reading if group[0].cache is not None]
        counts = passes.fitting(starts, left, self._chunk(passes.tokens, passes.tile_tokens, pace))
        if not self._manner.takes_pass(sum(counts)):
            return None
        return passes, pace, [*zip(self._reading, counts, strict=False)]

    def _read_in_pass(
        self, passes: PassLauncher, pace: LaunchPace, counts: list[tuple[Group, int]], events: list[Event]
    ) -> Course:
        """Brings the next tokens of several prompts into the cache by one launch, and chooses what follows those that
        it has read to their ends."""
        for group, tokens in counts:
            if group in self._reading:
                self._make_room(group[0], tokens, events)
        # Who had to give its pages back is not read; one of several has left its cache to the next.
        together = [(group, tokens) for group, tokens in counts if group in self._reading]
        if not together:
            return
        groups = [group for group, _ in together]
        parts = [group[0].part_of_pass(tokens, passes.tile_tokens) for group, tokens in together]
        result = (yield from self._fly(passes, parts, groups, events))[0]
        self._note_reading(result, pace)
        rows = [*accumulate((part.wanted for part in parts), initial=0)]
        for group, part, first_row in zip(groups, parts, rows, strict=False):
            if group[0].reads_logprobs:
                yield from self._judge_prompt(passes.head, group, range(first_row, first_row + part.wanted), events)
        last_rows = [(group, end - 1) for group, part, end in zip(groups, parts, rows[1:], strict=True) if part.samples]
        if last_rows:
            yield from self._choose_first(passes.head, last_rows, events)

    def _judge_prompt(self, head: HeadLauncher, group: Group, rows: range, events: list[Event]) -> Course:
        """What the ids behind the tokens that a pass has just read were worth. rows: of their hidden states."""
        first, cache = group[0], group[0].cache
        assert cache is not None
        begin = cache.length - len(rows)
        del first.prompt_logprobs[begin:]  # those behind were known before it gave its pages back
        following = first.request.prompt_ids[begin + 1 : cache.length + 1]
        done = 0
        while done < len(following):
            logits = self._logits_for(True)
            most = self._fitting(logits, self.launch_steps, head) * head.tokens
            some = following[done : done + most]
            part = head.part_without_samples(cache, rows[done : done + len(some)])
            yield from self._fly(head, [part], [group], events, logits, some)
            done += len(some)

    def _choose_first(self, head: HeadLauncher, last_rows: list[tuple[Group, int]], events: list[Event]) -> Course:
        """The tokens behind prompts that have been read. last_rows: where the hidden state of each one's last token
        is."""
        for group, _ in last_rows:
            self._part_ways(group)
        takers = [(one, row) for group, row in last_rows for one in group]
        parts = [one.part([row], 1) for one, row in takers]
        logits = self._logits_for(any(one.request.logprobs is not None for one, _ in takers))
        try:
            result = (yield from self._fly(head, parts, [[one] for one, _ in takers], events, logits))[0]
        except BaseException:
            for group, _ in last_rows:
                self._unread_last_token(group)
            raise
        self._others_waited_s += result.seconds

    def _read_in_steps(self, group: Group, events: list[Event]) -> Course:
        """Brings tokens of a prompt into the cache by one launch of steps, the last of which may sample."""
        first, cache = group[0], group[0].cache
        assert cache is not None
        logits = self._logits_for(first.reads_logprobs)
        del first.prompt_logprobs[cache.length :]  # those behind were known before it gave its pages back
        columns = self._prompts.tokens
        steps = max(1, self._chunk(self.launch_steps * columns, columns, self._reading_pace) // columns)
        samples = len(group) == 1 and not first.request.wants_logits
        left = self._manner.end(self._known(group), samples) - cache.length
        tokens = min(left, self._fitting(logits, steps, self._prompts) * columns)
        if not self._make_room(first, tokens, events):
            return
        part = first.next_part(tokens, self._manner.columns_of_step(tokens))
        result = (yield from self._fly(self._prompts, [part], [group], events, logits))[0]
        self._note_reading(result, self._reading_pace)

    def _note_reading(self, result: LaunchResult, pace: LaunchPace) -> None:
        pace.note(result.steps, result.seconds)
        self._pace.guess(result.steps, result.seconds)
        self._others_waited_s += result.seconds

    def _chunk(self, most: int, per_step: int, pace: LaunchPace) -> int:
        """Tokens of a launch that reads a prompt, of at most `most`, `per_step` of them a step."""
        if not self._running or self._chunk_tokens == 0:
            return most
        if self._chunk_tokens is None:
            return pace.steps(most // per_step) * per_step
        return min(most, self._chunk_tokens)

    def _logits_for(self, are_wanted: bool) -> Buffer | None:
        return self._logits(self._turn) if are_wanted and self._logits is not None else None

    def _fitting(self, logits: Buffer | None, steps: int, *launchers: StepLaunches) -> int:
        """As many of `steps` as a launch takes whose logits are wanted."""
        return steps if logits is None else min(steps, *(launcher.score_steps(logits) for launcher in launchers))

    def _go_on(self, completions: list[Completion], steps: int, events: list[Event]) -> Course:
        """One launch that goes on from the ids of each that are not cached: the last, or more if it came back."""
        logits = self._logits_for(any(one.request.logprobs is not None for one in completions))
        steps = self._fitting(logits, steps, self.launcher, self._solo)
        for one in sorted(completions, key=lambda one: one.id):
            self._make_room(one, steps, events)
        together = [one for one in completions if one.cache is not None]
        parts = [one.part(one.uncached_ids(steps + 1), steps) for one in together]
        if not parts:
            return
        launcher = self._solo if len(parts) == 1 else self.launcher
        takers = [[one] for one in together]
        results = yield from self._fly(launcher, parts, takers, events, logits, may_end=True)
        for one in together:
            one.go_on_from_last()
        self._pace.note(results[0].steps, results[0].seconds)
        self._reading_pace.guess(results[0].steps, results[0].seconds)
        self._let_go(completions)

    def _fly(
        self,
        launcher: KernelLaunches,
        parts: Sequence[Part],
        takers: Sequence[list[Completion]],
        events: list[Event],
        logits: Buffer | None = None,
        following: Sequence[int] | None = None,
        may_end: bool = False,
    ) -> Generator[None, None, list[LaunchResult]]:
        """A launch, whose tokens are taken as they are made: of each part by its `takers`. Who wants logprobs takes its
        own at the end, and they are told while the next launch runs: there is time to work the logprobs out.

        following: the ids of a prompt that are judged by the launch's logits, where its inputs are not those before.
        may_end: it may end early, with fewer tokens, where it makes way for others."""
        flight = launcher.prepare(parts, logits)
        self._flying = _Flying(launcher, flight, [[one.id for one in group] for group in takers])
        try:
            launcher.start(flight)
            for group in takers:
                for one in group:
                    one.launched()
            if self._unjudged:
                self._judge(events)
                yield
            is_ending = not may_end
            while not launcher.wait(flight):
                seconds = flight.seconds
                for part, group, token_ids in zip(parts, takers, launcher.fresh(flight), strict=True):
                    for one in group if token_ids else ():
                        if one.request.logprobs is None:
                            events += one.take(part, token_ids, seconds)
                if not is_ending and self._makes_way(parts[0].steps, made=max(flight.given)):
                    self._flying.end()
                    is_ending = True
                yield
            results = launcher.finish(flight)
        finally:
            self._flying = None
        for number, (part, group, result) in enumerate(zip(parts, takers, results, strict=True)):
            others = result.token_ids[flight.given_of(number) :]
            for one in group:
                if (most := one.request.logprobs) is None or logits is None or not part.samples:
                    events += one.take(part, others, result.seconds, result.has_failed)
                else:
                    told = one.take(part, result.token_ids, result.seconds, result.has_failed)
                    last = len(part.inputs) - 1
                    rows = launcher.logits_after(flight, number, range(last, last + len(result.token_ids)))
                    self._unjudged.append(_Unjudged(told, [*rows], most))
            most = group[0].request.prompt_logprobs
            if logits is not None and most is not None and group[0].reads_logprobs:
                judged = part.inputs[1:] if following is None else following
                rows = launcher.logits_after(flight, number, range(len(judged)))
                group[0].prompt_logprobs += map(token_logprobs, rows, judged, repeat(most))
        self._turn = self._turn if logits is None else 1 - self._turn
        return results

    def _makes_way(self, steps: int, made: int) -> bool:
        """Whether a launch of so many steps shall end for those who have come meanwhile, and can begin. While a prompt
        is read in parts it is the turn of those who decode."""
        is_awaited = self._arrived and not (self._waiting or self._reading)
        can_begin = is_awaited and len(self._begun) < self.launcher.batch
        return bool(can_begin) and made >= FEWEST_STEPS and (steps - made) * self._pace.step_s > WORTH_ENDING_S

    def _judge(self, events: list[Event]) -> None:
        """Tells what waits for its logprobs."""
        waiting, self._unjudged = self._unjudged, []
        for one in waiting:
            events += one.judged()

    def _let_go(self, completions: Sequence[Completion]) -> None:
        """Ends those that are complete, or cannot go on."""
        for completion in list(completions):
            if completion.has_ended and completion in self._running:
                self._leave(completion)
