"""The kernels of the presets, compiled for sm_90a, keep everything in registers."""

from pathlib import Path

import pytest

from cheetah.models.llama.config import preset
from cheetah.regenerate import DEFAULT_GPU, generate_named
from cheetah.runtime.compile import CompileError, compile_cubin, find_compiler

MODELS = ("demo", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b")
REGISTERS = 65536  # of an SM


def has_nvrtc() -> bool:
    try:
        return bool(find_compiler("nvrtc").version)
    except CompileError:
        return False


@pytest.mark.compiler
@pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC")
@pytest.mark.parametrize(
    ("model", "sync"),
    [*((model, "flags") for model in MODELS), ("llama-3.2-1b", "barrier"), ("llama-3.1-8b", "barrier")],
)
def test_compiles_without_local_memory(tmp_path: Path, model: str, sync: str) -> None:
    generated = generate_named(preset(model), model, DEFAULT_GPU, {"sync": sync})
    cubin = compile_cubin(generated.text, generated.manifest.kernel, cache=tmp_path)
    assert not cubin.resources.uses_local_memory, str(cubin.resources)
    assert cubin.resources.registers * generated.manifest.launch.threads <= REGISTERS
