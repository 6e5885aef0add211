"""`@ch.kernel`: a Python function, run once with a device name for each parameter, becomes a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cheetah.lang import types as ty
from cheetah.lang.errors import SignatureError
from cheetah.lang.names import keeping_names, location_of
from cheetah.lang.nodes import Constant, Name, Stmt
from cheetah.lang.results import joined
from cheetah.lang.scope import Cursor, Scope, at, is_reserved


class Params:
    """The ordered parameters of a kernel: `ch.Params(n=ty.u32, x=ty.ptr_mut(ty.i32))`."""

    def __init__(self, **types: ty.Type) -> None:
        for name, type_ in types.items():
            if is_reserved(name):
                raise SignatureError(f"a parameter cannot be called `{name}`, a word of C++ or a primitive.")
            if not isinstance(type_, (ty.Scalar, ty.Vector, ty.Pointer, ty.Struct)) or type_ == ty.void:
                raise SignatureError(f"parameter `{name}` cannot have the type {type_}.")
        self.types: Mapping[str, ty.Type] = dict(types)

    def items(self) -> Iterator[tuple[str, ty.Type]]:
        yield from self.types.items()


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: its name, parameters and statements. `max_threads` sets the launch bounds and C linkage.

    members: which of its outermost names its functions use; with any, all are functions of one structure.
    """

    name: str
    params: Params
    body: tuple[Stmt, ...]
    max_threads: int | None = None
    constants: tuple[Constant, ...] = ()
    members: Mapping[str, ty.Type] = field(default_factory=dict)


def kernel(
    params: Params, *, name: str | None = None, max_threads: int | None = None
) -> Callable[[Callable[..., Any]], Kernel]:
    """Run the decorated function once, with a device name for each parameter, and keep what it emits."""

    def build(function: Callable[..., Any]) -> Kernel:
        _check_signature(function, params)
        scope = Scope(f"kernel {function.__name__}", is_whole=True, location=location_of(function))
        arguments = {}
        for parameter, type_ in params.items():
            scope.names.add(parameter)
            arguments[parameter] = Name(type_, parameter, (scope,), location=scope.location)
        with at(Cursor([scope])) as cursor:
            cursor.bound.update({name or function.__name__, *scope.names})
            keeping_names(function)(**arguments)
            cursor.close()
        constants = tuple(cursor.constants.values())
        body = joined(scope.taken())
        return Kernel(name or function.__name__, params, body, max_threads, constants, cursor.members)

    return build


def _check_signature(function: Callable[..., Any], params: Params) -> None:
    parameters = inspect.signature(function).parameters.values()
    if [parameter.kind for parameter in parameters] == [inspect.Parameter.VAR_KEYWORD]:
        return  # `def kernel(**arguments)` takes whatever is declared
    wanted, given = [parameter.name for parameter in parameters], list(params.types)
    if wanted != given:
        raise SignatureError(
            f"kernel {function.__name__} takes ({', '.join(wanted)}), but ch.Params declares ({', '.join(given)}); "
            "name them alike, in one order.",
            location_of(function),
        )
