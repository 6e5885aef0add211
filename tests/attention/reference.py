"""What attention over a paged cache means, in plain numpy: states, their composition, and every shipped variant.

Written to be believed, not to be fast; kernels are compared with it. Everything is computed in the dtype of the queries
that it is given, float64 or float32; give float64 copies of the rounded numbers that a kernel reads. A variant's
functions are named as the kernel's (`cheetah.blocks.attention.variants.Variant`) and take arrays where those take
expressions.

Notation: request b, query number i, key number j (its absolute position), heads H_q and H_kv, head size D, page size
B_c, l_q queries and l_kv keys of a request. The query's absolute position is p = l_kv - l_q + i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Int32Array = NDArray[np.int32]
E4M3_LARGEST = 448.0


# -- states -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """Attention over some of the keys: output [..., D] and the natural-log log-sum-exp of the logits [...].

    The state of no keys is (0, -inf), the identity of `merge` (FlashInfer, MLSys 2025, 2.2).
    """

    output: Array
    lse: Array


def identity_state(shape: tuple[int, ...], dtype: Any = np.float64) -> State:
    """The state of no keys, for queries of that shape [..., D]."""
    return State(np.zeros(shape, dtype), np.full(shape[:-1], -np.inf, dtype))


def softmax_state(logits: Array, values: Array) -> State:
    """The state of rows of logits [rows, n], -inf where masked, over values [n, D]."""
    highest = logits.max(axis=-1, initial=-np.inf)
    weights = np.exp(logits - _finite(highest)[:, None])
    total = weights.sum(axis=-1)
    output = weights @ values / np.where(total == 0, 1, total)[:, None]
    return State(output.astype(logits.dtype), _finite(highest) + _log(total))


def merge(first: State, second: State) -> State:
    """The state over both sets of keys. A state merged with the identity comes back bit for bit."""
    both = merge_together([first, second])
    only_first = np.isneginf(second.lse) & ~np.isneginf(first.lse)
    only_second = np.isneginf(first.lse) & ~np.isneginf(second.lse)
    output = np.where(only_first[..., None], first.output, both.output)
    return State(np.where(only_second[..., None], second.output, output), both.lse)


def merge_in_turn(states: Iterable[State]) -> State:
    """All states, folded two at a time from the first to the last."""
    return reduce(merge, states)


def merge_together(states: Sequence[State]) -> State:
    """All states at once, as the kernel does: weights relative to the highest LSE, one sum, one division."""
    lses = np.stack([state.lse for state in states])
    highest = _finite(lses.max(axis=0))
    weights = np.exp(lses - highest)
    total = weights.sum(axis=0)
    output = sum(weight[..., None] * state.output for weight, state in zip(weights, states, strict=True))
    return State(np.asarray(output / np.where(total == 0, 1, total)[..., None]), highest + _log(total))


def add_states(states: Sequence[State]) -> State:
    """States without softmax: outputs are added and LSE is 0."""
    return State(np.asarray(sum(state.output for state in states)), np.zeros_like(states[0].lse))


def _finite(highest: Array) -> Array:
    """The origin of the exponents: 0 where nothing was kept, since -inf - -inf would be NaN."""
    return np.where(np.isneginf(highest), np.zeros_like(highest), highest)


def _log(total: Array) -> Array:
    with np.errstate(divide="ignore"):  # the logarithm of an empty sum is -inf, as it should be
        return np.asarray(np.log(total))


# -- variants ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Where:
    """Where a function of a variant is called; arrays broadcast over [l_q, n].

    request, head, kv_head: ints. keys: l_kv. query, position: i and p, [l_q, 1]. key: j, [1, n]. A key or a value is
    seen by one query at a time: query and position are [1, 1] there, and key is [n, 1], over [n, D].
    """

    request: int
    head: int
    kv_head: int
    keys: int
    head_dim: int
    query: Array
    position: Array
    key: Array

    @property
    def scale(self) -> float:
        """The usual factor of a logit, 1 / sqrt(D)."""
        return float(1 / np.sqrt(self.head_dim))

    def of_query(self, row: int) -> Where:
        """The same keys as one query sees them, one below the other."""
        one = slice(row, row + 1)
        return replace(self, query=self.query[one], position=self.position[one], key=self.key.T)


@dataclass(frozen=True)
class ReferenceVariant:
    """What attention computes; see `cheetah.blocks.attention.variants.Variant`, whose fields these are.

    Transforms of vectors take and give whole vectors [n, D]; those of keys and values, as one query sees them.
    `rounding` is applied to what such a transform gives: a kernel feeds its products bf16.
    """

    name: str = "causal"
    query_transform: Callable[[Array, Where], Array] | None = None
    key_transform: Callable[[Array, Where], Array] | None = None
    value_transform: Callable[[Array, Where], Array] | None = None
    logits_transform: Callable[[Array, Where], Array] | None = None
    logits_mask: Callable[[Where], Array] | None = None
    output_transform: Callable[[Array, Array, Where], tuple[Array, Array]] | None = None
    softmax: bool = True
    causal: bool = True
    rounding: Callable[[Array], Array] = np.asarray


def causal() -> ReferenceVariant:
    """Keep j <= p; logits x / sqrt(D)."""
    return ReferenceVariant()


def full() -> ReferenceVariant:
    """Keep every key."""
    return ReferenceVariant("full", causal=False)


def sliding_window(window: int) -> ReferenceVariant:
    """Keep p - W <= j <= p: W + 1 keys."""
    return ReferenceVariant("sliding_window", logits_mask=lambda at: at.key >= at.position - window)


def soft_cap(cap: float) -> ReferenceVariant:
    """cap * tanh(x / sqrt(D) / cap), before the mask."""
    return ReferenceVariant("soft_cap", logits_transform=lambda x, at: cap * np.tanh(x * at.scale / cap))


def sigmoid(scale: float | None = None, bias: float = 0.0) -> ReferenceVariant:
    """Weights 1 / (1 + exp(-(scale * x + bias))), O = sum of weight * v, no softmax; scale 1 / sqrt(D) by default."""

    def weight(x: Array, at: Where) -> Array:
        with np.errstate(over="ignore"):  # exp of a large number: the weight is 0
            return np.asarray(1 / (1 + np.exp(-(x * (at.scale if scale is None else scale) + bias))))

    return ReferenceVariant("sigmoid", logits_transform=weight, softmax=False)


def custom_mask(mask_bytes: Array, mask_indptr: Array) -> ReferenceVariant:
    """Bit o = i * l_kv + j of request b, in byte mask_indptr[b] + o // 8 at place o % 8, is 1: the key is kept."""

    def keep(at: Where) -> Array:
        bit = at.query * at.keys + at.key
        return np.asarray(mask_bytes[mask_indptr[at.request] + bit // 8] >> (bit % 8) & 1 == 1)

    return ReferenceVariant("custom_mask", logits_mask=keep, causal=False)


def alibi(slopes: Array, origin: int | None = None) -> ReferenceVariant:
    """x / sqrt(D) + slope_h * (j - p); with an `origin` instead of p, O is the same and LSE moves."""

    def biased(x: Array, at: Where) -> Array:
        distance = at.key - (at.position if origin is None else origin)
        return np.asarray(x * at.scale + slopes[at.head] * distance)

    return ReferenceVariant("alibi", logits_transform=biased)


def learned_sink(sinks: Array) -> ReferenceVariant:
    """The final state merged with (0, a_h), once."""

    def with_sink(output: Array, lse: Array, at: Where) -> tuple[Array, Array]:
        sink = State(np.zeros_like(output), np.full_like(lse, sinks[at.head]))
        state = merge(State(output, lse), sink)
        return state.output, state.lse

    return ReferenceVariant("learned_sink", output_transform=with_sink)


def streaming_llm(sinks: int, recent: int, table: Array) -> ReferenceVariant:
    """Keep j < S or j > p - R; RoPE at cache positions, of keys that are stored unrotated. table: [S + R, D / 2, 2]."""
    table = np.asarray(table)

    def keep(at: Where) -> Array:
        return np.asarray((at.key < sinks) | (at.key > at.position - recent))

    def query_at(queries: Array, at: Where) -> Array:
        return rotated(queries, table[np.minimum(at.position[:, 0] + 1, sinks + recent) - 1])

    def keys_at(keys: Array, at: Where) -> Array:
        evicts = at.position + 1 > sinks + recent
        moved = sinks + at.key - (at.position - recent + 1)
        places = np.where((at.key < sinks) | ~evicts, at.key, moved)[:, 0]
        return rotated(keys, table[np.clip(places, 0, len(table) - 1)])  # those out of range are masked

    return ReferenceVariant("streaming_llm", query_transform=query_at, key_transform=keys_at, logits_mask=keep)


def rope(table: Array) -> ReferenceVariant:
    """Causal attention with RoPE at absolute positions, of queries and keys that are stored unrotated."""
    return ReferenceVariant(
        "rope",
        query_transform=lambda queries, at: rotated(queries, table[at.position[:, 0]]),
        key_transform=lambda keys, at: rotated(keys, table[at.key[:, 0]]),
    )


def rotated(vectors: Array, cos_sin: Array) -> Array:
    """Turn each pair (k, k + D/2) of vectors [n, D] by its angle; cos_sin [n, D/2, 2]."""
    low, high = np.split(vectors, 2, axis=-1)
    cos, sin = cos_sin[..., 0], cos_sin[..., 1]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def alibi_slopes(heads: int) -> Array:
    """One slope a head: with v the largest power of two, 2^(-8(h+1)/v) for h < v, then 2^(-4(2(h-v)+1)/v)."""
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return np.array(first + [2.0 ** (-4 * (2 * (h - power) + 1) / power) for h in range(power, heads)])


# -- attention --------------------------------------------------------------------------------------------------------


def attention_state(queries: Array, keys: Array, values: Array, at: Where, variant: ReferenceVariant) -> State:
    """The state of queries [l_q, D] of one head over keys and values [n, D], before `output_transform`."""
    if variant.query_transform is not None:
        queries = variant.rounding(variant.query_transform(queries, at))
    if variant.key_transform is None and variant.value_transform is None:
        return _rows_state(queries, keys, values, at, variant)
    rows = range(len(queries))
    states = [_transformed_row(queries[row : row + 1], keys, values, at, row, variant) for row in rows]
    return State(np.concatenate([s.output for s in states]), np.concatenate([s.lse for s in states]))


def _transformed_row(query: Array, keys: Array, values: Array, at: Where, row: int, variant: ReferenceVariant) -> State:
    seen = at.of_query(row)
    if variant.key_transform is not None:
        keys = variant.rounding(variant.key_transform(keys, seen))
    if variant.value_transform is not None:
        values = variant.rounding(variant.value_transform(values, seen))
    return _rows_state(query, keys, values, replace(seen, key=at.key), variant)


def _rows_state(queries: Array, keys: Array, values: Array, at: Where, variant: ReferenceVariant) -> State:
    products = queries @ keys.T
    transform = variant.logits_transform
    logits = products * products.dtype.type(at.scale) if transform is None else transform(products, at)
    kept = np.broadcast_to(at.key <= at.position if variant.causal else True, logits.shape)
    if variant.logits_mask is not None:
        kept = kept & variant.logits_mask(at)
    if variant.softmax:
        return softmax_state(np.where(kept, logits, -np.inf).astype(products.dtype), values)
    weights = np.where(kept, logits, 0).astype(products.dtype)
    return State(weights @ values, np.zeros(len(queries), products.dtype))


def attend(
    queries: Array,
    parts: Sequence[tuple[Array, Array]],
    variant: ReferenceVariant | None = None,
    request: int = 0,
    key_scale: Any = 1.0,
    value_scale: Any = 1.0,
) -> State:
    """One request: queries [l_q, H_q, D] over the parts of its cache in order; gives [l_q, H_q, D] and [l_q, H_q].

    A part is (keys, values), each [H_kv, n, D]: a shared prefix, then the rest; their states are merged in order.
    Scales, one or one a KV head, are those of an FP8 cache: products are multiplied by the one, outputs by the other.
    """
    variant = variant or causal()
    outputs, lses = np.zeros_like(queries), np.zeros_like(queries[..., 0])
    for head in range(queries.shape[1]):
        state = _attend_head(
            queries[:, head], parts, variant, (request, head, queries.shape[1]), key_scale, value_scale
        )
        outputs[:, head], lses[:, head] = state.output, state.lse
    return State(outputs, lses)


def _attend_head(
    queries: Array,
    parts: Sequence[tuple[Array, Array]],
    variant: ReferenceVariant,
    place: tuple[int, int, int],
    key_scale: Any,
    value_scale: Any,
) -> State:
    request, head, heads = place
    kv_heads = len(parts[0][0])
    kv_head = head // (heads // kv_heads)
    total = sum(keys.shape[1] for keys, _ in parts)
    rows = np.arange(len(queries))[:, None]
    at = Where(request, head, kv_head, total, queries.shape[1], rows, total - len(queries) + rows, rows[:0].T)
    k_scale, v_scale = (np.broadcast_to(scale, kv_heads)[kv_head] for scale in (key_scale, value_scale))
    states, begin = [], 0
    for keys, values in parts:
        seen = replace(at, key=begin + np.arange(keys.shape[1])[None])
        states.append(attention_state(queries, keys[kv_head] * k_scale, values[kv_head], seen, variant))
        begin += keys.shape[1]
    state = (merge_in_turn if variant.softmax else add_states)(states)
    output, lse = state.output * v_scale, state.lse
    return State(*variant.output_transform(output, lse, at)) if variant.output_transform else State(output, lse)


# -- the paged cache ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """One level of a cache as a block-sparse matrix (FlashInfer, 3.1).

    Tile t reads pages indices[indptr[t]:indptr[t + 1]]. Its length is 0 without pages, else B_c * (pages - 1) +
    last_page_len[t]; token k lies in page number k // B_c, slot k % B_c. Tile t belongs to the requests from
    requests[t] to requests[t + 1] - 1; None: one tile a request.
    """

    indptr: Int32Array
    indices: Int32Array
    last_page_len: Int32Array
    requests: Int32Array | None = None

    def tile_of(self, request: int) -> int:
        if self.requests is None:
            return request
        return int(np.searchsorted(self.requests, request, side="right")) - 1

    def length(self, tile: int, page_size: int) -> int:
        pages = int(self.indptr[tile + 1] - self.indptr[tile])
        return page_size * (pages - 1) + int(self.last_page_len[tile]) if pages else 0

    def read(self, pool: Array, tile: int) -> tuple[Array, Array]:
        """Keys and values [H_kv, n, D] of a tile, of a pool [P, 2, H_kv, B_c, D]; only its slots are looked at."""
        tokens = np.arange(self.length(tile, pool.shape[3]))
        pages = self.indices[self.indptr[tile] + tokens // pool.shape[3]]
        found = pool[pages, :, :, tokens % pool.shape[3]]  # [n, 2, H_kv, D]
        keys, values = found.transpose(1, 2, 0, 3)
        return keys, values


def paged_attention(
    queries: Array,
    qo_indptr: Array,
    pool: Array,
    levels: Sequence[Level],
    variant: ReferenceVariant | None = None,
    key_scale: Any = 1.0,
    value_scale: Any = 1.0,
) -> State:
    """A ragged batch: queries [sum of l_q, H_q, D], request b's at qo_indptr[b] and on, over its tiles of the levels.

    pool: [P, 2, H_kv, B_c, D], K then V (HND), numbers or codes of any float dtype; computed in the queries' dtype.
    """
    states = []
    for request in range(len(qo_indptr) - 1):
        rows = queries[qo_indptr[request] : qo_indptr[request + 1]]
        read = [level.read(pool, level.tile_of(request)) for level in levels]
        parts = [(keys.astype(queries.dtype), values.astype(queries.dtype)) for keys, values in read]
        states.append(attend(rows, parts, variant, request, key_scale, value_scale))
    return State(np.concatenate([s.output for s in states]), np.concatenate([s.lse for s in states]))


def native_layout(pool: Array) -> Array:
    """A pool [P, 2, B_c, H_kv, D] (NHD) as [P, 2, H_kv, B_c, D] (HND)."""
    return np.ascontiguousarray(pool.swapaxes(2, 3))


def to_e4m3(values: Array, scale: Any = 1.0) -> Array:
    """values / scale as FP8 codes (float8_e4m3fn), saturating at +-448; there is no infinity to overflow to."""
    clipped = np.clip(np.asarray(values, np.float32) / np.float32(scale), -E4M3_LARGEST, E4M3_LARGEST)
    return np.asarray(clipped.astype(ml_dtypes.float8_e4m3fn))
