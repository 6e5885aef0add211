"""One model with layers of several kinds, in which everything that attention may do otherwise in a layer is there."""

from __future__ import annotations

from cheetah.models.config_json import FULL, SLIDING
from cheetah.models.layer_kind import AttentionKind, LayerKind, PositionScale
from cheetah.models.llama import LlamaConfig
from cheetah.models.rope import Rope


class JointlyNormed(LlamaConfig):
    """A Llama whose queries, and whose keys, are normalised over all heads together."""

    layer = LayerKind(attention=AttentionKind(head_norms="width"))


class WithSinks(JointlyNormed):
    """The same with a sink for every query head."""

    layer = LayerKind(attention=AttentionKind(head_norms="width", sinks=True))


KINDS = WithSinks(
    *(48, 40, 3, 4, 2, 64, 50),
    max_position_embeddings=256,
    sliding_window=21,
    layer_types=(FULL, SLIDING, SLIDING),
    local_rope=Rope(100.0),
    unrotated_layers=(2,),
    position_scale=PositionScale(0.3, 16),
    attention_scale=0.2,
    attention_soft_cap=3.0,
)
"""A layer that sees all keys, one with a window and angles of its own, one with a window that rotates nothing; queries
are scaled by their position, and logits have a scale of their own, a cap, and sinks beside them."""
