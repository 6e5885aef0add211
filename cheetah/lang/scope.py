"""Where statements go: the stack of open blocks, the names they bind, and the warp roles that are built side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from cheetah.lang import types as ty
from cheetah.lang.errors import Location, NoKernelError, ScopeError, here
from cheetah.lang.expressions import Expr, Name, walk

if TYPE_CHECKING:
    from cheetah.lang.statements import Stmt


@dataclass(eq=False)
class Scope:
    """One open or closed block of the program: its statements and the names bound in it."""

    title: str
    role: str | None = None
    location: Location = field(default_factory=here)
    statements: list[Stmt] = field(default_factory=list)
    names: set[str] = field(default_factory=set)


class Cursor:
    """A place where statements are appended: a stack of open scopes."""

    def __init__(self, scopes: list[Scope]) -> None:
        self.scopes = scopes

    @property
    def top(self) -> Scope:
        return self.scopes[-1]

    def unique(self, wanted: str) -> str:
        """`wanted`, or `wanted_2`, `wanted_3`, ... where an open scope has that name already."""
        taken = set().union(*(scope.names for scope in self.scopes)) | _RESERVED
        name, count = wanted, 1
        while name in taken:
            count += 1
            name = f"{wanted}_{count}"
        return name

    def require_visible(self, expression: Expr, location: Location | None = None) -> None:
        for node in walk(expression):
            if isinstance(node, Name) and not any(scope in self.scopes for scope in node.scopes):
                raise ScopeError(self._invisible(node), location)

    def _invisible(self, name: Name) -> str:
        bound = name.scopes[0]
        mine = next((scope.role for scope in reversed(self.scopes) if scope.role), None)
        if bound.role is not None and bound.role != mine:
            return (
                f"`{name.name}` was bound by the {bound.role} warps ({name.location}) and is used by the {mine or 'common'} code: "
                "roles share only what both compute; compute it in both, or pass it through shared memory."
            )
        return f"`{name.name}` was bound in {bound.title} ({name.location}), which is closed here; bind it outside, or use `ch.var`."


_RESERVED = frozenset("if else for while do int float double bool char long short unsigned signed const return break continue "
                      "switch case default void struct class register auto this new delete asm volatile static extern".split())  # fmt: skip
_cursors: list[Cursor] = []


def current() -> Cursor:
    """The cursor that statements go to now."""
    if not _cursors:
        raise NoKernelError("a device statement outside of a kernel: call it from a function decorated with `@ch.kernel`.")
    return _cursors[-1]


def emit(statement: Stmt) -> None:
    """Append a statement at the current place, after checking that it sees every name it uses."""
    cursor = current()
    for expression in statement.expressions():
        cursor.require_visible(expression, statement.location)
    cursor.top.statements.append(statement)


@contextmanager
def at(cursor: Cursor) -> Iterator[Cursor]:
    """Send the statements of the `with` body to `cursor`."""
    _cursors.append(cursor)
    try:
        yield cursor
    finally:
        _cursors.pop()


@contextmanager
def block(title: str, role: str | None = None) -> Iterator[Scope]:
    """Open a scope at the current place and collect what is emitted into it."""
    cursor = current()
    scope = Scope(title, role if role is not None else cursor.top.role)
    cursor.scopes.append(scope)
    try:
        yield scope
    finally:
        removed = cursor.scopes.pop()
        assert removed is scope


def declare_name(wanted: str, type_: ty.Type, *, mutable: bool = False, scope: Scope | None = None) -> Name:
    """Reserve a C name in a scope (the innermost open one) and give the expression that stands for it."""
    cursor = current()
    name = cursor.unique(wanted)
    target = scope or cursor.top
    target.names.add(name)
    return Name(type_, name, (target,), mutable)


class Role:
    """A warp role whose program grows beside others': `with role:` continues it where it was left.

    Names bound inside belong to the role; loops stay open between visits (see `roles_for`).
    """

    def __init__(self, name: str) -> None:
        parent = current()
        self.name = name
        self.scope = Scope(f"the {name} role", name)
        self.cursor = Cursor([*parent.scopes, self.scope])

    def __enter__(self) -> Role:
        _cursors.append(self.cursor)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        _cursors.pop()

    def emit_here(self) -> None:
        """Place the role's whole program at the current point of the kernel."""
        current().top.statements.extend(self.scope.statements)
