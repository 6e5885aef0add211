"""Who has a place and pages: the line of completions, those whose prompt is read, those who decode.

First come first served. A completion is begun when there are pages for what is known of it and for its next launch;
where they run out the one that came last gives its own back, and is in line again before all who came after it.
Knows nothing of launches, but how many tokens one makes at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

from cheetah.manifest import NO_PAGE
from cheetah.runtime.engine.completion import Completion, part_ways
from cheetah.runtime.engine.kv_cache import CachedSequence, PagesExhausted, pages_for
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.prefill_rules import FewestSteps
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.requests import Failed, Load


def same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many two sequences begin with."""
    shorter, piece = min(len(one), len(other)), 256
    first = next((at for at in range(0, shorter, piece) if one[at : at + piece] != other[at : at + piece]), shorter)
    return next((at for at in range(first, shorter) if one[at] != other[at]), shorter)


class Queues:
    """Up to `launcher.batch` completions that have begun, and a line of others.

    launcher: its cache has the pages. launch_tokens: most that a launch makes of each.
    prefixes: keeps the pages of who leaves. rule: how prompts are read, and so which of those another begins with.
    """

    def __init__(self, launcher: Launcher, launch_tokens: int, prefixes: PrefixCache | None, rule: FewestSteps):
        self._launcher, self._launch_tokens = launcher, launch_tokens
        self._prefixes, self.rule = prefixes, rule
        self.waiting: deque[Completion] = deque()
        # Those of a request that begin together, in the order in which they came.
        self.reading: list[list[Completion]] = []
        self.running: list[Completion] = []
        self._failures: list[Failed] = []
        self._tokens_looked_up = self._tokens_found = self._preemptions = 0

    @property
    def begun(self) -> list[Completion]:
        """Those that have a place: who is read, then who decodes."""
        return [*chain(*self.reading), *self.running]

    @property
    def has_room(self) -> bool:
        """Whether another one can have a place."""
        return len(self.begun) < self._launcher.batch

    @property
    def is_empty(self) -> bool:
        """Whether nobody has a place or waits for one."""
        return not (self.waiting or self.reading or self.running)

    def take_failures(self) -> list[Failed]:
        """Those that nobody was told yet."""
        failures, self._failures = self._failures, []
        return failures

    def load(self) -> Load:
        begun = self.begun
        held = {page for one in begun if (cache := one.cache) is not None for page in [*cache.pages]} - {NO_PAGE}
        used = len(held) / self._launcher.cache.pool.pages
        prompts = (self._tokens_looked_up, self._tokens_found)
        return Load(len(begun), len(self.waiting), used, *prompts, self._preemptions)

    def unclaimed_pages(self) -> int:
        """Pages that nobody who has begun holds or claims."""
        claimed = sum(
            max(0, self._claim(one) - (len(one.cache.pages) if one.cache is not None else 0)) for one in self.begun
        )
        return self._launcher.cache.pool.available_pages - claimed

    def next_group(self) -> list[Completion]:
        """As many completions of the first request in line as can begin now, out of the line; the first has a cache
        with what is known of its ids. Who cannot begin though nobody runs who might make room has failed."""
        places = self._launcher.batch - len(self.begun)
        while self.waiting and places:
            first = self.waiting[0]
            alike = [one for one in self.waiting if one.request is first.request and not one.made][:places]
            first.cache = self._sequence_of(first)
            missing = self._claim(first) - len(first.cache.pages)
            of_each_other = missing + len(first.cache.pages) - (len(first.ids) - 1) // first.cache.page_size
            spare = self.unclaimed_pages() - missing
            if spare >= 0:
                first.cached_tokens = first.kept = first.cache.length
                first.parting = self._parting(first)
                self._tokens_looked_up += len(first.ids)
                self._tokens_found += first.cached_tokens
                group = [first] if first.made else alike[: 1 + spare // of_each_other]
                self.waiting = deque(one for one in self.waiting if one not in group)
                return group
            first.cache.clear()
            first.cache = None
            if self.begun:
                break
            self.waiting.popleft()
            message = f"{missing} pages of the KV cache are needed, there are {spare + missing}"
            self._failures.append(Failed(first.id, f"{message}: somebody outside of the engine holds the others"))
        return []

    def _sequence_of(self, completion: Completion) -> CachedSequence:
        """A new sequence with the pages that are known to hold the beginning of its ids, unless all must be read."""
        sequence = self._launcher.cache.fork()
        sequence.clear()
        if self._prefixes is not None and not completion.reads_logprobs:
            pages, tokens = self._prefixes.lookup(completion.ids)
            reused = self.rule.reused(tokens)
            sequence.adopt(pages[: reused // sequence.page_size], reused, self._prefixes.state_behind(pages))
        return sequence

    def _parting(self, completion: Completion) -> int:
        return self._prefixes.parting(completion.ids) if self._prefixes is not None else 0

    def next_end(self, completion: Completion, known: int) -> int:
        """Where a launch is to end that reads the next of a prompt's `known` ids, if it reads as far: at the next place
        where its state is to be kept, so that others may begin there.

        That is before its last token, where it parts from a prompt that was read before, and from the next in line, if
        it is far enough behind the last such place."""
        cache, ends = completion.cache, list[int]()
        assert cache is not None
        if self._prefixes is not None and cache.pool.states.kept:
            of_next = same_tokens(completion.ids, self.waiting[0].ids) if self.waiting else 0
            unit = self.rule.unit
            ends += [min(place, known - 1) // unit * unit for place in (known - 1, completion.parting, of_next)]
        least = max(cache.length + 1, completion.kept + self.rule.least_kept)
        completion.keeps_at = min([end for end in ends if end >= least], default=known)
        return completion.keeps_at

    def keep_state(self, completion: Completion) -> None:
        """A launch has read more of its prompt: if that is as far as was wanted, its state is kept."""
        cache = completion.cache
        if self._prefixes is not None and cache is not None and cache.state is not None:
            is_worth_it = cache.length >= completion.kept + self.rule.least_kept
            if cache.length == completion.keeps_at and cache.length % self.rule.unit == 0 and is_worth_it:
                completion.kept = cache.length
                self._remember(completion)
                self._prefixes.keep_state(completion.ids[: cache.length], cache.state)

    def _claim(self, completion: Completion) -> int:
        """Pages that it shall have: for all its ids and its next launch. One that had to give its pages back claims all
        that it may need, so that it seldom has to again."""
        request = completion.request
        soon = len(completion.ids) - 1 + self._launch_tokens
        tokens = request.most_cached if completion.preemptions else min(request.most_cached, soon)
        return pages_for(tokens, self._launcher.cache.page_size)

    def shares_with_who_is_read(self, completion: Completion, tokens: int) -> bool:
        """Whether it begins like one whose prompt is read by `tokens` tokens more than are known of it already."""
        if self._prefixes is None:
            return False
        known = self._prefixes.known(completion.ids) + tokens
        beginning = completion.ids[:known]
        return len(beginning) == known and any(group[0].ids[:known] == beginning for group in self.reading)

    def begin_to_decode(self, group: list[Completion]) -> None:
        """The prompt of these has been read."""
        part_ways(group)
        self.reading.remove(group)
        self._remember(group[0])
        self.running += group
        self.let_go(group)

    def make_room(self, completion: Completion, tokens: int) -> bool:
        """Pages for `tokens` more of it, if need be those of whoever came last. False if that is itself, or if nobody
        else could give any, so that it has failed: then it has no cache any more."""
        while completion.cache is not None:
            try:
                self._launcher.make_room(completion.cache, tokens)
                return True
            except PagesExhausted as shortage:
                holders = [one for one in self.begun if one.cache is not None]
                if len(holders) > 1:
                    self._preempt(max(holders, key=lambda one: one.id))
                    continue
                completion.has_ended = completion.has_failed = True
                self._failures.append(Failed(completion.id, str(shortage)))
                self._leave(completion)
        return False

    def _preempt(self, completion: Completion) -> None:
        """Back in line, before all that came later. Its pages are kept for it as long as nobody takes them."""
        self._preemptions += 1
        completion.preemptions += 1
        self._leave(completion)
        self.waiting = deque(sorted([*self.waiting, completion], key=lambda one: one.id))

    def let_go(self, completions: Sequence[Completion]) -> None:
        """Ends those that are complete, or cannot go on."""
        for completion in list(completions):
            if completion.has_ended and completion in self.running:
                self._leave(completion)

    def drop(self, ids: set[int]) -> None:
        """Takes completions out, wherever they are."""
        self.waiting = deque(one for one in self.waiting if one.id not in ids)
        for one in [one for one in self.begun if one.id in ids]:
            self._leave(one)

    def _leave(self, completion: Completion) -> None:
        """Frees the place and the pages of one who has begun; its tokens are kept for later ones if there is room."""
        if completion in self.running:
            self.running.remove(completion)
        else:
            group = next(group for group in self.reading if completion in group)
            group.remove(completion)
            if group and group[0].cache is None:  # the prompt is read on for the others
                group[0].cache, completion.cache = completion.cache, None
                group[0].cached_tokens = completion.cached_tokens
            self.reading = [group for group in self.reading if group]
        if completion.cache is not None:
            self._remember(completion)
            completion.cache.clear()
            completion.cache = None

    def _remember(self, completion: Completion) -> None:
        cache = completion.cache
        if self._prefixes is None or cache is None:
            return
        if completion.has_failed and not completion.made and cache.state is not None:
            # Its state is no number, and may have been kept before that was known.
            for page in cache.pages[completion.cached_tokens // cache.page_size :]:
                self._prefixes.forget(page)
        if not completion.has_failed:
            kept = self.rule.kept(len(completion.request.prompt_ids), cache.length)
            self._prefixes.insert(completion.ids[:kept], cache.pages)
