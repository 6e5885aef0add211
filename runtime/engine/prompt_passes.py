"""Launches of the kernel of passes: many tokens of a prompt at once, whose keys and values are left in the cache.

A pass samples nothing. Knows nothing of prompts' ends, completions or text: the engine decides what is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.plan import Plan
from cheetah.plan.pass_tables import Segment, pass_room
from cheetah.plan.prompt import PassPlan
from cheetah.runtime.engine.flights import Flight, KernelLaunches, LaunchResult, Part
from cheetah.runtime.engine.launch_tables import Geometry

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer, Device, Kernel

COUNTER = np.zeros(1, np.uint64)
"""Of the blocks that have met: the workspace begins with it."""


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

    def finish(self, flight: Flight) -> list[LaunchResult]:
        self._await_end(flight)
        self._arrivals += self._arrivals_of_launch
        steps = sum(part.steps for part in flight.placed)
        for part in flight.placed:
            part.cache.length += part.total
        return [LaunchResult((), steps, flight.seconds) for _ in flight.placed]

    def _begin_again(self) -> None:
        self._buffers["workspace"].upload(COUNTER)
        self._arrivals = 0
