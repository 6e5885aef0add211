"""Names and stores: how a Python assignment becomes a declaration, and what can be stored to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from typing import cast as cast_type

from cheetah.lang import types as ty
from cheetah.lang.errors import ConstStoreError, ScopeError, SignatureError, TypeMixError
from cheetah.lang.meaning import meaning
from cheetah.lang.nodes import (
    Argument,
    Assign,
    Call,
    Constant,
    Declare,
    Do,
    Expr,
    Function,
    Literal,
    Member,
    Name,
    Stmt,
    Subscript,
    Value,
    walk,
)
from cheetah.lang.operators import cast, lift
from cheetah.lang.scope import Cursor, current, declare_name, emit, is_reserved, take_name


@dataclass(frozen=True)
class Pending:
    """A variable, constant or array that waits for the name it is assigned to."""

    type: ty.Type
    value: Expr | None
    zero: bool = False
    mutable: bool = True

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse()

    def __setitem__(self, index: object, value: object) -> NoReturn:
        self._refuse()

    def __str__(self) -> str:
        return f"a {self.type} without a name"

    def _refuse(self) -> NoReturn:
        raise TypeMixError(
            f"{self} was used: assign it to a name first, `x = ch.var(...)`, or give one, `ch.var(..., name='x')`."
        )


def bind(name: str, value: Any) -> Any:
    """Give a device value the Python name it is assigned to; anything else passes through unchanged."""
    if isinstance(value, Pending):
        return _declare(name, value)
    if isinstance(value, Name) and is_fresh(value):
        _rename(value, name)
        return value
    if not _needs_binding(value):
        return value
    target = declare_name(name, value.type)
    emit(Declare(target, value))
    return target


def _needs_binding(value: Any) -> bool:
    """Expressions are evaluated where they are assigned, and variables copied; constants keep their first name."""
    if isinstance(value, Name):
        return value.mutable and not isinstance(value.type, ty.Array)
    return isinstance(value, Expr) and not isinstance(value, (Literal, Constant)) and value.type != ty.void


def bind_each(names: tuple[str | None, ...], values: Any) -> Any:
    """`a, b = values` with each device value named; None stands for a target that is no plain name."""
    if isinstance(values, Expr):
        return values  # Python's unpacking asks for its iterator, which is refused with a message
    listed = tuple(values)
    if len(listed) != len(names):
        return listed
    return tuple(value if name is None else bind(name, value) for name, value in zip(names, listed, strict=True))


def bind_attribute(name: str, owner: Any, value: Any) -> Any:
    """`owner.name = value`: named like a variable, unless it is a store to a member of a device value."""
    return value if isinstance(owner, Expr) else bind(name, value)


def _declare(name: str, pending: Pending) -> Name:
    target = declare_name(name, pending.type, mutable=pending.mutable)
    emit(Declare(target, pending.value, pending.zero))
    return target


_FRESH = "value"


def is_fresh(value: Name) -> bool:
    """Whether `value` is the result of the call made in the statement that is being written now."""
    return _fresh_declaration(value) is not None


def _fresh_declaration(value: Name) -> int | None:
    """Where the last statements declare `value` as a result: last of all, or among several before their call."""
    statements = current().top.statements
    several = bool(statements) and _gives_several(statements[-1])
    for number in range(len(statements) - 1 - several, -1, -1):
        statement = statements[number]
        if not isinstance(statement, Declare) or not statement.fresh:
            return None
        if statement.name is value:
            return number
        if not several:
            return None
    return None


def _gives_several(statement: Stmt) -> bool:
    return isinstance(statement, Do) and isinstance(statement.call.callee, Function)


def _rename(value: Name, wanted: str) -> None:
    """Give a fresh result the user's name. In place: expressions may hold the name already."""
    scope = current().top
    number = _fresh_declaration(value)
    assert number is not None
    declaration = scope.statements[number]
    assert isinstance(declaration, Declare)
    scope.names.discard(value.name)
    object.__setattr__(value, "name", take_name(wanted, scope))
    object.__setattr__(value, "wanted", wanted)
    scope.statements[number] = replace(declaration, fresh=False)


def store_result(call: Call) -> Name:
    """Evaluate a call now, exactly once, and give the name of its result."""
    target = declare_name(_FRESH, call.type)
    emit(Declare(target, call, fresh=True))
    return target


def store_results(call: Call, types: Sequence[ty.Type]) -> list[Name]:
    """Evaluate the call of a function that gives several results, through references that come last."""
    targets = [declare_name(_FRESH, type_) for type_ in types]
    for target in targets:
        emit(Declare(target, fresh=True))
    emit(Do(replace(call, arguments=(*call.arguments, *targets))))
    return targets


def var(type_: ty.Type, value: Value | None = None, *, name: str | None = None) -> Expr:
    """A variable: `total = ch.var(ty.f32, 0.0)`, then `total += x` or `total.set(x)`."""
    return _named(name, Pending(type_, None if value is None else lift(value, type_)))


def array(element: ty.Scalar | ty.Vector, *lengths: int, zero: bool = False, name: str | None = None) -> Expr:
    """A local array, outermost length first; kept in registers when every index is static after unrolling."""
    return _named(name, Pending(ty.array(element, *lengths), None, zero))


