"""Files that others wrote, read with bounds: checkpoints, caches, manifests. Knows nothing of what is in them.

Only regular files below a number of bytes are read: a pipe would wait for ever, a device has no end. What cannot be
read, JSON nested too deeply or with numbers of thousands of digits among it, is one error with the file's name.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cheetah.errors import CheetahError
from cheetah.printable import shown

JSON_BYTES = 16_000_000
"""Most bytes of a JSON file: the index of a checkpoint of 90,000 tensors has 9 MB. In memory JSON takes up to 25 times
as much."""


class UnreadableError(CheetahError):
    """A file that is not there, is no regular file, is too large, or does not hold what it should."""


def read_bytes(path: Path, most: int = JSON_BYTES, error: type[CheetahError] = UnreadableError) -> bytes:
    """The bytes of a regular file of at most `most`; `error` names the file and what is wrong."""
    try:
        # O_NONBLOCK: to open a pipe that nobody writes would wait; of a regular file it changes nothing.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as problem:  # ValueError: a name with a zero character
        raise error(f"{path}: cannot be read: {_reason(problem)}") from problem
    try:
        return _read(descriptor, str(path), most, error)
    except OSError as problem:
        raise error(f"{path}: cannot be read: {_reason(problem)}") from problem
    finally:
        os.close(descriptor)


def _read(descriptor: int, place: str, most: int, error: type[CheetahError]) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{place}: cannot be read: it is no regular file")
    if status.st_size > most:
        raise error(f"{place}: has {status.st_size} bytes, at most {most} are read")
    with open(descriptor, "rb", closefd=False) as file:
        return file.read(most)


def read_text(path: Path, most: int = JSON_BYTES, error: type[CheetahError] = UnreadableError) -> str:
    """The UTF-8 text of a file, as `read_bytes`."""
    return _decoded(read_bytes(path, most, error), str(path), error)


def read_json(
    path: Path, most: int = JSON_BYTES, error: type[CheetahError] = UnreadableError, finite: bool = True
) -> dict[str, Any]:
    """The JSON object in a file; duplicate keys, NaN and anything but an object are refused with the file's name.
    finite: off, NaN and Infinity are read as floats: who takes a field judges it."""
    return parse_json(read_bytes(path, most, error), str(path), error, finite=finite)


def parse_json(
    data: bytes,
    place: str,
    error: type[CheetahError] = UnreadableError,
    most_values: int | None = None,
    finite: bool = True,
) -> dict[str, Any]:
    """A JSON object from UTF-8 text, as strict as `read_json`; `place` names it in messages. most_values: with more it
    is refused before it is read, lists, objects and names counting four times: 8 MB of empty lists take a second in
    which no other thread runs, and a hundred times their bytes."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise error(f"{place}: key {shown(twice)} stands twice in one object: keep one of them")
        return result

    def refuse_constant(text: str) -> Any:
        raise error(f"{place}: {text} is not a JSON number")

    if most_values is not None and _has_more_values(data, most_values):
        raise error(f"{place}: has more than {most_values} values")
    text = _decoded(data, place, error)
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse_constant if finite else float)
    except RecursionError as problem:
        raise error(f"{place}: cannot be read as JSON: its brackets are nested too deeply") from problem
    except ValueError as problem:
        raise error(f"{place}: cannot be read as JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise error(f"{place}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _has_more_values(data: bytes, most: int) -> bool:
    """By what stands before or between values; the same characters in texts are only told apart if there are many."""

    def count(parts: Iterable[bytes]) -> int:
        return sum(part.count(b",") + 4 * sum(map(part.count, (b":", b"[", b"{"))) for part in parts)

    return count([data]) > most and count(_outside_texts(data)) > most


def _outside_texts(data: bytes) -> Iterator[bytes]:
    """JSON without its texts, in pieces."""
    data = data.replace(rb"\\", b"").replace(rb"\"", b"")  # every quote that is left begins or ends a text
    is_text = False
    for start in range(0, len(data), 1 << 16):
        parts = data[start : start + (1 << 16)].split(b'"')
        yield b"".join(parts[is_text::2])
        is_text ^= len(parts) % 2 == 0


def _decoded(data: bytes, place: str, error: type[CheetahError]) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{place}: is not UTF-8 text: byte {problem.start} is 0x{data[problem.start]:02x}") from problem


def _reason(problem: Exception) -> str:
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
