"""`@ch.kernel` and `@ch.inline`: the functions that emit device code, with Python's names kept.

The decorators rewrite one thing only: `name = value` becomes `name = bind("name", value)`, and `with loop as name`
tells the loop its name. Everything else is ordinary Python that runs while generating.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from cheetah.lang import types as ty
from cheetah.lang.errors import LangError
from cheetah.lang.expressions import Name
from cheetah.lang.scope import Cursor, Scope, at
from cheetah.lang.statements import Stmt, bind, name_context

P = ParamSpec("P")
R = TypeVar("R")


class Params:
    """The ordered parameters of a kernel: `ch.Params(n=ty.u32, x=ty.ptr_mut(ty.i32))`."""

    def __init__(self, **types: ty.Type) -> None:
        self.types: Mapping[str, ty.Type] = dict(types)

    def items(self) -> Iterator[tuple[str, ty.Type]]:
        yield from self.types.items()


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: its name, parameters and statements. `max_threads` sets the launch bounds and C linkage."""

    name: str
    params: Params
    body: tuple[Stmt, ...]
    max_threads: int | None = None


def kernel(params: Params, *, name: str | None = None, max_threads: int | None = None) -> Callable[[Callable[..., Any]], Kernel]:
    """Run the decorated function once, with a device name for each parameter, and keep what it emits."""

    def build(function: Callable[..., Any]) -> Kernel:
        scope = Scope(f"kernel {function.__name__}")
        arguments = {}
        for parameter, type_ in params.items():
            scope.names.add(parameter)
            arguments[parameter] = Name(type_, parameter, (scope,))
        _check_signature(function, params)
        with at(Cursor([scope])):
            keeping_names(function)(**arguments)
        return Kernel(name or function.__name__, params, tuple(scope.statements), max_threads)

    return build


def _check_signature(function: Callable[..., Any], params: Params) -> None:
    wanted, given = list(inspect.signature(function).parameters), list(params.types)
    if wanted != given:
        raise LangError(f"kernel {function.__name__} takes {wanted}, but ch.Params declares {given}; name them alike, in one order.")


def inline(function: Callable[P, R]) -> Callable[P, R]:
    """A function that emits its statements where it is called; its names are made unique there."""
    named = keeping_names(function)
    return wraps(function)(named)


class _NameKeeper(ast.NodeTransformer):
    """`x = value` -> `x = __bind("x", value)`; `with c as x` -> `with __name("x", c) as x`."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            node.value = self._call("__bind", node.targets[0].id, node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        self.generic_visit(node)
        if node.value is not None and isinstance(node.target, ast.Name):
            node.value = self._call("__bind", node.target.id, node.value)
        return node

    def visit_withitem(self, node: ast.withitem) -> ast.withitem:
        self.generic_visit(node)
        if isinstance(node.optional_vars, ast.Name):
            node.context_expr = self._call("__name", node.optional_vars.id, node.context_expr)
        return node

    @staticmethod
    def _call(function: str, name: str, value: ast.expr) -> ast.Call:
        call = ast.Call(ast.Name(function, ast.Load()), [ast.Constant(name), value], [])
        return ast.copy_location(call, value)


def keeping_names(function: Callable[P, R]) -> Callable[P, R]:
    """`function` recompiled so that device values keep the Python names they are assigned to."""
    lines, first_line = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef))
    definition.decorator_list = []
    _forget_defaults(definition.args)
    _NameKeeper().visit(tree)
    # Free variables become parameters of an enclosing function, so that their present values stay reachable.
    free = function.__code__.co_freevars
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    outer = ast.parse(f"def __outer({', '.join(free)}):\n  return {definition.name}").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body.insert(0, definition)
    module = ast.Module([outer], [])
    ast.increment_lineno(definition, first_line - 1)
    ast.fix_missing_locations(module)
    namespace = _LayeredGlobals(function.__globals__)
    exec(compile(module, function.__code__.co_filename, "exec"), namespace)
    rebuilt: Callable[P, R] = namespace["__outer"](*cells)
    rebuilt.__defaults__ = function.__defaults__  # type: ignore[attr-defined]
    rebuilt.__kwdefaults__ = function.__kwdefaults__  # type: ignore[attr-defined]
    return rebuilt


def _forget_defaults(arguments: ast.arguments) -> None:
    """The original's default values are attached to the rebuilt function; evaluating them again could fail."""
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if value is None else ast.Constant(None) for value in arguments.kw_defaults]


class _LayeredGlobals(dict[str, Any]):
    """The function's own module globals, seen live, plus the two verbs of the rewriting."""

    def __init__(self, beneath: dict[str, Any]) -> None:
        super().__init__(__bind=bind, __name=name_context, __builtins__=beneath.get("__builtins__", __builtins__))
        self.beneath = beneath

    def __missing__(self, key: str) -> Any:
        return self.beneath[key]
