"""Rounding to a scheme: no code is nearer, clipping never has more error, and odd rows have scales too."""

import numpy as np
import pytest

from cheetah.models.formats.nearest import nearest_rows
from cheetah.models.formats.quantized import QuantizationError, scheme_of_name

NAMES = ["int4-g32", "int4-g32-asym", "int4", "int4-asym", "int8", "int8-g32-asym", "fp8", "fp8-block32"]


def drawn(seed=0, rows=64, columns=96):
    values = np.random.default_rng(seed).standard_normal((rows, columns)) * 0.05
    return values.astype(np.float32)


def block_rows(name):
    return 32 if "block" in name else None


@pytest.mark.parametrize("name", NAMES)
def test_the_error_is_at_most_half_a_step(name):
    values = drawn()
    rows = nearest_rows(values, scheme_of_name(name, "f32"), block_rows=block_rows(name))
    scales = rows.scales.repeat(rows.group_columns, 1)
    error = np.abs(rows.dequantized() - values)
    if name.startswith("fp8"):
        assert np.all(error <= np.maximum(np.abs(values) / 16, scales * 2.0**-10) * 1.0001)
    else:
        # With an odd number of steps the largest magnitude lies half a step behind the last code; a zero point is a
        # whole number, which costs its range another half.
        assert np.all(error <= scales * (1.01 if "asym" in name else 0.51))
        assert np.mean(error <= scales * 0.501) > 0.9


@pytest.mark.parametrize("name", NAMES)
def test_clipping_has_no_more_error(name):
    values = drawn(1)
    values[3, 5] = 1.0  # far out
    plain, clipped = (
        nearest_rows(values, scheme_of_name(name, "bf16"), clip=clip, block_rows=block_rows(name))
        for clip in (False, True)
    )
    errors = [np.square(rows.dequantized() - values).sum(1) for rows in (plain, clipped)]
    if "block" not in name:
        assert np.all(errors[1] <= errors[0] * 1.000001)
    assert errors[1].sum() <= errors[0].sum()
    assert name.startswith(("fp8", "int8")) or errors[1].sum() < 0.95 * errors[0].sum()


def test_rows_of_an_fp8_block_share_its_scale():
    rows = nearest_rows(drawn(rows=80), scheme_of_name("fp8-block32", "bf16"), clip=True, block_rows=32)
    blocks = rows.scales.astype(np.float32)
    assert np.array_equal(blocks, blocks[[0] * 32 + [32] * 32 + [64] * 16])


@pytest.mark.parametrize("name", NAMES)
def test_zeros_have_a_scale_and_stay_zeros(name):
    values = drawn()
    values[7] = 0
    values[9, :32] = 0
    rows = nearest_rows(values, scheme_of_name(name, "bf16"), block_rows=block_rows(name))
    assert np.all(rows.scales > 0)
    assert np.all(rows.dequantized()[7] == 0) and np.all(rows.dequantized()[9, :32] == 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_only_numbers_can_be_rounded(value):
    values = drawn()
    values[2, 5] = value
    with pytest.raises(QuantizationError, match=f"row 2, column 5 is {value}: only numbers"):
        nearest_rows(values, scheme_of_name("int4-g32"))


def test_the_last_group_may_be_a_part_of_one():
    values = drawn()
    rows = nearest_rows(values, scheme_of_name("int4-g64-asym", "f32"), clip=True)
    alone = nearest_rows(np.ascontiguousarray(values[:, 64:]), scheme_of_name("int4-asym", "f32"), clip=True)
    assert rows.shape == values.shape and rows.scales.shape == (64, 2)
    assert np.array_equal(rows.dequantized()[:, 64:], alone.dequantized())
