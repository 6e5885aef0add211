"""Study: deep linear networks (the paper's Table 4). Unfused, fused, fused with overlap, over sizes and depths.

A pass is one run through a network of `layers` matrices. A launch of a graph makes many passes, each over weights of
its own, so that none finds its weights in L2 (60 MB) because the pass before it left them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.studies.linear_kernel import VARIANTS, LinearKernel, linear_kernel
from benchmarks.studies.measuring import Study, Variant, in_graph, require_close
from cheetah.models.formats import unpack_matrix
from cheetah.models.rounding import round_to_bf16, widen
from cheetah.plan import MatrixLayout
from cheetah.runtime.assembly.buffers import free_all
from cheetah.tools.random_buffers import random_bits

SIZES, DEPTHS, POOL_BYTES = (2048, 4096, 8192), (1, 4, 32), 2**30
TINY_SIZES, TINY_DEPTHS, TINY_POOL_BYTES = (64, 160), (1, 4), 2**17
DISTINCT = 3
"""Layer l has the numbers of layer l % 3, at an address of its own: as much to read, less to compute on the host."""

F32 = NDArray[np.float32]


def run(study: Study) -> None:
    """Measure every size and depth."""
    for size in TINY_SIZES if study.tiny else SIZES:
        with _network(study, size) as network:
            for depth in network.depths:
                network.measure(depth)


class Network:
    """The matrices of one size on the device, and the kernels of every variant."""

    def __init__(self, study: Study, size: int, buffers: dict[str, Any]) -> None:
        self.study, self.size, self.buffers = study, size, buffers
        self.depths = TINY_DEPTHS if study.tiny else DEPTHS
        self.kernels = {variant.name: linear_kernel(size, study.gpu, variant) for variant in VARIANTS}
        self.layout: MatrixLayout = next(iter(self.kernels.values())).layout
        pool_bytes = TINY_POOL_BYTES if study.tiny else POOL_BYTES
        self.layers = max(max(self.depths), pool_bytes // self.layout.total_bytes)
        self._upload()

    def _upload(self) -> None:
        device = self.study.device
        weights = self.buffers["weights"] = device.allocate(self.layers * self.layout.total_bytes)
        for layer in range(self.layers):
            weights.upload(self.packed[layer % DISTINCT], layer * self.layout.total_bytes)
        self.input = random_bits(1.0)[: self.size]
        self.buffers["x"] = device.allocate(self.input.nbytes)
        self.buffers["x"].upload(self.input)

    @cached_property
    def packed(self) -> NDArray[np.uint16]:
        """bf16 bits [DISTINCT, elements]: normal numbers / sqrt(size), so that vectors keep their length."""
        elements = self.layout.total_bytes // 2
        return np.resize(random_bits(self.size**-0.5), (DISTINCT, elements))

    @cached_property
    def matrices(self) -> list[F32]:
        """What the packed bytes mean."""
        return [widen(unpack_matrix(self.layout, bits.view(np.uint8))) for bits in self.packed]

    def expected(self, first_layer: int, depth: int) -> F32:
        """float32 [size], rounded to bf16 after every layer as the kernels do."""
        vector = widen(self.input)
        for layer in range(first_layer, first_layer + depth):
            vector = round_to_bf16(self.matrices[layer % DISTINCT] @ vector)
        return vector

    def measure(self, depth: int) -> None:
        """All variants at one depth."""
        case = {"size": self.size, "layers": depth}
        variants = {name: self._variant(kernel, depth) for name, kernel in self.kernels.items()}
        self.study.compare(case, variants, self.buffers["weights"])

    def _variant(self, kernel: LinearKernel, depth: int) -> Variant:
        """Ready to be timed, and its last pass checked."""
        passes = self.layers // depth
        output = self._buffer(f"{kernel.variant.name} y", self.size * 2)
        output.fill(0xFF)
        one_pass = self._pass(kernel, depth)

        def work() -> None:
            for number in range(passes):
                one_pass(number * depth)

        launch = in_graph(self.study.device, work)
        launch()
        self.study.wait()
        found = widen(output.download(np.uint16, self.size))
        what = f"{kernel.variant.name}, {depth} layers of {self.size}"
        error = require_close(what, found, self.expected((passes - 1) * depth, depth))
        manifest = kernel.text.manifest
        about = {"kernel": manifest.text_sha256[:16], "plan": manifest.plan}
        return Variant(launch, passes, depth * self.layout.total_bytes, error, about)

    def _pass(self, kernel: LinearKernel, depth: int) -> Callable[[int], None]:
        """Launches one pass that begins at a given layer."""
        name, device = kernel.variant.name, self.study.device
        loaded = device.load(kernel.text.text, kernel.text.manifest)
        weights, x, y = self.buffers["weights"], self.buffers["x"], self.buffers[f"{name} y"]
        if kernel.variant.fused:
            exchange = self._buffer(f"{name} exchange", kernel.exchange_bytes, 0)
            epochs = self._buffer(f"{name} epochs", 4 * self.study.gpu.blocks, 0)
            exchange.fill(0)
            epochs.upload(np.ones(self.study.gpu.blocks, np.uint32))
            given = {"weights": weights, "x": x, "y": y, "exchange": exchange, "epochs": epochs, "layers": depth}
            return lambda first: device.launch(loaded, {**given, "first_layer": first})
        between = [self._buffer(f"{name} vector {number}", self.size * 2) for number in range(2)]

        def launch_layers(first: int) -> None:
            places = [x, *(between[layer % 2] for layer in range(depth - 1)), y]
            for layer in range(depth):
                vectors = {"x": places[layer], "y": places[layer + 1]}
                device.launch(loaded, {"weights": weights, "first_layer": first + layer, **vectors})

        return launch_layers

    def _buffer(self, name: str, nbytes: int, fill: int = 0xFF) -> Any:
        if name not in self.buffers:
            self.buffers[name] = self.study.device.allocate(nbytes, fill)
        return self.buffers[name]


@contextmanager
def _network(study: Study, size: int) -> Iterator[Network]:
    buffers: dict[str, Any] = {}
    try:
        yield Network(study, size, buffers)
    finally:
        free_all(buffers)
