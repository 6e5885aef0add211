"""The attention core as a kernel of its own: generated text and manifest for one kind of attention, no model around it.

All keys are in the paged cache, those of the queries' own tokens included; query i of a request with l_q queries and
l_kv keys has the position l_kv - l_q + i. What depends on lengths is in tables that the host lays into the workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.cache import KvCache
from cheetah.blocks.attention.core import Attention, AttentionPort, partial_words
from cheetah.blocks.attention.port import Finished
from cheetah.blocks.attention.schedule import Schedule
from cheetah.blocks.attention.variants import CAUSAL, Variant
from cheetah.blocks.exchange_kinds import BarrierExchange, FlaggedExchange, make_exchange
from cheetah.blocks.machine import Machine, emit_roles, start_machine
from cheetah.blocks.ring import Ring
from cheetah.lang import prim, ty
from cheetah.manifest import Launch
from cheetah.package import Generated, KernelParameter, described, packaged
from cheetah.plan import Gpu, ModelShape, Plan, PlanError, Region, default_plan, gpu_named, shared_map
from cheetah.plan.index import ceil_div
from cheetah.plan.kv import KvPlanLayout, most_tiles
from cheetah.plan.kv.tables import TILE_WORDS
from cheetah.plan.plan import STEP_TOKENS
from cheetah.plan.regions import attention_records, attention_regions
from cheetah.plan.sections import Sections
from cheetah.plan.shared_memory import BULK_ALIGNMENT, SharedMap

KERNEL_NAME = "attention"
COLUMN_FIELDS = ("request", "query", "position", "keys")
"""Words of a column's record in the workspace: its request, its number there, its position (-1: sees nothing), l_kv."""
HEAD_DIMS = (64, 128, 256)
MAX_QUERIES = 8
WORKSPACE_ALIGNMENT = 256
"""Of every section of the workspace, and of its start."""
STREAMING = {"stage_bytes": 32768, "in_flight": 2, "in_flight_waiting": 0}
"""The ring on a GPU. More in flight only lets the blocks' speeds differ more; smaller stages cost 1 % with pages of 16
(benchmarks/LOG.md)."""
SCRATCH_BYTES = 34 * 1024
"""Shared memory for queries and for folding the warps' states: what 6 stages of 32 KB leave."""
ROLES = {
    "q": "queries [rows, heads, head_dim]",
    "kv": "page pool [pages, 2, kv_heads, page_size, head_dim]",
    "scales": "of e4m3 keys and values [2, kv_heads]",
    "workspace": "tables of the plan, then partial states; zeroed once",
    "out": "outputs [rows, heads, head_dim]",
    "lse": "natural logarithms of the sums of exponentials [rows, heads], if wanted",
}


