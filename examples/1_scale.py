"""Scale a vector: the smallest kernel.

Python runs once, while the kernel is generated. What it emits runs on the GPU: `i` is a device value, the `with` block
a device `if`. Names are kept: compare with `python examples/1_scale.py --cuda`.
"""

import numpy as np
from emulate import check, emulate

import cheetah as ch
from cheetah import ty

THREADS = 64


@ch.kernel(ch.Params(n=ty.u32, factor=ty.f32, x=ty.ptr_mut(ty.f32)), max_threads=THREADS)
def scale(n, factor, x):
    i = ch.block_idx_x() * ch.block_dim_x() + ch.thread_idx_x()
    with ch.if_(i < n):
        x[i] *= factor


if __name__ == "__main__":
    x = np.arange(1000, dtype=np.float32)
    expected = x * np.float32(1.5)
    emulate(scale, grid=-(-x.size // THREADS), block=THREADS, arguments=[x.size, 1.5, x])
    check("x", x, expected)
