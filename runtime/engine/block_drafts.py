"""Tokens that a drafter of blocks drafts: what it knows of each sequence, and the launches that it needs for that.

It knows tokens by what the other model's layers left of them, which that model's next launch overwrites: so what each
launch left is made into rows at once (`note`), and those are read before that next launch, or in the step that drafts.
Its keys lie in the pages of the same numbers, as those of any draft model (`draft_model`). What was not heard of, as a
prefix that was cached before its time, is not known: then nothing is drafted for who begins with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from weakref import WeakKeyDictionary

from cheetah.plan.known import KNOWN, MOST_KNOWN
from cheetah.runtime.engine.block_launches import BlockLauncher, KnownRows, drafts
from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.draft_model import ReadSequence
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launch_order import LaunchOrder, Purpose
from cheetah.runtime.engine.launch_tables import Sampling
from cheetah.runtime.engine.launches import Launch, LaunchResult, Part


class BlockDrafts:
    """Drafts by `launcher`'s kernel, over rows that `rows` makes."""

    rounds = None

    def __init__(self, launcher: BlockLauncher, rows: KnownRows) -> None:
        self._launcher, self._rows, self._block = launcher, rows, launcher.block
        self._known: WeakKeyDictionary[CachedSequence, ReadSequence] = WeakKeyDictionary()
        self._unread: WeakKeyDictionary[CachedSequence, range] = WeakKeyDictionary()  # rows of what follows
        self._asked: list[CachedSequence] = []  # of the parts of the launch that was ordered

    def note(self, order: LaunchOrder, launch: Launch) -> None:
        """A launch of the other model has ended: what it left of its tokens becomes rows. All was read before."""
        taps = order.launcher.taps
        if taps is None:
            return
        rows = list[int]()
        for number, part in enumerate(order.parts):
            begin, _ = launch.geometry.sequences[launch.order.index(number)]
            count = part.cache.length - begin
            if count > 0 and self._follows(part.cache, begin):
                self._unread[part.cache] = range(len(rows), len(rows) + count)
                rows += order.launcher.rows_of(launch, number, range(count))
        if rows:
            self._rows.make(taps, rows)

    def due(self) -> LaunchOrder | None:
        """The launch that is due before the other model has one: it overwrites what is not read."""
        for cache, rows in [*self._unread.items()]:
            if self._sequence(cache).length + len(rows) > cache.length:  # its pages were given back
                del self._unread[cache]
            elif rows:
                return self._reading(cache, len(rows))
        return None

    def reading(self, completions: Sequence[Completion]) -> LaunchOrder | None:
        """The launch that is due before something is drafted for these; None if there is room for all that is not
        read."""
        for one in completions:
            assert one.cache is not None
            more = len(self._unread.get(one.cache, ())) - self._launcher.room
            if more > 0:
                return self._reading(one.cache, more)
        return None

    def drafting(self, completions: Sequence[Completion], most: int) -> LaunchOrder | None:
        """The launch that is due before each of these has up to `most` drafts; None if they all have."""
        columns = min(self._block.columns, most if self._block.from_anchor else most + 1)
        parts, takers, left = list[Part](), list[tuple[Completion, ...]](), self._launcher.tokens
        self._asked = []
        for one in completions:
            if one.proposed is not None:
                continue
            part = self._part(one, columns)
            if part is None:
                one.propose(())
            elif part.per_step <= left and len(parts) < self._launcher.batch:
                assert one.cache is not None
                left -= part.per_step
                parts.append(part)
                takers.append((one,))
                self._asked.append(one.cache)
        return LaunchOrder(Purpose.DRAFT, self._launcher, parts, takers) if parts else None

    def first_parts(self, completions: Sequence[Completion], most: int) -> list[Part]:
        """None: a round is two launches of the engine."""
        raise NotImplementedError

    def settle(self, order: LaunchOrder, results: Sequence[LaunchResult]) -> None:
        """A launch that was decided here was made."""
        for part, takers, cache, result in zip(order.parts, order.takers, self._asked, results, strict=True):
            known = len(part.inputs) - 1
            self._unread[cache] = self._unread.get(cache, range(0))[known:]
            if drafts(part):
                takers[0].propose(result.token_ids)
            sequence = self._known[cache]
            sequence.pool.note_drafted(sequence.pages[: sequence.length // sequence.page_size])

    def _reading(self, cache: CachedSequence, count: int) -> LaunchOrder:
        """Brings so many of a sequence's tokens that are not read into the drafter's cache."""
        launcher, rows = self._launcher, self._unread[cache]
        per_step = min(launcher.tokens, count)
        total = min(count, launcher.max_steps * per_step)
        inputs = [*(KNOWN + row for row in rows[:total]), 0]  # one more than is read: nothing is drafted
        self._asked = [cache]
        part = Part(self._sequence(cache), inputs, total, per_step=per_step)
        return LaunchOrder(Purpose.DRAFT, launcher, [part], [()])

    def _part(self, one: Completion, columns: int) -> Part | None:
        """The known tokens that are not read, then a block; None where not all before the last one are known."""
        assert one.cache is not None
        sequence, rows = self._sequence(one.cache), self._unread.get(one.cache, range(0))
        if sequence.length + len(rows) != len(one.ids) - 1 or columns < 1:
            return None
        inputs = [*(KNOWN + row for row in rows), one.ids[-1]]
        total = len(rows) + columns
        asked = one.sampling  # of filters and penalties a block knows nothing
        sampling = Sampling(asked.temperature, asked.seed) if self._block.from_anchor else Sampling()
        return Part(sequence, inputs, total, sampling, per_step=total)

    def _follows(self, cache: CachedSequence, begin: int) -> bool:
        """Whether all tokens of a sequence before number `begin` are known; if so those from there on are not."""
        sequence = self._sequence(cache)
        if sequence.length < begin:
            full = cache.pages[: begin // cache.page_size]
            known = sum(1 for _ in takewhile(cache.pool.is_drafted, full)) * cache.page_size
            sequence.length = max(sequence.length, known)
        if sequence.length < begin:
            return False
        sequence.length = begin
        return True

    def _sequence(self, cache: CachedSequence) -> ReadSequence:
        """What it knows of a sequence, in the sequence's pages."""
        sequence = self._known.get(cache)
        if sequence is None:
            sequence = self._known[cache] = ReadSequence(cache.pool, cache.page_size, cache.context)
        sequence.pages = cache.pages
        return sequence


assert MOST_KNOWN >= 2048, "the tokens of a pass"
