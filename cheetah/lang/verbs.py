"""The remaining verbs: comments, text taken literally, inline PTX, and the indices that CUDA gives a thread."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cheetah.lang import types as ty
from cheetah.lang.binding import require_mutable
from cheetah.lang.errors import AsmError, ControlError
from cheetah.lang.nodes import Asm, Builtin, Comment, Expr, Name, Raw, Value
from cheetah.lang.operators import natural
from cheetah.lang.scope import emit, is_in_function


def comment(text: str) -> None:
    """A comment line in the generated text."""
    emit(Comment(text))


def raw_stmt(text: str) -> None:
    """A statement taken literally; the language does not look inside."""
    if is_in_function():
        raise ControlError("ch.raw_stmt in a function, whose names are its own and may be printed differently.")
    emit(Raw(text))


@dataclass(frozen=True)
class Out:
    """An operand of `ch.asm` that the instruction writes."""

    variable: Name


def out(variable: Name) -> Out:
    """Mark an operand of `ch.asm` as written by the instruction; it must be a variable."""
    require_mutable(variable)
    return Out(variable)


def asm(template: str, /, **operands: Value | Out) -> None:
    """Inline PTX: `$name` is an operand (constraint letter from its type), `{name}` a static value put into the text.

    AsmError where the template names an operand that is not given, or the other way round.
    """
    static = {
        name: value
        for name, value in operands.items()
        if not isinstance(value, (Expr, Out)) and "{" + name + "}" in template
    }
    for name, value in static.items():
        template = template.replace("{" + name + "}", str(value))
    given = {name: value for name, value in operands.items() if name not in static}
    _require_operands(template, given)
    outputs = tuple(name for name, value in given.items() if isinstance(value, Out))
    pairs = tuple((name, value.variable if isinstance(value, Out) else natural(value)) for name, value in given.items())
    for name, operand in pairs:
        if ty.constraint_letter(operand.type) is None:
            raise AsmError(
                f"ch.asm: ${name} is `{operand}` of type {operand.type}, which no register holds; convert it."
            )
    emit(Asm(template, pairs, outputs))


def _require_operands(template: str, given: dict[str, Value | Out]) -> None:
    named = set(re.findall(r"\$([A-Za-z_]\w*)", template))
    unused = [name for name in given if name not in named]
    if unused:
        raise AsmError(f"ch.asm: the template has no ${unused[0]}; its text is {template!r}.")
    missing = sorted(named - given.keys())
    if missing:
        raise AsmError(f"ch.asm: the template needs ${missing[0]}; give it as `{missing[0]}=...`.")


def block_idx_x() -> Expr:
    """The block's number within the grid."""
    return Builtin(ty.u32, "blockIdx.x")


def thread_idx_x() -> Expr:
    """The thread's number within its block."""
    return Builtin(ty.u32, "threadIdx.x")


def block_dim_x() -> Expr:
    """Threads of a block."""
    return Builtin(ty.u32, "blockDim.x")


def grid_dim_x() -> Expr:
    """Blocks of the grid."""
    return Builtin(ty.u32, "gridDim.x")
