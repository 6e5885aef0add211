"""Whole texts: the kernel function, and the file with what it needs. Pure: the same program gives the same bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cheetah.lang import types as ty
from cheetah.lang.nodes import Call, Constant, Function, Literal, Raw, Stmt, expressions_in, statements_in
from cheetah.lang.primitive import PRIMITIVES, Primitive, with_requirements
from cheetah.lang.printer import INDENT, Printer, constant_text, declaration, function_text

if TYPE_CHECKING:
    from cheetah.lang.kernel import Kernel


@dataclass(frozen=True)
class _Program:
    """A kernel with all that it calls: its functions, each after those that it calls itself, and all statements."""

    kernel: Kernel
    functions: list[Function]
    statements: list[Stmt]

    @classmethod
    def of(cls, kernel: Kernel) -> _Program:
        found: dict[Function, None] = {}
        _collect_functions(kernel.body, found)
        bodies = (*(function.body for function in found), kernel.body)
        return cls(kernel, list(found), [statement for body in bodies for statement in statements_in(body)])


def _collect_functions(statements: Iterable[Stmt], found: dict[Function, None]) -> None:
    for node in expressions_in(statements):
        if isinstance(node, Call) and isinstance(node.callee, Function) and node.callee not in found:
            _collect_functions(node.callee.body, found)
            found[node.callee] = None


def _primitives_of(program: _Program) -> list[Primitive]:
    """The primitives a kernel calls and those their bodies call, in the order in which they are declared."""
    found: set[Primitive | str] = set()
    for statement in program.statements:
        if isinstance(statement, Raw):
            found |= set(re.findall(r"\w+", statement.text)) & PRIMITIVES.keys()
        for node in statement.nodes:
            if isinstance(node, Call) and isinstance(node.callee, Primitive):
                found.add(node.callee)
            if isinstance(node, Literal) and isinstance(node.value, float) and not math.isfinite(node.value):
                found.add("bits_float")
    return with_requirements(found)


def _structs_of(program: _Program) -> list[ty.Struct]:
    """The structures that the kernel mentions, in order of appearance, each after those it is made of."""
    types = dict.fromkeys(type_ for _, type_ in program.kernel.params.items())
    types |= dict.fromkeys(item.type for function in program.functions for item in function.parameters)
    types |= dict.fromkeys(node.type for statement in program.statements for node in statement.nodes)
    found: dict[ty.Struct, None] = {}
    for type_ in types:
        _collect_structs(type_, found)
    return list(found)


def _constants_of(program: _Program) -> list[Constant]:
    """The named constants that the kernel and its functions use, in the order in which they were made."""
    nodes = (node for statement in program.statements for node in statement.nodes)
    used = {node.name for node in nodes if isinstance(node, Constant)}
    return [constant for constant in program.kernel.constants if constant.name in used]


def _collect_structs(type_: ty.Type, found: dict[ty.Struct, None]) -> None:
    while isinstance(type_, (ty.Pointer, ty.Array)):
        type_ = type_.element
    if isinstance(type_, ty.Struct) and type_ not in found:
        for _, member in type_.members:
            _collect_structs(member, found)
        found[type_] = None


def render(kernel: Kernel, *, line_marks: bool = False) -> str:
    """The kernel function and the functions that it calls, as CUDA C++."""
    return _rendered(_Program.of(kernel), line_marks)


def _rendered(program: _Program, line_marks: bool) -> str:
    kernel = program.kernel
    functions = [function_text(function, line_marks=line_marks) for function in program.functions]
    printer = Printer(line_marks)
    parameters = [f"{type_} {name}" for name, type_ in kernel.params.items()]
    bounds = f" __launch_bounds__({kernel.max_threads}, 1)" if kernel.max_threads else ""
    linkage = 'extern "C" ' if kernel.max_threads else ""
    printer.listing(f"{linkage}__global__ void{bounds} {kernel.name}(", parameters, ") {")
    printer.body(kernel.body)
    printer.line("}")
    return "\n".join([*functions, printer.text])


def render_file(kernel: Kernel, *, header: str = "", line_marks: bool = False) -> str:
    """A compilable file: header comment, primitives (or the emulator's header), constants, structures, the program."""
    parts = ["".join(f"// {line}\n".replace(" \n", "\n") for line in header.splitlines())]
    program = _Program.of(kernel)
    primitives = _primitives_of(program)
    parts.append(f'#ifdef CHEETAH_EMULATOR\n#include "cheetah_emulator.h"\n#else\n{_prelude(primitives)}#endif\n')
    parts.append("".join(f"{constant_text(constant)}\n" for constant in _constants_of(program)))
    parts += [_struct_text(struct) for struct in _structs_of(program)]
    parts.append(_rendered(program, line_marks))
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
