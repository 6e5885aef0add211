"""EAGLE-3 heads: both layouts are read, mean what torch computes, and what is not a head of the model is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from cheetah.errors import CheetahError
from cheetah.models.dense.weights import EMBEDDING
from cheetah.models.registry import family_of, read_config, read_drafter
from cheetah.runtime.checkpoint.drafters import RANDOM_HEAD, open_drafter
from cheetah.runtime.checkpoint.loading import Checkpoint
from cheetah.runtime.checkpoint.random_weights import random_tensors
from tests.models.goldens.eagle3 import (
    CONFIGS,
    DRAFTS,
    KNOWN,
    LOGITS,
    TARGET,
    VOCAB,
    features_of,
    tokens_of,
    weights_of,
)
from tests.models.meaning_of_heads import Eagle3Reference

ROUNDING = 1e-5


def target() -> Checkpoint:
    tensors = random_tensors(TARGET)
    return Checkpoint("target", TARGET, tensors, tensors.rows, {}, None, None, {}, (), None)


def written(folder: Path, config: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> Path:
    """A head's folder, its weights in bf16."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: one.astype(ml_dtypes.bfloat16) if one.dtype == np.float32 else one for name, one in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_of_either_layout_means_what_torch_computes(tmp_path: Path, name: str) -> None:
    config, wanted = CONFIGS[name], load_file(LOGITS)[name]
    opened = open_drafter(str(written(tmp_path, config, weights_of(config))), target())
    assert opened.notes == () and read_drafter(opened.config.to_dict(), TARGET) == opened.config
    reference = Eagle3Reference(opened.config, opened.tensor)
    found = reference.forward(tokens_of(), features_of(config))
    drafted = reference.draft(DRAFTS, found[-1])
    spread = np.full((DRAFTS, VOCAB), -np.inf)
    spread[:, reference.token_ids] = wanted[-DRAFTS:]
    assert drafted == spread.argmax(1).tolist()
    reference.forward(tokens_of(), features_of(config))
    found = np.stack([*found, *(reference.step(token) for token in drafted[:-1])])
    assert np.linalg.norm(found - wanted) < ROUNDING * np.linalg.norm(wanted)


def test_a_head_without_an_embedding_has_the_models(tmp_path: Path) -> None:
    config, model = CONFIGS["safeai"], target()
    tensors = {name: one for name, one in weights_of(config).items() if name != "embed_tokens.weight"}
    opened = open_drafter(str(written(tmp_path, config, tensors)), model)
    assert np.array_equal(opened.tensor(EMBEDDING), model.tensor(EMBEDDING))
    assert "has no model.embed_tokens.weight: target's are taken" in opened.notes[0]


def test_a_model_of_few_layers_has_no_layers_that_are_taken_by_rule() -> None:
    small = replace(target(), config=replace(TARGET, layers=6))
    with pytest.raises(CheetahError, match="drafts for has 6 layers: by rule three are taken of 7 or more"):
        open_drafter(RANDOM_HEAD, small)
    assert open_drafter(RANDOM_HEAD, replace(small, config=replace(TARGET, layers=7))).config.drafter is not None


def test_a_random_head_has_the_models_shapes() -> None:
    opened = open_drafter(RANDOM_HEAD, target())
    assert opened.config.drafter is not None and opened.config.drafter.layers == (1, 3, 5)
    for name, shape in family_of(opened.config).tensor_shapes(opened.config).items():
        assert opened.tensor(name).shape == shape


def other(**fields: Any) -> Callable[[dict[str, Any], dict[str, NDArray[Any]]], object]:
    return lambda config, tensors: config.update(fields)


