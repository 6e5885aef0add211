"""Functions that emit device code: `@ch.inline` where it is called, `@ch.function` and `ch.outline` once, to be called.

A function of the program runs its Python at every call, as an inline one does, and what it emitted becomes the body of
a `__device__ __forceinline__` function. Calls that made the same body are calls of one function: static arguments
specialise it, layers and strips share it. Names of the caller that the body uses become parameters by themselves, but
for those that the kernel or a role binds outside of its loops: with them, the kernel is a structure, of which they are
members and its functions member functions. So a function may stand wherever an inline one does, means the same and
needs the same registers.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from cheetah.lang import types as ty
from cheetah.lang.binding import store_result, store_results
from cheetah.lang.control import Block
from cheetah.lang.errors import TypeMixError
from cheetah.lang.names import keeping_names
from cheetah.lang.nodes import (
    Argument,
    Asm,
    Assign,
    Call,
    Declare,
    Do,
    Expr,
    For,
    Function,
    Literal,
    Member,
    Name,
    Parameter,
    Raw,
    Return,
    Stmt,
    Subscript,
    Unary,
    statements_in,
    walk,
    with_changes,
)
from cheetah.lang.operators import is_mutable_place
from cheetah.lang.printer import function_text
from cheetah.lang.results import joined
from cheetah.lang.scope import current, declare_name, emit, is_reserved

P = ParamSpec("P")
R = TypeVar("R")


def inline(function: Callable[P, R]) -> Callable[P, R]:
    """A function that emits its statements where it is called; its names are made unique there."""
    return wraps(function)(keeping_names(function))


def function(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose statements become one device function of the text for all calls that emit the same.

    Device values among its arguments, also in tuples and lists, become parameters under their Python names (those of a
    named tuple's fields): variables
    and arrays by reference where the body stores to them. Literals and everything else are static, but for what is
    given as `ch.argument(number)`. It may return nothing, a device value, or a tuple or list of them; what it returns
    is a constant in the caller.

    It is called as in Python. Another text of that name is called by what it is specialised on: the `name` of the first
    static argument that has one, `multiply_of_qkv`; else how many there are of one, `attend_of_two_states`, or that a
    range does not begin with 0, `lay_down_of_later_slices`.
    """
    keeping, signature = keeping_names(function), inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs)
        body = outline(function.__name__, comment=_summary(function), of=_told_by(given.arguments))
        with body:
            for name, value in given.arguments.items():
                given.arguments[name] = body.parameters(name, value)
            result = keeping(*given.args, **given.kwargs)
            body.keep_results(result)
        returned: R = body.returned(result)
        return returned

    return call


_COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def _told_by(arguments: Mapping[str, Any]) -> str:
    """What the static arguments tell of a call; empty where they say nothing that has a name."""
    static = {name: argument for name, argument in arguments.items() if not isinstance(argument, Expr)}
    names = (getattr(argument, "name", None) for argument in static.values())
    found = [name for name in names if isinstance(name, str) and name.isidentifier()]
    for name, argument in static.items():
        if isinstance(argument, range) and argument.start:
            found.append(f"later_{name}")
        elif isinstance(argument, (list, tuple)) and not hasattr(argument, "_fields") and len(argument) < len(_COUNTS):
            found.append(f"{_COUNTS[len(argument)]}_{name}")
    return next(iter(found), "")


def _summary(function: Callable[..., Any]) -> str:
    """The first paragraph of a docstring, as the comment over the device function."""
    return (inspect.getdoc(function) or "").partition("\n\n")[0]


@dataclass(frozen=True)
class _Given:
    """A parameter and what the caller gives for it."""

    name: Name
    value: Expr


