"""What a head that drafts has of tokens. A norm of their embeddings, and a product of that, are functions of the token,
so they are worked out for all tokens when weights are packed, and lie in the place of the embedding."""

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


class NormedRows:
    """The tokens' embeddings [vocab, hidden] behind a norm, which multiplies by `norm` [hidden]."""

    def __init__(self, embedding: MatrixRows | QuantizedMatrix, norm: F32, epsilon: float) -> None:
        self._embedding, self._norm, self._epsilon = cast(MatrixRows, embedding), norm, np.float32(epsilon)
        self.shape = embedding.shape

    def numbers(self, part: slice) -> F32:
        """Rows, not rounded."""
        embedded = widen(self._embedding[part])
        squares = np.mean(embedded * embedded, axis=1, keepdims=True, dtype=np.float32)
        return np.asarray(embedded / np.sqrt(squares + self._epsilon) * self._norm, np.float32)

    def __getitem__(self, part: slice) -> Bits:
        return as_bf16(self.numbers(part))


class RowsOfTokens:
    """What a matrix of bf16 [rows, hidden] makes of those: [vocab, rows]."""

    def __init__(self, tokens: NormedRows, matrix: Bits) -> None:
        self._tokens, self._weights = tokens, widen(matrix).T
        self.shape = (tokens.shape[0], matrix.shape[0])

    def __getitem__(self, part: slice) -> Bits:
        return as_bf16(self._tokens.numbers(part) @ self._weights)


def write_token_ids(rows: int, vocab: int, packing: Packing) -> None:
    """Of a head with so many rows; those that fill its last M-tile stand for what is no token."""
    ids: NDArray[np.int64] = packing.tensor(TOKEN_IDS)
    padded = np.full(rows, vocab, np.uint32)
    padded[: len(ids)] = ids
    packing.write(TOKEN_IDS, 0, padded.view(np.uint8))
