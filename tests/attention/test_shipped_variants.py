"""Every function of the shipped variants, called for single numbers in one small kernel, against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cheetah import lang as ch
from cheetah.blocks.attention import shipped_variants as shipped
from cheetah.blocks.attention.variants import At, Variant
from cheetah.emulator import Program, allocate, compile_program
from cheetah.lang import ty
from tests.attention import reference
from tests.attention.rotation import rope_rows

HEADS, KV_HEADS, HEAD_DIM, COUNT = 6, 2, 64, 512
SINKS, RECENT = 4, 13
PLACES = ("request", "query", "key", "head", "kv_head", "position", "keys", "dim")
VARIANTS: dict[str, Variant] = {
    "sliding_window": shipped.sliding_window(13),
    "soft_cap": shipped.soft_cap(30.0),
    "sigmoid": shipped.sigmoid(),
    "biased_sigmoid": shipped.sigmoid(0.5, -2.0),
    "custom_mask": shipped.custom_mask(),
    "alibi": shipped.alibi(),
    "learned_sink": shipped.learned_sink(),
    "streaming_llm": shipped.streaming_llm(SINKS, RECENT),
}
PARAMETERS: dict[str, Any] = {
    name: type_ for variant in VARIANTS.values() for name, type_ in variant.parameters.items()
}
RESULTS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    **{f"{name}.logit": lambda v, x, y, at: v.logits_transform(x, at) for name in VARIANTS},
    **{f"{name}.keep": lambda v, x, y, at: ch.cast(ty.f32, v.logits_mask(at)) for name in VARIANTS},
    **{f"{name}.output": lambda v, x, y, at: v.output_transform(x, y, at)[0] for name in VARIANTS},
    **{f"{name}.lse": lambda v, x, y, at: v.output_transform(x, y, at)[1] for name in VARIANTS},
    **{f"{name}.query": lambda v, x, y, at: v.query_transform((x, y), at) for name in VARIANTS},
    **{f"{name}.key": lambda v, x, y, at: v.key_transform((x, y), at) for name in VARIANTS},
}
FIELDS = {
    "logit": "logits_transform",
    "keep": "logits_mask",
    "output": "output_transform",
    "lse": "output_transform",
    "query": "query_transform",
    "key": "key_transform",
}
SET = [name for name in RESULTS if getattr(VARIANTS[name.split(".")[0]], FIELDS[name.split(".")[1]]) is not None]


@cache
def compiled() -> Program:
    """A kernel whose thread n writes result r of input n to out[r][n]; a pair is two results."""
    parameters = ch.Params(
        x=ty.ptr(ty.f32), y=ty.ptr(ty.f32), places=ty.ptr(ty.u32), out=ty.ptr_mut(ty.f32), **PARAMETERS
    )

    def every(**given: Any) -> None:
        x, y, places, out = (given[name] for name in ("x", "y", "places", "out"))
        thread = ch.block_idx_x() * ch.block_dim_x() + ch.thread_idx_x()
        values = {name: (lambda n=n: places[thread * len(PLACES) + n]) for n, name in enumerate(PLACES)}
        written = 0
        for name in SET:
            variant, kind = VARIANTS[name.split(".")[0]], FIELDS[name.split(".")[1]]
            sizes = dict(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
            at = At(kind, SimpleNamespace(**given), **sizes, values=values)
            found = RESULTS[name](variant, x[thread], y[thread], at)
            for part in found if isinstance(found, tuple) else (found,):
                out[written * COUNT + thread] = part
                written += 1

    kernel = ch.kernel(parameters, name="every", max_threads=64)(every)
    return compile_program(ch.render_file(kernel), "every", [(name, str(type_)) for name, type_ in parameters.items()])


class Inputs:
    """Random numbers and places, requests of 3 queries and up to 60 keys; `at(n)`: the reference's view of input n."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.x = (draw.standard_normal(COUNT) * 10.0 ** draw.integers(-4, 4, COUNT)).astype(np.float32)
        self.y = draw.normal(0, 5, COUNT).astype(np.float32)
        self.y[:8] = -np.inf
        keys = draw.integers(3, 60, COUNT)
        query = draw.integers(0, 3, COUNT)
        head = draw.integers(0, HEADS, COUNT)
        self.places = np.stack(
            [
                draw.integers(0, 4, COUNT),
                query,
                draw.integers(0, keys),
                head,
                head // (HEADS // KV_HEADS),
                keys - 3 + query,
                keys,
                draw.integers(0, HEAD_DIM // 2, COUNT),
            ],
            axis=1,
        ).astype(np.uint32)
        self.sinks = draw.normal(0, 5, HEADS).astype(np.float32)
        self.sinks[1] = -np.inf
        self.slopes = shipped.alibi_slopes(HEADS)
        self.mask = draw.integers(0, 256, 4 * 30).astype(np.uint8)
        self.mask_indptr = np.array([0, 30, 60, 90, 120], np.int32)
        self.rope = rope_rows(SINKS + RECENT, HEAD_DIM).astype(np.float32)

    def at(self, number: int) -> reference.Where:
        place: dict[str, Any] = dict(zip(PLACES, self.places[number].astype(np.int64).tolist(), strict=True))
        arrays = {name: np.array([[place.pop(name)]]) for name in ("query", "position", "key")}
        place.pop("dim")
        return reference.Where(**place, head_dim=HEAD_DIM, **arrays)


INPUTS = Inputs()


@cache
def results() -> dict[str, np.ndarray]:
    """What the kernel's functions give, by name; pairs are [2, COUNT]."""
    widths = [2 if name.endswith((".query", ".key")) else 1 for name in SET]
    out = allocate((sum(widths), COUNT), np.float32)
    arguments = [INPUTS.x, INPUTS.y, INPUTS.places, out, *(getattr(INPUTS, name) for name in PARAMETERS)]
    compiled().launch(COUNT // 64, 64, 0, arguments)
    starts = np.cumsum([0, *widths])
    return {name: out[a:b] for name, a, b in zip(SET, starts, starts[1:], strict=False)}


def of_reference(function: Callable[[float, float, reference.Where], Any]) -> np.ndarray:
    rows = range(COUNT)
    return np.array([np.squeeze(function(float(INPUTS.x[n]), float(INPUTS.y[n]), INPUTS.at(n))) for n in rows])


pytestmark = pytest.mark.compiler
REFERENCES = {
    "soft_cap": reference.soft_cap(30.0),
    "sigmoid": reference.sigmoid(),
    "biased_sigmoid": reference.sigmoid(0.5, -2.0),
    "alibi": reference.alibi(INPUTS.slopes.astype(np.float64)),
    "sliding_window": reference.sliding_window(13),
    "custom_mask": reference.custom_mask(INPUTS.mask, INPUTS.mask_indptr),
    "streaming_llm": reference.streaming_llm(SINKS, RECENT, INPUTS.rope.astype(np.float64)),
    "learned_sink": reference.learned_sink(INPUTS.sinks.astype(np.float64)),
}


@pytest.mark.parametrize("name", ["soft_cap", "sigmoid", "biased_sigmoid", "alibi"])
def test_logits(name: str) -> None:
    transform = REFERENCES[name].logits_transform
    assert transform is not None
    expected = of_reference(lambda x, y, at: transform(np.array(x), at))
    found = results()[f"{name}.logit"][0]
    finite = expected > 1e-30  # the fast division gives 0 for what nobody can tell from it
    np.testing.assert_allclose(
        found[~finite], np.where(expected[~finite] > 0, 0, expected[~finite]), rtol=1e-6, atol=1e-30
    )
    np.testing.assert_allclose(found[finite], expected[finite], rtol=4e-6)


def test_tanh_of_small_and_large_numbers() -> None:
    """To 1e-6 relative, whatever the size: soft-capped logits are mostly small ones."""
    x = INPUTS.x.astype(np.float64)
    found = results()["soft_cap.logit"][0] / np.float32(30)
    np.testing.assert_allclose(found, np.tanh(x / math.sqrt(HEAD_DIM) / 30), rtol=1e-6)


@pytest.mark.parametrize("name", ["sliding_window", "custom_mask", "streaming_llm"])
def test_masks(name: str) -> None:
    mask = REFERENCES[name].logits_mask
    assert mask is not None
    expected = of_reference(lambda x, y, at: mask(at))
    assert 0.1 < expected.mean() < 0.9
    np.testing.assert_array_equal(results()[f"{name}.keep"][0], expected)


def test_the_sink_is_one_more_key() -> None:
    transform = REFERENCES["learned_sink"].output_transform
    assert transform is not None
    expected = of_reference(lambda x, y, at: [part.item() for part in transform(np.array([[x]]), np.array([y]), at)])
    found = np.stack([results()["learned_sink.output"][0], results()["learned_sink.lse"][0]], axis=1)
    np.testing.assert_allclose(found[np.isfinite(INPUTS.y)], expected[np.isfinite(INPUTS.y)], rtol=3e-6, atol=1e-6)
    np.testing.assert_array_equal(found[:8, 0], 0)
    heads = INPUTS.places[:8, 3]
    np.testing.assert_array_equal(found[:8, 1], INPUTS.sinks[heads])


def test_a_sink_of_minus_infinity_changes_no_bit() -> None:
    without = (INPUTS.places[:, 3] == 1) & np.isfinite(INPUTS.y)
    assert without.any()
    np.testing.assert_array_equal(results()["learned_sink.output"][0][without], INPUTS.x[without])
    np.testing.assert_array_equal(results()["learned_sink.lse"][0][without], INPUTS.y[without])


@pytest.mark.parametrize("kind", ["query", "key"])
def test_rotation_at_cache_positions(kind: str) -> None:
    """The pair (x, y) at its dim of a vector that is 0 elsewhere, of keys that are kept."""
    variant = REFERENCES["streaming_llm"]
    transform, mask = getattr(variant, FIELDS[kind]), variant.logits_mask
    assert mask is not None
    for number in range(8, COUNT):
        at = INPUTS.at(number)
        if not (mask(at) & (at.key <= at.position)):
            continue
        dim = int(INPUTS.places[number, 7])
        vector = np.zeros((1, HEAD_DIM))
        vector[0, [dim, dim + HEAD_DIM // 2]] = INPUTS.x[number], INPUTS.y[number]
        expected = transform(vector, at)[0, [dim, dim + HEAD_DIM // 2]]
        found = results()[f"streaming_llm.{kind}"][:, number]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


# -- parameters made by the host ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 28, 32, 40])
def test_slopes(heads: int) -> None:
    np.testing.assert_allclose(shipped.alibi_slopes(heads), reference.alibi_slopes(heads), rtol=1e-6)
    assert shipped.alibi_slopes(heads).dtype == np.float32


def test_masks_are_packed_by_request() -> None:
    """The golden bits, then a request that begins on a byte of its own."""
    golden = [[1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1]]
    packed, starts = shipped.packed_mask([golden, [[1, 1], [0, 1]], np.zeros((0, 3))])
    np.testing.assert_array_equal(packed, [205, 5, 11])
    np.testing.assert_array_equal(starts, [0, 2, 3, 3])
    assert packed.dtype == np.uint8 and starts.dtype == np.int32


def test_equal_arguments_give_the_same_object() -> None:
    assert shipped.sliding_window(3) is shipped.sliding_window(3) is not shipped.sliding_window(4)


@pytest.mark.parametrize(
    "make", [lambda: shipped.sliding_window(-1), lambda: shipped.soft_cap(0), lambda: shipped.streaming_llm(1, 0)]
)
def test_senseless_arguments_are_refused(make: Callable[[], Variant]) -> None:
    with pytest.raises(ValueError, match="give"):
        make()


def test_variants_together() -> None:
    both = shipped.combined(shipped.sliding_window(127), shipped.learned_sink())
    assert (both.name, both.window, both.causal, both.softmax) == ("sliding_window_learned_sink", 127, True, True)
    assert both.logits_mask is shipped.sliding_window(127).logits_mask and set(both.parameters) == {"sinks"}
    assert not shipped.combined(shipped.custom_mask(), shipped.alibi()).causal
    assert not shipped.combined(shipped.sigmoid(), shipped.sliding_window(3)).softmax


def test_variants_that_collide_are_refused() -> None:
    with pytest.raises(ValueError, match="logits_transform set twice"):
        shipped.combined(shipped.alibi(), shipped.soft_cap(30.0))


def test_variants_with_a_parameter_of_one_name_are_refused() -> None:
    """Both would be given one array, and the last type would win."""
    biased = Variant("biased", logits_transform=lambda x, at: x, parameters={"sinks": ty.ptr(ty.bf16)})
    with pytest.raises(ValueError, match="learned_sink_biased: parameter sinks of two variants"):
        shipped.combined(shipped.learned_sink(), biased)
