"""Bits, conversions and arithmetic: plain functions of their arguments."""

from __future__ import annotations

from cheetah.lang import types as ty
from cheetah.lang.primitive import declare

float_bits = declare(
    "float_bits", ty.u32, "return __float_as_uint(value);", "the 32 bits of a float", pure=True, value=ty.f32
)
bits_float = declare(
    "bits_float", ty.f32, "return __uint_as_float(bits);", "the float with these 32 bits", pure=True, bits=ty.u32
)
bf16_to_f32 = declare(
    "bf16_to_f32", ty.f32, "return __uint_as_float((uint32_t)value.bits << 16);", "exact", pure=True, value=ty.bf16
)
f32_to_bf16 = declare(
    "f32_to_bf16",
    ty.bf16,
    """
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
    """,
    "rounded to nearest even",
    pure=True,
    value=ty.f32,
)
pack_bf16x2 = declare(
    "pack_bf16x2",
    ty.u32,
    """
    uint32_t result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
    """,
    "two floats rounded to bf16; `low` in the low half",
    pure=True,
    low=ty.f32,
    high=ty.f32,
)
bf16x2_low = declare(
    "bf16x2_low", ty.f32, "return __uint_as_float(pair << 16);", "the low bf16 of a pair", pure=True, pair=ty.u32
)
bf16x2_high = declare(
    "bf16x2_high",
    ty.f32,
    "return __uint_as_float(pair & 0xffff0000u);",
    "the high bf16 of a pair",
    pure=True,
    pair=ty.u32,
)
pack_f16x2 = declare(
    "pack_f16x2",
    ty.u32,
    """
    uint32_t result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
    """,
    "two floats rounded to f16; `low` in the low half",
    pure=True,
    low=ty.f32,
    high=ty.f32,
)
e4m3x4_to_f16 = declare(
    "e4m3x4_to_f16",
    ty.u32x2,
    """
    uint2 result;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; "
        "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(result.x), "=r"(result.y) : "r"(codes));
    return result;
    """,
    "four e4m3 codes, the first in the lowest byte, as f16 pairs: exact",
    pure=True,
    codes=ty.u32,
)
f16x2_low = declare(
    "f16x2_low",
    ty.f32,
    """
    float result;
    asm("{ .reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(result) : "r"(pair));
    return result;
    """,
    "the low f16 of a pair, exactly",
    pure=True,
    pair=ty.u32,
)
f16x2_high = declare(
    "f16x2_high",
    ty.f32,
    """
    float result;
    asm("{ .reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high; }" : "=f"(result) : "r"(pair));
    return result;
    """,
    "the high f16 of a pair, exactly",
    pure=True,
    pair=ty.u32,
)
e4m3x4_to_bf16 = declare(
    "e4m3x4_to_bf16",
    ty.u32x2,
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
    pure=True,
    codes=ty.u32,
)
multiply_bf16x2 = declare(
    "multiply_bf16x2",
    ty.u32,
    """
    uint32_t result;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
    """,
    "the products of two pairs of bf16, rounded to nearest even",
    pure=True,
    a=ty.u32,
    b=ty.u32,
)
e4m3x2_from_f32 = declare(
    "e4m3x2_from_f32",
    ty.u32,
    """
    uint16_t result;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
    return result;
    """,
    "two floats rounded to nearest even e4m3 codes, saturating at 448; `low` in the low byte",
    pure=True,
    low=ty.f32,
    high=ty.f32,
)
maximum_u16x2 = declare(
    "maximum_u16x2",
    ty.u32,
    """
    uint32_t result;
    asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
    """,
    "the larger halves of two words, each half by itself",
    pure=True,
    a=ty.u32,
    b=ty.u32,
)
byte_permute = declare(
    "byte_permute",
    ty.u32,
    "return __byte_perm(a, b, selector);",
    "four of the eight bytes of b:a, chosen by nibbles",
    pure=True,
    a=ty.u32,
    b=ty.u32,
    selector=ty.u32,
)
multiplied_u32 = declare(
    "multiplied_u32",
    ty.u32,
    """
    return word * (blockDim.y * factor);  // blocks have one row of threads, which the compiler does not know
    """,
    "word * factor by the multiplier, also by a power of two: a shift goes to the pipe of masks and comparisons",
    pure=True,
    word=ty.u32,
    factor=ty.u32,
)
select_bits_u32 = declare(
    "select_bits_u32",
    ty.u32,
    """
    uint32_t result;  // written with a constant and its complement, it would be two instructions
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(result) : "r"(mask), "r"(word), "r"(others));
    return result;
    """,
    "(word & mask) | (others & ~mask), in one instruction",
    pure=True,
    mask=ty.u32,
    word=ty.u32,
    others=ty.u32,
)
multiply_high_u32 = declare(
    "multiply_high_u32",
    ty.u32,
    "return __umulhi(a, b);",
    "upper half of the 64-bit product",
    pure=True,
    a=ty.u32,
    b=ty.u32,
)
population_u32 = declare(
    "population_u32", ty.u32, "return __popc(word);", "how many of its bits are set", pure=True, word=ty.u32
)
fma_f32 = declare(
    "fma_f32",
    ty.f32,
    "return __fmaf_rn(a, b, c);",
    "a * b + c, rounded once; where a text says `a * b + c`, both are rounded: no compiler fuses them",
    pure=True,
    a=ty.f32,
    b=ty.f32,
    c=ty.f32,
)
exp2_f32 = declare(
    "exp2_f32",
    ty.f32,
    """
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
    """,
    "2^value (hardware approximation, 2 ulp)",
    pure=True,
    value=ty.f32,
)
exp_f32 = declare("exp_f32", ty.f32, "return __expf(value);", "e^value (fast)", pure=True, value=ty.f32)
log_f32 = declare("log_f32", ty.f32, "return logf(value);", "natural logarithm, accurate", pure=True, value=ty.f32)
rsqrt_f32 = declare("rsqrt_f32", ty.f32, "return rsqrtf(value);", "1/sqrt(value)", pure=True, value=ty.f32)
divide_f32 = declare("divide_f32", ty.f32, "return __fdividef(a, b);", "a/b (fast)", pure=True, a=ty.f32, b=ty.f32)
tanh_f32 = declare("tanh_f32", ty.f32, "return tanhf(value);", "hyperbolic tangent", pure=True, value=ty.f32)
maximum_f32 = declare(
    "maximum_f32",
    ty.f32,
    "return fmaxf(a, b);",
    "the larger; the other one if one is NaN",
    pure=True,
    a=ty.f32,
    b=ty.f32,
)
global_timer = declare(
    "global_timer",
    ty.u64,
    """
    uint64_t result;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(result));
    return result;
    """,
    "nanoseconds; ticks coarsely",
)
