"""The tensors of an EAGLE-3 head: their names in files of both layouts, and what kernels have of them.

Kernels know three things otherwise than files. The matrix `fc` is cut by columns, a part for each layer's output, so
that each comes by itself. Of the projections of q, k and v only the half for the hidden state is multiplied: what the
half for the embedding makes is a function of the token, so it is worked out for all tokens when weights are packed, and
lies in the place of the embedding. And the weights of norms before fc are multiplied into its columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cheetah.models.config import ModelConfig
from cheetah.models.dense import weights
from cheetah.models.dense.row_groups import rank_groups
from cheetah.models.dense.token_rows import Columns, NormedRows, RowsOfTokens, write_token_ids
from cheetah.models.dense.weights import EMBEDDING, FINAL_NORM, HEAD
from cheetah.models.drafter import LAYER
from cheetah.models.family import Packing, ReadTensor
from cheetah.models.rounding import F32, widen
from cheetah.plan import StepMatrices
from cheetah.plan.world import Rank

FC, FC_NORM, INPUT_NORM = "fc.weight", "fc_norm.{number}.weight", "input_norm.weight"
HIDDEN_NORM, EMBEDDING_NORM = weights.HIDDEN_NORM.format(layer=0), weights.INPUT_NORM.format(layer=0)
HEADS = tuple(f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv")
_MEANING = {
    "fc": "[hidden_size, layers that are tapped * hidden_size]",
    "q_proj": "[num_attention_heads * head_dim, 2 * hidden_size]",
    "k_proj": "[num_key_value_heads * head_dim, 2 * hidden_size]",
    "v_proj": "[num_key_value_heads * head_dim, 2 * hidden_size]",
    "lm_head": "[draft_vocab_size, hidden_size]",
    "input_norm": "[layers that are tapped * hidden_size]",
    "hidden_norm": "[hidden_size]",
}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a head must have, with its shape; the embedding may be the target's. Not d2t and t2d."""
    drafter, hidden = config.drafter, config.hidden_size
    assert drafter is not None
    count = len(drafter.layers)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), FC: (hidden, count * hidden)}
    if drafter.tap_norms == "each":
        shapes |= {FC_NORM.format(number=number): (hidden,) for number in range(count)}
    if drafter.tap_norms == "whole":
        shapes[INPUT_NORM] = (count * hidden,)
    shapes |= {HIDDEN_NORM: (hidden,), EMBEDDING_NORM: (hidden,)}
    shapes |= {name: (rows, 2 * hidden) for name, rows in zip(HEADS, _rows_of_heads(config), strict=True)}
    for product in config.table.products[-3:]:
        modules = weights.matrix_tensors(config, product.name)
        shapes |= {name: (one.rows, product.columns) for name, one in zip(modules, product.sources, strict=True)}
    shapes[weights.POST_ATTENTION_NORM.format(layer=0)] = (hidden,)
    return {**shapes, FINAL_NORM: (hidden,), HEAD: (drafter.vocabulary, hidden)}


def _rows_of_heads(config: ModelConfig) -> tuple[int, ...]:
    return tuple(source.rows for source in config.table.heads.sources)


def shape_meaning(tensor: str) -> str:
    """What of config.json makes the shape of a tensor."""
    part = tensor.split(".")[-2]
    if tensor.startswith("fc_norm."):
        return "[hidden_size]"
    return _MEANING[part] if part in _MEANING else weights.shape_meaning(tensor)


def _rows_of_tokens(config: ModelConfig, matrices: StepMatrices, packing: Packing) -> RowsOfTokens:
    """What tokens' embeddings make of a rank's q, k and v [vocab, rows], in the order of the packed matrix' rows."""
    rows = packing.rows or packing.tensor
    half = slice(0, config.hidden_size)
    parts = [Columns(rows(name), half)[:] for name in HEADS]
    groups = rank_groups(config, matrices[config.table.heads], Rank(packing.rank, matrices.ranks))
    packed = np.zeros((config.embedding_columns(matrices.ranks), config.hidden_size), np.uint16)
    groups.gather(parts, packed, range(len(groups)))
    norm = widen(packing.tensor(EMBEDDING_NORM))
    return RowsOfTokens(NormedRows(rows(EMBEDDING), norm, config.rms_norm_eps), packed)


def as_packed(config: ModelConfig, matrices: StepMatrices, packing: Packing) -> Packing:
    """Reads for the packing of a head's weights: the tensors that kernels have, by the names that packing asks for."""
    assert config.drafter is not None
    write_token_ids(weights.head_rows(config, matrices.ranks), config.vocab_size, packing)
    read, hidden = packing.rows or packing.tensor, config.hidden_size
    norms = _norms_before_fc(config, packing.tensor)

    def rows(name: str) -> Any:
        if name == EMBEDDING:
            return _rows_of_tokens(config, matrices, packing)
        if name in HEADS:
            return Columns(read(name), slice(hidden, 2 * hidden))
        if name.startswith(f"{LAYER}fc_"):
            first = int(name.removeprefix(f"{LAYER}fc_").partition(".")[0]) * hidden
            columns = slice(first, first + hidden)
            return Columns(read(FC), columns, None if norms is None else norms[columns])
        return read(name)

    return replace(packing, rows=rows)


def _norms_before_fc(config: ModelConfig, tensor: ReadTensor) -> F32 | None:
    """The weights by which the norms before fc multiply its columns."""
    assert config.drafter is not None
    if config.drafter.tap_norms == "whole":
        return widen(tensor(INPUT_NORM))
    if config.drafter.tap_norms == "each":
        count = len(config.drafter.layers)
        return np.concatenate([widen(tensor(FC_NORM.format(number=number))) for number in range(count)])
    return None
