"""Compiling: g++'s own words on mistakes, a cache that two processes may share, and the portable switch."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cheetah.emulator import EmulatorError, allocate, build, compile_program, emulator_header, include_directory
from cheetah.emulator.program import LoadedProgram
from cheetah.errors import CheetahError
from tests.emulator.kernels import OPENING
from tests.emulator.planted import PARAMETERS, TEXT, expected_totals, run

pytestmark = pytest.mark.compiler

DOUBLE = OPENING + 'extern "C" __global__ void twice(int32_t* x) { x[threadIdx.x] *= 2; }\n'


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """An empty cache but for the emulator's own runtime, which takes seconds to compile."""
    compiled = build._build_runtime(build.PLAIN, None)
    for file in (compiled, build._digest_of(compiled)):
        shutil.copy(file, tmp_path)
    return tmp_path


def test_an_error_in_the_text_carries_the_compilers_words_and_line() -> None:
    with pytest.raises(CheetahError) as caught:
        compile_program(DOUBLE.replace("threadIdx.x", "missing"), "twice", [("x", "int32_t*")])
    assert "kernel 'twice' does not compile for the emulator" in str(caught.value)
    assert "twice.cu:4:" in str(caught.value) and "missing" in str(caught.value)


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHEETAH_CXX", "no-such-compiler")
    build._compiler.cache_clear()
    try:
        with pytest.raises(CheetahError, match="'no-such-compiler' is not on PATH: install g\\+\\+ 12 or newer"):
            compile_program(DOUBLE + "// other\n", "twice", [("x", "int32_t*")])
    finally:
        build._compiler.cache_clear()


def test_a_thread_with_too_many_local_variables_is_refused() -> None:
    text = DOUBLE.replace("{ x", "{ volatile int much[20000]; much[x[0]] = 1; x")
    with pytest.raises(CheetahError, match="frame size of 80.* bytes is larger than 49152"):
        compile_program(text, "twice", [("x", "int32_t*")])


@pytest.mark.slow
def test_the_cache_answers_the_second_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_program(DOUBLE, "twice", [("x", "int32_t*")], cache_dir=cache)

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "_run_compiler", refuse)
    second = compile_program(DOUBLE, "twice", [("x", "int32_t*")], cache_dir=cache)
    assert first.path == second.path
    with pytest.raises(AssertionError, match="compiled again"):
        compile_program(DOUBLE + "\n", "twice", [("x", "int32_t*")], cache_dir=cache)


@pytest.mark.slow
def test_what_is_damaged_is_compiled_again(cache: Path) -> None:
    """A library that is cut short would end the process that loads it."""
    path = build.build_program(DOUBLE, "twice", [("x", "int32_t*")], build.PLAIN, cache)
    whole, digest = path.read_bytes(), path.with_name(f"{path.name}.sha256")

    def is_mended() -> bool:
        assert build.build_program(DOUBLE, "twice", [("x", "int32_t*")], build.PLAIN, cache) == path
        return path.read_bytes()[:4] == b"\x7fELF" and build._is_whole(path)

    path.write_bytes(whole[: len(whole) // 2])
    assert is_mended()
    path.unlink()
    os.mkfifo(path)
    assert is_mended()
    path.unlink()
    path.symlink_to("/dev/zero")
    digest.write_bytes(b"\xff")
    assert is_mended()


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_named(cache: Path) -> None:
    (cache / "file").write_text("in the way")
    with pytest.raises(CheetahError, match="file/cache: cannot be made: Not a directory: name another folder in CHEET"):
        build.build_program(DOUBLE, "twice", [("x", "int32_t*")], build.PLAIN, cache / "file" / "cache")
    path = build.build_program(DOUBLE, "twice", [("x", "int32_t*")], build.PLAIN, cache)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheetahError, match="cannot be written: Is a directory: name another folder in CHEETAH_CACHE"):
        build.build_program(DOUBLE, "twice", [("x", "int32_t*")], build.PLAIN, cache)


def test_a_full_disk_is_no_fault_of_the_text(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers tell of it among a thousand characters, in files of their own; those lie in the cache too."""
    compiler = cache / "full"
    compiler.write_text("#!/bin/sh\ntest $TMPDIR = $PWD || exit 9\necho x.s: No space left on device >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.chdir(cache)
    monkeypatch.setattr(build, "_compiler", lambda: (str(compiler), "1"))
    with pytest.raises(CheetahError) as refusal:
        build.build_program("", "none", [], build.PLAIN, Path("relative"))
    text = str(refusal.value)
    assert text.startswith(f"{cache}/relative/runtime-") and text.endswith(
        "cannot be written: No space left on device: name another folder in CHEETAH_CACHE"
    )


@pytest.mark.slow
def test_two_processes_may_compile_the_same_text(cache: Path) -> None:
    script = (
        "import sys, numpy as np; from pathlib import Path; from cheetah.emulator import compile_program\n"
        f"p = compile_program({DOUBLE!r}, 'twice', [('x', 'int32_t*')], cache_dir=Path({str(cache)!r}))\n"
        "x = np.arange(4, dtype=np.int32); p.launch(1, 4, 0, [x]); print(x.tolist())\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["[0, 2, 4, 6]\n"] * 2
    assert not list(cache.glob("building-*"))


def test_of_threads_that_want_the_same_text_one_compiles_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build._build_libraries(cache)
    run_compiler, runs = build._run_compiler, []

    def counted(*arguments: Any) -> None:
        runs.append(arguments)
        run_compiler(*arguments)

    monkeypatch.setattr(build, "_run_compiler", counted)
    with ThreadPoolExecutor(4) as pool:
        wanted = [
            pool.submit(build.build_program, DOUBLE, "twice", [("x", "int32_t*")], build.PLAIN, cache) for _ in range(4)
        ]
        assert len({one.result() for one in wanted}) == len(runs) == 1


def test_launches_of_two_programs_may_alternate() -> None:
    thrice = DOUBLE.replace("twice", "thrice").replace("*= 2", "*= 3")
    programs = [
        compile_program(DOUBLE, "twice", [("x", "int32_t*")]),
        compile_program(thrice, "thrice", [("x", "int32_t*")]),
    ]
    x = np.ones(8, np.int32)
    for kernel in programs * 2:
        kernel.launch(1, 8, 0, [x])
    np.testing.assert_array_equal(x, np.full(8, 36))


@pytest.mark.exhaustive
def test_the_portable_switch_gives_the_same_results(tmp_path: Path) -> None:
    mode = replace(build.PLAIN, name="portable", runtime_flags=("-O2", "-DCHEETAH_EMULATOR_UCONTEXT"))
    kernel = LoadedProgram("planted", PARAMETERS, build.build_program(TEXT, "planted", PARAMETERS, mode, tmp_path))
    for _ in range(2):
        totals, _ = run(kernel, "priority", 2)
        np.testing.assert_allclose(totals, expected_totals(), rtol=1e-4, atol=1e-6)
    with pytest.raises(EmulatorError):
        kernel.launch(1, 160, 64, [None, None, None, None, None, 1, 1])


def test_the_header_lies_in_the_include_directory() -> None:
    assert emulator_header().parent == include_directory()
    assert emulator_header().name == "cheetah_emulator.h"


def test_allocated_arrays_are_aligned_and_poisoned() -> None:
    array = allocate((3, 5), np.float32)
    assert array.ctypes.data % 256 == 0 and array.shape == (3, 5) and np.isnan(array).all()
