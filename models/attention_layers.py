"""What attention needs of the layers of a model, each distinct thing once, and which of them each layer has: windows,
and with them the KV plans of a launch; tables of the angles by which queries and keys are rotated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.layer_kind import AttentionKind, PositionScale
from cheetah.models.rope import Rope, rope_table


@dataclass(frozen=True)
class Rotation:
    """How queries or keys of a layer are rotated: by `rope`, or not at all; then multiplied by `scale`, if there is
    one."""

    rope: Rope | None
    scale: PositionScale | None = None

    def table(self, head_dim: int, positions: int) -> NDArray[np.float32]:
        """Cosine and sine of every position's angles, times the scale: float32 [positions, head_dim/2, 2]."""
        table = rope_table(self.rope, head_dim, positions)
        return table if self.scale is None else table * self.scale.factors(positions)[:, None, None]


def of_queries(kind: AttentionKind) -> Rotation:
    return Rotation(kind.rope, kind.position_scale)


def of_keys(kind: AttentionKind) -> Rotation:
    return Rotation(kind.rope)


def rotations(kinds: Iterable[AttentionKind]) -> tuple[Rotation, ...]:
    """The distinct tables of layers, in the order of their first use, by queries and then by keys."""
    return tuple(dict.fromkeys(rotation for kind in kinds for rotation in (of_queries(kind), of_keys(kind))))


@dataclass(frozen=True)
class AttentionLayers:
    """The attention of each layer of a model, in a context of so many tokens."""

    kinds: Sequence[AttentionKind]
    max_context: int

    @property
    def common(self) -> AttentionKind:
        """What all layers have in common; windows and rotations are those of the first."""
        return self.kinds[0]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct numbers of keys that a query sees, in the order of their first layers; a KV plan for each."""
        return tuple(dict.fromkeys(kind.window_of(self.max_context) for kind in self.kinds))

    @property
    def window_of_layer(self) -> tuple[int, ...]:
        """Which of `windows` each layer has."""
        return _places((kind.window_of(self.max_context) for kind in self.kinds), self.windows)

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """The distinct tables."""
        return rotations(self.kinds)

    @property
    def rotates_alike(self) -> bool:
        """Whether queries and keys of every layer have the same table."""
        return self.query_rotations == self.key_rotations

    @property
    def query_rotations(self) -> tuple[int, ...]:
        """Which of `rotations` each layer's queries have."""
        return _places(map(of_queries, self.kinds), self.rotations)

    @property
    def key_rotations(self) -> tuple[int, ...]:
        """Which of `rotations` each layer's keys have."""
        return _places(map(of_keys, self.kinds), self.rotations)

    def rope_tables(self, head_dim: int) -> NDArray[np.float32]:
        """The tables for every position one after the other; of a single one, itself: float32 [positions, head_dim/2,
        2], or [tables, positions, head_dim/2, 2]."""
        tables = [one.table(head_dim, self.max_context) for one in self.rotations]
        return tables[0] if len(tables) == 1 else np.stack(tables)


def _places(of_layers: Iterable[Any], distinct: Sequence[Any]) -> tuple[int, ...]:
    return tuple(distinct.index(one) for one in of_layers)
