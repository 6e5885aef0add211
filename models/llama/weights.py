"""From a checkpoint's tensors to the buffers the kernel reads: names, shapes, row order, and the packing of all of it.

Buffers: `weights` (bf16 in packed order, [layer 0: qkv, o, gate_up, down] [layer 1] ... [head]), `norms` (bf16
[2 * layers + 1, padded_hidden]) and `embedding` (bf16 [vocab, padded_hidden]), padded with zeros. Knows neither files
nor devices: tensors come from one function and bytes go to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cheetah.models.llama.config import LlamaConfig
from cheetah.models.llama.packing import Bits, Bytes, PackingError, pack_matrix, pack_rounds, unpack_matrix
from cheetah.plan import STRIP_ROWS, MatrixLayout, ModelShape, StepMatrices

__all__ = [
    "EMBEDDING",
    "FINAL_NORM",
    "HEAD",
    "MATRICES",
    "PackingError",
    "buffer_bytes",
    "head_tensor",
    "logical_matrix",
    "matrix_tensors",
    "model_shape",
    "pack_all",
    "pack_matrix",
    "tensor_shapes",
    "unpack_matrix",
    "weight_sources",
]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
MATRICES = ("qkv", "o", "gate_up", "down", "head")

_LAYER = "model.layers.{layer}."
INPUT_NORM = _LAYER + "input_layernorm.weight"
POST_ATTENTION_NORM = _LAYER + "post_attention_layernorm.weight"
_SOURCES = {
    "qkv": tuple(_LAYER + f"self_attn.{part}_proj.weight" for part in "qkv"),
    "o": (_LAYER + "self_attn.o_proj.weight",),
    "gate_up": (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight"),
    "down": (_LAYER + "mlp.down_proj.weight",),
}

GROUP_ROWS = 8  # a strip is two groups of 8 consecutive rows of one tensor: the rows g and g + 8 of an mma fragment
WRITE_BYTES = 32 * 2**20  # about what one call of `write` gets

ReadTensor = Callable[[str], Bits]
WriteBytes = Callable[[str, int, Bytes], None]
Progress = Callable[[int], None]


def model_shape(config: LlamaConfig) -> ModelShape:
    """The numbers of the model that the plan works with."""
    return ModelShape(
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        heads=config.query_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        layers=config.layers,
    )


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
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
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.layers):
        shapes |= {name.format(layer=layer): shape for name, shape in of_layer.items()}
    shapes[FINAL_NORM] = (hidden,)
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def head_tensor(config: LlamaConfig) -> str:
    """The tensor that makes the head: the embedding itself where they are tied."""
    return EMBEDDING if config.tied_embeddings else HEAD


def weight_sources(config: LlamaConfig) -> dict[str, tuple[str, ...]]:
    """Which tensors make which matrix; `{layer}` stands for the layer's number."""
    return {**_SOURCES, "head": (head_tensor(config),)}


def matrix_tensors(config: LlamaConfig, matrix: str, layer: int = 0) -> tuple[str, ...]:
    """The tensors that make `matrix` in `layer`."""
    return tuple(name.format(layer=layer) for name in weight_sources(config)[matrix])


def buffer_bytes(config: LlamaConfig, matrices: StepMatrices) -> dict[str, int]:
    """Bytes of the three buffers, all of which `pack_all` writes."""
    row = config.padded_hidden * 2
    return {
        "weights": matrices.weight_bytes,
        "norms": (2 * config.layers + 1) * row,
        "embedding": config.vocab_size * row,
    }


def logical_matrix(config: LlamaConfig, matrix: str, tensors: tuple[Bits, ...]) -> Bits:
    """`matrix` in strip order, uint16 [rows, columns], from its tensors: what `unpack_matrix` gives back."""
    groups = _row_groups(config, matrix)
    rows = np.zeros((len(groups) * GROUP_ROWS, tensors[0].shape[1]), dtype=np.uint16)
    _gather(groups, tensors, rows)
    return rows if matrix in ("qkv", "gate_up") else rows[: len(tensors[0])]


