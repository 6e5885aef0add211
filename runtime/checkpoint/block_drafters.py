"""A drafter of blocks for a model: opened, and refused by name where it is not for that one.

What it has not itself, embedding and head, is the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cheetah.models.block import DSPARK, UNREAD, plain_name
from cheetah.models.config import ModelConfig
from cheetah.models.registry import family_of, read_drafter
from cheetah.printable import shown_name
from cheetah.runtime.checkpoint.beside import check_sizes, config_beside, tensors_beside
from cheetah.runtime.checkpoint.loading import RANDOM, Checkpoint, found_folder
from cheetah.runtime.checkpoint.random_weights import random_tensors
from cheetah.runtime.checkpoint.safetensors_files import LoadingError, StoredTensor, find_tensors

RANDOM_BLOCKS = RANDOM + "dspark"
"""A drafter of random weights, of the target's shapes, as DeepSpec's for Qwen3 are."""
RANDOM_COLUMNS, RANDOM_LAYERS, RANDOM_TAPS, RANDOM_RANK = 7, 5, 5, 256


def open_block_drafter(
    name: str, target: Checkpoint, revision: str | None = None, local_files_only: bool | None = None
) -> Checkpoint:
    """The drafter of that name, a folder or hub id, or `RANDOM_BLOCKS`, for the model of `target`. LoadingError or
    ConfigError says what is wrong, and where. Its `config` has a `block`."""
    if name == RANDOM_BLOCKS:
        return _random_drafter(target)
    with found_folder(name, revision, local_files_only) as folder:
        return _opened(name, folder, target)


def _opened(name: str, folder: Path, target: Checkpoint) -> Checkpoint:
    notes: list[str] = []
    config = config_beside(folder, target.config, notes)
    if config.block is None:
        raise LoadingError(f"{folder}: is an EAGLE-3 head: its method is eagle3")
    check_target(config, target.config, str(folder))
    found = _own_tensors(find_tensors(folder).tensors, str(folder), notes)
    of_target = [one for one in _shared(config) if one not in found]
    tensor, rows = tensors_beside(folder, config, found, of_target, target, notes)
    if of_target:
        notes.append(f"{folder}: has no {' and no '.join(of_target)}: {target.name}'s are taken")
    return Checkpoint(name, config, tensor, rows, {}, None, None, {}, tuple(notes), folder)


def _shared(config: ModelConfig) -> tuple[str, ...]:
    """The tensors that both models have."""
    family = family_of(config)
    both = family.embedding_tensor, family.head_tensor
    return both[:1] if config.tied_embeddings else both


def check_target(config: ModelConfig, target: ModelConfig, place: str) -> None:
    """LoadingError where a drafter is of another model than the target: its width, its tokens, its layers."""
    check_sizes(config, target, place, "drafter")
    assert config.block is not None
    if config.block.layers[-1] >= target.layers - 1:
        raise LoadingError(
            f"{place}: takes what layer {config.block.layers[-1]} leaves, the model which it drafts for has "
            f"{target.layers}: supported are layers below {target.layers - 1}"
        )


def _own_tensors(stored: Mapping[str, StoredTensor], place: str, notes: list[str]) -> dict[str, StoredTensor]:
    """The tensors that are read, by their names here."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        own = plain_name(name)
        if own.startswith(UNREAD):
            continue
        if own in found:
            raise LoadingError(f"{place}: {shown_name(name)} is there twice, with model. before it and without")
        found[own] = tensor
    return found


def _random_drafter(target: Checkpoint) -> Checkpoint:
    """Layers of the target's shapes, that take what layers evenly apart leave."""
    model = target.config
    taps = min(RANDOM_TAPS, model.layers - 1)
    values = {
        "architectures": [DSPARK],
        "model_type": "qwen3",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": RANDOM_LAYERS,
        "num_attention_heads": model.query_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "block_size": RANDOM_COLUMNS,
        "mask_token_id": 0,
        "target_layer_ids": [number * (model.layers - 1) // taps for number in range(taps)],
        "markov_rank": min(RANDOM_RANK, model.hidden_size),
        "markov_head_type": "vanilla",
    }
    config = read_drafter(values, model)
    check_target(config, model, RANDOM_BLOCKS)
    tensors = random_tensors(config)
    notes = (f"{RANDOM_BLOCKS}: the weights are random numbers, so few drafts will be right",)
    return Checkpoint(RANDOM_BLOCKS, config, tensors, tensors.rows, {}, None, None, {}, notes, None)
