"""`cheetah calibrate`: scales of keys and values for a cache of e4m3, from a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cheetah.cli.options import takes_load
from cheetah.errors import CheetahError

if TYPE_CHECKING:
    from cheetah.models.rounding import F32
    from cheetah.tools.calibrate import Source

EPILOG = "Example: cheetah calibrate Qwen/Qwen3-8B --text sample.txt -o qwen3-scaled"
LONGEST_TEXT = 64 * 2**20
PARTS = ("keys", "values")


@takes_load("device gpu revision")
def calibrate(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or demo, without scales of keys and values.")],
    text: Annotated[Path, typer.Option(metavar="FILE", help="What the model reads (UTF-8), of the kind it is for.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where to write; must not exist.")],
    tokens: Annotated[int, typer.Option(min=1, help="How many of the text's tokens are read at most.")] = 8192,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the parts in which they are read.")] = 2048,
    per_head: Annotated[bool, typer.Option("--per-head", help="A scale a KV head, not one a layer.")] = False,
    *,
    load: dict[str, Any],
) -> None:
    """Write a copy of a checkpoint with scales of keys and values, for a cache in 8 bits (--kv-dtype e4m3).

    The model reads a text; the largest key and the largest value of each layer become the largest number of e4m3. The
    copy has them as k_scale and v_scale, as vLLM and compressed-tensors name them. Its weights are links to the
    original's files, or copies where there can be none.
    """
    from cheetah.tools.calibrate import calibration_source, scales_for, write_scaled

    source = calibration_source(model, load.pop("revision", None))
    if out.exists():
        raise CheetahError(f"{out}: exists already: give a folder that does not")
    largest, read = _largest(source, _text(text), tokens, context, load)
    write_scaled(source, out, scales_for(largest, per_head))
    for part, name in enumerate(PARTS):
        of_layers = largest[:, part].max(axis=1)
        typer.echo(f"{name:<7} up to {of_layers.min():.4g} in one layer, {of_layers.max():.4g} in another")
    typer.echo(f"wrote {out}: scales of {len(largest)} layers from {read} tokens")


def _text(file: Path) -> str:
    """The file's text; CheetahError if there is none that can be read."""
    if not file.is_file():
        raise CheetahError(f"{file}: {'no ordinary' if file.exists() else 'no such'} file: give --text a file of text")
    if file.stat().st_size > LONGEST_TEXT:
        raise CheetahError(f"{file}: {file.stat().st_size} bytes: give a part of it, at most {LONGEST_TEXT}")
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as problem:
        raise CheetahError(f"{file}: is not UTF-8: {problem}") from problem


def _largest(source: Source, text: str, tokens: int, context: int, load: dict[str, Any]) -> tuple[F32, int]:
    """The largest keys and values, and how many tokens were read. load: where, of --device and --gpu."""
    from rich.console import Console
    from rich.progress import Progress

    from cheetah.runtime.llm import LLM
    from cheetah.tools.calibrate import largest_of_text, pieces_of

    if not text.strip():
        raise CheetahError("the text is empty: nothing is known of keys and values then")
    config = source.config
    context = min(context, config.max_position_embeddings, config.sliding_window or context)
    console = Console(stderr=True)
    llm = LLM(source.folder, **load, batch=1, max_context=context, prefix_cache=False, quiet=True)
    with llm, Progress(console=console, disable=not console.is_terminal) as bar:
        pieces = pieces_of(llm.get_tokenizer().encode(text), tokens, context)
        count = sum(map(len, pieces))
        task = bar.add_task("reading the text", total=count)
        return largest_of_text(llm, pieces, lambda done: bar.advance(task, done)), count
