"""The map of a block's shared memory: named regions laid out in order, and the budget they must keep to.

Knows sizes and alignments, not what the regions are for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.sections import Sections

BULK_ALIGNMENT = 128
"""Alignment of a bulk copy's destination: 16 bytes are required; 128 keeps whole bank rows together."""
RING_ALIGNMENT = 1024
BARRIER_BYTES_PER_STAGE = 16
"""Two 8-byte mbarriers a stage: one says full, one says empty."""


@dataclass(frozen=True)
class Region:
    """`nbytes` of shared memory under a name, aligned to `alignment` (a power of two).

    `over` names an earlier region whose bytes this one uses again, from byte `skip` on: for things that are never alive
    together. It must fit inside and costs nothing.
    """

    name: str
    nbytes: int
    alignment: int = 16
    over: str | None = None
    skip: int = 0

    def __post_init__(self) -> None:
        require_positive(f"shared region {self.name!r}", nbytes=self.nbytes, alignment=self.alignment)
        if self.alignment & (self.alignment - 1):
            raise PlanError(f"shared region {self.name!r}: alignment is {self.alignment}: give a power of two")


@dataclass(frozen=True)
class SharedMap:
    """Regions in order in one arena; PlanError with the table when they pass `budget_bytes` (None: no limit)."""

    regions: tuple[Region, ...]
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        self._check_names()
        if self.budget_bytes is not None and self.total_bytes > self.budget_bytes:
            raise PlanError(f"shared memory: {self._overrun()}\n{self.budget_table()}")

    @cached_property
    def offsets(self) -> dict[str, int]:
        """First byte of each region in the arena."""
        offsets = dict(self._own.offsets)
        for region in self.regions:
            if region.over is not None:
                offsets[region.name] = offsets[region.over] + region.skip
        return offsets

    @cached_property
    def _own(self) -> Sections[str]:
        """The regions that lie over no other."""
        own = [region for region in self.regions if region.over is None]
        return Sections({one.name: one.nbytes for one in own}, {one.name: one.alignment for one in own})

    @property
    def total_bytes(self) -> int:
        """Bytes of the arena, from 0 to the end of the last region."""
        return self._own.end

    def offset(self, name: str) -> int:
        """First byte of region `name`."""
        return self.offsets[self.region(name).name]

    def region(self, name: str) -> Region:
        """The region of that name; PlanError lists the names there are."""
        for region in self.regions:
            if region.name == name:
                return region
        known = ", ".join(region.name for region in self.regions)
        raise PlanError(f"shared memory: there is no region {name!r}: there are {known}")

    def extent(self, name: str) -> str:
        """What region `name` takes: "8448 bytes of scratch"."""
        region = self.region(name)
        return f"{region.nbytes} bytes" + (f" of {region.over}" if region.over else "")

    @property
    def summary(self) -> str:
        """One line: the bytes of the arena, and where those lie that several regions use in turn."""
        bases = dict.fromkeys(region.over for region in self.regions if region.over)
        parts = [f"{self.total_bytes} bytes" + (f" of {self.budget_bytes}" if self.budget_bytes is not None else "")]
        parts += [f"{name} {self.region(name).nbytes} from {self.offset(name)} on" for name in bases]
        return ", ".join(parts)

    def budget_table(self) -> str:
        """One line a region (offset, bytes, name), then the total and what is free."""
        lines = [f"{'offset':>8} {'bytes':>8}  region"]
        for region in self.regions:
            note = f"  (over {region.over})" if region.over else ""
            lines.append(f"{self.offsets[region.name]:>8} {region.nbytes:>8}  {region.name}{note}")
        lines.append(f"{'':>8} {self.total_bytes:>8}  total")
        if self.budget_bytes is not None:
            free = self.budget_bytes - self.total_bytes
            lines.append(
                f"{'':>8} {self.budget_bytes:>8}  a block has, {abs(free)} {'free' if free >= 0 else 'too few'}"
            )
        return "\n".join(lines)

    def _check_names(self) -> None:
        seen: dict[str, Region] = {}
        for region in self.regions:
            if region.name in seen:
                raise PlanError(f"shared memory: two regions are called {region.name!r}: give each its own name")
            if region.over is not None:
                self._check_over(region, seen)
            seen[region.name] = region

    @staticmethod
    def _check_over(region: Region, seen: dict[str, Region]) -> None:
        base = seen.get(region.over or "")
        if base is None:
            raise PlanError(f"shared region {region.name!r} lies over {region.over!r}, which is not an earlier region")
        misplaced = base.alignment % region.alignment or region.skip % region.alignment
        if region.skip < 0 or region.skip + region.nbytes > base.nbytes or misplaced:
            raise PlanError(
                f"shared region {region.name!r} ({region.nbytes} bytes from byte {region.skip} on, alignment "
                f"{region.alignment}) does not fit over {base.name!r} ({base.nbytes} bytes, alignment "
                f"{base.alignment}): make {base.name!r} large enough"
            )

    def _overrun(self) -> str:
        parts = " + ".join(
            f"{_kilobytes(region.nbytes)} of {region.name}" for region in self.regions if not region.over
        )
        budget = _kilobytes(self.budget_bytes or 0)
        total = _kilobytes(self.total_bytes)
        return f"{parts} = {total}; a block has {budget}: use fewer or smaller stages, or fewer tokens"


def ring_regions(stages: int, stage_bytes: int) -> tuple[Region, Region, Region]:
    """The ring of `stages` buffers, its barriers (`full[stages]`, then `empty[stages]`, 8 bytes each), and a word that
    says whether the block waits for a vector."""
    barriers = Region("ring_barriers", stages * BARRIER_BYTES_PER_STAGE, 16)
    return Region("ring", stages * stage_bytes, RING_ALIGNMENT), barriers, Region("block_waits", 4)


def stages_that_fit(budget_bytes: int, stage_bytes: int, others: Sequence[Region] = ()) -> int:
    """The most ring stages, with their barriers, that fit into the budget together with `others`; at least 2.

    PlanError with the table where not even 2 fit.
    """
    stages = budget_bytes // stage_bytes
    while stages > 2 and _with_ring(stages, stage_bytes, others).total_bytes > budget_bytes:
        stages -= 1
    stages = max(stages, 2)
    _with_ring(stages, stage_bytes, others, budget_bytes)
    return stages


def _with_ring(stages: int, stage_bytes: int, others: Iterable[Region], budget_bytes: int | None = None) -> SharedMap:
    return SharedMap((*ring_regions(stages, stage_bytes), *others), budget_bytes)


def _kilobytes(nbytes: int) -> str:
    return f"{nbytes / 1024:.4g} KB"
