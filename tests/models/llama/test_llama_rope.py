"""Rotary frequencies against golden values and the formulas written out one by one."""

import math

import numpy as np
import pytest

from cheetah.models.registry import PRESETS
from cheetah.models.rope import Rope, RopeError, frequencies, rope_table, rotary_order

EXACT = 2e-7  # relative: goldens are given to 8 digits and computed in float32


def plain(theta, head_dim):
    return np.array([theta ** (-2 * k / head_dim) for k in range(head_dim // 2)])


def test_default_and_linear():
    assert frequencies(Rope(5e5), 128) == pytest.approx(plain(5e5, 128), rel=EXACT)
    assert frequencies(Rope(1e4, "linear", 4.0), 64) == pytest.approx(plain(1e4, 64) / 4, rel=EXACT)


def test_llama31_golden():
    scaled = frequencies(PRESETS["llama-3.1-8b"].rope, 128)
    base = plain(5e5, 128)
    assert scaled[:29] == pytest.approx(base[:29], rel=EXACT)
    assert scaled[35:] == pytest.approx(base[35:] / 8, rel=EXACT)
    assert np.all((scaled[29:35] < base[29:35] * 0.999) & (scaled[29:35] > base[29:35] / 7.99))
    golden = {29: 2.1665708e-3, 31: 8.5675141e-4, 34: 1.7850781e-4, 63: 3.0689260e-7}
    for k, value in golden.items():
        assert scaled[k] == pytest.approx(value, rel=EXACT)


def test_llama32_golden():
    scaled = frequencies(PRESETS["llama-3.2-1b"].rope, 64)
    base = plain(5e5, 64)
    assert scaled[:15] == pytest.approx(base[:15], rel=EXACT)
    assert scaled[18:] == pytest.approx(base[18:] / 32, rel=EXACT)
    assert scaled[16] == pytest.approx(4.2955680e-4, rel=EXACT)


def yarn_by_the_formula(theta, head_dim, factor, original, fast=32, slow=1, truncate=True):
    def pair(turns):
        return head_dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    values = []
    for k, f in enumerate(plain(theta, head_dim)):
        ramp = min(max((k - low) / (high - low), 0), 1)
        values.append(f * (1 - ramp) + f / factor * ramp)
    return values


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn(truncate):
    rope = Rope(1e4, "yarn", 4.0, original_max_position_embeddings=2048, truncate=truncate)
    wanted = yarn_by_the_formula(1e4, 128, 4.0, 2048, truncate=truncate)
    assert frequencies(rope, 128) == pytest.approx(wanted, rel=EXACT)


def test_yarn_attention_scale():
    rope = Rope(1e4, "yarn", 4.0, original_max_position_embeddings=2048)
    assert rope.attention_scale() == pytest.approx(0.1 * math.log(4) + 1)
    both = Rope(1e4, "yarn", 4.0, original_max_position_embeddings=2048, mscale=1.0, mscale_all_dim=0.5)
    wanted = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert both.attention_scale() == pytest.approx(wanted)
    given = Rope(1e4, "yarn", 4.0, original_max_position_embeddings=2048, attention_factor=1.25)
    assert given.attention_scale() == 1.25
    assert Rope(1e4, "yarn", 1.0, original_max_position_embeddings=2048).attention_scale() == 1.0


def test_table_is_exact_at_late_positions():
    config = PRESETS["llama-3.1-8b"]
    table = config.rope_table(8192)
    assert table.shape == (8192, 64, 2) and table.dtype == np.float32
    assert np.all(table[0] == [1.0, 0.0])
    for position, k in [(1, 0), (4097, 5), (8191, 0), (8191, 63)]:
        angle = position * float(frequencies(config.rope, 128)[k])
        assert tuple(table[position, k]) == (np.float32(math.cos(angle)), np.float32(math.sin(angle)))


def test_yarn_table_carries_the_attention_scale():
    from dataclasses import replace

    yarn = Rope(1e4, "yarn", 4.0, original_max_position_embeddings=2048)
    table = replace(PRESETS["llama-3.1-8b"], rope=yarn).rope_table(2)
    assert table[0, 0, 0] == np.float32(yarn.attention_scale())


def test_longrope_takes_its_factors_by_the_context():
    rope = PRESETS["phi-4-mini"].rope
    short, long = (frequencies(rope, 128, context) for context in (4096, 4097))
    assert len(short) == len(long) == 48 and short == pytest.approx(plain(1e4, 96), rel=EXACT)
    assert short / long == pytest.approx(np.array(rope.long_factor), rel=1e-6)
    notes = [PRESETS["phi-4-mini"].notes_of_context(context)[0] for context in (4096, 4097)]
    assert "short factors" in notes[0] and "long factors" in notes[1]
    assert PRESETS["llama-3.1-8b"].notes_of_context(4096) == []


def test_the_order_of_heads_rotated_in_part_keeps_pairs_half_a_head_apart():
    order = rotary_order(PRESETS["phi-4-mini"].rope, 128)
    assert sorted(order) == list(range(128))
    assert all(order[64 + pair] - order[pair] == 48 for pair in range(48)), "rotated pairs"
    assert set(order[48:64]) | set(order[112:]) == set(range(96, 128)), "the others"
    assert rope_table(PRESETS["phi-4-mini"].rope, 128, 5)[3, 48:].tolist() == [[1.0, 0.0]] * 16


def test_unsupported_kinds_are_refused_by_name():
    with pytest.raises(RopeError, match="'dynamic' is not supported; supported: default, linear, .*, longrope"):
        Rope(1e4, "dynamic")
