"""The CUDA bodies of primitives, held to the emulator's, which have texts of their own: their bit arithmetic runs here
over random and boundary words, with each PTX instruction as the PTX ISA has it. On a GPU `make gpu-test` runs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

from cheetah.emulator import allocate, compile_program
from cheetah.lang import prim
from cheetah.lang.primitive import PRIMITIVES, Primitive
from tests.tiers import tiered

pytestmark = pytest.mark.compiler

OF_WORDS = (
    *("multiply_bf16x2", "select_bits_u32", "maximum_u16x2", "pack_bf16x2", "pack_f16x2", "f16x2_low", "f16x2_high"),
    *("bf16x2_low", "bf16x2_high", "byte_permute", "multiply_high_u32", "e4m3x4_to_bf16", "float_bits", "bits_float"),
    *("population_u32", "choose_bytes", "subtract_bf16x2"),
)
"""Those that make words of words alone."""
MODELS = r"""
#include <cmath>
#include <cstring>
namespace ptx {
float number(uint32_t bits) { float value; std::memcpy(&value, &bits, 4); return value; }
uint32_t bits(float value) { uint32_t word; std::memcpy(&word, &value, 4); return word; }

// To the nearest of a format with `mantissa` bits and exponents from `least` on, ties to even.
double rounded(double value, int mantissa, int least) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), least) - mantissa;
  return std::ldexp(std::nearbyint(std::ldexp(value, -exponent)), exponent);
}
uint32_t bf16(double value) {
  if (std::isnan(value)) return 0x7FFF;
  return bits(float(rounded(value, 7, -126))) >> 16;
}
uint32_t f16(double value) {
  if (std::isnan(value)) return 0x7FFF;
  const double near = rounded(value, 10, -14), size = std::fabs(near);
  const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
  if (size >= 65536) return sign | 0x7C00;
  if (size < std::ldexp(1, -14)) return sign | uint32_t(std::ldexp(size, 24));
  const int exponent = std::ilogb(size);
  return sign | (uint32_t(exponent + 15) << 10) | uint32_t(std::ldexp(size, 10 - exponent) - 1024);
}
float of_f16(uint32_t half) {
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
  const double size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                      : exponent ? std::ldexp(1024.0 + mantissa, int(exponent) - 25) : std::ldexp(mantissa, -24);
  return float(half & 0x8000 ? -size : size);
}

