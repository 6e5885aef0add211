"""Bits, conversions and arithmetic: plain functions of their arguments."""

from __future__ import annotations

from functools import partial

from cheetah.lang.primitive import declare

pure = partial(declare, pure=True)

float_bits = pure("uint32_t float_bits(float value)", "return __float_as_uint(value);", "the 32 bits of a float")
bits_float = pure("float bits_float(uint32_t bits)", "return __uint_as_float(bits);", "the float with these 32 bits")
infinity = pure("float infinity()", "return __uint_as_float(0x7f800000);", "the float above all numbers")
not_a_number = pure("float not_a_number()", "return __uint_as_float(0x7fffffff);", "a NaN")
bf16_to_f32 = pure("float bf16_to_f32(bf16 value)", "return __uint_as_float((uint32_t)value.bits << 16);", "exact")
f32_to_bf16 = pure(
    "bf16 f32_to_bf16(float value)",
    """
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
    """,
    "rounded to nearest even",
)
pack_bf16x2 = pure(
    "uint32_t pack_bf16x2(float low, float high)",
    """
    uint32_t result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
    """,
    "two floats rounded to bf16; `low` in the low half",
)
bf16x2_low = pure("float bf16x2_low(uint32_t pair)", "return __uint_as_float(pair << 16);", "the low bf16 of a pair")
bf16x2_high = pure(
    "float bf16x2_high(uint32_t pair)",
    "return __uint_as_float(pair & 0xffff0000u);",
    "the high bf16 of a pair",
)
pack_f16x2 = pure(
    "uint32_t pack_f16x2(float low, float high)",
    """
    uint32_t result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
    """,
    "two floats rounded to f16; `low` in the low half",
)
e4m3x4_to_f16 = pure(
    "uint2 e4m3x4_to_f16(uint32_t codes)",
    """
    uint2 result;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; "
        "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(result.x), "=r"(result.y) : "r"(codes));
    return result;
    """,
    "four e4m3 codes, the first in the lowest byte, as f16 pairs: exact",
)
f16x2_low = pure(
    "float f16x2_low(uint32_t pair)",
    """
    float result;
    asm("{ .reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(result) : "r"(pair));
    return result;
    """,
    "the low f16 of a pair, exactly",
)
f16x2_high = pure(
    "float f16x2_high(uint32_t pair)",
    """
    float result;
    asm("{ .reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high; }" : "=f"(result) : "r"(pair));
    return result;
    """,
    "the high f16 of a pair, exactly",
)
e4m3x4_to_bf16 = pure(
    "uint2 e4m3x4_to_bf16(uint32_t codes)",
    """
    // A code's exponent and mantissa, put at the low end of a bf16's, stand for its value times 2^-120, also where it
    // is subnormal; the product is exact.
    uint32_t low = __byte_perm(codes, 0, 0x1404), high = __byte_perm(codes, 0, 0x3424);
    low = (low & 0x80008000u) | ((low >> 4) & 0x07f007f0u);
    high = (high & 0x80008000u) | ((high >> 4) & 0x07f007f0u);
    uint2 result;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result.x) : "r"(low), "r"(0x7b807b80u));
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result.y) : "r"(high), "r"(0x7b807b80u));
    return result;
    """,
    "four e4m3 codes, the first in the lowest byte, as bf16 pairs: exact (the NaN code gives 480)",
)
multiply_bf16x2 = pure(
    "uint32_t multiply_bf16x2(uint32_t a, uint32_t b)",
    """
    uint32_t result;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
    """,
    "the products of two pairs of bf16, rounded to nearest even",
)
subtract_bf16x2 = pure(
    "uint32_t subtract_bf16x2(uint32_t a, uint32_t b)",
    """
    uint32_t result;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
    """,
    "the differences of two pairs of bf16, rounded to nearest even",
)
e4m3x2_from_f32 = pure(
    "uint32_t e4m3x2_from_f32(float low, float high)",
    """
    uint16_t result;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
    return result;
    """,
    "two floats rounded to nearest even e4m3 codes, saturating at 448; `low` in the low byte",
)
maximum_u16x2 = pure(
    "uint32_t maximum_u16x2(uint32_t a, uint32_t b)",
    """
    uint32_t result;
    asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
    """,
    "the larger halves of two words, each half by itself",
)
byte_permute = pure(
    "uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector)",
    "return __byte_perm(a, b, selector);",
    "four of the eight bytes of b:a, chosen by nibbles",
)
choose_bytes = pure(
    "uint32_t choose_bytes(uint32_t a, uint32_t b, uint32_t selector)",
    """
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
    """,
    "the same, for selectors that the device makes: the compiler masks those of `byte_permute`",
)
multiplied_u32 = pure(
    "uint32_t multiplied_u32(uint32_t word, uint32_t factor)",
    """
    return word * (blockDim.y * factor);  // blocks have one row of threads, which the compiler does not know
    """,
    "word * factor by the multiplier, also by a power of two: a shift goes to the pipe of masks and comparisons",
)
select_bits_u32 = pure(
    "uint32_t select_bits_u32(uint32_t mask, uint32_t word, uint32_t others)",
    """
    uint32_t result;  // written with a constant and its complement, it would be two instructions
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(result) : "r"(mask), "r"(word), "r"(others));
    return result;
    """,
    "(word & mask) | (others & ~mask), in one instruction",
)
multiply_high_u32 = pure(
    "uint32_t multiply_high_u32(uint32_t a, uint32_t b)",
    "return __umulhi(a, b);",
    "upper half of the 64-bit product",
)
population_u32 = pure("uint32_t population_u32(uint32_t word)", "return __popc(word);", "how many of its bits are set")
fma_f32 = pure(
    "float fma_f32(float a, float b, float c)",
    "return __fmaf_rn(a, b, c);",
    "a * b + c, rounded once; where a text says `a * b + c`, both are rounded: no compiler fuses them",
)
exp2_f32 = pure(
    "float exp2_f32(float value)",
    """
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
    """,
    "2^value (hardware approximation, 2 ulp)",
)
exp_f32 = pure("float exp_f32(float value)", "return __expf(value);", "e^value (fast)")
log_f32 = pure("float log_f32(float value)", "return logf(value);", "natural logarithm, accurate")
rsqrt_f32 = pure("float rsqrt_f32(float value)", "return rsqrtf(value);", "1/sqrt(value)")
divide_f32 = pure("float divide_f32(float a, float b)", "return __fdividef(a, b);", "a/b (fast)")
tanh_f32 = pure("float tanh_f32(float value)", "return tanhf(value);", "hyperbolic tangent")
maximum_f32 = pure(
    "float maximum_f32(float a, float b)", "return fmaxf(a, b);", "the larger; the other one if one is NaN"
)
global_timer = declare(
    "uint64_t global_timer()",
    """
    uint64_t result;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(result));
    return result;
    """,
    "nanoseconds; ticks coarsely",
)
