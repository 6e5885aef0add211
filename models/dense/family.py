"""What a family of models gives to the generator, the runtime, the tools and the command line.

They know a model as a `ModelConfig` and ask everything else of its family (`cheetah.models.registry.family_of`): which
tensors a checkpoint has, how they become the kernel's buffers, and what the model means in float32. All families are
dense decoders: each states what it does otherwise as values of its configuration. The kernels are written by
`program`, `prompt` and `head` of this folder, for all alike; the runtime works without them, and without the language.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.dense import weights
from cheetah.models.dense.delta import number_modules
from cheetah.models.dense.pack_weights import pack_all
from cheetah.models.drafter import TOKEN_IDS
from cheetah.models.family import Merged, Packing, Tensors
from cheetah.models.rounding import F32, Rounding, exact
from cheetah.plan import Plan, StepMatrices
from cheetah.plan.products import ROUTER

if TYPE_CHECKING:
    from cheetah.models.dense.reference import Reference


@dataclass(frozen=True)
class DenseFamily:
    """config_type: states what the family does otherwise than Llama. presets: published models by name. unread: what
    names begin with of tensors that a file may have and nobody reads. kept_exact: what names end with of tensors whose
    numbers are taken as they are stored, while others are rounded to bf16."""

    config_type: type[ModelConfig]
    presets: Mapping[str, ModelConfig]
    embedding_tensor = weights.EMBEDDING
    head_tensor = weights.HEAD
    unread: tuple[str, ...] = ()
    kept_exact: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """model_type in config.json."""
        return self.config_type.dialect.model_type

    def tensor_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor a checkpoint must hold, with its shape ([out, in], row-major). A tied head is not among them."""
        return weights.tensor_shapes(config)

    def merged_tensors(self, config: ModelConfig) -> dict[str, Merged]:
        """Tensors that a checkpoint may have in the place of those of `tensor_shapes`, or of their quantised parts."""
        return weights.merged_tensors(config)

    def shape_meaning(self, tensor: str) -> str:
        """What of config.json makes a tensor's shape, for messages."""
        return weights.shape_meaning(tensor)

    def layer_of(self, tensor: str) -> int | None:
        """The layer that a tensor of this name would belong to; None for one of no layer."""
        found = re.match(weights.LAYER_PATTERN, tensor)
        return int(found[1]) if found else None

    def matrix_modules(self, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        """The linear layers that make each matrix, as checkpoints name them; `{layer}` stands for a layer's number,
        `{expert}` for an expert's. A tied head is no linear layer."""
        return weights.matrix_modules(config)

    def in_m_tile_order(
        self, config: ModelConfig, matrix: str, layer: int, read: Callable[[str], NDArray[Any]]
    ) -> NDArray[Any]:
        """Rows of a matrix that is no expert's as they are packed, up to whole M-tiles, with zeros behind the last; of
        what `read` gives of its weights: [rows, any columns]."""
        return weights.in_m_tile_order(config, matrix, layer, read)

    def never_quantised(self, config: ModelConfig) -> tuple[str, ...]:
        """The linear layers, below a layer, that are bf16 in all files: those that choose among experts, and those of
        the numbers of heads of Gated DeltaNet."""
        names = self.matrix_modules(config).get(ROUTER, ())
        numbers = () if config.delta is None or not config.delta_layers else number_modules(config.delta)
        return tuple(name.partition("{layer}.")[2] for name in (*names, *numbers))

    def model_buffers(self, config: ModelConfig) -> tuple[str, ...]:
        """The kernel's buffers that hold the model: filled once, by `tables` and `pack_weights`, and never written."""
        return ("weights", "norms", "embedding", "rope", *weights.vector_shapes(config))

    def tables(self, config: ModelConfig, plan: Plan) -> dict[str, NDArray[Any]]:
        """What the kernel reads beside the checkpoint's tensors, by buffer: the rotary table."""
        return {"rope": config.attention_layers(plan.max_context).rope_tables(config.head_dim)}

    def pack_weights(self, config: ModelConfig, matrices: StepMatrices, packing: Packing) -> None:
        """Pack every tensor and hand the bytes out, in the calling thread."""
        pack_all(config, matrices, packing)

    def reference(
        self,
        config: ModelConfig,
        tensors: Tensors,
        rounding: Rounding = exact,
        *,
        cached: Rounding | None = None,
        kv_scales: F32 | None = None,
    ) -> Reference:
        """The meaning; see `Reference`."""
        from cheetah.models.dense.reference import Reference

        return Reference(config, tensors, rounding, cached=cached, kv_scales=kv_scales)


@dataclass(frozen=True)
class DrafterFamily(DenseFamily):
    """What one is made of that drafts by hidden states of another model."""

    def model_buffers(self, config: ModelConfig) -> tuple[str, ...]:
        knows_all = config.drafter is not None and config.drafter.joins_residual
        return super().model_buffers(config) if knows_all else (*super().model_buffers(config), TOKEN_IDS)

    def reference(self, config: ModelConfig, *arguments: Any, **keywords: Any) -> NoReturn:
        raise NotImplementedError("what drafts means something beside hidden states alone")
