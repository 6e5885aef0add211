"""y = W x, the weights brought by a producer warp through a ring of stages in shared memory.

New since 2_matvec: two warp roles whose programs grow side by side, regions of shared memory, mbarriers and bulk
copies. The ring hides its phase bits: a matvec says `with ring.strips(...) as (strip, stage)` and writes the body for
the consumer warps; the producer warp's loop is appended at the same time. A load that was issued has not read yet, so
the body says what came of its loads before the stage goes back.

A strip is as many rows as there are consumer warps; it fills one stage. Block b owns strips b, b + blocks, ...
"""

from contextlib import contextmanager

import numpy as np
from emulate import check, emulate

import cheetah as ch
from cheetah import prim, ty
from cheetah.blocks.machine import shared_region
from cheetah.blocks.ring import Stage
from cheetah.plan import Region, SharedMap

ROWS, COLUMNS = 128, 128
WARPS = 4
MATH_THREADS = WARPS * 32
THREADS = MATH_THREADS + 32  # the last warp copies
STAGES = 3
CHUNK = WARPS * COLUMNS  # elements of a stage

shared = SharedMap(
    (Region("stages", STAGES * CHUNK * 4, 128), Region("full", STAGES * 8), Region("empty", STAGES * 8)),
    budget_bytes=227 * 1024,
)


class Place:
    """Where a role stands in the ring: a stage, and the parity of the phase that its barrier is in."""

    @ch.inline
    def __init__(self):
        self.stage = ch.var(ty.u32, 0)
        self.parity = ch.var(ty.u32, 0)

    @ch.inline
    def advance(self):
        self.stage += 1
        with ch.if_(self.stage == STAGES):
            self.stage.set(0)
            self.parity ^= 1


class Ring:
    """Stages that the producer role fills and the consumer role uses, in the same order."""

    @ch.inline
    def __init__(self):
        arena = prim.shared_arena()
        self.stages = shared_region(shared, arena, "stages", ty.f32)
        self.full = shared_region(shared, arena, "full", ty.u64)
        self.empty = shared_region(shared, arena, "empty", ty.u64)
        with ch.if_(ch.thread_idx_x() == 0):
            with ch.for_(STAGES, unroll=True) as stage:
                prim.mbarrier_init(self.full + stage, 1)
                prim.mbarrier_init(self.empty + stage, WARPS)
            prim.mbarrier_fence_init()  # the copy engine sees the barriers only after this
        prim.block_barrier()  # and the other threads after this
        self.copy, self.math = ch.Role("producer"), ch.Role("consumer")
        self.streams = ch.Streams()
        with self.copy:
            self.filled = Place()
        with self.math:
            self.used = Place()

    @contextmanager
    def strips(self, name, matrix, rows):
        """The body runs in the consumer warps, for each strip of this block, whose rows begin at `stage.address`."""
        stream = self.streams.open(name)
        roles = (self.copy, self.math)
        with ch.roles_for(roles, ch.block_idx_x(), rows // WARPS, ch.grid_dim_x(), name="strip") as strip:
            with self.copy:
                self.fill(matrix + strip * CHUNK)
            with self.math:
                place = self.used
                prim.mbarrier_wait(self.full + place.stage, place.parity)
                chunk = self.stages + place.stage * CHUNK
                stage = Stage(chunk)
                yield strip, stage
                stage.require_read()  # else a copy could land in it before the body's last loads have read
                prim.warp_barrier()  # every lane has read its part before the warp gives the stage back
                with ch.if_(ch.thread_idx_x() % 32 == 0):
                    prim.mbarrier_arrive(self.empty + place.stage)
                place.advance()
        self.streams.consume(stream)

    def fill(self, source):
        place, chunk_bytes = self.filled, CHUNK * 4
        prim.mbarrier_wait(self.empty + place.stage, place.parity ^ 1)  # passes at once the first time round
        prim.mbarrier_arrive_expect_tx(self.full + place.stage, chunk_bytes)
        stage = self.stages + place.stage * CHUNK
        prim.bulk_copy(stage, source, chunk_bytes, self.full + place.stage)
        place.advance()

    def place_roles(self):
        with ch.if_(ch.thread_idx_x() < MATH_THREADS):
            self.math.emit_here()
        with ch.else_():
            with ch.if_(ch.thread_idx_x() == MATH_THREADS):  # one thread starts all copies
                self.copy.emit_here()


@ch.inline
def matvec(ring, name, w, x, y, rows):
    """y = w @ x for the rows of this block."""
    with ring.strips(name, w, rows) as (strip, stage):
        lane = ch.thread_idx_x() % 32
        warp = ch.thread_idx_x() // 32
        total = ch.var(ty.f32, 0)
        with ch.for_(lane, COLUMNS, 32, unroll=True) as column:
            total += stage.address[warp * COLUMNS + column] * x[column]
        stage.has_read(prim.float_bits(total))  # which all came of
        dot = prim.warp_sum_f32(total)
        with ch.if_(lane == 0):
            y[strip * WARPS + warp] = dot


@ch.kernel(
    ch.Params(w=ty.ptr(ty.f32), x=ty.ptr(ty.f32), y=ty.ptr_mut(ty.f32)),
    max_threads=THREADS,
)
def ring_matvec(w, x, y):
    ring = Ring()
    matvec(ring, "w", w, x, y, ROWS)
    ring.place_roles()


if __name__ == "__main__":
    random = np.random.default_rng(0)
    w = random.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    x = random.standard_normal(COLUMNS, dtype=np.float32)
    y = np.full(ROWS, np.nan, dtype=np.float32)
    emulate(ring_matvec, grid=3, block=THREADS, shared_bytes=shared.total_bytes, arguments=[w, x, y])
    check("y", y, w @ x)
