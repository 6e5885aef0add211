"""Printing: a precedence table and one case a node. Pure and deterministic: the same program gives the same bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from functools import singledispatch
from typing import TYPE_CHECKING

from cheetah.lang import types as ty
from cheetah.lang.expressions import (
    Binary,
    Builtin,
    Call,
    Cast,
    Expr,
    Literal,
    Member,
    Name,
    Select,
    Subscript,
    Unary,
    walk,
)
from cheetah.lang.statements import Asm, Assign, Comment, Declare, Do, For, If, Jump, Raw, Stmt, While

if TYPE_CHECKING:
    from cheetah.lang.kernel import Kernel
    from cheetah.lang.primitives import Primitive

INDENT = "  "
_ATOM, _POSTFIX, _UNARY, _SELECT = 17, 16, 15, 4
_PRECEDENCE = {
    "*": 14, "/": 14, "//": 14, "%": 14, "+": 13, "-": 13, "<<": 12, ">>": 12, "<": 11, "<=": 11, ">": 11, ">=": 11,
    "==": 10, "!=": 10, "&": 9, "^": 8, "|": 7, "&&": 6, "||": 5,
}  # fmt: skip


# -- expressions --------------------------------------------------------------------------------------------------


def render_expression(expression: Expr) -> str:
    """The C text of an expression."""
    return _expression(expression)[0]


def _wrap(expression: Expr, minimum: int) -> str:
    text, precedence = _expression(expression)
    return text if precedence >= minimum else f"({text})"


@singledispatch
def _expression(node: Expr) -> tuple[str, int]:
    raise AssertionError(f"no printing rule for {type(node).__name__}")


@_expression.register
def _(node: Literal) -> tuple[str, int]:
    text = literal_text(node)
    return text, _UNARY if text.startswith("-") else _ATOM


def literal_text(node: Literal) -> str:
    """A literal with the suffix that gives C the same type and value."""
    type_, value = node.type, node.value
    assert isinstance(type_, ty.Scalar)
    if type_.kind == "bool":
        return "true" if value else "false"
    if type_.kind == "float":
        return _float_text(float(value), "f" if type_.bits == 32 else "")
    if type_ == ty.u64 and value >= 2**31:
        return f"{value}ull"
    if type_ == ty.i64 and not -(2**31) < value < 2**31:
        return f"{value}ll" if value > -(2**63) else "(-9223372036854775807ll - 1)"
    if value == -(2**31):
        return "(-2147483647 - 1)"
    return f"{value}u" if type_.kind == "uint" and value >= 2**31 else str(value)


def _float_text(value: float, suffix: str) -> str:
    if math.isnan(value) or math.isinf(value):
        sign = "-" if value < 0 else ""
        return f"{sign}bits_float(0x7f800000)" if math.isinf(value) else "bits_float(0x7fffffff)"
    return repr(value) + suffix


@_expression.register
def _(node: Name) -> tuple[str, int]:
    return node.name, _ATOM


@_expression.register
def _(node: Builtin) -> tuple[str, int]:
    return node.text, _ATOM


@_expression.register
def _(node: Unary) -> tuple[str, int]:
    inner = _wrap(node.operand, _UNARY)
    separator = " " if inner.startswith(node.operator) else ""
    return f"{node.operator}{separator}{inner}", _UNARY


@_expression.register
def _(node: Binary) -> tuple[str, int]:
    operator = node.operator
    if isinstance(node.left.type, ty.Scalar) and node.left.type.kind == "bool":
        operator = {"&": "&&", "|": "||", "^": "!="}.get(operator, operator)
    precedence = _PRECEDENCE[operator]
    printed = "/" if operator == "//" else operator
    return f"{_wrap(node.left, precedence)} {printed} {_wrap(node.right, precedence + 1)}", precedence


@_expression.register
def _(node: Select) -> tuple[str, int]:
    parts = (_wrap(part, _SELECT + 1) for part in (node.condition, node.if_true, node.if_false))
    return "{} ? {} : {}".format(*parts), _SELECT


@_expression.register
def _(node: Cast) -> tuple[str, int]:
    return f"({node.type})({render_expression(node.operand)})", _UNARY


@_expression.register
def _(node: Call) -> tuple[str, int]:
    return f"{node.function}({', '.join(map(render_expression, node.arguments))})", _POSTFIX


@_expression.register
def _(node: Subscript) -> tuple[str, int]:
    return f"{_wrap(node.base, _POSTFIX)}[{render_expression(node.index)}]", _POSTFIX


@_expression.register
def _(node: Member) -> tuple[str, int]:
    return f"{_wrap(node.base, _POSTFIX)}.{node.member}", _POSTFIX


# -- statements ---------------------------------------------------------------------------------------------------


class _Printer:
    """Collects indented lines; with line marks on, `#line` names the Python line of each statement."""

    def __init__(self, line_marks: bool) -> None:
        self.lines: list[str] = []
        self.depth = 0
        self.line_marks = line_marks

    def line(self, text: str) -> None:
        self.lines.append(INDENT * self.depth + text)

    def body(self, statements: Iterable[Stmt]) -> None:
        self.depth += 1
        for statement in statements:
            if self.line_marks:
                self.lines.append(f"#line {statement.location.line} {json.dumps(statement.location.file)}")
            _statement(statement, self)
        self.depth -= 1


@singledispatch
def _statement(node: Stmt, printer: _Printer) -> None:
    raise AssertionError(f"no printing rule for {type(node).__name__}")


@_statement.register
def _(node: Declare, printer: _Printer) -> None:
    printer.line(f"{_declaration(node.name.type, node.name.name)}{_initial(node)};")


def _declaration(type_: ty.Type, name: str) -> str:
    if isinstance(type_, ty.Array):
        return f"{type_.element} {name}[{type_.length}]"
    return f"{type_} {name}"


def _initial(node: Declare) -> str:
    if node.value is not None:
        return f" = {render_expression(node.value)}"
    return " = {}" if node.unrolled_zero else ""


@_statement.register
def _(node: Assign, printer: _Printer) -> None:
    printer.line(f"{render_expression(node.target)} = {render_expression(node.value)};")


@_statement.register
def _(node: If, printer: _Printer) -> None:
    _print_if(node, printer, "")


def _print_if(node: If, printer: _Printer, prefix: str) -> None:
    printer.line(f"{prefix}if ({render_expression(node.condition)}) {{")
    printer.body(node.body)
    if len(node.otherwise) == 1 and isinstance(node.otherwise[0], If):
        _print_if(node.otherwise[0], printer, "} else ")
        return
    if node.otherwise:
        printer.line("} else {")
        printer.body(node.otherwise)
    printer.line("}")


@_statement.register
def _(node: For, printer: _Printer) -> None:
    if node.unroll:
        printer.line("#pragma unroll" if node.unroll is True else f"#pragma unroll {node.unroll}")
    name = node.counter.name
    stop = render_expression(node.stop)
    one = isinstance(node.step, Literal) and node.step.value == 1
    advance = f"++{name}" if one else f"{name} += {render_expression(node.step)}"
    printer.line(f"for ({node.counter.type} {name} = {render_expression(node.start)}; {name} < {stop}; {advance}) {{")
    printer.body(node.body)
    printer.line("}")


@_statement.register
def _(node: While, printer: _Printer) -> None:
    printer.line(f"while ({render_expression(node.condition)}) {{")
    printer.body(node.body)
    printer.line("}")


@_statement.register
def _(node: Do, printer: _Printer) -> None:
    printer.line(f"{render_expression(node.call)};")


@_statement.register
def _(node: Raw, printer: _Printer) -> None:
    for line in node.text.splitlines():
        printer.line(line)


@_statement.register
def _(node: Comment, printer: _Printer) -> None:
    for line in node.text.splitlines():
        printer.line(f"// {line}")


@_statement.register
def _(node: Jump, printer: _Printer) -> None:
    printer.line(f"{node.word};")


@_statement.register
def _(node: Asm, printer: _Printer) -> None:
    order = [pair for pair in node.operands if pair[0] in node.outputs] + [pair for pair in node.operands if pair[0] not in node.outputs]
    template = node.template
    for number, (name, _) in sorted(enumerate(order), key=lambda item: -len(item[1][0])):
        template = template.replace(f"${name}", f"%{number}")
    outputs = ", ".join(_constraint(value, "=") for name, value in order if name in node.outputs)
    inputs = ", ".join(_constraint(value, "") for name, value in order if name not in node.outputs)
    printer.line(f'asm volatile({json.dumps(template)} : {outputs} : {inputs} : "memory");'.replace(" :  :", " ::"))


def _constraint(value: Expr, prefix: str) -> str:
    type_ = value.type
    if isinstance(type_, ty.Pointer):
        letter = "l"
    else:
        assert isinstance(type_, ty.Scalar)
        letter = {"float": {32: "f", 64: "d"}}.get(type_.kind, {16: "h", 32: "r", 64: "l"})[type_.bits]
    return f'"{prefix}{letter}"({render_expression(value)})'


# -- whole texts --------------------------------------------------------------------------------------------------


def statements_in(statements: Iterable[Stmt]) -> Iterator[Stmt]:
    """All statements, outer before inner."""
    for statement in statements:
        yield statement
        for part in ("body", "otherwise"):
            yield from statements_in(getattr(statement, part, ()))


def primitives_of(kernel: Kernel) -> list[Primitive]:
    """The primitives a kernel calls and those their bodies call, in the order in which they are declared."""
    from cheetah.lang.primitives import with_requirements

    found = set()
    for statement in statements_in(kernel.body):
        for expression in statement.expressions():
            found |= {node.primitive for node in walk(expression) if isinstance(node, Call) and node.primitive is not None}
            if any(isinstance(n, Literal) and isinstance(n.value, float) and not math.isfinite(n.value) for n in walk(expression)):
                found.add("bits_float")
    return with_requirements(found)


def structs_of(kernel: Kernel) -> list[ty.Struct]:
    """The structures that the kernel's names mention, in order of appearance."""
    found: dict[ty.Struct, None] = {}
    for statement in statements_in(kernel.body):
        for expression in statement.expressions():
            for node in walk(expression):
                type_ = node.type
                while isinstance(type_, (ty.Pointer, ty.Array)):
                    type_ = type_.element
                if isinstance(type_, ty.Struct):
                    found[type_] = None
    return list(found)


def render(kernel: Kernel, *, line_marks: bool = False) -> str:
    """The kernel function alone, as CUDA C++."""
    printer = _Printer(line_marks)
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
    parts.append("#ifdef CHEETAH_EMULATOR\n#include \"cheetah_emulator.h\"\n#else\n" + _prelude(primitives) + "#endif\n")
    parts += [_struct_text(struct) for struct in structs_of(kernel)]
    parts.append(render(kernel, line_marks=line_marks))
    return "\n".join(part for part in parts if part)


def _struct_text(struct: ty.Struct) -> str:
    lines = [f"{INDENT}{_declaration(type_, name)};" for name, type_ in struct.members]
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
