"""Kernel text to a cubin for sm_90a: by NVRTC (the default, no toolkit needed) or nvcc, through a cache on disk.

Neither compiler is given headers or include paths: the kernel's text brings what it needs. NVRTC's library is found by
cuda-bindings (through cuda-pathfinder): first the wheel nvidia-cuda-nvrtc in the environment, then a toolkit's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from cheetah.caches import cache_folder
from cheetah.errors import CheetahError
from cheetah.extras import installing
from cheetah.runtime.assembly.cubin import CacheEntry, Cubin, ResourceReport

__all__ = [
    "CompileError",
    "Compiler",
    "Cubin",
    "Progress",
    "ResourceReport",
    "compile_cubin",
    "find_compiler",
    "resource_report",
]

Progress = Callable[[str], None]

# A compiler that fuses a product and a sum chooses which, so two kernels would compute other bits of the same text, and
# both others than the emulator: what is to be rounded once says `fma_f32`. -v puts registers and spills into the log.
_COMMON_FLAGS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v")


class CompileError(CheetahError):
    """A kernel text that does not compile, or a compiler that is not there. `log` is the compiler's own text."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log.rstrip()}" if log.strip() else message)
        self.log = log


class Compiler(Protocol):
    """One way from text to cubin."""

    @property
    def version(self) -> str:
        """Name and full version, e.g. "NVRTC 13.0.88"; part of the cache key."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Everything that is passed beside the text; part of the cache key."""

    def compile(self, text: str, kernel: str, flags: tuple[str, ...]) -> tuple[bytes, str]:
        """The cubin and the compiler's log; CompileError with the log if the text is wrong."""


