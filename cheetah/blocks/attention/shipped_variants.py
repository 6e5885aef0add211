"""The variants of attention that come with Cheetah, and what their kernel parameters hold.

Each function gives a `Variant`, the same object for the same arguments. Exact rules: docs/attention.md, and in numpy
`tests.attention.reference`, whose functions have the same names. p is the query's absolute position, j the key's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cheetah import lang as ch
from cheetah.blocks.attention.variants import CAUSAL, KNOWN, Pair, Variant
from cheetah.lang import prim, ty

FUNCTIONS = tuple(KNOWN)
"""The fields of a variant that are functions."""


def causal() -> Variant:
    """Keep j <= p: the default."""
    return CAUSAL


@cache
def full() -> Variant:
    """Keep every key."""
    return Variant("full", causal=False)


@cache
def sliding_window(window: int) -> Variant:
    """Keep p - window <= j <= p, that is window + 1 keys: Hugging Face's `sliding_window` less one."""
    if window < 0:
        raise ValueError(f"sliding_window: {window} keys before the query's own: give 0 or more")
    return replace(Variant.windowed(lambda: window), window=window)


@cache
def soft_cap(cap: float) -> Variant:
    """Logits cap * tanh(x / sqrt(D) / cap)."""
    if not 0 < cap < math.inf:
        raise ValueError(f"soft_cap: {cap}: give a positive number")

    @ch.inline
    def capped(x: Any, at: Any) -> ch.Expr:
        return prim.tanh_f32(x * (at.scale / cap)) * cap

    return Variant("soft_cap", logits_transform=capped)


@cache
def sigmoid(scale: float | None = None, bias: float = 0.0) -> Variant:
    """FlashSigmoid: weights 1 / (1 + exp(-(scale * x + bias))), not normalised; scale is 1 / sqrt(D) by default."""

    @ch.inline
    def weight(x: Any, at: Any) -> ch.Expr:
        used = at.scale if scale is None else scale
        return prim.divide_f32(1.0, prim.exp_f32(x * -used - bias) + 1.0)

    return Variant("sigmoid", logits_transform=weight, softmax=False)


@cache
def custom_mask() -> Variant:
    """Keep what the request's own mask says, and nothing else: `packed_mask` makes the two parameters."""

    @ch.inline
    def keep(at: Any) -> Any:
        # The last tile of 16 may reach beyond l_kv: those keys are dropped anyway, but their bits are not there.
        bit = at.query * at.keys + ch.minimum(at.key, at.keys - 1)
        first = ch.cast(ty.u32, at.parameters.mask_indptr[at.request])
        byte = ch.cast(ty.u32, at.parameters.mask[first + (bit >> 3)])
        return (byte >> (bit & 7)) & 1 != 0

    parameters = {"mask": ty.ptr(ty.u8), "mask_indptr": ty.ptr(ty.i32)}
    return Variant("custom_mask", logits_mask=keep, causal=False, parameters=parameters)


@cache
def alibi() -> Variant:
    """Logits x / sqrt(D) + slope_h * (j - p); `slopes` f32 [H_q], as `alibi_slopes` gives them or your own."""

    @ch.inline
    def biased(x: Any, at: Any) -> Any:
        distance = ch.cast(ty.f32, ch.cast(ty.i32, at.key) - ch.cast(ty.i32, at.position))
        return x * at.scale + at.parameters.slopes[at.head] * distance

    return Variant("alibi", logits_transform=biased, parameters={"slopes": ty.ptr(ty.f32)})


@cache
def learned_sink() -> Variant:
    """One more key a head, of logit a_h and value 0: the final state merged with (0, a_h). `sinks` f32 [H_q]."""

    @ch.inline
    def with_sink(output: Any, lse: Any, at: Any) -> Pair:
        sink = at.parameters.sinks[at.head]
        highest = prim.maximum_f32(lse, sink)
        origin = ch.select(highest == -math.inf, ty.f32(0.0), highest)
        weight = prim.exp_f32(lse - origin)
        total = weight + prim.exp_f32(sink - origin)
        share = ch.select(total == 0.0, ty.f32(0.0), prim.divide_f32(weight, total))
        return output * share, ch.select(total == 0.0, ty.f32(-math.inf), origin + prim.log_f32(total))

    return Variant("learned_sink", output_transform=with_sink, parameters={"sinks": ty.ptr(ty.f32)})


