"""`cheetah generate`: kernel, manifest and, where a compiler is, the cubin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cheetah.cli.configs import named_config, print_notes
from cheetah.cli.options import DEFAULT_GPU, Config, MachineGpu, Revision, takes_plan
from cheetah.cli.tables import console, named_values
from cheetah.errors import CheetahError

if TYPE_CHECKING:
    from rich.console import Console

    from cheetah.manifest import Manifest
    from cheetah.package import Generated
    from cheetah.runtime.assembly.cubin import Cubin

EPILOG = "Example: cheetah generate llama-3.1-8b -o kernels --sync barrier"
DECODING = "decoding"
"""Of a pass' plan: the plan of the kernel beside it."""


@takes_plan
def generate(
    *,
    config: Config,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where the files go.")] = Path("."),
    name: Annotated[
        str | None,
        typer.Option(help="Of the files, without ending; by default model, GPU and the options given."),
    ] = None,
    gpu: MachineGpu = DEFAULT_GPU,
    prompt_pass: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="TOKENS", help="Instead: the kernel that reads such a pass of a prompt.", show_default=False
        ),
    ] = None,
    line_marks: Annotated[
        bool, typer.Option("--line-marks", help="#line marks, so that compilers name the Python source.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Time stamps of every block and phase, as `cheetah trace` needs them.")
    ] = False,
    compile: Annotated[bool, typer.Option(help="Compile to a cubin where a compiler is there.")] = True,
    compiler: Annotated[str, typer.Option(help="nvrtc or nvcc.")] = "nvrtc",
    revision: Revision = None,
    plan: dict[str, Any],
) -> None:
    """Write the kernel of a model, its manifest and, if a compiler is there, its cubin. Needs no GPU."""
    from cheetah.tools.regenerate import file_stem, generate_named, generate_named_pass, needed_options

    named = named_config(config, revision)
    print_notes(named.notes)
    chosen, how = needed_options(named.config, gpu, plan), {"line_marks": line_marks, "traced": trace}
    stem = name or file_stem(named.stem, gpu, chosen, **how, prompt_pass=prompt_pass)
    if prompt_pass is None:
        generated = generate_named(named.config, named.canonical, gpu, plan, **how)
    else:
        generated = generate_named_pass(named.config, named.canonical, gpu, plan, prompt_pass, **how)
    with _writing(output):
        source, manifest = generated.write(output, stem)
    shown = console()
    shown.print(named_values("plan", _choices(generated.manifest)))
    lines = generated.text.count("\n")
    shown.print(f"wrote {source} ({lines} lines, sha256 {generated.manifest.text_sha256[:12]})")
    shown.print(f"wrote {manifest}")
    if compile and gpu_is_real(gpu):
        _write_cubin(shown, generated, output / f"{stem}.cubin", compiler)


def gpu_is_real(gpu: str) -> bool:
    """Whether kernels for this machine run on a GPU."""
    from cheetah.plan import gpu_named

    return not gpu_named(gpu).emulated


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns the system's refusal into a message."""
    try:
        yield
    except OSError as problem:
        raise CheetahError(f"cannot write to {folder}: {problem.strerror}: choose another folder with -o") from None


def _choices(manifest: Manifest) -> Iterator[tuple[str, Any]]:
    launch = manifest.launch
    yield from ((field, value) for field, value in manifest.plan.items() if field != DECODING)
    yield "launch", f"{launch.blocks} blocks of {launch.threads} threads, {launch.shared_bytes} bytes shared"
    yield "weights read", f"{manifest.weight_bytes / 1e9:.3f} GB"


def _write_cubin(shown: Console, generated: Generated, path: Path, compiler: str) -> None:
    """Compile and write; no compiler is no error, a text that does not compile is one."""
    from cheetah.manifest import write_atomically
    from cheetah.runtime.assembly.compile import CompileError, compile_cubin, find_compiler
    from cheetah.runtime.device import say_to_stderr

    try:
        _ = find_compiler(compiler).version
    except CompileError as problem:
        other = "; with a CUDA toolkit: --compiler nvcc" if compiler == "nvrtc" else ""
        shown.print(f"no cubin: {problem}{other}")
        return
    cubin = compile_cubin(generated.text, generated.manifest.kernel, compiler=compiler, progress=say_to_stderr)
    with _writing(path.parent):
        write_atomically(path, cubin.image)
    shown.print(f"wrote {path} ({len(cubin.image)} bytes, {cubin.compiler})")
    _print_resources(shown, generated, cubin)


def _print_resources(shown: Console, generated: Generated, cubin: Cubin) -> None:
    shared = cubin.resources.shared_bytes + generated.manifest.launch.shared_bytes
    shown.print(f"a thread: {cubin.resources}")
    shown.print(f"a block: {shared} bytes of shared memory, {generated.manifest.launch.threads} threads")
