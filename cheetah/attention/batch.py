"""Attention by itself: batches of requests over a paged KV cache, planned on the host, run as one kernel.

    attention = BatchAttention(heads=32, kv_heads=8, head_dim=128, page_size=16, batch=8)
    attention.plan(indptr, indices, last_page_len)         # int32 page table of every request
    out, lse = attention.run(q, kv)                        # q [rows, heads, head_dim], kv [pages, 2, kv_heads, 16, 128]

`plan` is integer work on the host; one plan serves any number of runs. The kernel's launch never changes: grid,
arguments and workspace stay, tables in the workspace say what there is to do; so a CUDA graph can repeat it. Keys of
the queries' own tokens must be in the cache: query i of a request with l_q queries and l_kv keys has the position
l_kv - l_q + i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.attention.arrays import ArrayError, ArrayView, host_bytes, view_array
from cheetah.attention.errors import AttentionError
from cheetah.attention.outputs import Borrowed, Output
from cheetah.attention.program import WORKSPACE_ALIGNMENT, AttentionSpec, generate_attention, pages_for
from cheetah.attention.requests import Prefix, RequestTables
from cheetah.blocks.attention.variants import CAUSAL, Variant
from cheetah.lang import ty
from cheetah.package import Generated
from cheetah.plan import Gpu
from cheetah.plan.formats import KV_TILE_TOKENS
from cheetah.plan.kv import KvPlan, Scheduling, schedule
from cheetah.plan.kv.page_table import Int32Array, check_page_table
from cheetah.plan.kv.tables import TileRecord, encode
from cheetah.runtime.device import Device, open_device

__all__ = ["AttentionError", "BatchAttention", "Prefix", "nhd_to_hnd"]


class BatchAttention:
    """Attention of up to `batch` requests with up to `queries` queries each.

    page_size: any. kv_dtype: "bf16" or "e4m3". levels: 1, or more for shared prefixes. max_keys: for how many keys a
    request the page tables have room. chunk: 0, or the fixed chunk length F, with which a request's bits do not depend
    on the others. device: a device, its name ("cuda", "pycuda", "emulator"), or None for what there is. workspace: a
    buffer of the device, of `workspace_bytes` at least; else one is allocated. plan_fields: fields of
    `cheetah.plan.Plan`.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int = 16,
        *,
        kv_dtype: str = "bf16",
        variant: Variant = CAUSAL,
        batch: int = 8,
        queries: int = 1,
        levels: int = 1,
        max_keys: int = 65536,
        chunk: int = 0,
        gpu: str | Gpu | None = None,
        device: Device | str | None = None,
        workspace: Any = None,
        generated: Generated | None = None,
        **plan_fields: Any,
    ) -> None:
        self.device = open_device(device) if device is None or isinstance(device, str) else device
        machine = gpu or ("emulator" if self.device.name == "emulator" else "h200")
        self.spec = AttentionSpec(
            heads,
            kv_heads,
            head_dim,
            page_size=page_size,
            kv_dtype=kv_dtype,
            variant=variant,
            batch=batch,
            queries=queries,
            levels=levels,
            page_entries=pages_for(batch, max_keys, page_size, levels),
            chunk=chunk,
            max_keys=max_keys if chunk else 0,
            gpu=machine,
            overrides=plan_fields,
        )
        made = generated or generate_attention(self.spec)
        self.kernel = self.device.load(made.text, made.manifest)
        self.workspace = self._attach(workspace)
        self._planned: _Planned | None = None
        self._last_run: _Run | None = None

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace, which never change. It must be aligned to 256 bytes."""
        return self.spec.workspace_bytes

    def _attach(self, workspace: Any) -> Any:
        if workspace is None:
            return self.device.allocate(self.workspace_bytes, 0)
        if not hasattr(workspace, "upload"):
            raise AttentionError(f"workspace is a {type(workspace).__name__}: give a buffer of device.allocate")
        if workspace.nbytes < self.workspace_bytes:
            raise AttentionError(f"workspace: {workspace.nbytes} bytes given, {self.workspace_bytes} needed")
        if workspace.address % WORKSPACE_ALIGNMENT:
            raise AttentionError(f"workspace: address {workspace.address:#x} is no multiple of {WORKSPACE_ALIGNMENT}")
        workspace.fill(0)
        return workspace

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(
        self,
        indptr: Int32Array,
        indices: Int32Array,
        last_page_len: Int32Array,
        *,
        qo_indptr: Int32Array | None = None,
        prefixes: Sequence[Prefix] = (),
        kv_offset: Sequence[int] | None = None,
        chunk: int | None = None,
        minimum: int | None = None,
        row_cost: int = 1,
        token_cost: int = 1,
        order: Sequence[int] | None = None,
        pages: int = 2**31 - 1,
    ) -> KvPlan:
        """Take the requests' page tables (int32 arrays, FlashInfer 3.1.1) and decide who reads what.

        What is refused leaves the plan of before, which goes on serving runs.

        qo_indptr: int32 [requests + 1], rows of q of each request; one each unless given. prefixes: levels of shared
        prefixes, outermost first; the requests' own keys follow them. kv_offset: absolute position of each request's
        first own key; behind its prefixes unless given. chunk: F for this plan. minimum: M. row_cost, token_cost, order
        (a permutation of the items) change who works on what, and no bit of the result. pages: of the pool, to check
        page ids against; `run` checks them again.
        """
        check_page_table(indptr, indices, last_page_len, pages, self.spec.page_size)
        for prefix in prefixes:
            check_page_table(prefix.indptr, prefix.indices, prefix.last_page_len, pages, self.spec.page_size)
        requests = len(last_page_len)
        rows = self._rows(qo_indptr, requests)
        if len(prefixes) >= self.spec.levels:
            raise AttentionError(f"{len(prefixes)} levels of prefixes: made for {self.spec.levels - 1}; give levels=")
        if self.spec.variant.one_query and (prefixes or int(np.diff(rows).max()) > 1):
            raise AttentionError(
                f"variant {self.spec.variant.name} is for one query a request and no prefixes: what it makes of a key "
                "depends on who asks; plan requests of one row each, with their whole page tables"
            )
        tables = RequestTables(self.spec, rows, (indptr, indices, last_page_len), prefixes, kv_offset)
        machine = self.spec.machine
        scheduling = Scheduling(
            self.spec.kv_heads,
            machine.blocks,
            KV_TILE_TOKENS,
            machine.kv_chunk_min if minimum is None else minimum,
            row_cost,
            token_cost,
            self.spec.chunk if chunk is None else chunk,
            machine.kv_item_cost,
        )
        made = schedule(tables.tiles, scheduling)
        if order is not None:
            made = _reordered(made, order)
        self._take(_Planned(made, tables, int(rows[-1])))
        return made

    def _take(self, planned: _Planned) -> None:
        """Lay a plan into the workspace; what is refused leaves the one before."""
        sections = self._sections(planned)
        self._planned = None  # while the workspace holds half of one plan and half of another
        for name, words in sections.items():
            if words.nbytes:
                self.workspace.upload(words, self.spec.sections.offsets[name])
        self._planned = planned

    def _rows(self, qo_indptr: Int32Array | None, requests: int) -> Int32Array:
        if not 1 <= requests <= self.spec.batch:
            raise AttentionError(f"{requests} requests: made for 1 to {self.spec.batch}")
        if qo_indptr is None:
            return np.arange(requests + 1, dtype=np.int32)
        if not isinstance(qo_indptr, np.ndarray) or qo_indptr.dtype != np.int32 or qo_indptr.shape != (requests + 1,):
            raise AttentionError(f"qo_indptr must be int32 [{requests + 1}]")
        counts = np.diff(qo_indptr)
        if qo_indptr[0] != 0 or (counts < 1).any() or (counts > self.spec.queries).any():
            raise AttentionError(f"qo_indptr is {qo_indptr.tolist()}: give 0, then 1 to {self.spec.queries} rows each")
        return qo_indptr

    def _sections(self, planned: _Planned) -> dict[str, NDArray[np.int32]]:
        """What a plan puts into the workspace, by section; AttentionError or PlanError if it has no room there."""
        spec = self.spec
        sections = {
            "kv_plan": spec.layout.encode(planned.plan, 0),
            "tiles": encode(planned.tables.records, TileRecord),
            "columns": planned.tables.columns(),
            "page_table": planned.tables.page_table,
        }
        for name, words in sections.items():
            if words.nbytes > (room := spec.sections.sizes[name]):
                raise AttentionError(
                    f"{name}: {words.nbytes} bytes, and the workspace has room for {room}: make it for more requests, "
                    "levels or keys"
                )
        return sections

    # -- running ------------------------------------------------------------------------------------------------------

    def run(
        self,
        q: Any,
        kv: Any,
        out: Any = None,
        lse: Any = None,
        *,
        scales: Any = None,
        layout: str = "HND",
        **given: Any,
    ) -> tuple[Any, Any]:
        """Attention of the planned requests: (out, lse), the natural LSE f32 [rows, heads].

        q: bf16 [rows, heads, head_dim] (numpy: ml_dtypes.bfloat16, or uint16 bits). kv: the pool, HND [pages, 2,
        kv_heads, page_size, head_dim], bf16 or e4m3 (uint8 codes); layout="NHD" [pages, 2, page_size, kv_heads,
        head_dim] of numpy arrays is converted. scales: f32 [2, kv_heads] of e4m3 keys and values, or two numbers; 1.0
        unless given. Arrays may be numpy, or on the device's GPU (`__cuda_array_interface__`, DLPack): those are used
        where they lie and must be ready. Outputs are written to `out` and `lse` if given, else made, where q is.
        given: the variant's parameters.
        """
        planned = self._planned
        if planned is None:
            raise AttentionError("run before plan: plan first")
        if layout == "NHD":
            kv = nhd_to_hnd(kv)
        elif layout != "HND":
            raise AttentionError(f"layout {layout!r}: HND or NHD")
        rows, spec = planned.rows, self.spec
        queries, pool = view_array(q, "q"), view_array(kv, "kv")
        self._check_q(queries, rows)
        self._check_kv(pool, planned)
        outputs = {
            "out": Output.of(self.device, out, (rows, spec.heads, spec.head_dim), 2, queries.on_gpu),
            "lse": Output.of(self.device, lse, (rows, spec.heads), 4, queries.on_gpu),
        }
        arguments = {
            "q": self._argument(queries),
            "kv": self._argument(pool),
            **self._scales(scales),
            "workspace": self.workspace,
            **{name: output.buffer for name, output in outputs.items()},
            **self._variant_arguments(given),
        }
        self._last_run = _Run(arguments, rows, pool.shape[0])
        self.launch()
        dtype = q.dtype if isinstance(q, np.ndarray) else np.dtype(ml_dtypes.bfloat16)
        return outputs["out"].finish(dtype), outputs["lse"].finish(np.dtype(np.float32))

    def launch(self) -> None:
        """Launch again with the arguments of the last `run` (whose arrays must still be there); returns at once."""
        last, planned = self._last_run, self._planned
        if last is None or planned is None:
            raise AttentionError("launch before plan and run: plan, and run once, first")
        if planned.rows > last.rows or planned.highest_page >= last.pages:
            raise AttentionError(
                f"launch: the arrays of the last run have {last.rows} rows and {last.pages} pages, and the plan reads "
                f"{planned.rows} rows and names page {planned.highest_page}: run with arrays for this plan"
            )
        self.device.launch(self.kernel, last.arguments)

    def time_ms(self, launches: int = 1) -> float:
        """Milliseconds a launch, over `launches` launches of the last `run` one after another, by device events."""
        start = self.device.record()
        for _ in range(launches):
            self.launch()
        return self.device.elapsed_ms(start, self.device.record()) / launches

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that a launch of the present plan reads."""
        if self._planned is None:
            raise AttentionError("kv_bytes before plan: plan first")
        tiles = self._planned.tables.tiles
        per_key = 2 * self.spec.kv_heads * self.spec.head_dim * self.spec.plan.kv_element_bytes
        return sum(tile.end - tile.begin for tile in tiles) * per_key

    def _check_q(self, queries: ArrayView, rows: int) -> None:
        expected = (rows, self.spec.heads, self.spec.head_dim)
        if queries.shape != expected or queries.dtype not in ("bf16", "u16"):
            raise ArrayError(f"q is {queries.dtype} {queries.shape}: the plan has bf16 {expected}")

    def _check_kv(self, pool: ArrayView, planned: _Planned) -> None:
        spec = self.spec
        inner = (2, spec.kv_heads, spec.page_size, spec.head_dim)
        kinds = {"bf16": ("bf16", "u16"), "e4m3": ("e4m3", "u8", "i8")}[spec.kv_dtype]
        if len(pool.shape) != 5 or pool.shape[1:] != inner or pool.dtype not in kinds:
            raise ArrayError(
                f"kv is {pool.dtype} {pool.shape}: give {spec.kv_dtype} (pages, {', '.join(map(str, inner))})"
            )
        if planned.highest_page >= pool.shape[0]:
            raise ArrayError(f"kv has {pool.shape[0]} pages, and the page table names page {planned.highest_page}")

    def _argument(self, view: ArrayView) -> Any:
        if view.on_gpu:
            if self.device.name == "emulator":
                raise ArrayError("an array on a GPU: the emulator takes numpy arrays")
            if view.address % 16:
                raise ArrayError(f"an array at {view.address:#x}: give one aligned to 16 bytes")
            return Borrowed(self.device, view)
        buffer = self.device.allocate(max(view.nbytes, 16))
        buffer.upload(host_bytes(view))
        return buffer

    def _scales(self, scales: Any) -> dict[str, Any]:
        if self.spec.kv_dtype == "bf16":
            if scales is not None:
                raise AttentionError("scales are for e4m3 keys and values")
            return {}
        numbers = np.ones((2, 1), np.float32) if scales is None else np.asarray(scales, np.float32).reshape(2, -1)
        words = np.ascontiguousarray(np.broadcast_to(numbers, (2, self.spec.kv_heads)))
        return {"scales": self._argument(view_array(words, "scales"))}

    def _variant_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        wanted = self.spec.variant.parameters
        if set(given) != set(wanted):
            raise AttentionError(f"variant {self.spec.variant.name} takes {sorted(wanted)}, not {sorted(given)}")
        return {
            name: self._argument(view_array(value, name)) if isinstance(wanted[name], ty.Pointer) else value
            for name, value in given.items()
        }


