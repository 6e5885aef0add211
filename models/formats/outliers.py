"""Which weights of a matrix are kept as they are beside codes: those of largest magnitude, without any data.

Each row has as many as any other, in each window of its columns: so lists have one length, and none is filled up for
the sake of the longest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cheetah.models.rounding import F32

WINDOW = 1024
"""Columns of which a row's outliers are chosen: chunks are whole windows."""


def outliers_of(values: F32, part: float, first_row: int = 0) -> NDArray[np.bool_]:
    """Of rows [rows, columns] of a matrix, from its row `first_row` on, the weights that are kept as they are: `part`
    of all, in each window those of largest magnitude. Where a window's share is no whole number, rows have one more
    or one less in turn."""
    chosen = np.zeros(values.shape, np.bool_)
    rows = first_row + np.arange(len(values))
    for begin in range(0, values.shape[1], WINDOW):
        sizes = np.abs(values[:, begin : begin + WINDOW])
        share = part * sizes.shape[1]
        counts = (np.floor((rows + 1) * share) - np.floor(rows * share)).astype(np.int64)
        order = np.argsort(-sizes, axis=1, kind="stable")[:, : max(1, counts.max(initial=0))]
        taken = np.arange(order.shape[1]) < counts[:, None]
        np.put_along_axis(chosen[:, begin : begin + WINDOW], order, taken, axis=1)
    return chosen


def outlier_count(rows: int, columns: int, part: float) -> int:
    """How many `outliers_of` chooses of a whole matrix."""
    windows = (min(WINDOW, columns - begin) for begin in range(0, columns, WINDOW))
    return sum(int(np.floor(rows * (part * width))) for width in windows)