def pack_all(
    config: LlamaConfig, matrices: StepMatrices, tensor: ReadTensor, write: WriteBytes, progress: Progress | None = None
) -> None:
    """Pack every weight, tensor by tensor, and hand the bytes out: `write(buffer, byte offset, uint8 [n])`.

    Every byte of the three buffers is written once. The array given to `write` is valid only until it returns: its
    memory is used again. Host memory: the tensors of one matrix (as `tensor` gives them: a memory map costs nothing)
    and two pieces of about 32 MB, or one round of strips where that is more. `progress` gets the bytes just written.
    """

    def put(buffer: str, offset: int, data: Bytes) -> None:
        write(buffer, offset, data)
        if progress is not None:
            progress(data.nbytes)

    _pack_embedding(config, tensor(EMBEDDING), put)
    _pack_norms(config, tensor, put)
    packer = _MatrixPacker(config)
    for layer in range(config.layers):
        for layout in matrices.of_layer:
            for offset, data in packer.pieces(layout, _read(tensor, config, layout.name, layer)):
                put("weights", matrices.offset(layout.name, layer) + offset, data)
    for offset, data in packer.pieces(matrices.head, _read(tensor, config, "head", 0)):
        put("weights", matrices.head.offset + offset, data)


def _read(tensor: ReadTensor, config: LlamaConfig, matrix: str, layer: int) -> tuple[Bits, ...]:
    return tuple(tensor(name) for name in matrix_tensors(config, matrix, layer))


def _pack_norms(config: LlamaConfig, tensor: ReadTensor, put: WriteBytes) -> None:
    norms = np.zeros((2 * config.layers + 1, config.padded_hidden), dtype=np.uint16)
    for layer in range(config.layers):
        norms[2 * layer, : config.hidden_size] = tensor(INPUT_NORM.format(layer=layer))
        norms[2 * layer + 1, : config.hidden_size] = tensor(POST_ATTENTION_NORM.format(layer=layer))
    norms[-1, : config.hidden_size] = tensor(FINAL_NORM)
    put("norms", 0, norms.view(np.uint8).reshape(-1))


def _pack_embedding(config: LlamaConfig, embedding: Bits, put: WriteBytes) -> None:
    row_bytes = config.padded_hidden * 2
    count = max(1, WRITE_BYTES // row_bytes)
    padded = np.zeros((min(count, config.vocab_size), config.padded_hidden), dtype=np.uint16)
    for first in range(0, config.vocab_size, count):
        rows = embedding[first : first + count]
        padded[: len(rows), : config.hidden_size] = rows
        put("embedding", first * row_bytes, padded[: len(rows)].view(np.uint8).reshape(-1))


@dataclass(frozen=True)
class _RowGroups:
    """The rows of a matrix in strip order, as groups of 8: tensor `source`, rows `first` .. `first + count` - 1.

    A group with fewer than 8 rows (at a tensor's end) is filled up with zero rows.
    """

    source: NDArray[np.int64]
    first: NDArray[np.int64]
    count: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.source)

    def part(self, begin: int, stop: int) -> _RowGroups:
        return _RowGroups(self.source[begin:stop], self.first[begin:stop], self.count[begin:stop])