@dataclass(frozen=True)
class _Planned:
    plan: KvPlan
    tables: RequestTables
    rows: int

    @property
    def highest_page(self) -> int:
        """The highest id in the page table; -1 if it is empty."""
        return int(self.tables.page_table.max(initial=-1))


@dataclass(frozen=True)
class _Run:
    """The arguments of a launch, and what their arrays have: rows of q, pages of the pool."""

    arguments: dict[str, Any]
    rows: int
    pages: int


def _reordered(plan: KvPlan, order: Sequence[int]) -> KvPlan:
    """The same items, in another order and so with other owners."""
    if sorted(order) != list(range(plan.item_count)):
        raise AttentionError(f"order is no permutation of the plan's {plan.item_count} items")
    items = plan.items[np.asarray(order, np.int64)]
    items.setflags(write=False)
    return KvPlan(items, plan.work_indptr, plan.merges, plan.merge_indptr, plan.merge_src, plan.chunk)


def nhd_to_hnd(kv: Any) -> NDArray[Any]:
    """A numpy pool [pages, 2, page_size, kv_heads, head_dim] as [pages, 2, kv_heads, page_size, head_dim]; a copy."""
    if not isinstance(kv, np.ndarray) or kv.ndim != 5:
        raise ArrayError("an NHD pool must be a numpy array of five dimensions; convert others to HND")
    return np.ascontiguousarray(kv.transpose(0, 1, 3, 2, 4))
