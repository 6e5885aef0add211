"""y = W x: a warp for each row.

New since 1_scale: a primitive (`warp_sum_f32`), a loop, a variable, and named dimensions: `weights` is a view of the
pointer `w`, and where an element lies is computed from its layout, the static part while generating.
"""

import numpy as np
from emulate import check, emulate

import cheetah as ch
from cheetah import prim, ty

ROWS, COLUMNS = 50, 96
WARPS = 4
MATRIX = ch.Layout(row=ROWS, column=COLUMNS)


@ch.kernel(
    ch.Params(w=ty.ptr(ty.f32), x=ty.ptr(ty.f32), y=ty.ptr_mut(ty.f32)),
    max_threads=WARPS * 32,
)
def matvec(w, x, y):
    weights = ch.View(w, MATRIX)
    lane = ch.thread_idx_x() % 32
    warp = ch.block_idx_x() * WARPS + ch.thread_idx_x() // 32
    with ch.for_(warp, ROWS, ch.grid_dim_x() * WARPS) as row:
        total = ch.var(ty.f32, 0)
        with ch.for_(lane, COLUMNS, 32, unroll=True) as column:
            total += weights.at(row=row, column=column) * x[column]
        dot = prim.warp_sum_f32(total)
        with ch.if_(lane == 0):
            y[row] = dot


if __name__ == "__main__":
    random = np.random.default_rng(0)
    w = random.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    x = random.standard_normal(COLUMNS, dtype=np.float32)
    y = np.full(ROWS, np.nan, dtype=np.float32)
    emulate(matvec, grid=2, block=WARPS * 32, arguments=[w, x, y])
    check("y", y, w @ x)
