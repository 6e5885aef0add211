"""The float64 attention that kernels are compared with, itself compared with formulas written out naively."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.reference import (
    Level,
    ReferenceVariant,
    State,
    add_states,
    alibi,
    alibi_slopes,
    attend,
    custom_mask,
    full,
    identity_state,
    learned_sink,
    merge,
    merge_in_turn,
    merge_together,
    native_layout,
    paged_attention,
    rope,
    sigmoid,
    sliding_window,
    soft_cap,
    softmax_state,
    streaming_llm,
    to_e4m3,
)

HEAD_DIM = 8


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def request(queries: int = 2, keys: int = 11, heads: int = 4, kv_heads: int = 2) -> tuple[np.ndarray, ...]:
    cached = (kv_heads, keys, HEAD_DIM)
    return drawn(queries, heads, HEAD_DIM), drawn(*cached, seed=1), drawn(*cached, seed=2)


def naive(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, logit: Any = None, keep: Any = None, weight: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """(O, LSE) by loops over plain numbers: logit(x, h, j, p), keep(i, j, p), weight(logit) instead of softmax."""
    rows, heads, head_dim = q.shape
    keys = k.shape[1]
    output, lse = np.zeros_like(q), np.zeros((rows, heads))
    for i in range(rows):
        for h in range(heads):
            kv, p = h // (heads // len(k)), keys - rows + i
            total, summed = 0.0, np.zeros(head_dim)
            for j in range(keys):
                if not (keep(i, j, p) if keep else j <= p):
                    continue
                x = sum(float(a) * float(b) for a, b in zip(q[i, h], k[kv, j], strict=True))
                final = logit(x, h, j, p) if logit else x / math.sqrt(head_dim)
                w = weight(final) if weight else math.exp(final)
                total, summed = total + w, summed + w * v[kv, j]
            if weight:
                output[i, h] = summed
            else:
                output[i, h] = summed / total if total else 0
                lse[i, h] = math.log(total) if total else -math.inf
    return output, lse


def assert_same(state: State, expected: tuple[np.ndarray, np.ndarray]) -> None:
    np.testing.assert_allclose(state.output, expected[0], rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(state.lse, expected[1], rtol=1e-11, atol=1e-13)


# -- states ------------------------------------------------------------------------------------------------------------


def random_states(count: int, seed: int = 0, dtype: type = np.float64) -> list[State]:
    draw = np.random.default_rng(seed)
    return [State(draw.standard_normal((3, 4)).astype(dtype), draw.normal(0, 9, 3).astype(dtype)) for _ in range(count)]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_identity_changes_no_bit(dtype: type) -> None:
    (state,) = random_states(1, dtype=dtype)
    state.output[0] = -0.0
    nothing = identity_state((3, 4), dtype)
    for merged in (merge(state, nothing), merge(nothing, state)):
        assert merged.output.dtype == dtype and merged.lse.dtype == dtype
        assert merged.output.tobytes() == state.output.tobytes() and merged.lse.tobytes() == state.lse.tobytes()
    assert merge_together([nothing, state, nothing]).lse.tobytes() == state.lse.tobytes()


def test_identities_give_the_identity() -> None:
    nothing = identity_state((3, 4))
    for merged in (
        merge(nothing, nothing),
        merge_together([nothing] * 3),
        softmax_state(np.empty((3, 0)), np.empty((0, 4))),
    ):
        assert (merged.output == 0).all() and np.isneginf(merged.lse).all()


def test_fully_masked_rows_are_the_identity() -> None:
    state = softmax_state(np.full((2, 5), -np.inf), drawn(5, 4))
    assert (state.output == 0).all() and np.isneginf(state.lse).all()


def test_lse_is_a_natural_logarithm() -> None:
    state = softmax_state(np.full((1, 7), 2.5), drawn(7, 4))
    np.testing.assert_allclose(state.lse, 2.5 + math.log(7))


@given(st.integers(0, 999), st.integers(2, 6))
@settings(max_examples=50, deadline=None)
def test_merging_in_any_order_or_at_once(seed: int, count: int) -> None:
    states = random_states(count, seed)
    together = merge_together(states)
    for some in (merge_in_turn(states), merge_in_turn(states[::-1]), merge(states[0], merge_in_turn(states[1:]))):
        assert_same(some, (together.output, together.lse))


@pytest.mark.parametrize("cuts", [(0, 11), (0, 1, 11), (0, 4, 4, 9, 11)])
def test_parts_merged_are_the_whole(cuts: tuple[int, ...]) -> None:
    q, k, v = request()
    parts = [(k[:, a:b], v[:, a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert_same(attend(q, parts), naive(q, k, v))


def test_far_apart_states_stay_finite() -> None:
    a, b = (State(np.ones((1, 2)) * sign, np.array([lse])) for sign, lse in ((1, 1e4), (-1, -1e4)))
    assert merge(a, b).lse == 1e4 and (merge(b, a).output == 1).all()


# -- variants ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 11), (3, 3), (4, 9)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_causal(queries: int, keys: int, heads: int, kv_heads: int) -> None:
    q, k, v = request(queries, keys, heads, kv_heads)
    assert_same(attend(q, [(k, v)]), naive(q, k, v))


@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_sliding_window(window: int) -> None:
    q, k, v = request(3)
    expected = naive(q, k, v, keep=lambda i, j, p: p - window <= j <= p)
    assert_same(attend(q, [(k, v)], sliding_window(window)), expected)


def test_soft_cap() -> None:
    q, k, v = request()
    expected = naive(q, k, v, logit=lambda x, h, j, p: 1.5 * math.tanh(x / math.sqrt(HEAD_DIM) / 1.5))
    assert_same(attend(q, [(k, v)], soft_cap(1.5)), expected)


@pytest.mark.parametrize(("scale", "bias"), [(None, 0.0), (0.7, -1.0)])
def test_sigmoid(scale: float | None, bias: float) -> None:
    q, k, v = request()
    used = scale or HEAD_DIM**-0.5
    expected = naive(q, k, v, logit=lambda x, h, j, p: used * x + bias, weight=lambda x: 1 / (1 + math.exp(-x)))
    assert_same(attend(q, [(k, v)], sigmoid(scale, bias)), expected)
    halves = [attend(q[1:], [part], sigmoid(scale, bias)) for part in ((k[:, :10], v[:, :10]), (k[:, 10:], v[:, 10:]))]
    whole = attend(q[1:], [(k, v)], sigmoid(scale, bias))  # the last query sees all keys, as the last of either half
    assert_same(add_states(halves), (whole.output, whole.lse))


def test_custom_mask_in_bits() -> None:
    """The golden bits: two queries over eleven keys would need 22, so one query."""
    q, k, v = request(1)
    bits = (1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1)
    packed = np.array([99, 205, 5], np.uint8)
    expected = naive(q, k, v, keep=lambda i, j, p: bits[j] == 1)
    assert_same(attend(q, [(k, v)], custom_mask(packed, np.array([1], np.int32))), expected)


def test_custom_mask_of_several_queries_and_requests() -> None:
    q, k, v = request(3)
    mask = drawn(3, 11) > 0
    packed = np.packbits(mask.reshape(-1), bitorder="little")
    variant = custom_mask(np.concatenate([[255] * 4, packed]).astype(np.uint8), np.array([0, 4], np.int32))
    expected = naive(q, k, v, keep=lambda i, j, p: mask[i, j])
    assert_same(attend(q, [(k, v)], variant, request=1), expected)


def test_alibi() -> None:
    q, k, v = request(2, heads=6)
    slopes = alibi_slopes(6)
    expected = naive(q, k, v, logit=lambda x, h, j, p: x / math.sqrt(HEAD_DIM) + slopes[h] * (j - p))
    assert_same(attend(q, [(k, v)], alibi(slopes)), expected)


def test_alibi_slopes() -> None:
    """Of a power of two and of another number, as in the ALiBi paper's code."""
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-n for n in range(1, 9)])
    more = [2.0 ** (-8 * n / 16) for n in (1, 3, 5, 7)]
    np.testing.assert_allclose(alibi_slopes(12), [*alibi_slopes(8), *more])
    np.testing.assert_allclose(alibi_slopes(1), [2.0**-8])


