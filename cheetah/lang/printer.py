"""Printing of expressions and statements: a precedence table and one case a node."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable
from functools import cache, singledispatch

from cheetah.lang import types as ty
from cheetah.lang.meaning import meaning
from cheetah.lang.named import Bits, Named
from cheetah.lang.nodes import (
    Asm,
    Assign,
    Binary,
    Builtin,
    Call,
    Cast,
    Comment,
    Constant,
    Declare,
    Do,
    Expr,
    For,
    Function,
    If,
    Jump,
    Literal,
    Member,
    Name,
    Pointee,
    Raw,
    Return,
    Select,
    Stmt,
    Subscript,
    Unary,
    While,
)

INDENT = "  "
WIDTH = 120
_SHORT_BODIES = (Assign, Do, Jump, Return)
"""What may stand behind its condition or loop, in the same line."""
_ATOM, _POSTFIX, _UNARY, _SELECT = 17, 16, 15, 4
_PRECEDENCE = {
    "*": 14, "/": 14, "%": 14, "+": 13, "-": 13, "<<": 12, ">>": 12, "<": 11, "<=": 11, ">": 11, ">=": 11,
    "==": 10, "!=": 10, "&": 9, "^": 8, "|": 7, "&&": 6, "||": 5,
}  # fmt: skip
_SURPRISING = {"<<": 14, ">>": 14, "&": 14, "^": 14, "|": 14, "==": 12, "!=": 12, "||": 7}
"""Around these operators, others that bind less tightly than this get parentheses that C does not need."""


# -- expressions --------------------------------------------------------------------------------------------------


def render_expression(expression: Expr) -> str:
    """The C text of an expression."""
    return _expression(expression)[0]


meaning.text = render_expression


def _wrap(expression: Expr, minimum: int) -> str:
    text, precedence = _expression(expression)
    return text if precedence >= minimum else f"({text})"


def _expression(node: Expr) -> tuple[str, int]:
    """Text and precedence, by the rule of its kind: looked for once a kind, for a kernel has ten thousands of them."""
    text: tuple[str, int] = _rule_of(type(node))(node)  # type: ignore[arg-type]
    return text


@singledispatch
def _by_kind(node: Expr) -> tuple[str, int]:
    raise AssertionError(f"no printing rule for {type(node).__name__}")


_rule_of = cache(_by_kind.dispatch)


@_by_kind.register
def _(node: Literal) -> tuple[str, int]:
    if (named := _name_of(node)) is not None:
        return named.text, _PRECEDENCE.get(named.operator, _ATOM)
    text = literal_text(node)
    return text, _UNARY if text.startswith("-") else _ATOM


def _name_of(node: Expr) -> Named | None:
    """What the text calls a static number. It stands for a uint32_t, which unsigned numbers alone take as it is."""
    if isinstance(node, Literal) and isinstance(node.value, Named) and node.type in (ty.u32, ty.u64):
        return node.value
    return None


def literal_text(node: Literal) -> str:
    """A literal of the right value; its C type is the right one wherever another operand has it."""
    type_, value = node.type, node.value
    assert isinstance(type_, ty.Scalar)
    if type_.kind == "bool":
        return "true" if value else "false"
    if type_.kind == "float":
        return _float_text(float(value), type_)
    if isinstance(value, Bits):
        return f"0x{int(value):0{4 if value < 2**16 else 8}x}" + ("u" if value >= 2**31 else "")
    if -(2**31) < value < 2**31:
        return str(value)
    return _integer_text(int(value), type_)


def _integer_text(value: int, type_: ty.Scalar) -> str:
    """An integer literal whose C type is exactly `type_` (int or wider)."""
    suffix = {"uint": "u", "int": ""}[type_.kind] + ("ll" if type_.bits == 64 else "")
    if value == -(2 ** (type_.bits - 1)):  # C reads a minus and a number too large
        return f"({value + 1}{suffix} - 1)"
    return f"{value}{suffix}"


def _exact(node: Expr, minimum: int) -> str:
    """As `_wrap`, but with C's type right on its own, where no other operand gives it: `1ull << n`, `c ? 1u : 2u`."""
    if node.type == ty.u32 and _name_of(node) is not None:
        return _wrap(node, minimum)
    if isinstance(node, Literal) and isinstance(node.type, ty.Scalar) and node.type.is_integer:
        return _integer_text(int(node.value), node.type)
    return _wrap(node, minimum)


