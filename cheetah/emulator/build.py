"""Compiles kernel text with g++ and keeps the results in a cache. Knows nothing of running them.

A cache entry is named by a hash of the text, the runtime's sources, the flags and the compiler's version, and appears
by an atomic rename, so two processes may compile the same text at once; where the folder has locks, one compiles and
the others wait for it. Beside it stands its digest: what is damaged counts as absent.
"""

import errno
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cheetah import caches
from cheetah.errors import CheetahError
from cheetah.manifest import write_atomically
from cheetah.untrusted import UnreadableError, read_bytes, read_text

ENTRY_BYTES = 1_000_000_000
"""Most bytes of a compiled program: the largest under the race detector has 2,000,000."""

RUNTIME_FOLDER = Path(__file__).parent / "runtime"

_COMMON_FLAGS = ("-std=c++20", "-DCHEETAH_EMULATOR", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
# To optimise takes longer than it saves: the time goes into switching and into the runtime, which is compiled once.
# With -Og a small model's step is compiled in 0.46 s, not 0.30, and its 60 tokens take 0.13 s, not 0.14; with every
# access watched in 0.83 s (-O1), not 0.45, and its tokens take as long.
_TEXT_FLAGS = ("-O0", "-fno-strict-aliasing", "-Wno-unknown-pragmas")
# Libraries for this process are linked to one that names g++'s (`_build_libraries`).
_LIBRARIES = ("-nodefaultlibs", "-Wl,--no-as-needed", "-lstdc++", "-lm", "-lc", "-lgcc_s")
_LIBRARY_FLAGS = ("-shared", "-nodefaultlibs", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN")


@dataclass(frozen=True)
class Mode:
    """How text and runtime are compiled: as a library for this process (plain, or with every access watched), or as a
    program under the race detector."""

    name: str
    runtime_flags: tuple[str, ...]
    text_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    suffix: str


PLAIN = Mode(
    name="plain",
    runtime_flags=("-O3",),
    text_flags=("-Werror=frame-larger-than=49152",),
    link_flags=_LIBRARY_FLAGS,
    suffix=".so",
)
# -fsanitize=thread puts a call around every load and store but those of variables that nobody else can have;
# runtime/watch.cpp has those calls, and g++'s own library is not wanted.
WATCHED = Mode(
    name="watched",
    runtime_flags=("-O3", "-DCHEETAH_EMULATOR_WATCH"),
    text_flags=("-fsanitize=thread", "-Werror=frame-larger-than=49152"),
    link_flags=_LIBRARY_FLAGS,
    suffix=".so",
)
# For texts of which many launches are wanted: on a small model of experts each takes 0.7 to 0.8 of the time, and g++
# 1.4 s, not 0.7. What nobody has set would be anything, zero for instance: so it is a huge number.
WATCHED_OFTEN = replace(WATCHED, text_flags=("-O1", "-ftrivial-auto-var-init=pattern", *WATCHED.text_flags))
# The runtime is compiled without -fsanitize=thread: its accesses are no accesses of the kernel. Reports name lines, for
# which -g1 is enough and takes a fifth less time.
SANITIZED = Mode(
    name="sanitized",
    runtime_flags=("-O2", "-DCHEETAH_EMULATOR_SANITIZE"),
    text_flags=("-g1", "-fsanitize=thread", "-Werror=frame-larger-than=196608"),
    link_flags=("-pie", "-fsanitize=thread"),
    suffix="",
)


LEAST_ROOM = 1 << 20
"""Bytes of a disk on which a compiler that failed had no room: not each says so."""


def build_program(
    text: str, kernel: str, parameters: Sequence[tuple[str, str]], mode: Mode, cache_dir: Path | None
) -> Path:
    """The compiled program of one kernel text, from the cache or from g++.

    Raises CheetahError when there is no g++ or the text does not compile; then the message is g++'s.
    """
    runtime = _build_runtime(mode, cache_dir)
    libraries = [] if mode is SANITIZED else [str(_build_libraries(cache_dir)), "-lgcc"]
    unpacking = _unpacking_text(kernel, parameters)
    key = _hash(text, unpacking, runtime.name, *mode.text_flags, *mode.link_flags)
    target = cache_folder(cache_dir) / f"{kernel}-{mode.name}-{key}{mode.suffix}"

    def build(folder: Path) -> Path:
        (folder / f"{kernel}.cu").write_text(text)
        (folder / "unpacking.cpp").write_text(unpacking)
        output = folder / "program"
        flags = [*_COMMON_FLAGS, *_TEXT_FLAGS, *mode.text_flags, f"-I{RUNTIME_FOLDER}"]
        what = f"kernel {kernel!r} does not compile for the emulator"
        command = [*flags, *mode.link_flags, "unpacking.cpp", str(runtime), *libraries, "-o", output.name]
        _run_compiler(command, folder, what)
        return output

    return _from_cache(target, build)


def cache_folder(cache_dir: Path | None) -> Path:
    """The given folder, absolute, or that of `caches`; created if it is not there."""
    if cache_dir is None:
        cache_dir = caches.cache_folder() / "emulator"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise CheetahError(
            f"{cache_dir}: cannot be made: {problem.strerror or problem}: name another folder in CHEETAH_CACHE"
        ) from problem
    return cache_dir.absolute()


def _build_runtime(mode: Mode, cache_dir: Path | None) -> Path:
    sources = ["runtime.cpp", "sanitize_main.cpp"] if mode is SANITIZED else ["runtime.cpp"]
    key = _hash(_runtime_hash(), *mode.runtime_flags)
    target = cache_folder(cache_dir) / f"runtime-{mode.name}-{key}.o"

    def build(folder: Path) -> Path:
        objects = []
        for source in sources:
            compiled = f"{source}.o"
            flags = [*_COMMON_FLAGS, *mode.runtime_flags, "-c", str(RUNTIME_FOLDER / source), "-o", compiled]
            _run_compiler(flags, folder, f"the emulator's own {source} does not compile")
            objects.append(compiled)
        _run_compiler(["-r", "-nostdlib", *objects, "-o", "joined.o"], folder, "the emulator's runtime does not link")
        return folder / "joined.o"

    return _from_cache(target, build)


def _build_libraries(cache_dir: Path | None) -> Path:
    """An empty library that needs g++'s own. A program that is linked to it finds them when it is loaded, and the
    linker need not read them with each text: they would take it 0.06 s, as long as all else of a small text."""
    name = f"libraries-{_hash(*_LIBRARIES)}.so"

    def build(folder: Path) -> Path:
        (folder / "nothing.cpp").write_text("")
        flags = ["-shared", "-fPIC", "nothing.cpp", f"-Wl,-soname,{name}", *_LIBRARIES, "-o", name]
        _run_compiler(flags, folder, "g++'s own libraries are not found")
        return folder / name

    return _from_cache(cache_folder(cache_dir) / name, build)


def _unpacking_text(kernel: str, parameters: Sequence[tuple[str, str]]) -> str:
    """C++ that calls the kernel with the values behind an array of pointers."""
    types = "".join(f"using Parameter{i} = {ctype};\n" for i, (_, ctype) in enumerate(parameters))
    values = ", ".join(f"*static_cast<Parameter{i}*>(arguments[{i}])" for i in range(len(parameters)))
    return (
        f'#include "{kernel}.cu"\n#include "launch.h"\n{types}'
        f"void cheetah_emulator_kernel([[maybe_unused]] void* const* arguments) {{ {kernel}({values}); }}\n"
    )


def _from_cache(target: Path, build: Callable[[Path], Path]) -> Path:
    """`target` as the cache holds it, or built there. What is damaged is built again: loading it could end us."""
    if not _is_whole(target):
        with caches.held(target.with_name(f"{target.name}.lock")):
            if not _is_whole(target):
                _build(target, build)
    return target


def _build(target: Path, build: Callable[[Path], Path]) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as folder:
            built = build(Path(folder))
            digest = hashlib.sha256(built.read_bytes()).hexdigest()
            os.replace(built, target)
        write_atomically(_digest_of(target), digest.encode())
    except OSError as problem:
        raise CheetahError(
            f"{target}: cannot be written: {problem.strerror or problem}: name another folder in CHEETAH_CACHE"
        ) from problem


def _is_whole(target: Path) -> bool:
    """Whether the file is the one that was put there: its digest is written last, so half an entry is none."""
    if not target.exists():
        return False
    try:
        return hashlib.sha256(read_bytes(target, ENTRY_BYTES)).hexdigest() == read_text(_digest_of(target), 100)
    except UnreadableError:
        return False


def _digest_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _run_compiler(arguments: Sequence[str], folder: Path, what: str) -> None:
    compiler, _ = _compiler()
    environment = {**os.environ, "TMPDIR": str(folder)}  # one place that may be full, and that messages name
    done = subprocess.run([compiler, *arguments], cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode and (os.strerror(errno.ENOSPC) in done.stderr or shutil.disk_usage(folder).free < LEAST_ROOM):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode:
        raise CheetahError(f"{what}:\n{done.stderr.strip()}")


@functools.lru_cache(maxsize=1)
def _compiler() -> tuple[str, str]:
    """Path and version of the C++ compiler: CHEETAH_CXX, or g++ from PATH."""
    wanted = os.environ.get("CHEETAH_CXX", "g++")
    path = shutil.which(wanted)
    if path is None:
        raise CheetahError(
            f"the emulator needs a C++20 compiler and {wanted!r} is not on PATH: install g++ 12 or newer, "
            "or name one in CHEETAH_CXX"
        )
    return path, subprocess.run([path, "--version"], capture_output=True, text=True).stdout


@functools.lru_cache(maxsize=1)
def _runtime_hash() -> str:
    return _hash(*(path.name + path.read_text() for path in sorted(RUNTIME_FOLDER.iterdir()) if path.is_file()))


def _hash(*parts: str) -> str:
    everything = "\0".join((*parts, *_COMMON_FLAGS, *_TEXT_FLAGS, _compiler()[1]))
    return hashlib.sha256(everything.encode()).hexdigest()[:24]
