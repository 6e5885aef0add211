"""What passes between blocks: stores and loads of global memory with their order."""

from __future__ import annotations

import textwrap

from cheetah.lang import types as ty
from cheetah.lang.primitive import Primitive, declare

_PUBLISH = """
uint64_t word = (uint64_t)epoch << 32 | data;
asm volatile("st.{}.gpu.global.u64 [%0], %1;" :: "l"(place), "l"(word) : "memory");
"""
_WAIT4 = """
uint64_t a, b, c, d;
do {{
  asm volatile("ld.{0}.gpu.global.v2.u64 {{%0, %1}}, [%2];" : "=l"(a), "=l"(b) : "l"(words) : "memory");
  asm volatile("ld.{0}.gpu.global.v2.u64 {{%0, %1}}, [%2];" : "=l"(c), "=l"(d) : "l"(words + 2) : "memory");
}} while ((uint32_t)(a >> 32) != epoch || (uint32_t)(b >> 32) != epoch ||
         (uint32_t)(c >> 32) != epoch || (uint32_t)(d >> 32) != epoch);
return make_uint4((uint32_t)a, (uint32_t)b, (uint32_t)c, (uint32_t)d);
"""
_WAIT_UNITS = """
uint64_t word[8][4];
bool missing;
do {
  missing = false;
  #pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    if (i < count) {
      const uint64_t* place = words + OFFSET;
      asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
        : "=l"(word[i][0]), "=l"(word[i][1]) : "l"(place) : "memory");
      asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
        : "=l"(word[i][2]), "=l"(word[i][3]) : "l"(place + 2) : "memory");
    }
  }
  #pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    if (i < count) {
      #pragma unroll
      for (uint32_t j = 0; j < 4; ++j) missing |= (uint32_t)(word[i][j] >> 32) != epoch;
      data[i] = make_uint4((uint32_t)word[i][0], (uint32_t)word[i][1], (uint32_t)word[i][2], (uint32_t)word[i][3]);
    }
  }
} while (missing);
"""
UNITS = 8
"""Most units of four words that one thread waits for together."""
publish_flagged = declare(
    "void publish_flagged(uint64_t* place, uint32_t data, uint32_t epoch)",
    _PUBLISH.format("relaxed"),
    "one 8-byte store of data and epoch: the epoch vouches for the data",
)
publish_flagged_release = declare(
    "void publish_flagged_release(uint64_t* place, uint32_t data, uint32_t epoch)",
    _PUBLISH.format("release"),
    "the same, after all that this thread has seen done",
)
wait_flagged4 = declare(
    "uint4 wait_flagged4(const uint64_t* words, uint32_t epoch)",
    _WAIT4.format("relaxed"),
    "the data of four words, once all carry the epoch",
)
ask_flagged4 = declare(
    "void ask_flagged4(uint64_t (&asked)[4], const uint64_t* words)",
    """
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
      : "=l"(asked[0]), "=l"(asked[1]) : "l"(words) : "memory");
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
      : "=l"(asked[2]), "=l"(asked[3]) : "l"(words + 2) : "memory");
    """,
    "begins to load four words, there or not, for `settle_flagged4`: what comes between hides the trip",
)
settle_flagged4 = declare(
    "uint4 settle_flagged4(uint64_t (&asked)[4], const uint64_t* words, uint32_t epoch)",
    """
    while ((uint32_t)(asked[0] >> 32) != epoch || (uint32_t)(asked[1] >> 32) != epoch ||
           (uint32_t)(asked[2] >> 32) != epoch || (uint32_t)(asked[3] >> 32) != epoch) {
      asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
        : "=l"(asked[0]), "=l"(asked[1]) : "l"(words) : "memory");
      asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
        : "=l"(asked[2]), "=l"(asked[3]) : "l"(words + 2) : "memory");
    }
    return make_uint4((uint32_t)asked[0], (uint32_t)asked[1], (uint32_t)asked[2], (uint32_t)asked[3]);
    """,
    "the data of four words that were asked for, once all carry the epoch",
)
wait_flagged_units = declare(
    "void wait_flagged_units(uint4 (&data)[8], const uint64_t* words, uint32_t stride, uint32_t count, uint32_t epoch)",
    _WAIT_UNITS.replace("OFFSET", "i * stride"),
    "the data of `count` (at most 8) units of four words, `stride` words apart, once all carry the epoch",
)
wait_flagged_places = declare(
    "void wait_flagged_places(uint4 (&data)[8], const uint64_t* words, uint32_t (&offsets)[8], "
    "uint32_t count, uint32_t epoch)",
    _WAIT_UNITS.replace("OFFSET", "offsets[i]"),
    "the data of `count` (at most 8) units of four words, at word offsets of their own, once all carry the epoch",
)


def _tagged(cuda: str) -> str:
    """A body that knows the tag of its epoch."""
    tag = "const uint32_t number = epoch % 3 + 1, tag = (number & 1) << 14 | (number & 2) << 29;"
    return f"{tag}\n{textwrap.dedent(cuda).strip()}"


