"""Each primitive against its meaning, worked out by numpy or by hand."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cheetah.emulator import SCHEDULERS, allocate
from tests.emulator.kernels import program

pytestmark = pytest.mark.compiler


@pytest.fixture
def draw() -> np.random.Generator:
    return np.random.default_rng(11)


def bf16_words(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def test_indices_name_every_thread_once() -> None:
    body = """
      const uint32_t thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      const uint32_t block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      x[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1 + blockIdx.y * 1000 + threadIdx.z * 100;
    """
    x = np.zeros((2, 3, 5, 2, 4), np.uint32)
    program(body, "uint32_t* x").launch((3, 2), (4, 2, 5), 0, [x])
    expected = 1 + 1000 * np.arange(2)[:, None, None, None, None] + 100 * np.arange(5)[:, None, None]
    np.testing.assert_array_equal(x, np.broadcast_to(expected, x.shape))


def test_shared_memory_is_poisoned_aligned_and_one_for_each_block() -> None:
    body = """
      uint32_t* words = (uint32_t*)shared_arena();
      if (threadIdx.x == 0) {
        seen[3 * blockIdx.x] = words[10];
        seen[3 * blockIdx.x + 1] = (uint64_t)shared_arena() % 1024;
        words[10] = blockIdx.x;
      }
      block_barrier();
      if (thread_index() == 63) seen[3 * blockIdx.x + 2] = words[10];
    """
    seen = np.zeros((4, 3), np.uint32)
    program(body, "uint32_t* seen").launch(4, 64, 100, [seen])
    np.testing.assert_array_equal(seen, [[0xFFFFFFFF, 0, block] for block in range(4)])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_shuffles(scheduler: str, draw: np.random.Generator) -> None:
    body = """
      const uint32_t i = threadIdx.x;
      out[i] = shuffle_xor_u32(x[i], 5);
      out[64 + i] = float_bits(shuffle_xor_f32(bits_float(x[i]), 16));
      out[128 + i] = shuffle_u32(x[i], (i * 7 + 3) % 32);
      out[192 + i] = warp_maximum_u32(x[i]);
    """
    x = draw.integers(0, 1 << 30, 64, dtype=np.uint32)
    out = np.zeros((4, 64), np.uint32)
    program(body, "const uint32_t* x, uint32_t* out").launch(1, 64, 0, [x, out], scheduler=scheduler, seed=1)
    thread, lanes = np.arange(64), np.arange(64) % 32
    first = thread - lanes
    np.testing.assert_array_equal(out[0], x[first + (lanes ^ 5)])
    np.testing.assert_array_equal(out[1], x[first + (lanes ^ 16)])
    np.testing.assert_array_equal(out[2], x[first + (thread * 7 + 3) % 32])
    np.testing.assert_array_equal(out[3], x.reshape(2, 32).max(axis=1).repeat(32))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_warp_s_sum_and_maximum_are_on_every_lane(scheduler: str, draw: np.random.Generator) -> None:
    body = """
      sums[threadIdx.x] = warp_sum_u32(x[threadIdx.x]);
      highest[threadIdx.x] = warp_maximum_u32(x[threadIdx.x]);
    """
    x = draw.integers(0, 1 << 32, 64, dtype=np.uint32)
    sums, highest = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    arrays = "const uint32_t* x, uint32_t* sums, uint32_t* highest"
    program(body, arrays).launch(1, 64, 0, [x, sums, highest], scheduler=scheduler, seed=1)
    np.testing.assert_array_equal(sums, np.repeat(x.reshape(2, 32).sum(1, dtype=np.uint32), 32))
    np.testing.assert_array_equal(highest, np.repeat(x.reshape(2, 32).max(1), 32))


def test_warp_sum_has_the_bits_of_five_shuffles(draw: np.random.Generator) -> None:
    body = """
      float v = x[threadIdx.x];
      sums[threadIdx.x] = warp_sum_f32(v);
      for (uint32_t mask = 16; mask; mask /= 2) v = v + shuffle_xor_f32(v, mask);
      shuffled[threadIdx.x] = v;
    """
    x = draw.standard_normal(32).astype(np.float32) * 1e3
    sums, shuffled = np.zeros(32, np.float32), np.zeros(32, np.float32)
    program(body, "const float* x, float* sums, float* shuffled").launch(1, 32, 0, [x, sums, shuffled])
    assert sums.tobytes() == shuffled.tobytes()
    np.testing.assert_allclose(sums, np.full(32, x.sum(dtype=np.float64)), rtol=1e-5)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("name", "dtype"), [("mma_bf16", ml_dtypes.bfloat16), ("mma_f16", np.float16)])
def test_mma_multiplies_fragments_laid_out_as_ptx_says(
    scheduler: str, draw: np.random.Generator, name: str, dtype: Any
) -> None:
    body = """
      const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
      auto pair = [](const uint16_t* m, uint32_t at) { return (uint32_t)m[at + 1] << 16 | m[at]; };
      float c[4];
      for (uint32_t i = 0; i < 4; i++) c[i] = d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
      uint4 fragment;
      fragment.x = pair(a, g * 16 + 2 * t);
      fragment.y = pair(a, (g + 8) * 16 + 2 * t);
      fragment.z = pair(a, g * 16 + 2 * t + 8);
      fragment.w = pair(a, (g + 8) * 16 + 2 * t + 8);
      const uint32_t b0 = (uint32_t)b[(2 * t + 1) * 8 + g] << 16 | b[2 * t * 8 + g];
      const uint32_t b1 = (uint32_t)b[(2 * t + 9) * 8 + g] << 16 | b[(2 * t + 8) * 8 + g];
      MMA(c, fragment, b0, b1);
      MMA(c, fragment, b0, b1);
      if (threadIdx.x < 32) for (uint32_t i = 0; i < 4; i++) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = c[i];
    """
    a, b = draw.standard_normal((16, 16)), draw.standard_normal((16, 8))
    d = draw.standard_normal((16, 8)).astype(np.float32)
    rounded = [values.astype(dtype) for values in (a, b)]
    expected = d + 2 * rounded[0].astype(np.float64) @ rounded[1].astype(np.float64)
    signature = "const uint16_t* a, const uint16_t* b, float* d"
    words = [values.view(np.uint16) for values in rounded]
    program(body.replace("MMA", name), signature).launch(1, 32, 0, [*words, d], scheduler=scheduler)
    np.testing.assert_allclose(d, expected, rtol=1e-5, atol=1e-5)


def test_mma_of_bytes_multiplies_fragments_laid_out_as_ptx_says(draw: np.random.Generator) -> None:
    body = """
      const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
      int32_t c[4];
      for (uint32_t i = 0; i < 4; i++) c[i] = d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
      uint4 fragment;
      fragment.x = a[g * 8 + t];
      fragment.y = a[(g + 8) * 8 + t];
      fragment.z = a[g * 8 + t + 4];
      fragment.w = a[(g + 8) * 8 + t + 4];
      mma_u8_s8(c, fragment, b[g * 8 + t], b[g * 8 + t + 4]);
      for (uint32_t i = 0; i < 4; i++) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = c[i];
    """
    a = draw.integers(0, 256, (16, 32), dtype=np.uint8)
    b = draw.integers(-128, 128, (8, 32), dtype=np.int8)
    d = draw.integers(-(2**31), 2**31, (16, 8), dtype=np.int32)
    with np.errstate(over="ignore"):
        expected = d + a.astype(np.int32) @ b.astype(np.int32).T
    program(body, "const uint32_t* a, const uint32_t* b, int32_t* d").launch(1, 32, 0, [a, b, d])
    np.testing.assert_array_equal(d, expected)


@pytest.mark.parametrize("selector", [0, 1])
def test_mma_of_two_of_four_takes_fragments_and_places_as_ptx_says(draw: np.random.Generator, selector: int) -> None:
    body = """
      const uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4;
      float c[4];
      for (uint32_t i = 0; i < 4; i++) c[i] = d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
      const uint4 fragment = {kept[g * 8 + t], kept[(g + 8) * 8 + t], kept[g * 8 + t + 4], kept[(g + 8) * 8 + t + 4]};
      const uint4 operand = {b[g * 16 + t], b[g * 16 + t + 4], b[g * 16 + t + 8], b[g * 16 + t + 12]};
      // Lanes 2 * selector and the next of four have the places of the first 16 columns and of the others.
      const uint16_t* half = places + t % 2;
      const uint32_t own = (uint32_t)half[(g + 8) * 2] << 16 | half[g * 2];
      mma_2of4_bf16_SELECTOR(c, fragment, operand, t / 2 == SELECTOR ? own : 0xBADBAD);
      for (uint32_t i = 0; i < 4; i++) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = c[i];
    """
    pairs = np.sort(np.argsort(draw.random((16, 8, 4)), axis=2)[..., :2], axis=2)
    kept = draw.standard_normal((16, 8, 2)).astype(ml_dtypes.bfloat16)
    b, d = draw.standard_normal((8, 32)).astype(ml_dtypes.bfloat16), draw.standard_normal((16, 8)).astype(np.float32)
    dense = np.zeros((16, 8, 4))
    np.put_along_axis(dense, pairs, kept.astype(np.float64), 2)
    nibbles = (pairs[..., 0] | pairs[..., 1] << 2).reshape(16, 2, 4)
    places = (nibbles << np.arange(0, 16, 4)).sum(axis=2).astype(np.uint16)
    expected = d + dense.reshape(16, 32) @ b.astype(np.float64).T
    signature = "const uint32_t* kept, const uint32_t* b, const uint16_t* places, float* d"
    program(body.replace("SELECTOR", str(selector)), signature).launch(1, 32, 0, [kept, b, places, d])
    np.testing.assert_allclose(d, expected, rtol=1e-5, atol=1e-5)


def test_mma_of_two_of_four_bytes_takes_fragments_and_places_as_ptx_says(draw: np.random.Generator) -> None:
    body = """
      const uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4;
      int32_t c[4];
      for (uint32_t i = 0; i < 4; i++) c[i] = d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
      const uint4 fragment = {kept[g * 8 + t], kept[(g + 8) * 8 + t], kept[g * 8 + t + 4], kept[(g + 8) * 8 + t + 4]};
      const uint4 operand = {b[g * 16 + t], b[g * 16 + t + 4], b[g * 16 + t + 8], b[g * 16 + t + 12]};
      mma_2of4_s8(c, fragment, operand, places[(g + 8 * (t % 2)) * 2 + t / 2]);
      for (uint32_t i = 0; i < 4; i++) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = c[i];
    """
    pairs = np.sort(np.argsort(draw.random((16, 16, 4)), axis=2)[..., :2], axis=2)
    kept = draw.integers(-128, 128, (16, 16, 2), dtype=np.int8)
    b, d = draw.integers(-128, 128, (8, 64), dtype=np.int8), draw.integers(-(2**31), 2**31, (16, 8), dtype=np.int32)
    dense = np.zeros((16, 16, 4), np.int32)
    np.put_along_axis(dense, pairs, kept.astype(np.int32), 2)
    nibbles = (pairs[..., 0] | pairs[..., 1] << 2).reshape(16, 2, 8)
    places = (nibbles << np.arange(0, 32, 4)).sum(axis=2).astype(np.uint32)
    with np.errstate(over="ignore"):
        expected = d + dense.reshape(16, 64) @ b.astype(np.int32).T
    signature = "const uint32_t* kept, const uint32_t* b, const uint32_t* places, int32_t* d"
    program(body, signature).launch(1, 32, 0, [kept, b, places, d])
    np.testing.assert_array_equal(d, expected)


def test_rows_of_matrices_are_dealt_out_in_words() -> None:
    body = """
      const uint4 words = load_rows_b16(rows + order[threadIdx.x] * 4);
      for (uint32_t i = 0; i < 4; i++) found[threadIdx.x * 4 + i] = (&words.x)[i];
    """
    rows = np.arange(128, dtype=np.uint32)
    order = np.random.default_rng(0).permutation(32).astype(np.uint32)
    found = np.zeros((32, 4), np.uint32)
    program(body, "const uint32_t* rows, const uint32_t* order, uint32_t* found").launch(1, 32, 0, [rows, order, found])
    of_matrices = rows.reshape(32, 4)[order].reshape(4, 8, 4)  # matrix, row, word
    np.testing.assert_array_equal(found.reshape(8, 4, 4), of_matrices.transpose(1, 2, 0))


def test_matrix_transpose() -> None:
    body = "x[threadIdx.x] = matrix_transpose_b16(x[threadIdx.x]);"
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    x = matrix.copy().view(np.uint32)
    program(body, "uint32_t* x").launch(1, 32, 0, [x])
    np.testing.assert_array_equal(x.view(np.uint16), matrix.T)


def test_matrices_to_rows_of_their_own_and_back() -> None:
    body = """
      store_matrices_b16(rows + order[threadIdx.x], words[threadIdx.x]);
      warp_barrier();
      words[threadIdx.x] = load_matrices_b16(rows + order[31 - threadIdx.x]);
    """
    draw = np.random.default_rng(0)
    matrices, order = draw.integers(0, 2**16, (4, 8, 8), dtype=np.uint16), draw.permutation(32).astype(np.uint32)
    words = np.ascontiguousarray(matrices.reshape(4, 32, 2).transpose(1, 0, 2)).view(np.uint32)
    rows = np.zeros((32, 8), np.uint16)
    program(body, "uint4* rows, const uint32_t* order, uint4* words").launch(1, 32, 0, [rows, order, words])
    wanted = matrices.transpose(0, 2, 1).reshape(32, 8)
    np.testing.assert_array_equal(rows[order], wanted)
    back = words.view(np.uint16).reshape(32, 4, 2).transpose(1, 0, 2).reshape(4, 8, 8)
    np.testing.assert_array_equal(back, wanted[::-1].reshape(4, 8, 8).transpose(0, 2, 1))


def test_byte_permute(draw: np.random.Generator) -> None:
    body = "out[threadIdx.x] = byte_permute(a[threadIdx.x], b[threadIdx.x], s[threadIdx.x]);"
    a, b, s = (draw.integers(0, 1 << 32, 1024, dtype=np.uint32) for _ in range(3))
    out = np.zeros(1024, np.uint32)
    program(body, "const uint32_t* a, const uint32_t* b, const uint32_t* s, uint32_t* out").launch(
        1, 1024, 0, [a, b, s, out]
    )
    source = np.stack([a, b], axis=1).view(np.uint8)
    expected = np.zeros((1024, 4), np.uint8)
    for i in range(4):
        pick = s >> np.uint32(4 * i) & 15
        byte = source[np.arange(1024), pick & 7]
        expected[:, i] = np.where(pick & 8, np.where(byte & 128, 255, 0), byte)
    np.testing.assert_array_equal(out, expected.view(np.uint32)[:, 0])


def test_bf16_conversions(draw: np.random.Generator) -> None:
    body = """
      for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        bf16 rounded = f32_to_bf16(x[i]);
        out[i] = rounded.bits;
        const uint32_t packed = pack_bf16x2(x[i], -x[i]);
        ok[i] = bf16x2_low(packed) == bf16_to_f32(rounded) && bf16x2_high(packed) == -bf16_to_f32(rounded);
      }
    """
    special = np.array([0x00000000, 0x80000000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000], np.uint32)
    bits = np.concatenate([special, draw.integers(0, 0x7F800000, 5000, dtype=np.uint32)])
    x = bits.view(np.float32)
    out, ok = np.zeros(x.size, np.uint16), np.zeros(x.size, np.int32)
    kernel = program(body, "const float* x, uint16_t* out, int32_t* ok, uint32_t n")
    kernel.launch(1, 64, 0, [x, out, ok, x.size])
    np.testing.assert_array_equal(out, bf16_words(x))
    assert ok.all()
    nan = np.array([0x7FC00001, 0xFF800001], np.uint32).view(np.float32)
    kernel.launch(1, 32, 0, [nan, out, ok, 2])
    np.testing.assert_array_equal(out[:2], [0x7FFF, 0x7FFF])


def test_f16_pairs_as_floats() -> None:
    """All of them, exactly: subnormal, infinite; a NaN stays one."""
    body = "out[2 * i] = f16x2_low(pairs[i]); out[2 * i + 1] = f16x2_high(pairs[i]);"
    body = f"for (uint32_t i = threadIdx.x; i < 32768; i += 64) {{ {body} }}"
    numbers, out = np.arange(65536, dtype=np.uint16), np.zeros(65536, np.float32)
    program(body, "const uint32_t* pairs, float* out").launch(1, 64, 0, [numbers, out])
    np.testing.assert_array_equal(out, numbers.view(np.float16).astype(np.float32))


def test_products_of_words(draw: np.random.Generator) -> None:
    body = "out[threadIdx.x] = multiplied_u32(x[threadIdx.x], 256);"
    x, out = draw.integers(0, 2**32, 32, dtype=np.uint32), np.zeros(32, np.uint32)
    program(body, "const uint32_t* x, uint32_t* out").launch(1, 32, 0, [x, out])
    np.testing.assert_array_equal(out, x << 8)


def test_larger_halves_of_words(draw: np.random.Generator) -> None:
    body = "out[threadIdx.x] = maximum_u16x2(x[threadIdx.x], x[threadIdx.x + 32]);"
    x, out = draw.integers(0, 2**32, 64, dtype=np.uint32), np.zeros(32, np.uint32)
    program(body, "const uint32_t* x, uint32_t* out").launch(1, 32, 0, [x, out])
    halves = x.view(np.uint16).reshape(2, 64)
    np.testing.assert_array_equal(out, np.maximum(*halves).view(np.uint32))


def test_bits_selected_by_a_mask(draw: np.random.Generator) -> None:
    body = "out[threadIdx.x] = select_bits_u32(0x000f000f, x[threadIdx.x], 0x43054305);"
    x, out = draw.integers(0, 2**32, 32, dtype=np.uint32), np.zeros(32, np.uint32)
    program(body, "const uint32_t* x, uint32_t* out").launch(1, 32, 0, [x, out])
    np.testing.assert_array_equal(out, x & 0x000F000F | 0x43004300)


def test_floats_as_f16_pairs(draw: np.random.Generator) -> None:
    """Nearest even: subnormal, halfway, too large, no number."""
    body = "out[threadIdx.x] = pack_f16x2(x[2 * threadIdx.x], x[2 * threadIdx.x + 1]);"
    wild = draw.standard_normal(980).astype(np.float32) * np.exp2(draw.integers(-26, 17, 980)).astype(np.float32)
    x = np.array([0, -0.0, 65504, 65519, 65520, -1e9, np.inf, 2**-24, 2**-25, 1.5 * 2**-24, 1 + 2**-11, 1 + 3 * 2**-11,
                  2**-14, 2**-14 - 2**-25, 6.1e-5, np.nan, 3, 5, 1e-3, -7], np.float32)  # fmt: skip
    x = np.concatenate([x, wild])
    out = np.zeros(1000, np.uint16)
    program(body, "const float* x, uint32_t* out").launch(1, 500, 0, [x, out])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out.view(np.float16), x.astype(np.float16))


def test_e4m3_codes_as_f16() -> None:
    body = "const uint2 pair = e4m3x4_to_f16(codes[threadIdx.x]); out[threadIdx.x] = pair;"
    codes, out = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint16)
    program(body, "const uint32_t* codes, uint2* out").launch(1, 64, 0, [codes, out])
    np.testing.assert_array_equal(out.view(np.float16), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float16))


def test_e4m3_codes_as_bf16() -> None:
    """All codes, exactly; the two that mean NaN give 480."""
    body = "const uint2 pair = e4m3x4_to_bf16(codes[threadIdx.x]); out[threadIdx.x] = pair;"
    codes, out = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint16)
    program(body, "const uint32_t* codes, uint2* out").launch(1, 64, 0, [codes, out])
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    expected[[0x7F, 0xFF]] = 480, -480
    np.testing.assert_array_equal(out, bf16_words(expected))


def test_e4m3_codes_of_floats(draw: np.random.Generator) -> None:
    """Nearest even, saturating at 448: numbers of every size, halfway cases, infinities, NaN."""
    body = "out[threadIdx.x] = (uint16_t)e4m3x2_from_f32(x[2 * threadIdx.x], x[2 * threadIdx.x + 1]);"
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    halfway = (codes[1:] + codes[:-1]) / 2
    near = np.concatenate([np.nextafter(halfway, np.float32(0)), halfway, np.nextafter(halfway, np.float32(1e9))])
    wild = draw.standard_normal(1000).astype(np.float32) * np.exp(draw.uniform(-12, 8, 1000)).astype(np.float32)
    x = np.concatenate([codes, near, wild, [448, 464, 465, 1e30, np.inf, 0, 1e-30, 2**-10]]).astype(np.float32)
    x = np.concatenate([x, -x])
    x = x[: len(x) // 4 * 4]
    for first in range(0, len(x), 1024):
        part = np.ascontiguousarray(x[first : first + 1024])
        out = np.zeros(len(part), np.uint8)
        program(body, "const float* x, uint16_t* out").launch(1, len(part) // 2, 0, [part, out])
        np.testing.assert_array_equal(out, part.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    out = np.zeros(2, np.uint8)
    program(body, "const float* x, uint16_t* out").launch(1, 1, 0, [np.full(2, np.nan, np.float32), out])
    np.testing.assert_array_equal(out, [0x7F, 0x7F])


def test_arithmetic(draw: np.random.Generator) -> None:
    body = """
      const float v = x[threadIdx.x];
      float* row = out + threadIdx.x;
      row[0] = exp2_f32(v); row[64] = exp_f32(v); row[128] = log_f32(v); row[192] = rsqrt_f32(v);
      row[256] = divide_f32(v, 3.0f); row[320] = bits_float(multiply_high_u32(float_bits(v), 0x80000000u));
      row[384] = maximum_f32(maximum_f32(v, bits_float(0x7FC00000u)), 2.0f);
      row[448] = bits_float(make_u32x4(1, 2, float_bits(v), 4).z); row[512] = tanh_f32(v);
      if (!(infinity() > 3.4028234e38f) || not_a_number() == not_a_number()) row[448] = 0;
      const float square = v * v; row[576] = fma_f32(v, v, -square); row[640] = v * v - square;
    """
    x = draw.uniform(0.1, 5, 64).astype(np.float32)
    out = np.zeros((11, 64), np.float32)
    program(body, "const float* x, float* out").launch(1, 64, 0, [x, out])
    exact = x.astype(np.float64)
    expected = [np.exp2(exact), np.exp(exact), np.log(exact), exact**-0.5, exact / 3]
    np.testing.assert_allclose(out[:5], expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(out[5].view(np.uint32), x.view(np.uint32) >> 1)
    np.testing.assert_array_equal(out[6:8], [np.maximum(x, np.float32(2)), x])
    np.testing.assert_allclose(out[8], np.tanh(exact), rtol=1e-6)
    np.testing.assert_array_equal(out[9], exact**2 - (x * x).astype(np.float64))  # what rounding took away
    assert out[9].any() and not out[10].any(), "a product and a sum were fused, or what is to be was not"


def test_constant_loads() -> None:
    body = """
      const uint4 four = load_constant_u32x4(x + 4);
      if (threadIdx.x == 0) { out[0] = four.x; out[1] = four.w; out[2] = load_constant_u32(x + 1); }
    """
    x = allocate(8, np.uint32)
    x[:] = np.arange(8) * 3
    out = np.zeros(3, np.uint32)
    program(body, "const uint32_t* x, uint32_t* out").launch(1, 32, 0, [x, out])
    np.testing.assert_array_equal(out, [12, 21, 3])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_named_barriers_hand_over(scheduler: str) -> None:
    """Warp 0 produces, warp 1 consumes: 'filled' is barrier 1, 'read' is barrier 2, each for 64 threads."""
    body = """
      volatile uint32_t* slot = (volatile uint32_t*)shared_arena();
      const uint32_t lane = threadIdx.x % 32;
      for (uint32_t i = 0; i < 10; i++) {
        if (threadIdx.x < 32) {
          if (i) named_barrier(2, 64);
          slot[lane] = i * 100 + lane;
          named_barrier(1, 64);
        } else {
          named_barrier(1, 64);
          out[i * 32 + lane] = slot[31 - lane];
          if (i < 9) named_barrier(2, 64);
        }
      }
    """
    for seed in range(5):
        out = np.zeros((10, 32), np.uint32)
        program(body, "uint32_t* out").launch(1, 64, 128, [out], scheduler=scheduler, seed=seed)
        np.testing.assert_array_equal(out, np.arange(10)[:, None] * 100 + 31 - np.arange(32))


def test_a_fresh_mbarrier_has_completed_the_phase_of_parity_one() -> None:
    body = """
      uint64_t* barrier = (uint64_t*)shared_arena();
      if (threadIdx.x == 0) mbarrier_init(barrier, 31);
      block_barrier();
      mbarrier_wait(barrier, 1);
      for (uint32_t phase = 0; phase < 5; phase++) {
        if (threadIdx.x) mbarrier_arrive(barrier);
        mbarrier_wait(barrier, phase & 1);
      }
      x[threadIdx.x] = 1;
    """
    x = np.zeros(32, np.uint32)
    program(body, "uint32_t* x").launch(1, 32, 8, [x])
    assert x.all()


COPIES = """
  uint64_t* barrier = (uint64_t*)shared_arena();
  uint8_t* to = shared_arena() + 64;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_arrive_expect_tx(barrier, 4 * 32);
    for (uint32_t i = 0; i < 4; i++) bulk_copy(to + 32 * i, from + 32 * (3 - i), 32, barrier);
    for (uint32_t i = 0; i < 4; i++) early[i] = to[32 * i];
  }
  block_barrier();
  for (uint32_t i = 0; i < 4; i++) {
    fence_proxy_async();
    if (threadIdx.x == 1) early[4 + i] = to[32 * i];
  }
  mbarrier_wait(barrier, 0);
  out[threadIdx.x] = to[threadIdx.x];