def offset(place: int, value: int) -> Callable[[dict[str, Any], dict[str, NDArray[Any]]], object]:
    def change(config: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> None:
        tensors["d2t"][place] = value

    return change


WRONG: dict[str, tuple[Callable[[dict[str, Any], dict[str, NDArray[Any]]], object], str]] = {
    "another width": (other(hidden_size=64), "hidden_size is 64, that of the model which it drafts for 48"),
    "other tokens": (other(vocab_size=49), "vocab_size is 49, that of the model which it drafts for 50"),
    "two layers": (other(num_hidden_layers=2), "num_hidden_layers = 2 is not supported"),
    "more tokens than there are": (other(draft_vocab_size=51), "draft_vocab_size = 51 is more than vocab_size = 50"),
    "the target's other width": (other(target_hidden_size=64), "target_hidden_size = 64 is not hidden_size = 48"),
    "the last layer": (other(eagle_aux_hidden_state_layer_ids=[2, 9]), "takes the input of layer 9, the model which"),
    "the embeddings": (other(eagle_aux_hidden_state_layer_ids=[0, 4]), "must be 1 to 8 numbers of layers, ascending"),
    "layers out of order": (other(eagle_aux_hidden_state_layer_ids=[4, 2]), "must be 1 to 8 numbers of layers"),
    "no numbers": (other(eagle_config={"eagle_aux_hidden_state_layer_ids": ["a"]}), "must be 1 to 8 numbers of lay"),
    "a nested text": (other(eagle_config="a"), "eagle_config = 'a': must be an object"),
    "another MTP": (other(eagle_config={"use_last_layernorm": False}), "use_last_layernorm = False is not supported"),
    "both norms": (other(fc_norm=True, norm_before_fc=True), "fc_norm and norm_before_fc are both true"),
    "a flag of 1": (other(norm_output=1), "norm_output = 1: must be true or false"),
    "tied": (other(tie_word_embeddings=True), "tie_word_embeddings = True is not supported"),
    "biases": (other(attention_bias=True), "attention_bias = True is not supported"),
    "many at once": (other(parallel_drafting=True), "parallel_drafting = True is not supported"),
    "quantised": (other(quantization_config={"quant_method": "fp8"}), "what drafts is read in bf16 alone"),
    "another architecture": (other(architectures=["EagleModel"]), "supported of what drafts for a model: LlamaForC"),
    "a missing norm": (
        lambda config, tensors: tensors.pop("midlayer.hidden_norm.weight"),
        "missing: model.layers.0.hi",
    ),
    "a norm too many": (
        lambda config, tensors: tensors.update({"fc_norm.0.weight": np.ones(48, np.float32)}),
        "extra: fc_norm.0.weight",
    ),
    "a narrow fc": (
        lambda config, tensors: tensors.update({"fc.weight": np.ones((48, 96), np.float32)}),
        r"fc.weight is \[48, 96\], expected \[48, 144\] = \[hidden_size, layers that are tapped",
    ),
    "both names": (
        lambda config, tensors: tensors.update({"layers.0.hidden_norm.weight": np.ones(48, np.float32)}),
        "is there twice, under another name too",
    ),
    "no d2t": (lambda config, tensors: tensors.pop("d2t"), "d2t is missing: draft_vocab_size is 37, vocab_size 50"),
    "d2t of floats": (
        lambda config, tensors: tensors.update(d2t=np.ones(KNOWN, np.float32)),
        r"d2t is BF16 \[37\], exp",
    ),
    "a token before the first": (offset(3, -4), r"d2t\[3\] is -4: token 3 of the head would be none of the 50 tokens"),
    "a token behind the last": (offset(3, 47), r"d2t\[3\] is 47: token 3 of the head would be none"),
    "an offset that overflows": (offset(3, 2**63 - 1), r"d2t\[3\] is 9223372036854775807: token 3"),
    "a token twice": (
        lambda config, tensors: tensors.update(d2t=np.array([1, 0, *[1] * 35])),
        "two tokens of the head are the same one",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_head_of_the_model_is_refused_by_name(tmp_path: Path, what: str) -> None:
    change, message = WRONG[what]
    config, tensors = {**CONFIGS["safeai"]}, weights_of(CONFIGS["safeai"])
    change(config, tensors)
    with pytest.raises(CheetahError, match=message):
        open_drafter(str(written(tmp_path, config, tensors)), target())


def test_a_head_is_no_model() -> None:
    with pytest.raises(CheetahError, match="drafts for another model: name it in speculative_config"):
        read_config(CONFIGS["speculators"])
