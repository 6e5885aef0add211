"""The compilers that the language's tests use: g++ for plain C++, NVRTC for sm_90a where its wheel is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ARCHITECTURE = "--gpu-architecture=sm_90a"


def compile_cuda(text: str) -> str:
    """Compile for sm_90a and give the compiler's log; fails the test with it. Skips where there is no NVRTC."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        (_, program) = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    except (RuntimeError, OSError) as error:
        pytest.skip(f"no NVRTC library: {error}")
    status, *_ = nvrtc.nvrtcCompileProgram(program, 1, [ARCHITECTURE.encode()])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytes(size + 1)  # the binding writes into this object: it must not be one that Python shares
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, f"{log.decode()}\n{text}"
    return log.decode()


def compile_cpp(text: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run g++ on the text; the caller looks at the outcome."""
    source = folder / "kernel.cpp"
    source.write_text(text)
    command = ["g++", "-std=c++20", "-fwrapv", *flags, "-o", str(folder / "kernel"), str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run_cpp(text: str, folder: Path, *flags: str) -> str:
    """Compile, run, and give what the program printed."""
    compiled = compile_cpp(text, folder, *flags)
    assert compiled.returncode == 0, compiled.stderr
    return subprocess.run([str(folder / "kernel")], capture_output=True, text=True, check=True).stdout
