"""A block and its warps: shared memory, barriers, shuffles."""

from __future__ import annotations

from cheetah.lang.primitive import declare

shared_arena = declare(
    "uint8_t* shared_arena()",
    """
    extern __shared__ __align__(1024) uint8_t cheetah_shared_memory[];
    return cheetah_shared_memory;
    """,
    "start of the block's dynamic shared memory",
)
thread_index = declare(
    "uint32_t thread_index()",
    """
    uint32_t result;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(result));
    return result;
    """,
    "threadIdx.x, read again: the compiler does not keep what it has worked out from it before",
)
block_barrier = declare("void block_barrier()", "__syncthreads();", "all threads of the block meet")
named_barrier = declare(
    "void named_barrier(uint32_t id, uint32_t threads)",
    'asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");',
    "`threads` threads of the block meet at barrier `id` (1 to 15)",
)
give_registers = declare(
    "void give_registers()",
    'asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");',
    "all four warps of a warpgroup keep 40 registers a thread and leave the others to `take_registers`",
)
take_registers = declare(
    "void take_registers()",
    'asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");',
    "all four warps of a warpgroup wait until they have 232 registers a thread",
)
keep_64_registers = declare(
    "void keep_64_registers()",
    'asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");',
    "all four warps of a warpgroup keep 64 registers a thread and leave the others to those that take them",
)
keep_104_registers = declare(
    "void keep_104_registers()",
    'asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");',
    "all four warps of a warpgroup keep 104 registers a thread and leave the others to those that take them",
)
take_192_registers = declare(
    "void take_192_registers()",
    'asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");',
    "all four warps of a warpgroup wait until they have 192 registers a thread",
)
take_200_registers = declare(
    "void take_200_registers()",
    'asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");',
    "all four warps of a warpgroup wait until they have 200 registers a thread",
)
wait_for_u32 = declare(
    "void wait_for_u32(uint32_t value)",
    """
    asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0x7fc0dead; @p nanosleep.u32 1;}" :: "r"(value) : "memory");
    """,
    "go on once `value` is there: a load that it comes from has then read its memory",
)
renewed_u32 = declare(
    "uint32_t renewed_u32(uint32_t value)",
    'asm volatile("" : "+r"(value));\nreturn value;',
    "the same value; what is worked out from it is worked out behind this, not kept in registers from before",
)
warp_barrier = declare("void warp_barrier()", "__syncwarp();", "the warp's lanes meet; orders their memory accesses")
shuffle_xor_f32 = declare(
    "float shuffle_xor_f32(float value, uint32_t mask)",
    "return __shfl_xor_sync(0xffffffffu, value, mask);",
    "the value of lane ^ mask",
)
shuffle_xor_u32 = declare(
    "uint32_t shuffle_xor_u32(uint32_t value, uint32_t mask)",
    "return __shfl_xor_sync(0xffffffffu, value, mask);",
    "the value of lane ^ mask",
)
shuffle_u32 = declare(
    "uint32_t shuffle_u32(uint32_t value, uint32_t lane)",
    "return __shfl_sync(0xffffffffu, value, lane);",
    "the value of a lane",
)
warp_sum_f32 = declare(
    "float warp_sum_f32(float value)",
    """
    #pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) value = value + __shfl_xor_sync(0xffffffffu, value, mask);
    return value;
    """,
    "sum over the warp on every lane (butterfly 16, 8, 4, 2, 1)",
)
warp_maximum_u32 = declare(
    "uint32_t warp_maximum_u32(uint32_t value)",
    "return __reduce_max_sync(0xffffffffu, value);",
    "the largest of the warp's values, on every lane",
)
warp_sum_u32 = declare(
    "uint32_t warp_sum_u32(uint32_t value)",
    "return __reduce_add_sync(0xffffffffu, value);",
    "sum over the warp on every lane",
)
