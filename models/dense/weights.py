"""From a checkpoint's tensors to the buffers the kernel reads: names, shapes, and the order of rows.

Buffers: `weights` (bf16 in packed order, [layer 0: qkv, o, gate_up, down] [layer 1] ... [head]), `norms` (bf16
[2 * layers + 1, padded_hidden]) and `embedding` (bf16 [vocab, padded_hidden]), padded with zeros, and where the family
has them those of `vector_shapes`; `pack_weights` fills them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.act_order import places_shape
from cheetah.models.config import ModelConfig, round_up
from cheetah.models.dense.delta import (
    MEANING_OF_DELTA,
    OUT_PROJ_TENSOR,
    delta_shapes,
    in_proj_modules,
    in_proj_tensor,
)
from cheetah.models.dense.row_groups import GROUP_ROWS, product_of, row_groups
from cheetah.models.family import Merged
from cheetah.models.layer_kind import LayerKind
from cheetah.models.rounding import Bits
from cheetah.plan import M_TILE_ROWS, StepMatrices
from cheetah.plan.delta import TAPS
from cheetah.plan.formats import MX_COLUMNS
from cheetah.plan.matrices import DELTA_ONLY
from cheetah.plan.products import IN_PROJ, Product, RowOrder

__all__ = [
    "EMBEDDING",
    "FINAL_NORM",
    "HEAD",
    "buffer_bytes",
    "head_tensor",
    "logical_matrix",
    "matrix_modules",
    "matrix_tensors",
    "shape_meaning",
    "tensor_shapes",
]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
_LAYER = "model.layers.{layer}."
LAYER_PATTERN = r"model\.layers\.([0-9]{1,9})\."  # a longer number is no layer's
INPUT_NORM = _LAYER + "input_layernorm.weight"
POST_ATTENTION_NORM = _LAYER + "post_attention_layernorm.weight"
_MODULES = {
    **{part: f"self_attn.{part}_proj" for part in ("q", "k", "v", "qkv", "o")},
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "gate_up", "down")},
}
"""The linear layers, below a layer, of the sources of products, and of products whose sources are one tensor."""
_MODULES_OF_EXPERTS = {
    "router": "mlp.gate",
    **{part: f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
    **{f"shared_{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "shared_router": "mlp.shared_expert_gate",
}
"""The same in models of experts."""
BEFORE = {"qkv": INPUT_NORM, "gate_up": POST_ATTENTION_NORM}
"""The norms before products of a layer, where there are none behind."""
HIDDEN_NORM = _LAYER + "hidden_norm.weight"
"""Of the hidden state that a head which drafts takes."""
STATE_BEFORE_FC, STATE_NORM = "pre_fc_norm_hidden.weight", "state_norm.weight"
"""Of the state that one takes whose residual begins with it; and before that of what the model's last layer leaves."""
BEFORE_BESIDE_BEHIND = {"qkv": INPUT_NORM, "gate_up": _LAYER + "pre_feedforward_layernorm.weight"}
"""Those where there are some behind too."""
BEHIND = {"o": POST_ATTENTION_NORM, "down": _LAYER + "post_feedforward_layernorm.weight"}
"""The norms behind products of a layer, where there are any."""
HEAD_NORMS = tuple(_LAYER + f"self_attn.{part}_norm.weight" for part in "qk")
SINKS = _LAYER + "self_attn.sinks"

DELTA_TAPS, DELTA_NUMBERS = "delta_taps", "delta_numbers"
"""Buffers of layers of Gated DeltaNet: see `cheetah.plan.delta`."""


def module_of(config: ModelConfig, source: str) -> str:
    """The linear layer of a source of a product, or of a product whose sources are one tensor."""
    usual = _MODULES if config.routing is None else _MODULES | _MODULES_OF_EXPERTS
    return "lm_head" if source == "lm_head" else _LAYER + (config.modules.get(source) or usual[source])


def norms_before(config: ModelConfig) -> dict[str, str]:
    """The norm before each product of a layer that has one."""
    norms = config.norms
    if not norms.before:
        return {}
    if config.drafter is not None:
        return BEFORE | ({"fc_state": STATE_BEFORE_FC} if config.drafter.joins_residual else {"qkv": HIDDEN_NORM})
    return BEFORE_BESIDE_BEHIND if norms.after else BEFORE


