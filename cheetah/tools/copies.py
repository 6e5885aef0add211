"""Copies of checkpoints: folders that appear when all of them is written, and what of a folder is no weight."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cheetah.errors import CheetahError, writing

NOT_COPIED = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".index.json")
LARGEST_COPY = 64 * 2**20


@contextmanager
def appearing_whole(out: Path) -> Iterator[Path]:
    """A folder to be filled, which gets the name `out` when that has succeeded and else is gone. `out` must not exist;
    CheetahError if it does."""
    if out.exists():
        raise CheetahError(f"{out}: exists already: give a folder that does not")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        with writing(out):
            yield unfinished
            unfinished.chmod(0o755)
            unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def copy_files(source: Path, folder: Path, config: Mapping[str, Any]) -> None:
    """`config` as config.json, and every small file that is no weight."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in sorted([*source.iterdir(), *source.glob("chat_templates/*.jinja")]):
        target = folder / path.relative_to(source)
        if path.is_file() and not path.name.endswith(NOT_COPIED) and path.stat().st_size <= LARGEST_COPY:
            target.parent.mkdir(exist_ok=True)
            if not target.exists():
                shutil.copyfile(path, target)
