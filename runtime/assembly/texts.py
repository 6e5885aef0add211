"""Texts of kernels on disk: to write one takes half a second, and a server that is started again needs the same four.

A text follows from the package's own sources and from what is asked for, so both are its key: edited sources find
nothing. What is read is checked by its manifest's hash; what cannot be read is written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from cheetah import version
from cheetah.errors import CheetahError
from cheetah.manifest import Manifest, write_atomically
from cheetah.untrusted import read_text

TEXT_BYTES = 20_000_000
"""Most bytes of a text: the largest has 400,000."""


class Generated(Protocol):
    """A kernel's text with its manifest."""

    @property
    def text(self) -> str: ...

    @property
    def manifest(self) -> Manifest: ...


@dataclass(frozen=True)
class KeptText:
    """`Generated` from the disk."""

    text: str
    manifest: Manifest


@dataclass(frozen=True)
class KeptTexts:
    """folder: where they are; None: none is kept."""

    folder: Path | None

    def get(self, asked: Sequence[Any], make: Callable[[], Generated]) -> Generated:
        """What `make` gives, or gave when the same was asked for before. asked: numbers, texts and dicts of such."""
        if self.folder is None or (sources := _sources()) is None:
            return make()
        key = hashlib.sha256(json.dumps([sources, *asked], sort_keys=True, default=repr).encode()).hexdigest()[:32]
        text_path, manifest_path = self.folder / f"{key}.cu", self.folder / f"{key}.json"
        if (found := _found(text_path, manifest_path)) is not None:
            return found
        made = make()
        with contextlib.suppress(OSError):  # a folder that cannot be written keeps nothing
            write_atomically(text_path, made.text.encode())
            made.manifest.write(manifest_path)
        return made


def _found(text_path: Path, manifest_path: Path) -> KeptText | None:
    """None if the two are not there, or not of one kernel."""
    if not manifest_path.is_file():
        return None
    try:
        text, manifest = read_text(text_path, TEXT_BYTES), Manifest.read(manifest_path)
        manifest.check_text(text)
    except (CheetahError, OSError):
        return None
    return KeptText(text, manifest)


@cache
def _sources() -> str | None:
    """A hash of every module of the package; None where they are not files."""
    folder = Path(version.__file__).parent
    digest, found = hashlib.sha256(), False
    # The two that are links, where the package is used from its repository, are folders of their own here.
    for path in sorted(
        (*folder.rglob("*.py"), *(folder / "models").rglob("*.py"), *(folder / "runtime").rglob("*.py"))
    ):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
        found = True
    return digest.hexdigest() if found else None
