"""Layers are told apart by what they do: kinds are shared, and numbered by their first layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import FULL, SLIDING
from cheetah.models.registry import PRESETS


def alternating() -> ModelConfig:
    """Windows in every layer but each third one, which rotates nothing."""
    types = (SLIDING, SLIDING, FULL, SLIDING, SLIDING)
    one = PRESETS["llama-3.2-1b"]
    return replace(one, layers=5, sliding_window=8, layer_types=types, unrotated_layers=(2,))


def test_kinds_are_numbered_by_their_first_layer() -> None:
    config = alternating()
    assert config.kind_of_layer == (0, 0, 1, 0, 0)
    assert [kind.attention.window for kind in config.kinds] == [8, None]
    assert [config.kinds[number] for number in config.kind_of_layer] == list(config.layer_kinds)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b", "qwen2.5-7b", "mistral-7b-v0.3"])
def test_layers_of_the_plainest_families_are_all_alike(name: str) -> None:
    config = PRESETS[name]
    (kind,) = config.kinds
    assert config.kind_of_layer == (0,) * config.layers
    assert kind.attention.rope == config.rope
    assert kind.attention.biases == config.has_biases == name.startswith("qwen2")
    assert kind.attention.head_norms == config.head_norms == ("each" if name.startswith("qwen3") else None)


def test_the_window_of_a_model_is_that_of_the_layers_that_see_most() -> None:
    assert alternating().window(1024) is None
    windowed = replace(PRESETS["mistral-7b-v0.3"], sliding_window=16)
    assert windowed.window(1024) == 16
    assert windowed.window(16) is None  # such a context never has more keys
