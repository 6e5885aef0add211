"""Whole texts: the kernel function, and the file with what it needs. Pure: the same program gives the same bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cheetah.lang import types as ty
from cheetah.lang.nodes import Call, Expr, Literal, Raw, Stmt, walk
from cheetah.lang.primitive import PRIMITIVES, Primitive, with_requirements
from cheetah.lang.printer import INDENT, Printer, declaration

if TYPE_CHECKING:
    from cheetah.lang.kernel import Kernel


def statements_in(statements: Iterable[Stmt]) -> Iterator[Stmt]:
    """All statements, outer before inner."""
    for statement in statements:
        yield statement
        for part in ("body", "otherwise"):
            yield from statements_in(getattr(statement, part, ()))


def primitives_of(kernel: Kernel) -> list[Primitive]:
    """The primitives a kernel calls and those their bodies call, in the order in which they are declared."""
    found: set[Primitive | str] = set()
    for statement in statements_in(kernel.body):
        if isinstance(statement, Raw):
            found |= set(re.findall(r"\w+", statement.text)) & PRIMITIVES.keys()
        for node in _nodes(statement):
            if isinstance(node, Call) and node.primitive is not None:
                found.add(node.primitive)
            if isinstance(node, Literal) and isinstance(node.value, float) and not math.isfinite(node.value):
                found.add("bits_float")
    return with_requirements(found)


def _nodes(statement: Stmt) -> Iterator[Expr]:
    for expression in statement.expressions():
        yield from walk(expression)


def structs_of(kernel: Kernel) -> list[ty.Struct]:
    """The structures that the kernel mentions, in order of appearance, each after those it is made of."""
    found: dict[ty.Struct, None] = {}
    for _, type_ in kernel.params.items():
        _collect_structs(type_, found)
    for statement in statements_in(kernel.body):
        for node in _nodes(statement):
            _collect_structs(node.type, found)
    return list(found)


def _collect_structs(type_: ty.Type, found: dict[ty.Struct, None]) -> None:
    while isinstance(type_, (ty.Pointer, ty.Array)):
        type_ = type_.element
    if isinstance(type_, ty.Struct) and type_ not in found:
        for _, member in type_.members:
            _collect_structs(member, found)
        found[type_] = None


def render(kernel: Kernel, *, line_marks: bool = False) -> str:
    """The kernel function alone, as CUDA C++."""
    printer = Printer(line_marks)
    parameters = ", ".join(f"{type_} {name}" for name, type_ in kernel.params.items())
    bounds = f" __launch_bounds__({kernel.max_threads}, 1)" if kernel.max_threads else ""
    linkage = 'extern "C" ' if kernel.max_threads else ""
    printer.line(f"{linkage}__global__ void{bounds} {kernel.name}({parameters}) {{")
    printer.body(kernel.body)
    printer.line("}")
    return "\n".join(printer.lines) + "\n"


def render_file(kernel: Kernel, *, header: str = "", line_marks: bool = False) -> str:
    """A compilable file: header comment, primitives (or the emulator's header), structures, kernel."""
    parts = ["".join(f"// {line}\n".replace(" \n", "\n") for line in header.splitlines())]
    primitives = primitives_of(kernel)
    parts.append(f'#ifdef CHEETAH_EMULATOR\n#include "cheetah_emulator.h"\n#else\n{_prelude(primitives)}#endif\n')
    parts += [_struct_text(struct) for struct in structs_of(kernel)]
    parts.append(render(kernel, line_marks=line_marks))
    return "\n".join(part for part in parts if part)


def _struct_text(struct: ty.Struct) -> str:
    lines = [f"{INDENT}{declaration(type_, name)};" for name, type_ in struct.members]
    return "\n".join([f"struct {struct.c_name} {{", *lines, "};"]) + "\n"


_TYPEDEFS = """\
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef int int32_t;
typedef long int64_t;
struct bf16 { uint16_t bits; };
"""


def _prelude(primitives: list[Primitive]) -> str:
    return "\n".join([_TYPEDEFS, *(primitive.cuda_text() for primitive in primitives)])
