"""Products with quantised weights on the GPU, as long as those of 8B and 70B, against float64 of dequantised weights.

The emulator's tensor cores add in another order and round otherwise, so what a product loses is measured here.
"""

from __future__ import annotations

import numpy as np
import pytest

from cheetah.manifest import Launch, Manifest
from cheetah.models.formats import pack_matrix
from cheetah.models.formats.quantized import QuantizedRows, scheme_of_name
from cheetah.models.rounding import Bits, widen
from cheetah.package import Generated, KernelParameter, described
from cheetah.plan import MatrixLayout
from cheetah.runtime.device import open_device
from tests.blocks.small_kernel import SmallKernel, gpu_of
from tests.blocks.test_matvec import PARAMETERS, in_fragment_order, product
from tests.program.quantized_weights import drawn_rows
from tests.program.rig import F32, as_bf16, relative_error
from tests.tolerances import MATVEC, MATVEC_WITH_OUTLIERS

pytestmark = pytest.mark.gpu

FORMATS = ("int4-g128", "int4-g128-asym", "int8", "fp8", "fp8-block128")
ROWS, BLOCKS = 200, 5
SLICES = {14336: {1: 1, 2: 1, 4: 1, 8: 2}, 28672: {1: 1, 2: 1, 4: 2, 8: 3}}
"""Parts in which the vectors of so many tokens fit into shared memory, by columns: the inputs of down in 8B and 70B."""


@pytest.mark.parametrize("columns", SLICES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_long_product_against_float64(name: str, columns: int) -> None:
    matrix = drawn_rows(scheme_of_name(name), ROWS, columns, np.random.default_rng(columns))
    exact = matrix.dequantized().astype(np.float64)
    for tokens, slices in SLICES[columns].items():
        fields = {"tokens": tokens, "down_slices": slices, "consumer_warps": 8}
        kernel, layout = product(ROWS, columns, BLOCKS, fields, name)
        values = np.random.default_rng(tokens).standard_normal((tokens, columns))
        with_outliers = values.copy()
        with_outliers[:, 3], with_outliers[:, columns // 2] = 1000.0, -300.0
        for x, bound in ((as_bf16(values), MATVEC), (as_bf16(with_outliers), MATVEC_WITH_OUTLIERS)):
            error = relative_error(launched(kernel, layout, matrix, x), widen(x).astype(np.float64) @ exact.T)
            print(f"\n{name}, {columns} columns, {tokens} tokens, {layout.vector_kind(tokens)}: {error:.1e} of {bound}")
            assert error < bound


def launched(kernel: SmallKernel, layout: MatrixLayout, matrix: QuantizedRows, x: Bits) -> F32:
    """The product on the GPU of bf16 bits [tokens, columns]: float32 [tokens, rows]."""
    with open_device("cuda") as device:
        given = {"weights": pack_matrix(layout, matrix), "x": in_fragment_order(x)}
        buffers = {name: device.allocate(array.nbytes) for name, array in given.items()}
        for name, array in given.items():
            buffers[name].upload(array)
        y = device.allocate(len(x) * layout.rows * 4, 0xFF)
        device.launch(device.load(kernel.text, manifest_of(kernel)), {**buffers, "y": y, "column_count": len(x)})
        device.synchronize(10.0)
        return y.download(np.float32, (len(x), layout.rows))


def manifest_of(kernel: SmallKernel) -> Manifest:
    """What a device must know of it."""
    manifest = described(
        "small",
        gpu_of(kernel.blocks),
        Launch(kernel.blocks, kernel.plan.threads, kernel.shared_bytes),
        {name: KernelParameter(type_, name) for name, type_ in PARAMETERS.items()},
        command="",
        plan=kernel.plan.to_dict(),
    )
    return Generated("", manifest).with_text(kernel.text).manifest
