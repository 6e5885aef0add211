"""Products of a warpgroup, the four warps whose first is a multiple of four: m64nNk16 in bf16 with f32 sums.

They are asynchronous. `wgmma_fence` comes between what stores to registers and the first product that uses them;
`wgmma_commit` makes a group of the products before it; `wgmma_wait_all` and `wgmma_wait_but_one` wait for groups. Until
then the operands in shared memory may be read, and registers of A and the sums belong to the product.
"""

from __future__ import annotations

from cheetah.lang.errors import RangeError
from cheetah.lang.primitive import Primitive, declare

matrix_descriptor = declare(
    "uint64_t matrix_descriptor(const void* start, uint32_t leading_bytes, uint32_t stride_bytes)",
    """
    return (uint64_t)((shared_address(start) & 0x3ffff) >> 4) | (uint64_t)(leading_bytes >> 4) << 16
      | (uint64_t)(stride_bytes >> 4) << 32;
    """,
    "where operand B [16, columns] lies in shared memory, as core matrices (8 columns x 8 of k in 128 bytes, 16 bytes "
    "of k for each column in turn; transposed: 16 bytes of columns for each k): leading_bytes apart along k, "
    "stride_bytes along the columns; all multiples of 16. Adding n moves the start by 16 n bytes",
)
wgmma_fence = declare(
    "void wgmma_fence()",
    'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");',
    "orders accesses of registers (and of this proxy's memory) before the products that follow",
)
wgmma_commit = declare(
    "void wgmma_commit()",
    'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");',
    "the products since the last one are a group",
)
wgmma_wait_all = declare(
    "void wgmma_wait_all()",
    'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");',
    "waits until all groups are done",
)
wgmma_wait_but_one = declare(
    "void wgmma_wait_but_one()",
    'asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");',
    "waits until all groups but the last are done",
)


def _product(columns: int, transposed: bool = False) -> Primitive:
    count = columns // 2
    sums = ", ".join(f"%{number}" for number in range(count))
    operands = ", ".join(f'"+f"(sums[{number}])' for number in range(count))
    a = ", ".join(f"%{count + number}" for number in range(4))
    cuda = (
        'asm volatile("{\\n\\t.reg .pred p;\\n\\t"\n'
        f'  "setp.ne.b32 p, %{count + 5}, 0;\\n\\t"\n'
        f'  "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "\n'
        f'  "{{{sums}}}, "\n'
        f'  "{{{a}}}, %{count + 4}, p, 1, 1, {int(transposed)};\\n\\t}}"\n'
        f"  : {operands}\n"
        '  : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(accumulate));'
    )
    return declare(
        f"void wgmma_bf16_n{columns}{'_transposed' if transposed else ''}"
        f"(float (&sums)[{count}], uint4 a, uint64_t b, uint32_t accumulate)",
        cuda,
        f"sums (64 x {columns}; of 16 rows a warp) = a (64 x 16, a warp's rows as in mma_bf16) * b, plus themselves if "
        "`accumulate`; lane 4g + t has in sums[4j..] rows g, g, g + 8, g + 8 of columns 8j + 2t, + 1, + 0, + 1",
    )


wgmma_bf16_n16 = _product(16)
wgmma_bf16_n32 = _product(32)
wgmma_bf16_n64 = _product(64)
wgmma_bf16_n128 = _product(128)
wgmma_bf16_n160 = _product(160)
wgmma_bf16_n256 = _product(256)
wgmma_bf16_n64_transposed = _product(64, transposed=True)
wgmma_bf16_n96_transposed = _product(96, transposed=True)
wgmma_bf16_n128_transposed = _product(128, transposed=True)
_PRODUCTS = {
    **{16: wgmma_bf16_n16, 32: wgmma_bf16_n32, 64: wgmma_bf16_n64, 128: wgmma_bf16_n128},
    **{160: wgmma_bf16_n160, 256: wgmma_bf16_n256},
}
_TRANSPOSED = {64: wgmma_bf16_n64_transposed, 96: wgmma_bf16_n96_transposed, 128: wgmma_bf16_n128_transposed}


def wgmma_bf16(columns: int, *, transposed: bool = False) -> Primitive:
    """The product with so many columns; transposed: of a B whose columns, not k, are neighbours in memory. RangeError
    where there is none."""
    products = _TRANSPOSED if transposed else _PRODUCTS
    if columns not in products:
        raise RangeError(
            f"wgmma with {columns} {'transposed ' if transposed else ''}columns: there are "
            f"{', '.join(map(str, products))}."
        )
    return products[columns]