"""


def test_bulk_copies_land_late_and_out_of_order() -> None:
    source = allocate(128, np.uint8)
    source[:] = np.arange(128)
    orders = set()
    for scheduler in SCHEDULERS:
        for seed in range(20):
            out, early = np.zeros(128, np.uint8), np.zeros(8, np.uint8)
            kernel = program(COPIES, "const uint8_t* from, uint8_t* out, uint8_t* early")
            stats = kernel.launch(1, 128, 192, [source, out, early], scheduler=scheduler, seed=seed)
            np.testing.assert_array_equal(out, source.reshape(4, 32)[::-1].reshape(-1))
            assert (stats.copies, stats.copied_bytes) == (4, 128)
            assert (early[:4] == 0xFF).all() or scheduler != "round_robin"
            orders.add(tuple(early[4:] == 0xFF))
    assert len(orders) > 4, "under some schedules a later copy lands before an earlier one"


FLAGGED = """
  const uint32_t partner = blockIdx.x ^ 1;
  for (uint32_t epoch = 1; epoch <= 6; epoch++) {
    uint64_t* slot = words + (epoch % 2) * 256;
    PUBLISH(slot + blockIdx.x * 128 + threadIdx.x, epoch * 1000 + blockIdx.x * 200 + threadIdx.x, epoch);
    const uint4 got = WAIT(slot + partner * 128 + threadIdx.x / 4 * 4, epoch);
    sums[blockIdx.x * 128 + threadIdx.x] += got.x + got.y + got.z + got.w;
    block_barrier();
  }
