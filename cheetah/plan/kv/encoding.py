"""The run-time plan of attention, as hosts and kernels use it: made of lengths, and laid out in int32 words.

The algorithm is `scheduler`; the plans of a whole launch are `launch`. Keys, lengths and ranges count tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.kv.launch import most_tiles, whole_length
from cheetah.plan.kv.page_table import Int32Array
from cheetah.plan.kv.scheduler import ITEM_WORDS, KvPlan, Scheduling, Tile, cached_schedule
from cheetah.plan.plan import Plan
from cheetah.plan.sections import Sections
from cheetah.plan.shape import ModelShape

SECTION_WORDS = 64
"""Alignment of the sections of an encoded plan, in 32-bit words; also the size of its header."""


HEAD_LIMIT, FIRST_CHUNKS = 1 << 16, 1 << 8
"""The head of a merge is below the first, and its word has the number of its first chunk above, modulo the second."""
NO_STEP = 2**31 - 1
"""The first step of a plan that no step follows."""


def by_turns(kinds: Sequence[Int32Array]) -> Int32Array:
    """The plans of a launch for several kinds of layers, plan i of kind k at i * kinds + k: int32 [plans, plan_words].
    Where a kind has fewer, plans that no step follows stand for those that are missing."""
    if len(kinds) == 1:
        return kinds[0]
    words = np.full((max(map(len, kinds)), len(kinds), kinds[0].shape[1]), NO_STEP, np.int32)
    for number, plans in enumerate(kinds):
        words[: len(plans), number] = plans
    return words.reshape(-1, words.shape[2])


def kv_plan(lengths: Iterable[int], group: int, scheduling: Scheduling) -> KvPlan:
    """The plan of one decode step: request b has `lengths[b]` keys, its own new one included, and `group` query rows.

    Plans are cached by the rounded lengths: a plan is the same object until a length crosses a multiple of
    `scheduling.align`.
    """
    require_positive("KV plan", group=group)
    rounded = [round_up(whole_length(length), scheduling.align) for length in lengths]
    return cached_schedule(tuple(Tile(0, b, group, 0, end, b * group) for b, end in enumerate(rounded)), scheduling)


@dataclass(frozen=True)
class KvPlanLayout:
    """The device form of a plan: one int32 array, every section at its largest size and aligned to 64 words.

    Sections in order: header (first step, items, merges, most rows of a merged tile, zeros), work_indptr [C+1],
    items [max_items, 8], merge_indptr [max_merges+1], merges [max_merges, 2], merge_src [max_sources]. Offsets count
    32-bit words.

    tiles: the most tiles of a plan, over all levels. tile_rows: the most packed rows of a tile. levels: most levels.
    chunk: F, or 0 for chunks by rule. max_keys: where keys end at most, which only a fixed chunk length needs (of the
    rounded range, if ranges do not begin at 0). level_rows: the most packed rows of all tiles of one level together; 0
    if nothing less than all tiles with all their rows is known.
    """

    blocks: int
    kv_heads: int
    tiles: int
    tile_rows: int
    levels: int = 1
    chunk: int = 0
    max_keys: int = 0
    level_rows: int = 0

    def __post_init__(self) -> None:
        optional = ("chunk", "max_keys", "level_rows")
        given = {name: value for name, value in vars(self).items() if name not in optional or value != 0}
        require_positive("KvPlanLayout", **given)
        if self.chunk and not self.max_keys:
            raise PlanError(
                f"KvPlanLayout: chunks of {self.chunk} keys and max_keys is 0: give the most keys of a tile"
            )

    @classmethod
    def for_step(cls, plan: Plan, shape: ModelShape, blocks: int) -> KvPlanLayout:
        """Of a kernel for whole steps: `launch_tiles` with that plan's sizes always fit.

        Sequences may share prefixes where there are several, unless the chunk length is fixed: then the bits of a
        sequence shall not depend on the others. The last step of a launch may have columns beyond the context.
        """
        levels = 2 if plan.batch > 1 and not plan.kv_chunk else 1
        columns, group = plan.tile_columns(shape), shape.group
        return cls(
            blocks,
            shape.kv_heads,
            most_tiles(plan.batch, plan.tokens, columns, levels),
            columns * group,
            levels,
            **{
                "chunk": plan.kv_chunk,
                "max_keys": plan.max_context + (2 if plan.drafts else 1) * plan.tokens,
                "level_rows": plan.tokens * group,
            },
        )

    @property
    def _pairs(self) -> int:
        return self.tiles * self.kv_heads

    @property
    def _all_rows(self) -> int:
        """The most rows of the tiles of all levels together, for one KV head."""
        together = self.tiles * self.tile_rows
        return min(together, self.levels * self.level_rows) if self.level_rows else together

    @property
    def _fixed_chunks(self) -> int:
        """The most chunks of a tile, where their length is fixed."""
        return ceil_div(self.max_keys, self.chunk)

    @cached_property
    def max_items(self) -> int:
        """A chunk a pair (tile, head), and one for each even share of keys; or all chunks of fixed length."""
        return self._pairs * self._fixed_chunks if self.chunk else self._pairs + 2 * self.blocks

    @cached_property
    def max_merges(self) -> int:
        """Of one level at most C pairs are split: each has more than an even share of keys. Of several, all may be."""
        return min(self._pairs, self.blocks) if self._is_simple else self._pairs

    @cached_property
    def max_partial_rows(self) -> int:
        """Rows of the partial states."""
        if self.chunk:
            return self.kv_heads * self._all_rows * self._fixed_chunks
        shared = 0 if self.levels == 1 else self.kv_heads * self._all_rows
        return 2 * self.blocks * self.tile_rows + shared

    @cached_property
    def max_sources(self) -> int:
        """States that are folded: those of a prefix count for every tile under it, up to C (its even shares) a tile."""
        if self.chunk:
            return self.levels * self.max_items
        return 2 * self.blocks if self._is_simple else self.levels * self._pairs + self.tiles * self.blocks

    @property
    def _is_simple(self) -> bool:
        """One level, and chunks by rule."""
        return self.levels == 1 and not self.chunk

    @cached_property
    def sections(self) -> Sections[str]:
        """Of an encoded plan, in words."""
        sizes = {
            "header": SECTION_WORDS,
            "work_indptr": self.blocks + 1,
            "items": self.max_items * ITEM_WORDS,
            "merge_indptr": self.max_merges + 1,
            "merges": self.max_merges * 2,
            "merge_src": self.max_sources,
        }
        return Sections(sizes, SECTION_WORDS)

    @property
    def plan_words(self) -> int:
        """Words of one encoded plan, a multiple of 64."""
        return self.sections.total

    def encode(self, plan: KvPlan, first_step: int, first_tile: int = 0) -> Int32Array:
        """The words of `plan`, valid from step `first_step` on; unused words are 0. int32 [plan_words]. first_tile: of
        the plan's tiles, among all of the launch."""
        self.check(plan)
        words = np.zeros(self.plan_words, dtype=np.int32)
        words[:4] = first_step, plan.item_count, plan.merge_count, plan.merge_rows
        for name in ("work_indptr", "items", "merge_indptr", "merges", "merge_src"):
            values = getattr(plan, name).ravel()
            words[self.sections.offsets[name] :][: len(values)] = values
        offsets = self.sections.offsets
        words[offsets["items"] + 1 :][: plan.item_count * ITEM_WORDS : ITEM_WORDS] += first_tile
        words[offsets["merges"] :][: plan.merge_count * 2 : 2] += first_tile
        if plan.first_chunks is not None:
            words[offsets["merges"] + 1 :][: plan.merge_count * 2 : 2] += plan.first_chunks % FIRST_CHUNKS * HEAD_LIMIT
        return words

    def encode_launch(self, plans: Sequence[tuple[int, KvPlan]], first_tile: int = 0) -> Int32Array:
        """The plans of a launch, int32 [len(plans), plan_words]."""
        return np.stack([self.encode(plan, first_step, first_tile) for first_step, plan in plans])

    def check(self, plan: KvPlan) -> None:
        """PlanError unless `plan` has room in this layout, and its partial states in `max_partial_rows` rows."""
        if plan.blocks != self.blocks:
            raise PlanError(f"KvPlanLayout: the plan is for {plan.blocks} blocks and this layout for {self.blocks}")
        for what, count, limit in (
            ("rows in a tile", plan.tile_rows, self.tile_rows),
            ("items", plan.item_count, self.max_items),
            ("merges", plan.merge_count, self.max_merges),
            ("sources", plan.source_count, self.max_sources),
            ("partial rows", plan.partial_rows, self.max_partial_rows),
        ):
            if count > limit:
                raise PlanError(
                    f"KvPlanLayout: the plan has {count} {what} and the layout room for {limit} ({self._description}): "
                    "make the layout for more tiles, rows, levels or keys, or give smaller tiles"
                )

    @property
    def _description(self) -> str:
        chunks = f"chunks of {self.chunk} of at most {self.max_keys} keys" if self.chunk else "chunks by rule"
        return f"{self.tiles} tiles of {self.tile_rows} rows, {self.kv_heads} KV heads, {self.levels} levels, {chunks}"
