"""A device whose launches do what the Llama kernel's parameters say, in float32 numpy by `models.dense.reference`.

It reads nothing but the buffers and scalars of the launch: packed weights, norms, embedding, rope table, KV pages by
the page table, KV plans, tiles, sequences, columns, tokens, stop ids, epoch. So the whole runtime is tested end to end
without the kernel, and what the kernel may rely on is checked here: plans that cover every key once, tiles that read
the sequence's own pages, pages that nobody else reads where one writes, epochs that never repeat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from cheetah.generate import choose_plan, describe_kernel
from cheetah.manifest import Manifest
from cheetah.models.dense.reference import Reference
from cheetah.models.dense.weights import EMBEDDING, FINAL_NORM, HEAD, logical_matrix, matrix_tensors, tensor_shapes
from cheetah.models.formats import unpack_matrix
from cheetah.models.llama import LlamaConfig
from cheetah.models.rounding import round_to_bf16
from cheetah.models.sampling import Filters, Penalties, adjusted, sample
from cheetah.package import Generated
from cheetah.piece_ring import PieceRing, ordinary_memory
from cheetah.plan import GPUS, Plan, gpu_named, step_matrices
from cheetah.plan.formats import KV_TILE_TOKENS
from cheetah.plan.kv import KvPlanLayout
from cheetah.plan.kv.tables import (
    BIASED,
    COLUMN_WORDS,
    FILTERED,
    MASKED,
    MAX_STOP_IDS,
    NOT_YET,
    PENALISED,
    PROMPT_TOKEN,
    SEQUENCE_WORDS,
    TILE_WORDS,
    SequenceRecord,
    TileRecord,
    epochs_of_step,
)
from cheetah.runtime.background import Started, started
from cheetah.runtime.device.arguments import check_arguments
from cheetah.runtime.device.interface import DeviceInfo, LaunchTimeout

TEXT = "// stands for the generated kernel\n"


def generate_kernel(config: LlamaConfig, gpu_name: str, **overrides: Any) -> Generated:
    """Stands for `cheetah.generate.generate_kernel`: the same manifest, no kernel."""
    gpu = gpu_named(gpu_name)
    plan = choose_plan(config, gpu, **overrides)
    return Generated("", describe_kernel(config, gpu, plan, "none")).with_text(TEXT)


class FakeBuffer:
    """Host bytes with a device buffer's manners; poisoned unless filled."""

    def __init__(self, nbytes: int, fill: int | None):
        self.nbytes = nbytes
        self.data: NDArray[np.uint8] | None = np.full(nbytes, 0xFF if fill is None else fill, np.uint8)

    @property
    def address(self) -> int:
        return self._live().ctypes.data

    def upload(self, array: NDArray[Any], offset: int = 0) -> None:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        assert 0 <= offset and offset + flat.nbytes <= self.nbytes, "upload outside the buffer"
        self._live()[offset : offset + flat.nbytes] = flat

    def download(self, dtype: DTypeLike, shape: int | tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        return self.view(dtype, shape, offset).copy()

    def view(self, dtype: DTypeLike, shape: int | tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._live()[offset : offset + count].view(dtype).reshape(shape)

    def fill(self, byte: int) -> None:
        self._live()[:] = byte

    def copy(self, source_offset: int, target_offset: int, nbytes: int) -> None:
        self.view(np.uint8, nbytes, target_offset)[:] = self.download(np.uint8, nbytes, source_offset)

    @property
    def array(self) -> NDArray[np.uint8]:
        return self._live()

    def free(self) -> None:
        self.data = None

    def _live(self) -> NDArray[np.uint8]:
        assert self.data is not None, "the buffer was freed"
        return self.data


@dataclass
class FakeKernel:
    manifest: Manifest
    text: str


class FakeDevice:
    """Pretends to be `gpu`. `launches` keeps the scalars of every launch, with the records of its `sequences` and
    `tiles`; `hang` makes synchronize time out."""

    name = "fake"

    def __init__(self, gpu: str = "emulator", free_bytes: int = 2**40, info: DeviceInfo | None = None):
        shape = GPUS[gpu]
        self.info = info or DeviceInfo(
            "emulator", "fake", "sm_90", shape.blocks, shape.shared_bytes, 2**40, free_bytes, "none"
        )
        self.launches: list[dict[str, Any]] = []
        self.buffers: list[FakeBuffer] = []
        self.hang = False
        self.closed = False
        self._model: Reference | None = None

    def describe(self) -> DeviceInfo:
        return self.info

    def load(self, text: str, manifest: Manifest) -> FakeKernel:
        manifest.check_text(text)
        return FakeKernel(manifest, text)

    def prepare(self, text: str, manifest: Manifest) -> Started[FakeKernel]:
        kernel = self.load(text, manifest)
        return started(lambda: kernel)

    def lend(self, nbytes: int) -> AbstractContextManager[PieceRing]:
        return ordinary_memory(nbytes)

    def allocate(self, nbytes: int, fill: int | None = None) -> FakeBuffer:
        self.buffers.append(FakeBuffer(nbytes, fill))
        return self.buffers[-1]

    def allocate_mapped(self, nbytes: int) -> FakeBuffer:
        return self.allocate(nbytes, 0)

    def is_done(self) -> bool:
        return True

    def launch(self, kernel: FakeKernel, arguments: Mapping[str, Any]) -> None:
        check_arguments(kernel.manifest, arguments)
        self.launches.append({name: value for name, value in arguments.items() if not isinstance(value, FakeBuffer)})
        if self._model is None:
            self._model = model_in_buffers(kernel.manifest, arguments)
        tables = run_kernel(kernel.manifest, self._model, arguments)
        self.launches[-1] |= {"sequences": tables.sequences, "tiles": tables.tiles}

    def synchronize(self, timeout_s: float | None = None, progress: object = None) -> None:
        if self.hang:
            raise LaunchTimeout(f"the launch did not finish in {timeout_s} s")

    def record(self) -> object:
        return None

    def elapsed_ms(self, start: object, end: object) -> float:
        return 0.0

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakeDevice:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def model_in_buffers(manifest: Manifest, buffers: Mapping[str, Any]) -> Reference:
    """The reference, with its weights unpacked from the device's buffers, rounding where bf16 must wave."""
    config = dataclasses.replace(LlamaConfig.from_json(manifest.config), tied_embeddings=False)
    gpu = gpu_named(manifest.gpu["name"])
    matrices = step_matrices(config.shape, Plan.from_dict(manifest.plan), gpu)
    hidden, padded = config.hidden_size, config.padded_hidden
    norms = buffers["norms"].view(np.uint16, (2 * config.layers + 1, padded))[:, :hidden]
    tensors = {
        EMBEDDING: buffers["embedding"].view(np.uint16, (config.vocab_size, padded))[:, :hidden],
        FINAL_NORM: norms[-1],
    }
    packed = buffers["weights"].view(np.uint8, buffers["weights"].nbytes)
    for layout in matrices:
        for layer in range(matrices.copies(layout)):
            offset = matrices.offset(layout.name, layer)
            rows = unpack_matrix(layout, packed[offset : offset + layout.total_bytes])
            tensors |= _split(config, layout.name, layer, rows)
    for layer in range(config.layers):
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = norms[2 * layer]
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = norms[2 * layer + 1]
    assert HEAD in tensors
    return Reference(config, tensors, round_to_bf16)


def _split(config: LlamaConfig, matrix: str, layer: int, rows: NDArray[np.uint16]) -> dict[str, NDArray[np.uint16]]:
    """A matrix in M-tile order back into its tensors: where each row went is found by packing row numbers."""
    names, shapes = matrix_tensors(config, matrix, layer), tensor_shapes(config)
    counts = [shapes[name][0] for name in names]
    numbers = np.arange(1, sum(counts) + 1, dtype=np.uint16)[:, None]
    order = logical_matrix(config, matrix, tuple(np.split(numbers, np.cumsum(counts)[:-1])))[:, 0]
    natural = np.empty((sum(counts), rows.shape[1]), np.uint16)
    natural[order[order > 0] - 1] = rows[order > 0]
    return dict(zip(names, np.split(natural, np.cumsum(counts)[:-1]), strict=True))


@dataclass
class Tables:
    """A launch's tables, read back and checked against each other."""

    plan: Plan
    arguments: Mapping[str, Any]
    sequences: list[SequenceRecord]
    tiles: list[TileRecord]
    pages: NDArray[np.int32]  # [sequences, pages_per_sequence]
    tokens: NDArray[np.int32]  # [sequences, launch_tokens + 1]

    @classmethod
    def read(cls, plan: Plan, arguments: Mapping[str, Any]) -> Tables:
        columns = int(arguments["column_count"])
        count = 1 + int(arguments["columns"].view(np.int32, (columns, COLUMN_WORDS))[-1, 0])
        assert 1 <= count <= plan.batch and count <= columns <= plan.tokens
        words = arguments["sequences"].view(np.int32, (count, SEQUENCE_WORDS))
        sequences = [SequenceRecord(*map(int, row[: len(dataclasses.fields(SequenceRecord))])) for row in words]
        expected = [(b, i) for b, sequence in enumerate(sequences) for i in range(sequence.per_step)]
        assert arguments["columns"].view(np.int32, (columns, COLUMN_WORDS))[:, :2].tolist() == [*map(list, expected)]
        firsts = np.cumsum([0, *(sequence.per_step for sequence in sequences)])
        assert [sequence.first_column for sequence in sequences] == firsts[:-1].tolist()
        pages = arguments["page_table"].view(np.int32, (count, plan.pages_per_sequence))
        tokens = arguments["tokens"].view(np.int32, (count, plan.launch_tokens + 1))
        return cls(plan, arguments, sequences, cls._tiles(plan, arguments, columns), pages, tokens)

    @staticmethod
    def _tiles(plan: Plan, arguments: Mapping[str, Any], columns: int) -> list[TileRecord]:
        """Those in use: each column has one tile with new keys, and the tiles without come first."""
        tiles, own = [], 0
        for row in arguments["tiles"].view(np.int32, (arguments["tiles"].nbytes // 4 // TILE_WORDS, TILE_WORDS)):
            tiles.append(TileRecord(*map(int, row)))
            own += tiles[-1].columns if tiles[-1].new else 0
            if own == columns:
                return tiles
        raise AssertionError(f"the tiles have {own} of {columns} columns")

    def stops(self, sequence: SequenceRecord) -> set[int]:
        stop_ids = self.arguments["stop_ids"].view(np.int32, (MAX_STOP_IDS,))
        return set(stop_ids[sequence.stop_first :][: sequence.stop_count].tolist())


def run_kernel(manifest: Manifest, model: Reference, arguments: Mapping[str, Any]) -> Tables:
    """One launch, step by step, as the manifest's parameters say."""
    config, plan = model.config, Plan.from_dict(manifest.plan)
    steps = int(arguments["steps"])
    tables = Tables.read(plan, arguments)
    _check_sequences(tables, steps)
    _use_epochs(arguments, steps * epochs_of_step(config.layers))
    table = arguments["rope"].view(np.float32, (plan.max_context, config.head_dim // 2, 2))
    model.tables = dict.fromkeys(model.tables, table)
    stopped: set[int] = set()
    done = 0
    while done < steps and len(stopped) < len(tables.sequences):
        _check_plan(manifest, config, tables, done)
        for number in range(len(tables.sequences)):
            if _sequence_step(tables, model, number, done):
                stopped.add(number)
        done += 1
    arguments["status"].view(np.int32, (8,))[0] = done
    arguments["progress"].view(np.uint32, (manifest.launch.blocks,))[:] = done * len(manifest.phases)
    return tables


def _sequence_step(tables: Tables, model: Reference, number: int, step: int) -> bool:
    """The tokens of one sequence in one step; whether it has sampled a stop id or has no more."""
    sequence, tokens, plan = tables.sequences[number], tables.tokens[number], tables.plan
    vocab, logits_buffer = model.config.vocab_size, tables.arguments["logits"]
    temperature = _float(sequence.temperature)
    seed = (sequence.seed_low & 0xFFFFFFFF) | (sequence.seed_high & 0xFFFFFFFF) << 32
    has_stopped = False
    for column in range(sequence.per_step):
        k = step * sequence.per_step + column
        if k >= sequence.total:
            return True
        position = sequence.length + k
        token = min(int(tokens[k]) & 0xFFFFFFFF, vocab - 1)  # after NO_TOKEN any will do
        logits = _cached_step(model.config, plan, model, tables, number, position, token)
        if logits_buffer is not None:
            rows = logits_buffer.view(np.float32, (int(tables.arguments["steps"]), plan.tokens, vocab))
            rows[step, sequence.first_column + column] = logits
        if k + 1 >= sequence.given:
            assert step >= int(tables.arguments["head_from"]) or logits_buffer is not None, "a sample without its head"
            adjusted, filters = _as_asked(tables, sequence, logits)
            chosen = sample(adjusted, temperature, seed, position + 1, filters)
            tokens[k + 1] = np.uint32(chosen).view(np.int32)
            emitted = tables.arguments["emitted"].view(np.uint32, (plan.batch, plan.launch_tokens + 1))
            assert emitted[number, k + 1] == NOT_YET
            emitted[number, k + 1] = chosen
            if sequence.options & PENALISED and chosen < vocab:
                _row(tables, sequence, "token_counts", np.uint32)[chosen] += 1
            has_stopped |= int(tokens[k + 1]) in tables.stops(sequence)
    return has_stopped or (step + 1) * sequence.per_step >= sequence.total


def _row(tables: Tables, sequence: SequenceRecord, name: str, dtype: DTypeLike) -> NDArray[Any]:
    """The row of a sequence's slot."""
    assert 0 <= sequence.slot < tables.plan.batch
    buffer = tables.arguments[name]
    return buffer.view(dtype, (tables.plan.batch, buffer.nbytes // 4 // tables.plan.batch))[sequence.slot]


def _as_asked(
    tables: Tables, sequence: SequenceRecord, logits: NDArray[np.float32]
) -> tuple[NDArray[np.float32], Filters]:
    """The logits as a sequence's options adjust them, and its filters."""
    options, allowed, bias, in_prompt, counts, filters = sequence.options, None, None, None, None, Filters()
    assert options & ~int(tables.arguments["options"]) == 0, "an option that the launch does not know of"
    if options & MASKED:
        words = _row(tables, sequence, "masks", np.uint32)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: logits.size].astype(bool)
    if options & BIASED:
        bias = _row(tables, sequence, "logit_bias", np.float32)
    if options & PENALISED:
        found = _row(tables, sequence, "token_counts", np.uint32)
        in_prompt, counts = found >= PROMPT_TOKEN, found & np.uint32(PROMPT_TOKEN - 1)
    if options & FILTERED:
        filters = Filters(sequence.top_k, _float(sequence.top_p), float(np.exp(-_float(sequence.reach))))
    penalties = Penalties(*map(_float, (sequence.repetition, sequence.presence, sequence.frequency)))
    return adjusted(logits, allowed, bias, penalties, in_prompt, counts), filters


def _float(bits: int) -> float:
    return float(np.uint32(bits & 0xFFFFFFFF).view(np.float32))


def _check_sequences(tables: Tables, steps: int) -> None:
    """Each has tokens in every step, and writes to pages that no other sequence of the launch has."""
    page_size = tables.plan.page_size
    for number, (sequence, pages) in enumerate(zip(tables.sequences, tables.pages, strict=True)):
        per_step, total = sequence.per_step, sequence.total
        assert (steps - 1) * per_step < total <= steps * per_step, "a sequence without a token in every step"
        assert 1 <= sequence.given <= total + 1 and (per_step == 1 or sequence.given >= total)
        written = pages[sequence.length // page_size : -(-(sequence.length + total) // page_size)]
        others = np.delete(tables.pages, number, axis=0)
        assert (written >= 0).all() and not np.isin(written, others).any(), "a page that others read is written"


def _use_epochs(arguments: Mapping[str, Any], count: int) -> None:
    """A launch uses epochs above all those used since the exchange was zeroed; the last one is kept in it."""
    used = arguments["exchange"].view(np.uint64, (1,))
    first = int(arguments["epoch"])
    assert first > int(used[0]), f"epoch {first} was used before (up to {used[0]})"
    assert first + count <= 2**32, "epochs beyond 32 bits"
    used[0] = first + count - 1


def _check_plan(manifest: Manifest, config: LlamaConfig, tables: Tables, step: int) -> None:
    """The plan of this step covers each key of each column's sequence and head exactly once, over all levels, and reads
    the keys of a shared prefix from the very pages of all who share it."""
    layout = KvPlanLayout.for_step(tables.plan, config.shape, manifest.launch.blocks)
    plans = tables.arguments["kv_plans"].view(np.int32, (int(tables.arguments["plan_count"]), layout.plan_words))
    assert plans[0, 0] == 0 and (np.diff(plans[:, 0]) > 0).all()
    words = plans[np.flatnonzero(plans[:, 0] <= step)[-1]]
    items = words[layout.sections.offsets["items"] :][: int(words[1]) * 8].reshape(-1, 8).tolist()
    align, columns = KV_TILE_TOKENS, sum(sequence.per_step for sequence in tables.sequences)
    keys = tables.plan.max_context + tables.plan.tokens + align
    covered = np.zeros((columns, config.kv_heads, keys), int)
    for _, number, head, begin, end, *_ in items:
        tile = tables.tiles[number]
        covered[tile.first_column : tile.first_column + tile.columns, head, begin:end] += 1
        _check_tile_pages(tables, tile, begin, min(end, tile.length + step * tile.stride))
    for sequence in tables.sequences:
        rounded = -(-(sequence.length + (step + 1) * sequence.per_step) // align) * align
        own = covered[sequence.first_column : sequence.first_column + sequence.per_step]
        # A tile of some of a sequence's columns may end at the last of them.
        least = -(-(sequence.length + step * sequence.per_step + 1) // align) * align
        exactly = (own[:, :, :least] == 1).all() and (own <= 1).all() and not own[:, :, rounded:].any()
        assert exactly, f"step {step}: the plan does not cover {rounded} keys once"


def _check_tile_pages(tables: Tables, tile: TileRecord, begin: int, end: int) -> None:
    """Keys [begin, end) of a tile are those of every sequence whose columns it has."""
    page_size, each = tables.plan.page_size, tables.plan.pages_per_sequence
    places = slice(begin // page_size, -(-max(begin, end) // page_size))
    read = tables.pages.reshape(-1)[tile.table : tile.table + each][places]
    for sequence, pages in zip(tables.sequences, tables.pages, strict=True):
        if sequence.first_column < tile.first_column + tile.columns:
            if sequence.first_column + sequence.per_step > tile.first_column:
                np.testing.assert_array_equal(pages[places], read)


def _cached_step(
    config: LlamaConfig, plan: Plan, model: Reference, tables: Tables, number: int, position: int, token: int
) -> NDArray[np.float32]:
    """One token over the paged cache; only pages and slots that hold tokens are read."""
    pool_pages = int(tables.arguments["kv_pages"])
    shape = (config.layers, pool_pages, 2, config.kv_heads, plan.page_size, config.head_dim)
    pool = tables.arguments["kv"].view(ml_dtypes.bfloat16, shape)
    where = np.arange(position + 1)
    pages, slots = tables.pages[number][where // plan.page_size], where % plan.page_size
    assert ((pages >= 0) & (pages < pool_pages)).all(), "page outside the pool"
    cached = pool[:, pages, :, :, slots].astype(np.float32)  # [tokens, layers, 2, heads, head_dim]
    assert np.isfinite(cached[:-1]).all(), "a slot that holds no token is read"
    model.length = position
    model.keys, model.values = (np.ascontiguousarray(cached[:, :, part].transpose(1, 2, 0, 3)) for part in (0, 1))
    logits = model.step(token)
    pool[:, pages[-1], 0, :, slots[-1]] = model.keys[:, :, position]
    pool[:, pages[-1], 1, :, slots[-1]] = model.values[:, :, position]
    return logits
