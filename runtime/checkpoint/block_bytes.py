"""How many bytes each M-tile has of a checkpoint's matrices whose blocks are stored one by one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.formats.block_rows import bytes_of
from cheetah.models.registry import family_of
from cheetah.plan import M_TILE_ROWS
from cheetah.plan.formats import BlockRows, tile_format
from cheetah.runtime.checkpoint.listed_formats import blocks_of_rows
from cheetah.runtime.checkpoint.loading import Checkpoint


def m_tile_bytes(checkpoint: Checkpoint) -> dict[str, NDArray[np.int64]]:
    """[layers, M-tiles] of every such matrix: what a step reads of them. Reads all their weights."""
    config, formats = checkpoint.config, dict(checkpoint.config.weight_formats)
    found = [matrix for matrix, name in formats.items() if isinstance(tile_format(name), BlockRows)]
    return {
        matrix: np.stack([_of_layer(checkpoint, config, matrix, layer) for layer in range(config.layers)])
        for matrix in found
    }


def _of_layer(checkpoint: Checkpoint, config: ModelConfig, matrix: str, layer: int) -> NDArray[np.int64]:
    of_rows = family_of(config).in_m_tile_order(
        config, matrix, layer, lambda name: blocks_of_rows(checkpoint.rows(name))
    )
    there = of_rows.reshape(-1, M_TILE_ROWS, of_rows.shape[1]).any(axis=1)
    return bytes_of(there.sum(axis=1))