class outline(Block):
    """`with ch.outline("qkv"):` makes what is emitted inside one device function, and calls it here.

    What the body uses of the caller's names becomes parameters; names bound inside are not seen after it. of: what
    tells it from another function of that name.
    """

    verb = "ch.outline(...)"

    def __init__(self, name: str, comment: str = "", of: str = "") -> None:
        super().__init__()
        self.name, self.comment = name.lstrip("_"), comment
        self.qualified = f"{self.name}_of_{of}" if of else self.name
        self.given: list[_Given] = []
        self.outputs: list[Name] = []
        self.returns: ty.Type = ty.void
        self.values: list[Name] = []

    def __enter__(self) -> None:
        self.scope = self._open(f"the function {self.name}", is_function=True)

    def parameters(self, name: str, value: Any) -> Any:
        """`value` with a parameter in the place of every device value."""
        return _mapped(value, name, self._parameter)

    def _parameter(self, value: Expr, name: str) -> Expr:
        if isinstance(value, Literal) and not isinstance(value, Argument):
            return value
        current().require_visible(walk(value))
        mutable = is_mutable_place(value) and (isinstance(value.type, ty.Array) or _is_variable(value))
        parameter = declare_name(name, value.type, mutable=mutable)
        self.given.append(_Given(parameter, value))
        return parameter

    def keep_results(self, result: Any) -> None:
        """End the body with what the function returns: one value by `return`, several through references."""
        results: list[Expr] = []
        _mapped(result, self.name, lambda value, _: results.append(value) if self._is_new(value) else None)
        for value in results:
            self._require_returnable(value)
        if len(results) == 1:
            self.returns = results[0].type
            emit(Return(results[0]))
        elif results:
            self.outputs = [self._output(value) for value in results]

    def _output(self, value: Expr) -> Name:
        """The reference for a value: what the body has under a name from the beginning to the end, or a new one."""
        statements = self.scope.statements
        for number, made in enumerate(statements):
            if isinstance(made, Declare) and made.name is value:
                assigned = [] if made.value is None else [Assign(made.name, made.value, location=made.location)]
                statements[number : number + 1] = assigned
                return made.name
        target = declare_name(_output_name(value), value.type, mutable=True)
        emit(Assign(target, value))
        return target

    def _is_new(self, value: Expr) -> bool:
        """Whether a returned value is made here: the caller's own names and literals go back as they are."""
        is_callers = isinstance(value, Name) and self.scope not in value.scopes
        return not isinstance(value, Literal) and not is_callers

    def _require_returnable(self, value: Expr) -> None:
        current().require_visible(walk(value))
        if isinstance(value.type, ty.Array):
            raise TypeMixError(f"{self.name} returns the array `{value}`: let its caller make the array and give it.")

    def returned(self, result: Any) -> Any:
        """`result` as the caller sees it: with the names that hold what the call gave."""
        values = iter(self.values)
        return _mapped(result, self.name, lambda value, _: next(values) if self._is_new(value) else value)

    def _finish(self) -> None:
        body = joined(self.scope.taken())
        statements = tuple(statements_in(body))
        nodes = tuple(node for statement in statements for node in statement.nodes)
        self._forget_unread(statements, nodes)
        bound = [*(item.name for item in self.given), *self.outputs, *_declared(statements)]
        captured = _captured(nodes, bound)
        members = [name.name for name in captured if _become_member(name)]
        given = [*self.given, *(_Given(name, name) for name in captured if name.name not in members)]
        stored = _stored_names(statements, nodes)
        changes = frozenset(stored & {*members} | _changed_by_calls(nodes))
        for item in given:
            if item.name.name in stored:
                self._require_alone(item.name.name, item.value, [other for other in given if other is not item])
        for name in sorted(changes):
            self._require_alone(name, name, given)
        called = self._function(body, nodes, given, stored, members, changes)
        call = Call(self.returns, called.name, tuple(item.value for item in given), called)
        if self.outputs:
            self.values = store_results(call, [target.type for target in self.outputs])
        elif self.returns != ty.void:
            self.values = [store_result(call)]
        else:
            emit(Do(call))

    def _forget_unread(self, statements: Iterable[Stmt], nodes: Iterable[Expr]) -> None:
        """What was given and the body makes no use of is no parameter."""
        read = {node.name for node in nodes if isinstance(node, Name)}
        for statement in statements:
            read.update(re.findall(r"\w+", statement.text) if isinstance(statement, Raw) else ())
        self.given = [item for item in self.given if item.name.name in read]

    def _function(
        self,
        body: tuple[Stmt, ...],
        nodes: Sequence[Expr],
        given: list[_Given],
        stored: set[str],
        members: list[str],
        changes: frozenset[str],
    ) -> Function:
        """The body under names of its own, so that it reads the same whoever calls it. nodes: its expressions."""
        inputs = [item.name for item in given]
        names = _own_names([*inputs, *self.outputs, *nodes], members)
        parameters = [Parameter(names[name.name], name.type, _is_place(name, stored)) for name in inputs]
        parameters += [Parameter(names[name.name], name.type, True) for name in self.outputs]
        renamed = tuple(_renamed(statement, names) for statement in body)
        made = Function(self.name, tuple(parameters), self.returns, renamed, self.comment, changes)
        return _shared(made, self.qualified)

    def _require_alone(self, name: str, changed: Expr | str, others: list[_Given]) -> None:
        """A place that the body stores to, as `name`, comes in by one way only: by two, one would or would not see the
        change. changed: the place, or a member."""
        place, root = str(changed), changed if isinstance(changed, str) else _root_name(changed)
        for other in others:
            again = any(str(node) == place for node in walk(other.value))
            if again or isinstance(other.value, Name) and other.value.name == root:
                raise TypeMixError(
                    f"{self.name} changes `{place}`, its `{name}`, and gets it a second time as "
                    f"`{other.name.name}`: give it once, or a copy of it, `x = ch.var({other.name.type}, ...)`."
                )


def _output_name(value: Expr) -> str:
    return f"{value.wanted or value.name}_out" if isinstance(value, Name) else "result"


