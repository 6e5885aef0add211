"""A block and its warps: shared memory, barriers, shuffles."""

from __future__ import annotations

from cheetah.lang import types as ty
from cheetah.lang.primitive import declare

shared_arena = declare(
    "shared_arena",
    ty.ptr_mut(ty.u8),
    """
    extern __shared__ __align__(1024) uint8_t cheetah_shared_memory[];
    return cheetah_shared_memory;
    """,
    "start of the block's dynamic shared memory",
)
thread_index = declare(
    "thread_index",
    ty.u32,
    """
    uint32_t result;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(result));
    return result;
    """,
    "threadIdx.x, read again: the compiler does not keep what it has worked out from it before",
)
block_barrier = declare("block_barrier", ty.void, "__syncthreads();", "all threads of the block meet")
named_barrier = declare(
    "named_barrier",
    ty.void,
    'asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");',
    "`threads` threads of the block meet at barrier `id` (1 to 15)",
    id=ty.u32,
    threads=ty.u32,
)
give_registers = declare(
    "give_registers",
    ty.void,
    'asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");',
    "all four warps of a warpgroup keep 40 registers a thread and leave the others to `take_registers`",
)
take_registers = declare(
    "take_registers",
    ty.void,
    'asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");',
    "all four warps of a warpgroup wait until they have 232 registers a thread",
)
keep_64_registers = declare(
    "keep_64_registers",
    ty.void,
    'asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");',
    "all four warps of a warpgroup keep 64 registers a thread and leave the others to those that take them",
)
keep_104_registers = declare(
    "keep_104_registers",
    ty.void,
    'asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");',
    "all four warps of a warpgroup keep 104 registers a thread and leave the others to those that take them",
)
take_192_registers = declare(
    "take_192_registers",
    ty.void,
    'asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");',
    "all four warps of a warpgroup wait until they have 192 registers a thread",
)
take_200_registers = declare(
    "take_200_registers",
    ty.void,
    'asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");',
    "all four warps of a warpgroup wait until they have 200 registers a thread",
)
wait_for_u32 = declare(
    "wait_for_u32",
    ty.void,
    """
    asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0x7fc0dead; @p nanosleep.u32 1;}" :: "r"(value) : "memory");
    """,
    "go on once `value` is there: a load that it comes from has then read its memory",
    value=ty.u32,
)
renewed_u32 = declare(
    "renewed_u32",
    ty.u32,
    'asm volatile("" : "+r"(value));\nreturn value;',
    "the same value; what is worked out from it is worked out behind this, not kept in registers from before",
    value=ty.u32,
)
warp_barrier = declare("warp_barrier", ty.void, "__syncwarp();", "the warp's lanes meet; orders their memory accesses")
shuffle_xor_f32 = declare(
    "shuffle_xor_f32",
    ty.f32,
    "return __shfl_xor_sync(0xffffffffu, value, mask);",
    "the value of lane ^ mask",
    value=ty.f32,
    mask=ty.u32,
)
shuffle_xor_u32 = declare(
    "shuffle_xor_u32",
    ty.u32,
    "return __shfl_xor_sync(0xffffffffu, value, mask);",
    "the value of lane ^ mask",
    value=ty.u32,
    mask=ty.u32,
)
shuffle_u32 = declare(
    "shuffle_u32",
    ty.u32,
    "return __shfl_sync(0xffffffffu, value, lane);",
    "the value of a lane",
    value=ty.u32,
    lane=ty.u32,
)
warp_sum_f32 = declare(
    "warp_sum_f32",
    ty.f32,
    """
    #pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) value = value + __shfl_xor_sync(0xffffffffu, value, mask);
    return value;
    """,
    "sum over the warp on every lane (butterfly 16, 8, 4, 2, 1)",
    value=ty.f32,
)
warp_maximum_u32 = declare(
    "warp_maximum_u32",
    ty.u32,
    "return __reduce_max_sync(0xffffffffu, value);",
    "the largest of the warp's values, on every lane",
    value=ty.u32,
)
warp_sum_u32 = declare(
    "warp_sum_u32",
    ty.u32,
    "return __reduce_add_sync(0xffffffffu, value);",
    "sum over the warp on every lane",
    value=ty.u32,
)
