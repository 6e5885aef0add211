"""Addresses of the chunks cover a matrix exactly, in memory order, for ints and device expressions alike."""

import itertools
from dataclasses import replace

import pytest

from cheetah.plan import MatrixLayout, PlanError
from cheetah.plan.formats import tile_format
from cheetah.plan.layout import slice_columns

from .expressions import Symbol, evaluate

SMALL = [
    MatrixLayout("w", rows, columns, blocks, stage_bytes, start)
    for rows, columns, blocks, stage_bytes in itertools.product(
        (1, 16, 17, 64, 80, 200), (1, 32, 33, 128, 130, 500), (1, 2, 3, 4, 7), (1024, 2048, 4096)
    )
    for start in {0, blocks - 1}
] + [
    MatrixLayout("w", rows, columns, blocks, stage_bytes, tile_rows=8)
    for rows, columns, blocks, stage_bytes in itertools.product((1, 8, 24, 80), (1, 64, 130, 500), (1, 3), (1024, 4096))
]


def chunks_in_memory_order(layout):
    for wave in range(layout.waves):
        for chunk in range(layout.chunks):
            for position in range(layout.wave_width(wave)):
                yield wave, chunk, position


def test_addresses_partition_the_matrix_in_memory_order():
    for layout in SMALL:
        end = 0
        for wave, chunk, position in chunks_in_memory_order(layout):
            address = layout.address(wave, chunk, position, layout.wave_width(wave))
            assert address == end, layout
            assert address % 16 == 0
            end = address + layout.chunk_bytes(chunk)
        assert end == layout.total_bytes, layout


def test_address_is_the_formula_of_the_layout():
    layout = MatrixLayout("w", rows=7 * 16, columns=10 * 32, blocks=4, stage_bytes=4096)
    assert (layout.m_tiles, layout.k_tiles, layout.tiles_per_chunk, layout.chunks) == (7, 10, 4, 3)
    assert (layout.m_tile_bytes, layout.last_chunk_bytes, layout.waves) == (10240, 2048, 2)
    assert layout.address(0, 0, 3, 4) == 3 * 4096
    assert layout.address(0, 2, 1, 4) == 4 * 2 * 4096 + 2048
    assert layout.address(1, 1, 2, 3) == 4 * 10240 + 3 * 4096 + 2 * 4096
    assert layout.address(1, 2, 2, 3) + 2048 == layout.total_bytes


def test_chunks_of_a_m_tile_hold_its_k_tiles_and_all_but_the_last_are_full():
    for layout in SMALL:
        sizes = [layout.chunk_bytes(chunk) for chunk in range(layout.chunks)]
        assert sum(sizes) == layout.m_tile_bytes
        assert all(size == layout.stage_bytes for size in sizes[:-1])
        assert 0 < sizes[-1] <= layout.stage_bytes
        assert sizes == [layout.chunk_tiles(chunk) * 1024 for chunk in range(layout.chunks)]


def test_round_widths_and_positions_agree_with_the_split():
    for layout in SMALL:
        split = layout.split
        assert [layout.wave_width(r) for r in range(layout.waves)] == [split.width(r) for r in range(split.waves)]
        for block in range(layout.blocks):
            position = layout.position(block)
            owned = [layout.m_tile(r, position) for r in range(layout.waves) if position < layout.wave_width(r)]
            assert owned == list(split.owned(block))
            assert layout.block_bytes(block) == len(owned) * layout.m_tile_bytes


def test_slices_part_the_chunks_of_a_m_tile_and_move_nothing():
    for layout in SMALL:
        for slices in (1, 2, 3, layout.chunks, layout.chunks + 1):
            sliced = replace(layout, slices=slices)
            chunks = [chunk for number in range(slices) for chunk in range(*sliced.slice_range(number))]
            assert chunks == list(range(layout.chunks)), sliced
            lengths = [end - first for first, end in map(sliced.slice_range, range(slices))]
            assert max(lengths) == sliced.slice_chunks and lengths == sorted(lengths, reverse=True)
            assert sliced.total_bytes == layout.total_bytes
            place = (0, layout.position(0), 0, layout.wave_width(0))
            assert sliced.address(*place) == layout.address(*place)


