"""A generated kernel as a whole: its text and its manifest, how its parameters are described, and how it is written.

Every kernel of ours is described by `described` and becomes both by `packaged`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cheetah import lang as ch
from cheetah.lang import ty
from cheetah.manifest import RANK as RANK
from cheetah.manifest import Buffer, Launch, Manifest, Parameter, sha256_of_text, write_atomically
from cheetah.manifest import of_peer as of_peer
from cheetah.manifest import peer_parameter as peer_parameter
from cheetah.plan import Gpu, StepMatrices
from cheetah.version import __version__

DTYPES = {ty.u8: "u8", ty.u16: "u16", ty.u32: "u32", ty.u64: "u64", ty.i32: "i32", ty.f32: "f32", ty.bf16: "bf16"}


@dataclass(frozen=True)
class Generated:
    """A kernel's text and what the runtime must know of it."""

    text: str
    manifest: Manifest

    def with_text(self, text: str) -> Generated:
        """The same kernel with another text, for which its manifest vouches."""
        return Generated(text, replace(self.manifest, text_sha256=sha256_of_text(text)))

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Write `name.cu` and `name.json`; each appears whole or not at all. Returns the two paths."""
        source, manifest = folder / f"{name}.cu", folder / f"{name}.json"
        write_atomically(source, self.text.encode())
        self.manifest.write(manifest)
        return source, manifest


@dataclass(frozen=True)
class KernelParameter:
    """What a kernel's author says of a parameter. shape: of what a pointer points to, in numbers and names of sizes; a
    name that is no size stands for the scalar parameter that gives the length; None where that is not said. fill: what
    the runtime begins with ("host": what it uploads); None: it allocates no such buffer. given: nor does it here, and
    passes one with a launch, or none."""

    type: ty.Type
    meaning: str
    shape: tuple[int | str, ...] | None = None
    fill: str | None = "host"
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
        if self.shape is None or self.fill is None or self.given:
            return None
        lengths = tuple(length for length in self._shape(sizes) or () if isinstance(length, int))
        return Buffer(name, DTYPES[self._element], lengths, math.prod(lengths) * self._element.bytes, self.fill)

    @property
    def _element(self) -> ty.Scalar:
        assert isinstance(self.type, ty.Pointer) and isinstance(self.type.element, ty.Scalar)
        return self.type.element

    def _shape(self, sizes: Mapping[str, int]) -> tuple[int | str, ...] | None:
        if self.shape is None:
            return None
        return tuple(sizes.get(length, length) if isinstance(length, str) else length for length in self.shape)


RANK_NUMBER = KernelParameter(ty.u32, "which of the GPUs that make the steps together this is")


def described(
    kernel: str,
    gpu: Gpu,
    launch: Launch,
    parameters: Mapping[str, KernelParameter],
    sizes: Mapping[str, int] | None = None,
    *,
    command: str,
    config: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    matrices: StepMatrices | None = None,
    phases: tuple[str, ...] = (),
    step_bytes: Mapping[str, int] | None = None,
) -> Manifest:
    """The manifest of a kernel, which has no text yet. sizes: what names in the parameters' shapes are, of numbers that
    a launch is told in the buffers' alone. matrices: those
    that a step reads, whose bytes are the first of `step_bytes`; the other fields are the manifest's."""
    sizes = sizes or {}
    of_launch = {name for name, one in parameters.items() if isinstance(one.type, ty.Scalar)}
    known = {name: size for name, size in sizes.items() if name not in of_launch}
    weights = {"weights": matrices.weight_bytes} if matrices else {}
    return Manifest(
        kernel=kernel,
        text_sha256=sha256_of_text(""),
        generator=__version__,
        command=command,
        gpu={name: value for name, value in asdict(gpu).items() if name != "ranks"},
        config=dict(config or {}),
        plan=dict(plan or {}),
        launch=launch,
        parameters=tuple(one.parameter(name, known) for name, one in parameters.items()),
        matrices=matrices.describe() if matrices else (),
        layer_stride=matrices.layer_stride if matrices else 0,
        weight_bytes=matrices.weight_bytes if matrices else 0,
        buffers=tuple(made for name, one in parameters.items() if (made := one.buffer(name, sizes))),
        phases=phases,
        step_bytes={**weights, **(step_bytes or {})},
        world_size=gpu.ranks,
    )


def packaged(kernel: ch.Kernel, manifest: Manifest, header: str, *, line_marks: bool = False) -> Generated:
    """The text of a kernel that `manifest` describes, below `header`, and both together."""
    text = ch.render_file(kernel, header=header, line_marks=line_marks)
    return Generated("", manifest).with_text(text)


@contextmanager
def no_collections() -> Iterator[None]:
    """A program is a hundred thousand objects that live until its text is written: looking for garbage among them takes
    a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
