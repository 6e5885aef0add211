"""What commands that write a checkpoint anew show meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cheetah.tools.rewriting import Rewriting


def write_with_progress(rewriting: Rewriting, out: Path, about: str) -> None:
    """Write the copy, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(about, total=rewriting.source_bytes())
        rewriting.write(out, lambda nbytes: bar.advance(task, nbytes))
