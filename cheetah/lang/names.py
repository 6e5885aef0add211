"""How device values keep the Python names that they are assigned to.

A function is rewritten in its assignments only: `name = value` becomes `name = bind("name", value)`, and `with loop as
name` tells the loop its name. Everything else is ordinary Python that runs while generating.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar

from cheetah.lang.binding import bind, bind_attribute, bind_each
from cheetah.lang.control import name_context
from cheetah.lang.errors import Location, SignatureError

P = ParamSpec("P")
R = TypeVar("R")

_VERBS: dict[str, Callable[..., Any]] = {
    "__bind": bind, "__bind_each": bind_each, "__bind_attribute": bind_attribute, "__name": name_context,
}  # fmt: skip

_STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases", "items")
"""Where a node has statements, handlers, cases and items of `with`."""


class _NameKeeper(ast.NodeTransformer):
    """`x = value` -> `x = __bind("x", value)`; `with c as x` -> `with __name("x", c) as x`; likewise for tuples.
    Expressions are gone through for `:=` alone, which has_walrus says are there."""

    def __init__(self, has_walrus: bool) -> None:
        self.has_walrus = has_walrus

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if self.has_walrus:
            return super().generic_visit(node)
        for name in _STATEMENTS:
            for statement in getattr(node, name, ()):
                self.visit(statement)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        target = next((item for item in node.targets if isinstance(item, ast.Name)), node.targets[0])
        if isinstance(target, ast.Name):
            node.value = _call("__bind", node.value, [ast.Constant(target.id)])
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and len(node.targets) == 1:
            owner = ast.Name(target.value.id, ast.Load())
            node.value = _call("__bind_attribute", node.value, [ast.Constant(target.attr), owner])
        elif isinstance(target, ast.Tuple) and not any(isinstance(item, ast.Starred) for item in target.elts):
            names = [ast.Constant(item.id if isinstance(item, ast.Name) else None) for item in target.elts]
            places = [ast.copy_location(name, node.value) for name in names]
            node.value = _call("__bind_each", node.value, [ast.Tuple([*places], ast.Load())])
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        self.generic_visit(node)
        if node.value is not None and isinstance(node.target, ast.Name):
            node.value = _call("__bind", node.value, [ast.Constant(node.target.id)])
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.NamedExpr:
        self.generic_visit(node)
        node.value = _call("__bind", node.value, [ast.Constant(node.target.id)])
        return node

    def visit_withitem(self, node: ast.withitem) -> ast.withitem:
        self.generic_visit(node)
        if isinstance(node.optional_vars, ast.Name):
            node.context_expr = _call("__name", node.context_expr, [ast.Constant(node.optional_vars.id)])
        return node


def _call(verb: str, value: ast.expr, before: list[ast.expr]) -> ast.Call:
    """`verb(*before, value)`, all of it where the value stands."""
    made = [ast.copy_location(one, value) for one in (ast.Name(verb, ast.Load()), *before)]
    return ast.copy_location(ast.Call(made[0], [*made[1:], value], []), value)


def keeping_names(function: Callable[P, R]) -> Callable[P, R]:
    """`function` recompiled so that device values keep the Python names they are assigned to.

    Globals, closure and defaults are the original's own; the verbs of the rewriting come in as further closure cells.
    """
    if hasattr(function, "__wrapped__"):
        raise SignatureError(
            f"{function.__name__} is decorated already: put `@ch.inline` or `@ch.kernel` directly above its `def`.",
            location_of(inspect.unwrap(function)),
        )
    assert isinstance(function, FunctionType)
    free = function.__code__.co_freevars
    code = _function_code(_rewritten(function), function, (*free, *_VERBS))
    cells = dict(zip(free, function.__closure__ or (), strict=True)) | {n: CellType(v) for n, v in _VERBS.items()}
    closure = tuple(cells[name] for name in code.co_freevars)
    rebuilt = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    result: Callable[P, R] = rebuilt
    return result


def _rewritten(function: FunctionType) -> ast.FunctionDef:
    """The function's definition with its assignments rewritten, at its own lines."""
    file, first_line = function.__code__.co_filename, function.__code__.co_firstlineno
    lines = linecache.getlines(file, function.__globals__)
    if not lines:
        raise SignatureError(f"{function.__name__} has no source to read: write it in a file.")
    last_line = _definitions(file, "".join(lines)).get(first_line)
    if last_line is None:
        raise SignatureError(f"{function.__name__} is no plain function: `@ch.inline` goes above a `def`.")
    text = "".join(lines[first_line - 1 : last_line])
    # Behind empty lines, so that its own are right. An indented definition is parsed inside of `if True:`, so that
    # strings over several lines stay what they are.
    nested = text[:1].isspace()
    body = ast.parse("\n" * (first_line - 1 - nested) + ("if True:\n" if nested else "") + text).body[0]
    definition = body.body[0] if isinstance(body, ast.If) else body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    _NameKeeper(":=" in text).visit(definition)
    return definition


@functools.lru_cache(maxsize=64)
def _definitions(file: str, text: str) -> dict[int, int]:
    """Of each `def` of a file, by the line on which it begins, that on which it ends. (`inspect` finds it by reading
    one token after the other, for each definition again, which took a third of the time to import the blocks.)"""
    found: dict[int, int] = {}
    waiting: list[ast.AST] = [ast.parse(text, file)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef):
            first_line = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found[first_line] = node.end_lineno or first_line
        for name in _STATEMENTS:
            waiting += getattr(node, name, ())
    return found


def _function_code(definition: ast.FunctionDef, original: FunctionType, free: tuple[str, ...]) -> CodeType:
    """The code of the definition, compiled inside a function whose variables are those that it closes over."""
    outer = ast.parse(f"def __outer({', '.join(free)}): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [definition]
    file, flags = original.__code__.co_filename, _future_flags(original)
    outer_code = compile(ast.Module([outer], []), file, "exec", flags=flags, dont_inherit=True)
    return _code_named(definition.name, _code_named("__outer", outer_code))


def _future_flags(original: FunctionType) -> int:
    """`from __future__` imports of the original's file."""
    import __future__

    known = [getattr(__future__, name).compiler_flag for name in __future__.all_feature_names]
    return sum(flag for flag in known if original.__code__.co_flags & flag)


def _code_named(name: str, code: CodeType) -> CodeType:
    return next(item for item in code.co_consts if isinstance(item, CodeType) and item.co_name == name)


def location_of(function: Callable[..., Any]) -> Location:
    """Where a function is defined."""
    return Location(function.__code__.co_filename, function.__code__.co_firstlineno)
