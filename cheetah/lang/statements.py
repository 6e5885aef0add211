"""Statement nodes and the verbs that emit them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import Any, NoReturn

from cheetah.lang import types as ty
from cheetah.lang.errors import ConstStoreError, LangError, Location, MissingWithError, TypeMixError, here
from cheetah.lang.expressions import Builtin, Call, Expr, Literal, Member, Name, Subscript, Value, cast, lift, natural
from cheetah.lang.scope import Role, Scope, at, block, current, declare_name, emit


@dataclass(frozen=True, eq=False)
class Stmt:
    location: Location = field(default_factory=here, kw_only=True, repr=False)

    def expressions(self) -> Iterator[Expr]:
        """The expressions written directly in this statement, not those of its bodies."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Expr):
                yield value
            elif item.name == "operands":
                yield from (operand for _, operand in value)


@dataclass(frozen=True, eq=False)
class Declare(Stmt):
    name: Name
    value: Expr | None = None
    unrolled_zero: bool = False  # an array that starts as zeros
    fresh: bool = False  # a primitive's result whose stand-in name awaits the user's


@dataclass(frozen=True, eq=False)
class Assign(Stmt):
    target: Expr
    value: Expr


@dataclass(frozen=True, eq=False)
class If(Stmt):
    condition: Expr
    body: tuple[Stmt, ...]
    otherwise: tuple[Stmt, ...] = ()


@dataclass(frozen=True, eq=False)
class For(Stmt):
    counter: Name
    start: Expr
    stop: Expr
    step: Expr
    body: tuple[Stmt, ...]
    unroll: bool | int = False


@dataclass(frozen=True, eq=False)
class While(Stmt):
    condition: Expr
    body: tuple[Stmt, ...]


@dataclass(frozen=True, eq=False)
class Do(Stmt):
    """An expression for its effect: the call of a primitive."""

    call: Expr


@dataclass(frozen=True, eq=False)
class Raw(Stmt):
    text: str


@dataclass(frozen=True, eq=False)
class Comment(Stmt):
    text: str


