"""Results of calls that are used once: they stand where they are used, not under a stand-in name a line above.

A call with an effect is emitted as a statement of its own, before what uses its result, because Python says no more
than that. Where the next statement is the only one to use it, and evaluates nothing that the call could change or that
could change the call, the two are one line: `x[i] = load(p);` for `value = load(p); x[i] = value;`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from cheetah.lang import types as ty
from cheetah.lang.nodes import (
    Assign,
    Binary,
    Call,
    Cast,
    Declare,
    Do,
    Expr,
    Function,
    If,
    Member,
    Name,
    Raw,
    Return,
    Stmt,
    Subscript,
    Unary,
    expressions_in,
    statements_in,
    walk,
    with_changes,
)


def joined(body: Iterable[Stmt]) -> tuple[Stmt, ...]:
    """The statements of a whole function, with each unnamed result in the place of its only use where it may be."""
    listed = tuple(body)
    uses = Counter(id(node) for node in expressions_in(listed) if isinstance(node, Name))
    words = {word for text in _raw_texts(listed) for word in re.findall(r"\w+", text)}
    return _joined(listed, uses, words)


def _raw_texts(body: tuple[Stmt, ...]) -> Iterator[str]:
    return (statement.text for statement in statements_in(body) if isinstance(statement, Raw))


def _joined(body: tuple[Stmt, ...], uses: Counter[int], words: set[str]) -> tuple[Stmt, ...]:
    """`uses` counts each name's declaration too; names among `words` are used by text that is taken literally."""
    done: list[Stmt] = []
    for statement in body:
        while done and (one := _one_statement(done[-1], statement, uses, words)) is not None:
            done.pop()
            statement = one
        done.append(statement)
    return tuple(_with_parts(_without_unused(statement, uses, words), uses, words) for statement in done)


def _without_unused(statement: Stmt, uses: Counter[int], words: set[str]) -> Stmt:
    """A call whose result nobody uses is made for its effect."""
    if isinstance(statement, Declare) and statement.fresh and isinstance(statement.value, Call):
        if uses[id(statement.name)] == 1 and statement.name.name not in words:
            return Do(statement.value, location=statement.location)
    return statement


def _with_parts(statement: Stmt, uses: Counter[int], words: set[str]) -> Stmt:
    parts: dict[str, Any] = {
        name: _joined(getattr(statement, name), uses, words)
        for name in ("body", "otherwise")
        if getattr(statement, name, ())
    }
    return with_changes(statement, **parts) if parts else statement


def _one_statement(first: Stmt, second: Stmt, uses: Counter[int], words: set[str]) -> Stmt | None:
    """`second` with the call of `first` in the place of its result; None where they must stay two."""
    if not isinstance(first, Declare) or not first.fresh or not isinstance(first.value, Call):
        return None
    if uses[id(first.name)] != 2 or first.name.name in words:
        return None
    place = _place(second)
    if place is None:
        return None
    field, value = place
    changed = _substituted(value, first.name, first.value)
    if changed is None or not (_is_all_of(value, first.name) or _may_mix(value, first.name, first.value)):
        return None
    parts: dict[str, Any] = {field: changed}
    return with_changes(second, **parts)


def _place(statement: Stmt) -> tuple[str, Expr] | None:
    """The part of a statement that is evaluated once and before anything that it changes, and what stands there."""
    if isinstance(statement, (Assign, Return)) or isinstance(statement, Declare) and statement.value is not None:
        assert statement.value is not None
        return "value", statement.value
    if isinstance(statement, If):
        return "condition", statement.condition
    if isinstance(statement, Do):
        return "call", statement.call
    return None


def _is_all_of(value: Expr, name: Name) -> bool:
    """Whether a value is the result alone, converted or a member of it: nothing else is evaluated beside it."""
    while isinstance(value, (Cast, Member, Unary)):
        value = value.base if isinstance(value, Member) else value.operand
    return value is name


def _may_mix(value: Expr, name: Name, call: Call) -> bool:
    """Whether the rest of a value means the same before and after the call: C++ leaves that order open. What is stored
    to comes after what is stored."""
    return not _has_references(call) and _is_steady(value, name)


def _has_references(call: Call) -> bool:
    """Whether a call may change names of its caller."""
    callee = call.callee
    if isinstance(callee, Function) and (callee.changes or any(item.by_reference for item in callee.parameters)):
        return True
    return any(isinstance(argument.type, ty.Array) for argument in call.arguments)


def _is_steady(expression: Expr, name: Name) -> bool:
    """No memory is read, and nothing runs that has an effect."""
    for node in walk(expression):
        if isinstance(node, Subscript) and isinstance(node.base.type, ty.Pointer):
            return False
        if isinstance(node, Call) and not getattr(node.callee, "pure", False):
            if not any(inner is name for inner in walk(node)):
                return False
    return True


def _substituted(value: Expr, name: Name, call: Call) -> Expr | None:
    """`value` with `call` for `name`; None where C++ would evaluate it not at all or not surely."""
    if value is name:
        return call
    for field, operand in _operands_always_evaluated(value):
        if any(node is name for node in walk(operand)):
            inner = _substituted(operand, name, call)
            return None if inner is None else _with_operand(value, field, inner)
    return None


def _operands_always_evaluated(value: Expr) -> list[tuple[Any, Expr]]:
    """Each with the field that holds it, or its number among the arguments of a call."""
    if isinstance(value, Call):
        return list(enumerate(value.arguments))
    if isinstance(value, Binary):
        is_condition = isinstance(value.left.type, ty.Scalar) and value.left.type.kind == "bool"
        return [("left", value.left)] if is_condition else [("left", value.left), ("right", value.right)]
    if isinstance(value, (Unary, Cast)):
        return [("operand", value.operand)]
    return [("base", value.base)] if isinstance(value, Member) else []


def _with_operand(value: Expr, field: Any, operand: Expr) -> Expr:
    if isinstance(value, Call):
        arguments = (*value.arguments[:field], operand, *value.arguments[field + 1 :])
        return with_changes(value, arguments=arguments)
    parts: dict[str, Any] = {field: operand}
    return with_changes(value, **parts)
