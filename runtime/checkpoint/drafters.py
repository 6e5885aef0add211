"""A head that drafts for a model by its hidden states: opened, and refused by name where it is another model's.

What lies in both is read once: a head without an embedding of its own has the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.drafter import KNOWN_TOKENS, OFFSETS, TOKEN_IDS, UNREAD, plain_name, token_ids
from cheetah.models.registry import family_of, read_drafter
from cheetah.printable import shown_name
from cheetah.runtime.checkpoint.beside import check_sizes, config_beside, tensors_beside
from cheetah.runtime.checkpoint.loading import RANDOM, Checkpoint, found_folder
from cheetah.runtime.checkpoint.random_weights import random_tensors
from cheetah.runtime.checkpoint.safetensors_files import LoadingError, StoredTensor, find_tensors

RANDOM_HEAD = RANDOM + "eagle3"
"""A head of random weights, of the target's shapes."""
RANDOM_VOCABULARY = 32000
OFFSET_DTYPES = {"I64": np.int64, "I32": np.int32}


def open_drafter(
    name: str, target: Checkpoint, revision: str | None = None, local_files_only: bool | None = None
) -> Checkpoint:
    """The head of that name, a folder or hub id, or `RANDOM_HEAD`, for the model of `target`. LoadingError or
    ConfigError says what is wrong, and where."""
    if name == RANDOM_HEAD:
        return _random_head(target)
    with found_folder(name, revision, local_files_only) as folder:
        return _opened(name, folder, target)


def _opened(name: str, folder: Path, target: Checkpoint) -> Checkpoint:
    notes: list[str] = []
    config = config_beside(folder, target.config, notes)
    if config.drafter is None:
        raise LoadingError(f"{folder}: is {config.dialect.title}, which is no EAGLE-3 head: give another method")
    check_target(config, target.config, str(folder))
    found, offsets = _sorted_out(find_tensors(folder).tensors, str(folder), notes)
    of_target = [name for name in (family_of(config).embedding_tensor,) if name not in found]
    if of_target:
        notes.append(f"{folder}: has no embedding, that of {target.name} is taken")
    stored, rows = tensors_beside(folder, config, found, of_target, target, notes)
    ids = _checked_ids(offsets, config, str(folder))

    def tensor(wanted: str) -> NDArray[Any]:
        return ids if wanted == TOKEN_IDS else stored(wanted)

    return Checkpoint(name, config, tensor, rows, {}, None, None, {}, tuple(notes), folder)


def check_target(config: ModelConfig, target: ModelConfig, place: str) -> None:
    """LoadingError where a head is of another model than the target: its width, its tokens, its layers."""
    assert config.drafter is not None
    check_sizes(config, target, place, "head")
    if config.drafter.layers[-1] >= target.layers - 1:
        last = config.drafter.layers[-1] + 1
        raise LoadingError(
            f"{place}: takes the input of layer {last}, the model which it drafts for has {target.layers}: supported "
            f"are layers below {target.layers - 1}"
        )


def _sorted_out(
    stored: Mapping[str, StoredTensor], place: str, notes: list[str]
) -> tuple[dict[str, StoredTensor], StoredTensor | None]:
    """The tensors of weights by their names here, and d2t."""
    found: dict[str, StoredTensor] = {}
    offsets, unread = None, 0
    for name, tensor in stored.items():
        own = plain_name(name)
        if own == OFFSETS:
            offsets = tensor
        elif own.startswith(UNREAD):
            unread += 1
        elif own in found:
            raise LoadingError(f"{place}: {shown_name(name)} is there twice, as in midlayer and in layers.0")
        elif own != KNOWN_TOKENS:
            found[own] = tensor
    if unread:
        notes.append(f"{unread} tensors of the model that it drafts for are not read")
    return found, offsets


def _checked_ids(offsets: StoredTensor | None, config: ModelConfig, place: str) -> NDArray[np.int64]:
    """The model's token that each row of the head stands for, int64 [draft_vocab_size]."""
    assert config.drafter is not None
    count, vocab = config.drafter.vocabulary, config.vocab_size
    if offsets is None:
        if count != vocab:
            raise LoadingError(f"{place}: {OFFSETS} is missing: draft_vocab_size is {count}, vocab_size {vocab}")
        return token_ids(None, count)
    if offsets.dtype not in OFFSET_DTYPES or offsets.shape != (count,):
        described = f"{offsets.dtype} {list(offsets.shape)}"
        raise LoadingError(f"{place}: {OFFSETS} is {described}, expected I64 [{count}] = [draft_vocab_size]")
    values = offsets.mapped().view(OFFSET_DTYPES[offsets.dtype]).astype(np.int64)
    wrong = np.flatnonzero((values < -count) | (values > vocab))  # no sum of others overflows
    ids = token_ids(np.clip(values, -count, vocab), count)
    wrong = np.union1d(wrong, np.flatnonzero((ids < 0) | (ids >= vocab)))
    if len(wrong):
        first = int(wrong[0])
        raise LoadingError(
            f"{place}: {OFFSETS}[{first}] is {int(values[first])}: token {first} of the head would be none of the "
            f"{vocab} tokens"
        )
    if len(np.unique(ids)) < count:
        raise LoadingError(f"{place}: {OFFSETS}: two tokens of the head are the same one of the model's")
    return ids


def _random_head(target: Checkpoint) -> Checkpoint:
    """One layer of the target's shapes, over the first tokens."""
    model = target.config
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": model.query_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": min(RANDOM_VOCABULARY, model.vocab_size),
        "rms_norm_eps": model.rms_norm_eps,
    }
    config = read_drafter(values, model)
    check_target(config, model, RANDOM_HEAD)
    assert config.drafter is not None
    tensors, ids = random_tensors(config), token_ids(None, config.drafter.vocabulary)

    def tensor(name: str) -> NDArray[Any]:
        return ids if name == TOKEN_IDS else tensors(name)

    notes = (f"{RANDOM_HEAD}: the weights are random numbers, so few drafts will be right",)
    return Checkpoint(RANDOM_HEAD, config, tensor, tensors.rows, {}, None, None, {}, notes, None)