def _float_text(value: float, type_: ty.Scalar) -> str:
    if math.isnan(value) or math.isinf(value):
        sign = "-" if value < 0 else ""
        return f"{sign}infinity()" if math.isinf(value) else "not_a_number()"
    return repr(value) if type_.bits == 64 else _f32_text(value) + "f"


def _f32_text(value: float) -> str:
    """The value in full where that is short, else the shortest decimal that a float reads back as `value`."""
    if len(repr(value)) <= _SHORT:
        return repr(value)
    for digits in range(1, 10):
        text = repr(float(f"{value:.{digits}g}"))
        if abs(float(text)) <= _F32_MAX and struct.unpack("<f", struct.pack("<f", float(text)))[0] == value:
            return text
    raise AssertionError(f"{value!r} is no float")


_SHORT = 14
_F32_MAX = 3.4028235677973366e38  # below it, a number still rounds to a finite float


@_by_kind.register
def _(node: Name) -> tuple[str, int]:
    return node.name, _ATOM


@_by_kind.register
def _(node: Constant) -> tuple[str, int]:
    return node.name, _ATOM


def constant_text(node: Constant) -> str:
    """The definition of a named constant. A structure is passed on whole, so it is the device's."""
    if isinstance(node.type, ty.Struct):
        assert isinstance(node.value, tuple)
        return f"__device__ constexpr {node.type} {node.name} = {{{', '.join(map(str, node.value))}}};"
    assert isinstance(node.type, ty.Scalar) and not isinstance(node.value, tuple)
    comment = f"  // {node.comment}" if node.comment else ""
    return f"constexpr {node.type} {node.name} = {literal_text(Literal(node.type, node.value))};{comment}"


@_by_kind.register
def _(node: Builtin) -> tuple[str, int]:
    return node.text, _ATOM


@_by_kind.register
def _(node: Unary) -> tuple[str, int]:
    inner = _wrap(node.operand, _UNARY)
    separator = " " if inner.startswith(node.operator) else ""
    return f"{node.operator}{separator}{inner}", _UNARY


@_by_kind.register
def _(node: Binary) -> tuple[str, int]:
    operator = _c_operator(node)
    precedence = _PRECEDENCE[operator]
    left = _operand(node.left, operator, precedence)
    if operator in ("<<", ">>") and isinstance(node.left, Literal):
        left = _exact(node.left, precedence)
    return f"{left} {operator} {_operand(node.right, operator, precedence + 1)}", precedence


def _c_operator(node: Binary) -> str:
    if isinstance(node.left.type, ty.Scalar) and node.left.type.kind == "bool":
        return {"&": "&&", "|": "||", "^": "!="}.get(node.operator, node.operator)
    return "/" if node.operator == "//" else node.operator


def _operand(node: Expr, around: str, minimum: int) -> str:
    """An operand, in parentheses where C needs them or a reader does: `(a & b) | c`, `(a + b) << 2`."""
    text, precedence = _expression(node)
    mixed = isinstance(node, Binary) and (_c_operator(node) != around or around in ("==", "!="))
    mixed = mixed or isinstance(node, Literal) and around in _SURPRISING
    surprising = mixed and precedence < _SURPRISING.get(around, 0)
    return f"({text})" if precedence < minimum or surprising else text


@_by_kind.register
def _(node: Select) -> tuple[str, int]:
    both_literal = isinstance(node.if_true, Literal) and isinstance(node.if_false, Literal)
    value = _exact if both_literal else _wrap
    if_true, if_false = value(node.if_true, _SELECT + 1), value(node.if_false, _SELECT + 1)
    return f"{_wrap(node.condition, _SELECT + 1)} ? {if_true} : {if_false}", _SELECT


@_by_kind.register
def _(node: Cast) -> tuple[str, int]:
    return f"({node.type})({render_expression(node.operand)})", _UNARY


@_by_kind.register
def _(node: Call) -> tuple[str, int]:
    """Of a C function that is overloaded by type, a literal has its own."""
    text = render_expression if node.callee is not None else lambda argument: _exact(argument, 0)
    return f"{node.function}({', '.join(map(text, node.arguments))})", _POSTFIX


