"""Tokens that another model drafts: what it has read of each sequence, and the launches that it needs for that.

Its keys and values lie in a pool of its own, those of a token in the page of the same number as the model's that is
asked. So pages are given out, shared and taken back once for both, and only how far it has read is known here. Of pages
that are shared it counts those alone whose tokens it has read all, and nobody writes to: so it needs no copies.
What it reads and drafts decides speed alone: each draft is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from weakref import WeakKeyDictionary

from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.draft_rounds import RoundLauncher
from cheetah.runtime.engine.kv_cache import CachedSequence, PageCopy
from cheetah.runtime.engine.launch_order import LaunchOrder, Purpose
from cheetah.runtime.engine.launch_tables import Sampling
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.launches import Launch, LaunchResult, Part
from cheetah.runtime.engine.prompt_passes import PassLauncher


class ReadSequence(CachedSequence):
    """What a draft model has read of a sequence, in the sequence's pages: it takes none, and gives none back."""

    def reserve(self, tokens: int) -> bool:
        assert tokens <= len(self.pages) * self.page_size, "a draft model reads what has pages"
        return False

    def take_copies(self) -> list[PageCopy]:
        """None: those that are due are of the other model's keys."""
        return []

    def drop_before(self, token: int) -> None:
        """Nothing: whose pages they are says when they are given back."""


