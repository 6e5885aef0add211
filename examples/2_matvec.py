"""y = W x: a warp for each row.

New since 1_scale: a primitive (`warp_sum_f32`), a loop, a variable, and a function of the program: what `@ch.function`
emits stands once in the text, and is called.
"""

import numpy as np
from emulate import check, emulate

import cheetah as ch
from cheetah import prim, ty

ROWS, COLUMNS = 50, 96
WARPS = 4


@ch.function
def dot(a, b, lane):
    """The product of two vectors, added up by the lanes of a warp."""
    total = ch.var(ty.f32, 0)
    with ch.for_(lane, COLUMNS, 32, unroll=True) as column:
        total += a[column] * b[column]
    return prim.warp_sum_f32(total)


@ch.kernel(
    ch.Params(w=ty.ptr(ty.f32), x=ty.ptr(ty.f32), y=ty.ptr_mut(ty.f32)),
    max_threads=WARPS * 32,
)
def matvec(w, x, y):
    lane = ch.thread_idx_x() % 32
    warp = ch.block_idx_x() * WARPS + ch.thread_idx_x() // 32
    with ch.for_(warp, ROWS, ch.grid_dim_x() * WARPS) as row:
        row_sum = dot(w + row * COLUMNS, x, lane)
        with ch.if_(lane == 0):
            y[row] = row_sum


if __name__ == "__main__":
    random = np.random.default_rng(0)
    w = random.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    x = random.standard_normal(COLUMNS, dtype=np.float32)
    y = np.full(ROWS, np.nan, dtype=np.float32)
    emulate(matvec, grid=2, block=WARPS * 32, arguments=[w, x, y])
    check("y", y, w @ x)
