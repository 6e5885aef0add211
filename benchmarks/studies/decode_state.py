"""What kernels of the decode step are launched with: random weights, keys and values, at a depth of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.models.llama import LlamaConfig
from cheetah.plan import Gpu, Plan, step_matrices
from cheetah.plan.formats import KV_TILE_TOKENS
from cheetah.plan.kv import KvPlanLayout, Scheduling, kv_plans_for_launch, launch_tiles
from cheetah.plan.kv.tables import ColumnRecord, SequenceRecord, TileRecord, encode
from cheetah.runtime.assembly.buffers import allocate_buffers, free_all
from cheetah.tools.bench import FIRST_TOKEN
from cheetah.tools.random_buffers import fill_random, fill_with, random_bits

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Device

TINY = LlamaConfig(64, 96, 2, 4, 2, 64, 80, max_position_embeddings=256)
"""A model for the emulator."""


@dataclass
class DecodeState:
    """Buffers by parameter name, as the manifest of the whole step lists them; further ones can be added."""

    device: Device
    config: ModelConfig
    manifest: Manifest
    buffers: dict[str, Any]

    @property
    def plan(self) -> Plan:
        return Plan.from_dict(self.manifest.plan)

    def add(self, name: str, nbytes: int, fill: int = 0) -> Any:
        """A further buffer, or that of the name with its bytes set again."""
        if name not in self.buffers:
            self.buffers[name] = self.device.allocate(nbytes, fill)
        self.buffers[name].fill(fill)
        return self.buffers[name]

    def arguments(self, context: int, steps: int) -> dict[str, Any]:
        """Of a launch of `steps` steps of one sequence after `context` tokens, without logits; exchange and epoch are
        for the first launch. The token that begins is always the same."""
        sequence = SequenceRecord(length=context, per_step=1, given=1, total=steps, first_column=0)
        tiles, plans = self._encoded_plans(context, steps)
        tables = {
            "sequences": encode([sequence], SequenceRecord),
            "columns": encode([ColumnRecord(sequence=0, number=0)], ColumnRecord),
            "tiles": tiles,
            "kv_plans": plans,
            "tokens": np.array([FIRST_TOKEN], np.int32),
        }
        for name, words in tables.items():
            self.buffers[name].upload(words)
        scalars = {"steps": steps, "head_from": 0, "column_count": 1, "plan_count": len(plans), "options": 0}
        scalars["kv_pages"] = self.plan.kv_pages
        names = [parameter.name for parameter in self.manifest.parameters]
        pointers = {name: self.buffers.get(name) for name in names}  # None: no logits
        return {**pointers, **scalars, "epoch": 1}

    def _encoded_plans(self, context: int, steps: int) -> tuple[Any, Any]:
        """The words of the tiles, and of the KV plans."""
        plan, config, blocks = self.plan, self.config, self.manifest.launch.blocks
        records, tiles = launch_tiles(
            [(context, 1, 0)],
            config.group,
            plan.tile_columns(config.shape),
            plan.pages_per_sequence,
            align=KV_TILE_TOKENS,
        )
        least = Gpu(**self.manifest.gpu).kv_chunk_min
        scheduling = Scheduling(config.kv_heads, blocks, KV_TILE_TOKENS, least, chunk=plan.kv_chunk)
        plans = kv_plans_for_launch(tiles, steps, scheduling)
        layout = KvPlanLayout.for_step(plan, config.shape, blocks)
        return encode(records, TileRecord), layout.encode_launch(plans)

    def bytes_of(self, gpu: Gpu, names: tuple[str, ...], layers: int) -> int:
        """Bytes of these matrices of `layers` layers."""
        matrices = step_matrices(self.config.shape, self.plan, gpu)
        return layers * sum(layout.total_bytes for layout in matrices.of_layer if layout.name in names)


@contextmanager
def decode_state(device: Device, config: ModelConfig, manifest: Manifest) -> Iterator[DecodeState]:
    """Allocated and filled; given back at the end."""
    buffers: dict[str, Any] = {}
    try:
        allocate_buffers(device, manifest, buffers)
        fill_random(config, manifest, buffers)
        fill_with(buffers["kv"], random_bits(1.0))
        buffers["page_table"].upload(np.arange(manifest.buffer("page_table").shape[-1], dtype=np.int32))
        yield DecodeState(device, config, manifest, buffers)
    finally:
        free_all(buffers)
