"""Which matrices of a checkpoint have lists beside their K-tiles, and how long ones, or blocks of zeros.

A kernel has room for lists of one length in all layers of a matrix, so all are counted before there is a kernel: of
outliers by their columns, of masked weights by their masks, of plain ones by their values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.formats.lists import SIZE, counts_of, parts_of, units_for
from cheetah.models.formats.two_of_four import GROUP
from cheetah.models.registry import family_of
from cheetah.plan.formats import (
    BF16,
    BLOCK_FORMATS,
    BLOCKS_OF_TILE,
    LISTED_TILES,
    M_TILE_ROWS,
    MOST_LIST_UNITS,
    PARTS_OF_MATRIX,
    TWO_OF_FOUR,
    WINDOW_BLOCKS,
    BlockRows,
    TileFormat,
    block_rows,
    listed,
    tile_format,
)
from cheetah.runtime.checkpoint.masked import MaskedTensor
from cheetah.runtime.checkpoint.outliers import OutlierMatrix
from cheetah.runtime.checkpoint.quantized_checks import WEIGHT_SUFFIX
from cheetah.runtime.checkpoint.safetensors_files import LoadingError, StoredTensor
from cheetah.runtime.checkpoint.tensor_checks import CheckedTensors

LOOKED_AT = 8
"""Rows of each weight that say what the others are likely to be."""
LIKELY_DENSITY = 0.7
BLOCK_ROWS, MOST_THREADS = 256, 8
MOST_OF_MATRIX = PARTS_OF_MATRIX * 7 // 8
"""Blocks that are stored one by one, of every 1024: what more would save is lost by chunks that differ in length."""
Counts = NDArray[np.uint16]


def with_outliers(config: ModelConfig, tensors: CheckedTensors, place: str) -> ModelConfig:
    """The configuration with lists for the matrices that have outliers."""
    formats = dict(config.weight_formats)
    for matrix in formats:
        stored = {name: tensors.quantized.get(name) for name in weights_of(config, matrix)}
        found = {name: one for name, one in stored.items() if isinstance(one, OutlierMatrix)}
        if not found:
            continue
        if len(found) < len(stored):
            other = next(name for name in stored if name not in found)
            raise LoadingError(f"{place}: {next(iter(found))} has outliers, {other} of the same matrix has none")
        if config.routing is not None:
            raise LoadingError(f"{place}: {next(iter(found))} has outliers, which experts cannot have")
        tiles = tile_format(formats[matrix])
        counted = partial(_counted_outliers, found, LISTED_TILES * tiles.columns)
        (units,) = _of_layers(config, matrix, counted, _units_for)
        formats[matrix] = listed(tiles, max(1, units)).name
    return replace(config, weight_formats=tuple(formats.items()))


def thin_name(config: ModelConfig, tensors: CheckedTensors, matrix: str, has_plain: bool) -> str | None:
    """The format in which a bf16 matrix with many zeros takes fewest bytes, if that is another: blocks, or 2:4 and
    lists. has_plain: plain weights are counted too, if they look thin."""
    stored = {name: tensors.plain.get(name) for name in weights_of(config, matrix)}
    found = {name: one for name, one in stored.items() if one is not None}
    if len(found) < len(stored) or config.routing is not None:
        return None
    plain = [one for one in found.values() if not isinstance(one, MaskedTensor)]
    if plain and not (has_plain and look_thin(plain)):
        return None
    columns, of_chunk = config.table.named(matrix).columns, LISTED_TILES * TWO_OF_FOUR.columns
    of_four, part = _of_layers(config, matrix, lambda name: blocks_of_rows(found[name].rows()), _most_blocks)
    (units,) = _of_layers(config, matrix, lambda name: _counted_rows(found[name], of_chunk), _units_for)
    possible = [BF16, *(one for one in BLOCK_FORMATS.values() if one.kept >= of_four)]
    if 0 < part <= MOST_OF_MATRIX:
        possible.append(block_rows(part))
    if units <= MOST_LIST_UNITS:
        possible.append(listed(TWO_OF_FOUR, units) if units else TWO_OF_FOUR)
    least = min(possible, key=lambda tiles: _m_tile_bytes(tiles, columns))
    return None if least is BF16 else least.name


def _m_tile_bytes(tiles: TileFormat, columns: int) -> int:
    """The mean where M-tiles differ."""
    k_tiles = -(-columns // tiles.columns)
    if isinstance(tiles, BlockRows):
        return tiles.bytes_of(1, tiles.room(k_tiles))
    return k_tiles * tiles.tile_bytes + -(-k_tiles // LISTED_TILES) * tiles.list_bytes


def _most_blocks(are_there: NDArray[Any]) -> tuple[int, int]:
    """Blocks that are not zero of any four of an M-tile, and of every 1024 of the matrix, of [M-tiles * 16, blocks]."""
    of_tiles = are_there.reshape(-1, M_TILE_ROWS, are_there.shape[1]).any(axis=1)
    windows = np.pad(of_tiles, ((0, 0), (0, -of_tiles.shape[1] % WINDOW_BLOCKS)))
    fours = windows.reshape(-1, BLOCKS_OF_TILE).sum(axis=1).max(initial=0)
    return int(fours), -(-int(windows.sum()) * PARTS_OF_MATRIX // max(1, windows.size))


def _units_for(counts: Counts) -> tuple[int]:
    return (units_for(counts),)


def blocks_of_rows(rows: Any) -> NDArray[np.bool_]:
    """Of every row of a weight (bf16 bits) whether it has a number in each block of columns."""
    padding = ((0, 0), (0, -rows.shape[1] % BF16.columns))
    found = []
    for first in range(0, rows.shape[0], BLOCK_ROWS):
        block = np.pad(rows[first : first + BLOCK_ROWS] & SIZE, padding)
        found.append(block.reshape(len(block), -1, BF16.columns).any(axis=2))
    return np.concatenate(found)


def weights_of(config: ModelConfig, matrix: str) -> tuple[str, ...]:
    """The weights that a matrix is made of, of all layers and experts."""
    modules = family_of(config).matrix_modules(config)[matrix]
    return tuple(f"{name}{WEIGHT_SUFFIX}" for module in modules for name in config.names_of(module))


def look_thin(tensors: Collection[StoredTensor]) -> bool:
    """Whether so many weights of some rows of all these are zero that lists or blocks may take fewer bytes."""
    there = looked_at = 0
    for tensor in tensors:
        rows, some = tensor.rows(), some_rows(tensor.shape[0])
        there += sum(int(np.count_nonzero(rows[row : row + 1] & SIZE)) for row in some)
        looked_at += len(some) * tensor.shape[1]
    return there <= LIKELY_DENSITY * looked_at


def some_rows(count: int) -> list[int]:
    """Of so many rows some from all over the matrix."""
    return sorted({row * (count - 1) // (LOOKED_AT - 1) for row in range(LOOKED_AT)})


def _of_layers(
    config: ModelConfig,
    matrix: str,
    read: Callable[[str], NDArray[Any]],
    most: Callable[[NDArray[Any]], tuple[int, ...]],
) -> tuple[int, ...]:
    """The most of any layer, of each number: `most` of what `read` gives of its weights' rows, in the order of
    M-tiles."""
    family = family_of(config)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "count") as pool:
        layers = range(config.layers)
        found = list(pool.map(lambda layer: most(family.in_m_tile_order(config, matrix, layer, read)), layers))
    return tuple(max(of_layers) for of_layers in zip(*found, strict=True))


def _counted_outliers(found: Mapping[str, OutlierMatrix], chunk_columns: int, name: str) -> Counts:
    return found[name].listed_counts(chunk_columns)


def _counted_rows(tensor: StoredTensor, chunk_columns: int) -> Counts:
    rows, padding = tensor.rows(), ((0, 0), (0, -tensor.shape[1] % GROUP))
    blocks = (rows[first : first + BLOCK_ROWS] for first in range(0, tensor.shape[0], BLOCK_ROWS))
    return np.concatenate([counts_of(parts_of(np.pad(block, padding))[1], chunk_columns) for block in blocks])
