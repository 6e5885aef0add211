"""The layer that Qwen3.5 and Qwen3-Next have to draft (multi-token prediction, `mtp` in their files).

    x = fc([norm_e(embedding of token i + 1) ; norm_h(state i)]),    logits of token i + 2 = head(norm(layer(x)))

A state is what the model's last norm makes, or, behind tokens that are drafted, what `norm` here has made. The layer is
one of the model's with attention, and has keys and values of its own; embedding and head are the model's.

Kernels know three things otherwise. `fc` is two matrices, of the embedding and of the state. In the place of the
embedding lies what norm_e makes of it (`cheetah.models.dense.token_rows`). And what is kept of the model is what its
last layer leaves, before its last norm: that one's weights are here too, its 1/rms the norm behind it divides out
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import ConfigError, Dialect
from cheetah.models.dense import weights
from cheetah.models.dense.family import DrafterFamily
from cheetah.models.dense.token_rows import Columns, NormedRows
from cheetah.models.dense.weights import EMBEDDING, FINAL_NORM, HEAD, STATE_NORM
from cheetah.models.drafter import LAYER, Drafter
from cheetah.models.family import Packing
from cheetah.models.layer_kind import AttentionKind, LayerKind, Norms
from cheetah.models.rounding import widen
from cheetah.plan import StepMatrices
from cheetah.plan.products import SHARED_DOWN, SHARED_UP

FC = "fc.weight"
HALVES = tuple(f"{LAYER}fc_{given}.weight" for given in ("token", "state"))
"""Of it, as they are packed."""
LM_HEAD = "lm_head"
_QUANTISED = ("qkv", "o", "gate_up", "down", SHARED_UP, SHARED_DOWN)
EMBEDDING_NORM = "pre_fc_norm_embedding.weight"
HEAD_FORMAT = "int4-g128"
"""Of the copy of the model's head, made when it is loaded: a draft changes no token, and the head is most of what one
reads."""
_MEANING = {
    FC: "[hidden_size, 2 * hidden_size]",
    **dict.fromkeys((EMBEDDING_NORM, weights.STATE_BEFORE_FC, STATE_NORM), "[hidden_size]"),
}


class MtpConfig(ModelConfig):
    """`drafter` is always there; all sizes are the model's. The head is a matrix of its own, also where the model's is
    the embedding."""

    dialect = Dialect("qwen3_5_mtp", "Qwen3_5MTP")
    layer = LayerKind(Norms(plus_one=True), AttentionKind(head_norms="each", gated=True))
    modules = {name: name for name in ("fc_token", "fc_state")}  # noqa: RUF012 (a ClassVar of ModelConfig)


def drafter_of(model: ModelConfig) -> MtpConfig:
    """The configuration of the layer that drafts for a model, in bf16 but for its copy of the head; ConfigError where
    kernels know of none."""
    if model.delta is None:
        raise ConfigError(
            f"{model.dialect.title} has no layer that drafts which is read here: those of Qwen3.5 and Qwen3-Next are "
            "(method mtp)"
        )
    return MtpConfig(
        *(model.hidden_size, model.intermediate_size, 1, model.query_heads, model.kv_heads, model.head_dim),
        model.vocab_size,
        rms_norm_eps=model.rms_norm_eps,
        max_position_embeddings=model.max_position_embeddings,
        rope=model.rope,
        routing=model.routing,
        drafter=Drafter((model.layers - 1,), model.vocab_size, norm_output=True, joins_residual=True),
        weight_formats=((LM_HEAD, HEAD_FORMAT),),
    )


def quantised_as(drafter: ModelConfig, formats: Iterable[tuple[str, str]]) -> ModelConfig:
    """A drafter whose layer has these formats, by matrices; `fc` is bf16."""
    own = tuple((matrix, name) for matrix, name in formats if matrix in _QUANTISED)
    return replace(drafter, weight_formats=(*own, *drafter.weight_formats))


def tensors_of_model(model: ModelConfig) -> dict[str, str]:
    """The tensors that are the model's where a file has none beside it, by their names here, and there."""
    return {EMBEDDING: EMBEDDING, HEAD: weights.head_tensor(model), STATE_NORM: FINAL_NORM}


@dataclass(frozen=True)
class MtpFamily(DrafterFamily):
    """What the layer is made of, as tensors of a file and as buffers of a kernel."""

    def tensor_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Embedding, head and `STATE_NORM` are the model's."""
        hidden = config.hidden_size
        shapes = super().tensor_shapes(config)
        for half in HALVES:
            del shapes[half]
        return shapes | {FC: (hidden, 2 * hidden), EMBEDDING_NORM: (hidden,), STATE_NORM: (hidden,)}

    def shape_meaning(self, tensor: str) -> str:
        return _MEANING.get(tensor) or super().shape_meaning(tensor)

    def pack_weights(self, config: ModelConfig, matrices: StepMatrices, packing: Packing) -> None:
        super().pack_weights(config, matrices, _as_packed(config, packing))


def _as_packed(config: ModelConfig, packing: Packing) -> Packing:
    """Reads for the packing of its weights."""
    read, hidden = packing.rows or packing.tensor, config.hidden_size

    def rows(name: str) -> Any:
        if name == EMBEDDING:
            return NormedRows(read(EMBEDDING), 1 + widen(packing.tensor(EMBEDDING_NORM)), config.rms_norm_eps)
        if name in HALVES:
            first = HALVES.index(name) * hidden
            return Columns(read(FC), slice(first, first + hidden))
        return read(name)

    return replace(packing, rows=rows)


FAMILY = MtpFamily(MtpConfig, {})
