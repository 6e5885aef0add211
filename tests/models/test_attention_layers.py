"""Windows and tables of angles of layers that differ."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cheetah.models.attention_layers import Rotation
from cheetah.models.layer_kind import AttentionKind, LayerKind, PositionScale
from cheetah.models.llama import LlamaConfig
from cheetah.models.rope import Rope, rope_table

NEAR, FAR = AttentionKind(window=16, rope=Rope(1000.0)), AttentionKind(rope=Rope(50000.0))
SCALED = AttentionKind(rope=Rope(50000.0), position_scale=PositionScale(0.5, 4))
UNROTATED = AttentionKind(window=64, rope=None)


@dataclass(frozen=True)
class Mixed(LlamaConfig):
    pattern: tuple[AttentionKind, ...] = field(default=())

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return tuple(LayerKind(attention=self.pattern[layer % len(self.pattern)]) for layer in range(self.layers))


def mixed(*pattern: AttentionKind) -> Mixed:
    return Mixed(48, 40, 6, 2, 1, 64, 50, max_position_embeddings=256, pattern=pattern)


def test_windows_within_a_context() -> None:
    config = mixed(NEAR, FAR, UNROTATED)
    assert config.shape.windows == (16, None, 64)
    layers = config.attention_layers(100)
    assert (layers.windows, layers.window_of_layer) == ((16, None, 64), (0, 1, 2) * 2)
    layers = config.attention_layers(64)  # a window of as many keys as there are is none
    assert (layers.windows, layers.window_of_layer) == ((16, None), (0, 1, 1) * 2)
    assert config.attention_layers(16).windows == (None,)


def test_each_distinct_rotation_has_a_table() -> None:
    config = mixed(NEAR, FAR, SCALED, UNROTATED)
    layers = config.attention_layers(100)
    assert config.shape.rotations == len(layers.rotations) == 4
    assert layers.query_rotations == (0, 1, 2, 3, 0, 1)
    assert layers.key_rotations == (0, 1, 1, 3, 0, 1)
    assert not layers.rotates_alike and mixed(NEAR, FAR).attention_layers(100).rotates_alike
    tables = config.attention_layers(9).rope_tables(64)
    plain = rope_table(FAR.rope, 64, 9)
    assert tables.shape == (4, 9, 32, 2) and tables.dtype == np.float32
    assert np.array_equal(tables[1], plain)
    factors = 1 + 0.5 * np.log(1 + np.array([0, 0, 0, 0, 1, 1, 1, 1, 2]))
    np.testing.assert_allclose(tables[2], plain * factors[:, None, None], rtol=1e-6)
    assert np.array_equal(tables[3], np.broadcast_to(np.float32([1, 0]), (9, 32, 2)))


def test_one_table_has_no_dimension_of_tables() -> None:
    config = LlamaConfig(48, 40, 6, 2, 1, 64, 50)
    assert config.shape.rotations == 1
    assert np.array_equal(config.attention_layers(9).rope_tables(64), Rotation(config.rope).table(64, 9))
