"""`cheetah sparsify`: a checkpoint in which two of every four weights are zero, or any of each row."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from cheetah.cli.options import Revision
from cheetah.cli.rewriting import write_with_progress

EPILOG = "Example: cheetah sparsify Qwen/Qwen3-8B -o qwen3-2of4"


def sparsify(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or demo: weights in 16 or 32 bits.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where to write; must not exist.")],
    pattern: Annotated[
        str,
        typer.Option(
            help="Which are left: 2:4, two of every four; 0.5, half of each row; blocks:0.5, half of a matrix' blocks; "
            "blocks:2:4, two of every four blocks."
        ),
    ] = "2:4",
    layout: Annotated[
        str, typer.Option(help="plain, zeros and all, which everything reads; or bitmask, of compressed-tensors.")
    ] = "plain",
    revision: Revision = None,
) -> None:
    """Write a copy of a checkpoint whose layers' matrices have some of their weights, those of largest magnitude.

    No data is used, and nothing is trained: models that were not made for it lose much. The embedding, the norms,
    routers of experts and lm_head stay as they are. A plain copy is then opened with --sparse auto.
    """
    from cheetah.runtime.assembly.memory import size_text
    from cheetah.tools.sparsify import sparse_copy

    job = sparse_copy(model, pattern, layout, revision)
    began = time.monotonic()
    write_with_progress(job, out, "leaving weights out")
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    typer.echo(f"wrote {out}: {size_text(size)} in {pattern}, {layout}, {time.monotonic() - began:.1f} s")