def _row_groups(config: LlamaConfig, matrix: str) -> _RowGroups:
    if matrix == "qkv":
        heads = [(0, config.query_heads, True), (1, config.kv_heads, True), (2, config.kv_heads, False)]
        parts = [_head_groups(config.head_dim, *part) for part in heads]
        sources, firsts = zip(*parts, strict=True)
        return _counted(np.concatenate(sources), np.concatenate(firsts), config.qkv_rows)
    if matrix == "gate_up":
        ffn = config.intermediate_size
        first = np.repeat(np.arange(0, ffn, GROUP_ROWS, dtype=np.int64), 2)
        return _counted(np.arange(len(first), dtype=np.int64) % 2, first, ffn)
    rows = config.vocab_size if matrix == "head" else config.hidden_size
    first = np.arange(0, -(-rows // STRIP_ROWS) * STRIP_ROWS, GROUP_ROWS, dtype=np.int64)
    return _counted(np.zeros_like(first), first, rows)


def _head_groups(head_dim: int, source: int, heads: int, rotated: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Strip j of a rotated head: dims 8j.. then dims D/2 + 8j.., so that both of a rotated pair lie in one lane."""
    dims = np.arange(0, head_dim, GROUP_ROWS, dtype=np.int64)
    if rotated:
        dims = dims.reshape(2, -1).T.reshape(-1)
    first = (np.arange(heads, dtype=np.int64)[:, None] * head_dim + dims).reshape(-1)
    return np.full(len(first), source, dtype=np.int64), first


def _counted(source: NDArray[np.int64], first: NDArray[np.int64], rows: int) -> _RowGroups:
    return _RowGroups(source, first, np.clip(rows - first, 0, GROUP_ROWS))


def _gather(groups: _RowGroups, tensors: tuple[Bits, ...], rows: Bits) -> None:
    """Copy the groups into `rows` [len(groups) * 8, at least the tensors' columns]; padding columns are left alone."""
    columns = tensors[0].shape[1]
    everything = zip(groups.source.tolist(), groups.first.tolist(), groups.count.tolist(), strict=True)
    for index, (source, first, count) in enumerate(everything):
        group = rows[index * GROUP_ROWS : (index + 1) * GROUP_ROWS]
        group[:count, :columns] = tensors[source][first : first + count]
        group[count:] = 0


class _MatrixPacker:
    """Packs matrices one after the other through the same two pieces of memory."""

    def __init__(self, config: LlamaConfig):
        self.config = config
        self.gathered = np.empty(0, dtype=np.uint16)
        self.packed = np.empty(0, dtype=np.uint8)

    def pieces(self, layout: MatrixLayout, tensors: tuple[Bits, ...]) -> Iterator[tuple[int, Bytes]]:
        """(byte offset in the matrix, packed bytes) for some rounds at a time."""
        groups = _row_groups(self.config, layout.name)
        if len(groups) != 2 * layout.strips:
            raise PackingError(f"matrix {layout.name!r}: {len(groups)} groups of rows for {layout.strips} strips")
        round_bytes = layout.blocks * layout.strip_bytes
        rounds = max(1, WRITE_BYTES // round_bytes)
        for first_round in range(0, layout.rounds, rounds):
            begin = first_round * layout.blocks
            stop = min(layout.strips, begin + rounds * layout.blocks)
            rows = self._rows(layout, groups, tensors, begin, stop)
            packed = self._packed((stop - begin) * layout.strip_bytes)
            pack_rounds(layout, first_round, rows, packed)
            yield first_round * round_bytes, packed

    def _rows(self, layout: MatrixLayout, groups: _RowGroups, tensors: tuple[Bits, ...], begin: int, stop: int) -> Bits:
        """The rows of strips `begin` .. `stop` - 1, padded: straight from the tensor where its rows are in order."""
        natural = len(tensors) == 1 and layout.columns == layout.padded_columns and stop * STRIP_ROWS <= layout.rows
        if natural and tensors[0].flags.c_contiguous:
            return tensors[0][begin * STRIP_ROWS : stop * STRIP_ROWS]
        size = (stop - begin) * STRIP_ROWS * layout.padded_columns
        if self.gathered.size < size:
            self.gathered = np.empty(size, dtype=np.uint16)
        rows = self.gathered[:size].reshape(-1, layout.padded_columns)
        rows[:, layout.columns :] = 0
        _gather(groups.part(2 * begin, 2 * stop), tensors, rows)
        return rows

    def _packed(self, size: int) -> Bytes:
        if self.packed.size < size:
            self.packed = np.empty(size, dtype=np.uint8)
        return self.packed[:size]