def norms_behind(config: ModelConfig) -> dict[str, str]:
    """The norm behind each product of a layer that has one."""
    return BEHIND if config.norms.after else {}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint must hold, with its shape ([out, in], row-major). A tied head is not among them."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    of_kind = {kind: _layer_shapes(config, kind) for kind in config.kinds}
    for layer, kind in enumerate(config.layer_kinds):
        shapes |= {one: shape for name, shape in of_kind[kind].items() for one in names_of(config, name, layer)}
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig, kind: LayerKind) -> dict[str, tuple[int, ...]]:
    """Those of a layer of a kind, with `{layer}`."""
    before, behind = norms_before(config), norms_behind(config)
    of_layer: dict[str, tuple[int, ...]] = {}
    for number, product in enumerate(config.table.products):
        if product.name in before:
            of_layer[before[product.name]] = (product.columns,)
        if kind.delta is None or number > 1:  # else it has neither heads nor o
            of_layer |= _matrix_shapes(config, product)
        if product.name in behind:
            of_layer[behind[product.name]] = (config.hidden_size,)
    if config.has_biases:
        rows_of = (source.rows for source in config.table.heads.sources)
        of_layer |= {name: (count,) for name, count in zip(bias_tensors(config), rows_of, strict=True)}
    for product in biased_products(config):
        of_layer |= {f"{module}.bias": (rows,) for module, rows in _modules_of(config, product).items()}
    if kind.delta is not None:
        of_layer |= delta_shapes(config.hidden_size, kind.delta)
    else:
        of_layer |= _attention_shapes(config)
    return of_layer


def _matrix_shapes(config: ModelConfig, product: Product) -> dict[str, tuple[int, ...]]:
    return {f"{module}.weight": (rows, product.columns) for module, rows in _modules_of(config, product).items()}


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """What attention has beside its matrices and their biases."""
    shapes: dict[str, tuple[int, ...]] = {}
    if config.head_norms == "each":
        shapes |= dict.fromkeys(HEAD_NORMS, (config.head_dim,))
    if config.head_norms == "width":
        shapes |= dict(zip(HEAD_NORMS, ((config.query_rows,), (config.kv_rows,)), strict=True))
    if config.has_sinks:
        shapes[SINKS] = (config.query_heads,)
    return shapes


def names_of(config: ModelConfig, name: str, layer: int) -> tuple[str, ...]:
    """What a name of a layer stands for: itself, or of experts the name of each."""
    return tuple(config.names_of(name, (layer,)))


def _modules_of(config: ModelConfig, product: Product) -> dict[str, int]:
    """The linear layers that make a matrix, with their rows."""
    if product.name in config.fused:
        return {module_of(config, product.name): sum(source.rows for source in product.sources)}
    rows = {module_of(config, source.name): source.rows for source in product.sources if source.name != "q_gate"}
    if product.order is RowOrder.HEADS and config.layer.attention.gated:
        rows[module_of(config, "q")] *= 2  # a head's query, then its gate
    return rows


