"""Drafters of blocks: all kinds of files are read, mean what transformers' modules compute, and what is none of the
model's is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from cheetah.errors import CheetahError
from cheetah.models.config import ModelConfig
from cheetah.models.dense.weights import EMBEDDING
from cheetah.models.registry import read_config, read_drafter
from cheetah.models.rounding import as_bf16
from cheetah.runtime.checkpoint.drafters import RANDOM_BLOCKS, open_drafter
from cheetah.runtime.checkpoint.loading import Checkpoint
from cheetah.runtime.checkpoint.random_weights import random_tensors
from tests.models.goldens.block_drafter import (
    CONFIGS,
    DSPARK,
    LOGITS,
    ROUNDS,
    TARGET,
    VOCAB,
    left_of,
    target_embedding,
    weights_of,
)
from tests.models.meaning_of_blocks import BlockReference

ROUNDING = 1e-5


def target() -> Checkpoint:
    tensors, embedding = random_tensors(TARGET), as_bf16(target_embedding())

    def tensor(name: str) -> NDArray[Any]:
        return embedding if name == EMBEDDING else tensors(name)

    return Checkpoint("target", TARGET, tensor, tensors.rows, {}, None, None, {}, (), None)


def written(folder: Path, config: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> str:
    """A drafter's folder, its weights in bf16."""
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: one.astype(ml_dtypes.bfloat16) for name, one in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_drafter_of_any_kind_means_what_transformers_computes(tmp_path: Path, name: str) -> None:
    values, wanted = CONFIGS[name], load_file(LOGITS)
    opened = open_drafter(written(tmp_path, values, weights_of(values)), target())
    assert opened.config.block is not None
    block, reference = opened.config.block, BlockReference(opened.config, opened.tensor)
    for number, ((_, anchor), left) in enumerate(zip(ROUNDS, left_of(values), strict=True)):
        reference.read(left)
        logits, golden = reference.logits(anchor), wanted[f"{name} {number}"]
        drafts = reference.drafts(anchor, logits)
        first = 0 if block.from_anchor else 1
        assert drafts == [int(one) for one in golden[first:].argmax(axis=1)]
        before = [anchor, *drafts[:-1]] if block.markov_rank else [0] * len(logits)
        found = np.stack([row + reference.bias(token) for row, token in zip(logits, before, strict=True)])
        assert np.abs(found - golden).max() <= ROUNDING * np.abs(golden).max()
        assert reference.length == sum(count for count, _ in ROUNDS[: number + 1])


def test_fewer_columns_are_a_shorter_block(tmp_path: Path) -> None:
    opened = open_drafter(written(tmp_path, DSPARK, weights_of(DSPARK)), target())
    assert opened.config.block is not None
    reference = BlockReference(opened.config, opened.tensor)
    reference.read(left_of(DSPARK)[0])
    whole, short = reference.logits(5), reference.logits(5, 2)
    assert short.shape == (2, VOCAB) and not np.allclose(whole[:2], short)


def test_what_it_lacks_is_the_models(tmp_path: Path) -> None:
    values = CONFIGS["dflash of z-lab"]
    opened = open_drafter(written(tmp_path, values, weights_of(values)), target())
    assert opened.config.tied_embeddings and np.array_equal(opened.tensor(EMBEDDING), as_bf16(target_embedding()))
    assert any("target's are taken" in note for note in opened.notes)


def test_a_random_one_has_the_models_shapes() -> None:
    opened = open_drafter(RANDOM_BLOCKS, target())
    assert opened.config.block is not None
    block = opened.config.block
    assert (block.columns, block.drafts, block.layers) == (7, 7, (0, 1, 2, 3, 4))
    assert read_drafter(as_file(opened.config), TARGET) == opened.config


def as_file(config: ModelConfig) -> dict[str, Any]:
    """What a file would say."""
    values = {"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "markov_head_type": "vanilla"}
    return {**config.to_dict(), **values}


def without(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda config, tensors: tensors.pop(name)


def stating(**values: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda config, tensors: config.update(values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (stating(architectures=["Qwen3ForCausalLM"]), "supported of what drafts for a model"),
        (stating(model_type="gemma4"), "model_type is 'gemma4'"),
        (stating(hidden_size=64), "hidden_size is 64, that of the model which it drafts for 48"),
        (stating(vocab_size=60), "vocab_size is 60"),
        (stating(target_layer_ids=[2, 1]), "ascending from 0 on"),
        (stating(target_layer_ids=[-1, 1]), "ascending from 0 on"),
        (stating(target_layer_ids=[1, 5]), "takes what layer 5 leaves"),
        (stating(target_layer_ids=[True]), "ascending from 0 on"),
        (stating(target_layer_ids=list(range(17))), "must be 1 to 16"),
        (stating(target_layer_ids=[1, 2]), "fc.weight"),
        (stating(mask_token_id=53), "must be one of 53 tokens"),
        (stating(mask_token_id="52"), "must be one of 53 tokens"),
        (stating(block_size=33), "block_size"),
        (stating(block_size=0), "block_size"),
        (stating(markov_rank=10**9), "must be 0 to hidden_size"),
        (stating(markov_rank=5), "markov_head.markov_w1.weight"),
        (stating(markov_head_type="rnn"), "markov_head_type is 'rnn', supported: vanilla"),
        (stating(layer_types=["sliding_attention"] * 2), "layer_types"),
        (stating(quantization_config={"quant_method": "fp8"}), "what drafts is read in bf16 alone"),
        (stating(rope_parameters={"rope_type": "spiral"}), "spiral"),
        (without("fc.weight"), "fc.weight"),
        (without("markov_head.markov_w2.weight"), "markov_head.markov_w2.weight"),
        (without("layers.1.self_attn.k_norm.weight"), "model.layers.1.self_attn.k_norm.weight"),
        (lambda config, tensors: tensors.update({"model.fc.weight": tensors["fc.weight"]}), "is there twice"),
        (lambda config, tensors: tensors.update({"layers.1.x": tensors["norm.weight"]}), "layers.1.x"),
    ],
)
def test_what_is_not_the_models_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], said: str
) -> None:
    config, tensors = {**DSPARK}, weights_of(DSPARK)
    change(config, tensors)
    folder = written(tmp_path, config, tensors)
    with pytest.raises(CheetahError) as refused:
        open_drafter(folder, target())
    assert said in str(refused.value) and folder in str(refused.value)


@pytest.mark.parametrize("field", ["fc_layernorm", "projector_type"])
def test_what_a_file_says_beside_what_is_known_is_refused(tmp_path: Path, field: str) -> None:
    values = CONFIGS["dflash of z-lab"]
    values = {**values, "dflash_config": {**values["dflash_config"], field: "other"}}
    with pytest.raises(CheetahError, match=f"dflash_config.{field}"):
        open_drafter(written(tmp_path, values, weights_of(values)), target())


def test_as_a_model_it_is_refused_with_what_it_is_for() -> None:
    with pytest.raises(CheetahError, match="drafts for another model: name it in speculative_config"):
        read_config(DSPARK)
