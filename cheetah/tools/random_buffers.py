"""Random weights, keys and values in a kernel's buffers, in seconds: for who measures speed alone.

Rows and waves are repeated where a format allows it, so that little is made and packed. Knows nothing of launches.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.models.formats import format_of, is_sparse_name
from cheetah.models.registry import family_of
from cheetah.plan import Gpu, MatrixLayout, Plan, StepMatrices, step_matrices
from cheetah.plan.delta import DIMS
from cheetah.plan.formats import BF16, BlockRows, QuantizedTiles
from cheetah.runtime.checkpoint.random_weights import RandomTensors, random_scheme, random_tensors

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer

TILE_ELEMENTS = 2**24 - 3  # a prime, so that no two rows of a matrix are the same


def fill_random(config: ModelConfig, manifest: Manifest, buffers: dict[str, Buffer]) -> None:
    """Weights of any shape in seconds: random matrices of a scale that keeps activations near 1, norm weights of 1."""
    plan = Plan.from_dict(manifest.plan)
    tile = random_bits(config.hidden_size**-0.5)
    fill_with(buffers["weights"], tile)
    # What a sublayer adds is alike for all tokens. Beside embeddings as small as weights it would be most of a residual
    # stream, and nearly all tokens would choose the same experts.
    fill_with(buffers["embedding"], tile if config.shape.experts is None else random_bits(1.0))
    ones = np.ones(config.padded_hidden, ml_dtypes.bfloat16).view(np.uint16)
    fills = {"norms": ones, "norms_behind": ones, "head_norms": ones}
    fills |= {name: tile for name in buffers if name.endswith("biases") or name in ("sinks", "router_rows")}
    if (heads := config.shape.of_rank(manifest.world_size).delta) is not None:  # most of what is remembered is kept
        rates, biases = (np.full(heads.value_heads, number, np.float32) for number in (0.5, -3.0))
        numbers = np.concatenate([rates, biases, np.ones(DIMS, np.float32)])
        fills |= {"delta_taps": tile, "delta_numbers": numbers.view(np.uint16)}
    for name, values in fills.items():
        if name in buffers:
            fill_with(buffers[name], values)
    if "places" in buffers:
        row = manifest.buffer("places").shape[-1]
        fill_with(buffers["places"], _random_places(min(config.hidden_size, config.query_rows), row))
    gpu = Gpu(**manifest.gpu, ranks=manifest.world_size)
    _fill_packed(config, step_matrices(config.shape, plan, gpu), buffers)
    for name, table in family_of(config).tables(config, plan).items():
        buffers[name].upload(table)
    if "kv_scales" in buffers:
        buffers["kv_scales"].upload(np.ones(buffers["kv_scales"].nbytes // 4, np.float32))


def _random_places(elements: int, row: int) -> NDArray[np.uint16]:
    """Some order of the first elements of every input, the same for all."""
    places = np.arange(row, dtype=np.uint16)
    np.random.default_rng(0).shuffle(places[:elements])
    return places


def _fill_packed(config: ModelConfig, matrices: StepMatrices, buffers: dict[str, Buffer]) -> None:
    """Random weights in matrices that are not bf16 numbers alone. Every wave has the same rows, in all layers, of all
    experts: few are packed."""
    tensors = random_tensors(config)
    for layout in matrices:
        if layout.format == BF16:
            continue
        if isinstance(layout.format, BlockRows):
            whole = np.empty(layout.total_bytes, np.uint8)
            rows = _random_rows(tensors, layout, layout.padded_rows)
            format_of(layout).pack_m_tiles(layout, range(layout.m_tiles), rows, whole)
            for layer in matrices.layers_of(layout):
                buffers["weights"].upload(whole, matrices.offset(layout.name, layer))
            continue
        waves = [_packed_wave(tensors, layout, wave) for wave in sorted({0, layout.waves - 1})]
        for layer, expert in product(matrices.layers_of(layout), range(layout.experts)):
            for wave in range(layout.waves):
                offset = matrices.offset(layout.name, layer, expert) + wave * layout.blocks * layout.m_tile_bytes
                buffers["weights"].upload(waves[-1] if wave == layout.waves - 1 else waves[0], offset)


def _packed_wave(tensors: RandomTensors, layout: MatrixLayout, wave: int) -> NDArray[np.uint8]:
    """The bytes of one wave of random rows."""
    width, first = int(layout.wave_width(wave)), wave * layout.blocks
    rows = _random_rows(tensors, layout, width * layout.tile_rows)
    packed = np.empty(width * layout.m_tile_bytes, np.uint8)
    format_of(layout).pack_m_tiles(layout, range(first, first + width), rows, packed, wave)
    return packed


def _random_rows(tensors: RandomTensors, layout: MatrixLayout, count: int) -> Any:
    """So many as the format wants them."""
    shape = count, layout.columns
    if isinstance(layout.format, QuantizedTiles):
        name = layout.format.name
        scheme, is_sparse = random_scheme(name), is_sparse_name(name)
        return tensors.matrix_of(layout.name, scheme, shape, is_sparse=is_sparse, tiles=layout.format)[:]
    rows = tensors.sparse_matrix_of(layout.name, shape, layout.format)[:]
    return np.pad(rows, ((0, 0), (0, layout.padded_columns - shape[1])))


@lru_cache(maxsize=2)
def random_bits(scale: float) -> NDArray[np.uint16]:
    """Normal numbers times `scale` as bf16 bits, the same every time: what several buffers share cannot be written."""
    numbers = np.random.default_rng(0).standard_normal(TILE_ELEMENTS, dtype=np.float32)
    bits = np.asarray((numbers * np.float32(scale)).astype(ml_dtypes.bfloat16).view(np.uint16))
    bits.flags.writeable = False
    return bits


def random_cache(plan: Plan) -> NDArray[np.uint16]:
    """Random keys and values as the plan caches them, in words of 2 bytes; none of them is a NaN."""
    if plan.kv_dtype == "bf16":
        return random_bits(1.0)
    codes = np.random.default_rng(0).integers(0, 256, 2 * TILE_ELEMENTS, np.uint8)
    return (codes & 0xBF).view(np.uint16)  # the exponent's first bit is 0: numbers below 2


def fill_with(buffer: Buffer, tile: NDArray[np.uint16]) -> None:
    """Repeats `tile` over the whole buffer."""
    for offset in range(0, buffer.nbytes, tile.nbytes):
        buffer.upload(tile[: (buffer.nbytes - offset) // 2], offset)