void mul_rn_bf16x2(uint32_t& result, uint32_t a, uint32_t b) {
  const uint32_t low = bf16(double(number(a << 16)) * number(b << 16));
  result = low | bf16(double(number(a & 0xFFFF0000)) * number(b & 0xFFFF0000)) << 16;
}
void sub_rn_bf16x2(uint32_t& result, uint32_t a, uint32_t b) {
  const uint32_t low = bf16(double(number(a << 16)) - number(b << 16));
  result = low | bf16(double(number(a & 0xFFFF0000)) - number(b & 0xFFFF0000)) << 16;
}
void lop3_b32_0xca(uint32_t& result, uint32_t a, uint32_t b, uint32_t c) { result = (a & b) | (~a & c); }
void prmt_b32(uint32_t& result, uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  result = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t which = selector >> 4 * i & 15, byte = bytes >> 8 * (which & 7) & 255;
    result |= (which & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
}
void max_u16x2(uint32_t& result, uint32_t a, uint32_t b) {
  result = std::max(a & 0xFFFF, b & 0xFFFF) | std::max(a >> 16, b >> 16) << 16;
}
void cvt_rn_bf16x2_f32(uint32_t& result, float high, float low) { result = bf16(high) << 16 | bf16(low); }
void cvt_rn_f16x2_f32(uint32_t& result, float high, float low) { result = f16(high) << 16 | f16(low); }
void f16_low(float& result, uint32_t pair) { result = of_f16(pair & 0xFFFF); }
void f16_high(float& result, uint32_t pair) { result = of_f16(pair >> 16); }

// Memory in which a word comes late: behind so many loads.
uint32_t loads, late_at;
void (*come)();
void loaded() { if (++loads == late_at) come(); }
void ld_v4_u32(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const uint32_t* words) {
  loaded(); a = words[0]; b = words[1]; c = words[2]; d = words[3];
}
void ld_v2_u64(uint64_t& a, uint64_t& b, const uint64_t* words) { loaded(); a = words[0]; b = words[1]; }
void st_u32(uint32_t* place, uint32_t word) { *place = word; }
void st_u64(uint64_t* place, uint64_t word) { *place = word; }
}  // namespace ptx
"""
INTRINSICS = r"""
float __uint_as_float(uint32_t word) { return ptx::number(word); }
uint32_t __float_as_uint(float value) { return ptx::bits(value); }
uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
uint32_t __popc(uint32_t word) {
  uint32_t count = 0;
  for (; word; word >>= 1) count += word & 1;
  return count;
}
uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  ptx::prmt_b32(result, a, b, selector);
  return result;
}
uint4 make_uint4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return {a, b, c, d}; }
"""
INSTRUCTIONS = {
    r"mul\.rn\.bf16x2 ": "mul_rn_bf16x2",
    r"sub\.rn\.bf16x2 ": "sub_rn_bf16x2",
    r"lop3\.b32 .*0xca": "lop3_b32_0xca",
    r"max\.u16x2 ": "max_u16x2",
    r"prmt\.b32 ": "prmt_b32",
    r"cvt\.rn\.bf16x2\.f32 ": "cvt_rn_bf16x2_f32",
    r"cvt\.rn\.f16x2\.f32 ": "cvt_rn_f16x2_f32",
    r".*cvt\.f32\.f16 %0, low": "f16_low",
    r".*cvt\.f32\.f16 %0, high": "f16_high",
    r"ld\.(relaxed|acquire)\.gpu\.global\.v4\.u32 ": "ld_v4_u32",
    r"ld\.(relaxed|acquire)\.gpu\.global\.v2\.u64 ": "ld_v2_u64",
    r"st\.(relaxed|release)\.gpu\.global\.u32 ": "st_u32",
    r"st\.(relaxed|release)\.gpu\.global\.u64 ": "st_u64",
}
ASM = re.compile(r'asm\s*(?:volatile)?\s*\(\s*"([^"]*)"\s*:(.*?)\)\s*;', re.DOTALL)
OPERAND = re.compile(r'"=?[rlfh]"\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)')


def modelled(primitive: Primitive) -> str:
    """The CUDA body as C++, each instruction a call of its model."""

    def call(match: re.Match[str]) -> str:
        (name,) = (model for pattern, model in INSTRUCTIONS.items() if re.match(pattern, match[1]))
        return f"ptx::{name}({', '.join(OPERAND.findall(match[2]))});"

    text = ASM.sub(call, primitive.cuda_text().replace("__device__ __forceinline__", "inline"))
    assert "asm" not in text, text
    return text


def calls(name: str) -> Iterator[str]:
    """Of a primitive of words alone, by both: what each made, word by word."""
    primitive = PRIMITIVES[name]
    arguments = []
    for number, type_ in enumerate(primitive.parameters.values()):
        word = f"words[i + {number * 7919} < count ? i + {number * 7919} : i * {number + 3} % count]"
        arguments.append(f"ptx::number({word})" if str(type_) == "float" else word)
    made = ", ".join(arguments)
    for where, place in (("cuda::", "ours"), ("::", "theirs")):
        yield f"{{ auto made = {where}{name}({made}); std::memcpy({place} + at, &made, sizeof made); }}"


WAITS = r"""
// A unit's words, of which one comes late, waited for by the CUDA body; then the same words by the emulator's.
template <typename Word, typename Cuda, typename Emulated>
void wait_with_one_late(Word* memory, Word stale, uint32_t place, uint32_t late_at, Cuda cuda, Emulated emulated) {
  static Word* late;
  static Word there;
  late = memory + place;
  there = *late;
  *late = stale;
  ptx::loads = 0;
  ptx::late_at = late_at;
  ptx::come = [] { *late = there; };
  cuda();
  *late = there;
  emulated();
}
"""
OF_WAITS = r"""
  uint32_t* tagged = memory;
  uint64_t* flagged = (uint64_t*)memory;
  for (uint32_t e = 0; e < 6; e++) {
    const uint32_t epoch = 1000 + e, exponent = e % 2 ? 60 : 32;
    for (uint32_t i = 0; i < count; i++) {  // one word, stored by both
      cuda::publish_tagged(ours + at, words[i], exponent, epoch);
      ::publish_tagged(theirs + at, words[i], exponent, epoch);
      at++;
    }
    for (uint32_t late = 0; late < 32; late++) {
      const uint32_t unit = late / 4, stride = 8;
      for (uint32_t i = 0; i < 64; i++) ::publish_tagged(tagged + i, words[(late * 64 + i) % count], exponent, epoch);
      const uint32_t stale = tagged[unit * stride + late % 4] ^ 0x40004000;
      uint4 mine[8] = {}, its[8] = {};
      wait_with_one_late<uint32_t>(
        tagged, stale, unit * stride + late % 4, 19,
        [&] { cuda::wait_tagged_units(mine, tagged, stride, unit + 1, exponent, epoch); },
        [&] { ::wait_tagged_units(its, tagged, stride, unit + 1, exponent, epoch); });
      std::memcpy(ours + at, mine, sizeof mine);
      std::memcpy(theirs + at, its, sizeof its);
      at += 32;
      wait_with_one_late<uint32_t>(
        tagged, stale, unit * stride + late % 4, 3,
        [&] { mine[0] = cuda::wait_tagged4(tagged + unit * stride, exponent, epoch); },
        [&] { its[0] = ::wait_tagged4(tagged + unit * stride, exponent, epoch); });
      std::memcpy(ours + at, mine, 16);
      std::memcpy(theirs + at, its, 16);
      at += 4;
      for (uint32_t i = 0; i < 64; i++) {
        cuda::publish_flagged(flagged + i, words[(late * 64 + i) % count], epoch);
        const uint64_t by_cuda = flagged[i];
        ::publish_flagged(flagged + i, words[(late * 64 + i) % count], epoch);
        ours[at] = by_cuda == flagged[i], theirs[at++] = 1;
      }
      const uint64_t old = flagged[unit * stride + late % 4] - (1ull << 32);
      uint32_t places[8];
      for (uint32_t i = 0; i < 8; i++) places[i] = i * stride;
      const uint32_t which = unit * stride + late % 4;
#define CHEETAH_FLAGGED(by_cuda, by_emulator)                                                        \
      wait_with_one_late<uint64_t>(flagged, old, which, 35, [&] { by_cuda; }, [&] { by_emulator; }); \
      std::memcpy(ours + at, mine, sizeof mine);                                                     \
      std::memcpy(theirs + at, its, sizeof its);                                                     \
      at += 32;
      CHEETAH_FLAGGED(cuda::wait_flagged_units(mine, flagged, stride, unit + 1, epoch),
                      ::wait_flagged_units(its, flagged, stride, unit + 1, epoch))
      CHEETAH_FLAGGED(cuda::wait_flagged_places(mine, flagged, places, unit + 1, epoch),
                      ::wait_flagged_places(its, flagged, places, unit + 1, epoch))
      CHEETAH_FLAGGED(mine[0] = cuda::wait_flagged4(flagged + unit * stride, epoch),
                      its[0] = ::wait_flagged4(flagged + unit * stride, epoch))
      CHEETAH_FLAGGED(mine[0] = cuda::wait_flagged4_acquire(flagged + unit * stride, epoch),
                      its[0] = ::wait_flagged4_acquire(flagged + unit * stride, epoch))
      uint64_t asked[4];
      CHEETAH_FLAGGED(
        (cuda::ask_flagged4(asked, flagged + unit * stride),
         mine[0] = cuda::settle_flagged4(asked, flagged + unit * stride, epoch)),
        (::ask_flagged4(asked, flagged + unit * stride),
         its[0] = ::settle_flagged4(asked, flagged + unit * stride, epoch)))
    }
  }
