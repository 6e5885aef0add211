"""The run-time plan of attention: which block reads which keys, and how the partial states are merged.

The load-balanced scheduler of FlashInfer (MLSys 2025, Algorithm 1, appendices D.1 and D.2) with our decisions: the work
list counts heads, constants are integers, and nothing depends on arrival. Pure host arithmetic; the same lengths give
the same bytes. Keys, lengths and ranges count tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapreplace
from operator import index

import numpy as np
import numpy.typing as npt

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.index import ceil_div, round_up

Int32Array = npt.NDArray[np.int32]
ITEM_WORDS = 8
"""Words of an item: level, tile, head, begin, end, partial slot or -1, rows, 0."""
WRITE_THROUGH = -1
"""The partial slot of an item that writes the final output itself."""
SECTION_WORDS = 64
"""Alignment of the sections of an encoded plan, in 32-bit words; also the size of its header."""


@dataclass(frozen=True)
class Tile:
    """Query rows that read one range of keys: `rows` fused rows per KV head see keys [begin, end) of the level."""

    level: int
    tile: int
    rows: int
    begin: int
    end: int

    def rounded(self, align: int) -> "Tile":
        """The same tile with its range rounded outward to multiples of `align`; an empty one stays empty."""
        begin = self.begin // align * align
        return Tile(
            self.level, self.tile, self.rows, begin, max(begin, round_up(self.end, align)) if self.end else begin
        )

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Scheduling:
    """The constants of the scheduler. `chunk` (F) fixes the chunk length: results then ignore the other requests."""

    kv_heads: int
    blocks: int
    align: int = 16
    minimum: int = 64
    row_cost: int = 1
    token_cost: int = 1
    chunk: int | None = None

    def __post_init__(self) -> None:
        require_positive("KV plan", **{name: value for name, value in vars(self).items() if value is not None})
        for name in ("minimum", "chunk"):
            value = getattr(self, name)
            if value is not None and value % self.align:
                raise PlanError(f"KV plan: {name} is {value}: give a multiple of align, {self.align}")

    def chunk_length(self, tokens: int) -> int:
        """L for `tokens` keys over all tiles of one KV head: an even share of a block, at least `minimum`."""
        even = self.align * ceil_div(tokens * self.kv_heads, self.blocks * self.align)
        return self.chunk or max(self.minimum, even)


@dataclass(frozen=True, eq=False)
class KvPlan:
    """One schedule. All arrays are int32 and read-only.

    `items[work_indptr[b]:work_indptr[b+1]]` is the queue of block b. Merge m folds the states in the partial slots
    `merge_src[merge_indptr[m]:merge_indptr[m+1]]`, in that order, into the rows of (tile, head) = `merges[m]`.
    Ranges are rounded outward: the kernel clips them to the true ones.
    """

    items: Int32Array
    work_indptr: Int32Array
    merges: Int32Array
    merge_indptr: Int32Array
    merge_src: Int32Array
    chunk: int

    @property
    def item_count(self) -> int:
        return len(self.items)

    @property
    def merge_count(self) -> int:
        return len(self.merges)

    @property
    def partials(self) -> int:
        """Partial slots in use."""
        return len(self.merge_src)

    @property
    def blocks(self) -> int:
        return len(self.work_indptr) - 1

    def queue(self, block: int) -> Int32Array:
        """The items of `block`, in the order in which it works on them."""
        return self.items[self.work_indptr[block] : self.work_indptr[block + 1]]

    def tokens(self, block: int) -> int:
        """Keys that `block` reads, over all its items."""
        queue = self.queue(block)
        return int((queue[:, 4] - queue[:, 3]).sum())


def kv_plan(
    lengths: Iterable[int],
    kv_heads: int,
    blocks: int,
    group: int,
    align: int = 16,
    minimum: int = 64,
    row_cost: int = 1,
    token_cost: int = 1,
    chunk: int | None = None,
) -> KvPlan:
    """The plan of one decode step: request b has `lengths[b]` keys, its own new one included, and `group` query rows.

    align and minimum are A and M, row_cost and token_cost the cost model's alpha and beta, chunk is F. Plans are cached
    by the rounded lengths, so a plan is the same object until a length crosses a multiple of `align`.
    """
    scheduling = Scheduling(kv_heads, blocks, align, minimum, row_cost, token_cost, chunk)
    require_positive("KV plan", group=group)
    rounded = tuple(round_up(_length(length), align) for length in lengths)
    return _cached_plan(rounded, group, scheduling)


@lru_cache(maxsize=256)
def _cached_plan(rounded: tuple[int, ...], group: int, scheduling: Scheduling) -> KvPlan:
    return schedule([Tile(0, b, group, 0, length) for b, length in enumerate(rounded)], scheduling)


def _length(length: int) -> int:
    try:
        value = index(length)
    except TypeError:
        raise PlanError(f"KV plan: length {length!r} is not a whole number of tokens") from None
    if not 0 <= value < 2**31 - 2**16:
        raise PlanError(f"KV plan: length {value} is out of range: give 0 to {2**31 - 2**16 - 1} tokens")
    return value


def kv_plans_for_launch(
    length_before: int | Sequence[int],
    steps: int,
    *,
    kv_heads: int,
    blocks: int,
    group: int,
    align: int = 16,
    minimum: int = 64,
    chunk: int | None = None,
) -> list[tuple[int, KvPlan]]:
    """(first step, plan) for a launch of `steps` steps whose sequences hold `length_before` tokens beforehand.

    Step s sees keys 0 .. length_before + s, its own token included. A plan is valid until a rounded length changes, so
    the plan of a step depends on its position alone and not on how steps are grouped into launches.
    """
    require_positive("KV plans of a launch", steps=steps)
    before = [_length(length) for length in np.atleast_1d(length_before).tolist()]
    plans: list[tuple[int, KvPlan]] = []
    step = 0
    while step < steps:
        lengths = [length + step + 1 for length in before]
        plans.append((step, kv_plan(lengths, kv_heads, blocks, group, align, minimum, chunk=chunk)))
        step += min(1 - length % -align for length in lengths)  # the first step at which a rounded length grows
    return plans


def max_plans(steps: int, align: int = 16, batch: int = 1) -> int:
    """The most plans that `kv_plans_for_launch` returns for `steps` steps."""
    return min(steps, 1 + batch * ceil_div(steps - 1, align))


def schedule(tiles: Sequence[Tile], scheduling: Scheduling) -> KvPlan:
    """The plan for the tiles of one level, ascending by tile. Use `kv_plan`, which caches, for plain decode steps."""
    if any(tile.level for tile in tiles):
        raise PlanError("KV plan: several levels are not supported: give tiles of level 0")
    rounded = [tile.rounded(scheduling.align) for tile in tiles]
    chunk = scheduling.chunk_length(sum(tile.length for tile in rounded))
    items, merges, merge_indptr = _cut(rounded, scheduling.kv_heads, chunk)
    queues = _assign(items, scheduling)
    return KvPlan(
        items=_int32([word for queue in queues for item in queue for word in item], ITEM_WORDS),
        work_indptr=_starts(len(queue) for queue in queues),
        merges=_int32([word for merge in merges for word in merge], 2),
        merge_indptr=_int32(merge_indptr),
        # Slots are numbered in (level, tile, head, chunk) order, so each merge reads consecutive ones.
        merge_src=_int32(range(merge_indptr[-1])),
        chunk=chunk,
    )


Item = tuple[int, int, int, int, int, int, int, int]


def _cut(tiles: Sequence[Tile], kv_heads: int, chunk: int) -> tuple[list[Item], list[tuple[int, int]], list[int]]:
    """Items in (level, tile, head, chunk) order, the (tile, head) pairs that were split, and their first slots."""
    items: list[Item] = []
    merges: list[tuple[int, int]] = []
    merge_indptr = [0]
    slots = 0
    for tile in tiles:
        begins = range(tile.begin, tile.end, chunk) or (tile.begin,)
        split = len(begins) > 1
        for head in range(kv_heads):
            for number, begin in enumerate(begins):
                slot = slots + number if split else WRITE_THROUGH
                items.append((tile.level, tile.tile, head, begin, min(begin + chunk, tile.end), slot, tile.rows, 0))
            if split:
                slots += len(begins)
                merges.append((tile.tile, head))
                merge_indptr.append(slots)
    return items, merges, merge_indptr


def _assign(items: list[Item], scheduling: Scheduling) -> list[list[Item]]:
    """The queue of each block: the longest item next, always to the block of least (cost, number)."""
    queues: list[list[Item]] = [[] for _ in range(scheduling.blocks)]
    heap = [(0, block) for block in range(scheduling.blocks)]
    for item in sorted(items, key=_minus_length):  # stable: equal lengths keep (level, tile, head, chunk) order
        cost, block = heap[0]
        queues[block].append(item)
        item_cost = scheduling.row_cost * item[6] + scheduling.token_cost * (item[4] - item[3])
        heapreplace(heap, (cost + item_cost, block))
    return queues


def _minus_length(item: Item) -> int:
    return item[3] - item[4]


def _starts(counts: Iterable[int]) -> Int32Array:
    return _int32(np.concatenate(([0], np.cumsum(list(counts)))))


def _int32(values: npt.ArrayLike | range, width: int | None = None) -> Int32Array:
    array = np.array(values, dtype=np.int32)
    if width is not None:
        array = array.reshape(-1, width)
    array.setflags(write=False)
    return array


@dataclass(frozen=True)
class KvPlanLayout:
    """The device form of a plan: one int32 array, every section at its largest size and aligned to 64 words.

    Sections in order: header (first step, items, merges, zeros), work_indptr [C+1], items [max_items, 8],
    merge_indptr [max_merges+1], merges [max_merges, 2], merge_src [max_partials]. Offsets count 32-bit words.
    """

    blocks: int
    kv_heads: int
    batch: int = 1

    def __post_init__(self) -> None:
        require_positive("KvPlanLayout", blocks=self.blocks, kv_heads=self.kv_heads, batch=self.batch)

    @property
    def max_items(self) -> int:
        return self.batch * self.kv_heads + 2 * self.blocks

    @property
    def max_merges(self) -> int:
        """Split (tile, head) pairs: each has more than one even share of keys, so there are at most C."""
        return min(self.batch * self.kv_heads, self.blocks)

    @property
    def max_partials(self) -> int:
        """Partial slots: fewer than 2C, since a split tile has less than twice its even shares."""
        return 2 * self.blocks

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Words of each section."""
        return {
            "header": SECTION_WORDS,
            "work_indptr": self.blocks + 1,
            "items": self.max_items * ITEM_WORDS,
            "merge_indptr": self.max_merges + 1,
            "merges": self.max_merges * 2,
            "merge_src": self.max_partials,
        }

    @cached_property
    def offsets(self) -> dict[str, int]:
        """First word of each section."""
        offsets = {}
        end = 0
        for name, words in self.sizes.items():
            offsets[name] = end
            end += round_up(words, SECTION_WORDS)
        return offsets

    @property
    def plan_words(self) -> int:
        """Words of one encoded plan, a multiple of 64."""
        return sum(round_up(words, SECTION_WORDS) for words in self.sizes.values())

    def encode(self, plan: KvPlan, first_step: int) -> Int32Array:
        """The words of `plan`, valid from step `first_step` on; unused words are 0. int32 [plan_words]."""
        self._check(plan)
        words = np.zeros(self.plan_words, dtype=np.int32)
        words[:3] = first_step, plan.item_count, plan.merge_count
        for name in ("work_indptr", "items", "merge_indptr", "merges", "merge_src"):
            values = getattr(plan, name).ravel()
            words[self.offsets[name] : self.offsets[name] + len(values)] = values
        return words

    def encode_launch(self, plans: Sequence[tuple[int, KvPlan]]) -> Int32Array:
        """The plans of a launch, int32 [len(plans), plan_words]."""
        return np.stack([self.encode(plan, first_step) for first_step, plan in plans])

    def _check(self, plan: KvPlan) -> None:
        if plan.blocks != self.blocks:
            raise PlanError(f"KvPlanLayout: the plan is for {plan.blocks} blocks and this layout for {self.blocks}")
        for what, count, limit in (
            ("items", plan.item_count, self.max_items),
            ("merges", plan.merge_count, self.max_merges),
            ("partial slots", plan.partials, self.max_partials),
        ):
            if count > limit:
                raise PlanError(
                    f"KvPlanLayout: the plan has {count} {what} and the layout room for {limit} "
                    f"(batch {self.batch}, {self.kv_heads} KV heads): use a larger batch or no fixed chunk length"
                )
