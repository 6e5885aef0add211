"""The bytes of packed matrices, word by word as the formats' descriptions say, of sizes that nothing divides."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cheetah.models.dense.row_groups import row_groups
from cheetah.models.dense.weights import logical_matrix
from cheetah.models.formats import pack_matrix
from cheetah.models.formats.quantized import EIGHT_ROWS, EVEN_FIRST, QuantizedRows, scheme_of_name
from cheetah.models.rounding import Bits
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import QUANTIZED_FORMATS, QuantizedTiles, tile_format
from tests.program.quantized_weights import drawn_rows
from tests.program.rig import model

SIZES = [(16, 128, 1), (37, 200, 2), (7, 40, 2), (56, 136, 2)]
LANES = list(product(range(8), range(4)))
"""g, t of lane 4g + t."""

Tile = Callable[[int, int], bytes]


def laid_out(layout: MatrixLayout, tile: Tile, factors: Callable[[int], bytes]) -> bytes:
    """Of each wave of M-tiles, of each chunk, of each M-tile: its K-tiles, and behind the last its factors."""
    parts: list[bytes] = []
    for start, first in product(
        range(0, layout.m_tiles, layout.blocks), range(0, layout.k_tiles, layout.tiles_per_chunk)
    ):
        stop = min(first + layout.tiles_per_chunk, layout.k_tiles)
        for m_tile in range(start, min(start + layout.blocks, layout.m_tiles)):
            parts += [tile(m_tile, k_tile) for k_tile in range(first, stop)]
            parts += [factors(m_tile)] * (stop == layout.k_tiles)
    return b"".join(parts)


def padded(values: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return np.pad(values, ((0, rows - values.shape[0]), (0, columns - values.shape[1])))


def bf16_tile(bits: Bits) -> bytes:
    """bits: [16, 32]."""
    words = [
        (g + 8 * half, 8 * t + 4 * h + 2 * pair)
        for h, (g, t), pair, half in product(range(2), LANES, range(2), range(2))
    ]
    return b"".join(struct.pack("<HH", bits[row, column], bits[row, column + 1]) for row, column in words)


def int4_codes(codes: np.ndarray) -> bytes:
    """codes: [16, 128]."""
    packed = bytearray()
    for pair, (g, t), part, half in product(range(2), LANES, range(2), range(2)):
        column = (2 * pair + part) * 32 + 8 * t
        eight = codes[g + 8 * half, column : column + 8].tolist()
        packed += struct.pack("<I", sum(eight[2 * j] << 4 * j | eight[2 * j + 1] << 4 * j + 16 for j in range(4)))
    return bytes(packed)


def byte_codes(codes: np.ndarray) -> bytes:
    packed = bytearray()
    for part, (g, t), h, half in product(range(4), LANES, range(2), range(2)):
        column = 32 * part + 8 * t + 4 * h
        packed += bytes(codes[g + 8 * half, column + number] for number in (0, 2, 1, 3))
    return bytes(packed)


CODES: dict[str, Callable[[np.ndarray], bytes]] = {
    **{"int4": int4_codes, "mxfp4": int4_codes, "nvfp4": int4_codes},
    **{"int8": byte_codes, "fp8": byte_codes},
}


def quantized_tile(tiles: QuantizedTiles, codes: np.ndarray, scales: np.ndarray, points: np.ndarray | None) -> bytes:
    """codes: [16, 128]. scales, points: [16, groups of the tile]."""
    packed = CODES[tiles.kind](codes)
    if tiles.kind == "mxfp4":  # 2^(byte - 127)
        scales = np.where(scales == 0, 0, np.log2(np.maximum(scales, 2.0**-127)) + 127).astype(np.uint8)
    if tiles.kind == "nvfp4":  # 1.m * 2^(e - 10), of the byte e m
        numbers = {byte: (1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 10) for byte in range(1, 256)}
        of_numbers = {0.0: 0} | {number: byte for byte, number in numbers.items()}
        scales = np.vectorize(of_numbers.__getitem__)(scales.astype(float)).astype(np.uint8)
    if tiles.kind == "fp8" and tiles.group_columns:
        packed += struct.pack("<ff", scales[0, 0], scales[8:, 0].max()) + bytes(8)
    elif tiles.group_columns:
        packed += b"".join(scales[[g, g + 8], group].tobytes() for group in range(tiles.groups) for g in range(8))
    if points is not None:
        packed += b"".join(points[[g, g + 8], group].tobytes() for group in range(tiles.groups) for g in range(8))
    return packed


def quantized_by_definition(layout: MatrixLayout, rows: QuantizedRows) -> bytes:
    tiles = layout.format
    assert isinstance(tiles, QuantizedTiles)
    count, groups = layout.m_tiles * 16, layout.k_tiles * tiles.groups
    codes = padded(rows.codes, count, layout.k_tiles * 128)
    scales = padded(rows.scales, count, groups if tiles.group_columns else 1)
    points = rows.zero_points
    if points is not None:
        points = points if tiles.group_columns else np.repeat(points, groups, 1)  # said in every tile
        points = padded(points, count, groups)

    def tile(m_tile: int, k_tile: int) -> bytes:
        own = slice(16 * m_tile, 16 * m_tile + 16)
        of_tile = slice(k_tile * tiles.groups, (k_tile + 1) * tiles.groups)
        of_points = None if points is None else points[own, of_tile]
        return quantized_tile(tiles, codes[own, 128 * k_tile : 128 * k_tile + 128], scales[own, of_tile], of_points)

    def factors(m_tile: int) -> bytes:
        own = scales[16 * m_tile : 16 * m_tile + 16, 0].astype("<f4")
        if rows.factors is not None:
            own = padded(rows.factors, count, 1)[16 * m_tile : 16 * m_tile + 16, 0].astype("<f4")
            return own.tobytes() + bytes(tiles.factor_bytes - 64)
        return (np.ones(16, "<f4") if tiles.group_columns else own).tobytes() + bytes(tiles.factor_bytes - 64)

    return laid_out(layout, tile, factors)


def in_words(rows: QuantizedRows) -> list[QuantizedRows]:
    """int4 codes as words of eight columns in both orders, and side by side for eight rows."""
    eights = rows.codes.reshape(len(rows.codes), -1, 8).astype(np.uint32)
    found = []
    for even_first in (False, True):
        order = EVEN_FIRST if even_first else range(8)
        words = np.asarray(sum(eights[:, :, column] << np.uint32(4 * nibble) for nibble, column in enumerate(order)))
        found.append(replace(rows, stored_codes=words.astype(np.uint32), even_first=even_first))
        if len(words) % 8 == 0:
            side_by_side = np.ascontiguousarray(words.astype(np.uint32).T).view(EIGHT_ROWS).T
            found.append(replace(rows, stored_codes=side_by_side, even_first=even_first))
    return found


@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
def test_quantised_matrices_are_packed_as_described(name: str) -> None:
    tiles = tile_format(name)
    scheme = scheme_of_name(name, "f32" if tiles.kind == "fp8" else "f16")
    for rows, columns, blocks in SIZES:
        layout = MatrixLayout("w", rows, columns, blocks, 4 * tiles.tile_bytes, format=tiles)
        matrix = drawn_rows(scheme, rows, columns, np.random.default_rng(rows))
        wanted = quantized_by_definition(layout, matrix)
        assert pack_matrix(layout, matrix).tobytes() == wanted
        if tiles.kind == "int4":
            for words in in_words(matrix):
                assert words.shape == matrix.shape and np.array_equal(words.codes, matrix.codes)
                assert pack_matrix(layout, words).tobytes() == wanted


@pytest.mark.parametrize(("rows", "columns", "blocks"), SIZES)
def test_bf16_matrices_are_packed_as_described(rows: int, columns: int, blocks: int) -> None:
    layout = MatrixLayout("w", rows, columns, blocks, 4 * 1024)
    matrix = np.random.default_rng(rows).integers(0, 2**16, (rows, columns), dtype=np.uint16)
    bits = padded(matrix, layout.m_tiles * 16, layout.k_tiles * 32)

    def tile(m_tile: int, k_tile: int) -> bytes:
        return bf16_tile(bits[16 * m_tile : 16 * m_tile + 16, 32 * k_tile : 32 * k_tile + 32])

    assert pack_matrix(layout, matrix).tobytes() == laid_out(layout, tile, lambda m_tile: b"")


def test_rows_side_by_side_are_read_at_once() -> None:
    """Of a block that begins and ends within a head: whole heads in one read of each tensor, though halves of a rotated
    one lie in turns; what another block has is not read."""
    config = model(256, 700, 1, 8, 4, 64, 300)
    tensors = [np.random.default_rng(n).integers(0, 2**16, (64 * heads, 256)) for n, heads in enumerate((8, 4, 4))]
    matrix = logical_matrix(config, "qkv", [one.astype(np.uint16) for one in tensors])
    read: list[tuple[int, int]] = []

    class Counted:
        def __init__(self, values: np.ndarray) -> None:
            self.values, self.shape = values.astype(np.uint16), values.shape

        def __getitem__(self, part: slice) -> Bits:
            read.append((part.start, part.stop))
            return self.values[part]

    groups = range(12, 76)
    found = np.zeros((len(groups) * 8, 256), np.uint16)
    row_groups(config, "qkv").gather([Counted(one) for one in tensors], found, groups)
    np.testing.assert_array_equal(found, matrix[groups.start * 8 : groups.stop * 8])
    assert read == [(80, 96), (112, 512), (0, 80), (96, 112)]
