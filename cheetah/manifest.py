"""The manifest: everything the runtime knows about a generated kernel, as plain data written beside the kernel's text.

The generator writes it, the runtime reads it, and neither needs the other's code. This module knows nothing of the
rest of Cheetah but the base of its errors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import tempfile
import types
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cheetah.errors import CheetahError
from cheetah.printable import shown, shown_name
from cheetah.records import record_from_json
from cheetah.untrusted import parse_json, read_text

FORMAT = 1

NO_PAGE = -1
"""What the buffer `page_table` holds where a sequence has no page: nobody looks there; the emulator says who does."""

DTYPE_BYTES: Mapping[str, int] = types.MappingProxyType(
    {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i32": 4, "f32": 4, "bf16": 2}
)
"""Bytes of one element of each dtype that a parameter or a buffer can have."""

FILLS = ("zero", "poison", "host", "mapped")
"""What a buffer holds before the first launch: zeros, 0xFF bytes (NaN in f32 and bf16), or what the host uploads.
"mapped": it lies in the host's memory, where both see what the other writes while a launch runs."""

RANK = "rank"
"""The scalar parameter of kernels of several GPUs that says which of them this one is: 0, 1, ..."""

FIRST_RANKS = frozenset({"logits"})
"""Buffers that all ranks write in the memory of the first: what each knows a part of, and the host reads."""

MOST_DIMENSIONS = 16
LARGEST_LENGTH = 2**63 - 1

WORLD_SIZES = (1, 2, 4, 8)
"""How many GPUs can make a step together."""

LINE_WIDTH = 200  # wide enough for a parameter or a matrix on one line of the JSON


def peer_parameter(buffer: str, further: int) -> str:
    """The parameter of kernels of several GPUs that points to a buffer's namesake on the rank so many further on, of
    which the last is followed by the first."""
    return f"peer_{further}_{buffer}"


def of_peer(parameter: str) -> tuple[str, int] | None:
    """The buffer and how many ranks further, where a parameter is such a one."""
    found = re.fullmatch(r"peer_([1-9])_(\w+)", parameter)
    return None if found is None else (found[2], int(found[1]))


class ManifestError(CheetahError):
    """A manifest that cannot be read, or whose parts contradict each other."""


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter, in the order of the kernel's signature.

    ctype: the C type as it stands in the signature, e.g. "const uint8_t*" or "uint32_t".
    kind: "pointer" or "scalar". dtype: a key of DTYPE_BYTES; of the elements, for a pointer.
    mutable: the kernel writes through the pointer (always False for a scalar).
    shape: of what the pointer points to, outermost first, or None where it is not known. An entry is an int, or the
        name of a scalar parameter whose value at the launch is the length, e.g. ("steps", 128256).
    role: what it is, in words. nullable: a launch may pass no buffer (a null pointer).
    """

    name: str
    ctype: str
    kind: str
    dtype: str
    mutable: bool
    shape: tuple[int | str, ...] | None
    role: str
    nullable: bool = False

    def __post_init__(self) -> None:
        place = f"parameter {shown(self.name)}"
        is_known = self.kind in ("pointer", "scalar")
        _require(is_known, f"{place}: kind {shown(self.kind)} is neither 'pointer' nor 'scalar'")
        _check_dtype(place, self.dtype)
        _check_shape(place, tuple(length for length in self.shape or () if isinstance(length, int)))
        is_pointer = self.kind == "pointer"
        fits = self.ctype.rstrip().endswith("*") == is_pointer
        _require(fits, f"{place}: C type {shown(self.ctype)} is not a {self.kind}")
        is_plain = not (self.mutable or self.nullable)
        _require(is_pointer or is_plain, f"{place}: a scalar is neither mutable nor nullable")
        is_const = self.ctype.startswith("const ")
        _require(
            not (is_pointer and self.mutable == is_const),
            f"{place}: mutable={self.mutable} contradicts C type {shown(self.ctype)}",
        )


@dataclass(frozen=True)
class Launch:
    """How the kernel is launched: blocks of the grid, threads of a block, bytes of dynamic shared memory of a block.

    cooperative: all blocks must be resident at once, because they wait for each other.
    """

    blocks: int
    threads: int
    shared_bytes: int
    cooperative: bool = True

    def __post_init__(self) -> None:
        _require(self.blocks >= 1, f"launch: blocks must be at least 1, not {self.blocks}")
        _require(1 <= self.threads <= 1024, f"launch: threads must be 1 to 1024, not {self.threads}")
        _require(self.shared_bytes >= 0, f"launch: shared_bytes must not be negative, got {self.shared_bytes}")


@dataclass(frozen=True)
class Buffer:
    """A device buffer that the runtime allocates for a parameter of the same name.

    shape: elements, outermost first. bytes: at least what the shape needs. fill: one of FILLS.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    fill: str

    def __post_init__(self) -> None:
        place = f"buffer {shown(self.name)}"
        _check_dtype(place, self.dtype)
        _require(self.fill in FILLS, f"{place}: fill {shown(self.fill)} is not one of {', '.join(FILLS)}")
        _check_shape(place, self.shape)
        needed = math.prod(self.shape) * DTYPE_BYTES[self.dtype]
        wanted = f"{self.dtype} {self.shape} needs {shown(needed)}"
        _require(self.bytes >= needed, f"{place}: {shown(self.bytes)} bytes, but {wanted}")


