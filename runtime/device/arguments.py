"""The arguments of a launch against the manifest: checked by name, put in the order of the signature, packed for C."""

from __future__ import annotations

import ctypes
import difflib
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cheetah.manifest import DTYPE_BYTES, Manifest, Parameter
from cheetah.runtime.device.interface import Argument, ArgumentError, Buffer

_INTEGER_RANGES = {"u8": (0, 2**8), "u32": (0, 2**32), "i32": (-(2**31), 2**31), "u64": (0, 2**64)}
_CTYPES: Mapping[str, Any] = {
    "u8": ctypes.c_uint8,
    "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
}


@dataclass(frozen=True)
class CheckedArgument:
    """A parameter with its value: a Buffer or None for a pointer, an int or a float in its range for a scalar."""

    parameter: Parameter
    value: Any


def check_arguments(manifest: Manifest, arguments: Mapping[str, Argument]) -> list[CheckedArgument]:
    """The arguments in the signature's order. ArgumentError names the parameter that is missing, unknown or wrong."""
    _check_names(manifest, arguments)
    scalars = {
        parameter.name: _scalar(parameter, arguments[parameter.name])
        for parameter in manifest.parameters
        if parameter.kind == "scalar"
    }
    return [
        CheckedArgument(
            parameter,
            scalars[parameter.name]
            if parameter.kind == "scalar"
            else _pointer(parameter, arguments[parameter.name], scalars),
        )
        for parameter in manifest.parameters
    ]


def required_bytes(parameter: Parameter, scalars: Mapping[str, int | float]) -> int | None:
    """Bytes that a pointer's shape asks for in a launch with these scalars; None where the shape is not fully known."""
    if parameter.shape is None:
        return None
    count = 1
    for length in parameter.shape:
        known = scalars.get(length) if isinstance(length, str) else length
        if known is None:
            return None
        count *= int(known)
    return count * DTYPE_BYTES[parameter.dtype]


def as_ctypes(arguments: list[CheckedArgument]) -> list[Any]:
    """One ctypes object a parameter, of the size and alignment that the kernel's signature gives it."""
    return [_as_ctype(argument) for argument in arguments]


def _check_names(manifest: Manifest, arguments: Mapping[str, Argument]) -> None:
    known = [parameter.name for parameter in manifest.parameters]
    missing = [name for name in known if name not in arguments]
    unknown = [name for name in arguments if name not in known]
    problems = [f"no argument for {_described(manifest.parameter(name))}" for name in missing]
    problems += [f"no parameter is called {name!r}{_suggestion(name, missing)}" for name in unknown]
    if problems:
        raise ArgumentError(f"launch of {manifest.kernel}: " + "; ".join(problems))


def _suggestion(name: str, missing: list[str]) -> str:
    close = difflib.get_close_matches(name, missing, n=1)
    return f" (meant {close[0]!r}?)" if close else ""


def _described(parameter: Parameter) -> str:
    return f"{parameter.name!r} ({parameter.ctype}: {parameter.role})"


def _scalar(parameter: Parameter, value: object) -> int | float:
    if parameter.dtype == "f32":
        return _float(parameter, value)
    if parameter.dtype not in _INTEGER_RANGES:
        raise ArgumentError(f"{_described(parameter)}: a scalar of dtype {parameter.dtype} cannot be passed")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"{_described(parameter)} takes an integer, not {_kind(value)}") from None
    low, high = _INTEGER_RANGES[parameter.dtype]
    if not low <= number < high:
        raise ArgumentError(f"{_described(parameter)}: {number} is outside {parameter.dtype} ({low} to {high - 1})")
    return number


def _float(parameter: Parameter, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ArgumentError(f"{_described(parameter)} takes a number, not {_kind(value)}") from None


def _pointer(parameter: Parameter, value: object, scalars: Mapping[str, int | float]) -> Buffer | None:
    if value is None:
        if not parameter.nullable:
            raise ArgumentError(f"{_described(parameter)} needs a buffer, not None")
        return None
    if not (hasattr(value, "address") and hasattr(value, "nbytes") and hasattr(value, "upload")):
        raise ArgumentError(f"{_described(parameter)} takes a device's buffer, not {_kind(value)}")
    buffer: Any = value
    needed = required_bytes(parameter, scalars)
    if needed is not None and buffer.nbytes < needed:
        raise ArgumentError(
            f"{_described(parameter)}: the buffer has {buffer.nbytes} bytes; {_shape(parameter)} needs {needed}"
        )
    found: Buffer = buffer
    return found


def _shape(parameter: Parameter) -> str:
    return f"{parameter.dtype}[{', '.join(map(str, parameter.shape or ()))}]"


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _as_ctype(argument: CheckedArgument) -> Any:
    if argument.parameter.kind == "scalar":
        return _CTYPES[argument.parameter.dtype](argument.value)
    buffer: Any = argument.value
    return ctypes.c_void_p(None if buffer is None else buffer.address)
