"""The record of quantised rows, by the formats' golden codes, and the names of schemes."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cheetah.models.formats.quantized import (
    SCALE_DTYPES,
    QuantizationError,
    QuantizationScheme,
    QuantizedRows,
    scheme_of_name,
)

SCHEMES = [
    QuantizationScheme("int4", 128),
    QuantizationScheme("int4", 32, symmetric=False),
    QuantizationScheme("int4"),
    QuantizationScheme("int8"),
    QuantizationScheme("fp8"),
    QuantizationScheme("fp8", 128, scales="f32"),
]


def rows(
    kind: str, codes: list[list[int]], scales: list[list[float]], zeros: list[list[int]] | None = None
) -> QuantizedRows:
    scale = np.array(scales, np.float16)
    zero_points = None if zeros is None else np.array(zeros, np.uint8)
    columns = len(codes[0])
    return QuantizedRows(kind, np.array(codes, np.uint8), scale, zero_points, -(-columns // scale.shape[1]))


def test_names_say_kind_group_and_asymmetry() -> None:
    names = ["int4-g128", "int4-g32-asym", "int4", "int8", "fp8", "fp8-block128"]
    assert [scheme.name for scheme in SCHEMES] == names
    assert [scheme_of_name(name, scheme.scales) for name, scheme in zip(names, SCHEMES, strict=True)] == SCHEMES


@pytest.mark.parametrize("name", ["int3", "int4-g0", "int4-block128", "fp8-g128", "fp8-asym", "", "int4-g128 "])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(QuantizationError, match="there is no quantisation"):
        scheme_of_name(name)


def test_int4_codes_count_from_8_or_from_the_zero_point_of_their_group() -> None:
    symmetric = rows("int4", [[0, 8, 15, 9]], [[2.0, 0.5]])
    assert symmetric.dequantized().tolist() == [[-16, 0, 3.5, 0.5]]
    asymmetric = rows("int4", [[0, 8, 15, 9]], [[2.0, 0.5]], [[0, 15]])
    assert asymmetric.dequantized().tolist() == [[0, 16, 0, -3]]


def test_int8_codes_count_from_128() -> None:
    assert rows("int8", [[0, 127, 128, 255]], [[0.25]]).dequantized().tolist() == [[-32, -0.25, 0, 31.75]]


def test_fp8_codes_are_bytes_of_e4m3() -> None:
    # 0x38 = 1, 0x30 = 0.5, 0x08 = 2^-6, 0x01 = 2^-9, 0x7E = 448, 0xFE = -448 (OCP 8-bit floating point, table 1)
    found = rows("fp8", [[0x38, 0x30, 0x08, 0x01, 0x7E, 0xFE]], [[1.0]]).dequantized()
    assert found.tolist() == [[1, 0.5, 2**-6, 2**-9, 448, -448]]


def test_the_last_group_may_be_a_part_of_one() -> None:
    found = QuantizedRows("int4", np.full((2, 5), 9, np.uint8), np.array([[1, 2], [3, 4]], np.float32), None, 3)
    assert found.dequantized().tolist() == [[1, 1, 1, 2, 2], [3, 3, 3, 4, 4]]


@given(st.sampled_from(sorted(SCALE_DTYPES)), st.integers(0, 255), st.integers(0, 255), st.floats(2**-14, 2**10))
def test_scales_of_16_bits_lose_nothing(dtype: str, code: int, zero_point: int, scale: float) -> None:
    scales = np.array([[scale]]).astype(SCALE_DTYPES[dtype])
    record = QuantizedRows("int8", np.array([[code]], np.uint8), scales, np.array([[zero_point]], np.uint8), 1)
    exact = (code - zero_point) * float(scales.astype(np.float64)[0, 0])
    assert record.dequantized()[0, 0] == (exact if dtype != "f32" else np.float32(exact))


def test_shapes_that_do_not_fit_are_refused() -> None:
    codes = np.zeros((2, 8), np.uint8)
    with pytest.raises(QuantizationError, match=r"scales are \[2, 1\], 8 columns in groups of 4 need \[2, 2\]"):
        QuantizedRows("int4", codes, np.ones((2, 1), ml_dtypes.bfloat16), None, 4)
    with pytest.raises(QuantizationError, match="zero points"):
        QuantizedRows("fp8", codes, np.ones((2, 1), np.float32), np.zeros((2, 1), np.uint8), 8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: QuantizationScheme("int3"),
        lambda: QuantizationScheme("int4", 0),
        lambda: QuantizationScheme("int4", scales="f64"),
        lambda: QuantizationScheme("fp8", symmetric=False),
    ],
)
def test_schemes_that_do_not_exist_are_refused(make: Callable[[], QuantizationScheme]) -> None:
    with pytest.raises(QuantizationError):
        make()