def const(type_: ty.Type, value: Value, *, name: str | None = None) -> Expr:
    """A named constant of a stated type: `limit = ch.const(ty.u32, 7)` declares `uint32_t limit = 7;`."""
    return _named(name, Pending(type_, cast(type_, value), mutable=False))


def constexpr(type_: ty.Scalar, name: str, value: int | float | bool, comment: str = "") -> Constant:
    """A static number under a name of its own: `ch.constexpr(ty.u32, "SCRATCH", 196608)`, in any order, any often.
    comment: what the text says behind its definition.

    The file defines it once, before its functions. SignatureError where the name is taken by something else.
    """
    literal = lift(value, type_)
    assert isinstance(literal, Literal)
    return _kept("constexpr", Constant(type_, name, literal.value, comment))


def record(type_: ty.Struct, name: str, **values: int) -> Constant:
    """Static numbers as a structure with a name of its own, which the file defines once: an argument of functions that
    are one text for several of them. values: of all members, which are unsigned."""
    numbers = tuple(int(values.pop(member)) for member, _ in type_.members)
    assert not values, f"{type_} has no members {sorted(values)}"
    return _kept("record", Constant(type_, name, numbers))


def _kept(verb: str, wanted: Constant) -> Constant:
    """The constant as the file has it already, or from now on. SignatureError where its name is another one's."""
    cursor, name = current(), wanted.name
    if name not in cursor.constants and (is_reserved(name) or name in cursor.bound):
        raise SignatureError(f"ch.{verb}: the name `{name}` is taken, by a value or by a word of C++.")
    made = cursor.constants.setdefault(name, wanted)
    if (made.type, made.value) != (wanted.type, wanted.value):
        raise SignatureError(
            f"ch.{verb}: `{name}` is {wanted.type} {wanted.value} here and {made.type} {made.value} at {made.location}."
        )
    return made


def whole(name: str, value: Expr) -> Name:
    """A constant of the whole kernel, which all roles and functions see, declared once and behind what it is made of,
    wherever it is asked for first: `states = ch.whole("states", ch.reinterpret(...))`. value: made of the kernel's
    parameters and outermost names. The name is numbered where it is taken."""
    root, text = current().root, str(value)
    scope = root.scopes[0]
    if (name, text) in root.wholes:
        return root.wholes[name, text]
    used = [node for node in walk(value) if isinstance(node, Name)]
    hidden = [node.name for node in used if scope not in node.scopes]
    if hidden:
        raise ScopeError(f"ch.whole: `{hidden[0]}` is not seen where the kernel begins.")
    declared = [item.name.name if isinstance(item, Declare) else "" for item in scope.statements]
    place = max((declared.index(node.name) + 1 for node in used if node.name in declared), default=0)
    made = Name(value.type, _free_everywhere(name, root), (scope,), wanted=name)
    scope.insert(place, Declare(made, value))
    root.wholes[name, text] = made
    return made


def _free_everywhere(wanted: str, root: Cursor) -> str:
    """A name that nothing of the program has, whatever has been closed since."""
    name, count = wanted, 1
    while is_reserved(name) or name in root.bound | root.function_names | root.constants.keys():
        count += 1
        name = f"{wanted}_{count}"
    root.scopes[0].names.add(name)
    root.bound.add(name)
    return name


def argument(value: int | float, type_: ty.Scalar | None = None) -> Argument:
    """A static number as an argument of a `@ch.function`, which takes it as a parameter: calls that differ in it alone
    are calls of one function. A u32 of an int, an f32 of a float, unless a type is given."""
    literal = lift(value, type_ or (ty.f32 if isinstance(value, float) else ty.u32))
    assert isinstance(literal, Literal)
    return Argument(literal.type, literal.value)


def _named(name: str | None, pending: Pending) -> Expr:
    """What is still to be declared is seen by nobody before it is assigned to a name."""
    return cast_type(Expr, pending) if name is None else _declare(name, pending)


def store(target: Expr, value: Value) -> None:
    """Emit `target = value`, refusing constants."""
    require_mutable(target)
    emit(Assign(target, lift(value, target.type)))


meaning.store = store


def require_mutable(target: Expr) -> None:
    """ConstStoreError where nothing may be stored to `target`."""
    if isinstance(target, Name):
        if not target.mutable and isinstance(target.type, (ty.Struct, ty.Vector)):
            raise ConstStoreError(
                f"`{target}` is a constant copy; store to the place itself, `p[i].member = ...`, "
                "or make it a variable with `ch.var`."
            )
        if not target.mutable:
            raise ConstStoreError(f"`{target}` is a constant; make it with `ch.var` to store to it.")
    elif isinstance(target, Subscript):
        base = target.base
        if not isinstance(base.type, ty.Pointer):
            require_mutable(base)
        elif not base.type.mutable:
            raise ConstStoreError(
                f"store to `{target}` through {base.type}, which is constant; declare it with `ty.ptr_mut`."
            )
    elif isinstance(target, Member):
        require_mutable(target.base)
    else:
        raise ConstStoreError(f"`{target}` is a value, not a place that can be stored to.")
