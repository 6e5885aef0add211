"""`cheetah quantize`: a checkpoint in 4 or 8 bits, written as compressed-tensors lays it out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from cheetah.cli.options import Revision
from cheetah.cli.rewriting import write_with_progress
from cheetah.errors import CheetahError

EPILOG = "Example: cheetah quantize meta-llama/Llama-3.1-8B-Instruct -o llama-int4 --format int4-g128 --clip mse"
CLIPS = ("none", "mse")


def quantize(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or demo: weights in 16 or 32 bits.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where to write; must not exist.")],
    format: Annotated[
        str, typer.Option(help="int4-g128, int4-g64, int4-g32, int4 (a scale a row), int8, fp8, fp8-block128; -asym.")
    ] = "int4-g128",
    clip: Annotated[
        str, typer.Option(help="none, or mse: the range of a group with the least squared error.")
    ] = "none",
    outliers: Annotated[
        str, typer.Option(help="Weights to keep as they are, beside int4 or int8: 0.5% of them, or 0.005.")
    ] = "0",
    revision: Revision = None,
) -> None:
    """Write a copy of a checkpoint with its layers' matrices rounded to the nearest codes, without any data.

    The embedding, the norms, routers of experts and lm_head stay as they are. The copy is a standard
    compressed-tensors checkpoint; with outliers, the weights of largest magnitude, it is in a layout of cheetah's own.
    """
    from cheetah.models.formats.quantized import scheme_of_name
    from cheetah.runtime.assembly.memory import size_text
    from cheetah.tools.quantize import SCALES, quantization_job

    if clip not in CLIPS:
        raise CheetahError(f"--clip {clip}: there are {', '.join(CLIPS)}")
    part = _part(outliers)
    job = quantization_job(model, scheme_of_name(format, SCALES), clip == "mse", revision, part)
    began = time.monotonic()
    write_with_progress(job, out, "rounding weights")
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    beside = f" and {part:.3%} outliers" if part else ""
    typer.echo(f"wrote {out}: {size_text(size)} in {format}{beside}, {time.monotonic() - began:.1f} s")


def _part(text: str) -> float:
    """A part of a whole, as "0.5%" or "0.005"."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as problem:
        raise CheetahError(f"--outliers {text}: write 0.5%, or 0.005") from problem
