"""The attention core alone: one step of one layer over a paged cache, and what it must give in float64.

Sequences have neighbouring columns; each column has a query. The newest keys of a sequence, one a column, come from the
exchange as in the decode step, or lie in the cache like all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah import lang as ch
from cheetah.blocks.attention.cache import KvCache
from cheetah.blocks.attention.core import Attention, AttentionPort, partial_words
from cheetah.blocks.attention.port import Finished
from cheetah.blocks.attention.schedule import Schedule
from cheetah.blocks.attention.variants import CAUSAL, Variant
from cheetah.blocks.exchange_kinds import BarrierExchange, FlaggedExchange, make_exchange
from cheetah.emulator import allocate
from cheetah.lang import prim, ty
from cheetah.models.rounding import widen
from cheetah.plan import ModelShape
from cheetah.plan.kv import KvPlan, KvPlanLayout, Scheduling, kv_plans_for_launch, launch_tiles
from cheetah.plan.kv.tables import TileRecord, encode
from cheetah.plan.plan import column_tiles
from tests.blocks.small_kernel import SmallKernel, plan_of
from tests.program.rig import as_bf16

F64 = NDArray[np.float64]
CONTEXT = 512
PARAMETERS: dict[str, ty.Type] = {
    "qkv": ty.ptr(ty.u32),
    "kv": ty.ptr_mut(ty.u8),
    "scales": ty.ptr(ty.f32),
    "page_table": ty.ptr(ty.i32),
    "kv_plans": ty.ptr(ty.i32),
    "tiles": ty.ptr(ty.i32),
    "columns": ty.ptr(ty.i32),
    "exchange": ty.ptr_mut(ty.u8),
    "output": ty.ptr_mut(ty.f32),
    "lse": ty.ptr_mut(ty.f32),
    "epoch": ty.u32,
}
COLUMN_FIELDS = ("request", "query", "position", "keys")


@dataclass(frozen=True)
class Core:
    """Static choices of the core. tokens: columns of a step."""

    kv_heads: int = 1
    group: int = 2
    head_dim: int = 64
    page_size: int = 16
    blocks: int = 3
    consumer_warps: int = 2
    sync: str = "flags"
    tokens: int = 1
    batch: int = 1
    kv_dtype: str = "bf16"
    has_newest: bool = True
    variant: Variant = field(default=CAUSAL, hash=False, compare=False)
    variant_name: str = "causal"
    sanitize: bool = False

    @property
    def shape(self) -> ModelShape:
        return ModelShape(64, 64, 64, self.kv_heads * self.group, self.kv_heads, self.head_dim, 1)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def pages_per_sequence(self) -> int:
        return -(-CONTEXT // self.page_size)

    @property
    def tile_columns(self) -> int:
        rows = 8 * min(column_tiles(self.head_dim), self.consumer_warps)
        return max(1, min(self.tokens, rows // self.group))

    @property
    def layout(self) -> KvPlanLayout:
        tiles = self.batch + -(-self.tokens // self.tile_columns)
        rows = self.tile_columns * self.group
        return KvPlanLayout(self.blocks, self.kv_heads, tiles, rows, chunk=16, max_keys=CONTEXT)

    @property
    def sizes(self) -> dict[str, int]:
        """Payload words of the exchanged vectors."""
        return {
            "qkv": self.tokens * self.shape.qkv_rows // 2,
            "partials": self.layout.max_partial_rows * partial_words(self.head_dim),
        }

    def with_variant(self, variant: Variant) -> Core:
        return replace(self, variant=variant, variant_name=variant.name)


class ExchangePort(AttentionPort):
    """As in the decode step; the output goes to plain memory."""

    def __init__(self, core: Core, machine: Any, exchange: Any, given: Mapping[str, Any]) -> None:
        self.core, self.machine, self.exchange, self.given = core, machine, exchange, given
        self.has_newest = core.has_newest

    def query_unit(self, column: Any, head: Any, unit: Any, epoch: Any) -> Any:
        units = self.core.head_dim // 8
        row = self.core.shape.qkv_rows // 8
        return self.exchange.read4("qkv", column * row + head * units + unit, epoch)

    def newest_unit(self, column: Any, kv_head: Any, value: Any, unit: Any, epoch: Any) -> Any:
        first = ch.select(value, ty.u32(self.core.heads + self.core.kv_heads), ty.u32(self.core.heads))
        return self.query_unit(column, first + kv_head, unit, epoch)

    def _field(self, column: Any, name: str) -> Any:
        return prim.load_constant_u32(self.given["columns"] + (column * 4 + COLUMN_FIELDS.index(name)))

    def position(self, column: Any) -> Any:
        return self._field(column, "position")

    def request(self, column: Any) -> Any:
        return self._field(column, "request")

    def query(self, column: Any) -> Any:
        return self._field(column, "query")

    def keys(self, column: Any) -> Any:
        return self._field(column, "keys")

    def scale(self, kv_head: Any, value: bool) -> Any:
        return self.given["scales"][kv_head + (self.core.kv_heads if value else 0)]

    def publish(self, made: Finished, epoch: Any) -> None:
        row = made.column * self.core.heads + made.head
        self.given["output"][row * self.core.head_dim + made.dim_pair * 2] = made.low
        self.given["output"][row * self.core.head_dim + made.dim_pair * 2 + 1] = made.high
        with ch.if_(made.dim_pair == 0):
            self.given["lse"][row] = made.lse


@cache
def core_kernel(core: Core) -> SmallKernel:
    """Publishes the given queries, new keys and values, attends, and merges."""

    def body(machine: Any, ring: Any, given: dict[str, Any]) -> None:
        epoch = given["epoch"]
        exchange = make_exchange(machine, given["exchange"], core.sizes)
        pool = given["kv"] if core.kv_dtype == "e4m3" else ch.reinterpret(ty.ptr_mut(ty.bf16), given["kv"])
        cache_ = KvCache(machine, pool, given["page_table"])
        schedule = Schedule(machine, core.layout, given["kv_plans"], ty.u32(1), given["tiles"])
        port = ExchangePort(core, machine, exchange, given)
        attention = Attention(
            machine, ring, exchange, schedule, cache_, port, variant=core.variant, parameters=Given(given)
        )
        everyone = machine.consumer_threads * core.blocks
        with machine.producer:
            attention.copy(ty.u32(0), ty.u32(0))
        with machine.consumer:
            exchange.start()
            schedule.keep_plan()
            mine = machine.block * machine.consumer_threads + machine.thread
            with ch.for_(mine, core.sizes["qkv"], everyone) as word:
                exchange.publish("qkv", word, given["qkv"][word], epoch)
            exchange.meet()
            machine.meet()
            attention.attend(ty.u32(0), epoch)
            attention.merge(epoch)

    plan = plan_of(
        core.shape,
        core.blocks,
        sync=core.sync,
        consumer_warps=core.consumer_warps,
        page_size=core.page_size,
        max_context=CONTEXT,
        tokens=core.tokens,
        batch=core.batch,
        kv_dtype=core.kv_dtype,
    )
    parameters = ch.Params(**PARAMETERS, **core.variant.parameters)
    return SmallKernel(core.shape, core.blocks, plan, parameters, body, sanitize=core.sanitize)


class Given:
    """A variant's parameters as attributes."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.__dict__.update(given)


