"""Packing: against a slow writer made from the written contract, exactly invertible, and every byte written once."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cheetah.models.dense.pack_weights import BLOCKS_AHEAD, pack_all
from cheetah.models.dense.weights import buffer_bytes, logical_matrix, matrix_tensors, tensor_shapes
from cheetah.models.family import Packing
from cheetah.models.formats import PackingError, pack_matrix, unpack_matrix
from cheetah.models.formats.bf16 import Bf16
from cheetah.models.llama import LlamaConfig
from cheetah.models.registry import PRESETS
from cheetah.plan import GPUS, MatrixLayout, default_plan, step_matrices

ODD = LlamaConfig(
    hidden_size=72, intermediate_size=100, layers=2, query_heads=4, kv_heads=2, head_dim=64, vocab_size=77
)
layouts = st.builds(
    MatrixLayout,
    name=st.just("any"),
    rows=st.integers(1, 150),
    columns=st.integers(1, 200),
    blocks=st.integers(1, 7),
    stage_bytes=st.integers(1, 4).map(lambda pairs: pairs * 1024),
    tile_rows=st.sampled_from([16, 8]),
)

pack_m_tiles = Bf16().pack_m_tiles


def slow_pack(layout, matrix):
    """One element at a time, as the contract writes it down."""
    packed = np.zeros(layout.total_bytes // 2, dtype=np.uint16)
    for row in range(layout.rows):
        m_tile, r = divmod(row, layout.tile_rows)
        for column in range(layout.columns):
            pair, c = divmod(column, layout.tile_columns)
            half, c = divmod(c, 32)
            chunk, inner = divmod(pair, layout.tiles_per_chunk)
            t, h, low_high = c // 8, c % 8 // 4, c % 4
            lane = 4 * (r % 8) + t
            word = (2 if low_high >= 2 else 0) + (1 if r >= 8 or half else 0)
            wave, position = divmod(m_tile, layout.blocks)
            address = layout.address(wave, chunk, position, layout.wave_width(wave))
            offset = address + inner * 1024 + h * 512 + lane * 16 + word * 4
            packed[offset // 2 + low_high % 2] = matrix[row, column]
    return packed.view(np.uint8)


def random_bits(shape, seed=0):
    return np.random.default_rng(seed).integers(1, 2**16, shape, dtype=np.uint16)


@pytest.mark.slow
@given(layouts)
@settings(max_examples=25, deadline=None)
def test_packing_is_what_the_slow_writer_writes(layout):
    matrix = random_bits((layout.rows, layout.columns))
    assert np.array_equal(pack_matrix(layout, matrix), slow_pack(layout, matrix))


@given(layouts)
@settings(max_examples=100, deadline=None)
def test_unpacking_gives_the_matrix_back(layout):
    matrix = random_bits((layout.rows, layout.columns))
    assert np.array_equal(unpack_matrix(layout, pack_matrix(layout, matrix)), matrix)


@given(layouts, st.data())
@settings(max_examples=50, deadline=None)
def test_packing_in_pieces_is_packing_at_once(layout, data):
    matrix = random_bits((layout.padded_rows, layout.padded_columns))
    whole = pack_matrix(replace(layout, rows=layout.padded_rows, columns=layout.padded_columns), matrix)
    cut = data.draw(st.integers(0, layout.waves))
    m_tiles = min(cut * layout.blocks, layout.m_tiles)
    pieces = np.full(layout.total_bytes, 0xFF, dtype=np.uint8)
    rows = m_tiles * layout.tile_rows
    pack_m_tiles(layout, range(m_tiles), matrix[:rows], pieces[: m_tiles * layout.m_tile_bytes])
    rest = range(m_tiles, layout.m_tiles)
    pack_m_tiles(layout, rest, matrix[rows:], pieces[m_tiles * layout.m_tile_bytes :], first_wave=cut)
    assert np.array_equal(pieces, whole)


@given(layouts, st.data())
@settings(max_examples=50, deadline=None)
def test_any_m_tiles_find_their_places(layout, data):
    matrix = random_bits((layout.padded_rows, layout.padded_columns))
    whole = pack_matrix(replace(layout, rows=layout.padded_rows, columns=layout.padded_columns), matrix)
    cuts = sorted({0, layout.m_tiles, *data.draw(st.lists(st.integers(0, layout.m_tiles)))})
    packed = np.full(layout.total_bytes, 0xFF, dtype=np.uint8)
    for first, stop in zip(cuts[:-1], cuts[1:], strict=True):
        height = layout.tile_rows
        pack_m_tiles(layout, range(first, stop), matrix[first * height : stop * height], packed)
    assert np.array_equal(packed, whole)


def test_golden_words_of_one_tile_pair():
    matrix = np.arange(16 * 32, dtype=np.uint16).reshape(16, 32)  # the value is 32 * row + column
    words = pack_matrix(MatrixLayout("any", 16, 32, 1, 1024), matrix).view(np.uint16).reshape(2, 32, 4, 2)
    assert words[0, 0].tolist() == [[0, 1], [256, 257], [2, 3], [258, 259]]
    assert words[1, 0].tolist() == [[4, 5], [260, 261], [6, 7], [262, 263]]
    g, t = 3, 2
    assert words[1, 4 * g + t, 3].tolist() == [32 * (g + 8) + 8 * t + 4 + 2, 32 * (g + 8) + 8 * t + 4 + 3]


def test_golden_words_of_a_narrow_tile():
    matrix = np.arange(8 * 64, dtype=np.uint16).reshape(8, 64)  # the value is 64 * row + column
    words = pack_matrix(MatrixLayout("any", 8, 64, 1, 1024, tile_rows=8), matrix).view(np.uint16).reshape(2, 32, 4, 2)
    assert words[0, 0].tolist() == [[0, 1], [32, 33], [2, 3], [34, 35]]
    g, t = 3, 2
    assert words[1, 4 * g + t, 3].tolist() == [64 * g + 32 + 8 * t + 4 + 2, 64 * g + 32 + 8 * t + 4 + 3]


def test_wrong_sizes_are_refused():
    layout = MatrixLayout("down", 40, 70, 2, 1024)
    with pytest.raises(PackingError, match=r"matrix 'down': shape \[40, 71\], its layout says \[40, 70\]"):
        pack_matrix(layout, random_bits((40, 71)))
    with pytest.raises(PackingError, match="its layout says uint8"):
        unpack_matrix(layout, np.zeros(7, dtype=np.uint8))
    with pytest.raises(PackingError, match="wave 1 is not in a buffer of 6144 bytes"):
        pack_m_tiles(layout, range(3), random_bits((48, 96)), np.zeros(2 * 16 * 96 * 2, dtype=np.uint8))
    with pytest.raises(PackingError, match="wave 0 is not in a buffer of 9216 bytes"):
        pack_m_tiles(layout, range(3), random_bits((48, 96)), np.zeros(48 * 96 * 2, dtype=np.uint8), first_wave=1)


def some_tensors(config):
    return {name: random_bits(shape, seed) for seed, (name, shape) in enumerate(tensor_shapes(config).items())}


def of_matrix(config, tensors, matrix, layer=0):
    return tuple(tensors[name] for name in matrix_tensors(config, matrix, layer))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_qkv_row_order(head_dim):
    config = replace(ODD, head_dim=head_dim)
    q, k, v = of_matrix(config, some_tensors(config), "qkv")
    rows = logical_matrix(config, "qkv", (q, k, v))
    per_head = head_dim // 16
    for source, first_head in ((q, 0), (k, 4)):
        for head in range(len(source) // head_dim):
            for j in range(per_head):
                m_tile = rows[((first_head + head) * per_head + j) * 16 :][:16]
                low = head * head_dim + 8 * j
                assert np.array_equal(m_tile[:8], source[low : low + 8])
                assert np.array_equal(m_tile[8:], source[low + head_dim // 2 :][:8])
    assert np.array_equal(rows[6 * head_dim :], v)


def test_gate_up_row_order_fills_the_last_m_tile_with_zeros():
    gate, up = of_matrix(ODD, some_tensors(ODD), "gate_up")
    rows = logical_matrix(ODD, "gate_up", (gate, up)).reshape(13, 2, 8, 72)
    assert np.array_equal(rows[:, 0].reshape(104, 72)[:100], gate)
    assert np.array_equal(rows[:, 1].reshape(104, 72)[:100], up)
    assert not rows[12, :, 4:].any()


def matrices_of(config, gpu="emulator"):
    shape = config.shape
    return step_matrices(shape, default_plan(GPUS[gpu], shape), GPUS[gpu])


def packed(config, tensors, matrices, **options):
    """The buffers that `pack_all` writes; bytes written twice or not at all are failures."""
    sizes = buffer_bytes(config, matrices)
    buffers = {name: np.zeros(size, dtype=np.uint8) for name, size in sizes.items()}
    written = {name: np.zeros(size, dtype=np.uint8) for name, size in sizes.items()}
    done = []

    def write(buffer, offset, data):
        assert data.dtype == np.uint8 and data.flags.c_contiguous
        buffers[buffer][offset : offset + data.nbytes] = data
        written[buffer][offset : offset + data.nbytes] += 1

    pack_all(config, matrices, Packing(tensors.__getitem__, write, done.append, **options))
    assert all(np.all(counts == 1) for counts in written.values())
    assert sum(done) == sum(sizes.values())
    return buffers


class InParts:
    """`Rows` that are no array, that overwrite what they gave before, and that note the largest part asked for."""

    def __init__(self, values, largest):
        self.values, self.shape, self.largest = values, values.shape, largest
        self.memory = threading.local()

    def __getitem__(self, part):
        if hasattr(self.memory, "last"):
            self.memory.last[:] = 0xFFFF
        self.memory.last = self.values[part].copy()
        self.largest.append(self.memory.last.nbytes)
        return self.memory.last


@pytest.mark.parametrize("threads", [1, 3])
def test_matrices_that_are_read_in_parts_are_packed_alike(small_pieces, threads):
    config = replace(ODD, hidden_size=320, head_dim=128)
    tensors, matrices, largest = some_tensors(config), matrices_of(config), []
    whole = packed(config, tensors, matrices)
    parts = packed(config, tensors, matrices, rows=lambda name: InParts(tensors[name], largest), threads=threads)
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    assert max(largest) <= 40_000, "no more than a piece is read at a time"


def test_an_error_in_a_thread_ends_the_packing():
    config, tensors = ODD, some_tensors(ODD)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(KeyError, match="down_proj"):
        packed(config, tensors, matrices_of(config))


def test_pieces_are_handed_out_in_order_and_memory_is_used_again(small_pieces):
    config = replace(ODD, hidden_size=320)
    places, offsets = set(), []

    def write(buffer, offset, data):
        places.add(data.ctypes.data)
        if buffer == "weights":
            offsets.append(offset)

    pack_all(config, matrices_of(config), Packing(some_tensors(config).__getitem__, write, threads=2))
    assert offsets == sorted(offsets) and len(offsets) > 30
    assert max(places) - min(places) < 2 * BLOCKS_AHEAD * 20_000, "a few pieces at a time, in a ring"


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr("cheetah.models.dense.pack_weights.PIECE_BYTES", 40_000)
    monkeypatch.setattr("cheetah.models.dense.pack_weights.BLOCK_BYTES", 20_000)


@pytest.mark.parametrize("nbytes", [1, 40_000, 2**25])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("hidden", [72, 96, 320])
def test_pack_all(monkeypatch, nbytes, tied, hidden):
    for name in ("PIECE_BYTES", "BLOCK_BYTES"):
        monkeypatch.setattr(f"cheetah.models.dense.pack_weights.{name}", nbytes)
    config = replace(ODD, hidden_size=hidden, tied_embeddings=tied)
    tensors, matrices = some_tensors(config), matrices_of(config)
    assert ("lm_head.weight" in tensors) != tied
    buffers = packed(config, tensors, matrices)
    for layout in matrices:
        name = layout.name
        for layer in range(matrices.copies(layout)):
            offset = matrices.offset(name, layer)
            found = unpack_matrix(layout, buffers["weights"][offset : offset + layout.total_bytes])
            assert np.array_equal(found, logical_matrix(config, name, of_matrix(config, tensors, name, layer)))
    padded = config.padded_hidden
    embedding = buffers["embedding"].view(np.uint16).reshape(-1, padded)
    assert np.array_equal(embedding[:, :hidden], tensors["model.embed_tokens.weight"])
    assert not embedding[:, hidden:].any()
    norms = buffers["norms"].view(np.uint16).reshape(-1, padded)
    assert not norms[:, hidden:].any()
    wanted = [
        tensors[f"model.layers.{layer}.{kind}_layernorm.weight"]
        for layer in range(2)
        for kind in ("input", "post_attention")
    ]
    assert np.array_equal(norms[:, :hidden], np.stack([*wanted, tensors["model.norm.weight"]]))


def test_tensor_shapes_count_the_parameters():
    for config in PRESETS.values():
        assert sum(int(np.prod(shape)) for shape in tensor_shapes(config).values()) == config.parameter_count
