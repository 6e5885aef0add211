"""The KV plan as the kernel reads it: which items of attention a block works on, and which merges it makes.

The host made the plans of the launch from the sequence lengths (see `cheetah.plan.kv`); a step uses the last plan whose
first step is not after it. Both roles follow the same plan, so the copy lane fetches just what the math warps expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.plan.kv import ITEM_WORDS, KvPlanLayout

WRITE_THROUGH = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Item:
    """Keys [begin, end) of one KV head, rounded outward, and where the state goes (a partial slot or WRITE_THROUGH)."""

    head: Any
    begin: Any
    end: Any
    slot: Any


@dataclass(frozen=True, eq=False)
class Merge:
    """Row `row` of KV head `head`: the states in the slots `sources[begin:end]`, to be folded in this order."""

    head: Any
    row: Any
    begin: Any
    end: Any


class Schedule:
    """The plans of a launch, and the one of the present step in each role."""

    def __init__(self, machine: Machine, plans: ch.Expr, plan_count: ch.Expr) -> None:
        self.machine, self.plans, self.plan_count = machine, plans, plan_count
        self.layout = KvPlanLayout(machine.gpu.blocks, machine.shape.kv_heads, machine.plan.batch)
        self._start()

    @ch.inline
    def _start(self) -> None:
        self.index = {}
        for role in self.machine.roles:
            with role:
                plan_index = ch.var(ty.u32, 0)
                self.index[role.name] = plan_index

    @ch.inline
    def advance(self, role: ch.Role, step: ch.Expr) -> None:
        """Move on to the plan of `step`; steps only grow."""
        following = self.index[role.name] + 1
        with ch.if_(following < self.plan_count):
            first_step = prim.load_constant_u32(self.plans + following * self.layout.plan_words)
            with ch.if_(first_step <= step):
                self.index[role.name].set(following)

    def _word(self, role: ch.Role, section: str, index: ch.Value) -> Any:
        offset = ch.cast(ty.u32, index) + self.layout.offsets[section]
        return prim.load_constant_u32(self.plans + (self.index[role.name] * self.layout.plan_words + offset))

    @contextmanager
    @ch.inline
    def items(self, role: ch.Role) -> Iterator[Item]:
        """The items of this block, in order."""
        first_item = self._word(role, "work_indptr", self.machine.block)
        last_item = self._word(role, "work_indptr", self.machine.block + 1)
        with ch.for_(first_item, last_item, unroll=1) as item:
            head = self._word(role, "items", item * ITEM_WORDS + 2)
            begin = self._word(role, "items", item * ITEM_WORDS + 3)
            end = self._word(role, "items", item * ITEM_WORDS + 4)
            slot = self._word(role, "items", item * ITEM_WORDS + 5)
            yield Item(head, begin, end, slot)

    @contextmanager
    @ch.inline
    def merges(self, role: ch.Role) -> Iterator[Merge]:
        """The merges of this block: one row of one split head each, dealt round to the blocks."""
        group = self.machine.shape.group
        merge_count = self._word(role, "header", 2)
        with ch.for_(self.machine.block, merge_count * group, self.machine.gpu.blocks, unroll=1) as job:
            merge = job // group
            row = job % group
            head = self._word(role, "merges", merge * 2 + 1)
            first_source = self._word(role, "merge_indptr", merge)
            last_source = self._word(role, "merge_indptr", merge + 1)
            yield Merge(head, row, first_source, last_source)

    def source(self, role: ch.Role, index: ch.Value) -> Any:
        """The partial slot that is number `index` in the order of folding."""
        return self._word(role, "merge_src", index)
