"""Tokens that a drafter of blocks drafts: a draft model that reads tokens by what the other model's layers left of
them.

Behind each launch of that model a small kernel makes a row of each of its tokens, in the slot of the token's page and
place: so rows are shared, copied and kept as keys are, and what is read is the number of a slot. A token that is known
costs the drafter little beside a block: those that became known since are read by the step that drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cheetah.plan.known import KNOWN
from cheetah.runtime.engine.block_launches import BlockLauncher, KnownRows
from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.draft_model import DraftModel
from cheetah.runtime.engine.draft_rounds import RoundLauncher
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launch_order import LaunchOrder, Purpose
from cheetah.runtime.engine.launch_tables import Sampling
from cheetah.runtime.engine.launches import Launch, Part


class BlockDrafts(DraftModel):
    """Drafts by `launcher`'s kernel, over rows that `rows` makes; see `DraftModel`."""

    def __init__(self, launcher: BlockLauncher, rows: KnownRows, rounds: RoundLauncher) -> None:
        super().__init__(launcher, launcher, (), rounds)
        self._blocks, self._rows = launcher, rows

    def keep(self, order: LaunchOrder, launch: Launch, starts: Sequence[int]) -> None:
        taps = order.launcher.taps
        rows, slots = list[int](), list[int]()
        for number, (part, start) in enumerate(zip(order.parts, starts, strict=True)):
            if taps is not None and part.cache.length > start:
                rows += order.launcher.rows_of(launch, number, range(part.cache.length - start))
                slots += _slots(part.cache, start, part.cache.length)
        if taps is not None and rows:
            self._rows.make(taps, rows, slots)

    def reading(self, completions: Sequence[Completion], drafts: Sequence[int]) -> LaunchOrder | None:
        """The launch that is due before something is drafted for these; None if the step that drafts has room for what
        is not read."""
        alone = self._launcher.tokens - self._blocks.block.ahead - max(drafts)
        most = [alone] if len(completions) == 1 else [min(alone, 1 + count) for count in drafts]
        behind = [one for one, room in zip(completions, most, strict=True) if self._unread(one) > room]
        return self._reading(behind) if behind else None

    def first_parts(self, completions: Sequence[Completion], drafts: Sequence[int]) -> list[Part]:
        """With columns for all that a round may make known."""
        parts = []
        for one, count in zip(completions, drafts, strict=True):
            unread, width = self._unread(one), self._blocks.block.ahead + count
            part = self._part(one, unread + width)
            parts.append(replace(part, per_step=max(unread, 1 + count) + width))
        return parts

    def has_rounds_for(self, completions: Sequence[Completion], drafts: Sequence[int]) -> bool:
        """All draft in one step."""
        columns = sum(part.per_step for part in self.first_parts(completions, drafts))
        return self.rounds is not None and columns <= self._launcher.tokens

    def _drafting(self, due: Sequence[Completion], most: int) -> LaunchOrder:
        """A block of each, as many as a step has columns for: the others are due in the next launch."""
        block, parts, columns = self._blocks.block, list[Part](), self._launcher.tokens
        width = min(block.columns, block.ahead + most)
        for one in due[: self._launcher.batch]:
            part = self._part(one, self._unread(one) + width)
            columns -= part.per_step
            if columns < 0:
                break
            parts.append(part)
        return LaunchOrder(Purpose.DRAFT, self._launcher, parts, [(one,) for one in due[: len(parts)]])

    def _part(self, one: Completion, total: int) -> Part:
        """What is not read, then a block; with the request's own noise, where a column draws at its own position."""
        sequence, asked = self._sequence(one), one.sampling
        sampling = Sampling(asked.temperature, asked.seed) if self._blocks.block.from_anchor else Sampling()
        return Part(sequence, self._from(one, sequence), total, sampling, per_step=total)

    def _from(self, one: Completion, sequence: CachedSequence) -> list[int]:
        """Known tokens by their slots, then the last id."""
        before = _slots(sequence, sequence.length, self._before_last(one))
        return [*(KNOWN + slot for slot in before), one.ids[-1]]


def _slots(cache: CachedSequence, start: int, end: int) -> list[int]:
    """Of tokens of a sequence: which one of all pages' places each has."""
    size = cache.page_size
    return [cache.pages[token // size] * size + token % size for token in range(start, end)]
