"""Asynchronous copies from global to shared memory, the barriers that count their bytes, words that pace them."""

from __future__ import annotations

from cheetah.lang import types as ty
from cheetah.lang.errors import CopySizeError
from cheetah.lang.nodes import Binary, Cast, Constant, Expr, Literal, Subscript, Unary, Value
from cheetah.lang.primitive import declare

shared_address = declare(
    "uint32_t shared_address(const void* pointer)",
    "return (uint32_t)__cvta_generic_to_shared(pointer);",
    "an address within shared memory, for `ch.asm`",
    pure=True,
)
store_shared_u32 = declare(
    "void store_shared_u32(uint32_t* place, uint32_t value)",
    'asm volatile("st.relaxed.cta.shared::cta.u32 [%0], %1;" :: "r"(shared_address(place)), "r"(value) : "memory");',
    "a store to shared memory that other threads of the block may look at any time: it orders nothing",
)
load_shared_u32 = declare(
    "uint32_t load_shared_u32(const uint32_t* place)",
    """
    uint32_t result;
    asm volatile("ld.relaxed.cta.shared::cta.u32 %0, [%1];" : "=r"(result) : "r"(shared_address(place)) : "memory");
    return result;
    """,
    "what was last seen stored there by `store_shared_u32`; it orders nothing",
)
mbarrier_init = declare(
    "void mbarrier_init(uint64_t* barrier, uint32_t arrivals)",
    """
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
      :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
    """,
    "a barrier whose phases complete after `arrivals` arrivals and all announced bytes",
)
mbarrier_fence_init = declare(
    "void mbarrier_fence_init()",
    'asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");',
    "makes initialised barriers visible to the copy engine",
)
mbarrier_arrive = declare(
    "void mbarrier_arrive(uint64_t* barrier)",
    'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");',
    "one arrival (release)",
)
mbarrier_arrive_many = declare(
    "void mbarrier_arrive_many(uint64_t* barrier, uint32_t arrivals)",
    """
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;"
      :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
    """,
    "`arrivals` arrivals at once (release)",
)
mbarrier_arrive_expect_tx = declare(
    "void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes)",
    """
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
      :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
    """,
    "one arrival that announces bytes to come",
)
mbarrier_wait = declare(
    "void mbarrier_wait(uint64_t* barrier, uint32_t parity)",
    """
    asm volatile(
      "{\\n\\t.reg .pred done;\\n\\t"
      "again:\\n\\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n\\t"
      "@!done bra again;\\n\\t}"
      :: "r"(shared_address(barrier)), "r"(parity) : "memory");
    """,
    "waits until the phase of this parity has completed (acquire)",
)
bulk_copy_unchecked = declare(
    "void bulk_copy(void* destination, const void* source, uint32_t bytes, uint64_t* barrier)",
    """
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;"
      :: "r"(shared_address(destination)), "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
    """,
    "asynchronous copy of what is read once from global to shared memory; its bytes count on the barrier",
)
bulk_copy_shared_unchecked = declare(
    "void bulk_copy_shared(void* destination, const void* source, uint32_t bytes, uint64_t* barrier)",
    """
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(shared_address(destination)), "l"(source), "r"(bytes), "r"(shared_address(barrier)) : "memory");
    """,
    "the same of what other blocks read too, and L2 shall keep",
)
fence_proxy_async = declare(
    "void fence_proxy_async()",
    'asm volatile("fence.proxy.async;" ::: "memory");',
    "orders ordinary accesses before later accesses of the copy engine",
)
fence_proxy_async_global = declare(
    "void fence_proxy_async_global()",
    'asm volatile("fence.proxy.async.global;" ::: "memory");',
    "the same of global memory alone, which waits for nothing (H200: 1 ns against 400 to 800)",
)
fence_proxy_async_shared = declare(
    "void fence_proxy_async_shared()",
    'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");',
    "the same of the block's shared memory alone",
)


COPY_UNIT = 16
"""A bulk copy moves multiples of this many bytes, between addresses that are multiples of it."""
TRANSACTION_LIMIT = 2**20 - 1
"""The most bytes that one phase of an mbarrier can count."""


def bulk_copy(destination: Expr, source: Expr, size: Value, barrier: Expr) -> None:
    """Copy `size` bytes from global to shared memory, asynchronously; they count on `barrier`.

    CopySizeError where a static size is no multiple of 16 bytes, or a static offset is not aligned to 16.
    """
    _check_copy(destination, source, size)
    bulk_copy_unchecked(destination, source, size, barrier)


def bulk_copy_shared(destination: Expr, source: Expr, size: Value, barrier: Expr) -> None:
    """`bulk_copy` of what several blocks read: L2 keeps it."""
    _check_copy(destination, source, size)
    bulk_copy_shared_unchecked(destination, source, size, barrier)


def _check_copy(destination: Expr, source: Expr, size: Value) -> None:
    static = size.value if isinstance(size, Literal) else size
    if isinstance(static, int):
        _require_size(static)
    for role, pointer in (("destination", destination), ("source", source)):
        offset = _static_offset(pointer)
        if offset is not None and offset % COPY_UNIT:
            raise CopySizeError(
                f"a bulk copy whose {role} `{pointer}` lies {offset} bytes into its buffer: it must be 16-byte aligned."
            )


def _require_size(size: int) -> None:
    if size <= 0 or size % COPY_UNIT:
        padded = max(COPY_UNIT, -(-size // COPY_UNIT) * COPY_UNIT)
        raise CopySizeError(
            f"a bulk copy of {size} bytes: the copy engine moves multiples of {COPY_UNIT} bytes; pad it to {padded}."
        )
    if size > TRANSACTION_LIMIT:
        raise CopySizeError(
            f"a bulk copy of {size} bytes: a barrier counts at most {TRANSACTION_LIMIT} bytes a phase; copy in parts."
        )


def _static_offset(pointer: Expr) -> int | None:
    """Bytes that static arithmetic adds to a pointer; None where an index is known on the device only."""
    if isinstance(pointer, Cast):
        return _static_offset(pointer.operand)
    if isinstance(pointer, Unary) and isinstance(pointer.operand, Subscript):
        return _moved(pointer.operand.base, pointer.operand.index, 1)
    if isinstance(pointer, Binary):
        return _moved(pointer.left, pointer.right, -1 if pointer.operator == "-" else 1)
    return 0


def _moved(base: Expr, index: Expr, sign: int) -> int | None:
    before = _static_offset(base)
    if before is None or not isinstance(index, (Literal, Constant)) or not isinstance(base.type, ty.Pointer):
        return None
    return before + sign * int(index.value) * max(1, base.type.element.bytes)


prefetch_l2 = declare(
    "void prefetch_l2(const void* place)",
    'asm volatile("prefetch.global.L2 [%0];" :: "l"(place) : "memory");',
    "asks for the cache line of an address; nothing waits for it",
)
