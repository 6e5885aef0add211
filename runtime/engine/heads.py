"""Launches of the head by itself, over hidden states that the pass before has left: tokens behind prompts, and logits.

A part's inputs are rows of those states, of the last tokens in its cache, which it leaves as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launch_tables import Geometry
from cheetah.runtime.engine.launches import Part
from cheetah.runtime.engine.step_launches import StepLaunches

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer


class HeadLauncher(StepLaunches):
    """A part that samples has one row, and one step: what it samples is no row of another."""

    def score(self, cache: CachedSequence, rows: range, logits: Buffer) -> Iterator[npt.NDArray[np.float32]]:
        """float32 [rows, vocab]: the logits of these rows, as many at a time as the buffer has room for. cache: of the
        sequence that they belong to."""
        most = self.score_steps(logits) * self.tokens
        for first in range(0, len(rows), most):
            some = rows[first : first + most]
            self.launch_together([self.part_without_samples(cache, some)], logits)
            yield logits.download(np.float32, (len(some), self.vocab_size))

    def part_without_samples(self, cache: CachedSequence, rows: range) -> Part:
        """Of a launch whose logits alone are wanted."""
        return Part(cache, [*rows, 0], len(rows), per_step=self.tokens)

    def _arrange(self, parts: Sequence[Part]) -> tuple[Geometry, list[int]]:
        assert all(part.total == 1 or not part.samples for part in parts), parts
        geometry = Geometry(tuple((part.cache.length - part.total, part.per_step) for part in parts))
        return geometry, [*range(len(parts))]