@_by_kind.register
def _(node: Subscript) -> tuple[str, int]:
    return f"{_wrap(node.base, _POSTFIX)}[{render_expression(node.index)}]", _POSTFIX


@_by_kind.register
def _(node: Pointee) -> tuple[str, int]:
    return f"*{_wrap(node.base, _UNARY)}", _UNARY


@_by_kind.register
def _(node: Member) -> tuple[str, int]:
    if isinstance(node.base, Pointee):
        return f"{_wrap(node.base.base, _POSTFIX)}->{node.member}", _POSTFIX
    return f"{_wrap(node.base, _POSTFIX)}.{node.member}", _POSTFIX


# -- statements ---------------------------------------------------------------------------------------------------


class Printer:
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
                file = json.dumps(statement.location.file, ensure_ascii=False)
                self.lines.append(f"#line {statement.location.line} {file}")
            _statement(statement, self)
        self.depth -= 1

    def block(self, head: str, statements: Iterable[Stmt]) -> None:
        """A head and its body: in braces, or in the same line where it is one line that has room there."""
        listed = tuple(statements)
        if len(listed) == 1 and isinstance(listed[0], _SHORT_BODIES):
            inner = Printer(self.line_marks)
            inner.body(listed)
            together = f"{head} {inner.lines[0].strip()}"
            if len(inner.lines) == 1 and len(INDENT * self.depth + together) <= WIDTH:
                self.line(together)
                return
        self.line(f"{head} {{")
        self.body(listed)
        self.line("}")

    def listing(self, before: str, items: Iterable[str], after: str) -> None:
        """A line with a list in it, over several lines where it is too wide for one."""
        line, *rest = [INDENT * self.depth + before, *(f"{item}, " for item in items)]
        for item in [*rest[:-1], *(item.removesuffix(", ") + after for item in rest[-1:])] or [after]:
            if len(line + item.rstrip()) > WIDTH:
                self.lines.append(line.rstrip())
                line = INDENT * (self.depth + 2)
            line += item
        self.lines.append(line)

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def function_text(function: Function, *, line_marks: bool = False) -> str:
    """A function of the program, under its comment."""
    printer = Printer(line_marks)
    print_function(function, printer)
    return printer.text


def print_function(function: Function, printer: Printer) -> None:
    """The same, behind what was printed before."""
    if function.comment:
        _statement(Comment(function.comment), printer)
    parameters = [parameter_text(item.name, item.type, item.by_reference) for item in function.parameters]
    printer.listing(f"__device__ __forceinline__ {function.returns} {function.name}(", parameters, ") {")
    printer.body(function.body)
    printer.line("}")


def parameter_text(name: str, type_: ty.Type, by_reference: bool = False) -> str:
    """A parameter of a device function; an array is always one by reference."""
    return declaration(type_, f"(&{name})") if isinstance(type_, ty.Array) else f"{type_}{'&' * by_reference} {name}"


@singledispatch
def _statement(node: Stmt, printer: Printer) -> None:
    raise AssertionError(f"no printing rule for {type(node).__name__}")


@_statement.register
def _(node: Declare, printer: Printer) -> None:
    before = declaration(node.name.type, node.name.name)
    if isinstance(node.value, Call) and isinstance(node.value.callee, Function):
        _print_call(node.value, printer, f"{before} = ")
    else:
        printer.line(f"{before}{_initial(node)};")


def declaration(type_: ty.Type, name: str) -> str:
    if isinstance(type_, ty.Array):
        length = type_.length.text if isinstance(type_.length, Named) else type_.length
        return declaration(type_.element, f"{name}[{length}]")
    return f"{type_} {name}"


def _initial(node: Declare) -> str:
    if node.value is not None:
        return f" = {render_expression(node.value)}"
    return " = {}" if node.unrolled_zero else ""


@_statement.register
def _(node: Assign, printer: Printer) -> None:
    target, operator, value = render_expression(node.target), "=", node.value
    if isinstance(value, Binary) and _adds_to(node.target, value):
        operator, value = f"{_c_operator(value)}=", value.right
    if isinstance(value, Call) and isinstance(value.callee, Function):
        _print_call(value, printer, f"{target} {operator} ")
    else:
        printer.line(f"{target} {operator} {render_expression(value)};")


