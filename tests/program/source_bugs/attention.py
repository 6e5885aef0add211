"""Bugs planted in attention's items, folds and merges."""

from __future__ import annotations

from tests.program.source_bugs.bug import SourceBug

BUGS = (
    SourceBug(
        "merges",
        "the last of few states folded again",
        "blocks/attention/merge.py",
        "count = ch.minimum(own - first, MERGED_TOGETHER)",
        "count = ch.minimum(own - first + 1, MERGED_TOGETHER)",
    ),
    SourceBug(
        "merges",
        "the LSE of the tile's first row",
        "blocks/attention/merge.py",
        "indices[0] = ((sources + merge.row) * row_units",
        "indices[0] = (sources * row_units",
    ),
    SourceBug(
        "merges",
        "the weight of what a warp has folded is one",
        "blocks/attention/merge.py",
        "prim.fma_f32(self.weight_sum, shrink, grow * weight)",
        "prim.fma_f32(self.weight_sum, shrink, grow)",
    ),
    SourceBug(
        "merges",
        "a team's warps do not meet before the first reads",
        "blocks/attention/merge.py",
        "        self._lay_down_folded(folded)\n        schedule.meet_team()\n",
        "        self._lay_down_folded(folded)\n",
    ),
    SourceBug(
        "merges",
        "a merge replaced while the team reads it",
        "blocks/attention/schedule.py",
        "        self.meet_team()  # all have used the last one\n        with ch.if_(self.team_warp == 0):",
        "        with ch.if_(self.team_warp == 0):",
    ),
    SourceBug(
        "merges",
        "no meeting behind the merges",
        "blocks/attention/schedule.py",
        "        with ch.if_(jobs > 0):\n            machine.meet()\n",
        "",
        missed="needs two teams of one merge each, and a slow one",
    ),
    SourceBug(
        "merges",
        "rows of another part of the merge jobs",
        "blocks/attention/schedule.py",
        "job % merge_rows, begin, end)",
        "job // merge_rows, begin, end)",
    ),
    SourceBug(
        "merges",
        "merges with more states than are kept read the last kept one",
        "blocks/attention/schedule.py",
        "source.set(self._source(merge.begin + index))",
        "source.set(self._kept_merge.sources[KEPT_SOURCES - 1])",
    ),
    SourceBug(
        "folds",
        "sums of weights of half of the key rows",
        "blocks/attention/fold.py",
        "for mask in (4, 8, 16):\n                total +=",
        "for mask in (4, 8):\n                total +=",
    ),
    SourceBug(
        "folds",
        "states laid down over those that are folded",
        "blocks/attention/fold.py",
        "ch.argument(index), epoch)\n                machine.meet()\n",
        "ch.argument(index), epoch)\n",
    ),
    SourceBug(
        "folds",
        "rows of the second column tile are the first's",
        "blocks/attention/fold.py",
        "row = (place // COLUMNS * share.width + index) * COLUMNS + place % COLUMNS",
        "row = (place // COLUMNS * share.width) * COLUMNS + place % COLUMNS",
    ),
    SourceBug(
        "folds",
        "rows that the item does not have",
        "blocks/attention/fold.py",
        "                    with ch.if_(row < item.rows):\n",
        "                    with ch.if_(row < self.sizes.max_rows):\n",
    ),
    SourceBug(
        "folds",
        "states of a row: one too few",
        "blocks/attention/fold.py",
        "with ch.for_(self.sizes.warps * self.columns // stride, unroll=True",
        "with ch.for_(max(1, self.sizes.warps * self.columns // stride - 1), unroll=True",
    ),
    SourceBug(
        "items",
        "values behind the last key",
        "blocks/attention/tile.py",
        "tile_key = ch.minimum(self.machine.lane % 4 * 2 + index % 2 + index // 2 * 8, valid - 1)",
        "tile_key = ch.minimum(self.machine.lane % 4 * 2 + index % 2 + index // 2 * 8, ty.u32(15))",
    ),
    SourceBug(
        "items",
        "an item sees keys behind its end",
        "blocks/attention/core.py",
        "end = ch.minimum(item.end, item.tile.cached + item.tile.new if self.port.has_newest else item.tile.cached)",
        "end = item.tile.cached + item.tile.new",
        harmless="items end with tiles of keys, so no tile has one behind the end",
    ),
    SourceBug(
        "items",
        "newest keys of the tile's first column",
        "blocks/attention/item_loads.py",
        (
            "        column = item.tile.new_column + (newest_begin - item.tile.cached) + "
            "unit.newest // sizes.head_units\n"
            "        words"
        ),
        "        column = item.tile.new_column + unit.newest // sizes.head_units\n        words",
    ),
    SourceBug(
        "items",
        "queries used before they are there",
        "blocks/attention/item_loads.py",
        ('                self.machine.region("queries", ty.u32x4)[machine.thread] = words\n        machine.meet()\n'),
        '                self.machine.region("queries", ty.u32x4)[machine.thread] = words\n',
    ),
    SourceBug(
        "items",
        "the newest key used before other lanes brought it",
        "blocks/attention/item_loads.py",
        (
            "                self._keep_newest(heads, unit, raw, values)\n"
            "        prim.warp_barrier()  # orders the lanes' stores before their reads\n"
        ),
        "                self._keep_newest(heads, unit, raw, values)\n",
    ),
    SourceBug(
        "items",
        "a stage given back for a warp too many",
        "blocks/attention/sharing.py",
        "ch.select(rank < warps - each * members, ty.u32(1), ty.u32(0))",
        "ch.select(rank <= warps - each * members, ty.u32(1), ty.u32(0))",
    ),
    SourceBug(
        "items",
        "key groups counted from the item, not from the stage",
        "blocks/attention/sharing.py",
        "index = (share.first_tile + share.key_groups - first_tile % share.key_groups) % share.key_groups",
        "index = share.first_tile % share.key_groups",
        missed=(
            "three tiles of keys in a stage: none of the small models' stages has more than two; "
            "any run on a GPU shows it"
        ),
    ),
    SourceBug(
        "items",
        "pages behind the last token are looked up",
        "blocks/attention/cache.py",
        "token = ch.minimum(first + index * size, end - 1)\n",
        "token = first + index * size\n",
    ),
    SourceBug(
        "items",
        "the page behind the last token is looked up",
        "blocks/attention/cache.py",
        "following = ch.minimum(token + run, end - 1)\n",
        "following = token + run\n",
    ),
    SourceBug(
        "items",
        "room for one item's record too few",
        "plan/regions.py",
        "return 16 + (KEPT_ITEMS + 1) * KEPT_ITEM_BYTES",
        "return 16 + KEPT_ITEMS * KEPT_ITEM_BYTES",
    ),
)
