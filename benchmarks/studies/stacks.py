"""Study: stacks of attention blocks and of GLU blocks in the shape of Llama 3.1 8B (the paper's Table 9).

An attention block is norm, q, k and v, rotary embedding, attention over the cache, output projection, residual; a GLU
block is norm, gate and up, SwiGLU, down projection, residual. Unfused against fused with overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.studies.decode_state import TINY, DecodeState, decode_state
from benchmarks.studies.measuring import Study, StudyError, Variant, in_graph, require_close
from benchmarks.studies.step_kernels import STACKS, StepKernel, fused_stack
from benchmarks.studies.unfused import Unfused
from cheetah.generate import generate_kernel
from cheetah.models.config import ModelConfig
from cheetah.models.dense.reference import Reference, embedding, residual
from cheetah.models.dense.weights import EMBEDDING, logical_matrix, matrix_tensors, tensor_shapes
from cheetah.models.formats import pack_matrix
from cheetah.models.registry import preset
from cheetah.models.rounding import round_to_bf16, widen
from cheetah.plan import Gpu, step_matrices
from cheetah.tools.bench import FIRST_TOKEN
from cheetah.tools.random_buffers import random_bits

DEPTHS, CONTEXTS, PASSES = (4, 16), (128, 4096), 8
TAG_BITS = np.uint32(0x40004000)  # of a tagged word
TINY_DEPTHS, TINY_CONTEXTS, TINY_PASSES = (1, 2), (5, 100), 2
BF16_ONE = 0x3F80
MATRICES = {"attention": ("qkv", "o"), "glu": ("gate_up", "down")}

F32 = NDArray[np.float32]


def run(study: Study) -> None:
    """Measure both stacks at every depth; attention at every context too."""
    depths = TINY_DEPTHS if study.tiny else DEPTHS
    config = TINY if study.tiny else replace(preset("llama-3.1-8b"), layers=max(depths), vocab_size=256)
    generated = generate_kernel(config, study.gpu)
    with decode_state(study.device, config, generated.manifest) as state:
        checked = config.layers if study.tiny else 1  # numpy needs seconds for a layer of 8B
        reference = StackReference(state, study.gpu, checked)
        for stack, contexts in {"glu": (0,), "attention": TINY_CONTEXTS if study.tiny else CONTEXTS}.items():
            for context in contexts:
                _StackAtContext(study, state, stack, context, reference).measure(depths)


class StackReference(Reference):
    """The first layers of the state's stacks in float32. Their matrices are made here and uploaded."""

    def __init__(self, state: DecodeState, gpu: Gpu, layers: int) -> None:
        config = replace(state.config, layers=layers)
        tensors = _tensors(state, config)
        super().__init__(config, tensors, round_to_bf16)
        self.state = state
        matrices = step_matrices(config.shape, state.plan, gpu)
        for layer, layout in product(range(layers), matrices.of_layer):
            parts = tuple(tensors(name) for name in matrix_tensors(config, layout.name, layer))
            packed = pack_matrix(layout, logical_matrix(config, layout.name, parts))
            state.buffers["weights"].upload(packed, matrices.offset(layout.name, layer))

    def output(self, stack: str, context: int) -> F32:
        """The vector that leaves the stack, float32 [hidden], after `context` cached tokens."""
        self._take_cache(context)
        x = embedding(self.embedding, FIRST_TOKEN)
        for index, layer in enumerate(self.layers):
            normed = self.rounding(self._normed(x, layer.before[stack == "glu"]))
            block = self._mixed(index, layer, normed) if stack == "attention" else self._feed_forward(layer, normed)
            x = residual(x, block)
        return x

    def _take_cache(self, context: int) -> None:
        """The keys and values that the state holds; its pages are in order."""
        config, shape = self.config, self.state.manifest.buffer("kv").shape
        layers = (config.layers, *shape[1:])
        pool = widen(self.state.buffers["kv"].download(np.uint16, layers)).transpose(2, 0, 3, 1, 4, 5)
        tokens = pool.reshape(2, config.layers, config.kv_heads, -1, config.head_dim)
        self.keys, self.values = (part[:, :, : context + 1].copy() for part in tokens)
        self.length, self.tables = context, self._new_tables(context + 1)


