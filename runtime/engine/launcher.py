"""Launches of a generated kernel of decode steps: keys and values by pages, KV plans, tiles.

The kernel's parameters and their meaning are the manifest's. Knows nothing of prompts, completions or text: `engine`
decides what is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.plan import Gpu, Plan, step_matrices
from cheetah.plan.formats import KV_TILE_TOKENS
from cheetah.plan.kv import KvPlanLayout, Scheduling, by_turns, kv_plans_for_launch, launch_tiles, max_plans
from cheetah.plan.kv.tables import TileRecord, encode
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launch_tables import Geometry, Sampling, share_prefixes
from cheetah.runtime.engine.launches import NOT_A_NUMBER, Launch, LaunchResult, LoadedKernel, Part
from cheetah.runtime.engine.step_launches import EPOCH_LIMIT, Epochs, LaunchFault, StepLaunches

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer

__all__ = [
    "EPOCH_LIMIT",
    "NOT_A_NUMBER",
    "Epochs",
    "Launch",
    "LaunchFault",
    "LaunchResult",
    "Launcher",
    "Part",
    "Sampling",
]


class Launcher(StepLaunches):
    """Launches of one kernel over the caches of one to `batch` sequences; over one, `cache`, where none is named.

    A launch takes up to `max_steps` steps, a step up to `tokens` tokens. Of the tokens that were launched, those up to
    a stop id are counted in a cache's `length`. After a launch that failed or did not end, nothing can be launched any
    more.
    """

    def __init__(self, loaded: LoadedKernel, cache: CachedSequence):
        super().__init__(loaded)
        manifest = loaded.manifest
        self.cache, self.kv_chunk = cache, self._plan.kv_chunk
        self.tile_count = 0  # of the launch that was prepared last
        self._gpu = Gpu(**manifest.gpu, ranks=manifest.world_size)
        self._plans = _Plans(manifest, loaded.config, self._plan, self._gpu)

    @property
    def may_follow(self) -> bool:
        """Whether launches may follow by the same tables: windows leave keys behind that plans for later steps lack."""
        return self.verifies or not self._plans.has_windows

    def restart(self) -> None:
        """Begins another sequence in `cache`: forgets what is cached."""
        self.cache.clear()

    def launch(self, inputs: Sequence[int], steps: int, sampling: Sampling, per_step: int = 1) -> LaunchResult:
        """`steps` tokens of `cache` go through the model, `per_step` a step: `inputs`, then the sampled ones.

        One input more than `steps` samples nothing. A sampled stop id ends the launch early. CheetahError where none
        could be sampled.
        """
        result = self.launch_together([Part(self.cache, inputs, steps, sampling, per_step)])[0]
        if result.has_failed:
            raise LaunchFault(NOT_A_NUMBER.format(position=self.cache.length))
        return result

    def score(self, inputs: Sequence[int], logits: Buffer, per_step: int | None = None) -> npt.NDArray[np.float32]:
        """float32 [len(inputs), vocab]: the logits after each input, `per_step` (default: `tokens`) of them a step.

        At most `score_tokens(logits)` inputs of `cache`. Every step has all its columns, so the logits after an input
        do not depend on how many follow it, where `kv_chunk` is fixed.
        """
        per_step = per_step or self.tokens
        part = Part(self.cache, inputs, len(inputs), Sampling(), per_step)
        self.launch_together([part], logits)
        found = logits.download(np.float32, (part.steps, self.tokens, self.vocab_size))
        return found[:, :per_step].reshape(-1, self.vocab_size)[: len(inputs)]

    def score_tokens(self, logits: Buffer) -> int:
        """How many inputs `score` takes with this buffer, where it has room for one step at least."""
        return self.score_steps(logits) * self.tokens

    def start(self, launch: Launch) -> None:
        """Starts it; returns at once on a GPU. No other may be started before it is finished."""
        super().start(launch)
        with self._noting_failures():
            self._prepare_next(launch.placed, launch.geometry)  # while the kernel runs

    def _arrange(self, parts: Sequence[Part]) -> tuple[Geometry, list[int]]:
        """The launch's geometry and the order of its parts, once each has pages of its own for what it will cache."""
        self._make_room(parts)
        plan = self._plan
        order, shared = share_prefixes(
            [part.cache for part in parts],
            unit=lcm(plan.page_size, KV_TILE_TOKENS),
            # With fixed items no sequence's bits depend on its company, and where all layers have windows those leave
            # prefixes behind: then nothing is shared.
            minimum=plan.max_context + 1 if plan.kv_chunk or self.window else self._gpu.kv_chunk_min,
        )
        return Geometry(tuple((parts[i].cache.length, parts[i].per_step) for i in order), shared), order

    def _place(self, parts: Sequence[Part], geometry: Geometry, steps: int) -> dict[str, int]:
        """Pages, tiles and KV plans."""
        tiles, plans = self._plans.encode(geometry, steps, max(part.followed for part in parts))
        self.tile_count = len(tiles)
        pages = self._plan.pages_per_sequence
        self._upload("page_table", np.stack([part.cache.table(pages) for part in parts]))
        self._upload("tiles", self._seen(parts, tiles))
        self._upload("kv_plans", plans)
        if "state_slots" in self._buffers:
            self._upload("state_slots", np.array([part.cache.state for part in parts], np.int32))
        return {"plan_count": len(plans)}

    def _seen(self, parts: Sequence[Part], tiles: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The records of tiles, int32 [tiles, 8], as the launch has them."""
        return tiles

    def _begin_again(self) -> None:
        super()._begin_again()
        self._forget_states()

    def _advance(self, part: Part, token_ids: tuple[int, ...], reached: int) -> None:
        # All that was sampled but the last one of those; what follows a stop id was computed for nobody.
        part.cache.length += len(part.inputs) + len(token_ids) - 1 if token_ids else reached

    def _prepare_next(self, parts: Sequence[Part], geometry: Geometry) -> None:
        """Makes the schedules of the launch that follows if this one makes all its steps and goes on as it is. Where it
        begins is not known if tokens are drafted."""
        if any(part.drafting is not None for part in parts):
            return
        following = Geometry(
            tuple((part.cache.length + part.total, 1 if part.samples else part.per_step) for part in parts),
            geometry.shared,
        )
        steps = min(
            (part.cache.context - length) // per_step
            for part, (length, per_step) in zip(parts, following.sequences, strict=True)
        )
        if steps > 0:
            most = 1 if any(part.stepwise for part in parts) else self.max_steps
            self._plans.prepare(following, min(steps, most))


class _Plans:
    """The tiles and KV plans of a launch in device form, of layers with each window; those of the next one can be made
    while the kernel runs. All of several GPUs have the same, each over its own heads."""

    def __init__(self, manifest: Manifest, config: ModelConfig, plan: Plan, gpu: Gpu):
        rank = config.shape.of_rank(gpu.ranks)
        self._layout = KvPlanLayout.for_step(plan, rank, manifest.launch.blocks)
        self._windows = config.shape.windows_in(plan.max_context)
        self.has_windows = self._windows != (None,)
        self._placing: dict[str, Any] = {
            "group": rank.group,
            "tile_columns": plan.tile_columns(rank),
            "pages_per_sequence": plan.pages_per_sequence,
            "align": KV_TILE_TOKENS,
            "most": plan.max_context + plan.tokens,
            "whole": config.block is not None,
        }
        self._verifies, chunk = plan.drafts > 0, plan.kv_chunk or KV_TILE_TOKENS
        projected = step_matrices(config.shape, plan, gpu)[config.shape.table.heads].split
        self._scheduling = Scheduling(
            rank.kv_heads,
            manifest.launch.blocks,
            # Where tokens are drafted a plan is for all that may be there by then: a whole chunk is as good.
            align=chunk if self._verifies else KV_TILE_TOKENS,
            minimum=chunk if self._verifies else gpu.kv_chunk_min,
            chunk=plan.kv_chunk,
            item_cost=gpu.kv_item_cost,
            # Who has an M-tile of q, k and v less can attend what is cached while others make k and v (1B: 3 %).
            first_light=projected.light_from,
            light_blocks=projected.light_blocks,
        )
        self._geometry: Geometry | None = None
        moving, kinds = self.has_windows, len(self._windows)
        most = kinds * max_plans(plan.max_steps, KV_TILE_TOKENS, self._layout.tiles, plan.tokens, windows=moving)
        room = manifest.buffer("kv_plans").shape
        if len(room) != 2 or room[0] < most or room[1] != self._layout.plan_words:
            needed = [most, self._layout.plan_words]
            raise CheetahError(f"manifest: buffer kv_plans is {list(room)}, a launch needs {needed}: generate it again")

    def encode(
        self, geometry: Geometry, steps: int, followed: int = 0
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """int32 [tiles, 8] and [plans, plan_words] for `steps` steps. Where others follow by the same tables, for all
        that may be there by then: what lies behind what is cached changes no bit."""
        if followed:
            self.prepare(geometry, steps + followed, furthest=True)
        elif self._geometry != geometry or self._steps < steps:
            self.prepare(geometry, steps)
        # The first word of a plan is its first step, ascending.
        used = [words[: np.searchsorted(words[:, 0], steps)] for words in self._words]
        return self._tiles, by_turns(used)

    def _counted(self, record: TileRecord) -> TileRecord:
        """A tile's record where the kernel counts how far its sequence has come."""
        return replace(record, stride=record.table // self._placing["pages_per_sequence"])

    def prepare(self, geometry: Geometry, steps: int, furthest: bool = False) -> None:
        """Makes the plans of a launch to come, of at most `steps` steps, ready for `encode`; or the last one alone."""
        records: list[TileRecord] = []
        self._words = list[npt.NDArray[np.int32]]()
        for window in self._windows:
            shared = geometry.shared if window is None else ()
            of_kind, tiles = launch_tiles(geometry.placed(), shared=shared, window=window, **self._placing)
            if self._verifies:  # who knows how fast keys are left behind? A window that begins early changes no bit
                tiles = [replace(tile, begin_stride=0) for tile in tiles]
            plans = kv_plans_for_launch(tiles, steps, self._scheduling, furthest=furthest)
            self._words.append(self._layout.encode_launch(plans, first_tile=len(records)))
            records += [self._counted(record) for record in of_kind] if self._verifies else of_kind
        self._tiles = encode(records, TileRecord)
        self._geometry, self._steps = None if furthest else geometry, steps
