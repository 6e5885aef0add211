"""Which weights of a matrix are left in a sparse copy: by magnitude, without any data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.formats.two_of_four import GROUP
from cheetah.models.quantization.compressed_tensors import ANY_MASK, TWO_OF_FOUR_MASK
from cheetah.models.registry import family_of
from cheetah.models.rounding import F32, widen
from cheetah.plan.formats import BF16, BLOCKS_OF_TILE, M_TILE_ROWS
from cheetah.runtime.checkpoint.loading import Checkpoint
from cheetah.runtime.checkpoint.safetensors_files import StoredTensor

TWO_OF_FOUR, BLOCKS = "2:4", "blocks:"
OF_FOUR_BLOCKS = {f"{BLOCKS}{kept}:{BLOCKS_OF_TILE}": kept for kept in range(1, BLOCKS_OF_TILE)}
KEPT_OF_GROUP = 2
ROWS_AT_ONCE = 256
ROW_BITS, ROWS = 32, (1 << 32) - 1
Mask = NDArray[np.bool_]


class Pattern(ABC):
    """structure, layout: as compressed-tensors calls it, and the layout of its masked weights."""

    structure = "unstructured"
    layout = ANY_MASK

    @abstractmethod
    def kept_of_rows(self, name: str, shape: tuple[int, int]) -> NDArray[np.int64]:
        """How many weights each row of a tensor keeps."""

    @abstractmethod
    def kept(self, name: str, first: int, values: F32) -> Mask:
        """Which of some rows of a tensor, from row `first` on."""


class TwoOfFour(Pattern):
    """Two of every four neighbours of a row."""

    structure, layout = TWO_OF_FOUR, TWO_OF_FOUR_MASK

    def kept_of_rows(self, name: str, shape: tuple[int, int]) -> NDArray[np.int64]:
        return np.full(shape[0], shape[1] * KEPT_OF_GROUP // GROUP)

    def kept(self, name: str, first: int, values: F32) -> Mask:
        return largest_of_four(values)


@dataclass(frozen=True)
class PartOfRows(Pattern):
    """A part of each row, wherever it is."""

    part: float

    def kept_of_rows(self, name: str, shape: tuple[int, int]) -> NDArray[np.int64]:
        return np.full(shape[0], round(shape[1] * self.part))

    def kept(self, name: str, first: int, values: F32) -> Mask:
        return largest_of_row(values, round(values.shape[1] * self.part))


@dataclass(frozen=True)
class Blocks(Pattern):
    """Blocks of 16 rows, as the kernel has them in an M-tile, by 32 columns. masks: of each tensor [rows, blocks]."""

    masks: Mapping[str, Mask]

    def kept_of_rows(self, name: str, shape: tuple[int, int]) -> NDArray[np.int64]:
        widths = np.minimum(BF16.columns, shape[1] - np.arange(0, shape[1], BF16.columns))
        return np.asarray(self.masks[name] @ widths, np.int64)

    def kept(self, name: str, first: int, values: F32) -> Mask:
        of_rows = self.masks[name][first : first + len(values)]
        return np.repeat(of_rows, BF16.columns, axis=1)[:, : values.shape[1]]


def pattern_of(text: str, checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor]) -> Pattern:
    """The pattern of that name for a checkpoint of such tensors; CheetahError lists those there are."""
    if text == TWO_OF_FOUR:
        return TwoOfFour()
    is_blocks = text.startswith(BLOCKS)
    try:
        part = float(text.removeprefix(BLOCKS))
    except ValueError:
        part = 0.0
    kept = OF_FOUR_BLOCKS.get(text, 0)
    if not (0 < part < 1 or kept):
        raise CheetahError(
            f"--pattern {text}: there are {TWO_OF_FOUR}, parts of each row that are kept, like 0.5, of all blocks of a "
            f"matrix, like {BLOCKS}0.5, and of every {BLOCKS_OF_TILE} blocks, {', '.join(OF_FOUR_BLOCKS)}"
        )
    if not is_blocks:
        return PartOfRows(part)
    if checkpoint.config.routing is not None:
        raise CheetahError(f"--pattern {text}: experts have no blocks")
    largest = partial(_largest_of_four, kept=kept) if kept else partial(_largest_blocks, part=part)
    return Blocks(_block_masks(checkpoint, tensors, largest))


def _block_masks(
    checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor], largest: Callable[[F32], Mask]
) -> dict[str, Mask]:
    """Of the blocks of each matrix those that are `largest`, of sums of squares [M-tiles, blocks]."""
    config, family = checkpoint.config, family_of(checkpoint.config)
    masks: dict[str, Mask] = {}
    for product in config.quantisable:
        for layer in range(config.layers):
            own: dict[str, Mask] = {}
            of_tiles = family.in_m_tile_order(config, product.name, layer, partial(_squares, tensors, own))
            of_tiles = of_tiles.reshape(-1, M_TILE_ROWS, of_tiles.shape[1]).sum(axis=1)
            are_kept = np.repeat(largest(of_tiles), M_TILE_ROWS, axis=0)
            places = family.in_m_tile_order(config, product.name, layer, partial(_numbers, own))[:, 0]
            for index, mask in enumerate(own.values()):
                here = (places >> ROW_BITS == index) & (places & ROWS != 0)
                mask[(places[here] & ROWS) - 1] = are_kept[here]
            masks |= own
    return masks


def _numbers(own: Mapping[str, Mask], name: str) -> NDArray[np.int64]:
    """Of the rows of a tensor [rows, 1]: which of its matrix' tensors that is, and the row's number, from 1 on."""
    return (list(own).index(name) << ROW_BITS) + np.arange(1, len(own[name]) + 1)[:, None]


def _largest_blocks(sizes: F32, part: float) -> Mask:
    """That part of all, of equal ones the first."""
    found = np.zeros(sizes.size, np.bool_)
    found[np.argsort(-sizes, axis=None, kind="stable")[: round(part * sizes.size)]] = True
    return found.reshape(sizes.shape)


def _largest_of_four(sizes: F32, kept: int) -> Mask:
    """Of every four of a row [M-tiles, blocks] so many, of equal ones the first."""
    padded = np.pad(sizes, ((0, 0), (0, -sizes.shape[1] % BLOCKS_OF_TILE)), constant_values=-1)
    fours = padded.reshape(len(sizes), -1, BLOCKS_OF_TILE)
    found = np.zeros(fours.shape, np.bool_)
    np.put_along_axis(found, np.argsort(-fours, axis=2, kind="stable")[..., :kept], True, axis=2)
    return found.reshape(padded.shape)[:, : sizes.shape[1]]


def _squares(tensors: Mapping[str, StoredTensor], own: dict[str, Mask], name: str) -> F32:
    """Of every row of a tensor the sum of squares of each block of columns; makes room for its mask."""
    rows, (count, columns) = tensors[name].stored_rows(), tensors[name].shape
    starts = np.arange(0, columns, BF16.columns)
    own[name] = np.zeros((count, len(starts)), np.bool_)
    blocks = (np.square(widen(rows[first : first + ROWS_AT_ONCE])) for first in range(0, count, ROWS_AT_ONCE))
    return np.concatenate([np.add.reduceat(block, starts, axis=1) for block in blocks])


def largest_of_row(values: F32, count: int) -> Mask:
    """Of every row so many weights of largest magnitude, of equal ones the first."""
    kept = np.zeros(values.shape, np.bool_)
    order = np.argsort(-np.abs(values), axis=1, kind="stable")
    np.put_along_axis(kept, order[:, :count], True, axis=1)
    return kept


def largest_of_four(values: F32) -> Mask:
    """Of every four neighbours of a row the two of largest magnitude, of equal ones the first."""
    fours = np.abs(values).reshape(len(values), -1, GROUP)
    ahead = np.zeros(fours.shape, np.uint8)  # of each, how many of its four are larger
    for one, other in combinations(range(GROUP), 2):
        is_first = fours[..., one] >= fours[..., other]
        ahead[..., other] += is_first
        ahead[..., one] += ~is_first
    return (ahead < KEPT_OF_GROUP).reshape(values.shape)
