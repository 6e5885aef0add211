"""The family of dense decoders as `ModelFamily` wants it: every part is a module of this folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.dense import weights
from cheetah.models.dense.pack_weights import pack_all
from cheetah.models.family import (
    HeadProgram,
    Merged,
    ModelFamily,
    Packing,
    PromptProgram,
    ReferenceModel,
    StepProgram,
    Tensors,
)
from cheetah.models.rounding import F32, Rounding, exact
from cheetah.plan import Gpu, Plan, StepMatrices, step_matrices


@dataclass(frozen=True)
class DenseFamily(ModelFamily):
    """config_type: states what the family does otherwise than Llama. presets: published models by name."""

    config_type: type[ModelConfig]
    presets: Mapping[str, ModelConfig]
    embedding_tensor = weights.EMBEDDING
    head_tensor = weights.HEAD
    unread: tuple[str, ...] = ()
    kept_exact: tuple[str, ...] = ()

    def tensor_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        return weights.tensor_shapes(config)

    def merged_tensors(self, config: ModelConfig) -> dict[str, Merged]:
        return weights.merged_tensors(config)

    def shape_meaning(self, tensor: str) -> str:
        return weights.shape_meaning(tensor)

    def layer_of(self, tensor: str) -> int | None:
        found = re.match(weights.LAYER_PATTERN, tensor)
        return int(found[1]) if found else None

    def matrix_modules(self, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        return weights.matrix_modules(config)

    def in_m_tile_order(
        self, config: ModelConfig, matrix: str, layer: int, read: Callable[[str], NDArray[Any]]
    ) -> NDArray[Any]:
        return weights.in_m_tile_order(config, matrix, layer, read)

    def matrices(self, config: ModelConfig, plan: Plan, gpu: Gpu) -> StepMatrices:
        return step_matrices(config.shape, plan, gpu)

    def model_buffers(self, config: ModelConfig) -> tuple[str, ...]:
        return ("weights", "norms", "embedding", "rope", *weights.vector_shapes(config))

    def tables(self, config: ModelConfig, plan: Plan) -> dict[str, NDArray[Any]]:
        return {"rope": config.attention_layers(plan.max_context).rope_tables(config.head_dim)}

    def pack_weights(self, config: ModelConfig, matrices: StepMatrices, packing: Packing) -> None:
        pack_all(config, matrices, packing)

    @property
    def program(self) -> StepProgram:
        from cheetah.models.dense import program

        return program

    @property
    def prompt_program(self) -> PromptProgram:
        from cheetah.models.dense import prompt

        return prompt

    @property
    def head_program(self) -> HeadProgram:
        from cheetah.models.dense import head

        return head

    def reference(
        self,
        config: ModelConfig,
        tensors: Tensors,
        rounding: Rounding = exact,
        *,
        cached: Rounding | None = None,
        kv_scales: F32 | None = None,
    ) -> ReferenceModel:
        from cheetah.models.dense.reference import Reference

        return Reference(config, tensors, rounding, cached=cached, kv_scales=kv_scales)
