"""Launches of the kernel of passes: many tokens of a prompt at once, whose keys and values are left in the cache.

A pass samples nothing. Knows nothing of prompts' ends, completions or text: the engine decides what is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cheetah.models.rounding import widen
from cheetah.plan import Plan
from cheetah.plan.delta_pass import RUN
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.pass_tables import SEGMENT_COLUMNS, Segment, pass_room
from cheetah.plan.prompt import PassPlan
from cheetah.runtime.engine.heads import HeadLauncher
from cheetah.runtime.engine.launch_tables import Geometry
from cheetah.runtime.engine.launches import KernelLaunches, Launch, LaunchResult, LoadedKernel, Part

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer

COUNTER = np.zeros(1, np.uint64)
"""Of the blocks that have met: the workspace begins with it."""


def columns_of(tokens: int) -> int:
    """Columns of a pass that so many tokens of one sequence take."""
    return round_up(tokens, SEGMENT_COLUMNS)


def phases_of_keys(phases: Sequence[str], layers: int) -> int:
    """How many of a pass' phases a launch makes that leaves keys and values, and what sequences remember, and no hidden
    states: those before the last layer's attention, or before what else makes something of what it has left."""
    ends = [f"layer {layers - 1} {name}" for name in ("attention", "delta-norms")]
    return next(number for number, name in enumerate(phases) if name in ends)


def _wanted_columns(segments: Sequence[Segment], parts: Sequence[Part]) -> list[int]:
    """The columns whose hidden states are wanted, part by part."""
    firsts = accumulate((segment.columns for segment in segments[:-1]), initial=0)
    return [
        first + number
        for first, part in zip(firsts, parts, strict=True)
        for number in range(part.total - part.wanted, part.total)
    ]


