"""The hardware's own operations, each declared once: its types, its meaning and its CUDA body.

Kernel text names only these and plain C. The emulator's header (`cheetah_emulator.h`) defines the same functions in C++,
so that one text runs in both worlds; a test compares the two lists.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cheetah.lang import types as ty
from cheetah.lang.binding import store_result
from cheetah.lang.errors import CopySizeError, LangError, TypeMixError
from cheetah.lang.expressions import Call, Expr, Literal
from cheetah.lang.operators import lift
from cheetah.lang.scope import emit, reserve
from cheetah.lang.statements import Do


@dataclass(frozen=True, eq=False)
class Primitive:
    """A function on the device. `pure` ones are plain expressions; the others run exactly where they are written.

    `any pointer` parameters are spelled `ty.ptr(ty.void)` (read) and `ty.ptr_mut(ty.void)` (written).
    """

    name: str
    returns: ty.Type
    parameters: Mapping[str, ty.Type]
    cuda: str
    meaning: str
    pure: bool = False
    requires: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        reserve(self.name)

    def __call__(self, *arguments: Any) -> Any:
        if len(arguments) != len(self.parameters):
            raise TypeMixError(f"{self.name} takes {len(self.parameters)} arguments ({', '.join(self.parameters)}), not {len(arguments)}.")
        pairs = zip(arguments, self.parameters.items(), strict=True)
        lifted = tuple(self._argument(name, type_, value) for value, (name, type_) in pairs)
        call = Call(self.returns, self.name, lifted, self)
        if self.pure:
            return call
        if self.returns == ty.void:
            emit(Do(call))
            return None
        return store_result(call)

    def _argument(self, name: str, type_: ty.Type, value: Any) -> Expr:
        if isinstance(type_, ty.Pointer) and isinstance(value, Expr):
            given = value.type
            if not isinstance(given, ty.Pointer) or type_.element not in (ty.void, given.element):
                raise TypeMixError(f"{self.name}: `{name}` is {type_}, but `{value}` has type {given}.")
            if type_.mutable and not given.mutable:
                raise TypeMixError(f"{self.name} writes through `{name}`, but `{value}` is {given}.")
            return value
        if isinstance(type_, ty.Array) and isinstance(value, Expr) and value.type == type_:
            return value
        try:
            return lift(value, type_)
        except TypeMixError as error:
            raise TypeMixError(f"{self.name}: argument `{name}`: {str(error).splitlines()[0]}") from None

    def cuda_text(self) -> str:
        """The definition for the GPU."""
        parameters = ", ".join(_parameter_text(name, type_) for name, type_ in self.parameters.items())
        head = f"__device__ __forceinline__ {self.returns} {self.name}({parameters}) {{"
        return f"{head}\n{textwrap.indent(textwrap.dedent(self.cuda).strip(), '  ')}\n}}\n"


def _parameter_text(name: str, type_: ty.Type) -> str:
    if isinstance(type_, ty.Array):
        return f"{type_.element} (&{name})[{type_.length}]"
    return f"{type_} {name}"


PRIMITIVES: dict[str, Primitive] = {}


def with_requirements(found: Iterable[Primitive | str]) -> list[Primitive]:
    """The given primitives (or names) and all that their bodies call: those of this file in order, then others."""
    wanted: dict[str, Primitive] = {}
    waiting = [PRIMITIVES[item] if isinstance(item, str) else item for item in found]
    while waiting:
        primitive = waiting.pop()
        if wanted.setdefault(primitive.name, primitive) is not primitive:
            raise LangError(f"two different primitives are called `{primitive.name}`.")
        waiting += [PRIMITIVES[name] for name in primitive.requires if name not in wanted]
    listed = [primitive for name, primitive in PRIMITIVES.items() if wanted.pop(name, None) is primitive]
    return listed + [wanted[name] for name in sorted(wanted)]


def _declare(name: str, returns: ty.Type, cuda: str, meaning: str, *, pure: bool = False, requires: tuple[str, ...] = (), **parameters: ty.Type) -> Primitive:
    primitive = Primitive(name, returns, parameters, cuda, meaning, pure, requires)
    PRIMITIVES[name] = primitive
    return primitive


_ANY = ty.ptr(ty.void)
_ANY_MUT = ty.ptr_mut(ty.void)
_BARRIER = ty.ptr_mut(ty.u64)
_FRAGMENT = ty.array(ty.f32, 4)

# -- bits and numbers ---------------------------------------------------------------------------------------------

float_bits = _declare(
    "float_bits", ty.u32, "return __float_as_uint(value);", "the 32 bits of a float", pure=True, value=ty.f32)
bits_float = _declare(
    "bits_float", ty.f32, "return __uint_as_float(bits);", "the float with these 32 bits", pure=True, bits=ty.u32)
bf16_to_f32 = _declare(
    "bf16_to_f32", ty.f32, "return __uint_as_float((uint32_t)value.bits << 16);", "exact", pure=True, value=ty.bf16)
f32_to_bf16 = _declare(
    "f32_to_bf16", ty.bf16, """
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
    """, "rounded to nearest even", pure=True, value=ty.f32)
pack_bf16x2 = _declare(
    "pack_bf16x2", ty.u32, """
    uint32_t result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
    """, "two floats rounded to bf16; `low` in the low half", pure=True, low=ty.f32, high=ty.f32)
bf16x2_low = _declare(
    "bf16x2_low", ty.f32, "return __uint_as_float(pair << 16);", "the low bf16 of a pair", pure=True, pair=ty.u32)
bf16x2_high = _declare(
    "bf16x2_high", ty.f32, "return __uint_as_float(pair & 0xffff0000u);", "the high bf16 of a pair", pure=True, pair=ty.u32)
byte_permute = _declare(
    "byte_permute", ty.u32, "return __byte_perm(a, b, selector);", "four of the eight bytes of b:a, chosen by nibbles", pure=True,
    a=ty.u32, b=ty.u32, selector=ty.u32)
multiply_high_u32 = _declare(
    "multiply_high_u32", ty.u32, "return __umulhi(a, b);", "upper half of the 64-bit product", pure=True, a=ty.u32, b=ty.u32)
exp2_f32 = _declare(
    "exp2_f32", ty.f32, """
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
    """, "2^value (hardware approximation, 2 ulp)", pure=True, value=ty.f32)
exp_f32 = _declare("exp_f32", ty.f32, "return __expf(value);", "e^value (fast)", pure=True, value=ty.f32)
log_f32 = _declare("log_f32", ty.f32, "return logf(value);", "natural logarithm, accurate", pure=True, value=ty.f32)
rsqrt_f32 = _declare("rsqrt_f32", ty.f32, "return rsqrtf(value);", "1/sqrt(value)", pure=True, value=ty.f32)
divide_f32 = _declare("divide_f32", ty.f32, "return __fdividef(a, b);", "a/b (fast)", pure=True, a=ty.f32, b=ty.f32)
maximum_f32 = _declare("maximum_f32", ty.f32, "return fmaxf(a, b);", "the larger; the other one if one is NaN", pure=True, a=ty.f32, b=ty.f32)
global_timer = _declare(
    "global_timer", ty.u64, """
    uint64_t result;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(result));
    return result;
    """, "nanoseconds; ticks coarsely")

# -- a block and its warps ----------------------------------------------------------------------------------------

shared_arena = _declare(
    "shared_arena", ty.ptr_mut(ty.u8), """
    extern __shared__ __align__(1024) uint8_t cheetah_shared_memory[];
    return cheetah_shared_memory;
    """, "start of the block's dynamic shared memory")
block_barrier = _declare("block_barrier", ty.void, "__syncthreads();", "all threads of the block meet")
named_barrier = _declare(
    "named_barrier", ty.void, 'asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");',
    "`threads` threads of the block meet at barrier `id` (1 to 15)", id=ty.u32, threads=ty.u32)
named_barrier_arrive = _declare(
    "named_barrier_arrive", ty.void, 'asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");',
    "count in at barrier `id` without waiting", id=ty.u32, threads=ty.u32)
warp_barrier = _declare("warp_barrier", ty.void, "__syncwarp();", "the warp's lanes meet; orders their memory accesses")
shuffle_xor_f32 = _declare(
    "shuffle_xor_f32", ty.f32, "return __shfl_xor_sync(0xffffffffu, value, mask);", "the value of lane ^ mask", value=ty.f32, mask=ty.u32)
shuffle_xor_u32 = _declare(
    "shuffle_xor_u32", ty.u32, "return __shfl_xor_sync(0xffffffffu, value, mask);", "the value of lane ^ mask", value=ty.u32, mask=ty.u32)
shuffle_f32 = _declare(
    "shuffle_f32", ty.f32, "return __shfl_sync(0xffffffffu, value, lane);", "the value of a lane", value=ty.f32, lane=ty.u32)
shuffle_u32 = _declare(
    "shuffle_u32", ty.u32, "return __shfl_sync(0xffffffffu, value, lane);", "the value of a lane", value=ty.u32, lane=ty.u32)
_BUTTERFLY = """
#pragma unroll
for (int mask = 16; mask > 0; mask >>= 1) value = {};
return value;
"""
warp_sum_f32 = _declare(
    "warp_sum_f32", ty.f32, _BUTTERFLY.format("value + __shfl_xor_sync(0xffffffffu, value, mask)"),
    "sum over the warp on every lane (butterfly 16, 8, 4, 2, 1)", value=ty.f32)
warp_max_f32 = _declare(
    "warp_max_f32", ty.f32, _BUTTERFLY.format("fmaxf(value, __shfl_xor_sync(0xffffffffu, value, mask))"),
    "maximum over the warp on every lane", value=ty.f32)

# -- asynchronous copies ------------------------------------------------------------------------------------------

shared_address = _declare(
    "shared_address", ty.u32, "return (uint32_t)__cvta_generic_to_shared(pointer);", "an address within shared memory, for `ch.asm`",
    pure=True, pointer=_ANY)
mbarrier_init = _declare(
    "mbarrier_init", ty.void, 'asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");',
    "a barrier whose phases complete after `arrivals` arrivals and all announced bytes", requires=("shared_address",),
    barrier=_BARRIER, arrivals=ty.u32)
mbarrier_fence_init = _declare(
    "mbarrier_fence_init", ty.void, 'asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");',
    "makes initialised barriers visible to the copy engine")
mbarrier_arrive = _declare(
    "mbarrier_arrive", ty.void, 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");',
    "one arrival (release)", requires=("shared_address",), barrier=_BARRIER)
mbarrier_arrive_expect_tx = _declare(
    "mbarrier_arrive_expect_tx", ty.void,
    'asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");',
    "one arrival that announces bytes to come", requires=("shared_address",), barrier=_BARRIER, bytes=ty.u32)
mbarrier_wait = _declare(
    "mbarrier_wait", ty.void, """
    asm volatile(
      "{\\n\\t.reg .pred done;\\n\\t"
      "again:\\n\\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n\\t"
      "@!done bra again;\\n\\t}"
      :: "r"(shared_address(barrier)), "r"(parity) : "memory");
    """, "waits until the phase of this parity has completed (acquire)", requires=("shared_address",), barrier=_BARRIER, parity=ty.u32)
bulk_copy_unchecked = _declare(
    "bulk_copy", ty.void, """
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(shared_address(destination)), "l"(source), "r"(bytes), "r"(shared_address(barrier)) : "memory");
    """, "asynchronous copy from global to shared memory; its bytes count on the barrier", requires=("shared_address",),
    destination=_ANY_MUT, source=_ANY, bytes=ty.u32, barrier=_BARRIER)
fence_proxy_async = _declare(
    "fence_proxy_async", ty.void, 'asm volatile("fence.proxy.async;" ::: "memory");',
    "orders ordinary accesses before later accesses of the copy engine")


def bulk_copy(destination: Expr, source: Expr, size: Any, barrier: Expr) -> None:
    """`bulk_copy` with a static size checked: a multiple of 16 bytes, at least 16."""
    static = size.value if isinstance(size, Literal) else size if isinstance(size, int) else None
    if static is not None and (static % 16 or static <= 0):
        raise CopySizeError(f"a bulk copy of {static} bytes: the copy engine moves multiples of 16 bytes; pad to {-(-max(static, 1) // 16) * 16}.")
    for name, pointer in (("destination", destination), ("source", source)):
        offset = _static_offset(pointer)
        if offset is not None and offset % 16:
            raise CopySizeError(f"a bulk copy whose {name} `{pointer}` lies {offset} bytes into its buffer: it must be 16-byte aligned.")
    bulk_copy_unchecked(destination, source, size, barrier)


def _static_offset(pointer: Expr) -> int | None:
    """Bytes between a pointer and the start of its buffer, where both are static."""
    index = getattr(pointer, "right", None)
    if getattr(pointer, "operator", None) == "+" and isinstance(index, Literal) and isinstance(pointer.type, ty.Pointer):
        return int(index.value) * max(1, pointer.type.element.bytes)
    return None


# -- between blocks -----------------------------------------------------------------------------------------------

_PUBLISH = """
uint64_t word = (uint64_t)epoch << 32 | data;
asm volatile("st.{}.gpu.global.u64 [%0], %1;" :: "l"(place), "l"(word) : "memory");
"""
_WAIT4 = """
uint64_t a, b, c, d;
do {{
  asm volatile("ld.{0}.gpu.global.u64 %0, [%1];" : "=l"(a) : "l"(words) : "memory");
  asm volatile("ld.{0}.gpu.global.u64 %0, [%1];" : "=l"(b) : "l"(words + 1) : "memory");
  asm volatile("ld.{0}.gpu.global.u64 %0, [%1];" : "=l"(c) : "l"(words + 2) : "memory");
  asm volatile("ld.{0}.gpu.global.u64 %0, [%1];" : "=l"(d) : "l"(words + 3) : "memory");
}} while ((uint32_t)(a >> 32) != epoch || (uint32_t)(b >> 32) != epoch || (uint32_t)(c >> 32) != epoch || (uint32_t)(d >> 32) != epoch);
return make_uint4((uint32_t)a, (uint32_t)b, (uint32_t)c, (uint32_t)d);
"""
_WORDS = ty.ptr(ty.u64)
publish_flagged = _declare(
    "publish_flagged", ty.void, _PUBLISH.format("relaxed"), "one 8-byte store of data and epoch: the epoch vouches for the data",
    place=ty.ptr_mut(ty.u64), data=ty.u32, epoch=ty.u32)
publish_flagged_release = _declare(
    "publish_flagged_release", ty.void, _PUBLISH.format("release"), "the same, after all that this thread has seen done",
    place=ty.ptr_mut(ty.u64), data=ty.u32, epoch=ty.u32)
wait_flagged4 = _declare(
    "wait_flagged4", ty.u32x4, _WAIT4.format("relaxed"), "the data of four words, once all carry the epoch", words=_WORDS, epoch=ty.u32)
wait_flagged4_acquire = _declare(
    "wait_flagged4_acquire", ty.u32x4, _WAIT4.format("acquire"), "the same; what the publishers had done is visible after it",
    words=_WORDS, epoch=ty.u32)
add_release_u64 = _declare(
    "add_release_u64", ty.void, 'asm volatile("red.release.gpu.global.add.u64 [%0], %1;" :: "l"(place), "l"(value) : "memory");',
    "atomic addition after all that this thread has seen done", place=ty.ptr_mut(ty.u64), value=ty.u64)
fetch_add_release_u64 = _declare(
    "fetch_add_release_u64", ty.u64, """
    uint64_t before;
    asm volatile("atom.release.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(place), "l"(value) : "memory");
    return before;
    """, "the same, giving the value before the addition", place=ty.ptr_mut(ty.u64), value=ty.u64)
wait_at_least_u64 = _declare(
    "wait_at_least_u64", ty.void, """
    uint64_t seen;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(place) : "memory");
    } while (seen < value);
    """, "polls until the counter reaches a value (acquire)", place=_WORDS, value=ty.u64)
store_relaxed_u32 = _declare(
    "store_relaxed_u32", ty.void, 'asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(place), "r"(value) : "memory");',
    "a store that others may read at any time", place=ty.ptr_mut(ty.u32), value=ty.u32)
load_constant_u32 = _declare(
    "load_constant_u32", ty.u32, """
    uint32_t result;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(result) : "l"(place));
    return result;
    """, "a load of memory that nobody writes during the launch", place=_ANY)
load_constant_u32x4 = _declare(
    "load_constant_u32x4", ty.u32x4, """
    uint4 result;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w) : "l"(place));
    return result;
    """, "16 bytes of memory that nobody writes during the launch", place=_ANY)

# -- tensor cores -------------------------------------------------------------------------------------------------

mma_bf16 = _declare(
    "mma_bf16", ty.void, """
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    """, "c += a (16 x 16) * b (16 x 8), fragments as in the PTX manual", c=_FRAGMENT, a=ty.u32x4, b0=ty.u32, b1=ty.u32)
matrix_transpose_b16 = _declare(
    "matrix_transpose_b16", ty.u32, """
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
    """, "the transposed 8 x 8 matrix of 16-bit elements that the warp holds", pair=ty.u32)
make_u32x4 = _declare(
    "make_u32x4", ty.u32x4, "return make_uint4(x, y, z, w);", "four words as one vector", pure=True, x=ty.u32, y=ty.u32, z=ty.u32, w=ty.u32)