def bias_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Of q, k and v, in a model that has them."""
    return tuple(f"{module_of(config, source.name)}.bias" for source in config.table.heads.sources)


def biased_products(config: ModelConfig) -> tuple[Product, ...]:
    """Those of a layer, beside q, k and v, that have biases."""
    table = config.table
    o = (table.onto_residual[0],) if config.has_out_biases else ()
    return (*o, *(table.products[-3:] if config.has_expert_biases else ()))


def biases_name(product: Product) -> str:
    """The buffer with those of a product."""
    return f"{product.name}_biases"


def biases_of(config: ModelConfig, product: Product, layer: int, expert: int = 0) -> tuple[str, ...]:
    """The biases of a product of a layer, or of one of its experts."""
    return tuple(f"{module}.bias".format(layer=layer, expert=expert) for module in _modules_of(config, product))


def merged_tensors(config: ModelConfig) -> dict[str, Merged]:
    """Names under which files have the experts of a layer in one tensor."""
    if config.routing is None:
        return {}
    merged = _merged_in_turn(config) if config.interleaved else _merged_behind(config)
    return {
        f"{_LAYER}{name}".format(layer=layer): replace(
            one, parts={part.format(layer=layer): shape for part, shape in one.parts.items()}
        )
        for layer in range(config.layers)
        for name, one in merged.items()
    }


def _merged_behind(config: ModelConfig) -> dict[str, Merged]:
    """As transformers 5 has them in memory, gate before up."""
    assert config.routing is not None
    count, width, hidden = config.routing.experts, config.intermediate_size, config.hidden_size
    of_layer = {
        "mlp.gate.weight": ((count, hidden), ("router",), (count, hidden)),
        "mlp.experts.gate_up_proj": ((count, 2 * width, hidden), ("gate", "up"), (width, hidden)),
        "mlp.experts.down_proj": ((count, hidden, width), ("down",), (hidden, width)),
    }
    return {
        name: Merged(shape, dict.fromkeys(_parts_of_merged(config, sources, ".weight"), of_part))
        for name, (shape, sources, of_part) in of_layer.items()
    }


def _merged_in_turn(config: ModelConfig) -> dict[str, Merged]:
    """As gpt-oss has them: biases; matrices with rows and columns exchanged, or in MXFP4, codes and scales."""
    assert config.routing is not None
    found: dict[str, Merged] = {}
    for product in config.table.products[-2:]:
        name, (rows, columns) = f"mlp.experts.{product.name}_proj", (product.sources_rows, product.columns)
        groups = columns // MX_COLUMNS
        kinds = {
            "": (".weight", (columns, rows), (rows, columns)),
            "_bias": (".bias", (rows,), (rows,)),
            "_blocks": (".blocks", (rows, groups, MX_COLUMNS // 2), (rows, columns // 2)),
            "_scales": (".scales", (rows, groups), (rows, groups)),
        }
        for behind, (suffix, stored, of_part) in kinds.items():
            parts = dict.fromkeys(_parts_of_merged(config, (product.name,), suffix), of_part)
            found[f"{name}{behind}"] = Merged((config.routing.experts, *stored), parts, is_transposed=not behind)
    return found


def _parts_of_merged(config: ModelConfig, sources: tuple[str, ...], suffix: str) -> Iterator[str]:
    """The tensors of the sources, of one expert after another, with `{layer}`."""
    assert config.routing is not None
    names = [module_of(config, source) for source in sources]
    count = config.routing.experts if "{expert}" in names[0] else 1
    for expert in range(count):
        yield from (f"{name.replace('{expert}', str(expert))}{suffix}" for name in names)


def norm_tensors(config: ModelConfig) -> list[str | None]:
    """The norms of all layers in the order of the buffer, then the head's. None: the products are multiplied with the
    residual stream itself, which is published times ones."""
    table, before = config.table, norms_before(config)
    names = [(before.get(one.name), layer) for layer in range(config.layers) for one in table.norms]
    return [*(name and name.format(layer=layer) for name, layer in names), FINAL_NORM]


# What of config.json makes each shape, for messages.
_SHAPE_MEANING = {
    "embed_tokens": "[vocab_size, hidden_size]",
    "lm_head": "[vocab_size, hidden_size]",
    "q_proj": "[num_attention_heads * head_dim, hidden_size]",
    "k_proj": "[num_key_value_heads * head_dim, hidden_size]",
    "v_proj": "[num_key_value_heads * head_dim, hidden_size]",
    "o_proj": "[hidden_size, num_attention_heads * head_dim]",
    "gate_proj": "[intermediate_size, hidden_size]",
    "up_proj": "[intermediate_size, hidden_size]",
    "down_proj": "[hidden_size, intermediate_size]",
    "qkv_proj": "[(num_attention_heads + 2 * num_key_value_heads) * head_dim, hidden_size]",
    "gate_up_proj": "[2 * intermediate_size, hidden_size]",
    "gate": "[num_experts, hidden_size]",
    "router": "[num_local_experts, hidden_size]",
    "w1": "[intermediate_size, hidden_size]",
    "w2": "[hidden_size, intermediate_size]",
    "w3": "[intermediate_size, hidden_size]",
    "input_linear": "[2 * shared_intermediate_size, hidden_size]",
    "output_linear": "[hidden_size, shared_intermediate_size]",
    "shared_expert_gate": "[1, hidden_size]",
    "norm": "[hidden_size]",
    "self_attn": "[num_attention_heads]",
    "input_layernorm": "[hidden_size]",
    "post_attention_layernorm": "[hidden_size]",
    "pre_feedforward_layernorm": "[hidden_size]",
    "post_feedforward_layernorm": "[hidden_size]",
    **MEANING_OF_DELTA,
    "q_norm": "[head_dim], or of all heads",
    "k_norm": "[head_dim], or of all heads",
}


def shape_meaning(tensor: str) -> str:
    """What of config.json makes the shape of a tensor."""
    part, kind = tensor.split(".")[-2:]
    meaning = _SHAPE_MEANING[part]
    return f"{meaning.split(', ')[0]}]" if kind == "bias" else meaning


def head_tensor(config: ModelConfig) -> str:
    """The tensor that makes the head: the embedding itself where they are tied."""
    return EMBEDDING if config.tied_embeddings else HEAD


def matrix_modules(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The linear layers of each matrix; none of a tied head. `{layer}` stands for the layer's number."""
    table = config.table
    modules = {product.name: tuple(_modules_of(config, product)) for product in table}
    if config.delta is not None and config.delta_layers:
        modules[table.onto_residual[0].name] += (OUT_PROJ_TENSOR.removesuffix(".weight"),)
        modules[IN_PROJ] = in_proj_modules(config.delta)
    return {**modules, **({table.head.name: ()} if config.tied_embeddings else {})}


