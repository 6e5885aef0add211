"""Mistakes planted in products with quantised weights: the tests of products must tell each from the right text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cheetah.blocks.linear.formats import digits, e4m3, integers
from cheetah.blocks.linear.formats.e4m3 import E4m3Fragments, _Powers
from cheetah.blocks.linear.formats.quantized import QuantizedFragments
from cheetah.emulator import Race
from cheetah.lang import prim
from cheetah.models.formats import pack_matrix
from cheetah.models.rounding import widen
from tests.blocks.small_kernel import filled
from tests.blocks.test_matvec import product
from tests.blocks.test_quantized_products import launched, rows_of
from tests.program.rig import as_bf16, relative_error
from tests.tolerances import MATVEC

Patch = pytest.MonkeyPatch
ONE, TWO, FOUR = {"tokens": 1}, {"tokens": 2}, {"tokens": 4}
"""Steps of one and two tokens multiply 4-bit weights by digits, others as bf16."""


def changed(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """Plants `change(right, ...)` in place of a function or a number of `owner`."""
    right = getattr(owner, name)
    wrong = (lambda *given: change(right, *given)) if callable(right) else change(right)
    return lambda patch: patch.setattr(owner, name, wrong)


def of_the_neighbour(right: Any, tiles: Any, first: Any, number: int) -> Any:
    return right(tiles, first, number ^ 1)


BUGS: dict[str, tuple[str, dict[str, Any], Callable[[Patch], None]]] = {
    "": ("int4-g64-asym", ONE, lambda patch: None),
    "the scale of the neighbouring group": ("int4-g64", FOUR, changed(integers, "group_scales", of_the_neighbour)),
    "the same with digits": ("int4-g64", ONE, changed(digits, "group_scales", of_the_neighbour)),
    "the zero point of the neighbouring group": (
        *("int4-g32-asym", ONE),
        changed(digits, "group_zero_points", of_the_neighbour),
    ),
    "rows g and g + 8 change scales": (
        *("int4-g128", ONE),
        changed(digits, "group_scales", lambda right, *given: right(*given)[::-1]),
    ),
    "a zero point that is one too small": (
        "int4-g128",
        FOUR,
        changed(integers.Int4Fragments, "middle", lambda right: right - 1),
    ),
    "the same with digits, of rows": (
        *("int4-asym", ONE),
        changed(digits, "group_zero_points", lambda right, *given: right(*given) + 1),
    ),
    "the vector's sum of the neighbouring group": (
        *("int4-g64", FOUR),
        changed(integers, "kept_sums", lambda right, vectors, index, *given: right(vectors, index ^ 1, *given)),
    ),
    "an upper nibble as large as a lower one": (
        *("int4-g64", FOUR),
        changed(integers.Int4Fragments, "second_factor", lambda right: 1),
    ),
    "two digits change places": (
        *("int4-g128", ONE),
        changed(digits, "_digits", lambda right, *given: [right(*given)[place] for place in (1, 0, 2)]),
    ),
    "digits that are not balanced": ("int4-g128", ONE, changed(digits, "BALANCE", lambda right: 0)),
    "a power of two that each unit has for itself": (
        *("int4-g128", ONE),
        changed(prim, "warp_maximum_u32", lambda right, value: value),
    ),
    "the power of the first token for both": (
        *("int4-g128", TWO),
        changed(digits, "exponent_of_warp", lambda right, pairs, token, tokens: right(pairs, token * 0, tokens)),
    ),
    "the powers of two tokens change places": (
        *("int4-g128", TWO),
        changed(digits.DigitFragments, "_powers", lambda right, *given: right(*given)[::-1]),
    ),
    "what balances the upper nibble's third digit": (
        *("int4-g128", ONE),
        changed(digits, "TOP_OF_HIGH", lambda right: right + 0x01010101),
    ),
    "a code without its upper nibble": (
        *("int8", TWO),
        changed(integers, "LOW_BYTES", lambda right: right & 0x000F000F),
    ),
    "two codes of a word change places with the others": (
        *("fp8", FOUR),
        changed(E4m3Fragments, "converted", lambda right, codes: right(codes)[::-1]),
    ),
    "sums that nobody adds": (
        *("fp8", FOUR),
        changed(e4m3, "add_chains", lambda right, sums, groups, chains: right(sums, groups, chains - 1)),
    ),
    "the power of the neighbouring part": (
        *("fp8", ONE),
        changed(_Powers, "of_columns", lambda right, self, part: right(self, part ^ 1)),
    ),
    "the powers of the neighbouring tokens": (
        *("fp8", {"tokens": 2}),
        changed(_Powers, "of_columns", lambda right, self, *given: right(self, *given)[::-1]),
    ),
    "the factors of rows one tile early": (
        *("fp8", TWO),
        changed(QuantizedFragments, "row_factors", lambda right, self, tiles: right(self, tiles - 1)),
    ),
}
QUICK = ("", "the scale of the neighbouring group", "a zero point that is one too small")
EXHAUSTIVE = (
    *("rows g and g + 8 change scales", "the same with digits, of rows", "two digits change places"),
    *("the powers of two tokens change places", "what balances the upper nibble's third digit"),
    *("the powers of the neighbouring tokens", "an upper nibble as large as a lower one"),
)
"""Of each there is one of its kind that `make test` looks for: scales, zero points, digits, powers of tokens."""


def cases() -> list[Any]:
    marks = {**{name: pytest.mark.exhaustive for name in EXHAUSTIVE}, **{name: () for name in QUICK}}
    return [pytest.param(name, marks=marks.get(name, pytest.mark.slow), id=name or "nothing") for name in BUGS]


@pytest.mark.compiler
@pytest.mark.parametrize("name", cases())
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    format, fields, plant = BUGS[name]
    plant(monkeypatch)
    kernel, layout = product(32, 512, 2, fields, format)
    matrix = rows_of(format, layout.rows, layout.columns)
    # Sizes that differ from part to part and from token to token, so that each has a power of two of its own.
    values = np.random.default_rng(1).standard_normal((kernel.plan.tokens, layout.columns))
    values *= np.exp2(np.arange(layout.columns) // 64 % 5)
    values *= np.exp2(6.0 * np.arange(kernel.plan.tokens))[:, None]
    x = as_bf16(values)
    found = launched(kernel, layout, filled(pack_matrix(layout, matrix)), x)
    wanted = widen(x).astype(np.float64) @ matrix.dequantized().astype(np.float64).T
    assert (relative_error(found, wanted) < MATVEC) == (name == "")


def planted_in_sums(wrong: str, instead: str, behind: str, **how: Any) -> tuple[Any, Any, Any]:
    """A product of two M-tiles a block by bf16 numbers, in which the first `wrong` behind `behind` is something else:
    what was found, and what is right."""
    kernel, layout = product(64, 512, 2, FOUR, "int4-g64", **how)
    start = kernel.text.index(behind)
    assert wrong in kernel.text[start:]
    kernel.text = kernel.text[:start] + kernel.text[start:].replace(wrong, instead, 1)
    matrix = rows_of("int4-g64", layout.rows, layout.columns)
    x = as_bf16(np.random.default_rng(2).standard_normal((kernel.plan.tokens, layout.columns)))
    found = launched(kernel, layout, filled(pack_matrix(layout, matrix)), x)
    return found, widen(x).astype(np.float64) @ matrix.dequantized().astype(np.float64).T


@pytest.mark.compiler
@pytest.mark.parametrize("instead", ["m_tile < 2", pytest.param("m_tile >= 2", marks=pytest.mark.slow)])
def test_the_sums_of_vectors_are_made_beside_the_first_m_tile(instead: str) -> None:
    found, wanted = planted_in_sums("m_tile < 2, matrix", f"{instead}, matrix", "void multiply_m_tiles(")
    assert (relative_error(found, wanted) < MATVEC) == ("<" in instead)


@pytest.mark.slow
@pytest.mark.compiler
def test_lanes_that_do_not_wait_for_the_sums_of_vectors_are_a_race() -> None:
    with pytest.raises(Race, match="read of 8 bytes .* on shared memory .* with write of 4 bytes"):
        planted_in_sums("    warp_barrier();\n  }\n", "  }\n", "void sum_chunk(", sanitize=True)