def test_the_longest_slice_is_what_must_be_in_memory_at_once():
    for layout in SMALL:
        for slices in (1, 2, 3, 8):
            sliced = replace(layout, slices=slices)
            pairs = [sum(map(sliced.chunk_tiles, range(*sliced.slice_range(number)))) for number in range(slices)]
            longest = slice_columns(layout.padded_columns, layout.stage_bytes, slices, halves=layout.halves)
            assert longest == layout.tile_columns * max(pairs), sliced


@pytest.mark.slow
def test_device_expressions_give_the_same_addresses():
    wave, chunk, position, block = map(Symbol, ("wave", "chunk", "position", "block"))
    for layout in SMALL:
        width = layout.wave_width(wave)
        address = layout.address(wave, chunk, position, width)
        for r, c, p in chunks_in_memory_order(layout):
            expected = layout.address(r, c, p, layout.wave_width(r))
            assert evaluate(address, wave=r, chunk=c, position=p) == expected, layout
        place = layout.position(block)
        assert [evaluate(place, block=b) for b in range(layout.blocks)] == [
            layout.position(b) for b in range(layout.blocks)
        ]


def test_pieces_are_the_k_tiles_of_chunks_in_order():
    for layout in (one for one in SMALL if one.tiles_per_chunk >= one.halves):
        tiles = []
        for piece in range(layout.pieces):
            chunk = piece // layout.halves
            in_chunk = layout.piece_address(piece, 0, 1) - layout.chunk_address(chunk, 0, 1)
            assert in_chunk + 1024 * layout.tiles_of_piece(piece) <= layout.chunk_bytes(chunk), layout
            first = chunk * layout.tiles_per_chunk + in_chunk // 1024
            tiles += range(first, first + layout.tiles_of_piece(piece))
        assert tiles == list(range(layout.k_tiles)), layout


def test_narrow_m_tiles_are_twice_as_many_of_half_the_bytes():
    layout = MatrixLayout("w", rows=6 * 16, columns=10 * 64, blocks=4, stage_bytes=4096)
    narrow = replace(layout, tile_rows=8)
    assert (narrow.m_tiles, narrow.k_tiles, narrow.chunks, narrow.waves) == (12, 10, 3, 3)
    assert (layout.m_tiles, layout.k_tiles, layout.chunks, layout.waves) == (6, 20, 5, 2)
    assert (narrow.full_m_tiles, narrow.total_bytes) == (layout.m_tiles, layout.total_bytes)
    assert (narrow.block_bytes(0), layout.block_bytes(0)) == (3 * 10240, 2 * 20480)


def test_padding_reaches_whole_m_tiles_and_k_tiles():
    layout = MatrixLayout("w", rows=17, columns=33, blocks=2, stage_bytes=1024)
    assert (layout.padded_rows, layout.padded_columns, layout.total_bytes) == (32, 64, 4096)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, r"MatrixLayout\('w'\): rows is 0"),
        ({"columns": -1}, "columns is -1"),
        ({"stage_bytes": 1000}, "stage_bytes is 1000: give a multiple of 1024"),
        ({"start": 4}, "start is 4 with 4 blocks: give 0 to 3"),
        ({"slices": 0}, r"MatrixLayout\('w'\): slices is 0"),
        ({"offset": 520}, "offset is 520: give a multiple of 16"),
        ({"tile_rows": 4}, "tile_rows is 4 with weights in bf16: give 16, or 8 with those in bf16"),
        ({"tile_rows": 8, "format": tile_format("int8"), "stage_bytes": 8192}, "tile_rows is 8 with .* int8"),
    ],
)
def test_impossible_layouts_are_refused(change, message):
    arguments = {"name": "w", "rows": 16, "columns": 32, "blocks": 4, "stage_bytes": 4096, **change}
    with pytest.raises(PlanError, match=message):
        MatrixLayout(**arguments)
