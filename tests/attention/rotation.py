"""Tables of RoPE for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def rope_rows(rows: int, head_dim: int, base: float = 10_000.0) -> NDArray[Any]:
    """cos and sin of the positions 0 .. rows - 1: float64 [rows, head_dim / 2, 2]."""
    frequencies = base ** -(np.arange(head_dim // 2) * 2 / head_dim)
    angles = np.arange(rows)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)