@cache
def streaming_llm(sinks: int, recent: int) -> Variant:
    """StreamingLLM: keep j < sinks or j > p - recent, with RoPE at places in the cache, of keys stored unrotated.

    The place of a key is j while nothing has been evicted, and then counts only what is kept; the query's is the last
    one. `rope` f32 [sinks + recent, D / 2, 2]: cos and sin of each place. One query a request, and no shared prefix:
    the place of a key is a matter of who asks.
    """
    if sinks < 0 or recent < 1:
        raise ValueError(f"streaming_llm: {sinks} sinks and {recent} recent keys: give 0 or more and 1 or more")
    room = sinks + recent

    def keep(at: Any) -> Any:
        return (at.key < sinks) | (at.key + recent > at.position)

    @ch.inline
    def query_at(pair: Pair, at: Any) -> Pair:
        return rotated(pair, ch.minimum(at.position, room - 1), at)

    @ch.inline
    def key_at(pair: Pair, at: Any) -> Pair:
        fixed = (at.key < sinks) | (at.position < room)
        place = ch.select(fixed, at.key, at.key + room - (at.position + 1))
        return rotated(pair, ch.minimum(place, room - 1), at)  # keys that are not kept have any place in the table

    return Variant(
        "streaming_llm",
        query_transform=query_at,
        key_transform=key_at,
        logits_mask=keep,
        parameters={"rope": ty.ptr(ty.f32)},
        one_query=True,
    )


def combined(*variants: Variant) -> Variant:
    """One variant with the functions of all: a window and a sink, say.

    ValueError where two set the same function, or have a parameter of the same name: each reads its own array. It is
    causal if all of them are: with `full` or `custom_mask` among them, the masks alone say what is kept.
    """
    chosen: dict[str, Any] = {"name": "_".join(variant.name for variant in variants)}
    for variant in variants:
        given = {name: getattr(variant, name) for name in FUNCTIONS if getattr(variant, name) is not None}
        given |= {"softmax": False} if not variant.softmax else {}
        if twice := sorted(chosen.keys() & given.keys()):
            raise ValueError(f"{chosen['name']}: {', '.join(twice)} set twice: write a function that calls both")
        chosen |= given
    names = Counter(name for variant in variants for name in variant.parameters)
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise ValueError(
            f"{chosen['name']}: parameter {', '.join(twice)} of two variants: one array cannot serve both; give a copy "
            "of one with another name (its functions read at.parameters.NAME)"
        )
    windows = [variant.window for variant in variants if variant.window is not None]
    parameters = {name: type_ for variant in variants for name, type_ in variant.parameters.items()}
    is_causal = all(variant.causal for variant in variants)
    one_query = any(variant.one_query for variant in variants)
    window = min(windows, default=None)
    scales = {variant.scale for variant in variants if variant.scale is not None}
    if len(scales) > 1:
        raise ValueError(f"{chosen['name']}: scales {', '.join(map(str, sorted(scales)))}: logits have one")
    return Variant(
        **chosen,
        causal=is_causal,
        window=window,
        parameters=parameters,
        one_query=one_query,
        scale=next(iter(scales), None),
    )


# -- what they are made of ---------------------------------------------------------------------------------------------


@ch.inline
def rotated(pair: Pair, place: ch.Expr, at: Any) -> Pair:
    """RoPE of the dims at.dim and at.dim + D/2, by the angle in row `place` of the table `rope`."""
    low, high = pair
    entry = at.parameters.rope + (place * (at.head_dim // 2) + at.dim) * 2
    cos = entry[0]
    sin = entry[1]
    return low * cos - high * sin, high * cos + low * sin


# -- what their parameters hold ----------------------------------------------------------------------------------------


def alibi_slopes(heads: int) -> npt.NDArray[np.float32]:
    """ALiBi's slopes, f32 [heads]: a geometric series for a power of two, and every second of the next for the rest."""
    power = 1 << (heads.bit_length() - 1)
    first = -8.0 / power * np.arange(1, power + 1)
    rest = -4.0 / power * np.arange(1, 2 * (heads - power), 2)
    slopes: npt.NDArray[np.float32] = np.exp2(np.concatenate([first, rest])).astype(np.float32)
    return slopes


def packed_mask(masks: Sequence[npt.ArrayLike]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """The parameters `mask` and `mask_indptr` [B + 1] of `custom_mask`, from a mask [l_q, l_kv] a request; true keeps.

    Bit i * l_kv + j of a request, lowest bit of a byte first; each request begins on a byte.
    """
    packed = [np.packbits(np.asarray(mask, bool).reshape(-1), bitorder="little") for mask in masks]
    starts = np.cumsum([0, *(len(part) for part in packed)])
    return np.concatenate([*packed, np.empty(0, np.uint8)]), starts.astype(np.int32)
