"""What a sequence remembers in layers of Gated DeltaNet, as kernels keep it: made of the reference's states, so that a
launch that is judged can go on behind any tokens, and held to them behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cheetah.models.rounding import F32, as_bf16, widen
from cheetah.plan.delta import COLUMNS, DIMS, KEPT_WORDS, PARTS, TAPS, DeltaHeads

BEFORE = TAPS - 1


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


def wrong_states(
    heads: DeltaHeads,
    words: NDArray[np.uint32],
    exact: Mapping[int, State],
    rounded: Mapping[int, State],
    allowance: tuple[float, float],
) -> Iterator[str]:
    """What is wrong with a state's words beside the layers' states of references that do not round and that do.
    allowance: what is allowed of a relative error at least, and how many times the most that rounding does to one of
    the layer's."""
    least, factor = allowance
    for number, layer in enumerate(heads.layers):
        kept = memories(heads, words)[number], channels_before(heads, words)[number]
        names = f"value head {{}} of layer {layer} remembers", f"layer {layer} keeps of token {{}} of the last {BEFORE}"
        parts = (_parts(heads, state) for state in (exact[layer], rounded[layer]))
        for found, right, own, name in zip(kept, *parts, names, strict=True):
            off, of_rounding = _errors(found, right), _errors(own, right)
            allowed = max(least, factor * float(of_rounding.max()))
            if not np.all(off <= allowed):
                first = int(np.argmax(~(off <= allowed)))
                yield f"what {name.format(first)} is not: {off[first]:.2e} off, allowed is {allowed:.2e}"


def _parts(heads: DeltaHeads, state: State) -> tuple[F32, F32]:
    return state.memory, state.before[:, _channels(heads)]


def _errors(found: F32, right: F32) -> F32:
    """|found - right| / |right| (L2) of each of the first axis; where nothing is right but zeros, |found|."""
    off, sizes = (np.linalg.norm(one.reshape(len(one), -1), axis=1) for one in (found - right, right))
    return np.asarray(off / np.where(sizes == 0, 1, sizes))


def channels_before(heads: DeltaHeads, words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Of a state's words the channels of the tokens before, f32 [layers, tokens, shares, channels of a share]."""
    kept = words[:, :, heads.memory_words :].reshape(*words.shape[:2], -1, 2 * KEPT_WORDS)[:, :, :, :BEFORE]
    pairs = np.ascontiguousarray(kept.transpose(0, 3, 1, 2))
    return widen(pairs.view(np.uint16))


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
    kept[:, :, :BEFORE] = pairs.transpose(1, 2, 0)
    return np.concatenate([memory, kept.reshape(heads.shares, -1)], axis=1)


def _channels(heads: DeltaHeads) -> NDArray[np.int64]:
    """Which channels each share mixes, [shares, channels]: of the query, the key, then of values."""
    share = np.arange(heads.shares)[:, None]
    key_head, part = share // PARTS, share % PARTS
    of_key = key_head * DIMS + np.arange(DIMS)
    head, column = np.divmod(np.arange(heads.shared * COLUMNS), COLUMNS)
    values = 2 * heads.key_rows + (key_head * heads.shared + head) * DIMS + part * COLUMNS + column
    return np.concatenate([of_key, heads.key_rows + of_key, values], axis=1)
