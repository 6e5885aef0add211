"""What `bench` puts into the buffers of a quantised model: every matrix in every layer, of the usual size."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from cheetah.generate import choose_plan, describe_kernel, generate_kernel
from cheetah.models.formats import is_sparse_name, unpack_matrix
from cheetah.models.formats.quantized import QuantizedRows
from cheetah.models.registry import family_of, resolve_config
from cheetah.models.rounding import widen
from cheetah.plan import Plan, gpu_named, step_matrices
from cheetah.plan.formats import BF16
from cheetah.plan.gpu import together
from cheetah.tools.random_buffers import fill_random
from tests.program.layer_kinds import behind
from tests.program.test_families import qwen2, qwen3
from tests.program.test_hybrids import hybrid


@dataclass
class Bytes:
    """A buffer of device memory, for uploads."""

    nbytes: int
    data: Any = field(init=False)

    def __post_init__(self) -> None:
        self.data = np.full(self.nbytes, 0xFF, np.uint8)

    def upload(self, values: Any, offset: int = 0) -> None:
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.data[offset : offset + raw.size] = raw


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int4-g64-asym", "fp8-block128", "2of4", "2of4-int4-g64"])
def test_every_matrix_is_filled(format: str) -> None:
    config = resolve_config(f"demo@{format}")
    manifest = generate_kernel(config, "emulator-2").manifest
    buffers: dict[str, Any] = {buffer.name: Bytes(buffer.bytes) for buffer in manifest.buffers}
    fill_random(config, manifest, buffers)
    matrices = step_matrices(config.shape, Plan.from_dict(manifest.plan), gpu_named("emulator-2"))
    for layout in matrices:
        for layer in range(matrices.copies(layout)):
            if layout.format == BF16:
                continue
            first = matrices.offset(layout.name, layer)
            packed = buffers["weights"].data[first : first + layout.total_bytes]
            rows = unpack_matrix(layout, packed)
            values = rows.dequantized() if isinstance(rows, QuantizedRows) else widen(rows)
            share = 0.5 if is_sparse_name(format) else 1.0
            assert 0.8 * share < (values != 0).mean() <= share
            assert values.std() == pytest.approx((share / layout.columns) ** 0.5, rel=0.15), (layout.name, layer)
    assert len(np.unique(buffers["weights"].data[-(2**16) :])) > 100


@pytest.mark.slow
def test_every_vector_is_filled() -> None:
    """What no format has, but some families: none is left as it was."""
    for config in (behind(), qwen2(), qwen3()):
        manifest = generate_kernel(config, "emulator-2").manifest
        buffers: dict[str, Any] = {buffer.name: Bytes(buffer.bytes) for buffer in manifest.buffers}
        fill_random(config, manifest, buffers)
        for name in family_of(config).model_buffers(config):
            assert not (buffers[name].data == 0xFF).all(), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_has_the_numbers_of_its_value_heads(ranks: int) -> None:
    """Of every layer: rates of forgetting, which grow what is remembered where they are negative, biases, a norm."""
    config = replace(hybrid(2, 3, (0, 1), layers=3, heads=6, dims=128), hidden_size=64, intermediate_size=64)
    gpu = together(gpu_named("emulator-2"), ranks)
    manifest = describe_kernel(config, gpu, choose_plan(config, gpu))
    buffers: dict[str, Any] = {buffer.name: Bytes(buffer.bytes) for buffer in manifest.buffers}
    fill_random(config, manifest, buffers)
    own = 6 // ranks
    found = buffers["delta_numbers"].data.view(np.float32).reshape(len(config.delta_layers), -1)
    assert (found == np.repeat([0.5, -3.0, 1.0], [own, own, 128])).all()
