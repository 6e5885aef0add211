"""The meaning of families against transformers: logits of tiny models, and the files that it writes.

How the goldens were made stands in `tests/models/goldens/make.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cheetah.models.config import ModelConfig
from cheetah.models.dense.reference import Reference
from cheetah.models.registry import FAMILIES, PRESETS, read_config
from cheetah.plan.errors import PlanError
from tests.models.goldens.families import CONFIGS, LOGITS, stored_shapes, tokens_of, weights_of_model

GOLDENS: dict[str, Any] = json.loads(CONFIGS.read_text())
CONTEXTS = {"phi3, short factors": 32}
"""Tokens that a sequence may have, where they are not those of the configuration."""
ROUNDING = 1e-5
"""Of float32, relative to the logits' norm: what two orders of summing differ by."""


def config_of(name: str, notes: list[str] | None = None) -> ModelConfig:
    """As Cheetah reads what transformers wrote."""
    return read_config(GOLDENS[name]["config"], notes)


def has_kernel(name: str) -> bool:
    """Whether there are kernels of the family, not its meaning alone so far."""
    try:
        return bool(config_of(name).shape)
    except PlanError:
        return False


def logits_of(name: str, config: ModelConfig) -> Any:
    """Those of the reference."""
    weights = weights_of_model(config)
    reference = Reference(config, weights, max_context=CONTEXTS.get(name))
    return reference.forward(tokens_of(config.vocab_size))


@pytest.mark.parametrize("name", GOLDENS)
def test_the_reference_computes_what_transformers_does(name: str) -> None:
    wanted = load_file(LOGITS)[name]
    found = logits_of(name, config_of(name))
    assert np.linalg.norm(found - wanted) < ROUNDING * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", GOLDENS)
def test_a_file_is_read_whole_and_its_tensors_are_expected(tmp_path: Path, name: str) -> None:
    notes: list[str] = []
    config = config_of(name, notes)
    assert notes == []
    (tmp_path / "config.json").write_text(json.dumps(GOLDENS[name]["config"]))
    assert read_config(tmp_path / "config.json") == config
    assert read_config(json.loads(json.dumps(config.to_dict()))) == config
    expected = stored_shapes(config)
    firsts = {
        tensor: list(shape) for tensor, shape in expected.items() if "layers." not in tensor or "layers.0." in tensor
    }
    assert firsts == GOLDENS[name]["shapes"]
    assert sum(int(np.prod(shape)) for shape in expected.values()) == config.parameter_count


def test_every_family_has_a_golden_or_formulas() -> None:
    by_formulas = {"qwen2", "qwen3", "mistral"}  # tests/models/test_family_layers.py
    by_name = {"internlm", "aquila", "xverse"}  # tests/models/test_published_configs.py
    assert {config_of(name).dialect.model_type for name in GOLDENS} | by_formulas | by_name == set(FAMILIES)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_read_back_from_what_it_writes(name: str) -> None:
    assert read_config(json.loads(json.dumps(PRESETS[name].to_dict()))) == PRESETS[name]
