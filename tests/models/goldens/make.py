"""Makes the goldens of families: logits of tiny models of random weights, as transformers computes them.

    python -m tests.models.goldens.make

needs torch and transformers 5; the tests that read the goldens need neither. Each model is made from the arguments of
its configuration below, its weights are those of `weights_of`, by the names and shapes of the file that transformers
writes of it, and what is kept is the config.json that transformers writes, the names and shapes of the tensors of the
first layer and of those that are no layer's, and the logits. Of experts also how far transformers itself is from them
in bf16, with the experts that float32 chose.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.models.goldens.families import CONFIGS, LOGITS, divergence, tokens_of, weights_of

SIZES: dict[str, Any] = {
    **{"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "vocab_size": 50, "max_position_embeddings": 64, "rms_norm_eps": 1e-5},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
THETA = {"rope_type": "default", "rope_theta": 1000.0}
DYNAMIC = THETA | {"rope_type": "dynamic", "factor": 6.0}
FACTORS = {"short_factor": [1.0 + 0.1 * k for k in range(16)], "long_factor": [1.5 + k for k in range(16)]}
LONGROPE = THETA | FACTORS | {"rope_type": "longrope", "partial_rotary_factor": 0.5}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
MINISTRAL = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
BY_TYPE = {"full_attention": YARN, "sliding_attention": THETA}
MULTIPLIERS = {
    **{"embedding_multiplier": 12.0, "attention_multiplier": 0.05},
    **{"residual_multiplier": 0.22, "logits_scaling": 8.0},
}
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 96, "sliding_window": 5, "tie_word_embeddings": True}
HYBRID = {
    **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "head_dim": 128},
}
SHARED = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases": ("Llama", {"rope_parameters": THETA, "attention_bias": True}),
    "arcee": ("Arcee", {"rope_parameters": YARN, "head_dim": 64}),
    "arcee, biases": ("Arcee", {"rope_parameters": THETA, "attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"rope_parameters": THETA, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"rope_parameters": THETA, "sliding_window": 6, "hidden_size": 192}),  # heads of 96 dims
    "phi3, short factors": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "phi3, long factors": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8}),
    "granite": ("Granite", {"rope_parameters": THETA, **MULTIPLIERS}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **{"rope_parameters": THETA, "num_local_experts": 0, "num_experts_per_tok": 0},
            **{"shared_intermediate_size": 96, "position_embedding_type": "rope", "mamba_n_heads": 4},
            "layer_types": ["full_attention"] * 4,
            **MULTIPLIERS,
        },
    ),
    "olmo2": ("Olmo2", {"rope_parameters": THETA}),
    "olmo3": ("Olmo3", {"rope_parameters": BY_TYPE, "sliding_window": 5}),
    "ministral3": ("Ministral3", {"rope_parameters": MINISTRAL, "head_dim": 64}),
    "gemma2": ("Gemma2", {"rope_parameters": THETA, **GEMMA}),
    "gemma3_text": (
        "Gemma3Text",
        {"rope_parameters": BY_TYPE | {"full_attention": THETA | {"rope_theta": 5000.0}}, **GEMMA}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "exaone4": ("Exaone4", {"rope_parameters": THETA, "sliding_window": 5}),
    "exaone4, all layers alike": ("Exaone4", {"rope_parameters": THETA, "sliding_window": None, "layer_types": None}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"rope_parameters": THETA, "head_dim": 64, "num_experts": 9, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen3_moe, of the softmax over all": (
        "Qwen3Moe",
        {"rope_parameters": THETA, "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 64, "norm_topk_prob": False},
    ),
    "mixtral": ("Mixtral", {"rope_parameters": THETA, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {"rope_parameters": THETA, "num_experts": 40, "num_experts_per_tok": 3}),
    "gpt_oss": (
        "GptOss",
        {"rope_parameters": YARN | {"truncate": False}, "head_dim": 64, "sliding_window": 5, "num_local_experts": 5}
        | {"num_experts_per_tok": 2, "swiglu_limit": 1.25},
    ),
    "qwen3_5_text": (
        "Qwen3_5Text",
        {"rope_parameters": THETA | {"partial_rotary_factor": 0.25}, "num_attention_heads": 6}
        | HYBRID
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "num_key_value_heads": 2},
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeText",
        {"rope_parameters": THETA | {"partial_rotary_factor": 0.25}, **HYBRID, **SHARED}
        | {"layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": 5, "num_experts_per_tok": 2},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {"rope_parameters": THETA | {"partial_rotary_factor": 0.5}, **HYBRID, **SHARED, "head_dim": 256}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"num_experts": 6, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    ),
    "seed_oss": ("SeedOss", {"rope_parameters": THETA, "head_dim": 64, "num_attention_heads": 10}),
    "internlm3": ("InternLM3", {"rope_parameters": DYNAMIC, "num_attention_heads": 16, "head_dim": 64}),
    "cwm": ("Cwm", {"rope_parameters": THETA, "sliding_window": 5, "head_dim": 64}),
}
CLASSES = {
    "Gemma3Text": "Gemma3ForCausalLM",
    "Qwen3_5Text": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
    "InternLM3": "LlamaForCausalLM",
}
PUBLISHED = {"InternLM3": "InternLM3ForCausalLM"}
"""Architectures as published files name them, where transformers writes the name of the class that it takes."""


def made(family: str, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """What transformers writes as config.json with the shapes of its tensors, and the logits [tokens, vocab]."""
    if arguments.get("layer_types", "") is None:
        arguments = {**arguments, "layer_types": ["full_attention"] * SIZES["num_hidden_layers"]}
    config = getattr(transformers, f"{family}Config")(**SIZES | dict(arguments))
    config._attn_implementation = "eager"
    kind = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))
    with tempfile.TemporaryDirectory() as folder:  # files have experts one by one, which a model has in one tensor
        kind(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {name: tensor.shape for name, tensor in sorted(load_file(file).items())}
        save_file(weights_of(shapes), file, {"format": "pt"})
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        in_bf16 = kind.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    scaled = getattr(model.model.embed_tokens, "embed_scale", None)
    if scaled is not None:  # as models in bf16 have it
        model.model.embed_tokens.embed_scale = scaled.to(torch.bfloat16).float()
    choices = Choices()
    logits, apart = choices.of(model, config.vocab_size), {}
    if choices.made:
        apart = {"kl_of_bf16": divergence(logits, choices.of(in_bf16, config.vocab_size)).tolist()}
    architecture = {"architectures": [PUBLISHED.get(family, type(model).__name__)]}
    of_one_layer = {name: shape for name, shape in shapes.items() if "layers." not in name or "layers.0." in name}
    return {"config": config.to_diff_dict() | architecture, "shapes": of_one_layer, **apart}, logits


class Choices:
    """The experts that the first model chose of each layer's tokens, which others are given, too."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def of(self, model: Any, vocab: int) -> np.ndarray[Any, Any]:
        """The logits [tokens, vocab] of a model."""
        chosen, highest, layers = list(self.made), torch.topk, count()

        def topk(values: torch.Tensor, number: int, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
            layer = next(layers)
            if not chosen:
                self.made.append(highest(values, number, **named)[1])
            indices = (chosen or self.made)[layer]
            return torch.gather(values, -1, indices), indices

        with mock.patch.object(torch, "topk", topk), torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([tokens_of(vocab)])).logits[0]
        return logits.float().numpy()


def main() -> None:
    """Write both files."""
    warnings.simplefilter("ignore")
    found = {name: made(*arguments) for name, arguments in ARGUMENTS.items()}
    lines = (f"{json.dumps(name)}: {json.dumps(about)}" for name, (about, _) in found.items())
    CONFIGS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    save_file({name: logits.astype(np.float32) for name, (_, logits) in found.items()}, LOGITS)


if __name__ == "__main__":
    main()
