"""Tokens that a head drafts by what layers of the model leave: an EAGLE-3 head, which is read along with the model.

What the tapped layers leave of a token lies by pages, as its keys do: in the slot of the token's position, so it is
shared, copied and kept as long as those are. It is copied there behind each launch of the model, of rounds on the
device (`cheetah.blocks.handoff`). The head has no first
token: what it reads at a position is the token behind it, with what the model left of the one at the position. Tokens
that it drafts it reads by its own state, so all of them count as unread, and those that were right are read again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cheetah.models.sampling import Filters, Penalties
from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.draft_model import DraftModel
from cheetah.runtime.engine.draft_rounds import RoundLauncher
from cheetah.runtime.engine.kv_cache import CachedSequence, PageCopy
from cheetah.runtime.engine.launch_order import LaunchOrder
from cheetah.runtime.engine.launch_tables import Sampling
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.launches import KernelLaunches, Launch
from cheetah.runtime.engine.page_copies import copy_page

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer

BYTES = 2
"""Of an element."""


class FeatureStore:
    """What tapped layers left of the tokens in pages: buffer, bf16 of this shape [pages, page_size, taps, hidden]."""

    def __init__(self, buffer: Buffer, shape: Sequence[int]) -> None:
        self._buffer, self._page_size = buffer, shape[1]
        self._shape = (1, shape[0], *shape[1:])
        self._row_bytes = math.prod(shape[2:]) * BYTES

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """The same copies as of keys and values."""
        for source, target in copies:
            copy_page(self._buffer, self._shape, BYTES, source, target)

    def keep(self, launcher: KernelLaunches, launch: Launch, number: int, cache: CachedSequence, start: int) -> None:
        """What a launch that has ended left of part `number`, whose tokens from `start` on it has cached."""
        if (taps := launcher.taps) is None or cache.length <= start:
            return
        most = taps.nbytes // self._row_bytes
        rows = launcher.rows_of(launch, number, range(cache.length - start))
        for position, row, count in self._runs(start, rows):
            page, slot = divmod(position, self._page_size)
            if page < len(cache.pages) and 0 <= row and row + count <= most:
                target = cache.pages[page] * self._page_size + slot
                nbytes = count * self._row_bytes
                self._buffer.copy_of(taps, row * self._row_bytes, target * self._row_bytes, nbytes)

    def _runs(self, start: int, rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(position, row, count): neighbouring rows of neighbouring tokens of a page."""
        first = 0
        for place in range(1, len(rows) + 1):
            is_new_page = (start + place) % self._page_size == 0
            if place == len(rows) or is_new_page or rows[place] != rows[place - 1] + 1:
                yield start + first, rows[first], place - first
                first = place


class DraftHead(DraftModel):
    """Launches of a head over its own pool; see `DraftModel`. knows_all: whether it has logits of all tokens."""

    skipped, read_alone = 1, 4

    def __init__(
        self, launcher: Launcher, solo: Launcher, store: FeatureStore, rounds: RoundLauncher, knows_all: bool = False
    ) -> None:
        super().__init__(launcher, solo, (), rounds)
        self._store, self._knows_all = store, knows_all

    def keep(self, order: LaunchOrder, launch: Launch, starts: Sequence[int]) -> None:
        for number, (part, start) in enumerate(zip(order.parts, starts, strict=True)):
            self._store.keep(order.launcher, launch, number, part.cache, start)

    def _keep_what_is_read(self, one: Completion, sequence: CachedSequence) -> None:
        sequence.length = len(one.ids) - self.skipped

    def _known_of(self, sampling: Sampling) -> Sampling:
        """Filters and penalties ask for logits of all tokens: where it has few, it drafts without."""
        known = super()._known_of(sampling)
        return known if self._knows_all else replace(known, filters=Filters(), penalties=Penalties())