"""


@pytest.mark.parametrize("publish, wait", [
    ("publish_flagged", "wait_flagged4"), ("publish_flagged_release", "wait_flagged4_acquire"),
])  # fmt: skip
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_flagged_words_cross_blocks(publish: str, wait: str, scheduler: str) -> None:
    kernel = program(FLAGGED.replace("PUBLISH", publish).replace("WAIT", wait), "uint64_t* words, uint32_t* sums")
    block, thread = np.arange(2)[:, None], np.arange(128) // 4 * 4
    expected = sum(4 * (epoch * 1000 + (1 - block) * 200 + thread) + 6 for epoch in range(1, 7))
    for seed in range(5):
        words, sums = allocate((2, 2, 128), np.uint64, fill=0), np.zeros((2, 128), np.uint32)
        kernel.launch(2, 128, 0, [words, sums], scheduler=scheduler, seed=seed)
        np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_words_are_asked_for_before_they_are_there_and_after(scheduler: str) -> None:
    """What was asked for counts if it had come; else it is waited for. Old words are not taken for new ones."""
    body = """
      uint64_t asked[4];
      const uint64_t* wanted = words + threadIdx.x / 4 * 4;
      if (blockIdx.x == 1) ask_flagged4(asked, wanted);
      if (blockIdx.x == 0) publish_flagged(words + threadIdx.x, 7 * threadIdx.x, 3);
      if (blockIdx.x == 2) {
        wait_flagged4(wanted, 3);
        ask_flagged4(asked, wanted);
      }
      if (blockIdx.x > 0) out[(blockIdx.x - 1) * 64 + threadIdx.x] = settle_flagged4(asked, wanted, 3);
    """
    old = np.uint64(2 << 32)
    for seed in range(3):
        words, out = allocate(64, np.uint64, fill=0), np.zeros((2, 64, 4), np.uint32)
        words[:] = old
        program(body, "uint64_t* words, uint4* out").launch(3, 64, 0, [words, out], scheduler=scheduler, seed=seed)
        expected = 7 * (np.arange(64)[:, None] // 4 * 4 + np.arange(4)[None])
        np.testing.assert_array_equal(out, [expected, expected])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_tagged_units_cross_blocks_each_by_itself(scheduler: str) -> None:
    """A thread waits for the units that it wants alone: the last one never comes, and nobody wants it."""
    body = """
      if (blockIdx.x == 0) {
        if (threadIdx.x < 60) publish_tagged(words + threadIdx.x, given[threadIdx.x], 32, 7);
        return;
      }
      uint4 data[8] = {};
      wait_tagged_units(data, words + threadIdx.x % 8 * 4, 32, threadIdx.x % 8 == 7 ? 1 : 2, 32, 7);
      for (uint32_t i = 0; i < 2; i++) out[threadIdx.x * 2 + i] = data[i];
    """
    given = allocate(64, np.uint32, fill=0)
    numbers = np.random.default_rng(1).standard_normal((64, 2)) * 2.0 ** np.random.default_rng(2).integers(
        -60, 32, (64, 2)
    )
    given[:] = (numbers.astype(np.float32).view(np.uint32) >> 16) @ np.array([1, 1 << 16], np.uint32)
    words, out = allocate(64, np.uint32, fill=0), np.zeros((64, 2, 4), np.uint32)
    signature = "uint32_t* words, const uint32_t* given, uint4* out"
    program(body, signature).launch(2, 64, 0, [words, given, out], scheduler=scheduler, seed=2)
    unit = np.arange(64)[:, None] % 8 + np.arange(2)[None] * 8
    np.testing.assert_array_equal(out, np.where((unit < 15)[..., None], given.reshape(16, 4)[unit], 0))


def test_what_no_tagged_word_can_hold_becomes_the_largest_that_one_can() -> None:
    body = """
      publish_tagged(words + threadIdx.x, given[threadIdx.x], 32, 3);
      const uint4 got = wait_tagged4(words, 32, 3);
      if (threadIdx.x == 0) *out = got;
    """
    given = allocate(4, np.uint32, fill=0)
    given[:] = [0x7F803F80, 0xC0007FC0, 0x50004FFF, 0xFF80FFFF]  # (1, inf), (nan, -2), (largest, 2^33), (nan, -inf)
    words, out = allocate(4, np.uint32, fill=0), np.zeros(4, np.uint32)
    program(body, "uint32_t* words, const uint32_t* given, uint4* out").launch(1, 4, 0, [words, given, out])
    np.testing.assert_array_equal(out, [0x4FFF3F80, 0xC0004FFF, 0x4FFF4FFF, 0x4FFF4FFF])


def test_units_from_places_of_their_own() -> None:
    body = """
      publish_flagged(words + threadIdx.x, 7 * threadIdx.x, 3);
      uint4 data[8] = {};
      uint32_t offsets[8];
      for (uint32_t i = 0; i < 8; i++) offsets[i] = (threadIdx.x * 5 + i * 3) % 16 * 4;
      wait_flagged_places(data, words, offsets, threadIdx.x % 9, 3);
      for (uint32_t i = 0; i < 8; i++) out[threadIdx.x * 8 + i] = data[i];
    """
    words, out = allocate(64, np.uint64, fill=0), np.zeros((64, 8, 4), np.uint32)
    program(body, "uint64_t* words, uint4* out").launch(1, 64, 0, [words, out], scheduler="random", seed=2)
    thread, unit = np.arange(64)[:, None], np.arange(8)[None]
    first = (thread * 5 + unit * 3) % 16 * 4
    expected = np.where((unit < thread % 9)[..., None], 7 * (first[..., None] + np.arange(4)), 0)
    np.testing.assert_array_equal(out, expected)


def test_counters_and_relaxed_stores() -> None:
    body = """
      if (threadIdx.x % 2) add_release_u64(counter, 2);
      else if (fetch_add_release_u64(counter, 2) >= 384) return;
      wait_at_least_u64(counter, 2 * gridDim.x * blockDim.x);
      if (threadIdx.x == 0) store_relaxed_u32(&seen[blockIdx.x], load_relaxed_u32((uint32_t*)counter));
      const uint64_t before = global_timer();
      block_barrier();
      if (global_timer() < before) seen[0] = 0;
    """
    counter, seen = np.zeros(1, np.uint64), np.zeros(3, np.uint32)
    program(body, "uint64_t* counter, uint32_t* seen").launch(3, 64, 0, [counter, seen], scheduler="random")
    assert counter[0] == 384
    np.testing.assert_array_equal(seen, [384] * 3)


def test_a_word_of_shared_memory_that_is_looked_at_without_a_barrier() -> None:
    body = """
      uint32_t* word = (uint32_t*)shared_arena();
      if (threadIdx.x == 0) store_shared_u32(word, 0);
      block_barrier();
      if (threadIdx.x == 32) store_shared_u32(word, 7);
      const uint32_t early = load_shared_u32(word);
      block_barrier();
      seen[threadIdx.x] = early == 0 || early == 7 ? load_shared_u32(word) : 0;
    """
    seen = np.zeros(64, np.uint32)
    program(body, "uint32_t* seen").launch(1, 64, 16, [seen], scheduler="random")
    np.testing.assert_array_equal(seen, [7] * 64)


def test_scalars_and_null_arrive_as_given() -> None:
    body = "if (threadIdx.x == 0) { out[0] = a == -3 && b == (7ull << 40) && c == 0.1f && d == 0; }"
    out = np.zeros(1, np.int32)
    kernel = program(body, "int32_t* out, int32_t a, uint64_t b, float c, const uint8_t* d")
    kernel.launch(1, 1, 0, [out, -3, 7 << 40, 0.1, None])
    assert out[0] == 1


def test_a_block_need_not_be_whole_warps() -> None:
    body = "x[threadIdx.x] = shuffle_u32(threadIdx.x, 3); warp_barrier(); block_barrier();"
    x = np.zeros(40, np.uint32)
    program(body, "uint32_t* x").launch(1, 40, 0, [x])
    np.testing.assert_array_equal(x, [3] * 32 + [35] * 8)


def test_equal_seeds_give_equal_schedules() -> None:
    body = "for (int i = 0; i < 20; i++) { add_release_u64(x, 1); block_barrier(); }"
    counts = {seed: set() for seed in range(4)}
    for _ in range(3):
        for seed, seen in counts.items():
            stats = program(body, "uint64_t* x").launch(
                2, 64, 0, [np.zeros(1, np.uint64)], scheduler="random", seed=seed
            )
            seen.add(stats.switches)
    assert all(len(seen) == 1 for seen in counts.values())
    assert len(set.union(*counts.values())) > 1