class DraftModel:
    """Launches of a model that drafts for another one, by kernels over its own pool: launcher, of several sequences;
    solo, of one; passes, over many tokens, with room for fewest first.

    rounds: launches of many rounds of both models, where nobody needs the host between two.

    A completion that shall have drafts has pages for them, and for one token more. skipped: so many of its first ids
    are not read; read_alone: so many ids before the last one are read in the launch that drafts for a completion by
    itself."""

    skipped, read_alone = 0, 1

    def __init__(
        self, launcher: Launcher, solo: Launcher, passes: Sequence[PassLauncher], rounds: RoundLauncher | None = None
    ):
        self.rounds = rounds if launcher.may_follow else None
        self._vocab = launcher.vocab_size
        self._launcher, self._solo, self._passes = launcher, solo, passes
        self._read: WeakKeyDictionary[CachedSequence, ReadSequence] = WeakKeyDictionary()

    def reading(self, completions: Sequence[Completion], drafts: Sequence[int]) -> LaunchOrder | None:
        """The launch that is due before up to so many tokens are drafted for each of these; None if all is read."""
        most = self.read_alone if len(completions) == 1 else 1
        behind = [one for one in completions if self._unread(one) > most]
        return self._reading(behind) if behind else None

    def drafting(self, completions: Sequence[Completion], most: int) -> LaunchOrder | None:
        """The launch that is due before each of these has up to `most` drafts; None if they all have. All is read."""
        due = [one for one in completions if one.proposed is None]
        return self._drafting(due, most) if due else None

    def first_parts(self, completions: Sequence[Completion], drafts: Sequence[int]) -> list[Part]:
        """Parts of the first of launches by the same tables, which draft up to so many tokens for each of these, all of
        which is read."""
        unread = max(map(self._unread, completions))
        return [self._part(one, min(drafts) + unread) for one in completions]

    def has_rounds_for(self, completions: Sequence[Completion], drafts: Sequence[int]) -> bool:
        """Whether `rounds` can draft up to so many tokens for each of these."""
        return self.rounds is not None

    def settle(self, order: LaunchOrder, results: Sequence[LaunchResult]) -> None:
        """A launch that was decided here was made."""
        for part, (one, *_), result in zip(order.parts, order.takers, results, strict=True):
            if part.samples:
                one.propose(result.token_ids)
                self._keep_what_is_read(one, part.cache)
            else:
                part.cache.pool.note_drafted(part.cache.pages[: part.cache.length // part.cache.page_size])

    def keep(self, order: LaunchOrder, launch: Launch, starts: Sequence[int]) -> None:
        """A launch of the other model has ended, whose parts had so many tokens cached before."""

    def _keep_what_is_read(self, one: Completion, sequence: CachedSequence) -> None:
        """Drafts of a completion were made: which of them count as read is seen later."""

    def _reading(self, behind: Sequence[Completion]) -> LaunchOrder:
        """Brings ids that were made or read without it into its cache, but for the last one."""
        apart = self._apart(behind)
        left = [self._unread(one) for one in apart]
        if self._passes and sum(left) > self._launcher.tokens:
            fitting = (one for one in self._passes if one.has_columns_for(left))
            passes = next(fitting, self._passes[-1])
            counts = passes.fitting([self._sequence(one).length for one in apart], left, passes.tokens)
            parts = [self._part_of_pass(one, count, passes) for one, count in zip(apart, counts, strict=False)]
            return LaunchOrder(Purpose.DRAFT, passes, parts, [(one,) for one in apart[: len(parts)]])
        per_step = min(self._launcher.tokens, left[0])
        sequence, total = self._sequence(apart[0]), min(left[0], self._launcher.max_steps * per_step)
        inputs = self._from(apart[0], sequence)[: total + 1]
        part = Part(sequence, inputs, total, per_step=per_step)
        return LaunchOrder(Purpose.DRAFT, self._launcher, [part], [(apart[0],)])

    def _part_of_pass(self, one: Completion, count: int, passes: PassLauncher) -> Part:
        sequence = self._sequence(one)
        inputs = self._from(one, sequence)[: count + 1]  # one more than is read: nothing is sampled
        return Part(sequence, inputs, count, per_step=passes.tile_tokens)

    def _drafting(self, due: Sequence[Completion], most: int) -> LaunchOrder:
        """One token a step of each: whose last draft was right, too, has a token more to read, which costs a step."""
        parts = self.first_parts(due, [most] * len(due))
        launcher = self._solo if len(parts) == 1 else self._launcher
        return LaunchOrder(Purpose.DRAFT, launcher, parts, [(one,) for one in due])

    def _part(self, one: Completion, total: int) -> Part:
        """Drafts with the request's own noise, at the same positions: so they are right more often."""
        sequence = self._sequence(one)
        part = one.part(self._from(one, sequence), total)
        return replace(part, cache=sequence, sampling=self._known_of(part.sampling), mask=None, stepwise=False)

    def _known_of(self, sampling: Sampling) -> Sampling:
        """What is asked of the tokens that it has: its vocabulary may be filled up by fewer."""
        bias = tuple(one for one in sampling.bias if one[0] < self._vocab)
        allowed = sampling.allowed
        if allowed is not None:
            allowed = tuple(token for token in allowed if token < self._vocab)
        return replace(sampling, bias=bias, allowed=allowed)

    # What it has read -------------------------------------------------------------------------------------------------

    def _unread(self, one: Completion) -> int:
        """Ids before the last one that it has not read."""
        return self._before_last(one) - self._sequence(one).length

    def _before_last(self, one: Completion) -> int:
        """Ids before the last one, but for those that it never reads."""
        return max(0, len(one.ids) - 1 - self.skipped)

    def _from(self, one: Completion, sequence: CachedSequence) -> list[int]:
        """The ids from the first one on that is not read."""
        return one.ids[self.skipped + sequence.length :]

    def _sequence(self, one: Completion) -> ReadSequence:
        """What it has read of a completion. Drafts that turned out wrong count as unread."""
        cache = one.cache
        assert cache is not None
        sequence = self._read.get(cache)
        if sequence is None:
            sequence = self._read[cache] = ReadSequence(cache.pool, cache.page_size, cache.context)
        sequence.pages = cache.pages
        if (right := one.take_verified()) is not None:
            sequence.length = min(sequence.length, right)
        if self._before_last(one) - sequence.length > 1:
            full = cache.pages[: self._before_last(one) // cache.page_size]
            known = sum(1 for _ in takewhile(cache.pool.is_drafted, full)) * cache.page_size
            sequence.length = max(sequence.length, known)
        return sequence

    def _apart(self, behind: Sequence[Completion]) -> list[Completion]:
        """Those whose next page no other one of them reads: who shares it waits, and need not read it."""
        apart = dict[int, Completion]()
        for one in behind:
            sequence = self._sequence(one)
            apart.setdefault(sequence.pages[sequence.length // sequence.page_size], one)
        return [*apart.values()]
