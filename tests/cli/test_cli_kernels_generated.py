"""The presets' kernels: compiled for sm_90a they keep everything in registers; those that are committed are current."""

from pathlib import Path

import pytest

from cheetah.manifest import Manifest
from cheetah.models.llama.config import preset
from cheetah.regenerate import DEFAULT_GPU, generate_named
from cheetah.runtime.compile import CompileError, compile_cubin, find_compiler

FOLDER = Path(__file__).parents[2] / "kernels_generated"
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


def test_committed_kernels_are_what_the_generator_writes() -> None:
    files = sorted(FOLDER.glob("*.cu"))
    if not files:
        pytest.skip("no kernels are committed")
    for path in files:
        model = path.stem.removesuffix(f"-{DEFAULT_GPU}")
        generated = generate_named(preset(model), model, DEFAULT_GPU, {})
        assert path.read_text() == generated.text, f"{path.name}: run 'make kernels' and commit"
        assert Manifest.read(path.with_suffix(".json")) == generated.manifest
