"""Products with matrices whose columns lie in an order of their own, while vectors come in theirs."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from cheetah.emulator import EmulatorError, allocate, explore
from cheetah.models.act_order import RowsInOrder, places_of_columns
from cheetah.models.formats import pack_matrix
from cheetah.models.rounding import widen
from cheetah.plan import VECTOR_COLUMNS, MatrixLayout
from cheetah.plan.formats import DIGITS, HALVES, RAISED, STAGGERED
from cheetah.plan.index import round_up
from tests.blocks.small_kernel import SmallKernel, filled
from tests.blocks.test_matvec import ORDERED, in_fragment_order, product
from tests.blocks.test_quantized_products import rows_of
from tests.program.rig import as_bf16, relative_error
from tests.tolerances import MATVEC

Case = tuple[str, int, int, str]
# format, columns, tokens, as what vectors are kept
CASES: list[Case] = [
    ("int4-g128", 1280, 1, DIGITS),
    ("int4-g32-asym", 1280, 2, DIGITS),
    ("int4-g64", 1000, 4, STAGGERED),
    ("int4-g64", 1024, 8, STAGGERED),
    ("int8-g32-asym", 384, 16, RAISED),
    ("int8-g64", 333, 1, RAISED),
    ("fp8", 1280, 1, HALVES),
]


@cache
def compiled(case: Case, bug: tuple[str, str] | None = None) -> tuple[SmallKernel, MatrixLayout]:
    name, columns, tokens, kind = case
    kernel, layout = product(40, columns, 2, {"tokens": tokens}, name, parameters=ORDERED, bug=bug)
    assert layout.vector_kind(tokens) == kind
    return kernel, layout


def error(case: Case, bug: tuple[str, str] | None = None, scheduler: str = "round_robin", seed: int = 0) -> float:
    found, wanted = launched(case, bug, scheduler, seed)
    return relative_error(found, wanted)


def launched(
    case: Case, bug: tuple[str, str] | None = None, scheduler: str = "round_robin", seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's product and float64's, of vectors whose elements differ in size."""
    kernel, layout = compiled(case, bug)
    draw = np.random.default_rng(3)
    matrix, order = rows_of(case[0], layout.rows, layout.columns), draw.permutation(layout.columns)
    values = draw.standard_normal((kernel.plan.tokens, layout.columns)) * np.exp2(np.arange(layout.columns) % 7)
    padded = np.zeros((len(values), round_up(layout.columns, VECTOR_COLUMNS)), np.uint16)
    padded[:, : layout.columns] = as_bf16(values)
    arguments: dict[str, Any] = {
        "weights": filled(pack_matrix(layout, matrix)),
        "x": filled(in_fragment_order(padded)),
        "y": allocate((len(values), layout.rows), np.float32),
        "column_count": len(values),
        "places": filled(places_of_columns(order, padded.shape[1])),
    }
    kernel.launch(arguments, scheduler, seed)
    in_order = widen(padded)[:, order].astype(np.float64)
    return arguments["y"], in_order @ matrix.dequantized().astype(np.float64).T


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_product_against_float64(case: Case) -> None:
    assert error(case) < MATVEC
    report = explore(lambda scheduler, seed: launched(case, None, scheduler, seed)[0], range(2))
    assert report.ok, str(report)


TOGETHER = CASES[3]
BUGS: dict[str, tuple[Case, tuple[str, str]]] = {
    "digits are made before all elements have come": (
        *(CASES[0],),
        ("  named_barrier(1, CONSUMERS);\n  convert", "  convert"),
    ),
    "digits are stored over elements that others read": (
        *(CASES[0],),
        ("  named_barrier(1, CONSUMERS);\n  store_digits", "  store_digits"),
    ),
    "a row that is read elsewhere": (TOGETHER, ("/ 32 * 32 + ((", "/ 32 * 32 + 0 * ((")),
    "rows of the neighbouring element": (TOGETHER, ("lane / 8 * 2 + lane % 2]", "lane / 8 * 2 + (lane + 1) % 2]")),
    "two neighbours change places": (CASES[0], ("elements[of_pair & 65535]", "elements[(of_pair & 65535) ^ 1]")),
}


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found(name: str) -> None:
    case, bug = BUGS[name]

    def find() -> None:
        for scheduler, seed in (("round_robin", 0), *(("random", seed) for seed in range(4)), ("priority", 1)):
            assert error(case, bug, scheduler, seed) < MATVEC

    with pytest.raises((EmulatorError, AssertionError)):
        find()


@pytest.mark.parametrize("name", ["int4-g64-asym", "fp8"])
def test_rows_in_another_order(name: str) -> None:
    matrix, order = rows_of(name, 600, 64), np.random.default_rng(0).permutation(600)

    class Parts:
        shape = matrix.shape

        def __getitem__(self, part: slice) -> Any:
            return matrix.with_planes(lambda plane: plane[part])

    found = RowsInOrder(Parts(), order)
    assert found.shape == (600, 64)
    np.testing.assert_array_equal(found[37:250].dequantized(), matrix.dequantized()[order[37:250]])
    bits = as_bf16(matrix.dequantized())
    np.testing.assert_array_equal(RowsInOrder(bits, order)[500:600], bits[order[500:]])