@dataclass(frozen=True, eq=False)
class Asm(Stmt):
    """Inline PTX: `$name` stands for an operand; outputs are variables."""

    template: str
    operands: tuple[tuple[str, Expr], ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Jump(Stmt):
    word: str  # break, continue or return


# -- names and stores ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pending:
    """A variable or array that waits for the name it is assigned to."""

    type: ty.Type
    value: Expr | None
    zero: bool = False


def bind(name: str, value: Any) -> Any:
    """Give a device value the Python name it is assigned to; anything else passes through unchanged."""
    if isinstance(value, Pending):
        return _declare(name, value)
    if isinstance(value, Name) and _is_fresh(value):
        _rename(value, name)
        return value
    is_copy = isinstance(value, Name) and value.mutable and not isinstance(value.type, ty.Array)
    if is_copy or isinstance(value, Expr) and not isinstance(value, (Name, Literal)) and value.type != ty.void:
        target = declare_name(name, value.type)
        emit(Declare(target, value))
        return target
    return value


def _declare(name: str, pending: Pending) -> Name:
    target = declare_name(name, pending.type, mutable=True)
    emit(Declare(target, pending.value, pending.zero))
    return target


_FRESH = "value"


def _is_fresh(value: Name) -> bool:
    """Whether the last statement is a primitive's result under its stand-in name."""
    last = current().top.statements[-1] if current().top.statements else None
    return isinstance(last, Declare) and last.name is value and last.fresh


def _rename(value: Name, wanted: str) -> None:
    """Give a fresh result the user's name. In place: expressions may hold the name already."""
    scope = current().top
    last = scope.statements[-1]
    assert isinstance(last, Declare)
    scope.names.discard(value.name)
    object.__setattr__(value, "name", current().unique(wanted))
    scope.names.add(value.name)
    scope.statements[-1] = replace(last, fresh=False)


def store_result(call: Call) -> Name:
    """Evaluate a call now, exactly once, and give the name of its result."""
    target = declare_name(_FRESH, call.type)
    emit(Declare(target, call, fresh=True))
    return target


def var(type_: ty.Type, value: Value | None = None, *, name: str | None = None) -> Any:
    """A variable: `total = ch.var(ty.f32, 0.0)`, then `total += x` or `total.set(x)`."""
    pending = Pending(type_, None if value is None else lift(value, type_))
    return pending if name is None else _declare(name, pending)


def array(element: ty.Scalar | ty.Vector, length: int, *, zero: bool = False, name: str | None = None) -> Any:
    """A local array, kept in registers when every index is static after unrolling."""
    pending = Pending(ty.Array(element, length), None, zero)
    return pending if name is None else _declare(name, pending)


def const(type_: ty.Type, value: Value, *, name: str | None = None) -> Any:
    """A named constant of a stated type: `limit = ch.const(ty.u32, 7)` declares `uint32_t limit = 7;`."""
    lifted = lift(value, type_) if not isinstance(value, Expr) else cast(type_, value)
    if name is None:
        return Pending(type_, lifted)
    return _declare(name, Pending(type_, lifted))


def store(target: Expr, value: Value) -> None:
    """Emit `target = value`, refusing constants."""
    _require_mutable(target)
    emit(Assign(target, lift(value, target.type)))


def _require_mutable(target: Expr) -> None:
    if isinstance(target, Name):
        if not target.mutable:
            raise ConstStoreError(f"`{target}` is a constant; make it with `ch.var` to store to it.")
    elif isinstance(target, Subscript):
        base = target.base
        if isinstance(base.type, ty.Pointer) and not base.type.mutable:
            raise ConstStoreError(f"store to `{target}` through {base.type}, which is constant; declare it with `ty.ptr_mut`.")
    elif isinstance(target, Member):
        _require_mutable(target.base)
    else:
        raise ConstStoreError(f"`{target}` is a value, not a place that can be stored to.")


# -- control ------------------------------------------------------------------------------------------------------


class _Block:
    """A `with` statement of the language; using it any other way is refused."""

    verb = "?"

    def __init__(self) -> None:
        self.location = here()
        self.entered = False
        self._context: Any = None

    def __bool__(self) -> NoReturn:
        raise MissingWithError(f"`{self.verb}` opens a block on the device: write `with {self.verb}:`, not `if {self.verb}:`.")

    def _open(self, title: str) -> Scope:
        self.entered = True
        self._context = block(title)
        scope: Scope = self._context.__enter__()
        return scope

    def _close(self, kind: Any, value: Any, trace: Any) -> None:
        self._context.__exit__(kind, value, trace)


class if_(_Block):
    """`with ch.if_(condition):`, optionally followed by `with ch.else_():`."""

    verb = "ch.if_(...)"

    def __init__(self, condition: Value) -> None:
        super().__init__()
        if isinstance(condition, bool):
            condition = Literal(ty.boolean, condition)
        if not isinstance(condition, Expr) or condition.type != ty.boolean:
            raise TypeMixError(f"ch.if_ needs a condition, not `{condition}`; compare it, e.g. `{condition} != 0`.")
        self.condition = condition

    def __enter__(self) -> None:
        self.scope = self._open("an if_ block")

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._close(kind, value, trace)
        if kind is None:
            emit(If(self.condition, tuple(self.scope.statements), location=self.location))


class else_(_Block):
    """`with ch.else_():` directly after an `if_` block."""

    verb = "ch.else_()"

    def __enter__(self) -> None:
        statements = current().top.statements
        last = statements[-1] if statements else None
        if not isinstance(last, If) or last.otherwise:
            raise LangError("ch.else_() must directly follow a `with ch.if_(...)` block of the same level.")
        self.branch = last
        self.scope = self._open("an else_ block")

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._close(kind, value, trace)
        if kind is None:
            current().top.statements[-1] = replace(self.branch, otherwise=tuple(self.scope.statements))


class for_(_Block):
    """`with ch.for_(stop) as i:` or `(start, stop[, step])`; counts upwards. `unroll=True` asks the compiler to unroll."""

    verb = "ch.for_(...)"

    def __init__(self, *bounds: Value, unroll: bool | int = False, type: ty.Scalar | None = None, name: str = "i") -> None:
        super().__init__()
        start, stop, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
        kinds = [bound.type for bound in bounds if isinstance(bound, Expr)]
        self.type = type or next((kind for kind in kinds if isinstance(kind, ty.Scalar)), ty.u32)
        self.start, self.stop, self.step = (lift(value, self.type) for value in (start, stop, step))
        self.unroll = unroll
        self.name = name

    def __enter__(self) -> Name:
        self.scope = self._open(f"the loop over {self.name}")
        self.counter = declare_name(self.name, self.type)
        return self.counter

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._close(kind, value, trace)
        if kind is None:
            parts = (self.counter, self.start, self.stop, self.step, tuple(self.scope.statements), self.unroll)
            self.scope.names.clear()
            current().scopes.append(self.scope)  # the loop's own line sees its counter
            try:
                statement = For(*parts, location=self.location)
                for expression in statement.expressions():
                    current().require_visible(expression)
            finally:
                current().scopes.pop()
            current().top.statements.append(statement)


class while_(_Block):
    """`with ch.while_(condition):`."""

    verb = "ch.while_(...)"

    def __init__(self, condition: Value) -> None:
        super().__init__()
        self.condition = lift(condition, ty.boolean)

    def __enter__(self) -> None:
        self.scope = self._open("a while_ block")

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._close(kind, value, trace)
        if kind is None:
            emit(While(self.condition, tuple(self.scope.statements), location=self.location))


class roles_for(_Block):
    """The same loop in several roles: `with ch.roles_for(roles, stop) as layer:`; the counter is visible in each of them."""

    verb = "ch.roles_for(...)"

    def __init__(self, roles: tuple[Role, ...], *bounds: Value, name: str = "i") -> None:
        super().__init__()
        self.roles, self.bounds, self.name = roles, bounds, name

    def __enter__(self) -> Name:
        self.loops: list[for_] = []
        counters: list[Name] = []
        for role in self.roles:
            with role:
                self.loops.append(for_(*self.bounds, name=self.name))
                counters.append(self.loops[-1].__enter__())
        scopes = tuple(scope for counter in counters for scope in counter.scopes)
        if len({counter.name for counter in counters}) != 1:
            raise LangError(f"the roles' loops over {self.name} got different names: {[c.name for c in counters]}.")
        return replace(counters[0], scopes=scopes)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for role, loop in zip(self.roles, self.loops, strict=True):
            with at(role.cursor):
                loop.__exit__(kind, value, trace)


def name_context(name: str, context: Any) -> Any:
    """Give a loop the name of its `as` target."""
    if isinstance(context, (for_, roles_for)) and context.name == "i":
        context.name = name
    return context


# -- the rest -----------------------------------------------------------------------------------------------------


def break_() -> None:
    emit(Jump("break"))


def continue_() -> None:
    emit(Jump("continue"))


def return_() -> None:
    emit(Jump("return"))


def comment(text: str) -> None:
    """A comment line in the generated text."""
    emit(Comment(text))


def raw_stmt(text: str) -> None:
    """A statement taken literally; the language does not look inside."""
    emit(Raw(text))


@dataclass(frozen=True)
class Out:
    """An operand of `ch.asm` that the instruction writes."""

    variable: Name


def out(variable: Name) -> Out:
    _require_mutable(variable)
    return Out(variable)


def asm(template: str, /, **operands: Value | Out) -> None:
    """Inline PTX: `$name` is an operand (constraint letter from its type), `{name}` a static value put into the text."""
    static = {key: value for key, value in operands.items() if not isinstance(value, (Expr, Out)) and "{" + key + "}" in template}
    for key, value in static.items():
        template = template.replace("{" + key + "}", str(value))
    given = {key: value for key, value in operands.items() if key not in static}
    unused = [key for key in given if f"${key}" not in template]
    if unused:
        raise LangError(f"ch.asm: the template has no ${unused[0]}; its text is {template!r}.")
    outputs = tuple(key for key, value in given.items() if isinstance(value, Out))
    pairs = tuple((key, value.variable if isinstance(value, Out) else natural(value)) for key, value in given.items())
    emit(Asm(template, pairs, outputs))


def block_idx_x() -> Expr:
    return Builtin(ty.u32, "blockIdx.x")


def thread_idx_x() -> Expr:
    return Builtin(ty.u32, "threadIdx.x")


def block_dim_x() -> Expr:
    return Builtin(ty.u32, "blockDim.x")


def grid_dim_x() -> Expr:
    return Builtin(ty.u32, "gridDim.x")
