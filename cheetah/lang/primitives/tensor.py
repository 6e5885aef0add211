"""Tensor cores and the fragments that a warp holds."""

from __future__ import annotations

from cheetah.lang.primitive import Primitive, declare

mma_bf16 = declare(
    "void mma_bf16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1)",
    """
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    """,
    "c += a (16 x 16) * b (16 x 8), fragments as in the PTX manual",
)
mma_f16 = declare(
    "void mma_f16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1)",
    """
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    """,
    "the same of f16 numbers",
)
mma_u8_s8 = declare(
    "void mma_u8_s8(int32_t (&c)[4], uint4 a, uint32_t b0, uint32_t b1)",
    """
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    """,
    "c += a (16 x 32 unsigned bytes) * b (32 x 8 signed bytes), fragments as in the PTX manual",
)


def _product_of_2of4(selector: int) -> Primitive:
    return declare(
        f"void mma_2of4_bf16_{selector}(float (&c)[4], uint4 a, uint4 b, uint32_t metadata)",
        f"""
        asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "
          "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9, %10, %11}}, {{%0, %1, %2, %3}}, %12, {selector};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w),
            "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(metadata));
        """,
        "c += a (16 x 32, of whose columns two of four are there) * b (32 x 8), fragments as in the PTX manual; "
        f"metadata: of lanes {2 * selector} and {2 * selector + 1} of each four",
    )


mma_2of4_bf16_0 = _product_of_2of4(0)
mma_2of4_bf16_1 = _product_of_2of4(1)
mma_2of4_s8 = declare(
    "void mma_2of4_s8(int32_t (&c)[4], uint4 a, uint4 b, uint32_t metadata)",
    """
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0;"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w),
        "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(metadata));
    """,
    "c += a (16 x 64 signed bytes, of whose columns two of four are there) * b (64 x 8 signed bytes), fragments as in "
    "the PTX manual; metadata: of all lanes",
)
matrix_transpose_b16 = declare(
    "uint32_t matrix_transpose_b16(uint32_t pair)",
    """
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
    """,
    "the transposed 8 x 8 matrix of 16-bit elements that the warp holds",
)
store_matrices_b16 = declare(
    "void store_matrices_b16(void* row, uint4 words)",
    """
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
      :: "r"((uint32_t)__cvta_generic_to_shared(row)), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
      : "memory");
    """,
    "the four 8 x 8 matrices of 16-bit elements that the warp holds, transposed: lane 8m + r says where row r of "
    "matrix m goes, 16 bytes of shared memory",
)
load_matrices_b16 = declare(
    "uint4 load_matrices_b16(const void* row)",
    """
    uint4 words;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "r"((uint32_t)__cvta_generic_to_shared(row)) : "memory");
    return words;
    """,
    "the inverse of `store_matrices_b16`",
)
load_rows_b16 = declare(
    "uint4 load_rows_b16(const void* row)",
    """
    uint4 words;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "r"((uint32_t)__cvta_generic_to_shared(row)) : "memory");
    return words;
    """,
    "four 8 x 8 matrices of 16-bit elements from shared memory: lane 8m + r says where row r of matrix m is, and lane "
    "4r + t gets its word t of each",
)
make_u32x4 = declare(
    "uint4 make_u32x4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)",
    "return make_uint4(x, y, z, w);",
    "four words as one vector",
    pure=True,
)

_PRODUCTS_OF_2OF4 = (mma_2of4_bf16_0, mma_2of4_bf16_1)


def mma_2of4_bf16(selector: int) -> Primitive:
    """The product that takes its metadata from lanes 2 * selector and the next of each four."""
    return _PRODUCTS_OF_2OF4[selector]
