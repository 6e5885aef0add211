"""The block's shared memory as the kernel sees it: named, typed, aligned regions of one arena, and its budget.

Knows types, counts and alignments, not what the regions are for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cheetah.lang import types as ty
from cheetah.lang.binding import bind
from cheetah.lang.errors import LangError, Location, RangeError, SharedBudgetError, here
from cheetah.lang.nodes import Declare, Expr, Name
from cheetah.lang.operators import reinterpret
from cheetah.lang.scope import declare_name, emit

ARENA_ALIGNMENT = 1024
"""Alignment of `prim.shared_arena()`: no region can ask for more."""


@dataclass(frozen=True)
class ArenaRegion:
    """`count` elements of `type` from byte `offset` of the arena on."""

    name: str
    type: ty.Type
    count: int
    offset: int
    over: str | None = None
    location: Location = field(default_factory=here, compare=False)

    @property
    def bytes(self) -> int:
        return self.count * self.type.bytes

    @property
    def end(self) -> int:
        return self.offset + self.bytes


class SharedPointers:
    """What `Arena.declare` gives: one attribute a region, its pointer in the kernel."""

    def __init__(self, pointers: dict[str, Name]) -> None:
        self._pointers = pointers

    def __getattr__(self, name: str) -> Name:
        if name.startswith("_") or name not in self._pointers:
            known = ", ".join(self.__dict__.get("_pointers", ())) or "none"
            raise AttributeError(f"the arena has no region `{name}`; it has {known}")
        return self._pointers[name]


class Arena:
    """Regions laid out in the order in which they are added; `budget_bytes` is what a block has (None: no limit).

    `arena.add("x", ty.bf16, 4096)` outside of the kernel, `shared = arena.declare()` inside, then `shared.x[i]`.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.regions: dict[str, ArenaRegion] = {}

    @staticmethod
    def of(regions: Iterable[tuple[str, ty.Type, int]], budget_bytes: int | None = None) -> Arena:
        """An arena of (name, type, count), each aligned to 16 bytes or to what its type needs."""
        arena = Arena(budget_bytes)
        for name, type_, count in regions:
            arena.add(name, type_, count)
        return arena

    def add(
        self, name: str, type_: ty.Type, count: int = 1, align: int = 16, *, over: str | None = None
    ) -> ArenaRegion:
        """Append `count` elements of `type_`, aligned to `align` bytes (a power of two up to 1024).

        `over` names an earlier region whose bytes are used again, for things that are never alive together.
        """
        align = max(align, ty.alignment_of(type_))
        self._check(name, count, align)
        offset = self._over(name, over, count * type_.bytes, align) if over else _round_up(self.total_bytes, align)
        self.regions[name] = ArenaRegion(name, type_, count, offset, over)
        return self.regions[name]

    @property
    def total_bytes(self) -> int:
        """Bytes of the arena: what the launch must ask for."""
        return max((region.end for region in self.regions.values()), default=0)

    def offset(self, name: str) -> int:
        """First byte of a region."""
        return self._region(name).offset

    def table(self) -> str:
        """One line a region (offset, bytes, name, type), then the total and what a block has."""
        lines = [f"{'offset':>8} {'bytes':>8}  region"]
        for region in self.regions.values():
            note = f", over {region.over}" if region.over else ""
            lines.append(f"{region.offset:>8} {region.bytes:>8}  {region.name} ({region.type} x {region.count}{note})")
        lines.append(f"{'':>8} {self.total_bytes:>8}  total")
        if self.budget_bytes is not None:
            free = self.budget_bytes - self.total_bytes
            verdict = f"{free} free" if free >= 0 else f"{-free} too few"
            lines.append(f"{'':>8} {self.budget_bytes:>8}  a block has: {verdict}")
        return "\n".join(lines)

    def require_budget(self) -> None:
        """SharedBudgetError with the table where the regions pass the budget."""
        if self.budget_bytes is None or self.total_bytes <= self.budget_bytes:
            return
        first = next(region for region in self.regions.values() if region.end > self.budget_bytes)
        raise SharedBudgetError(
            f"the shared arena has {self.total_bytes} bytes and a block {self.budget_bytes}; region `{first.name}`, "
            f"added at {first.location}, is the first that does not fit: "
            f"use fewer or smaller stages.\n{self.table()}"
        )

    def declare(self) -> SharedPointers:
        """Emit a typed pointer a region, and give them by name."""
        from cheetah.lang.primitives import shared_arena

        self.require_budget()
        start = bind("shared", shared_arena())
        return SharedPointers(
            {
                name: _bind(name, reinterpret(ty.ptr_mut(region.type), start + region.offset))
                for name, region in self.regions.items()
            }
        )

    def _region(self, name: str) -> ArenaRegion:
        if name not in self.regions:
            raise LangError(f"the arena has no region `{name}`; it has {', '.join(self.regions) or 'none'}.")
        return self.regions[name]

    def _check(self, name: str, count: int, align: int) -> None:
        if name in self.regions:
            raise LangError(f"the arena has a region `{name}` already ({self.regions[name].location}).")
        if count < 1:
            raise RangeError(f"shared region `{name}` has {count} elements; it has at least 1.")
        if align & (align - 1) or align > ARENA_ALIGNMENT:
            raise RangeError(f"shared region `{name}`: alignment {align} is no power of two up to {ARENA_ALIGNMENT}.")

    def _over(self, name: str, over: str, nbytes: int, align: int) -> int:
        base = self._region(over)
        if nbytes > base.bytes or base.offset % align:
            raise RangeError(
                f"shared region `{name}` ({nbytes} bytes, aligned to {align}) does not fit over `{over}` "
                f"({base.bytes} bytes at offset {base.offset})."
            )
        return base.offset


def _bind(name: str, value: Expr) -> Name:
    target = declare_name(name, value.type)
    emit(Declare(target, value))
    return target


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