def _tensors(state: DecodeState, config: ModelConfig) -> Callable[[str], NDArray[np.uint16]]:
    """Tensors by name, bf16 bits: the state's embedding, norm weights of 1, and random matrices that all differ."""
    shapes = tensor_shapes(config)
    tile = random_bits(config.hidden_size**-0.5)

    def tensor(name: str) -> NDArray[np.uint16]:
        if name == EMBEDDING:
            rows = state.buffers["embedding"].download(np.uint16, (config.vocab_size, config.padded_hidden))
            return np.asarray(rows[:, : config.hidden_size])
        if len(shapes[name]) == 1:
            return np.full(shapes[name], BF16_ONE, np.uint16)
        return np.resize(tile[crc32(name.encode()) % 2**20 :], shapes[name])

    return tensor


class _StackAtContext:
    """Both variants of one stack at one context."""

    def __init__(self, study: Study, state: DecodeState, stack: str, context: int, reference: StackReference) -> None:
        self.study, self.state, self.stack, self.context, self.reference = study, state, stack, context, reference
        self.arguments = state.arguments(context, 1)
        self.unfused = Unfused(state, study.gpu, STACKS[stack], stack)
        self.fused: StepKernel = fused_stack(state.config, study.gpu, state.plan, stack)
        self.loaded = study.device.load(self.fused.text.text, self.fused.text.manifest)
        self.exchange = state.add("fused exchange", self.fused.exchange_bytes)
        self.epochs = state.add("fused epochs", 4 * study.gpu.blocks)
        self.epochs.upload(np.ones(study.gpu.blocks, np.uint32))

    def measure(self, depths: tuple[int, ...]) -> None:
        """All depths, the results checked before."""
        errors = self._check_against_float32()
        for depth in depths:
            self._check_equal(depth)
            variants = {
                "unfused": self._variant(self._run_unfused, depth, errors[0], self.unfused.about),
                "fused, overlap": self._variant(self._run_fused, depth, errors[1], self._about),
            }
            case = {"stack": self.stack, "layers": depth, "context": self.context}
            self.study.compare(case, variants, self.state.buffers["weights"])

    @property
    def _about(self) -> dict[str, Any]:
        manifest = self.fused.text.manifest
        return {"kernel": manifest.text_sha256[:16], "kernels": 1, "plan": manifest.plan}

    def _variant(self, run_pass: Callable[[int], None], depth: int, error: float, about: dict[str, Any]) -> Variant:
        passes = TINY_PASSES if self.study.tiny else PASSES

        def work() -> None:
            for _ in range(passes):
                run_pass(depth)

        launch = in_graph(self.study.device, work)
        weights = self.state.bytes_of(self.study.gpu, MATRICES[self.stack], depth)
        cached = self.context * self.state.config.kv_bytes_per_token * depth // self.state.config.layers
        return Variant(launch, passes, weights + cached * (self.stack == "attention"), error, about)

    def _run_unfused(self, depth: int) -> None:
        self.unfused.launch(self.arguments, depth)

    def _run_fused(self, depth: int) -> None:
        given = {**self.arguments, "exchange": self.exchange, "epochs": self.epochs, "layers": depth}
        self.study.device.launch(self.loaded, given)

    def _check_against_float32(self) -> list[float]:
        """Errors of unfused and fused after the layers that the reference has."""
        layers = len(self.reference.layers)
        wanted = self.reference.output(self.stack, self.context)
        what = f"stack {self.stack}, {layers} layers, context {self.context}"
        outputs = self._outputs(layers)
        names = ("unfused", "fused")
        return [require_close(f"{name} {what}", out, wanted) for name, out in zip(names, outputs, strict=True)]

    def _check_equal(self, depth: int) -> None:
        """Both add in the same order, so all layers together must give the same bits."""
        unfused, fused = self._outputs(depth)
        if not np.array_equal(unfused, fused):
            raise StudyError(f"stack {self.stack}, {depth} layers, context {self.context}: fused differs from unfused")

    def _outputs(self, layers: int) -> tuple[F32, F32]:
        """The vector `hidden` that each leaves in its exchange."""
        self._run_unfused(layers)
        self._run_fused(layers)
        self.study.wait()
        return self._hidden(self.unfused.kernel, self.unfused.exchange), self._hidden(self.fused, self.exchange)

    def _hidden(self, kernel: StepKernel, exchange: Any) -> F32:
        count = self.state.config.hidden_size
        words = exchange.download(np.uint32, count // 2 * kernel.word_bytes // 4, kernel.hidden_offset)
        pairs = np.ascontiguousarray(words[:: kernel.word_bytes // 4])  # a flagged word's lower half is its data
        if kernel.made_small_by is None:
            return widen(pairs.view(np.uint16))
        return widen((pairs & ~TAG_BITS).view(np.uint16)) * np.float32(2.0**kernel.made_small_by)
