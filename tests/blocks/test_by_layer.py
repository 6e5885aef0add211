"""What differs from layer to layer, as an expression: evaluated by folding it for every layer's number."""

from __future__ import annotations

import numpy as np
import pytest

from cheetah.blocks.by_layer import by_layer, chosen
from cheetah.lang import ty
from cheetah.lang.nodes import Literal

PATTERNS = {
    "five and one": [0, 0, 0, 0, 0, 1] * 4 + [0, 0],
    "in turns": [1, 0] * 13,
    "one of its own kind": [0] * 7 + [3] + [0] * 20,
    "far from each other": [7, 1 << 30, 7, 7, 1 << 30],
    "three kinds": [0, 1, 2, 2] * 5,
    "no pattern": np.random.default_rng(0).integers(0, 2, 100).tolist(),
    "no pattern of five kinds": np.random.default_rng(1).integers(0, 5, 61).tolist(),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_every_layer_has_its_number(name: str) -> None:
    numbers = PATTERNS[name]
    found = [by_layer(numbers, ty.u32(layer)) for layer in range(len(numbers))]
    assert all(isinstance(one, Literal) for one in found)
    assert [one.value for one in found] == numbers


def test_what_is_the_same_in_all_layers_is_a_number() -> None:
    assert by_layer([4, 4, 4], ty.u32(1)) == 4
    assert chosen(["first", "second"], 1) == "second"