publish_tagged = declare(
    "void publish_tagged(uint32_t* place, uint32_t data, uint32_t exponent, uint32_t epoch)",
    _tagged("""
    const uint32_t factor = (127 - exponent << 7) * 0x00010001;
    uint32_t word;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(data), "r"(factor));
    uint32_t too_large = (word >> 14 & 0x00010001) * 0xFFFF;
    word = word & ~too_large | too_large & 0x3FFF3FFF | tag;
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(place), "r"(word) : "memory");
    """),
    "one 4-byte store of two bf16 numbers times 2^-exponent, with a tag, which follows from the epoch, in the highest "
    "bits of their exponents, which are free below 2; others, and what is no number, become the largest below 2",
)
wait_tagged4 = declare(
    "uint4 wait_tagged4(const uint32_t* words, uint32_t exponent, uint32_t epoch)",
    _tagged("""
    const uint32_t factor = (127 + exponent << 7) * 0x00010001;
    uint32_t word[4];
    do {
      asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "l"(words) : "memory");
      for (uint32_t j = 0; j < 4; ++j) word[j] ^= tag;
    } while ((word[0] | word[1] | word[2] | word[3]) & 0x40004000);
    for (uint32_t j = 0; j < 4; ++j)
      asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(word[j]) : "r"(word[j]), "r"(factor));
    return make_uint4(word[0], word[1], word[2], word[3]);
    """),
    "the pairs of four tagged words as they were before they were published, once all carry the tag of the epoch",
)
wait_tagged_units = declare(
    "void wait_tagged_units(uint4 (&data)[8], const uint32_t* words, uint32_t stride, uint32_t count, "
    "uint32_t exponent, uint32_t epoch)",
    _tagged("""
    const uint32_t factor = (127 + exponent << 7) * 0x00010001;
    uint32_t word[8][4];
    uint32_t missing;
    do {
      missing = 0;
      #pragma unroll
      for (uint32_t i = 0; i < 8; ++i) {
        if (i < count) {
          asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(word[i][0]), "=r"(word[i][1]), "=r"(word[i][2]), "=r"(word[i][3])
            : "l"(words + i * stride) : "memory");
        }
      }
      #pragma unroll
      for (uint32_t i = 0; i < 8; ++i) {
        if (i < count) {
          #pragma unroll
          for (uint32_t j = 0; j < 4; ++j) missing |= word[i][j] ^= tag;
        }
      }
    } while (missing & 0x40004000);
    #pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      if (i < count) {
        #pragma unroll
        for (uint32_t j = 0; j < 4; ++j)
          asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(word[i][j]) : "r"(word[i][j]), "r"(factor));
        data[i] = make_uint4(word[i][0], word[i][1], word[i][2], word[i][3]);
      }
    }
    """),
    "the same of `count` (at most 8) units of four words, `stride` words apart",
)
wait_flagged4_acquire = declare(
    "uint4 wait_flagged4_acquire(const uint64_t* words, uint32_t epoch)",
    _WAIT4.format("acquire"),
    "the same; what the publishers had done is visible after it",
)
add_release_u64 = declare(
    "void add_release_u64(uint64_t* place, uint64_t value)",
    'asm volatile("red.release.gpu.global.add.u64 [%0], %1;" :: "l"(place), "l"(value) : "memory");',
    "atomic addition after all that this thread has seen done",
)
fetch_add_release_u64 = declare(
    "uint64_t fetch_add_release_u64(uint64_t* place, uint64_t value)",
    """
    uint64_t before;
    asm volatile("atom.release.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(place), "l"(value) : "memory");
    return before;
    """,
    "the same, giving the value before the addition",
)
wait_at_least_u64 = declare(
    "void wait_at_least_u64(const uint64_t* place, uint64_t value)",
    """
    uint64_t seen;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(place) : "memory");
    } while (seen < value);
    """,
    "polls until the counter reaches a value (acquire)",
)
store_relaxed_u32 = declare(
    "void store_relaxed_u32(uint32_t* place, uint32_t value)",
    'asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(place), "r"(value) : "memory");',
    "a store that others may read at any time",
)
load_relaxed_u32 = declare(
    "uint32_t load_relaxed_u32(const uint32_t* place)",
    """
    uint32_t result;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(result) : "l"(place) : "memory");
    return result;
    """,
    "a load of what others may write at any time",
)
load_constant_u32 = declare(
    "uint32_t load_constant_u32(const void* place)",
    """
    uint32_t result;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(result) : "l"(place));
    return result;
    """,
    "a load of memory that nobody writes during the launch",
)
load_constant_u32x4 = declare(
    "uint4 load_constant_u32x4(const void* place)",
    """
    uint4 result;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w) : "l"(place));
    return result;
    """,
    "16 bytes of memory that nobody writes during the launch",
)
_TO_PEER = "memory of another GPU, where no thread waits for it; a release behind it tells those there"


def _store_to_peer(name: str, type_: ty.Type) -> Primitive:
    return declare(f"void store_to_peer_{name}({type_}* place, {type_} value)", "*place = value;", _TO_PEER)


store_to_peer_u16 = _store_to_peer("u16", ty.u16)
store_to_peer_u32 = _store_to_peer("u32", ty.u32)
store_to_peer_u32x2 = _store_to_peer("u32x2", ty.u32x2)
store_to_peer_u32x4 = _store_to_peer("u32x4", ty.u32x4)
store_to_peer_f32 = _store_to_peer("f32", ty.f32)
store_to_peer_bf16 = _store_to_peer("bf16", ty.bf16)