"""
OF_EXCHANGES = (
    *(
        "publish_tagged",
        "wait_tagged4",
        "wait_tagged_units",
        "publish_flagged",
        "wait_flagged4",
        "wait_flagged4_acquire",
    ),
    *("ask_flagged4", "settle_flagged4", "wait_flagged_units", "wait_flagged_places"),
)


def words() -> np.ndarray:
    """Both halves of boundary numbers, every code, and random words."""
    edges = [0, 1, 0x7F, 0x80, 0x81, 0x3F80, 0x3F7F, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF, 0x3FFF, 0x4000, 0x4F7F]
    halves = np.array([*edges, *(edge | 0x8000 for edge in edges), 0x4F80, 0x5D80, 0x5DFF, 0x5E00, 0x2000], np.uint32)
    pairs = (halves[:, None] << 16 | halves).reshape(-1)
    codes = np.arange(0, 2**16, 97, dtype=np.uint32)
    random = np.random.default_rng(0).integers(0, 2**32, 1500, dtype=np.uint32)
    return np.concatenate([pairs, codes | codes << 16, random]).astype(np.uint32)


def text_of(listed: tuple[str, ...]) -> str:
    bodies = "\n".join(modelled(PRIMITIVES[name]) for name in listed)
    of_words = "\n    ".join(
        f"{one} {two} at += 2;" for one, two in (calls(name) for name in OF_WORDS if name in listed)
    )
    return "\n".join(
        [
            '#ifdef CHEETAH_EMULATOR\n#include "cheetah_emulator.h"\n#endif\n#include <algorithm>',
            MODELS,
            f"namespace cuda {{{INTRINSICS}{bodies}}}",
            WAITS,
            'extern "C" __global__ void bodies(uint32_t* words, uint32_t count, uint32_t* memory, uint32_t* ours, '
            "uint32_t* theirs, uint32_t* made) {\n  uint32_t at = 0;",
            f"  for (uint32_t i = 0; i < count; i++) {{\n    {of_words}\n  }}",
            "  made[0] = at;",
            OF_WAITS,
            "  made[1] = at;\n}",
        ]
    )


def difference(text: str) -> str:
    """Where the two differ first, or ""."""
    parameters = [("words", "uint32_t*"), ("count", "uint32_t"), ("memory", "uint32_t*"), ("ours", "uint32_t*")]
    program = compile_program(text, "bodies", [*parameters, ("theirs", "uint32_t*"), ("made", "uint32_t*")])
    given, memory, made = words(), allocate(256, np.uint32, 0), allocate(2, np.uint32, 0)
    ours, theirs = (allocate(2 * len(OF_WORDS) * len(given) + 200_000, np.uint32, 0) for _ in range(2))
    program.launch(1, 1, 64, [given, len(given), memory, ours, theirs, made], switch_limit=10**7)
    are_no_numbers = (ours & 0x7FFFFFFF > 0x7F800000) & (theirs & 0x7FFFFFFF > 0x7F800000)  # whichever NaN they are
    wrong = np.flatnonzero((ours != theirs) & ~(are_no_numbers & (np.arange(ours.size) < made[0])))
    if not wrong.size:
        return ""
    first = int(wrong[0])
    name = OF_WORDS[first // 2 % len(OF_WORDS)] if first < made[0] else "an exchange's words"
    return f"{name}: word {first} is {ours[first]:#x} by CUDA's body, {theirs[first]:#x} by the emulator's"


def test_bodies_give_the_same_words() -> None:
    assert difference(text_of((*OF_WORDS, *OF_EXCHANGES))) == ""


WRONG = {
    "three words of four": ("word[0] | word[1] | word[2] | word[3]", "word[0] | word[1] | word[2]"),
    "three words of four of a unit": ("j < 4; ++j) missing |= word[i][j]", "j < 3; ++j) missing |= word[i][j]"),
    "too large becomes 0": ("word & ~too_large | too_large & 0x3FFF3FFF", "word & ~too_large"),
    "codes' signs": ("(low & 0x80008000u)", "(low & 0x00008000u)"),
    "a flagged word in another's place": ("make_uint4((uint32_t)a, (uint32_t)b", "make_uint4((uint32_t)b, (uint32_t)a"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", tiered(WRONG, ["codes' signs", "three words of four", "too large becomes 0"]))
def test_wrong_bodies_are_found(bug: str) -> None:
    right = text_of((*OF_WORDS, *OF_EXCHANGES))
    assert WRONG[bug][0] in right
    assert difference(right.replace(*WRONG[bug]))


def test_all_pure_bodies_of_words_are_looked_at() -> None:
    """Those that take and give words alone, but for what the hardware approximates or a host's float does by itself."""
    by_itself = {"fma_f32", "exp2_f32", "exp_f32", "log_f32", "rsqrt_f32", "tanh_f32", "divide_f32", "maximum_f32"}
    others = {
        "infinity",
        "not_a_number",
        "f32_to_bf16",
        "bf16_to_f32",
        "e4m3x4_to_f16",
        "e4m3x2_from_f32",
        "multiplied_u32",
        "make_u32x4",
    }
    pure = {
        name
        for name in dir(prim)
        if isinstance(one := getattr(prim, name), Primitive)
        and one.pure
        and all(str(type_) in ("uint32_t", "float") for type_ in one.parameters.values())
    }
    assert pure - set(OF_WORDS) <= by_itself | others