def _mapped(value: Any, name: str, change: Callable[[Expr, str], Any]) -> Any:
    """`value` with every device value in it changed: itself, or in tuples and lists."""
    if isinstance(value, Expr):
        return change(value, name)
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", [f"{name}_{number}" for number in range(len(value))])
        items = [_mapped(item, item_name, change) for item, item_name in zip(value, names, strict=True)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _captured(nodes: Sequence[Expr], bound: Iterable[Name]) -> list[Name]:
    """What a body uses of its caller's names, in the order in which they appear. bound: those that are its own."""
    inside = {name.name for name in bound}
    captured: dict[str, Name] = {}
    for node in nodes:
        if isinstance(node, Name) and node.name not in inside:
            captured.setdefault(node.name, node)
    return list(captured.values())


def _become_member(name: Name) -> bool:
    """Whether a captured name is the kernel's, or a role's outside of its loops; it is a member from now on."""
    if isinstance(name.type, ty.Array) or not any(scope.is_whole for scope in name.scopes):
        return False
    return current().members.setdefault(name.name, name.type) == name.type


def _changed_by_calls(nodes: Sequence[Expr]) -> set[str]:
    """The members that a body stores to through what it calls."""
    calls = (node for node in nodes if isinstance(node, Call) and isinstance(node.callee, Function))
    return {name for call in calls for name in call.callee.changes}


def _declared(statements: Sequence[Stmt]) -> Iterator[Name]:
    for statement in statements:
        if isinstance(statement, Declare):
            yield statement.name
        elif isinstance(statement, For):
            yield statement.counter


def _is_place(name: Name, stored: set[str]) -> bool:
    return isinstance(name.type, ty.Array) or name.name in stored


def _stored_names(statements: Sequence[Stmt], nodes: Sequence[Expr]) -> set[str]:
    """Names of variables and arrays that a body stores to, itself or through what it calls."""
    places: list[Expr] = []
    for statement in statements:
        if isinstance(statement, Assign):
            places.append(statement.target)
        elif isinstance(statement, Asm):
            places += [operand for name, operand in statement.operands if name in statement.outputs]
    for node in nodes:
        if isinstance(node, Unary) and node.operator == "&":
            places.append(node.operand)
        elif isinstance(node, Call):
            places += _places_given(node)
    return {name for name in map(_root_name, places) if name is not None}


def _places_given(call: Call) -> Iterator[Expr]:
    """The arguments that the callee may store to: arrays, and what a function takes by reference."""
    parameters = call.callee.parameters if isinstance(call.callee, Function) else ()
    by_reference = {number for number, parameter in enumerate(parameters) if parameter.by_reference}
    for number, argument in enumerate(call.arguments):
        if number in by_reference or isinstance(argument.type, ty.Array):
            yield argument


def _is_variable(place: Expr) -> bool:
    """Whether a place is a variable, or a member of one: not an element, which a function could change by its index."""
    while isinstance(place, Member):
        place = place.base
    return isinstance(place, Name)


def _root_name(place: Expr) -> str | None:
    """The variable or array that a place is a part of; None for memory behind a pointer."""
    while isinstance(place, (Subscript, Member)):
        if isinstance(place.base.type, ty.Pointer):
            return None
        place = place.base
    return place.name if isinstance(place, Name) else None


# -- names of its own ---------------------------------------------------------------------------------------------


def _own_names(nodes: Sequence[Expr], members: Iterable[str]) -> dict[str, str]:
    """For each name of a function the one that it has there: a member's its own, the others' as in Python, numbered
    where two wanted one."""
    names = {name: name for name in members}
    taken = {*names, *(node.function for node in nodes if isinstance(node, Call))}
    for node in nodes:
        if isinstance(node, Name) and node.name not in names:
            names[node.name] = _free(node.wanted or node.name, taken)
            taken.add(names[node.name])
    return names


def _free(wanted: str, taken: set[str]) -> str:
    name, count = wanted, 1
    while name in taken or is_reserved(name):
        count += 1
        name = f"{wanted}_{count}"
    return name


def _renamed(node: Any, names: Mapping[str, str]) -> Any:
    """A statement or expression, or a tuple of such, with its names replaced; itself where they stay."""
    if isinstance(node, Name):
        return node if names[node.name] == node.name else with_changes(node, name=names[node.name])
    if isinstance(node, tuple):
        items = [_renamed(item, names) for item in node]
        return tuple(items) if any(map(operator.is_not, items, node)) else node
    if not isinstance(node, (Expr, Stmt)):
        return node
    changes: dict[str, Any] = {}
    for name in _fields_with_names(type(node)):  # type: ignore[arg-type]
        value = getattr(node, name)
        if (renamed := _renamed(value, names)) is not value:
            changes[name] = renamed
    return with_changes(node, **changes) if changes else node


@cache
def _fields_with_names(node: type[Any]) -> tuple[str, ...]:
    """The fields of a kind of node in which names may be used."""
    kinds = re.compile(r"\b(Expr|Name|Call|Stmt)\b")
    return tuple(item.name for item in fields(node) if kinds.search(str(item.type)))


def _shared(made: Function, qualified: str) -> Function:
    """The function of that text, where the program has it; else `made` under a free name, from now on one of them.
    qualified: its name where its own is taken."""
    program = current()
    text = function_text(replace(made, name=""))
    if text not in program.functions:
        taken = program.bound | program.function_names
        name = made.name if _free(made.name, taken) == made.name else _free(qualified, taken)
        program.functions[text] = replace(made, name=name)
        program.function_names.add(name)
    return program.functions[text]
