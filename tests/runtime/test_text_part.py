"""The text part of a model that sees: its file is read, under either spelling of its tensors, and the rest is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import ConfigError
from cheetah.models.registry import PRESETS, read_config
from cheetah.runtime.checkpoint.loading import open_checkpoint
from tests.program.rig import RandomWeights

MINISTRAL = replace(
    PRESETS["ministral-3-8b"], hidden_size=64, intermediate_size=48, layers=2, query_heads=2, kv_heads=1
)
CONFIG = replace(MINISTRAL, vocab_size=50)
SPELLINGS = {"of transformers 4": ("language_model.model.", "language_model."), "of 5": ("model.language_model.", "")}
SEEN = {"vision_tower.patch_conv.weight": (4, 4), "multi_modal_projector.norm.weight": (8,)}


def values(config: ModelConfig = CONFIG) -> dict[str, Any]:
    """A config.json as Ministral 3's: what is said of the text stands inside."""
    text = config.to_dict()
    del text["architectures"]
    return {
        **{"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text},
        **{"vision_config": {"model_type": "pixtral"}, "image_token_index": 10, "eos_token_id": 2},
    }


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_text_part_is_read_and_the_rest_named(spelling: str, tmp_path: Path) -> None:
    inside, outside = SPELLINGS[spelling]
    weights = RandomWeights(CONFIG)
    names = {
        name: f"{inside}{name.removeprefix('model.')}" if name.startswith("model.") else f"{outside}{name}"
        for name in weights.tensors
    }
    stored = {names[name]: bits.view(ml_dtypes.bfloat16) for name, bits in weights.tensors.items()}
    seen = {name: np.zeros(shape, ml_dtypes.bfloat16) for name, shape in SEEN.items()}
    save_file(stored | seen, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(values()))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == CONFIG and checkpoint.eos_token_id == 2
    assert all(np.array_equal(checkpoint.tensor(name), bits) for name, bits in weights.tensors.items())
    assert any("2 tensors of multi_modal_projector and vision_tower are not read" in note for note in checkpoint.notes)
    assert any("images are not read" in note for note in checkpoint.notes)


def test_modules_of_a_quantised_text_part_have_the_names_of_text_alone() -> None:
    stated = {
        **{"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["language_model.lm_head"]},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            }
        },
    }
    config = read_config({**values(), "quantization_config": stated})
    assert dict(config.weight_formats) == dict.fromkeys(("qkv", "o", "gate_up", "down"), "fp8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Mistral3ForCausalLM"]}, "architectures is .* supported is"),
        ({"text_config": None}, "text_config is missing: must be an object"),
        ({"text_config": {"model_type": "unheard_of"}}, "text_config.model_type is 'unheard_of', supported: llama"),
        ({"model_type": "llava"}, "model_type is 'llava', supported: 'llama', .*'mistral3', 'gemma3'"),
    ],
)
def test_another_text_part_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config({**values(), **changes})


def test_a_field_that_the_text_part_leaves_out_is_the_familys() -> None:
    gemma = PRESETS["gemma-3-4b"]
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    assert read_config({**outer, "text_config": text}) == gemma
