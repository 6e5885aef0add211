"""Where statements go: the stack of open blocks, the names they bind, and the warp roles built side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from cheetah.lang import types as ty
from cheetah.lang.errors import Location, MissingWithError, NoKernelError, RoleError, ScopeError, here
from cheetah.lang.nodes import Expr, Name

if TYPE_CHECKING:
    from cheetah.lang.nodes import Constant, Function, Stmt

_reserved = set(
    # The words of C++ ...
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t char8_t class compl "
    "concept const const_cast consteval constexpr constinit continue co_await co_return co_yield decltype default "
    "delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline int long "
    "mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register "
    "reinterpret_cast requires return short signed sizeof static static_assert static_cast struct switch template this "
    "thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor "
    "xor_eq "
    # ... the types of the generated text ...
    "uint8_t uint16_t uint32_t uint64_t int32_t int64_t bf16 uint2 uint4 float2 float4 "
    # ... what CUDA defines, and macros of C's headers.
    "threadIdx blockIdx blockDim gridDim warpSize main assert errno NULL NAN INFINITY isnan isinf signbit".split()
)


def reserve(name: str) -> None:
    """Keep a name of the generated text from being given to a value: a primitive must stay callable."""
    _reserved.add(name)


def is_reserved(name: str) -> bool:
    return name in _reserved


class Opening(Protocol):
    """A control statement that was called; it must be entered with `with` before anything else is emitted."""

    verb: str
    location: Location


@dataclass(eq=False)
class Scope:
    """One open or closed block of the program: its statements and the names bound in it."""

    title: str
    role: str | None = None
    is_loop: bool = False
    is_function: bool = False
    is_whole: bool = False
    """The outermost scope of the kernel or of a role: what it binds, functions use as members of the kernel."""
    location: Location = field(default_factory=here)
    statements: list[Stmt] = field(default_factory=list, repr=False)
    names: set[str] = field(default_factory=set, repr=False)
    guests: list[set[str]] = field(default_factory=list, repr=False)
    """Names used by the roles that see this scope: a later name here must not be hidden by one of them."""
    decision: bool | None = None
    """The last static condition that was asked here; None if it has its `else_`."""
    _decided_at: int = -1

    def decide(self, decision: bool | None) -> None:
        """A static condition was asked here and its body is complete."""
        self.decision, self._decided_at = decision, len(self.statements)

    def insert(self, place: int, statement: Stmt) -> None:
        """Put a statement before others that are here already."""
        self.statements.insert(place, statement)
        self._decided_at += place <= self._decided_at

    def taken(self) -> tuple[Stmt, ...]:
        """The statements of a block that is closed, which keeps none: names hold their scopes, and a program that its
        scopes held would stay until somebody collects garbage."""
        statements = tuple(self.statements)
        self.statements.clear()
        return statements

    @property
    def is_decided(self) -> bool:
        """Whether what was said last here is a static condition, its body or its `else_`."""
        return self._decided_at == len(self.statements)


class Cursor:
    """A place where statements are appended: a stack of open scopes. A role's cursor hangs below its kernel's."""

    def __init__(self, scopes: list[Scope], parent: Cursor | None = None) -> None:
        self.scopes = scopes
        self.inherited = len(parent.scopes) if parent else 0
        self.root: Cursor = parent.root if parent else self
        self.used: set[str] = set()
        self.bound: set[str] = self.root.bound if parent else set()
        """Every name that was ever bound in the program outside of functions, in any role."""
        self.functions: dict[str, Function] = self.root.functions if parent else {}
        """The program's functions, by their text without the name."""
        self.function_names: set[str] = self.root.function_names if parent else set()
        self.members: dict[str, ty.Type] = self.root.members if parent else {}
        """What functions use of the kernel's and its roles' outermost names."""
        self.constants: dict[str, Constant] = self.root.constants if parent else {}
        """The program's named constants, in the order in which they were first made."""
        self.wholes: dict[tuple[str, str], Name] = self.root.wholes if parent else {}
        """The constants of the whole kernel that were asked for where they were needed, by name and value."""
        self.unentered: list[Opening] = []
        self.at_end: list[Callable[[], None]] = []

    @property
    def top(self) -> Scope:
        return self.scopes[-1]

    def is_taken(self, name: str) -> bool:
        """Whether a value bound here cannot have this name."""
        in_roles = len(self.scopes) > self.inherited and any(name in used for used in self.top.guests)
        is_global = name in self.function_names or name in self.constants
        return is_reserved(name) or in_roles or is_global or any(name in scope.names for scope in self.scopes)

    def unique(self, wanted: str) -> str:
        """`wanted`, or `wanted_2`, `wanted_3`, ... where an open scope has that name already."""
        return unique_in([self], wanted)

    def require_visible(self, nodes: Iterable[Expr], location: Location | None = None) -> None:
        """ScopeError where one of the expressions is a name that is not bound in an open scope."""
        seen = set(self.scopes)
        for node in nodes:
            if isinstance(node, Name) and seen.isdisjoint(node.scopes):
                raise ScopeError(self._invisible(node), location)

    def require_entered(self) -> None:
        """MissingWithError where a control statement was called and not entered."""
        if self.root.unentered:
            opening = self.root.unentered.pop()
            verb = opening.verb
            raise MissingWithError(
                f"`{verb}` was called but opens no block: write `with {verb}:` and indent what belongs to it.",
                opening.location,
            )

    def close(self) -> None:
        """The kernel ends here: run the checks that wait for its end."""
        self.require_entered()
        for check in self.at_end:
            check()

    def _invisible(self, name: Name) -> str:
        bound = name.scopes[0]
        mine = next((scope.role for scope in reversed(self.scopes) if scope.role), None)
        if bound.role is not None and bound.role != mine:
            return (
                f"`{name.name}` was bound by the {bound.role} warps ({name.location}) and is used by the "
                f"{mine or 'common'} code: roles share only what both compute; "
                "compute it in both, or pass it through shared memory."
            )
        return (
            f"`{name.name}` was bound in {bound.title} ({name.location}), which is closed here; "
            "bind it outside, or use `ch.var`."
        )


