"""From a checkpoint's tensors to the buffers the kernel reads: names, shapes, and the order of rows.

Buffers: `weights` (bf16 in packed order, [layer 0: qkv, o, gate_up, down] [layer 1] ... [head]), `norms` (bf16
[2 * layers + 1, padded_hidden]) and `embedding` (bf16 [vocab, padded_hidden]), padded with zeros, and where the family
has them those of `vector_shapes`; `pack_weights` fills them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.act_order import places_shape
from cheetah.models.config import ModelConfig
from cheetah.models.family import QuantizedMatrix, Rows
from cheetah.models.formats.quantized import RowPlanes, rows_of_element
from cheetah.models.repacking import ScaleRows
from cheetah.models.rounding import Bits
from cheetah.plan import M_TILE_ROWS, MatrixLayout, StepMatrices

__all__ = [
    "EMBEDDING",
    "FINAL_NORM",
    "HEAD",
    "MATRICES",
    "RowGroups",
    "buffer_bytes",
    "head_tensor",
    "logical_matrix",
    "matrix_modules",
    "matrix_tensors",
    "row_groups",
    "shape_meaning",
    "tensor_shapes",
    "weight_sources",
]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
MATRICES = ("qkv", "o", "gate_up", "down", "lm_head")

_LAYER = "model.layers.{layer}."
LAYER_PATTERN = r"model\.layers\.([0-9]{1,9})\."  # a longer number is no layer's
INPUT_NORM = _LAYER + "input_layernorm.weight"
POST_ATTENTION_NORM = _LAYER + "post_attention_layernorm.weight"
_SOURCES = {
    "qkv": tuple(_LAYER + f"self_attn.{part}_proj.weight" for part in "qkv"),
    "o": (_LAYER + "self_attn.o_proj.weight",),
    "gate_up": (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight"),
    "down": (_LAYER + "mlp.down_proj.weight",),
}
QKV_BIASES = tuple(_LAYER + f"self_attn.{part}_proj.bias" for part in "qkv")
HEAD_NORMS = tuple(_LAYER + f"self_attn.{part}_norm.weight" for part in "qk")

GROUP_ROWS = 8  # an M-tile is two groups of 8 consecutive rows of one tensor: the rows g and g + 8 of an mma fragment


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint must hold, with its shape ([out, in], row-major). A tied head is not among them."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    of_layer: dict[str, tuple[int, ...]] = {
        INPUT_NORM: (hidden,),
        _SOURCES["qkv"][0]: (config.query_rows, hidden),
        _SOURCES["qkv"][1]: (config.kv_rows, hidden),
        _SOURCES["qkv"][2]: (config.kv_rows, hidden),
        _SOURCES["o"][0]: (hidden, config.query_rows),
        POST_ATTENTION_NORM: (hidden,),
        _SOURCES["gate_up"][0]: (ffn, hidden),
        _SOURCES["gate_up"][1]: (ffn, hidden),
        _SOURCES["down"][0]: (hidden, ffn),
    }
    if config.has_biases:
        of_layer |= {name: of_layer[matrix][:1] for name, matrix in zip(QKV_BIASES, _SOURCES["qkv"], strict=True)}
    if config.has_head_norms:
        of_layer |= dict.fromkeys(HEAD_NORMS, (config.head_dim,))
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.layers):
        shapes |= {name.format(layer=layer): shape for name, shape in of_layer.items()}
    shapes[FINAL_NORM] = (hidden,)
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


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
    "norm": "[hidden_size]",
    "input_layernorm": "[hidden_size]",
    "post_attention_layernorm": "[hidden_size]",
    "q_norm": "[head_dim]",
    "k_norm": "[head_dim]",
}


def shape_meaning(tensor: str) -> str:
    """What of config.json makes the shape of a tensor."""
    part, kind = tensor.split(".")[-2:]
    meaning = _SHAPE_MEANING[part]
    return f"{meaning.split(', ')[0]}]" if kind == "bias" else meaning


def head_tensor(config: ModelConfig) -> str:
    """The tensor that makes the head: the embedding itself where they are tied."""
    return EMBEDDING if config.tied_embeddings else HEAD


def weight_sources(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Which tensors make which matrix; `{layer}` stands for the layer's number."""
    return {**_SOURCES, "lm_head": (head_tensor(config),)}


