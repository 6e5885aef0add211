"""The tables of a pass over parts of several sequences."""

from __future__ import annotations

import numpy as np
import pytest

from cheetah.plan import PlanError
from cheetah.plan.pass_tables import PassRoom, Segment, key_rows

ROOM = PassRoom(columns=96, key_rows=key_rows(64, 96, 16), key_tile=16, tile_tokens=32, pages_per_sequence=10)


def test_segments_lie_side_by_side() -> None:
    segments = [Segment(sequence=2, start=5, count=11), Segment(sequence=0, start=0, count=40)]
    tables = ROOM.tables(segments, [list(range(1, 12)), list(range(100, 140))])
    assert (tables.column_count, tables.segment_count, tables.tile_count) == (16 + 48, 2, 3)
    assert list(tables.ids[:18]) == [*range(1, 12), 0, 0, 0, 0, 0, 100, 101]
    # position, tokens, page table, row of position 0: the first segment has a tile of 16 keys
    assert tables.groups[:3].tolist() == [[5, 8, 20, 0], [13, 3, 20, 0], [0, 8, 0, 16]]
    assert tables.groups[6:].max() == 32 and not tables.groups[7:].any()  # the last 8 of 40 tokens, then nothing
    assert tables.segments[:2].tolist() == [[5, 11, 20, 0], [0, 40, 0, 16]]
    assert tables.tiles[:3].tolist() == [[48, 32, 8, 16], [16, 0, 32, 16], [0, 5, 11, 0]]
    assert all(table.dtype == np.int32 for table in (tables.ids, tables.groups, tables.segments, tables.tiles))


def test_what_does_not_fit_is_said() -> None:
    assert ROOM.has_room_for([Segment(0, 0, 16)] * 6) and not ROOM.has_room_for([Segment(0, 0, 17)] * 4)
    with pytest.raises(PlanError, match="4 segments takes 128 columns and 128 rows of keys; there are 96 and 160"):
        ROOM.tables([Segment(0, 0, 17)] * 4, [[0] * 17] * 4)
    with pytest.raises(PlanError, match="a pass over 1 segments takes 16 columns and 176 rows of keys"):
        ROOM.tables([Segment(0, 160, 16)], [[0] * 16])
    with pytest.raises(PlanError, match="Segment.sequence=0, start=0, count=2. of a pass has 1 ids"):
        ROOM.tables([Segment(0, 0, 2)], [[0]])