def test_learned_sink() -> None:
    """One more key of logit a_h whose value is 0."""
    q, k, v = request(1)
    sinks = drawn(4)
    state = attend(q, [(k[:, :5], v[:, :5]), (k[:, 5:], v[:, 5:])], learned_sink(sinks))
    output, lse = naive(q, k, v)
    assert_same(state, (output / (1 + np.exp(sinks[:, None] - lse[..., None])), np.log(np.exp(lse) + np.exp(sinks))))
    plain = attend(q, [(k, v)])
    assert attend(q, [(k, v)], learned_sink(np.full(4, -np.inf))).output.tobytes() == plain.output.tobytes()


def table_of(rows: int) -> np.ndarray:
    angles = np.arange(rows)[:, None] * 10.0 ** -np.arange(HEAD_DIM // 2)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


@pytest.mark.parametrize(("sinks", "recent"), [(0, 4), (2, 3), (4, 1), (1, 50)])
def test_streaming_llm(sinks: int, recent: int) -> None:
    """The kept keys put next to each other, rotated by their places there, the query as the last of them."""
    q, k, v = request(1)
    table = table_of(sinks + recent)
    kept = [j for j in range(11) if j < sinks or j > 10 - recent]
    rows = table[: len(kept)]
    turned = np.stack([turn(k[h, kept], rows) for h in range(2)])
    expected = naive(turn(q[0], rows[[-1] * 4])[None], turned, v[:, kept])
    assert_same(attend(q, [(k, v)], streaming_llm(sinks, recent, table)), expected)


def test_streaming_llm_of_several_queries() -> None:
    q, k, v = request(3)
    variant = streaming_llm(2, 3, table_of(5))
    rows = [attend(q[i : i + 1], [(k[:, : 9 + i], v[:, : 9 + i])], variant) for i in range(3)]
    together = attend(q, [(k, v)], variant)
    assert_same(together, (np.concatenate([s.output for s in rows]), np.concatenate([s.lse for s in rows])))


def test_streaming_llm_that_evicts_nothing_is_rope() -> None:
    q, k, v = request(3)
    table = table_of(64)
    plain = attend(q, [(k, v)], rope(table))
    assert_same(attend(q, [(k, v)], streaming_llm(3, 40, table[:43])), (plain.output, plain.lse))


def turn(vectors: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """RoPE as a product of complex numbers."""
    half = HEAD_DIM // 2
    turned = (vectors[:, :half] + 1j * vectors[:, half:]) * (cos_sin[..., 0] + 1j * cos_sin[..., 1])
    return np.concatenate([turned.real, turned.imag], axis=-1)


def test_transforms_of_vectors() -> None:
    q, k, v = request()
    variant = ReferenceVariant(
        query_transform=lambda vectors, at: vectors * 2,
        key_transform=lambda vectors, at: vectors + at.key,
        value_transform=lambda vectors, at: vectors * (at.kv_head + 1),
    )
    moved = k + np.arange(11)[:, None]
    assert_same(attend(q, [(k, v)], variant), naive(q * 2, moved, v * np.array([1, 2])[:, None, None]))
    rounded = replace(variant, rounding=lambda x: np.zeros_like(x))
    assert (attend(q, [(k, v)], rounded).output == 0).all()


# -- the paged cache ---------------------------------------------------------------------------------------------------


def paged(k: np.ndarray, v: np.ndarray, page_size: int, pages: list[int], pool: np.ndarray) -> None:
    for token in range(k.shape[1]):
        slot = pool[pages[token // page_size], :, :, token % page_size]
        slot[0], slot[1] = k[:, token], v[:, token]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_ragged_paged_batch(page_size: int) -> None:
    """Lengths 7, 0 and 4; every slot that is not used holds NaN."""
    lengths, pool = (7, 0, 4), np.full((30, 2, 2, page_size, HEAD_DIM), np.nan)
    places = iter(np.random.default_rng(0).permutation(30).tolist())
    counts = [-(-length // page_size) for length in lengths]
    tables = [[next(places) for _ in range(count)] for count in counts]
    requests = [request(min(length, 2), length) for length in lengths]
    for (_, k, v), table in zip(requests, tables, strict=True):
        paged(k, v, page_size, table, pool)
    level = Level(
        np.cumsum([0, *counts]).astype(np.int32),
        np.array(sum(tables, []), np.int32),
        np.array([(length - 1) % page_size + 1 if length else 0 for length in lengths], np.int32),
    )
    queries = np.concatenate([q for q, _, _ in requests])
    state = paged_attention(queries, np.array([0, 2, 2, 4]), pool, [level])
    expected = [naive(q, k, v) for q, k, v in requests if len(q)]
    assert_same(state, tuple(np.concatenate(parts) for parts in zip(*expected, strict=True)))


def test_a_request_without_keys_gives_the_identity() -> None:
    level = Level(np.array([0, 0], np.int32), np.array([], np.int32), np.array([0], np.int32))
    state = paged_attention(drawn(1, 4, HEAD_DIM), np.array([0, 1]), np.full((1, 2, 2, 4, HEAD_DIM), np.nan), [level])
    assert (state.output == 0).all() and np.isneginf(state.lse).all()


def test_a_shared_prefix() -> None:
    """Requests 0 and 1 share five keys, request 2 has none; positions count from the prefix's first key."""
    prefix, parts = request(1, 5), [request(2, length, heads=4) for length in (3, 6, 4)]
    pool = np.full((12, 2, 2, 4, HEAD_DIM), np.nan)
    paged(prefix[1], prefix[2], 4, [11, 3], pool)
    tables = [[0], [1, 2], [4]]
    for (_, k, v), table in zip(parts, tables, strict=True):
        paged(k, v, 4, table, pool)
    shared = Level(*(np.array(words, np.int32) for words in ([0, 2, 2], [11, 3], [1, 0], [0, 2, 3])))
    own = Level(*(np.array(words, np.int32) for words in ([0, 1, 3, 4], [0, 1, 2, 4], [3, 2, 4])))
    variant = alibi(alibi_slopes(4))
    queries = np.concatenate([q for q, _, _ in parts])
    state = paged_attention(queries, np.array([0, 2, 4, 6]), pool, [shared, own], variant)
    wholes = [
        [np.concatenate([one, two], axis=1) for one, two in zip(prefix[1:], part[1:], strict=True)]
        for part in parts[:2]
    ]
    expected = [attend(q, [tuple(kv)], variant) for (q, _, _), kv in zip(parts, [*wholes, parts[2][1:]], strict=True)]
    assert_same(state, (np.concatenate([s.output for s in expected]), np.concatenate([s.lse for s in expected])))


def test_native_layout() -> None:
    pool = drawn(3, 2, 5, 2, HEAD_DIM)
    assert (native_layout(pool)[2, 1, 1, 4] == pool[2, 1, 4, 1]).all()


# -- FP8 and precision -----------------------------------------------------------------------------------------------


def test_codes_saturate() -> None:
    codes = to_e4m3(np.array([1e9, -1e9, 448, 449, 0.3, 896]), 2.0)
    assert codes.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(codes.astype(np.float64), [448, -448, 224, 224, 0.15625, 448])


def test_scales_of_codes() -> None:
    """Products times the keys' scale, outputs times the values': the same as attention over the dequantised cache."""
    q, k, v = request()
    k_scale, v_scale = np.array([0.01, 0.02]), 0.03
    keys = to_e4m3(k, k_scale[:, None, None]).astype(np.float64)
    values = to_e4m3(v, v_scale).astype(np.float64)
    state = attend(q, [(keys, values)], full(), key_scale=k_scale, value_scale=v_scale)
    expected = naive(q, keys * k_scale[:, None, None], values * v_scale, keep=lambda i, j, p: True)
    assert_same(state, expected)


def test_float32_is_computed_in_float32() -> None:
    q, k, v = (part.astype(np.float32) for part in request())
    for variant in (None, sliding_window(3), soft_cap(30), sigmoid(), learned_sink(drawn(4)), alibi(alibi_slopes(4))):
        state = attend(q, [(k, v)], variant)
        assert state.output.dtype == np.float32
        precise = attend(q.astype(float), [(k.astype(float), v.astype(float))], variant)
        np.testing.assert_allclose(state.output, precise.output, rtol=1e-4, atol=1e-6)
