"""The language's errors: one class a mistake, each message ending with the user's file and line."""

from __future__ import annotations

import contextlib
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cheetah.errors import CheetahError

_HERE = str(Path(__file__).parent) + "/"


class Location(NamedTuple):
    """A line of the user's Python."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def here() -> Location:
    """The line of the innermost caller outside `cheetah.lang`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno)


@cache
def _is_machinery(file: str) -> bool:
    """Lines of the language itself, of `with` and of dataclasses' constructors are nobody's mistake."""
    return file.startswith(_HERE) or file in ("<string>", contextlib.__file__)


class LangError(CheetahError):
    """A mistake in a device program, caught while it is being generated."""

    def __init__(self, message: str, location: Location | None = None) -> None:
        self.location = location or here()
        super().__init__(f"{message}\n  at {self.location}")


class DeviceBoolError(LangError):
    """A device value was used where Python needs a truth value now."""


class MissingWithError(LangError):
    """A control statement was called but not opened with `with`."""


class ScopeError(LangError):
    """A name was used where it is not visible: outside the block or the warp role that bound it."""


class TypeMixError(LangError):
    """Operands of different types, or an operation that a type does not have."""


class NoMemberError(LangError, AttributeError):
    """A member that a device value's type does not have."""


class ConstStoreError(LangError):
    """A store through a pointer, or to a name, that is constant."""


class CopySizeError(LangError):
    """A bulk copy whose size or alignment the hardware cannot do."""


class UnusedStageError(LangError):
    """A stage of the ring that is filled but never used, used but never filled, or given back with loads under way."""


class ControlError(LangError):
    """A control statement where it cannot stand: `else_` without its `if_`, `break_` outside of a loop, bad bounds."""


class SignatureError(LangError):
    """The parameters of a kernel's function and its `ch.Params` differ, or cannot be parameters."""


class RoleError(LangError):
    """A warp role that is never placed in the kernel, placed twice, or continued after it was placed."""


class AsmError(LangError):
    """A `ch.asm` template whose operands are missing, unused, or of a type that has no register."""


class NoKernelError(LangError):
    """A statement outside of any kernel."""


class RangeError(LangError):
    """A static index outside of its dimension, or a literal that its type cannot hold."""
