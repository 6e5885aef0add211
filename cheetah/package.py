"""A generated kernel as a whole: its text and its manifest, and how they are written to files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cheetah.lang import ty
from cheetah.manifest import Manifest, write_atomically

DTYPES = {ty.u8: "u8", ty.u32: "u32", ty.u64: "u64", ty.i32: "i32", ty.f32: "f32", ty.bf16: "bf16"}


@dataclass(frozen=True)
class Generated:
    """A kernel's text and what the runtime must know of it."""

    text: str
    manifest: Manifest

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Write `name.cu` and `name.json`; each appears whole or not at all. Returns the two paths."""
        source, manifest = folder / f"{name}.cu", folder / f"{name}.json"
        write_atomically(source, self.text.encode())
        self.manifest.write(manifest)
        return source, manifest
