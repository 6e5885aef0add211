"""What a head that drafts has of tokens. A product of their embeddings is a function of the token, so it is worked out
for all tokens when weights are packed, and lies in the place of the embedding."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from cheetah.models.drafter import TOKEN_IDS
from cheetah.models.family import MatrixRows, Packing, QuantizedMatrix
from cheetah.models.rounding import F32, Bits, as_bf16, widen


class Columns:
    """Some columns of a matrix, perhaps each times a number."""

    def __init__(self, matrix: MatrixRows | QuantizedMatrix, columns: slice, times: F32 | None = None) -> None:
        self._matrix, self._columns, self._times = cast(MatrixRows, matrix), columns, times
        self.shape = (matrix.shape[0], columns.stop - columns.start)

    def __getitem__(self, part: slice) -> Bits:
        rows = np.ascontiguousarray(self._matrix[part][:, self._columns])
        return rows if self._times is None else as_bf16(widen(rows) * self._times)


class RowsOfTokens:
    """What a matrix of bf16 [rows, hidden] makes of the tokens' embeddings [vocab, hidden] behind a norm, which
    multiplies by `norm` [hidden]: [vocab, rows]."""

    def __init__(self, embedding: MatrixRows | QuantizedMatrix, norm: F32, epsilon: float, matrix: Bits) -> None:
        self._embedding, self._norm, self._epsilon = cast(MatrixRows, embedding), norm, np.float32(epsilon)
        self._weights = widen(matrix).T
        self.shape = (embedding.shape[0], matrix.shape[0])

    def __getitem__(self, part: slice) -> Bits:
        embedded = widen(self._embedding[part])
        squares = np.mean(embedded * embedded, axis=1, keepdims=True, dtype=np.float32)
        return as_bf16((embedded / np.sqrt(squares + self._epsilon) * self._norm) @ self._weights)


def write_token_ids(rows: int, vocab: int, packing: Packing) -> None:
    """Of a head with so many rows; those that fill its last M-tile stand for what is no token."""
    ids: NDArray[np.int64] = packing.tensor(TOKEN_IDS)
    padded = np.full(rows, vocab, np.uint32)
    padded[: len(ids)] = ids
    packing.write(TOKEN_IDS, 0, padded.view(np.uint8))
