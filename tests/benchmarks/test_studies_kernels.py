"""The studies' kernels in the emulator against numpy, under many schedules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.studies.linear_kernel import VARIANTS, LinearKernel, Variant, linear_kernel
from cheetah.emulator import allocate, compile_program, explore
from cheetah.models.formats import pack_matrix
from cheetah.models.rounding import round_to_bf16, widen
from cheetah.plan import gpu_named
from tests.program.rig import as_bf16, emulated_gpu
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

LAYERS, FIRST = 5, 2
"""A chain that begins at the third layer, so that no other does."""


class Chain:
    """One kernel with random layers."""

    def __init__(self, size: int, blocks: int, variant: Variant, sanitize: bool = False) -> None:
        self.size, self.variant, self.blocks = size, variant, blocks
        gpu = gpu_named(emulated_gpu(blocks))
        self.kernel: LinearKernel = linear_kernel(size, gpu, variant, consumer_warps=2, stages=3, in_flight=2)
        manifest = self.kernel.text.manifest
        parameters = [(parameter.name, parameter.ctype) for parameter in manifest.parameters]
        self.launch_shape = manifest.launch
        self.names = [name for name, _ in parameters]
        self.program = compile_program(self.kernel.text.text, manifest.kernel, parameters, sanitize=sanitize)
        draw = np.random.default_rng(size)
        self.matrices = as_bf16(draw.standard_normal((FIRST + LAYERS, size, size)) * size**-0.5)
        self.input = filled(as_bf16(draw.standard_normal(size)))
        self.weights = filled(np.concatenate([pack_matrix(self.kernel.layout, one) for one in self.matrices]))

    def wanted(self, layers: int) -> np.ndarray:
        vector = widen(self.input)
        for matrix in self.matrices[FIRST : FIRST + layers]:
            vector = round_to_bf16(widen(matrix) @ vector)
        return vector

    def launch(self, scheduler: str, seed: int, **given: Any) -> None:
        shape = self.launch_shape
        values = [{"weights": self.weights, **given}[name] for name in self.names]
        self.program.launch(shape.blocks, shape.threads, shape.shared_bytes, values, scheduler=scheduler, seed=seed)

    def run(self, layers: int, scheduler: str = "round_robin", seed: int = 0, launches: int = 2) -> np.ndarray:
        """y, bf16 as f32, after some launches that follow one another without anything being reset."""
        y = allocate(self.size, np.uint16)
        if not self.variant.fused:
            return self._run_unfused(layers, scheduler, seed, y)
        exchange = allocate(self.kernel.exchange_bytes, np.uint8, fill=0)
        epochs = filled(np.ones(self.blocks, np.uint32))
        for number in range(launches):
            y[:] = 0xFFFF
            given = {"exchange": exchange, "epochs": epochs, "first_layer": FIRST, "layers": layers}
            self.launch(scheduler, seed + number, x=self.input, y=y.view(np.uint32), **given)
        assert (epochs == 1 + launches * layers).all()
        return widen(y)

    def _run_unfused(self, layers: int, scheduler: str, seed: int, y: np.ndarray) -> np.ndarray:
        vector = self.input
        for layer in range(FIRST, FIRST + layers):
            y = allocate(self.size, np.uint16)
            self.launch(scheduler, seed, x=vector, y=y.view(np.uint32), first_layer=layer)
            vector = y
        return widen(y)


def filled(values: np.ndarray) -> np.ndarray:
    copy = allocate(values.shape, values.dtype)
    copy[...] = values
    return copy


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


# 4 M-tiles of 3 blocks, 6 of 8: two blocks own none.
CHAINS = [(variant, size, blocks) for size, blocks in ((64, 3), (96, 8)) for variant in VARIANTS]


def named(value: object) -> str | None:
    return value.name if isinstance(value, Variant) else None


@pytest.mark.parametrize(("variant", "size", "blocks"), tiered(CHAINS, CHAINS[1:-1:2]), ids=named)
def test_chains_of_any_depth(variant: Variant, size: int, blocks: int) -> None:
    chain = Chain(size, blocks, variant)
    for layers in (1, 2, LAYERS):
        assert error(chain.run(layers), chain.wanted(layers)) < 2e-3
    report = explore(lambda scheduler, seed: chain.run(LAYERS, scheduler, seed), range(4))
    assert report.ok, str(report)


@pytest.mark.parametrize("variant", tiered(VARIANTS, VARIANTS[:-2]), ids=lambda variant: variant.name)
def test_no_races(variant: Variant) -> None:
    chain = Chain(64, 3, variant, sanitize=True)
    assert error(chain.run(3), chain.wanted(3)) < 2e-3


def test_only_overlap_fetches_before_the_input_is_there() -> None:
    texts = {variant.name: linear_kernel(64, gpu_named("h200"), variant).text.text for variant in VARIANTS}
    fetching = {name: text.split("// the consumer warps\n")[0] for name, text in texts.items()}
    waits = {name: "mbarrier_wait(input_there" in text for name, text in fetching.items()}
    assert waits == {variant.name: variant.fused and not variant.overlap for variant in VARIANTS}
