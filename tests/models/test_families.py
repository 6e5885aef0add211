"""The seam between families and the rest: what a family of a few lines gets, from config.json to tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cheetah.models import registry
from cheetah.models.config import ModelConfig
from cheetah.models.config_json import ConfigError, Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.registry import FAMILIES, PRESETS, family_of, read_config, resolve_config
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.checkpoint.random_weights import random_tensors
from tests.program.rig import Rig, float32_logits, relative_error, token_ids
from tests.tolerances import LOGITS


class ToyConfig(ModelConfig):
    """Another family: this much is what one has to write."""

    dialect = Dialect("toy", "ToyForCausalLM", absent={"head_dim": 64}, neutral={"toy_scale": (1.0,)})


TOY = DenseFamily(ToyConfig, {"toy-tiny": ToyConfig(48, 40, 2, 3, 1, 64, 50, max_position_embeddings=256)})
CONFIG = TOY.presets["toy-tiny"]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(registry.FAMILIES, TOY.name, TOY)
    yield


@pytest.fixture
def weights() -> SimpleNamespace:
    return SimpleNamespace(config=CONFIG, tensor=random_tensors(CONFIG))


@pytest.mark.slow
@pytest.mark.compiler
def test_the_kernel_of_a_toy_family_agrees_with_its_reference(weights: SimpleNamespace) -> None:
    ids = token_ids(12, CONFIG.vocab_size)
    found = Rig(weights, blocks=2).session().score(ids)
    assert relative_error(found, float32_logits(weights, ids)) < LOGITS


def test_a_checkpoint_of_a_toy_family_is_read_in_its_own_dialect(tmp_path: Path, weights: SimpleNamespace) -> None:
    values = CONFIG.to_dict()
    assert values["model_type"] == "toy" and values["architectures"] == ["ToyForCausalLM"]
    del values["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert resolve_config(tmp_path) == CONFIG
    checkpoint = open_checkpoint(f"random:{tmp_path}")
    assert checkpoint.config == CONFIG and family_of(checkpoint.config) is TOY
    name = next(iter(TOY.tensor_shapes(CONFIG)))
    assert np.array_equal(checkpoint.tensor(name), weights.tensor(name))
    with pytest.raises(ConfigError, match="toy_scale = 2.0 is not supported; supported: 1.0 or absent"):
        read_config({**values, "toy_scale": 2.0})


def test_configurations_of_two_families_differ_though_their_numbers_agree() -> None:
    llama = PRESETS["llama-3.1-8b"]
    toy = ToyConfig(**{field.name: getattr(llama, field.name) for field in fields(llama)})
    assert toy != llama and toy.shape == llama.shape


def test_an_unknown_family_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"config: model_type is 'unheard_of', supported: 'llama', .*'toy'"):
        read_config({**CONFIG.to_dict(), "model_type": "unheard_of"})
    with pytest.raises(ConfigError, match="config: model_type is missing, supported: 'llama'"):
        read_config({"hidden_size": 64})


def test_a_files_architecture_must_be_its_familys() -> None:
    with pytest.raises(ConfigError, match=r"\['LlamaForCausalLM'\], supported is \['ToyForCausalLM'\]"):
        read_config({**CONFIG.to_dict(), "architectures": ["LlamaForCausalLM"]})


def test_presets_of_all_families_have_names_of_their_own() -> None:
    names = [name for family in FAMILIES.values() for name in family.presets]
    assert len(names) == len(set(names))
