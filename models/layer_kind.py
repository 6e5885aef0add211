"""What a layer of a decoder does, as a value: which norms, which attention, which feed-forward, which multipliers.

A configuration says so of each of its layers (`ModelConfig.layer_kinds`); layers that are alike share a value. All who
need to know how a layer differs from Llama's ask here: the meaning, the tensors of a checkpoint, the kernels, the plans
of attention. The defaults are Llama's. Shapes and weights are no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cheetah.models.rope import Rope


@dataclass(frozen=True)
class Norms:
    """The RMSNorms of a layer's two sublayers, attention and feed-forward.

    before: of what a sublayer takes from the residual stream; without it the stream itself is taken. after: of what a
    sublayer makes, before it is added to the stream. plus_one: what is normalised is multiplied by 1 + weight instead
    of by weight, in all norms of the model: those of heads and the last one too.
    """

    before: bool = True
    after: bool = False
    plus_one: bool = False


@dataclass(frozen=True)
class PositionScale:
    """Queries at `position` are multiplied by 1 + beta * ln(1 + floor(position / context)), after they are rotated."""

    beta: float
    context: int

    def factors(self, positions: int) -> NDArray[np.float32]:
        """Of each of so many positions, float32: computed in float64, rounded once."""
        return (1 + self.beta * np.log1p(np.arange(positions) // self.context)).astype(np.float32)


@dataclass(frozen=True)
class AttentionKind:
    """What attention does in a layer.

    window: so many keys a query sees, its own included; None: all before it. rope: how queries and keys are rotated;
    None: they are not. scale: what q.k is multiplied by; None: head_dim ** -0.5. soft_cap: logits l become
    soft_cap * tanh(l / soft_cap). sinks: every query head has one more logit, whose key has no value. head_norms: an
    RMSNorm of queries and of keys before they are rotated, "each" over every head by itself with one weight [head_dim]
    for all heads, "width" over all heads together with a weight for every row. biases: q, k and v have them;
    out_biases: o has. position_scale: of the queries. gated: what a head makes is multiplied by the logistic function
    of a gate, an element each, whose rows lie behind those of the head's query. causal: a query sees no key behind its
    own; else all of those that a step has beside it.
    """

    window: int | None = None
    rope: Rope | None = field(default_factory=Rope)
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    head_norms: Literal["each", "width"] | None = None
    biases: bool = False
    out_biases: bool = False
    position_scale: PositionScale | None = None
    gated: bool = False
    causal: bool = True

    def window_of(self, max_context: int) -> int | None:
        """`window`, but None where a context of so many tokens never has more keys."""
        return self.window if self.window is not None and self.window < max_context else None


@dataclass(frozen=True)
class DeltaNet:
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2025): attention whose memory of all tokens before is one matrix
    [key_dim, value_dim] a value head.

    key_heads: of queries and of keys; value_heads, a multiple: consecutive ones share a key head. taps: so many tokens,
    the last its own, are what a token's query, key and value are made of, channel by channel. by_key_heads: files have
    the rows of all matrices but the last in two, those of one key head with its value heads after another's.
    """

    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    taps: int = 4
    by_key_heads: bool = False

    @property
    def key_rows(self) -> int:
        """Rows of the queries, and of the keys."""
        return self.key_heads * self.key_dim

    @property
    def value_rows(self) -> int:
        """Rows of the values, of their gates, and of what all heads make."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Rows of queries, keys and values."""
        return 2 * self.key_rows + self.value_rows


@dataclass(frozen=True)
class Routing:
    """A feed-forward of `experts`, of which a token is given to the `chosen` with the highest logits, of equal ones to
    the lowest. What they make is added up, each times the token's weight: the softmax of the logits of all experts, or,
    where it is `normalised`, of the chosen alone. biases: the router and all matrices of the experts have them. shared:
    the width of one more expert, which every token has, times the logistic function of a product of its own; 0: none.
    """

    experts: int
    chosen: int
    normalised: bool = True
    biases: bool = False
    shared: int = 0


@dataclass(frozen=True)
class ClampedGate:
    """In the place of activation(gate) * up: gate is at most `limit`, up at most as far from 0, and what they make is
    (up + 1) * gate times the logistic function of alpha * gate."""

    alpha: float
    limit: float

    def __str__(self) -> str:
        return f"(up + 1) * gate * sigmoid({self.alpha:g} gate), both clamped at {self.limit:g}"


@dataclass(frozen=True)
class LayerKind:
    """What a layer does. activation: of the gate, "silu" or the tanh form of "gelu"; or "relu2", which is no gate's:
    the square of what of an only product is above 0. clamped_gate: in its place. residual_multiplier: of what a
    sublayer adds to the residual stream. routing: of a feed-forward of experts; None: it is one for all tokens. delta:
    in the place of attention."""

    norms: Norms = Norms()
    attention: AttentionKind = AttentionKind()
    activation: Literal["silu", "gelu", "relu2"] = "silu"
    clamped_gate: ClampedGate | None = None
    residual_multiplier: float = 1.0
    routing: Routing | None = None
    delta: DeltaNet | None = None

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward has a gate beside the product that it is multiplied with."""
        return self.activation != "relu2"
