"""Launches of the kernel of passes: many tokens of a prompt at once, whose keys and values are left in the cache.

A pass samples nothing. Knows nothing of prompts' ends, completions or text: the engine decides what is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.plan import Plan
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.pass_tables import SEGMENT_COLUMNS, Segment, pass_room
from cheetah.plan.prompt import PassPlan
from cheetah.runtime.engine.flights import Flight, KernelLaunches, LaunchResult, Part
from cheetah.runtime.engine.launch_tables import Geometry

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer, Device, Kernel

COUNTER = np.zeros(1, np.uint64)
"""Of the blocks that have met: the workspace begins with it."""


def columns_of(tokens: int) -> int:
    """Columns of a pass that so many tokens of one sequence take."""
    return round_up(tokens, SEGMENT_COLUMNS)


class PassLauncher(KernelLaunches):
    """Passes over up to `tokens` tokens of one sequence, or of several with few columns left empty between them.

    They are read in tiles of `tile_tokens`, which count as a pass' steps."""

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        manifest: Manifest,
        config: ModelConfig,
        buffers: Mapping[str, Buffer],
        timeout_s: float | None = None,
    ):
        decoding = Plan.from_dict(manifest.plan["decoding"])
        super().__init__(device, kernel, manifest, config, decoding, buffers, timeout_s)
        plan = PassPlan.from_dict(manifest.plan)
        self.tokens, self.tile_tokens, self.batch = plan.tokens, plan.tile_tokens, decoding.batch
        self._room = pass_room(decoding, plan)
        self._arrivals, self._arrivals_of_launch = 0, manifest.launch.blocks * len(manifest.phases)

    def prepare(self, parts: Sequence[Part], logits: Buffer | None = None) -> Flight:
        """A pass over the inputs of parts that sample nothing: each has one input more than tokens. It leaves no
        logits."""
        self._check_usable()
        assert logits is None, "a pass has no head"
        assert 1 <= len(parts) <= self.batch and not any(part.samples for part in parts), parts
        segments = [Segment(row, part.cache.length, part.total) for row, part in enumerate(parts)]
        tables = self._room.tables(segments, [part.inputs[: part.total] for part in parts])
        self._make_room(parts)
        self._upload("page_table", np.stack([part.cache.table(self._plan.pages_per_sequence) for part in parts]))
        for name in ("ids", "groups", "segments", "tiles"):
            self._upload(name, getattr(tables, name))
        counts = {name: getattr(tables, name) for name in ("column_count", "segment_count", "tile_count")}
        geometry = Geometry(tuple((segment.start, segment.count) for segment in segments))
        arguments = self._arguments({**counts, "arrivals": self._arrivals})
        return Flight(parts, range(len(parts)), geometry, arguments)

    def has_columns_for(self, counts: Iterable[int]) -> bool:
        """Whether it takes so many tokens of each of several sequences."""
        return sum(map(columns_of, counts)) <= self.tokens

    def fitting(self, starts: Sequence[int], left: Sequence[int], most: int) -> list[int]:
        """How many tokens a pass takes of each of some sequences, of the first ones while there is room.

        starts: how many tokens of each are cached; left: how many of each may be read, one or more. most: columns."""
        segments: list[Segment] = []
        columns = 0
        for row, (start, count) in enumerate(zip(starts[: self.batch], left, strict=False)):
            one = Segment(row, start, min(count, most - columns))
            if one.count < 1 or not self._room.has_room_for([*segments, one]):
                break
            segments.append(one)
            columns += one.columns
        return [one.count for one in segments]

    def finish(self, flight: Flight) -> list[LaunchResult]:
        self._await_end(flight)
        self._arrivals += self._arrivals_of_launch
        steps = ceil_div(sum(columns_of(part.total) for part in flight.placed), self.tile_tokens)
        for part in flight.placed:
            part.cache.length += part.total
        return [LaunchResult((), steps, flight.seconds) for _ in flight.placed]

    def _begin_again(self) -> None:
        self._buffers["workspace"].upload(COUNTER)
        self._arrivals = 0