@dataclass(frozen=True)
class Manifest:
    """A generated kernel as the runtime sees it.

    kernel: the function's name in the text. text_sha256: of the kernel's text (UTF-8). generator: Cheetah's version.
    command: regenerates text and manifest. gpu, config, plan: the three configurations as plain JSON values.
    matrices: for each packed weight matrix a dict of name, rows, columns, offset, layer_stride, layers, start;
        tile_rows, 8, where M-tiles are narrow.
    layer_stride, weight_bytes: bytes from one layer to the next in the weights buffer, and of all of it.
    phases: names of the phases of a step, in order; progress[block] = step * len(phases) + phase.
    step_bytes: bytes that one step reads, by kind, e.g. {"weights": ...}. world_size: GPUs that make a step together,
        of each of which all the numbers here are.
    Mappings and sequences inside gpu, config, plan, matrices and step_bytes become plain sorted dicts and lists, so
    that a manifest equals the one that is read back from its JSON.
    """

    kernel: str
    text_sha256: str
    generator: str
    command: str
    gpu: dict[str, Any]
    config: dict[str, Any]
    plan: dict[str, Any]
    launch: Launch
    parameters: tuple[Parameter, ...]
    matrices: tuple[dict[str, Any], ...]
    layer_stride: int
    weight_bytes: int
    buffers: tuple[Buffer, ...]
    phases: tuple[str, ...]
    step_bytes: dict[str, Any]
    world_size: int = 1
    format: int = FORMAT

    def __post_init__(self) -> None:
        _require(self.format == FORMAT, _wrong_format(self.format))
        in_words = ", ".join(map(str, WORLD_SIZES))
        fits = self.world_size in WORLD_SIZES
        _require(fits, f"manifest: world_size is {shown(self.world_size)}: kernels run on {in_words} GPUs")
        is_name = re.fullmatch("[A-Za-z_][A-Za-z0-9_]{0,199}", self.kernel) is not None
        _require(is_name, f"manifest: kernel {shown(self.kernel)} is no name of a function")
        for name in ("gpu", "config", "plan", "matrices", "step_bytes"):
            plain = _plain(getattr(self, name), name)
            object.__setattr__(self, name, tuple(plain) if name == "matrices" else plain)
        _check_unique("parameter", [parameter.name for parameter in self.parameters])
        _check_unique("buffer", [buffer.name for buffer in self.buffers])
        _check_unique("phase", list(self.phases))

    def parameter(self, name: str) -> Parameter:
        """The parameter called `name`; ManifestError names those there are."""
        return _named("parameter", name, self.parameters)

    def buffer(self, name: str) -> Buffer:
        """The buffer called `name`; ManifestError names those there are."""
        return _named("buffer", name, self.buffers)

    def check_text(self, text: str) -> None:
        """ManifestError unless `text` is the very kernel text that this manifest was written for."""
        found = sha256_of_text(text)
        _require(
            found == self.text_sha256,
            f"the text of kernel {self.kernel!r} has hash {found[:12]}..., its manifest expects "
            f"{self.text_sha256[:12]}...: regenerate both with: {self.command}",
        )

    def to_json(self) -> str:
        """JSON with fields in declared order and sorted keys below, so that equal manifests give equal text."""
        return _json_lines({"format": self.format, **_fields_as_dict(self)}, 0) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest that `to_json` wrote; ManifestError names the field that is missing, unknown or mistyped."""
        data = parse_json(text.encode("utf-8", "surrogatepass"), "manifest", ManifestError)
        _require(data.get("format") == FORMAT, _wrong_format(data.get("format")))
        return record_from_json(cls, data, "manifest", ManifestError)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON so that a reader sees the old file or the whole new one (temporary name, then rename)."""
        write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Manifest:
        """The manifest in the file `path`; ManifestError names the file."""
        text = read_text(Path(path), error=ManifestError)
        try:
            return cls.from_json(text)
        except ManifestError as error:
            raise ManifestError(f"{path}: {error}") from None


