"""What a primitive is: an operation of the hardware, declared once with its types, its meaning and its CUDA body.

Which ones there are is in `primitives/`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from cheetah.lang import types as ty
from cheetah.lang.binding import store_result
from cheetah.lang.errors import LangError, TypeMixError
from cheetah.lang.nodes import Call, Do, Expr
from cheetah.lang.operators import lift
from cheetah.lang.printer import WIDTH, parameter_text
from cheetah.lang.scope import emit, reserve

GPU_SCOPE = "gpu"
SYSTEM_SCOPE = "sys"
SCOPES = (GPU_SCOPE, SYSTEM_SCOPE)
"""How far the order between blocks reaches: the blocks of one GPU, or other GPUs and the host too."""


@dataclass(frozen=True, eq=False)
class Primitive:
    """A function on the device. `pure` ones are plain expressions; the others run exactly where they are written.

    `any pointer` parameters are spelled `ty.ptr(ty.void)` (read) and `ty.ptr_mut(ty.void)` (written).
    """

    name: str
    returns: ty.Type
    parameters: Mapping[str, ty.Type]
    cuda: str
    meaning: str
    pure: bool = False

    def __post_init__(self) -> None:
        reserve(self.name)

    @property
    def requires(self) -> list[str]:
        """The primitives that its body calls."""
        return [name for name in re.findall(r"\w+", self.cuda) if name in PRIMITIVES and name != self.name]

    @property
    def has_scope(self) -> bool:
        """Whether its order reaches as far as a memory scope says."""
        return f".{GPU_SCOPE}." in self.cuda

    def in_scope(self, scope: str) -> Primitive:
        """The same for a memory scope of the PTX ISA: "gpu", which is what it is declared for, or "sys", which other
        GPUs and the host see too. Called `<name>_sys` in the text."""
        if scope not in SCOPES or not self.has_scope:
            raise LangError(
                f"{self.name} has no memory scope {scope!r}: "
                + (f"give one of {', '.join(SCOPES)}." if self.has_scope else "it orders nothing between blocks.")
            )
        return self if scope == GPU_SCOPE else _in_scope(self, scope)

    def __call__(self, *arguments: Any, scope: str | None = None) -> Expr:
        """A call, or what a name stands for that has its result; None where there is none. `scope`: as in
        `in_scope`."""
        if scope not in (None, GPU_SCOPE):
            return self.in_scope(scope)(*arguments)
        if len(arguments) != len(self.parameters):
            raise TypeMixError(
                f"{self.name} takes {len(self.parameters)} arguments ({', '.join(self.parameters)}), "
                f"not {len(arguments)}."
            )
        pairs = zip(arguments, self.parameters.items(), strict=True)
        lifted = tuple(self._argument(name, type_, value) for value, (name, type_) in pairs)
        call = Call(self.returns, self.name, lifted, self)
        if self.pure:
            return call
        if self.returns == ty.void:
            emit(Do(call))
            return None  # type: ignore[return-value]  # nobody takes the result of a call that has none
        return store_result(call)

    def _argument(self, name: str, type_: ty.Type, value: Any) -> Expr:
        if isinstance(type_, ty.Pointer) and isinstance(value, Expr):
            given = value.type
            if not isinstance(given, ty.Pointer) or type_.element not in (ty.void, given.element):
                raise TypeMixError(f"{self.name}: `{name}` is {type_}, but `{value}` has type {given}.")
            if type_.mutable and not given.mutable:
                raise TypeMixError(f"{self.name} writes through `{name}`, but `{value}` is {given}.")
            return value
        if isinstance(type_, ty.Array) and isinstance(value, Expr) and value.type == type_:
            return value
        try:
            return lift(value, type_)
        except TypeMixError as error:
            raise TypeMixError(f"{self.name}: argument `{name}`: {str(error).splitlines()[0]}") from None

    def cuda_text(self) -> str:
        """The definition for the GPU."""
        parameters = ", ".join(parameter_text(name, type_) for name, type_ in self.parameters.items())
        head = f"__device__ __forceinline__ {self.returns} {self.name}({parameters}) {{"
        body = textwrap.dedent(self.cuda).strip()
        if len(f"{head} {body} }}") <= WIDTH and "\n" not in body:
            return f"{head} {body} }}\n"
        return f"{head}\n{textwrap.indent(body, '  ')}\n}}\n"


@cache
def _in_scope(primitive: Primitive, scope: str) -> Primitive:
    cuda = primitive.cuda.replace(f".{GPU_SCOPE}.", f".{scope}.")
    return replace(primitive, name=f"{primitive.name}_{scope}", cuda=cuda)


PRIMITIVES: dict[str, Primitive] = {}


def with_requirements(found: Iterable[Primitive | str]) -> list[Primitive]:
    """The given primitives (or names) and all that their bodies call: those of this file in order, then others."""
    wanted: dict[str, Primitive] = {}
    waiting = [PRIMITIVES[item] if isinstance(item, str) else item for item in found]
    while waiting:
        primitive = waiting.pop()
        if wanted.setdefault(primitive.name, primitive) is not primitive:
            raise LangError(f"two different primitives are called `{primitive.name}`.")
        waiting += [PRIMITIVES[name] for name in primitive.requires if name not in wanted]
    listed = [primitive for name, primitive in PRIMITIVES.items() if wanted.pop(name, None) is primitive]
    return listed + [wanted[name] for name in sorted(wanted)]


def declare(prototype: str, cuda: str, meaning: str, *, pure: bool = False) -> Primitive:
    """Make a primitive and keep it in the list that the emulator's header must match. prototype: as the text has it,
    "uint32_t shuffle_u32(uint32_t value, uint32_t lane)"; `void*` takes any pointer, an array is "float (&sums)[4]"."""
    declared, _, given = prototype.removesuffix(")").partition("(")
    (name, returns), parameters = _declared(declared), dict(map(_declared, given.split(", ") if given else ()))
    primitive = Primitive(name, returns, parameters, cuda, meaning, pure)
    PRIMITIVES[name] = primitive
    return primitive


def _declared(text: str) -> tuple[str, ty.Type]:
    """A name and its type: "const uint32_t* place"."""
    found = re.fullmatch(r"(const )?(\w+)(\*?) (?:\(&)?(\w+)(?:\)\[(\d+)\])?", text)
    assert found, text
    is_read, type_name, is_pointer, name, count = found.groups()
    type_ = ty.NAMED[type_name]
    if is_pointer:
        return name, ty.ptr(type_) if is_read else ty.ptr_mut(type_)
    return name, type_ if count is None else ty.array(type_, int(count))