class PassLauncher(KernelLaunches):
    """Passes over up to `tokens` tokens of one sequence, or of several with few columns left empty between them.

    They are read in tiles of `tile_tokens`, which count as a pass' steps. The hidden states that its parts want lie in
    the rows of the buffer `hidden_states` part by part, up to the next pass over the same buffer. head: begins with
    those; without one nobody may want them."""

    def __init__(self, loaded: LoadedKernel, head: HeadLauncher | None = None):
        manifest, config = loaded.manifest, loaded.config
        decoding = Plan.from_dict(manifest.plan["decoding"])
        super().__init__(loaded, decoding)
        plan = PassPlan.from_dict(manifest.plan)
        self.tokens, self.tile_tokens, self.batch = plan.tokens, plan.tile_tokens, decoding.batch
        self._head = head
        self._hidden, self._padded_hidden = config.hidden_size, config.padded_hidden
        self._epsilon, self._last_norm = config.rms_norm_eps, 2 * config.layers
        self._room = pass_room(decoding, plan, config.head_dim)
        self._arrivals, self._blocks = 0, manifest.launch.blocks * manifest.world_size
        behind_keys, all_phases = phases_of_keys(manifest.phases, config.layers), len(manifest.phases)
        self._phases = {False: behind_keys, True: all_phases}  # by whether hidden states are wanted
        self._keeps_last = config.layers - 1 in decoding.tapped_layers

    def prepare(self, parts: Sequence[Part], logits: Buffer | None = None) -> Launch:
        """A pass over the inputs of parts. It samples nothing, and leaves no logits."""
        self._be_ready()
        assert logits is None, "a pass has no head"
        assert 1 <= len(parts) <= self.batch and all(part.wanted <= part.total for part in parts), parts
        segments = [Segment(row, part.cache.length, part.total) for row, part in enumerate(parts)]
        tables = self._room.tables(segments, [part.inputs[: part.total] for part in parts])
        self._make_room(parts)
        self._upload("page_table", np.stack([part.cache.table(self._plan.pages_per_sequence) for part in parts]))
        if "state_slots" in self._buffers:
            self._upload("state_slots", np.array([part.cache.state for part in parts], np.int32))
        for name in ("ids", "groups", "segments", "tiles"):
            self._upload(name, getattr(tables, name))
        wanted = _wanted_columns(segments, parts)
        if not wanted and self._keeps_last:
            wanted = [0]  # nobody reads it: so that the last layer is made whole, of which all tokens are kept
        self._upload("wanted", np.array(wanted, np.int32))
        self._firsts = [*accumulate((segment.columns for segment in segments[:-1]), initial=0)]
        counts = {name: getattr(tables, name) for name in ("column_count", "segment_count", "tile_count")}
        counts["wanted_count"] = len(wanted)
        geometry = Geometry(tuple((segment.start, segment.count) for segment in segments))
        states = self._buffers.get("hidden_states")
        arguments = self._arguments({**counts, "hidden_states": states, "arrivals": self._arrivals})
        return Launch(parts, range(len(parts)), geometry, arguments)

    def rows_of(self, launch: Launch, number: int, tokens: range) -> list[int]:
        """Their columns."""
        return [self._firsts[number] + token for token in tokens]

    @property
    def head(self) -> HeadLauncher:
        """Launches of the head over the hidden states that passes leave."""
        assert self._head is not None, "these passes have no head"
        return self._head

    def has_columns_for(self, counts: Iterable[int]) -> bool:
        """Whether it takes so many tokens of each of several sequences."""
        return sum(map(columns_of, counts)) <= self.tokens

    def fitting(self, starts: Sequence[int], left: Sequence[int], most: int) -> list[int]:
        """How many tokens a pass takes of each of some sequences, of the first ones while there is room.

        starts: how many tokens of each are cached; left: how many of each may be read, one or more. most: columns."""
        segments: list[Segment] = []
        columns = 0
        for row, (start, count) in enumerate(zip(starts[: self.batch], left, strict=False)):
            one = Segment(row, start, self._part(start, count, most - columns))
            if one.count < 1 or not self._room.has_room_for([*segments, one]):
                break
            segments.append(one)
            columns += one.columns
        return [one.count for one in segments]

    def _part(self, start: int, count: int, room: int) -> int:
        """How many of a sequence's next `count` tokens are read with so much room. Where it remembers, a part ends with
        a whole run of tokens that are taken together, if there is one: so a cut changes no bit."""
        if count <= room or "state_slots" not in self._buffers:
            return min(count, room)
        in_runs = (start + room) // RUN * RUN - start
        return in_runs if in_runs > 0 else room

    def normed_states(self, count: int) -> npt.NDArray[np.float32]:
        """float32 [count, hidden]: the first rows that the last pass has left, behind the last norm. They are rounded
        to bf16 before it, as in a step."""
        rows = self._rows("hidden_states", 0, count)
        squares = np.mean(rows * rows, axis=1, dtype=np.float32, keepdims=True)
        return np.asarray(rows / np.sqrt(squares + np.float32(self._epsilon)) * self._norm, np.float32)

    @cached_property
    def _norm(self) -> npt.NDArray[np.float32]:
        """Weights of the last norm."""
        return self._rows("norms", self._last_norm, 1)

    def _rows(self, buffer: str, first: int, count: int) -> npt.NDArray[np.float32]:
        """Of a buffer of bf16 vectors of the model's width."""
        bits = self._buffers[buffer].download(np.uint16, (count, self._padded_hidden), first * self._padded_hidden * 2)
        return widen(bits[:, : self._hidden])

    def finish(self, launch: Launch) -> list[LaunchResult]:
        self._await_end(launch)
        self._arrivals += self._blocks * self._phases[self._keeps_last or any(part.wanted for part in launch.placed)]
        steps = ceil_div(sum(columns_of(part.total) for part in launch.placed), self.tile_tokens)
        for part in launch.placed:
            part.cache.length += part.total
        return [LaunchResult((), steps, launch.seconds) for _ in launch.placed]

    def _begin_again(self) -> None:
        self._buffers["workspace"].upload(COUNTER)
        self._arrivals = 0
        self._forget_states()