@dataclass(frozen=True)
class Inputs:
    """One sequence: queries [l_q, heads, D] (bf16 bits), keys and values [kv_heads, n, D] (bf16 bits or e4m3 codes).

    Its queries are those of the last l_q keys. scales: [2, kv_heads], of keys and values.
    """

    queries: NDArray[np.uint16]
    keys: NDArray[Any]
    values: NDArray[Any]
    scales: NDArray[np.float32]
    page_seed: int = 0
    leftover: int = 0xFF

    @property
    def length(self) -> int:
        return int(self.keys.shape[1])

    @property
    def columns(self) -> int:
        return len(self.queries)

    def output(self) -> F64:
        """Attention in float64 on these numbers, [l_q, heads, D]."""
        return self.states()[0]

    def states(self) -> tuple[F64, F64]:
        """Output and natural LSE in float64."""
        keys, values = (exact(codes, scale) for codes, scale in zip((self.keys, self.values), self.scales, strict=True))
        queries = widen(self.queries).astype(np.float64)
        group = queries.shape[1] // len(keys)
        output, lse = np.zeros(queries.shape), np.full(queries.shape[:2], -np.inf)
        for number, head in np.ndindex(*queries.shape[:2]):
            seen = self.length - self.columns + number + 1
            if seen <= 0:
                continue
            logits = keys[head // group, :seen] @ queries[number, head] / np.sqrt(queries.shape[2])
            weights = np.exp(logits - logits.max())
            output[number, head] = weights @ values[head // group, :seen] / weights.sum()
            lse[number, head] = logits.max() + np.log(weights.sum())
        return output, lse


def exact(stored: NDArray[Any], scale: NDArray[np.float32]) -> F64:
    """Stored keys or values [kv_heads, n, D] as numbers."""
    if stored.dtype == np.uint16:
        return widen(stored).astype(np.float64)
    numbers: F64 = stored.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale[:, None, None]
    return numbers


def random_inputs(core: Core, length: int, seed: int = 0, scale: float = 1.0, columns: int = 1) -> Inputs:
    """Normal queries, keys and values; logits of about `scale`."""
    draw = np.random.default_rng([seed, length])
    cached = (core.kv_heads, length, core.head_dim)
    queries = draw.standard_normal((columns, core.heads, core.head_dim)) * scale
    keys, values = draw.standard_normal(cached), draw.standard_normal(cached)
    scales = np.ones((2, core.kv_heads), np.float32)
    if core.kv_dtype == "bf16":
        return Inputs(as_bf16(queries), as_bf16(keys), as_bf16(values), scales)
    scales = draw.uniform(0.01, 0.02, scales.shape).astype(np.float32)
    codes = [
        (numbers / scale[:, None, None]).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        for numbers, scale in zip((keys, values), scales, strict=True)
    ]
    return Inputs(as_bf16(queries), codes[0], codes[1], scales)


def tiles_of(core: Core, lengths: Sequence[int], columns: Sequence[int]) -> tuple[list[TileRecord], list[Any]]:
    """Tile records of the step, and what the scheduler needs of them. lengths: all keys, those of the columns too."""
    first, sequences = 0, []
    for length, count in zip(lengths, columns, strict=True):
        sequences.append((length - count, count, first))
        first += count
    records, tiles = launch_tiles(sequences, core.group, core.tile_columns, core.pages_per_sequence)
    if not core.has_newest:
        records = [replace(record, length=record.length + record.new, new=0) for record in records]
    return records, tiles


def plan_for(core: Core, lengths: Sequence[int], columns: Sequence[int], chunk: int = 0) -> KvPlan:
    """The KV plan of the step, cut every `chunk` keys or by rule with chunks of at least 16."""
    tiles = tiles_of(core, lengths, columns)[1]
    return kv_plans_for_launch(tiles, 1, Scheduling(core.kv_heads, core.blocks, minimum=16, chunk=chunk))[0][1]


def attend(
    core: Core,
    inputs: Inputs,
    plan: KvPlan | None = None,
    scheduler: str = "priority",
    seed: int = 0,
    chunk: int = 0,
) -> NDArray[np.float32]:
    """The kernel's output of one sequence, f32 [l_q, heads, D]. `plan`: by rule for the length unless given."""
    return attend_all(core, [inputs], plan, scheduler, seed, chunk)[0][0]


def attend_all(
    core: Core,
    batch: Sequence[Inputs],
    plan: KvPlan | None = None,
    scheduler: str = "priority",
    seed: int = 0,
    chunk: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Of each sequence, the kernel's output f32 [l_q, heads, D] and natural LSE f32 [l_q, heads]."""
    kernel = core_kernel(core)
    lengths, columns = [one.length for one in batch], [one.columns for one in batch]
    words = allocate((1, core.layout.plan_words), np.int32)
    words[0] = core.layout.encode(plan or plan_for(core, lengths, columns, chunk), 0)
    pool, table = paged(core, batch)
    records = encode(tiles_of(core, lengths, columns)[0], TileRecord)
    tiles = allocate(records.shape, np.int32)
    tiles[:] = records
    rows = [
        (request, number, length - count + number, length)
        for request, (length, count) in enumerate(zip(lengths, columns, strict=True))
        for number in range(count)
    ]
    output = allocate((core.tokens, core.heads, core.head_dim), np.float32)
    lse = allocate((core.tokens, core.heads), np.float32)
    kind = {"flags": FlaggedExchange, "barrier": BarrierExchange}[core.sync]
    arguments = {
        "qkv": qkv_words(core, batch),
        "kv": pool.reshape(-1).view(np.uint8),
        "scales": batch[0].scales,
        "page_table": table,
        "kv_plans": words,
        "tiles": tiles,
        "columns": np.array(rows, np.int32),
        "exchange": allocate(kind.size_bytes(core.sizes), np.uint8, fill=0),
        "output": output,
        "lse": lse,
        "epoch": 1,
        **(extra or {}),
    }
    kernel.launch(arguments, scheduler, seed)
    ends = np.cumsum([0, *columns])
    return [(output[a:b].copy(), lse[a:b].copy()) for a, b in zip(ends, ends[1:], strict=False)]


def qkv_words(core: Core, batch: Sequence[Inputs]) -> NDArray[np.uint32]:
    """Queries, newest keys and newest values of every column, in the layout of the exchange "qkv"."""
    rows = np.full((core.tokens, core.shape.qkv_rows), 0xFFFF, np.uint16)
    column = 0
    for one in batch:
        for number in range(one.columns):
            parts = [one.queries[number]]
            if core.has_newest:
                newest = [stored[:, one.length - one.columns + number] for stored in (one.keys, one.values)]
                parts += [row if row.dtype == np.uint16 else codes_as_bf16(row) for row in newest]
            flat = np.concatenate([part.reshape(-1) for part in parts])
            rows[column, : len(flat)] = flat
            column += 1
    return rows.reshape(-1).view(np.uint32)


def codes_as_bf16(codes: NDArray[np.uint8]) -> NDArray[np.uint16]:
    return as_bf16(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def paged(core: Core, batch: Sequence[Inputs]) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Pool [pages, 2, kv_heads, page_size, D] and page tables: all keys but the newest, in shuffled pages."""
    pages = core.batch * core.pages_per_sequence
    dtype = np.uint16 if core.kv_dtype == "bf16" else np.uint8
    pool = allocate((pages, 2, core.kv_heads, core.page_size, core.head_dim), dtype, fill=batch[0].leftover)
    table = allocate((core.batch, core.pages_per_sequence), np.int32)
    table.reshape(-1)[:] = np.random.default_rng(batch[0].page_seed).permutation(pages)
    for row, one in enumerate(batch):
        for token in range(one.length - (one.columns if core.has_newest else 0)):
            slot = pool[table[row, token // core.page_size], :, :, token % core.page_size]
            slot[0], slot[1] = one.keys[:, token], one.values[:, token]
    return pool, table
