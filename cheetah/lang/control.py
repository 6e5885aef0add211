"""Control on the device: `with ch.if_(...)`, loops, jumps, and loops that several warp roles share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from cheetah.lang import types as ty
from cheetah.lang.binding import const, is_fresh
from cheetah.lang.errors import ControlError, MissingWithError, RangeError, TypeMixError, here
from cheetah.lang.nodes import Expr, For, If, Jump, Literal, Name, Value, While, statements_in, walk
from cheetah.lang.operators import lift
from cheetah.lang.scope import Role, Scope, at, block, current, declare_name, emit, is_in_function, unique_in
from cheetah.lang.types import Type

T = TypeVar("T")


class Block:
    """A `with` statement of the language; using it any other way is refused."""

    verb = "?"

    def __init__(self) -> None:
        self.location = here()
        self._stack = ExitStack()
        current().require_entered()
        current().root.unentered.append(self)

    def __bool__(self) -> NoReturn:
        self._forget()
        raise MissingWithError(
            f"`{self.verb}` opens a block on the device: write `with {self.verb}:`, not `if {self.verb}:`."
        )

    def __iter__(self) -> Iterator[NoReturn]:
        self._forget()
        raise MissingWithError(
            f"`{self.verb}` is a loop on the device: write `with {self.verb} as i:`, not `for i in {self.verb}:`."
        )

    def _forget(self) -> None:
        unentered = current().root.unentered
        if self in unentered:
            unentered.remove(self)

    def _open(self, title: str, *, is_loop: bool = False, is_function: bool = False) -> Scope:
        self._forget()
        return self._stack.enter_context(block(title, is_loop=is_loop, is_function=is_function))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            current().require_entered()
        self._stack.close()
        if kind is None:
            self._finish()

    def _finish(self) -> None:
        """Emit the statement, whose body is complete."""
        raise NotImplementedError


class if_(Block):
    """`with ch.if_(condition):`, optionally followed by `with ch.else_():`.

    A condition that is known while generating, True or False, is not asked on the device: the body stands there by
    itself, or not at all.
    """

    verb = "ch.if_(...)"

    def __init__(self, condition: Value) -> None:
        if isinstance(condition, Literal) and condition.type == ty.boolean:
            condition = bool(condition.value)
        if not isinstance(condition, bool) and not (isinstance(condition, Expr) and condition.type == ty.boolean):
            raise TypeMixError(f"ch.if_ needs a condition, not `{condition}`; compare it, e.g. `{condition} != 0`.")
        super().__init__()
        self.condition = condition

    def __enter__(self) -> None:
        if isinstance(self.condition, Expr):
            current().require_visible(walk(self.condition), self.location)
        if self.condition is True:
            self._forget()
        else:
            self.scope = self._open("an if_ block")

    def _finish(self) -> None:
        if isinstance(self.condition, Expr):
            emit(If(self.condition, self.scope.taken(), location=self.location))
        else:
            current().top.decide(self.condition)


class else_(Block):
    """`with ch.else_():` directly after an `if_` block. Behind one with a static condition it is as static."""

    verb = "ch.else_()"

    def __enter__(self) -> None:
        self.branch = self._branch()
        if self.branch is False:
            self._forget()
        else:
            self.scope = self._open("an else_ block")

    def _branch(self) -> If | bool:
        """The statement that this belongs to, or the static condition."""
        top = current().top
        last = top.statements[-1] if top.statements else None
        if top.is_decided:
            if top.decision is not None:
                return top.decision
        elif isinstance(last, If) and not last.otherwise:
            return last
        self._forget()
        raise ControlError("ch.else_() must directly follow a `with ch.if_(...)` block of the same level.")

    def _finish(self) -> None:
        if isinstance(self.branch, If):
            current().top.statements[-1] = replace(self.branch, otherwise=self.scope.taken())
        else:
            current().top.decide(None)


class for_(Block):
    """`with ch.for_(stop) as i:` or `(start, stop[, step])`; counts upwards.

    The counter has the type of the bounds (u32 where all are Python numbers). `unroll=True` asks the compiler to unroll
    it whole, a number that many times. Of a loop of one round, known while generating, the body stands there by itself
    and the counter is a number, unless the body leaves it by a jump.
    """

    verb = "ch.for_(...)"

    def __init__(
        self, *bounds: Value, unroll: bool | int = False, type: ty.Scalar | None = None, name: str = "i"
    ) -> None:
        if not 1 <= len(bounds) <= 3:
            raise ControlError(f"ch.for_ takes (stop), (start, stop) or (start, stop, step), not {len(bounds)} bounds.")
        start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        kinds = [bound.type for bound in bounds if isinstance(bound, Expr)]
        self.type = type or next((kind for kind in kinds if isinstance(kind, ty.Scalar)), ty.u32)
        if not self.type.is_integer:
            raise TypeMixError(f"ch.for_ counts integers; its bounds have type {self.type}.")
        self.start, self.stop, self.step = (lift(value, self.type) for value in (start, stop, step))
        if isinstance(self.step, Literal) and self.step.value <= 0:
            raise RangeError(f"ch.for_ counts upwards; a step of {self.step.value} would never end.")
        super().__init__()
        self.unroll = unroll
        self.name = name

    def __enter__(self) -> Any:
        for bound in (self.start, self.stop, self.step):
            current().require_visible(walk(bound), self.location)
        self.scope = self._open(f"the loop over {self.name}", is_loop=True)
        self.counter = declare_name(self.name, self.type)
        return self.start if self._is_one_round else self.counter

    @property
    def _is_one_round(self) -> bool:
        bounds = [bound.value for bound in (self.start, self.stop, self.step) if isinstance(bound, Literal)]
        return len(bounds) == 3 and len(range(*map(int, bounds))) == 1

    def _finish(self) -> None:
        outer, body = current().top, self.scope.taken()
        if self._is_one_round and not any(isinstance(statement, Jump) for statement in statements_in(body)):
            outer.statements += body
            outer.names |= self.scope.names - {self.counter.name}
            outer.decide(None)  # an `else_` that follows belongs to nothing inside
            return
        parts = (self.counter, self.start, self.stop, self.step, body, self.unroll)
        # Appended, not emitted: the statement names its own counter, which nothing outside of it sees.
        outer.statements.append(For(*parts, location=self.location))


class _counted(for_):
    """A loop that has a counter also where it has one round: roles share that."""

    _is_one_round = False


class while_(Block):
    """`with ch.while_(condition):`; the condition is evaluated again before each round."""

    verb = "ch.while_(...)"

    def __init__(self, condition: Value) -> None:
        self.condition = lift(condition, ty.boolean)
        for node in walk(self.condition):
            if isinstance(node, Name) and is_fresh(node):
                raise ControlError(
                    "the condition of ch.while_ calls a primitive, which runs once, before the loop: "
                    "write `with ch.while_(True):`, call it inside, and leave with `ch.break_()`."
                )
        super().__init__()

    def __enter__(self) -> None:
        current().require_visible(walk(self.condition), self.location)
        self.scope = self._open("a while_ block", is_loop=True)

    def _finish(self) -> None:
        emit(While(self.condition, self.scope.taken(), location=self.location))


class roles_for(Block):
    """The same loop in several roles: `with ch.roles_for(roles, stop) as layer:`; each of them sees the counter."""

    verb = "ch.roles_for(...)"

    def __init__(self, roles: tuple[Role, ...], *bounds: Value, name: str = "i") -> None:
        super().__init__()
        self.roles, self.bounds, self.name = tuple(roles), bounds, name

    def __enter__(self) -> Name:
        self._forget()
        name = unique_in([role.cursor for role in self.roles], self.name)
        self.loops: list[for_] = []
        counters: list[Name] = []
        for role in self.roles:
            with role:
                self.loops.append(_counted(*self.bounds, name=name))
                counters.append(self.loops[-1].__enter__())
        return replace(counters[0], scopes=tuple(scope for counter in counters for scope in counter.scopes))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for role, loop in zip(self.roles, self.loops, strict=True):
            with at(role.cursor):
                loop.__exit__(kind, value, trace)


class roles_if(Block):
    """The same condition in several roles: `with ch.roles_if(roles, condition):`, which each of them sees, perhaps
    followed by `with ch.roles_else(roles):`."""

    verb = "ch.roles_if(...)"

    def __init__(self, roles: tuple[Role, ...], condition: Value) -> None:
        super().__init__()
        self.roles, self.condition = tuple(roles), condition

    def __enter__(self) -> None:
        self._forget()
        self.branches: list[Block] = []
        for role in self.roles:
            with role:
                self.branches.append(self._branch())
                self.branches[-1].__enter__()  # type: ignore[attr-defined]

    def _branch(self) -> Block:
        return if_(self.condition)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for role, branch in zip(self.roles, self.branches, strict=True):
            with at(role.cursor):
                branch.__exit__(kind, value, trace)


class roles_else(roles_if):
    """`with ch.roles_else(roles):` directly after `with ch.roles_if(roles, ...)`."""

    verb = "ch.roles_else(...)"

    def __init__(self, roles: tuple[Role, ...]) -> None:
        super().__init__(roles, True)

    def _branch(self) -> Block:
        return else_()


def roles_const(roles: tuple[Role, ...], type_: Type, value: Value | Callable[[], Value], name: str) -> Name:
    """A named constant in several roles, each of which works it out; what it comes of must be seen by all of them, or
    is called in each."""
    free = unique_in([role.cursor for role in roles], name)
    bound: list[Name] = []
    for role in roles:
        with role:
            made = const(type_, value() if callable(value) else value, name=free)
            assert isinstance(made, Name)
            bound.append(made)
    return replace(bound[0], scopes=tuple(scope for one in bound for scope in one.scopes))


def name_context(name: str, context: T) -> T:
    """Give a loop the name of its `as` target."""
    if isinstance(context, (for_, roles_for)) and context.name == "i":
        context.name = name
    return context


def break_() -> None:
    """Leave the innermost loop."""
    _jump("break")


def continue_() -> None:
    """Start the innermost loop's next round."""
    _jump("continue")


def _jump(word: str) -> None:
    for scope in reversed(current().scopes):
        if scope.is_loop:
            return emit(Jump(word))
        if scope.is_function:
            raise ControlError(f"ch.{word}_() in {scope.title}, outside of its loops: it cannot leave its caller's.")
    raise ControlError(f"ch.{word}_() outside of a loop.")


def return_() -> None:
    """End this thread's run of the kernel."""
    if is_in_function():
        raise ControlError("ch.return_() ends the kernel, not a function: give the caller a value to decide by.")
    emit(Jump("return"))
