"""z = B (A x): two matvecs in one kernel, with a barrier over the whole grid between them.

New since 3_ring: every block needs all of y = A x before it can begin with B. The consumer warps meet the other blocks
at a counter in global memory. The producer warp does not: it goes on to B's strips at once, as far as the ring has
room, so the barrier costs no bandwidth. The ring and the matvec are those of 3_ring, unchanged."""

from importlib import import_module

import numpy as np
from emulate import check, emulate

import cheetah as ch
from cheetah import prim, ty

page = import_module("3_ring")  # a name that begins with a digit cannot be imported otherwise
Ring, matvec, shared, MATH_THREADS, THREADS = page.Ring, page.matvec, page.shared, page.MATH_THREADS, page.THREADS
SIZE = page.COLUMNS  # A and B are square
CONSUMER_BARRIER = 1


@ch.inline
def grid_barrier(counter):
    """What the consumer warps of every block wrote before is visible to those of every block after.

    Order: a block's stores -> its named barrier -> the release of its one addition -> the acquire of another block's
    wait -> that block's named barrier -> its loads.
    """
    prim.named_barrier(CONSUMER_BARRIER, MATH_THREADS)  # all stores of this block, before the addition
    with ch.if_(ch.thread_idx_x() == 0):
        prim.add_release_u64(counter, 1)
        prim.wait_at_least_u64(counter, ty.u64(ch.grid_dim_x()))
    prim.named_barrier(CONSUMER_BARRIER, MATH_THREADS)  # nobody reads before the wait is over


@ch.kernel(
    ch.Params(
        a=ty.ptr(ty.f32),
        b=ty.ptr(ty.f32),
        x=ty.ptr(ty.f32),
        y=ty.ptr_mut(ty.f32),
        z=ty.ptr_mut(ty.f32),
        counter=ty.ptr_mut(ty.u64),
    ),
    max_threads=THREADS,
)
def two_matvecs(a, b, x, y, z, counter):
    ring = Ring()
    matvec(ring, "a", a, x, y, SIZE)
    with ring.math:
        grid_barrier(counter)
    matvec(ring, "b", b, y, z, SIZE)
    ring.place_roles()


if __name__ == "__main__":
    random = np.random.default_rng(0)
    a, b = random.standard_normal((2, SIZE, SIZE), dtype=np.float32)
    x = random.standard_normal(SIZE, dtype=np.float32)
    y, z = np.full((2, SIZE), np.nan, dtype=np.float32)
    counter = np.zeros(1, dtype=np.uint64)
    emulate(two_matvecs, grid=3, block=THREADS, shared_bytes=shared.total_bytes, arguments=[a, b, x, y, z, counter])
    check("y", y, a @ x)
    check("z", z, b @ (a @ x))
