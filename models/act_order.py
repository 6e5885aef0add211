"""Matrices whose columns lie group by group, where the groups of a module are of columns that do not lie side by side.

Their input has to come in the same order. Who makes or loads it knows from the table `places` where each element
belongs; of a down projection gate's and up's rows are packed in its order, so that its input comes so by itself.
"""

from __future__ import annotations

from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.family import MatrixRows, QuantizedMatrix
from cheetah.models.formats.quantized import Order, RowPlanes
from cheetah.models.repacking import ScaleRows, StoredMatrix, stored_matrix
from cheetah.models.rounding import Bits

READ_ROWS = 256
"""Rows that are read together where a whole matrix is."""


def places_shape(config: ModelConfig) -> tuple[int, int]:
    """Of `places` (u16): rows, and elements of the longest input, padded."""
    table = config.table
    return table.places_count, max(product.input.padded for product in (*table.placed, table.head))


def places_of_columns(order: Order | None, padded: int) -> NDArray[np.uint16]:
    """Where in a matrix of that order each column of its module lies, u16 [padded]; those behind the last stay."""
    places = np.arange(padded, dtype=np.uint16)
    if order is not None:
        places[order] = np.arange(len(order), dtype=np.uint16)
    return places


class RowsInOrder:
    """A matrix with its rows, or some, in another order: row i is row `order[i]`. It is read whole when rows are first
    wanted, since those that lie side by side are then far apart."""

    def __init__(self, matrix: MatrixRows | QuantizedMatrix | ScaleRows, order: Order) -> None:
        self.matrix, self.shape, self._order = matrix, (len(order), *matrix.shape[1:]), order
        self._lock = Lock()

    def __getitem__(self, part: slice) -> Any:
        chosen = self._order[part]
        with self._lock:
            whole = self._whole
        return whole.with_planes(lambda plane: plane[chosen]) if isinstance(whole, RowPlanes) else whole[chosen]

    @property
    def stored(self) -> StoredMatrix | None:
        """See `cheetah.models.repacking`."""
        stored = stored_matrix(self.matrix)
        if stored is None:
            return None
        scales = None if stored.scales is None else RowsInOrder(stored.scales, self._order)
        return StoredMatrix(stored.codes.with_rows(self._order), scales)

    @cached_property
    def _whole(self) -> Any:
        rows = [copied(self.matrix[first : first + READ_ROWS]) for first in range(0, self.shape[0], READ_ROWS)]
        if not isinstance(rows[0], RowPlanes):
            return np.concatenate(rows)
        planes = iter([np.concatenate(parts) for parts in zip(*(part.planes for part in rows), strict=True)])
        return rows[0].with_planes(lambda plane: next(planes))


def copied(rows: Bits | RowPlanes) -> Any:
    """Rows in memory of their own."""
    return rows.with_planes(np.copy) if isinstance(rows, RowPlanes) else rows.copy()
