"""How a case is given to the stand-alone attention kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from cheetah.attention import BatchAttention, Prefix
from cheetah.plan import GPUS, Gpu
from cheetah.plan.kv import KvPlan
from cheetah.plan.kv.page_table import PageTable, page_table
from cheetah.runtime.device import Device, open_device
from tests.attention.cases import KV_TYPES, Array, Case, Core
from tests.attention.reference import State
from tests.program.rig import emulated_gpu
from tests.tolerances import ATTENTION_OUTPUT

OUTPUT_TOLERANCE = ATTENTION_OUTPUT
SPARE_PAGES = 3
EMULATED_WARPS = 4
"""Few warps, for speed; the columns of batch x queries need this many."""


@dataclass(frozen=True)
class Target:
    """The device, and how many blocks it runs instead of those that a case asks for."""

    device: str
    blocks: int | None = None


EMULATOR, GPU = Target("emulator"), Target("cuda", 132)
_targets = [EMULATOR]


@contextmanager
def running_on(target: Target) -> Iterator[None]:
    """All kernels run there meanwhile."""
    _targets.append(target)
    try:
        yield
    finally:
        _targets.pop()


def attend(case: Case, again: int = 0) -> State:
    """The kernel's output, widened, and its LSE; of the last of `again` more runs with the same plan."""
    memory = Memory(case)
    attention = attention_of(case.core)
    planned(attention, case, memory)
    given: dict[str, Any] = dict(case.parameters)
    if case.core.kv_dtype == "e4m3":
        scales = [np.broadcast_to(scale, case.core.kv_heads) for scale in (case.key_scale, case.value_scale)]
        given["scales"] = np.stack(scales).astype(np.float32)
    queries = np.concatenate(case.queries).astype(ml_dtypes.bfloat16)
    for _ in range(1 + again):
        output, lse = attention.run(queries, memory.pool, **given)
    return State(output.astype(np.float32), lse)


def planned(attention: BatchAttention, case: Case, memory: Memory) -> KvPlan:
    """Plan the case; a second time where its items are to be dealt at random."""

    def plan(order: list[int] | None = None) -> KvPlan:
        return attention.plan(
            *memory.own,
            qo_indptr=case.rows,
            prefixes=memory.prefixes,
            chunk=case.chunk or 0,
            row_cost=case.costs[0],
            token_cost=case.costs[1],
            order=order,
        )

    made = plan()
    if case.deal is not None:
        made = plan(np.random.default_rng(case.deal).permutation(made.item_count).tolist())
    if case.fold is not None:
        fold_in_another_order(attention, made, case.fold)
    return made


def fold_in_another_order(attention: BatchAttention, made: KvPlan, seed: int) -> None:
    """Lay into the workspace a plan whose merges name their sources in random orders: no scheduler gives such a one."""
    draw = np.random.default_rng(seed)
    merges = zip(made.merge_indptr, made.merge_indptr[1:], strict=False)
    sources = [draw.permutation(made.merge_src[begin:end]) for begin, end in merges]
    assert attention._planned is not None
    shuffled = replace(made, merge_src=np.concatenate(sources).astype(np.int32))
    attention._take(replace(attention._planned, plan=shuffled))


class Memory:
    """The case's pool [pages, 2, kv_heads, page_size, D], and its page tables."""

    def __init__(self, case: Case) -> None:
        core = case.core
        parts = [*((prefix.keys, prefix.values) for prefix in case.prefixes), *zip(case.keys, case.values, strict=True)]
        counts = [-(-keys.shape[1] // core.page_size) for keys, _ in parts]
        pages = np.arange(sum(counts) + SPARE_PAGES)
        if case.page_seed is not None:
            pages = np.random.default_rng(case.page_seed).permutation(pages)
        self.lists = [part.tolist() for part in np.split(pages[: sum(counts)], np.cumsum(counts)[:-1])]
        element = np.dtype(KV_TYPES[core.kv_dtype])
        shape = (len(pages), 2, core.kv_heads, core.page_size, core.head_dim)
        self.pool = np.full((*shape[:-1], shape[-1] * element.itemsize), case.leftover, np.uint8).view(element)
        for (keys, values), used in zip(parts, self.lists, strict=True):
            self._store(keys, values, np.array(used, np.int64))
        shared = len(case.prefixes)
        lengths = [keys.shape[1] for keys, _ in parts]
        self.own: PageTable = page_table(self.lists[shared:], lengths[shared:], core.page_size)
        self.prefixes: list[Prefix] = []
        if case.prefixes:
            table = page_table(self.lists[:shared], lengths[:shared], core.page_size)
            self.prefixes.append(Prefix(*table, groups=[(prefix.first, prefix.count) for prefix in case.prefixes]))
        elif case.empty_level:
            nothing = page_table([[]], [0], core.page_size)
            self.prefixes.append(Prefix(*nothing, groups=[(0, case.batch)]))

    def _store(self, keys: Array, values: Array, pages: Array) -> None:
        tokens = np.arange(keys.shape[1])
        slots = self.pool.shape[3]
        both = np.stack([keys, values]).astype(self.pool.dtype)  # [2, H_kv, n, D]
        self.pool[pages[tokens // slots], :, :, tokens % slots] = both.transpose(2, 0, 1, 3)


def attention_of(core: Core) -> BatchAttention:
    return _attention(core, _targets[-1])


@cache
def _attention(core: Core, target: Target) -> BatchAttention:
    device = _device(target.device)
    return BatchAttention(
        core.heads,
        core.kv_heads,
        core.head_dim,
        core.page_size,
        kv_dtype=core.kv_dtype,
        variant=core.variant,
        batch=core.batch,
        queries=core.queries,
        levels=core.levels,
        max_keys=core.max_keys,
        chunk=core.shortest_chunk,
        gpu=_machine(target, core.blocks),
        device=device,
        **({"consumer_warps": EMULATED_WARPS} if target.device == "emulator" else {}),
    )


@cache
def _device(name: str) -> Device:
    return open_device(name, say=lambda line: None)


def _machine(target: Target, blocks: int) -> Gpu:
    blocks = target.blocks or blocks
    if target.device == "emulator":
        return GPUS[emulated_gpu(blocks)]
    return replace(GPUS["h200"], blocks=blocks)
