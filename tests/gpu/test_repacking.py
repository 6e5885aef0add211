"""Packing by the GPU: the same bytes as the host makes, from files of every format, at sizes that fill no tile."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.loading import FORMATS, write_checkpoint
from cheetah.models.llama import LlamaConfig
from cheetah.plan import gpu_named
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.device import open_device
from tests.repacked_weights import packed

pytestmark = pytest.mark.gpu

SHAPES = {
    "llama-2-7b": LlamaConfig(4096, 11008, 1, 32, 32, 128, 1000),
    "llama-2-13b": LlamaConfig(5120, 13824, 1, 40, 40, 128, 1000),
    "llama-3.2-3b": LlamaConfig(3072, 8192, 2, 24, 8, 128, 1000),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_the_bytes_of_the_host(tmp_path: Path, form: str, shape: str) -> None:
    write_checkpoint(tmp_path, SHAPES[shape], form)
    checkpoint, gpu = open_checkpoint(tmp_path), gpu_named("h200")
    with open_device("cuda") as device:
        wanted, _, _ = packed(checkpoint, device, gpu, by_device=False)
        found, works, _ = packed(checkpoint, device, gpu, by_device=True)
    assert works >= 4 * checkpoint.config.layers + 1
    for name, expected in wanted.items():
        assert np.array_equal(found[name], expected), name
