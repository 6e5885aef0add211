"""The workspace of attention: sizes and offsets of the arrays that all blocks share (FlashInfer, D.1 and D.3).

One buffer, every section at its largest and 256-byte aligned, so offsets and launches never change with the lengths.
"""

from dataclasses import dataclass
from functools import cached_property

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.index import round_up
from cheetah.plan.kv import ITEM_WORDS, KvPlanLayout

WORKSPACE_ALIGNMENT = 256


@dataclass(frozen=True)
class Workspace:
    """Sections for up to `tiles` tiles of `rows` fused query rows per KV head; the fields are `KvPlanLayout`'s.

    Several levels have more sources to fold than partial states: those of a prefix count for every tile under it.
    """

    blocks: int
    kv_heads: int
    rows: int
    head_dim: int
    tiles: int = 1
    levels: int = 1
    chunk: int = 0
    max_keys: int = 0
    level_rows: int = 0

    def __post_init__(self) -> None:
        require_positive("Workspace", head_dim=self.head_dim)
        _ = self.plan  # refuses what cannot be

    @cached_property
    def plan(self) -> KvPlanLayout:
        """The limits of a plan."""
        sizes = (self.blocks, self.kv_heads, self.tiles, self.rows)
        return KvPlanLayout(*sizes, self.levels, self.chunk, self.max_keys, self.level_rows)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each section, before alignment."""
        plan = self.plan
        return {
            "work_indptr": 4 * (self.blocks + 1),
            "items": 4 * ITEM_WORDS * plan.max_items,
            "merge_indptr": 4 * (plan.max_merges + 1),
            "merges": 8 * plan.max_merges,
            "merge_src": 4 * plan.max_sources,
            "partial_o": 4 * plan.max_partial_rows * self.head_dim,
            "partial_lse": 4 * plan.max_partial_rows,
        }

    @cached_property
    def offsets(self) -> dict[str, int]:
        """First byte of each section."""
        offsets = {}
        end = 0
        for name, nbytes in self.sizes.items():
            offsets[name] = end
            end += round_up(nbytes, WORKSPACE_ALIGNMENT)
        return offsets

    @property
    def nbytes(self) -> int:
        return sum(round_up(nbytes, WORKSPACE_ALIGNMENT) for nbytes in self.sizes.values())

    def check(self, nbytes: int, address: int = 0) -> None:
        """PlanError unless a buffer of `nbytes` at `address` can be this workspace."""
        if nbytes < self.nbytes:
            raise PlanError(f"attention workspace: {nbytes} bytes given, {self.nbytes} needed")
        if address % WORKSPACE_ALIGNMENT:
            raise PlanError(f"attention workspace: address {address:#x} is no multiple of {WORKSPACE_ALIGNMENT}")


def workspace_bytes(
    *,
    blocks: int,
    kv_heads: int,
    rows: int,
    head_dim: int,
    tiles: int = 1,
    levels: int = 1,
    chunk: int = 0,
    max_keys: int = 0,
    level_rows: int = 0,
) -> int:
    """Bytes of the attention workspace; `rows` is T_q, the fused query rows of a tile (the group size in decode)."""
    return Workspace(blocks, kv_heads, rows, head_dim, tiles, levels, chunk, max_keys, level_rows).nbytes
