"""A generated kernel as a whole: its text and its manifest, how its parameters are described, and how it is written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cheetah.lang import ty
from cheetah.manifest import Buffer, Manifest, Parameter, write_atomically

DTYPES = {ty.u8: "u8", ty.u16: "u16", ty.u32: "u32", ty.u64: "u64", ty.i32: "i32", ty.f32: "f32", ty.bf16: "bf16"}


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


@dataclass(frozen=True)
class KernelParameter:
    """What a kernel's author says of a parameter. shape: of what a pointer points to, in numbers and names of sizes; a
    name that is no size stands for the scalar parameter that gives the length. fill: what the runtime begins with
    ("host": what it uploads). given: the runtime passes it with each launch, and has no such buffer from the start."""

    type: ty.Type
    meaning: str
    shape: tuple[int | str, ...] | None = None
    fill: str = "host"
    given: bool = False

    def parameter(self, name: str, sizes: Mapping[str, int]) -> Parameter:
        """As the manifest lists it."""
        if isinstance(self.type, ty.Pointer):
            dtype, shape = DTYPES[self._element], self._shape(sizes)
            return Parameter(name, str(self.type), "pointer", dtype, self.type.mutable, shape, self.meaning, self.given)
        assert isinstance(self.type, ty.Scalar)
        return Parameter(name, str(self.type), "scalar", DTYPES[self.type], False, None, self.meaning)

    def buffer(self, name: str, sizes: Mapping[str, int]) -> Buffer | None:
        """The buffer that the runtime allocates for it, if any."""
        if self.shape is None or self.given:
            return None
        lengths = tuple(length for length in self._shape(sizes) if isinstance(length, int))
        return Buffer(name, DTYPES[self._element], lengths, math.prod(lengths) * self._element.bytes, self.fill)

    @property
    def _element(self) -> ty.Scalar:
        assert isinstance(self.type, ty.Pointer) and isinstance(self.type.element, ty.Scalar)
        return self.type.element

    def _shape(self, sizes: Mapping[str, int]) -> tuple[int | str, ...]:
        assert self.shape is not None
        return tuple(sizes.get(length, length) if isinstance(length, str) else length for length in self.shape)