@dataclass(frozen=True)
class AttentionSpec:
    """What a kernel is generated for. Sizes are the most that a launch may have, except heads, dims and page size.

    batch: requests. queries: of a request (l_q). levels: 1, or more for shared prefixes. page_entries: of the page
    tables of all levels together. chunk, max_keys: a fixed chunk length (F) and the most keys of a request with it.
    plan: fields of `Plan` other than by rule, e.g. consumer_warps.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    kv_dtype: str = "bf16"
    variant: Variant = CAUSAL
    batch: int = 8
    queries: int = 1
    levels: int = 1
    page_entries: int = 65536
    chunk: int = 0
    max_keys: int = 0
    gpu: str | Gpu = "h200"
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise PlanError(f"attention: head_dim is {self.head_dim}: kernels are made for 64, 128 and 256")
        if not 1 <= self.queries <= MAX_QUERIES:
            raise PlanError(f"attention: queries is {self.queries}: a request has 1 to {MAX_QUERIES}")
        if self.levels < 1 or self.page_entries < 1:
            raise PlanError(f"attention: levels {self.levels}, page_entries {self.page_entries}: give at least 1")
        if self.heads * MAX_QUERIES > 2**20:
            raise PlanError(f"attention: {self.heads} heads")
        if set(self.variant.parameters) & set(ROLES):
            raise PlanError(f"attention: a parameter of variant {self.variant.name} is called like one of the kernel's")

    @cached_property
    def shape(self) -> ModelShape:
        """The heads; the rest of a model is not there."""
        return ModelShape(64, 64, 64, self.heads, self.kv_heads, self.head_dim, 1)

    @cached_property
    def machine(self) -> Gpu:
        return gpu_named(self.gpu) if isinstance(self.gpu, str) else self.gpu

    @cached_property
    def plan(self) -> Plan:
        wanted = self.batch * self.queries
        tokens = next((size for size in STEP_TOKENS if size >= wanted), 0)
        if not tokens:
            raise PlanError(
                f"attention: batch {self.batch} x {self.queries} queries: a launch has {STEP_TOKENS[-1]} rows at most"
            )
        fields: dict[str, Any] = {
            "batch": self.batch,
            "tokens": tokens,
            "page_size": self.page_size,
            "kv_dtype": self.kv_dtype,
            "max_steps": 1,
            "sync": "flags",
            "adding_warps": 0,
            **({} if self.machine.emulated else STREAMING),
            **self.overrides,
        }
        return default_plan(self.machine, self.shape, reserve=self.regions, **fields)

    @property
    def tile_columns(self) -> int:
        """Most queries of a tile: of a request, or, where a prefix is shared, of several."""
        return self._tile_columns(self.plan)

    def _tile_columns(self, plan: Plan) -> int:
        most = max(1, min(plan.tokens, plan.tile_rows // self.shape.group))
        return most if self.levels > 1 else min(most, self.queries)

    def regions(self, shape: ModelShape, plan: Plan, gpu: Gpu) -> tuple[Region, ...]:
        """What a block keeps in shared memory beside the ring; there are no newest keys."""
        attention = attention_regions(shape, plan, SCRATCH_BYTES, self._tile_columns(plan), newest=False)
        scratch = Region("scratch", sum(region.nbytes for region in attention), BULK_ALIGNMENT)
        return (scratch, *attention, *attention_records(plan), Region("epoch", 16))

    @cached_property
    def shared(self) -> SharedMap:
        """The arena of a block."""
        return shared_map(self.shape, self.plan, self.machine, self.regions)

    @cached_property
    def layout(self) -> KvPlanLayout:
        group = self.shape.group
        tiles = most_tiles(self.batch, self.batch * self.queries, self.tile_columns, self.levels)
        return KvPlanLayout(
            self.machine.blocks,
            self.kv_heads,
            tiles,
            self.tile_columns * group,
            self.levels,
            self.chunk,
            self.max_keys,
            self.batch * self.queries * group,
        )

    @property
    def exchange_sizes(self) -> dict[str, int]:
        return {"partials": self.layout.max_partial_rows * partial_words(self.head_dim)}

    @cached_property
    def sections(self) -> Sections[str]:
        """Of the workspace, in bytes."""
        kind = {"flags": FlaggedExchange, "barrier": BarrierExchange}[self.plan.sync]
        sizes = {
            "exchange": kind.size_bytes(self.exchange_sizes),
            "launches": 8,
            "kv_plan": 4 * self.layout.plan_words,
            "tiles": 4 * TILE_WORDS * self.layout.tiles,
            "columns": 4 * len(COLUMN_FIELDS) * self.batch * self.queries,
            "page_table": 4 * self.page_entries,
        }
        return Sections(sizes, WORKSPACE_ALIGNMENT)

    @property
    def workspace_bytes(self) -> int:
        return self.sections.total

    @property
    def parameters(self) -> dict[str, ty.Type]:
        is_codes = self.kv_dtype == "e4m3"
        return {
            "q": ty.ptr(ty.bf16),
            "kv": ty.ptr_mut(ty.u8 if is_codes else ty.bf16),
            **({"scales": ty.ptr(ty.f32)} if is_codes else {}),
            "workspace": ty.ptr_mut(ty.u8),
            "out": ty.ptr_mut(ty.bf16),
            "lse": ty.ptr_mut(ty.f32),
            **self.variant.parameters,
        }


class MemoryPort(AttentionPort):
    """Queries and outputs in plain memory."""

    has_newest = False

    def __init__(self, spec: AttentionSpec, columns: ch.Expr, given: SimpleNamespace) -> None:
        self.spec, self.columns, self.given = spec, columns, given

    def query_unit(self, column: ch.Expr, head: ch.Expr, unit: ch.Expr, epoch: ch.Expr) -> Any:
        place = (column * self.spec.heads + head) * self.spec.head_dim + unit * 8
        return prim.load_constant_u32x4(self.given.q + place)

    def newest_unit(self, column: ch.Expr, kv_head: ch.Expr, value: Any, unit: ch.Expr, epoch: ch.Expr) -> Any:
        raise NotImplementedError("all keys are in the cache")

    def _field(self, column: ch.Expr, name: str) -> Any:
        return prim.load_constant_u32(self.columns + (column * len(COLUMN_FIELDS) + COLUMN_FIELDS.index(name)))

    def position(self, column: ch.Expr) -> Any:
        return self._field(column, "position")

    def request(self, column: ch.Expr) -> Any:
        return self._field(column, "request")

    def query(self, column: ch.Expr) -> Any:
        return self._field(column, "query")

    def keys(self, column: ch.Expr) -> Any:
        return self._field(column, "keys")

    def scale(self, kv_head: ch.Expr, value: bool) -> Any:
        return self.given.scales[kv_head + (self.spec.kv_heads if value else 0)]

    @ch.inline
    def publish(self, made: Finished, epoch: ch.Expr) -> None:
        row = made.column * self.spec.heads + made.head
        words = ch.reinterpret(ty.ptr_mut(ty.u32), self.given.out)
        words[row * (self.spec.head_dim // 2) + made.dim_pair] = prim.pack_bf16x2(made.low, made.high)
        with ch.if_((self.given.lse != None) & (made.dim_pair == 0)):  # noqa: E711
            self.given.lse[row] = made.lse


def build_kernel(spec: AttentionSpec) -> ch.Kernel:
    """The kernel: one launch is attention of all requests of a plan."""

    @ch.kernel(ch.Params(**spec.parameters), name=KERNEL_NAME, max_threads=spec.plan.threads)
    def attention(**given: Any) -> None:
        machine = start_machine(spec.shape, spec.plan, spec.machine, spec.shared)
        _emit(spec, machine, SimpleNamespace(**given))

    return attention


@ch.inline
def _emit(spec: AttentionSpec, machine: Machine, given: SimpleNamespace) -> None:
    tables = {
        name: ch.reinterpret(ty.ptr(ty.i32), given.workspace + offset)
        for name, offset in spec.sections.offsets.items()
        if name not in ("exchange", "launches")
    }
    exchange = make_exchange(machine, given.workspace + spec.sections.offsets["exchange"], spec.exchange_sizes)
    ring = Ring(machine)
    with ch.if_(machine.thread == 0):
        ring.initialise()
        prim.mbarrier_fence_init()
    prim.block_barrier()  # orders the barriers' initialisation before their first use by either role
    ring.start()
    cache = KvCache(machine, given.kv, tables["page_table"])
    schedule = Schedule(machine, spec.layout, tables["kv_plan"], ty.u32(1), tables["tiles"])
    port = MemoryPort(spec, tables["columns"], given)
    attention = Attention(
        machine,
        ring,
        exchange,
        schedule,
        cache,
        port,
        variant=spec.variant,
        parameters=given,
        tile_columns=spec.tile_columns,
    )
    with machine.producer:
        ch.comment("keys and values")
        attention.copy(0, 0)
    with machine.consumer:
        exchange.start()
        _take_ticket(machine, given.workspace + spec.sections.offsets["launches"])
        schedule.keep_plan()
        machine.meet()
        epoch = machine.region("epoch", ty.u32)[0]
        ch.comment("attention")
        attention.attend(0, epoch)
        ch.comment("merge of partial states")
        attention.merge(epoch)
    emit_roles(machine)


@ch.inline
def _take_ticket(machine: Machine, launches: ch.Expr) -> None:
    """The launch's number makes its epoch, in the region `epoch` after the next meeting: so a launch can be repeated as
    it is. The epochs are 1 to 2^32 - 1; 0 is what a fresh workspace has."""
    with ch.if_(machine.thread == 0):
        ticket = prim.fetch_add_release_u64(ch.reinterpret(ty.ptr_mut(ty.u64), launches), 1)
        machine.region("epoch", ty.u32)[0] = ty.u32(ticket // machine.gpu.blocks % 0xFFFFFFFF) + 1


def generate_attention(spec: AttentionSpec) -> Generated:
    """Text and manifest of the kernel. PlanError where the machine has no room for it."""
    kernel = build_kernel(spec)
    manifest = described(
        KERNEL_NAME,
        spec.machine,
        Launch(spec.machine.blocks, spec.plan.threads, spec.shared.total_bytes),
        {name: _parameter(spec, name, type_) for name, type_ in spec.parameters.items()},
        command="cheetah.attention",
        config=_config(spec),
        plan=spec.plan.to_dict(),
        phases=("attention",),
        step_bytes={"kv_per_token": 2 * spec.kv_heads * spec.head_dim * spec.plan.kv_element_bytes},
    )
    return packaged(kernel, manifest, _header(spec))


def _config(spec: AttentionSpec) -> dict[str, Any]:
    names = ("heads", "kv_heads", "head_dim", "page_size", "kv_dtype", "batch", "queries", "levels", "page_entries")
    return {**{name: getattr(spec, name) for name in names}, "variant": spec.variant.name}


def _header(spec: AttentionSpec) -> str:
    lines = [
        "Attention over a paged KV cache in one persistent kernel. Generated; do not edit.",
        "",
        ", ".join(f"{name} {value}" for name, value in _config(spec).items()),
        f"machine: {spec.machine.name}, {spec.machine.blocks} blocks of {spec.plan.threads} threads",
        f"shared memory: {spec.shared.summary}",
    ]
    return "\n".join(lines)


def _parameter(spec: AttentionSpec, name: str, type_: ty.Type) -> KernelParameter:
    meaning = ROLES.get(name, f"of variant {spec.variant.name}")
    shape = {"workspace": (spec.workspace_bytes,), "scales": (2, spec.kv_heads)}.get(name)
    return KernelParameter(type_, meaning, shape, fill=None, given=name == "lse")


def pages_for(batch: int, keys: int, page_size: int, levels: int = 1) -> int:
    """Page entries for `batch` requests of up to `keys` keys on each of `levels` levels."""
    return levels * batch * ceil_div(keys, page_size)
