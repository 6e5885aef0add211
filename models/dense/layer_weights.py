"""The weights of a layer as the reference has them: float32, of a checkpoint's tensors, rows of heads in the kernel's
order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from cheetah.models.config import ModelConfig
from cheetah.models.dense.delta import DeltaWeights
from cheetah.models.dense.weights import (
    HEAD_NORMS,
    SINKS,
    bias_tensors,
    biases_of,
    matrix_tensors,
    norms_before,
    norms_behind,
)
from cheetah.models.formats import format_named
from cheetah.models.layer_kind import LayerKind
from cheetah.models.rounding import F32
from cheetah.plan.formats import BF16
from cheetah.plan.products import ROUTER, SHARED_DOWN, SHARED_UP, Product


@dataclass(frozen=True)
class AttentionWeights:
    """Those of a layer's attention. biases: of q, k and v (0: none). head_norms: of queries and keys (None: none).
    sinks: a logit for every query head (None: none). o_bias: of o (0: none). gate: rows as q's (None: none). q and k
    have the rows of each head in the kernel's order (`ModelConfig.rotary_order`)."""

    biases: tuple[F32 | float, ...]
    head_norms: tuple[F32 | None, ...]
    q: F32
    k: F32
    v: F32
    o: F32
    sinks: F32 | None = None
    o_bias: F32 | float = 0.0
    gate: F32 | None = None


@dataclass(frozen=True)
class Layer:
    """One layer's weights in float32. before, behind: the norms before and behind attention, then feed-forward (None:
    none). Weights of norms are what is multiplied with. experts: gate, up and down of each; a single one without a
    router. router_bias, expert_biases: of the router, of gate, up and down of each expert (0: none). shared: gate, up
    and down of the expert that every token has, and the row [1, h] by which it is weighed (none: ())."""

    kind: LayerKind
    mixer: AttentionWeights | DeltaWeights
    before: tuple[F32 | None, ...]
    behind: tuple[F32 | None, ...]
    experts: tuple[tuple[F32, ...], ...]
    router: F32 | None = None
    router_bias: F32 | float = 0.0
    expert_biases: tuple[tuple[F32 | float, ...], ...] = ()
    shared: tuple[F32, ...] = ()


@dataclass(frozen=True)
class LayerTensors:
    """A layer's tensors. weight: one by its name."""

    config: ModelConfig
    layer: int
    weight: Callable[[str], F32]

    def read(self) -> Layer:
        """All of them."""
        config, table = self.config, self.config.table
        before = self._norms(norms_before(config), ("qkv", "gate_up"))
        behind = self._norms(norms_behind(config), ("o", "down"))
        kind = config.layer_kinds[self.layer]
        delta = kind.delta
        mixer = self._attention() if delta is None else DeltaWeights.of_layer(delta, self.layer, self.weight)
        gate_up, down = table.named("gate_up"), table.sliced
        if table.experts is None:
            return Layer(kind, mixer, before, behind, ((*self._parts(gate_up), *self._parts(down)),))
        count = range(table.experts.count)
        experts = tuple((*self._parts(gate_up, expert), *self._parts(down, expert)) for expert in count)
        chooser = table.named(ROUTER)
        router, *shared = self._parts(chooser)
        if shared:
            shared = [*self._parts(table.named(SHARED_UP)), *self._parts(table.named(SHARED_DOWN)), *shared]
        router_bias: F32 | float = 0.0
        biases: tuple[tuple[F32 | float, ...], ...] = ()
        if config.has_expert_biases:
            (router_bias,) = self._biases(chooser)
            biases = tuple((*self._biases(gate_up, expert), *self._biases(down, expert)) for expert in count)
        return Layer(kind, mixer, before, behind, experts, router, router_bias, biases, tuple(shared))

    def _attention(self) -> AttentionWeights:
        config, table = self.config, self.config.table
        onto = table.onto_residual[0]
        (q, k, v), (o,) = self._parts(table.heads), self._parts(onto)
        gate: F32 | None = None
        if config.layer.attention.gated:  # behind each head's query
            q, gate = (
                np.ascontiguousarray(part).reshape(config.query_rows, -1)
                for part in np.split(q.reshape(config.query_heads, 2 * config.head_dim, -1), 2, axis=1)
            )
        biases: tuple[F32 | float, ...] = (0.0,) * 3
        if config.has_biases:
            bias_q, bias_k, bias_v = self._named(bias_tensors(config))
            biases = self._turned(bias_q), self._turned(bias_k), bias_v
        o_bias: F32 | float = 0.0
        if config.has_out_biases:
            (o_bias,) = self._biases(onto)
        head_norms: tuple[F32 | None, ...] = (None, None)
        if config.head_norms is not None:
            head_norms = tuple(self._turned(norm_multiplier(config, one)) for one in self._named(HEAD_NORMS))
        sinks = self._named([SINKS])[0] if config.has_sinks else None
        return AttentionWeights(biases, head_norms, self._turned(q), self._turned(k), v, o, sinks, o_bias, gate)

    def _named(self, names: Iterable[str]) -> list[F32]:
        """Tensors by their names with `{layer}`."""
        return [self.weight(name.format(layer=self.layer)) for name in names]

    def _parts(self, product: Product, expert: int = 0) -> list[F32]:
        """The matrices of a product's sources."""
        config, sources = self.config, product.sources
        names = matrix_tensors(config, product.name, self.layer, expert)
        tensors = [as_multiplied(config, product.name, self.weight(name)) for name in names]
        if product.name in config.interleaved:
            return [tensors[0][number :: len(sources)] for number in range(len(sources))]
        ends = np.cumsum([source.rows for source in sources])[:-1]
        return np.split(tensors[0], ends) if product.name in config.fused else tensors

    def _biases(self, product: Product, expert: int = 0) -> list[F32]:
        """Those of a product's sources."""
        found = [self.weight(name) for name in biases_of(self.config, product, self.layer, expert)]
        if product.name in self.config.interleaved:
            return [found[0][number :: len(product.sources)] for number in range(len(product.sources))]
        return found

    def _turned(self, rows: F32) -> F32:
        """Rows of heads, or one number each, in the order of the kernel's heads."""
        of_heads = rows.reshape(-1, self.config.head_dim, *rows.shape[1:])
        return of_heads[:, self.config.rotary_order].reshape(rows.shape)

    def _norms(self, names: Mapping[str, str], products: Iterable[str]) -> tuple[F32 | None, ...]:
        """What the norms before or behind these products multiply by."""
        found = [names.get(product) for product in products]
        return tuple(None if name is None else norm_multiplier(self.config, *self._named([name])) for name in found)


def norm_multiplier(config: ModelConfig, weight: F32) -> F32:
    """What a norm with this weight multiplies by."""
    return 1 + weight if config.norms.plus_one else weight


def as_multiplied(config: ModelConfig, matrix: str, weight: F32) -> F32:
    """A tensor of a matrix as its weight format keeps it."""
    return format_named(dict(config.weight_formats).get(matrix, BF16.name)).meaning(weight)
