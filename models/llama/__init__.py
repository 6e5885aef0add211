"""Llama 3.x (and 2): the plainest dense decoder, from which the others are told apart."""

from __future__ import annotations

from typing import Any

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.rope import Rope

LLAMA3_VOCABULARY, LLAMA3_THETA, LLAMA3_CONTEXT = 128256, 500000.0, 8192


class LlamaConfig(ModelConfig):
    """A Llama model."""

    dialect = Dialect("llama", "LlamaForCausalLM", reads=frozenset({"attention_bias"}))

    def suspicions(self) -> list[str]:
        """What looks like a file that lost something, in words."""
        theta, context, lines = self.rope.rope_theta, self.max_position_embeddings, list[str]()
        if theta == Rope.rope_theta and self.vocab_size == LLAMA3_VOCABULARY:
            lines.append(
                "rope_theta = 10000 with the vocabulary of Llama 3, whose theta is 500000: "
                "the text will degrade if the file lost its rope_theta"
            )
        if theta == LLAMA3_THETA and self.rope.rope_type == "default" and context > LLAMA3_CONTEXT:
            lines.append(
                f"max_position_embeddings = {context} at rope_theta = 500000 without llama3 scaling: "
                "Llama 3.1 and later need rope_scaling"
            )
        return lines


_LLAMA3_8X = Rope(LLAMA3_THETA, "llama3", 8.0, 1.0, 4.0, LLAMA3_CONTEXT)
_LLAMA3_32X = Rope(LLAMA3_THETA, "llama3", 32.0, 1.0, 4.0, LLAMA3_CONTEXT)
_LLAMA3: dict[str, Any] = {"vocab_size": LLAMA3_VOCABULARY, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}

FAMILY = DenseFamily(
    LlamaConfig,
    {
        "llama-3.2-1b": LlamaConfig(2048, 8192, 16, 32, 8, 64, **_LLAMA3, tied_embeddings=True, rope=_LLAMA3_32X),
        "llama-3.2-3b": LlamaConfig(3072, 8192, 28, 24, 8, 128, **_LLAMA3, tied_embeddings=True, rope=_LLAMA3_32X),
        "llama-3.1-8b": LlamaConfig(4096, 14336, 32, 32, 8, 128, **_LLAMA3, rope=_LLAMA3_8X),
        "llama-3.1-70b": LlamaConfig(8192, 28672, 80, 64, 8, 128, **_LLAMA3, rope=_LLAMA3_8X),
    },
)
