"""Compiling to cubins: the cache, its use by several processes, the resource report and the errors. No GPU needed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from cheetah.caches import cache_folder
from cheetah.runtime.assembly import compile as compiling
from cheetah.runtime.assembly.compile import CompileError, Cubin, ResourceReport, compile_cubin, resource_report
from cheetah.runtime.assembly.cubin import CacheEntry


def why_not(compiler: str) -> str:
    """Why `compiler` cannot be used here, or nothing."""
    try:
        return "" if compiling.find_compiler(compiler).version else "no version"
    except CompileError as error:
        return str(error)


needs_nvrtc = pytest.mark.skipif(bool(why_not("nvrtc")), reason=why_not("nvrtc"))
needs_nvcc = pytest.mark.skipif(bool(why_not("nvcc")), reason=why_not("nvcc"))

SCALE = """
typedef unsigned int uint32_t;
extern "C" __global__ void __launch_bounds__(256, 1) scale(uint32_t n, float* x) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { x[i] = x[i] * 2.0f; }
}
"""

# Only sm_90a has setmaxnreg: a cubin for plain sm_90 would be refused.
HOPPER = """
extern "C" __global__ void __launch_bounds__(256, 1) hopper(float* x) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 128;");
    x[threadIdx.x] = 1.0f;
}
"""

# 100 floats indexed at run time lie on the stack, 64 bytes are static shared memory.
LOCAL = """
extern "C" __global__ void other(float* x) { x[0] = 1.0f; }
extern "C" __global__ void local(int* x) {
    __shared__ int s[16];
    int a[100];
    for (int i = 0; i < 100; i++) a[i] = x[i];
    s[threadIdx.x % 16] = a[x[7]];
    x[1] = s[x[2] % 16];
}
"""


def messages(text: str, kernel: str, cache: Path, compiler: str = "nvrtc") -> tuple[Cubin, list[str]]:
    lines: list[str] = []
    return compile_cubin(text, kernel, compiler=compiler, cache=cache, progress=lines.append), lines


@needs_nvrtc
def test_nvrtc_makes_a_cubin_and_says_so(tmp_path: Path) -> None:
    cubin, lines = messages(SCALE, "scale", tmp_path)
    assert cubin.image[:4] == b"\x7fELF"
    assert not cubin.cached
    assert cubin.compiler.startswith("NVRTC ") and cubin.compiler.count(".") == 2
    assert lines[0] == f"compiling scale ({cubin.compiler})..."
    assert lines[1].startswith("compiled scale in ")
    assert cubin.path is not None and cubin.path.read_bytes() == cubin.image


FUSABLE = """
extern "C" __global__ void fusable(float* x) {
    x[0] = x[1] * x[2] + x[3] * x[4];
    x[5] = __fmaf_rn(x[6], x[7], x[8]);
}
"""


@needs_nvrtc
def test_a_product_and_a_sum_are_fused_where_the_text_says_so_alone() -> None:
    """Else a compiler chooses which of two products, another one in another kernel. No assembler fuses `mul.rn`."""
    asked = [flag for flag in compiling.NvrtcCompiler.flags if flag.startswith("--fmad")]
    counts = []
    for flags in (asked, []):
        with compiling._nvrtc_program(FUSABLE, "fusable.cu") as program:
            compiling._nvrtc_compile(program, ["--gpu-architecture=compute_90a", *flags], "fusable")
            ptx = program.output("PTX").decode()
        counts.append([ptx.count(name) for name in ("fma.rn.f32", "mul.rn.f32", "add.rn.f32")])
    assert counts == [[1, 2, 1], [2, 0, 0]], counts
    assert set(asked) < set(compiling.NvccCompiler.flags)


@needs_nvrtc
def test_the_second_time_comes_from_the_cache(tmp_path: Path) -> None:
    first, _ = messages(SCALE, "scale", tmp_path)
    second, lines = messages(SCALE, "scale", tmp_path)
    assert second.cached and second.image == first.image and second.resources == first.resources
    assert len(lines) == 1 and lines[0].startswith("scale: cached (NVRTC ")


@needs_nvrtc
def test_text_flags_and_version_are_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages(SCALE, "scale", tmp_path)
    assert not messages(SCALE + " ", "scale", tmp_path)[0].cached
    assert not compile_cubin(SCALE, "scale", options=["-lineinfo"], cache=tmp_path).cached
    monkeypatch.setattr(compiling.NvrtcCompiler, "version", "NVRTC 99.0.1")
    assert not messages(SCALE, "scale", tmp_path)[0].cached


@needs_nvrtc
def test_hopper_instructions_compile(tmp_path: Path) -> None:
    cubin, _ = messages(HOPPER, "hopper", tmp_path)
    assert cubin.resources.registers > 0


@needs_nvrtc
def test_a_damaged_entry_is_compiled_again(tmp_path: Path) -> None:
    cubin, _ = messages(SCALE, "scale", tmp_path)
    assert cubin.path is not None
    cubin.path.write_bytes(cubin.image[:100])
    again, _ = messages(SCALE, "scale", tmp_path)
    assert not again.cached and again.image == cubin.image
    cubin.path.with_suffix(".json").write_text("{")
    assert not messages(SCALE, "scale", tmp_path)[0].cached


ENTRY = Cubin("scale", b"\x7fELF", "NVRTC 13.0.88", ("-a",), ResourceReport(1, 2, 3, 4, 5), 0.5, True, None)


def loaded(folder: Path, report: bytes | None = None) -> tuple[Cubin | None, str]:
    """A stored entry with another report: (what is loaded, what was said)."""
    entry, said = CacheEntry.of(folder, "text", "scale", ("-a",), "NVRTC 13.0.88"), list[str]()
    entry.store(ENTRY)
    if report is not None:
        entry.report_path.write_bytes(report)
    return entry.load(said.append), "\n".join(said)


def edited(**changes: object) -> bytes:
    report = {**dataclasses.asdict(ENTRY), "cubin_sha256": hashlib.sha256(ENTRY.image).hexdigest()}
    kept = ("kernel", "compiler", "flags", "seconds", "resources", "cubin_sha256")
    return json.dumps({name: {**report, **changes}[name] for name in kept}).encode()


def test_an_entry_is_loaded_as_it_was_stored(tmp_path: Path) -> None:
    found, said = loaded(tmp_path, edited(seconds=1))
    assert found is not None and said == ""
    assert dataclasses.replace(found, path=None, seconds=0.5) == ENTRY


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (b"[]", "holds a JSON list, expected an object"),
        (b'"text"', "holds a JSON str, expected an object"),
        (b"[" * 90_000, "nested too deeply"),
        (b"\xff", "is not UTF-8 text"),
        (b" " * 200_000, "has 200000 bytes, at most 100000 are read"),
        (edited(seconds="soon"), ".seconds must be of type float, not str"),
        (edited(flags="-a"), ".flags must be a list, not str"),
        (edited(resources=[]), ".resources must be an object, not list"),
        (edited(resources={"registers": "\x1b[2J"}), ".resources: missing field shared_bytes"),
        (edited(resources={**dataclasses.asdict(ENTRY.resources), "registers": "9"}), "must be of type int, not str"),
        (edited(cubin_sha256="0"), ".cubin: is not the cubin that scale-"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_report_counts_as_none_with_a_note(tmp_path: Path, report: bytes, reason: str) -> None:
    found, said = loaded(tmp_path, report)
    assert found is None and reason in said and said.isprintable()
    assert said.startswith("scale: what the cache holds is not used: ")


def test_pipes_and_devices_in_the_cache_count_as_none(tmp_path: Path) -> None:
    entry, said = CacheEntry.of(tmp_path, "text", "scale", (), "NVRTC 13.0.88"), list[str]()
    entry.store(ENTRY)
    entry.cubin_path.unlink()
    entry.cubin_path.symlink_to("/dev/zero")
    assert entry.load(said.append) is None and ".cubin: cannot be read: it is no regular file" in said[0]
    entry.report_path.unlink()
    os.mkfifo(entry.report_path)
    assert entry.load(said.append) is None and ".json: cannot be read: it is no regular file" in said[1]
    os.mkfifo(entry.folder / f"{entry.stem}.lock")
    with entry.lock(lambda: said.append("waits")):
        assert len(said) == 2


@needs_nvrtc
def test_a_cache_that_cannot_be_written_is_told_and_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cubin, lines = messages(SCALE, "scale", tmp_path / "file")
    assert cubin.image[:4] == b"\x7fELF" and cubin.path is None
    assert any(line.startswith("scale: not kept in the cache: ") for line in lines)


@needs_nvrtc
def test_the_resource_report_tells_local_memory_of_the_asked_kernel(tmp_path: Path) -> None:
    local, _ = messages(LOCAL, "local", tmp_path)
    assert local.resources.stack_bytes >= 400 and local.resources.shared_bytes == 64
    assert local.resources.uses_local_memory
    other, _ = messages(LOCAL, "other", tmp_path)
    assert other.resources.stack_bytes == 0 and other.resources.shared_bytes == 0
    assert not other.resources.uses_local_memory
    assert local.path is not None
    stored = json.loads(local.path.with_suffix(".json").read_text())
    assert ResourceReport(**stored["resources"]) == local.resources


@needs_nvrtc
def test_errors_carry_the_log_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        messages(SCALE.replace("2.0f", "two"), "scale", tmp_path)
    assert "NVRTC refused kernel 'scale': NVRTC_ERROR_COMPILATION" in str(caught.value)
    assert 'scale.cu(5): error: identifier "two" is undefined' in str(caught.value)
    assert 'identifier "two" is undefined' in caught.value.log
    assert not list(tmp_path.rglob("*.cubin"))


@needs_nvrtc
def test_a_kernel_that_is_not_in_the_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"no kernel 'scales' \(kernels in it: scale\)"):
        messages(SCALE, "scales", tmp_path)


@needs_nvrtc
def test_an_unknown_flag_is_told(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="--no-such-flag"):
        compile_cubin(SCALE, "scale", options=["--no-such-flag"], cache=tmp_path)


def compile_in_child(cache: str, start: multiprocessing.synchronize.Barrier, results: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    start.wait()
    cubin = compile_cubin(SCALE, "scale", cache=Path(cache))
    results.put((cubin.cached, cubin.image))


@pytest.mark.slow
@needs_nvrtc
def test_processes_that_compile_at_once_agree_and_one_does_the_work(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    children = [context.Process(target=compile_in_child, args=(str(tmp_path), start, results)) for _ in range(3)]
    for child in children:
        child.start()
    answers = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert sorted(cached for cached, _ in answers) == [False, True, True]
    assert len({image for _, image in answers}) == 1
    assert not list(tmp_path.rglob("*.part"))


def test_waiting_for_another_process_is_said(tmp_path: Path) -> None:
    entry = CacheEntry.of(tmp_path, "text", "scale", (), "NVRTC 13.0.88")
    order: list[str] = []

    def hold(held: multiprocessing.synchronize.Event, release: multiprocessing.synchronize.Event) -> None:
        with entry.lock(lambda: None):
            held.set()
            release.wait(30)

    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(held, release))
    holder.start()
    held.wait(30)

    def on_wait() -> None:
        order.append("waiting")
        release.set()

    with entry.lock(on_wait):
        order.append("held")
    holder.join()
    assert order == ["waiting", "held"]


@needs_nvcc
@pytest.mark.slow
def test_nvcc_compiles_the_same(tmp_path: Path) -> None:
    cubin, lines = messages(HOPPER, "hopper", tmp_path, compiler="nvcc")
    assert cubin.image[:4] == b"\x7fELF"
    assert lines[0].startswith("compiling hopper (nvcc ")
    assert messages(HOPPER, "hopper", tmp_path, compiler="nvcc")[0].cached


@needs_nvcc
@pytest.mark.slow
def test_nvcc_errors_carry_the_log(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match='identifier "two" is undefined'):
        messages(SCALE.replace("2.0f", "two"), "scale", tmp_path, compiler="nvcc")


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", refuse)
    compiling._load_nvrtc.cache_clear()
    with pytest.raises(CompileError, match=r"pip install '\.\[cuda\]' in Cheetah's checkout"):
        compiling._load_nvrtc()
    monkeypatch.undo()
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(CompileError, match="nvcc is neither in"):
        compiling.find_compiler("nvcc")
    with pytest.raises(CompileError, match="unknown compiler 'clang': use 'nvrtc' or 'nvcc'"):
        compiling.find_compiler("clang")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHEETAH_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_folder() == Path("/one")
    monkeypatch.setenv("CHEETAH_CACHE", "one")
    assert cache_folder() == Path.cwd() / "one", "compilers run in folders of their own"
    monkeypatch.delenv("CHEETAH_CACHE")
    assert cache_folder() == Path("/two/cheetah")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/cheetah")


LOG = """\
ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma \
instructions defining input registers of a wgmma between start and end of the pipeline stage in the function 'big'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'big' for 'sm_90a'
ptxas info    : Function properties for big
ptxas         .     128 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers, used 3 barriers, 160 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Function properties for helper
ptxas         .     32 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Compiling entry function 'small' for 'sm_90a'
ptxas info    : Function properties for small
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


def test_the_report_counts_what_was_not_inlined() -> None:
    assert resource_report(LOG, "big") == ResourceReport(255, 1024, 160, 44, 52, in_series=True)
    assert str(resource_report(LOG, "big")) == (
        "255 registers, 1024 bytes of static shared memory, 160 bytes of stack, 44 + 52 bytes spilled (stores + loads)"
        ", products one by one (wgmma in series)"
    )
    assert str(resource_report(LOG, "small")) == (
        "8 registers, 0 bytes of static shared memory, no spills, no local memory"
    )
