"""What a sequence remembers in layers of Gated DeltaNet, as kernels keep it: made of the reference's states, so that a
launch that is judged can go on behind any tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cheetah.models.rounding import F32, as_bf16
from cheetah.plan.delta import COLUMNS, DIMS, KEPT_WORDS, PARTS, DeltaHeads


class State(Protocol):
    """What the reference keeps of a sequence in a layer: the channels of the tokens before, [tokens, channels], and a
    matrix of each value head, [heads, key_dim, value_dim]."""

    @property
    def before(self) -> F32: ...
    @property
    def memory(self) -> F32: ...


def words_of_states(heads: DeltaHeads, states: Sequence[State]) -> NDArray[np.uint32]:
    """u32 [layers, shares, words of a share], see `cheetah.plan.delta`, of the states of those layers."""
    return np.stack([_words_of_layer(heads, state) for state in states])


def memories(heads: DeltaHeads, words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Of a state's words the matrices, f32 [layers, value heads, key_dim, value_dim]."""
    memory = np.ascontiguousarray(words[:, :, : heads.memory_words]).view(np.float32)
    by_share = memory.reshape(-1, heads.key_heads, PARTS, heads.shared, COLUMNS, DIMS)
    return by_share.transpose(0, 1, 3, 5, 2, 4).reshape(-1, heads.value_heads, DIMS, DIMS)


def _words_of_layer(heads: DeltaHeads, state: State) -> NDArray[np.uint32]:
    by_share = state.memory.reshape(heads.key_heads, heads.shared, DIMS, PARTS, COLUMNS).transpose(0, 3, 1, 4, 2)
    memory = np.ascontiguousarray(by_share, np.float32).reshape(heads.shares, -1).view(np.uint32)
    channels = as_bf16(state.before[:, _channels(heads)]).astype(np.uint32)  # [tokens, shares, channels]
    pairs = channels[:, :, ::2] | channels[:, :, 1::2] << 16
    kept = np.zeros((heads.shares, pairs.shape[2], 2 * KEPT_WORDS), np.uint32)
    kept[:, :, : len(pairs)] = pairs.transpose(1, 2, 0)
    return np.concatenate([memory, kept.reshape(heads.shares, -1)], axis=1)


def _channels(heads: DeltaHeads) -> NDArray[np.int64]:
    """Which channels each share mixes, [shares, channels]: of the query, the key, then of values."""
    share = np.arange(heads.shares)[:, None]
    key_head, part = share // PARTS, share % PARTS
    of_key = key_head * DIMS + np.arange(DIMS)
    head, column = np.divmod(np.arange(heads.shared * COLUMNS), COLUMNS)
    values = 2 * heads.key_rows + (key_head * heads.shared + head) * DIMS + part * COLUMNS + column
    return np.concatenate([of_key, heads.key_rows + of_key, values], axis=1)