def sha256_of_text(text: str) -> str:
    """Hex SHA-256 of the UTF-8 bytes of a kernel's text, as `Manifest.text_sha256` holds it."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` through a temporary file in the same folder, so that nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp gives 0600; a shared cache or a checkout wants the usual mode
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)  # the only portable way to read it is to set it
    os.umask(mask)
    return mask


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ManifestError(message)


def _wrong_format(found: object) -> str:
    return f"manifest has format {shown(found)}; this version of Cheetah reads format {FORMAT}: regenerate the kernel"


def _check_dtype(place: str, dtype: str) -> None:
    _require(dtype in DTYPE_BYTES, f"{place}: dtype {shown(dtype)} is not one of {', '.join(DTYPE_BYTES)}")


def _check_shape(place: str, shape: tuple[int, ...]) -> None:
    fits = len(shape) <= MOST_DIMENSIONS and all(0 <= length <= LARGEST_LENGTH for length in shape)
    wanted = f"at most {MOST_DIMENSIONS} lengths from 0 to {LARGEST_LENGTH}"
    _require(fits, f"{place}: shape {shown(shape)} is not {wanted}")


def _check_unique(what: str, names: list[str]) -> None:
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    _require(not repeated, f"manifest: {what} named twice: {', '.join(map(shown_name, repeated[:8]))}")


class _HasName(typing.Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_HasName)


def _named(what: str, name: str, entries: tuple[Named, ...]) -> Named:
    for entry in entries:
        if entry.name == name:
            return entry
    raise ManifestError(f"manifest has no {what} {name!r}; it has: {', '.join(entry.name for entry in entries)}")


def _plain(value: object, place: str) -> Any:
    """`value` as JSON would give it back: keys sorted, tuples as lists; ManifestError for what JSON cannot hold."""
    if isinstance(value, Mapping):
        _require(all(isinstance(key, str) for key in value), f"manifest: {place} has a key that is not a string")
        return {key: _plain(value[key], f"{place}.{key}") for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(entry, f"{place}[{index}]") for index, entry in enumerate(value)]
    is_json = value is None or type(value) in (bool, int, float, str)
    kinds = "numbers, strings, booleans, None, lists and dicts"
    _require(is_json, f"manifest: {place} is a {type(value).__name__}; JSON holds only {kinds}")
    is_finite = not isinstance(value, float) or math.isfinite(value)
    _require(is_finite, f"manifest: {place} is {value}, which JSON cannot hold")
    return value


def _fields_as_dict(record: Any) -> dict[str, Any]:
    return {field.name: _as_json(getattr(record, field.name)) for field in dataclasses.fields(record)}


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields_as_dict(value)
    if isinstance(value, (list, tuple)):
        return [_as_json(entry) for entry in value]
    return value


def _json_lines(value: Any, indent: int) -> str:
    """`value` as JSON: on one line where it fits, else one entry a line."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if indent > 0 and indent + len(flat) <= LINE_WIDTH or not isinstance(value, (dict, list)) or not value:
        return flat
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {_json_lines(entry, indent + 2)}" for key, entry in value.items()]
        opening, closing = "{", "}"
    else:
        entries = [_json_lines(entry, indent + 2) for entry in value]
        opening, closing = "[", "]"
    return opening + "\n" + ",\n".join(pad + entry for entry in entries) + "\n" + " " * indent + closing
