"""The attention core alone: one decode step of one layer over a paged cache, and what it must give in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah import lang as ch
from cheetah.blocks.attention import LSE_WORDS, Attention
from cheetah.blocks.exchange import BarrierExchange, FlaggedExchange, make_exchange
from cheetah.blocks.kv_cache import KvCache
from cheetah.blocks.schedule import Schedule
from cheetah.emulator import allocate
from cheetah.lang import ty
from cheetah.models.llama.reference import widen
from cheetah.plan import ModelShape
from cheetah.plan.kv import KvPlan, KvPlanLayout, kv_plan
from tests.blocks.small_kernel import SmallKernel, plan_of
from tests.program.rig import as_bf16

F64 = NDArray[np.float64]
CONTEXT = 512
PARAMETERS = ch.Params(
    qkv=ty.ptr(ty.u32),
    kv=ty.ptr_mut(ty.bf16),
    page_table=ty.ptr(ty.i32),
    kv_plans=ty.ptr(ty.i32),
    exchange=ty.ptr_mut(ty.u8),
    output=ty.ptr_mut(ty.u32),
    position=ty.u32,
    epoch=ty.u32,
)


@dataclass(frozen=True)
class Core:
    """Static choices of the core."""

    kv_heads: int = 1
    group: int = 2
    head_dim: int = 64
    page_size: int = 16
    blocks: int = 3
    math_warps: int = 2
    sync: str = "flags"

    @property
    def shape(self) -> ModelShape:
        return ModelShape(64, 64, 64, self.kv_heads * self.group, self.kv_heads, self.head_dim, 1)

    @property
    def sizes(self) -> dict[str, int]:
        """Payload words of the exchanged vectors."""
        slots = KvPlanLayout(self.blocks, self.kv_heads, 1).max_partials
        return {
            "qkv": self.shape.qkv_rows // 2,
            "partials": slots * self.group * (self.head_dim + LSE_WORDS),
            "attention": self.shape.query_rows // 2,
        }

    def plan(self, keys: int, chunk: int | None = None) -> KvPlan:
        """The KV plan for `keys` keys, cut every `chunk` keys or by rule with chunks of at least 16."""
        return kv_plan([keys], self.kv_heads, self.blocks, self.group, align=16, minimum=16, chunk=chunk)


@cache
def core_kernel(core: Core) -> SmallKernel:
    """Publishes the given queries, new key and new value, attends, merges, and writes the attention vector out."""

    def body(machine: Any, ring: Any, given: dict[str, Any]) -> None:
        position, epoch = given["position"], given["epoch"]
        exchange = make_exchange(machine, given["exchange"], core.sizes)
        cache_ = KvCache(machine, given["kv"], given["page_table"])
        schedule = Schedule(machine, given["kv_plans"], ty.u32(1))
        attention = Attention(machine, ring, exchange, schedule)
        everyone = machine.math_threads * core.blocks
        with machine.copy:
            with schedule.items(machine.copy) as item:
                cache_.copy_tokens(ring, ty.u32(0), item.head, item.begin, ch.minimum(item.end, position))
        with machine.math:
            exchange.start()
            mine = machine.block * machine.math_threads + machine.thread
            with ch.for_(mine, core.sizes["qkv"], everyone) as word:
                exchange.publish("qkv", word, given["qkv"][word], epoch)
            exchange.meet()
            attention.attend(position, epoch)
            exchange.meet()
            attention.merge(epoch)
            exchange.meet()
            out = ch.reinterpret(ty.ptr_mut(ty.u32x4), given["output"])
            with ch.for_(mine, core.sizes["attention"] // 4, everyone) as unit:
                out[unit] = exchange.read4("attention", unit, epoch)

    plan = plan_of(
        core.shape,
        core.blocks,
        sync=core.sync,
        math_warps=core.math_warps,
        page_size=core.page_size,
        max_context=CONTEXT,
    )
    return SmallKernel(core.shape, core.blocks, plan, PARAMETERS, body)


@dataclass
class Inputs:
    """queries [heads, D], keys and values [kv_heads, n, D]: bf16 bits. The last key is the newest token's."""

    queries: NDArray[np.uint16]
    keys: NDArray[np.uint16]
    values: NDArray[np.uint16]
    page_seed: int = 0
    leftover: int = field(default=0xFF)

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    def output(self) -> F64:
        """Attention in float64 on these numbers, [heads, D]."""
        queries, keys, values = (widen(bits).astype(np.float64) for bits in (self.queries, self.keys, self.values))
        group = len(queries) // len(keys)
        rows = []
        for head, query in enumerate(queries):
            logits = keys[head // group] @ query / np.sqrt(queries.shape[1])
            weights = np.exp(logits - logits.max())
            rows.append(weights @ values[head // group] / weights.sum())
        return np.array(rows)


def random_inputs(core: Core, length: int, seed: int = 0, scale: float = 1.0) -> Inputs:
    """Normal queries, keys and values; logits of about `scale`."""
    draw = np.random.default_rng([seed, length])
    cached = (core.kv_heads, length, core.head_dim)
    queries = draw.standard_normal((core.kv_heads * core.group, core.head_dim)) * scale
    return Inputs(as_bf16(queries), as_bf16(draw.standard_normal(cached)), as_bf16(draw.standard_normal(cached)))


def attend(
    core: Core, inputs: Inputs, plan: KvPlan | None = None, scheduler: str = "priority", seed: int = 0
) -> NDArray[np.uint16]:
    """The kernel's output, bf16 bits [heads, D]. `plan`: by rule for the length unless given."""
    kernel = core_kernel(core)
    layout = KvPlanLayout(core.blocks, core.kv_heads, 1)
    words = allocate((1, layout.plan_words), np.int32)
    words[0] = layout.encode(plan or core.plan(inputs.length), 0)
    pool, table = paged(core, inputs)
    kind = {"flags": FlaggedExchange, "barrier": BarrierExchange}[core.sync]
    newest = [inputs.queries, inputs.keys[:, -1], inputs.values[:, -1]]
    qkv = np.concatenate([rows.reshape(-1) for rows in newest]).view(np.uint32)
    output = allocate(core.sizes["attention"], np.uint32)
    arguments = {
        "qkv": qkv,
        "kv": pool,
        "page_table": table,
        "kv_plans": words,
        "exchange": allocate(kind.size_bytes(core.sizes), np.uint8, fill=0),
        "output": output,
        "position": inputs.length - 1,
        "epoch": 1,
    }
    kernel.launch(arguments, scheduler, seed)
    return output.view(np.uint16).reshape(inputs.queries.shape)


def paged(core: Core, inputs: Inputs) -> tuple[NDArray[np.uint16], NDArray[np.int32]]:
    """Pool [pages, 2, kv_heads, page_size, D] and page table: all keys but the newest, in shuffled pages."""
    pages = -(-CONTEXT // core.page_size)
    pool = allocate((pages, 2, core.kv_heads, core.page_size, core.head_dim), np.uint16, fill=inputs.leftover)
    table = allocate(pages, np.int32)
    table[:] = np.random.default_rng(inputs.page_seed).permutation(pages)
    for token in range(inputs.length - 1):
        slot = pool[table[token // core.page_size], :, :, token % core.page_size]
        slot[0], slot[1] = inputs.keys[:, token], inputs.values[:, token]
    return pool, table
