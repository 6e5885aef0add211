"""Tensor cores and the fragments that a warp holds."""

from __future__ import annotations

from cheetah.lang import types as ty
from cheetah.lang.primitive import ANY, ANY_MUT, Primitive, declare

_FRAGMENT = ty.array(ty.f32, 4)

mma_bf16 = declare(
    "mma_bf16",
    ty.void,
    """
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    """,
    "c += a (16 x 16) * b (16 x 8), fragments as in the PTX manual",
    c=_FRAGMENT,
    a=ty.u32x4,
    b0=ty.u32,
    b1=ty.u32,
)
mma_f16 = declare(
    "mma_f16",
    ty.void,
    """
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    """,
    "the same of f16 numbers",
    c=_FRAGMENT,
    a=ty.u32x4,
    b0=ty.u32,
    b1=ty.u32,
)
mma_u8_s8 = declare(
    "mma_u8_s8",
    ty.void,
    """
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    """,
    "c += a (16 x 32 unsigned bytes) * b (32 x 8 signed bytes), fragments as in the PTX manual",
    c=ty.array(ty.i32, 4),
    a=ty.u32x4,
    b0=ty.u32,
    b1=ty.u32,
)


def _product_of_2of4(selector: int) -> Primitive:
    return declare(
        f"mma_2of4_bf16_{selector}",
        ty.void,
        f"""
        asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "
          "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9, %10, %11}}, {{%0, %1, %2, %3}}, %12, {selector};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w),
            "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(metadata));
        """,
        "c += a (16 x 32, of whose columns two of four are there) * b (32 x 8), fragments as in the PTX manual; "
        f"metadata: of lanes {2 * selector} and {2 * selector + 1} of each four",
        c=_FRAGMENT,
        a=ty.u32x4,
        b=ty.u32x4,
        metadata=ty.u32,
    )


mma_2of4_bf16_0 = _product_of_2of4(0)
mma_2of4_bf16_1 = _product_of_2of4(1)
mma_2of4_s8 = declare(
    "mma_2of4_s8",
    ty.void,
    """
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0;"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w),
        "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(metadata));
    """,
    "c += a (16 x 64 signed bytes, of whose columns two of four are there) * b (64 x 8 signed bytes), fragments as in "
    "the PTX manual; metadata: of all lanes",
    c=ty.array(ty.i32, 4),
    a=ty.u32x4,
    b=ty.u32x4,
    metadata=ty.u32,
)
matrix_transpose_b16 = declare(
    "matrix_transpose_b16",
    ty.u32,
    """
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
    """,
    "the transposed 8 x 8 matrix of 16-bit elements that the warp holds",
    pair=ty.u32,
)
store_matrices_b16 = declare(
    "store_matrices_b16",
    ty.void,
    """
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
      :: "r"((uint32_t)__cvta_generic_to_shared(row)), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
      : "memory");
    """,
    "the four 8 x 8 matrices of 16-bit elements that the warp holds, transposed: lane 8m + r says where row r of "
    "matrix m goes, 16 bytes of shared memory",
    row=ANY_MUT,
    words=ty.u32x4,
)
load_matrices_b16 = declare(
    "load_matrices_b16",
    ty.u32x4,
    """
    uint4 words;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "r"((uint32_t)__cvta_generic_to_shared(row)) : "memory");
    return words;
    """,
    "the inverse of `store_matrices_b16`",
    row=ANY,
)
load_rows_b16 = declare(
    "load_rows_b16",
    ty.u32x4,
    """
    uint4 words;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "r"((uint32_t)__cvta_generic_to_shared(row)) : "memory");
    return words;
    """,
    "four 8 x 8 matrices of 16-bit elements from shared memory: lane 8m + r says where row r of matrix m is, and lane "
    "4r + t gets its word t of each",
    row=ANY,
)
make_u32x2 = declare(
    "make_u32x2",
    ty.u32x2,
    "return make_uint2(x, y);",
    "two words as one",
    pure=True,
    x=ty.u32,
    y=ty.u32,
)
make_u32x4 = declare(
    "make_u32x4",
    ty.u32x4,
    "return make_uint4(x, y, z, w);",
    "four words as one vector",
    pure=True,
    x=ty.u32,
    y=ty.u32,
    z=ty.u32,
    w=ty.u32,
)

_PRODUCTS_OF_2OF4 = (mma_2of4_bf16_0, mma_2of4_bf16_1)


def mma_2of4_bf16(selector: int) -> Primitive:
    """The product that takes its metadata from lanes 2 * selector and the next of each four."""
    return _PRODUCTS_OF_2OF4[selector]