_cursors: list[Cursor] = []


def current() -> Cursor:
    """The cursor that statements go to now."""
    if not _cursors:
        raise NoKernelError(
            "a device statement outside of a kernel: call it from a function decorated with `@ch.kernel`."
        )
    return _cursors[-1]


def unique_in(cursors: Iterable[Cursor], wanted: str) -> str:
    """`wanted`, or `wanted_2`, `wanted_3`, ...: the first that no cursor has taken."""
    listed = list(cursors)
    name, count = wanted, 1
    while any(cursor.is_taken(name) for cursor in listed):
        count += 1
        name = f"{wanted}_{count}"
    return name


def emit(statement: Stmt) -> None:
    """Append a statement at the current place, after checking that it sees every name it uses."""
    cursor = current()
    cursor.require_entered()
    cursor.require_visible(statement.nodes, statement.location)
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
def block(title: str, *, is_loop: bool = False, is_function: bool = False) -> Iterator[Scope]:
    """Open a scope at the current place and collect what is emitted into it."""
    cursor = current()
    scope = Scope(title, cursor.top.role, is_loop, is_function)
    cursor.scopes.append(scope)
    try:
        yield scope
    finally:
        removed = cursor.scopes.pop()
        assert removed is scope


def declare_name(wanted: str, type_: ty.Type, *, mutable: bool = False, scope: Scope | None = None) -> Name:
    """Reserve a C name in a scope (the innermost open one) and give the expression that stands for it."""
    cursor = current()
    target = scope or cursor.top
    return Name(type_, take_name(wanted, target), (target,), mutable, wanted)


def take_name(wanted: str, scope: Scope) -> str:
    """A name free at the current place, taken in `scope`."""
    cursor = current()
    name = cursor.unique(wanted)
    scope.names.add(name)
    cursor.used.add(name)
    if not is_in_function():  # a function's names are its own, and keep clear of what it calls
        cursor.bound.add(name)
    return name


def is_in_function() -> bool:
    """Whether statements go to a function of the program now."""
    return any(scope.is_function for scope in current().scopes)


class Role:
    """A warp role whose program grows beside others': `with role:` continues it where it was left.

    Names bound inside belong to the role; loops stay open between visits (see `roles_for`). `role.emit_here()` places
    the whole program, once, where the role's warps are to run it.
    """

    def __init__(self, name: str) -> None:
        parent = current()
        self.name = name
        self.location = here()
        self.scope = Scope(f"the {name} role", name, is_whole=True)
        self.cursor = Cursor([*parent.scopes, self.scope], parent)
        self.placed: Location | None = None
        for scope in parent.scopes:
            scope.guests.append(self.cursor.used)
        parent.root.at_end.append(self._require_placed)

    def __enter__(self) -> Role:
        self._require_open("continued")
        _cursors.append(self.cursor)
        return self

    def __exit__(self, *error: object) -> None:
        _cursors.pop()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was emitted in it."""
        return not self.scope.statements

    def emit_here(self) -> None:
        """Place the role's whole program at the current point of the kernel."""
        self._require_open("placed")
        cursor = current()
        cursor.require_entered()
        if self.cursor.top is not self.scope:
            raise RoleError(f"the {self.name} role is placed while {self.cursor.top.title} is still open in it.")
        clash = sorted(cursor.top.names & self.scope.names)
        if clash:
            raise RoleError(
                f"the {self.name} role binds `{clash[0]}`, as does {cursor.top.title}, where it is placed: "
                "place it in a block of its own, e.g. `with ch.if_(...): role.emit_here()`."
            )
        cursor.top.names |= self.scope.names
        cursor.top.statements.extend(self.scope.taken())
        self.placed = here()

    def _require_open(self, deed: str) -> None:
        if self.placed is not None:
            raise RoleError(f"the {self.name} role is {deed} after it was placed in the kernel ({self.placed}).")

    def _require_placed(self) -> None:
        if self.placed is None and self.scope.statements:
            raise RoleError(
                f"the {self.name} role has a program that no warp runs: call `emit_here()` where its warps are.",
                self.location,
            )
