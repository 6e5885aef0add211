"""Whole texts: the kernel function, and the file with what it needs. Pure: the same program gives the same bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TypeGuard

from cheetah.lang import types as ty
from cheetah.lang.errors import SignatureError
from cheetah.lang.named import Named
from cheetah.lang.nodes import (
    Assign,
    Call,
    Constant,
    Declare,
    Expr,
    Function,
    If,
    Literal,
    Raw,
    Stmt,
    expressions_in,
    statements_in,
    with_changes,
)
from cheetah.lang.primitive import PRIMITIVES, Primitive, with_requirements
from cheetah.lang.printer import Printer, constant_text, declaration, function_text, print_function

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
                found.add("infinity" if math.isinf(node.value) else "not_a_number")
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
    """The named constants that the kernel and its functions use, in the order in which they were made, and behind them
    the named numbers, as they appear. SignatureError where a name stands for two numbers."""
    used, numbers = set[str](), dict[str, int]()
    for node in (node for statement in program.statements for node in statement.nodes):
        if isinstance(node, Constant):
            used.add(node.name)
        for number in _named_in(node):
            for name, value in number.defines:
                if numbers.setdefault(name, value) != value:
                    raise SignatureError(f"ch.named: `{name}` is {numbers[name]} here and {value} there.")
    made = [constant for constant in program.kernel.constants if constant.name in used]
    taken = sorted({constant.name for constant in made} & numbers.keys())
    if taken:
        raise SignatureError(f"ch.named: the name `{taken[0]}` is taken by a constant.")
    return [*made, *(Constant(_type_of(value), name, value) for name, value in numbers.items())]


def _named_in(node: Expr) -> Iterator[Named]:
    """The named numbers that a node is written with: its value, or the lengths of its array."""
    if isinstance(node, Literal) and isinstance(node.value, Named) and node.type in (ty.u32, ty.u64):
        yield node.value
    type_ = node.type
    while isinstance(type_, ty.Array):
        if isinstance(type_.length, Named):
            yield type_.length
        type_ = type_.element


def _type_of(value: int) -> ty.Scalar:
    return ty.u32 if value < 2**32 else ty.u64


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
    if kernel.members:
        return f"{_structure(program, line_marks)}\n{_entry(kernel, line_marks)}"
    functions = [function_text(function, line_marks=line_marks) for function in program.functions]
    return "\n".join([*functions, _entry(kernel, line_marks)])


def _entry(kernel: Kernel, line_marks: bool) -> str:
    """What is launched: the kernel itself, or what makes its structure and runs that."""
    printer = Printer(line_marks)
    parameters = [f"{type_} {name}" for name, type_ in kernel.params.items()]
    bounds = f" __launch_bounds__({kernel.max_threads}, 1)" if kernel.max_threads else ""
    linkage = 'extern "C" ' if kernel.max_threads else ""
    printer.listing(f"{linkage}__global__ void{bounds} {kernel.name}(", parameters, ") {")
    if kernel.members:
        printer.depth += 1
        printer.listing(f"{_structure_name(kernel)}{{", [name for name, _ in kernel.params.items()], "}.run();")
        printer.depth -= 1
    else:
        printer.body(kernel.body)
    printer.line("}")
    return printer.text


# -- a kernel whose functions use its names: one structure --------------------------------------------------------


def _structure(program: _Program, line_marks: bool) -> str:
    """The kernel's parameters, and what its functions use of its own names, as members; its functions and itself as
    member functions. Each thread has one, which the compiler dissolves: all of them are inlined."""
    kernel = program.kernel
    printer = Printer(line_marks)
    printer.line(f"struct {_structure_name(kernel)} {{")
    printer.depth += 1
    _print_members({**dict(kernel.params.items()), **_members_of(kernel)}.items(), printer)
    for function in program.functions:
        printer.lines.append("")
        print_function(function, printer)
    run = Function("run", (), ty.void, _with_members(kernel.body, kernel.members))
    printer.lines.append("")
    print_function(run, printer)
    printer.depth -= 1
    printer.line("};")
    return printer.text


def _structure_name(kernel: Kernel) -> str:
    return "".join(word.capitalize() for word in kernel.name.split("_"))


def _members_of(kernel: Kernel) -> dict[str, ty.Type]:
    """Those of the kernel's members that are no parameters, in the order in which it declares them."""
    declared = (item for item in statements_in(kernel.body) if _is_members(item, kernel.members))
    parameters = dict(kernel.params.items())
    return {item.name.name: item.name.type for item in declared if item.name.name not in parameters}


def _is_members(statement: Stmt, members: Mapping[str, ty.Type]) -> TypeGuard[Declare]:
    """Whether a statement declares a member."""
    if not isinstance(statement, Declare) or members.get(statement.name.name) != statement.name.type:
        return False
    return any(scope.is_whole for scope in statement.name.scopes)


def _with_members(body: Iterable[Stmt], members: Mapping[str, ty.Type]) -> tuple[Stmt, ...]:
    """The statements with stores to members where these were declared."""
    done: list[Stmt] = []
    for statement in body:
        if isinstance(statement, If):
            parts = {name: _with_members(getattr(statement, name), members) for name in ("body", "otherwise")}
            done.append(with_changes(statement, **parts))
        elif not _is_members(statement, members):
            done.append(statement)
        elif statement.value is not None:
            done.append(Assign(statement.name, statement.value, location=statement.location))
    return tuple(done)


def render_file(kernel: Kernel, *, header: str = "", line_marks: bool = False) -> str:
    """A compilable file: header comment, primitives (or the emulator's header), constants, structures, the program."""
    parts = ["".join(f"// {line}\n".replace(" \n", "\n") for line in header.splitlines())]
    program = _Program.of(kernel)
    primitives = _primitives_of(program)
    parts.append(f'#ifdef CHEETAH_EMULATOR\n#include "cheetah_emulator.h"\n#else\n{_prelude(primitives)}#endif\n')
    constants = _constants_of(program)
    numbers = [constant for constant in constants if not isinstance(constant.type, ty.Struct)]
    records = [constant for constant in constants if isinstance(constant.type, ty.Struct)]
    parts.append("".join(f"{constant_text(constant)}\n" for constant in numbers))
    parts += [_struct_text(struct) for struct in _structs_of(program)]
    parts.append("".join(f"{constant_text(constant)}\n" for constant in records))
    parts.append(_rendered(program, line_marks))
    return "\n".join(part for part in parts if part)


def _struct_text(struct: ty.Struct) -> str:
    printer = Printer(line_marks=False)
    printer.line(f"struct {struct.c_name} {{")
    printer.depth += 1
    _print_members(struct.members, printer)
    printer.depth -= 1
    printer.line("};")
    return printer.text


def _print_members(members: Iterable[tuple[str, ty.Type]], printer: Printer) -> None:
    """Members one below the other, neighbouring numbers of a type side by side."""
    for type_, group in groupby(members, lambda member: member[1]):
        names = [name for name, _ in group]
        if isinstance(type_, ty.Scalar):
            printer.listing(f"{type_} ", names, ";")
            continue
        for name in names:
            printer.line(f"{declaration(type_, name)};")


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
    """Definitions of one line stand one below the other, longer ones apart."""
    text = _TYPEDEFS
    for primitive in primitives:
        more = primitive.cuda_text()
        is_short = more.count("\n") == 1 and text.endswith(" }\n") and text is not _TYPEDEFS
        text += more if is_short else f"\n{more}"
    return text