def matrix_modules(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The linear layers of each matrix; none of a tied head."""
    sources = {**weight_sources(config), **({"lm_head": ()} if config.tied_embeddings else {})}
    return {matrix: tuple(name.removesuffix(".weight") for name in names) for matrix, names in sources.items()}


def matrix_tensors(config: ModelConfig, matrix: str, layer: int = 0) -> tuple[str, ...]:
    """The tensors that make `matrix` in `layer`."""
    return tuple(name.format(layer=layer) for name in weight_sources(config)[matrix])


def buffer_bytes(config: ModelConfig, matrices: StepMatrices) -> dict[str, int]:
    """Bytes of every buffer that the checkpoint's tensors fill."""
    row = config.padded_hidden * 2
    sizes = {
        "weights": matrices.weight_bytes,
        "norms": (2 * config.layers + 1) * row,
        "embedding": config.vocab_size * row,
    }
    return sizes | {name: math.prod(shape) * 2 for name, shape in vector_shapes(config).items()}


def vector_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The buffers of vectors that only some models have, of 16 bits an element: biases (bf16) in the order of the
    matrix' rows; the weights of the norms of queries, then keys (bf16); where the columns of ordered matrices lie
    (u16), of every layer's qkv, o and gate_up, then of lm_head."""
    shapes: dict[str, tuple[int, ...]] = {}
    if config.has_biases:
        shapes["biases"] = (config.layers, config.qkv_rows)
    if config.has_head_norms:
        shapes["head_norms"] = (config.layers, 2, config.head_dim)
    if config.act_order:
        shapes["places"] = places_shape(config)
    return shapes


def logical_matrix(config: ModelConfig, matrix: str, tensors: Sequence[Bits]) -> Bits:
    """`matrix` in M-tile order, uint16 [rows, columns], from its tensors: what `unpack_matrix` gives back."""
    groups = row_groups(config, matrix)
    rows = np.zeros((len(groups) * GROUP_ROWS, tensors[0].shape[1]), dtype=np.uint16)
    groups.gather(tensors, rows, range(len(groups)))
    return rows if matrix in ("qkv", "gate_up") else rows[: len(tensors[0])]


@dataclass(frozen=True)
class _Run:
    """Groups `index`, `index + step`, ... (`count` of them): rows `first` on of tensor `source`, one after the other.

    rows: of the last group, if it is not a whole one; such a run is that group alone.
    """

    index: int
    step: int
    count: int
    source: int
    first: int
    rows: int

    def copy(self, plane: NDArray[Any], begin: int, places: NDArray[Any]) -> None:
        """The rows from `begin` on to their groups [count, 8, columns], or [count, 1, columns] of EIGHT_ROWS."""
        of_element = rows_of_element(plane)
        rows = self.rows // of_element
        values = plane[begin // of_element :][:rows]
        if self.rows == self.count * GROUP_ROWS:
            places[:] = values.reshape(self.count, GROUP_ROWS // of_element, -1)
        else:
            places[0, :rows] = values
            places[0, rows:] = np.zeros((), plane.dtype)


@dataclass(frozen=True)
class SourceRows:
    """Rows of tensor `source`: row `rows[i]` of it is row `places[i]` of some groups."""

    source: int
    places: NDArray[np.int64]
    rows: NDArray[np.int64]

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first of the tensor's rows, and the one behind the last."""
        return int(self.rows.min()), int(self.rows.max()) + 1


def _planes(rows: Bits | RowPlanes) -> tuple[NDArray[Any], ...]:
    return rows.planes if isinstance(rows, RowPlanes) else (rows,)


class RowGroups:
    """The rows of a matrix in M-tile order, as groups of 8: tensor `source`, rows `first` .. `first + count` - 1.

    A group with fewer than 8 rows (at a tensor's end) is filled up with zero rows.
    """

    def __init__(self, source: NDArray[np.int64], first: NDArray[np.int64], count: NDArray[np.int64]) -> None:
        self.source, self.first, self.count = source.tolist(), first.tolist(), count.tolist()

    def __len__(self) -> int:
        return len(self.source)

    @lru_cache(maxsize=4096)  # noqa: B019 - as for `_reads`
    def rows(self, groups: range) -> tuple[SourceRows, ...]:
        """What some groups have of each tensor of which they have a row."""
        some = slice(groups.start, groups.stop)
        source, first, count = (np.array(one[some]) for one in (self.source, self.first, self.count))
        of_group = np.arange(GROUP_ROWS)
        row, is_there = first[:, None] + of_group, of_group < count[:, None]
        found = ((number, (is_there & (source == number)[:, None]).reshape(-1)) for number in np.unique(source))
        return tuple(
            SourceRows(int(number), np.flatnonzero(mine), row.reshape(-1)[mine]) for number, mine in found if mine.any()
        )

    def gather(
        self, tensors: Sequence[Rows | QuantizedMatrix | ScaleRows], rows: Bits | RowPlanes, groups: range
    ) -> None:
        """Copy some groups into `rows` [8 times as many, at least the tensors' columns]; padding columns stay."""
        for source, first, stop, runs in self._reads(groups.start, groups.stop):
            values = tensors[source][first:stop]
            for target, plane in zip(_planes(rows), _planes(values), strict=True):
                places = target.reshape(-1, GROUP_ROWS // rows_of_element(plane), target.shape[1])
                for run in runs:
                    of_group = places[run.index - groups.start :: run.step, :, : plane.shape[1]]
                    run.copy(plane, run.first - first, of_group[: run.count])

    @lru_cache(maxsize=4096)  # noqa: B019 - a matrix has few blocks, and the groups themselves are kept as long
    def _reads(self, begin: int, stop: int) -> tuple[tuple[int, int, int, tuple[_Run, ...]], ...]:
        """What groups `begin` .. `stop` - 1 need: tensor, its first row and the one behind its last, and the runs that
        are there. What lies side by side is read at once, and what no run needs not at all."""
        reads = list[tuple[int, int, int, tuple[_Run, ...]]]()
        for source in sorted({self.source[index] for index in range(begin, stop)}):
            runs = sorted((run for run in self._runs(begin, stop) if run.source == source), key=lambda run: run.first)
            together = list[_Run]()
            for run, after in zip(runs, [*runs[1:], None], strict=True):
                together.append(run)
                if after is None or after.first != run.first + run.rows:
                    reads.append((source, together[0].first, run.first + run.rows, tuple(together)))
                    together = []
        return tuple(reads)

    def _runs(self, begin: int, stop: int) -> tuple[_Run, ...]:
        """Groups `begin` .. `stop` - 1 in as few runs as there are: a copy each, so that Python does little."""
        runs, done = list[_Run](), set[int]()
        for index in range(begin, stop):
            if index in done:
                continue
            step, count = max(
                ((step, self._length(index, step, stop, done)) for step in (1, 2)), key=lambda run: run[1]
            )
            done.update(range(index, index + count * step, step))
            rows = count * GROUP_ROWS if count > 1 else self.count[index]
            runs.append(_Run(index, step, count, self.source[index], self.first[index], rows))
        return tuple(runs)

    def _length(self, index: int, step: int, stop: int, done: set[int]) -> int:
        count, after = 1, index + step
        while (
            after < stop
            and after not in done
            and self.count[index] == self.count[after] == GROUP_ROWS
            and self.source[after] == self.source[index]
            and self.first[after] == self.first[index] + count * GROUP_ROWS
        ):
            count, after = count + 1, after + step
        return count


def groups_of(layout: MatrixLayout, m_tiles: range) -> range:
    """The groups of 8 rows that some M-tiles of a matrix have."""
    of_tile = layout.tile_rows // GROUP_ROWS
    return range(m_tiles.start * of_tile, m_tiles.stop * of_tile)


@lru_cache(maxsize=64)
def row_groups(config: ModelConfig, matrix: str) -> RowGroups:
    """How the rows of `matrix` are made from its tensors."""
    if matrix == "qkv":
        heads = [(0, config.query_heads, True), (1, config.kv_heads, True), (2, config.kv_heads, False)]
        parts = [_head_groups(config.head_dim, *part) for part in heads]
        sources, firsts = zip(*parts, strict=True)
        return _counted(np.concatenate(sources), np.concatenate(firsts), config.qkv_rows)
    if matrix == "gate_up":
        ffn = config.intermediate_size
        first = np.repeat(np.arange(0, ffn, GROUP_ROWS, dtype=np.int64), 2)
        return _counted(np.arange(len(first), dtype=np.int64) % 2, first, ffn)
    rows = config.vocab_size if matrix == "lm_head" else config.hidden_size
    first = np.arange(0, -(-rows // M_TILE_ROWS) * M_TILE_ROWS, GROUP_ROWS, dtype=np.int64)
    return _counted(np.zeros_like(first), first, rows)


def _head_groups(head_dim: int, source: int, heads: int, rotated: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """M-tile j of a rotated head: dims 8j.. then dims D/2 + 8j.., so that both of a rotated pair lie in one lane."""
    dims = np.arange(0, head_dim, GROUP_ROWS, dtype=np.int64)
    if rotated:
        dims = dims.reshape(2, -1).T.reshape(-1)
    first = (np.arange(heads, dtype=np.int64)[:, None] * head_dim + dims).reshape(-1)
    return np.full(len(first), source, dtype=np.int64), first


def _counted(source: NDArray[np.int64], first: NDArray[np.int64], rows: int) -> RowGroups:
    return RowGroups(source, first, np.clip(rows - first, 0, GROUP_ROWS))