def compile_cubin(
    text: str,
    kernel: str,
    *,
    compiler: str = "nvrtc",
    options: Sequence[str] = (),
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Cubin:
    """The cubin of `text`, whose kernel is the `extern "C"` function `kernel`, from the cache or freshly compiled.

    compiler: "nvrtc" or "nvcc". options: further flags, e.g. "-lineinfo". cache: a folder instead of `cache_folder()`.
    progress: gets a line when compiling begins and ends, or when the cache had it. CompileError carries the log.
    Several processes may ask for the same kernel at once: one compiles, the others wait for its file.
    """
    chosen = find_compiler(compiler)
    flags = (*chosen.flags, *options)
    say = progress or (lambda _: None)
    entry = CacheEntry.of(cache or cache_folder(), text, kernel, flags, chosen.version)
    with entry.lock(lambda: say(f"waiting for another process that compiles {kernel}")):
        found = entry.load(say)
        if found is not None:
            say(f"{kernel}: cached ({found.compiler}; {found.resources})")
            return found
        return _compile_and_store(chosen, text, kernel, flags, entry, say)


def find_compiler(name: str) -> Compiler:
    """The compiler "nvrtc" or "nvcc"; CompileError says what to install if it is not there."""
    if name == "nvrtc":
        return NvrtcCompiler()
    if name == "nvcc":
        return NvccCompiler()
    raise CompileError(f"unknown compiler {name!r}: use 'nvrtc' or 'nvcc'")


def resource_report(log: str, kernel: str) -> ResourceReport:
    """What ptxas -v said of `kernel` in `log`; CompileError names the kernels that are there if it is none of them."""
    sections = dict(_ENTRY.findall(log))
    if kernel not in sections:
        there = ", ".join(sorted(sections)) or "none"
        raise CompileError(
            f'the text has no kernel {kernel!r} (kernels in it: {there}); is it declared extern "C"?', log
        )
    section = sections[kernel]
    # A function that was not inlined has a line of its own: its frame and its spills count for the kernel.
    frames = [tuple(map(int, numbers)) for numbers in _FRAME.findall(section)]
    return ResourceReport(
        registers=_number(r"Used (\d+) registers", section),
        shared_bytes=_number(r"(\d+) bytes smem", section),
        stack_bytes=max(sum(frame[0] for frame in frames), _number(r"(\d+) bytes cumulative stack size", section)),
        spill_store_bytes=sum(frame[1] for frame in frames),
        spill_load_bytes=sum(frame[2] for frame in frames),
        in_series=kernel in _IN_SERIES.findall(log),
    )


_ENTRY = re.compile(r"Compiling entry function '([^']+)'(.*?)(?=Compiling entry function|\Z)", re.DOTALL)
_IN_SERIES = re.compile(r"wgmma\.mma_async instructions are serialized due to .* in the function '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match.group(1)) if match else 0


def _compile_and_store(
    compiler: Compiler, text: str, kernel: str, flags: tuple[str, ...], entry: CacheEntry, say: Progress
) -> Cubin:
    say(f"compiling {kernel} ({compiler.version})...")
    started = time.monotonic()
    image, log = compiler.compile(text, kernel, flags)
    seconds = time.monotonic() - started
    resources = resource_report(log, kernel)
    say(f"compiled {kernel} in {seconds:.1f} s ({resources})")
    cubin = Cubin(kernel, image, compiler.version, flags, resources, seconds, cached=False, path=None)
    try:
        entry.store(cubin)
    except OSError as error:
        say(f"{kernel}: not kept in the cache: {error}")
        return cubin
    return dataclasses.replace(cubin, path=entry.cubin_path)


class NvrtcCompiler:
    """NVRTC through cuda-bindings. Works without a GPU and without a driver."""

    # NVRTC's own cache takes texts that differ in comments for the same, and a hit gives no ptxas log: ours suffices.
    flags = ("--gpu-architecture=sm_90a", "--no-cache", *_COMMON_FLAGS)

    @property
    def version(self) -> str:
        return f"NVRTC {_nvrtc_version()}"

    def compile(self, text: str, kernel: str, flags: tuple[str, ...]) -> tuple[bytes, str]:
        with _nvrtc_program(text, f"{kernel}.cu") as program:
            _nvrtc_compile(program, flags, kernel)
            return program.output("CUBIN"), program.output("ProgramLog").decode(errors="replace")


class _NvrtcProgram:
    """An nvrtcProgram and the calls on it, each checked."""

    def __init__(self, nvrtc: Any, handle: Any) -> None:
        self.nvrtc = nvrtc
        self.handle = handle

    def output(self, what: str) -> bytes:
        """nvrtcGet<what>, sized by nvrtcGet<what>Size; without the closing zero of a text."""
        size = _nvrtc_checked(self.nvrtc, f"nvrtcGet{what}Size", self.handle)
        data = bytes(size + 1)  # the binding writes into this object; of one byte, Python would share it
        _nvrtc_checked(self.nvrtc, f"nvrtcGet{what}", self.handle, data)
        return data[:size] if what == "CUBIN" else data.rstrip(b"\0")


@contextlib.contextmanager
def _nvrtc_program(text: str, name: str) -> Iterator[_NvrtcProgram]:
    nvrtc = _load_nvrtc()
    handle = _nvrtc_checked(nvrtc, "nvrtcCreateProgram", text.encode(), name.encode(), 0, [], [])
    try:
        yield _NvrtcProgram(nvrtc, handle)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _nvrtc_compile(program: _NvrtcProgram, flags: Sequence[str], kernel: str) -> None:
    nvrtc = program.nvrtc
    (status,) = nvrtc.nvrtcCompileProgram(program.handle, len(flags), [flag.encode() for flag in flags])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = program.output("ProgramLog").decode(errors="replace")
        raise CompileError(f"NVRTC refused kernel {kernel!r}: {status.name}", log)


def _nvrtc_checked(nvrtc: Any, call: str, *arguments: Any) -> Any:
    status, *results = getattr(nvrtc, call)(*arguments)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{call} failed: {status.name}")
    return results[0] if results else None


@functools.cache
def _load_nvrtc() -> Any:
    fix = f"install it with: {installing('cuda')}"
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise CompileError(f"NVRTC needs the package cuda-bindings ({error}): {fix}") from None
    try:
        nvrtc.nvrtcVersion()  # the first call loads libnvrtc
    except RuntimeError as error:
        first_line = str(error).strip().split("\n", 1)[0]
        raise CompileError(f"the NVRTC library is not there ({first_line}): {fix}") from None
    return nvrtc


@functools.cache
def _nvrtc_version() -> str:
    """Such as "13.0.88". nvrtcVersion() gives no third number; the PTX that NVRTC writes does."""
    with _nvrtc_program("", "empty.cu") as program:
        _nvrtc_compile(program, ["--gpu-architecture=compute_90"], "empty")
        ptx = program.output("PTX").decode(errors="replace")
    return _release(ptx, "NVRTC")


class NvccCompiler:
    """nvcc of the toolkit in $CUDA_HOME or on PATH."""

    # -arch=sm_90a of nvcc 13.0 was seen to run a pass for sm_90 too, which refuses sm_90a instructions; this does not.
    flags = ("-cubin", "-gencode=arch=compute_90a,code=sm_90a", *_COMMON_FLAGS)

    def __init__(self) -> None:
        self.path = _find_nvcc()

    @property
    def version(self) -> str:
        return f"nvcc {_release(_run([self.path, '--version'], 'nvcc --version'), 'nvcc')}"

    def compile(self, text: str, kernel: str, flags: tuple[str, ...]) -> tuple[bytes, str]:
        with tempfile.TemporaryDirectory(prefix="cheetah-nvcc-") as name:
            folder = Path(name)
            source, target = folder / "kernel.cu", folder / "kernel.cubin"
            source.write_text(text, encoding="utf-8")
            log = _run([self.path, *flags, "-o", str(target), str(source)], f"nvcc on kernel {kernel!r}")
            return target.read_bytes(), log


def _find_nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    candidates = ([str(Path(home) / "bin" / "nvcc")] if home else []) + ["nvcc", "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if path := shutil.which(candidate):
            return path
    raise CompileError("nvcc is neither in $CUDA_HOME/bin nor on PATH: install the CUDA toolkit, or use NVRTC")


def _run(command: list[str], what: str) -> str:
    """Run `command` and give stdout and stderr together; CompileError with both if it fails."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if result.returncode != 0:
        raise CompileError(f"{what} failed with exit code {result.returncode}", result.stdout)
    return result.stdout


def _release(text: str, compiler: str) -> str:
    match = re.search(r"release \d+\.\d+, V(\d+\.\d+\.\d+)", text)
    if match is None:
        raise CompileError(f"cannot read the version of {compiler} from its output", text)
    return match.group(1)
