"""The read ceiling: a kernel that does nothing but bring memory into shared memory, as fast as bulk copies can.

Every share of the ceiling that is reported is measured against this kernel in the same run.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.lang import prim, ty
from cheetah.manifest import Launch
from cheetah.package import Generated, KernelParameter, described, packaged
from cheetah.plan import Gpu

KERNEL_NAME = "read_ceiling"
STAGE_BYTES = 65536
STAGES = 3
THREADS = 32
PARAMETERS = ch.Params(data=ty.ptr(ty.u8), sink=ty.ptr_mut(ty.u32), rounds=ty.u32)


def build_ceiling(blocks: int) -> ch.Kernel:
    """Read `rounds` chunks a block; the blocks read adjacent chunks side by side."""

    @ch.kernel(PARAMETERS, name=KERNEL_NAME, max_threads=THREADS)
    def read_ceiling(data: Any, sink: Any, rounds: Any) -> None:
        arena = prim.shared_arena()
        landed = ch.reinterpret(ty.ptr_mut(ty.u64), arena + STAGES * STAGE_BYTES)
        with ch.if_(ch.thread_idx_x() == 0):
            with ch.for_(STAGES) as stage:
                prim.mbarrier_init(landed + stage, 1)
            prim.mbarrier_fence_init()
            total = ch.var(ty.u32, 0)
            with ch.for_(rounds + STAGES) as turn:
                slot = turn % STAGES
                with ch.if_(turn >= STAGES):
                    prim.mbarrier_wait(landed + slot, (turn // STAGES + 1) % 2)
                    # One word of each chunk is used, so that no copy could be called useless.
                    total += ch.reinterpret(ty.ptr(ty.u32), arena + slot * STAGE_BYTES)[0]
                with ch.if_(turn < rounds):
                    chunk = turn * blocks + ch.block_idx_x()
                    prim.mbarrier_arrive_expect_tx(landed + slot, STAGE_BYTES)
                    prim.bulk_copy(
                        arena + slot * STAGE_BYTES, data + ty.u64(chunk) * STAGE_BYTES, STAGE_BYTES, landed + slot
                    )
            sink[ch.block_idx_x()] = total

    return read_ceiling


def generate_ceiling(gpu: Gpu) -> Generated:
    """The ceiling kernel. `data` holds rounds * blocks * STAGE_BYTES bytes, `sink` blocks words."""
    manifest = described(
        KERNEL_NAME,
        gpu,
        Launch(gpu.blocks, THREADS, STAGES * STAGE_BYTES + 8 * STAGES),
        {
            "data": KernelParameter(ty.ptr(ty.u8), "what is read"),
            "sink": KernelParameter(ty.ptr_mut(ty.u32), "a word a block", (gpu.blocks,), "poison"),
            "rounds": KernelParameter(ty.u32, "chunks a block"),
        },
        command="cheetah bench",
        phases=("read",),
    )
    about = "Reads memory as fast as bulk copies can. Generated; do not edit."
    return packaged(build_ceiling(gpu.blocks), manifest, about)