def matrix_tensors(config: ModelConfig, matrix: str, layer: int = 0, expert: int = 0) -> tuple[str, ...]:
    """The tensors that make `matrix` in `layer`, or that of one of its experts."""
    product = product_of(config, matrix)
    if product.is_once:
        return (head_tensor(config),)
    if matrix in DELTA_ONLY:
        return tuple(in_proj_tensor(source.name).format(layer=layer) for source in product.sources)
    if layer in config.delta_layers and product.name == config.table.onto_residual[0].name:
        return (OUT_PROJ_TENSOR.format(layer=layer),)
    return tuple(f"{module}.weight".format(layer=layer, expert=expert) for module in _modules_of(config, product))


def buffer_bytes(config: ModelConfig, matrices: StepMatrices) -> dict[str, int]:
    """Bytes of every buffer that the checkpoint's tensors fill."""
    row = config.padded_hidden * 2
    sizes = {
        "weights": matrices.weight_bytes,
        "norms": config.table.norm_count * row,
        "embedding": config.vocab_size * config.embedding_columns(matrices.ranks) * 2,
    }
    vectors = vector_shapes(config, matrices.ranks).items()
    return sizes | {name: math.prod(shape) * vector_element_bytes(name) for name, shape in vectors}


def vector_element_bytes(name: str) -> int:
    """Of the elements of a buffer of `vector_shapes`."""
    return 4 if name == DELTA_NUMBERS else 2


def vector_shapes(config: ModelConfig, ranks: int = 1) -> dict[str, tuple[int, ...]]:
    """The buffers of vectors that only some models have, of 16 bits an element: biases (bf16) of q, k and v, of other
    products, of each expert, in the order of the matrix' rows; the weights of the norms of queries, then keys (bf16),
    of a head or of all in the order of the matrix' rows; the sinks of heads (bf16); the weights of the norms behind o,
    then behind down (bf16); where the columns of ordered matrices lie (u16), of the products whose inputs are placed
    (`StepTable.placed`); the weights of the norm of what is known of tokens, or of what another model's last layer
    leaves (bf16).
    ranks: GPUs of which each has its heads' biases and sinks."""
    shapes: dict[str, tuple[int, ...]] = {}
    if config.has_biases:
        shapes["biases"] = (config.layers, config.shape.of_rank(ranks).qkv_rows)
    for product in biased_products(config):
        experts = () if product.experts is None else (product.experts.count,)
        shapes[biases_name(product)] = (config.layers, *experts, len(row_groups(config, product.name)) * GROUP_ROWS)
    if config.head_norms == "each":
        shapes["head_norms"] = (config.layers - len(config.delta_layers), 2, config.head_dim)
    if config.head_norms == "width":
        shapes["head_norms"] = (config.layers, config.query_rows + config.kv_rows)
    if config.has_sinks:
        shapes["sinks"] = (config.layers, config.query_heads // ranks)
    if config.norms.after:
        shapes["norms_behind"] = (config.layers, len(BEHIND), config.padded_hidden)
    if config.act_order:
        shapes["places"] = places_shape(config)
    if (heads := config.shape.of_rank(ranks).delta) is not None:
        shapes[DELTA_TAPS] = (len(heads.layers), heads.channels, TAPS)
        shapes[DELTA_NUMBERS] = (len(heads.layers), heads.numbers)
    if config.block is not None:
        shapes["known_norm"] = (config.padded_hidden,)
    if config.drafter is not None and config.drafter.joins_residual:
        shapes["state_norm"] = (config.padded_hidden,)
    return shapes


def head_rows(config: ModelConfig, ranks: int = 1) -> int:
    """Rows of the head, with those that fill the last M-tiles of so many GPUs, which have as many each."""
    return round_up(config.table.head.rows, M_TILE_ROWS * ranks)


def logical_matrix(config: ModelConfig, matrix: str, tensors: Sequence[Bits]) -> Bits:
    """`matrix` in M-tile order, uint16 [rows, columns], from its tensors: what `unpack_matrix` gives back."""
    groups = row_groups(config, matrix)
    rows = np.zeros((len(groups) * GROUP_ROWS, tensors[0].shape[1]), dtype=np.uint16)
    groups.gather(tensors, rows, range(len(groups)))
    return rows[: len(tensors[0])] if config.table.named(matrix).order is RowOrder.PLAIN else rows


def in_m_tile_order(config: ModelConfig, matrix: str, layer: int, read: Callable[[str], NDArray[Any]]) -> NDArray[Any]:
    """See `DenseFamily.in_m_tile_order`."""
    groups, tensors = row_groups(config, matrix), [read(name) for name in matrix_tensors(config, matrix, layer)]
    count = len(groups) + len(groups) % 2
    rows = np.zeros((count * GROUP_ROWS, tensors[0].shape[1]), tensors[0].dtype)
    groups.gather(tensors, rows[: len(groups) * GROUP_ROWS], range(len(groups)))
    return rows