def _adds_to(target: Expr, value: Binary) -> bool:
    """Whether a variable's `n = n + x` is written `n += x`. Not with conditions, which C computes as ints; a load from
    memory and the store to it are written out."""
    is_number = isinstance(value.type, ty.Scalar) and value.type.kind != "bool"
    return is_number and isinstance(target, Name) and isinstance(value.left, Name) and value.left.name == target.name


@_statement.register
def _(node: If, printer: Printer) -> None:
    _print_if(_with_inner_conditions(node), printer, "")


def _with_inner_conditions(node: If) -> If:
    """`if (a) if (b)` as one question, where nothing else depends on either."""
    body = node.body
    while not node.otherwise and len(body) == 1 and isinstance(body[0], If) and not body[0].otherwise:
        both = Binary(ty.boolean, "&", node.condition, body[0].condition, location=node.location)
        node = If(both, body[0].body, location=node.location)
        body = node.body
    return node


def _print_if(node: If, printer: Printer, prefix: str) -> None:
    head = f"{prefix}if ({render_expression(node.condition)})"
    if not prefix and not node.otherwise:
        return printer.block(head, node.body)
    printer.line(f"{head} {{")
    printer.body(node.body)
    if len(node.otherwise) == 1 and isinstance(node.otherwise[0], If):
        _print_if(node.otherwise[0], printer, "} else ")
        return
    if node.otherwise:
        printer.line("} else {")
        printer.body(node.otherwise)
    printer.line("}")


@_statement.register
def _(node: For, printer: Printer) -> None:
    if node.unroll:
        printer.line("#pragma unroll" if node.unroll is True else f"#pragma unroll {node.unroll}")
    name = node.counter.name
    stop = _wrap(node.stop, _PRECEDENCE["<"] + 1)
    one = isinstance(node.step, Literal) and node.step.value == 1
    advance = f"++{name}" if one else f"{name} += {render_expression(node.step)}"
    start = f"{node.counter.type} {name} = {render_expression(node.start)}"
    printer.block(f"for ({start}; {name} < {stop}; {advance})", node.body)


@_statement.register
def _(node: While, printer: Printer) -> None:
    printer.block(f"while ({render_expression(node.condition)})", node.body)


@_statement.register
def _(node: Do, printer: Printer) -> None:
    if isinstance(node.call.callee, Function):
        _print_call(node.call, printer, "")
    else:
        printer.line(f"{render_expression(node.call)};")


def _print_call(node: Call, printer: Printer, before: str) -> None:
    arguments = [render_expression(argument) for argument in node.arguments]
    printer.listing(f"{before}{node.function}(", arguments, ");")


@_statement.register
def _(node: Raw, printer: Printer) -> None:
    for line in node.text.splitlines():
        printer.line(line)


@_statement.register
def _(node: Comment, printer: Printer) -> None:
    for line in node.text.splitlines():
        printer.line(f"// {line}{' .' if line.endswith(chr(92)) else ''}")  # a backslash would swallow the next line


@_statement.register
def _(node: Return, printer: Printer) -> None:
    if isinstance(node.value, Call) and isinstance(node.value.callee, Function):
        _print_call(node.value, printer, "return ")
    else:
        printer.line(f"return {render_expression(node.value)};")


@_statement.register
def _(node: Jump, printer: Printer) -> None:
    printer.line(f"{node.word};")


@_statement.register
def _(node: Asm, printer: Printer) -> None:
    outputs = [pair for pair in node.operands if pair[0] in node.outputs]
    inputs = [pair for pair in node.operands if pair[0] not in node.outputs]
    numbers = {name: number for number, (name, _) in enumerate([*outputs, *inputs])}
    registers = node.template.replace("%%", "%").replace("%", "%%")  # a register of PTX itself, such as %laneid
    template = re.sub(r"\$([A-Za-z_]\w*)", lambda match: f"%{numbers[match[1]]}", registers)
    written = ", ".join(_constraint(value, "=") for _, value in outputs)
    read = ", ".join(_constraint(value, "") for _, value in inputs)
    lists = f" : {written} : {read}" if written else f" :: {read}"
    printer.line(f'asm volatile({json.dumps(template)}{lists} : "memory");')


def _constraint(value: Expr, prefix: str) -> str:
    return f'"{prefix}{ty.constraint_letter(value.type)}"({_exact(value, 0)})'
