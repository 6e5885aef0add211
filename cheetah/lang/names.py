"""How device values keep the Python names that they are assigned to.

A function is rewritten in its assignments only: `name = value` becomes `name = bind("name", value)`, and `with loop as
name` tells the loop its name. Everything else is ordinary Python that runs while generating.
"""

from __future__ import annotations

import ast
import inspect
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


class _NameKeeper(ast.NodeTransformer):
    """`x = value` -> `x = __bind("x", value)`; `with c as x` -> `with __name("x", c) as x`; likewise for tuples."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        target = next((item for item in node.targets if isinstance(item, ast.Name)), node.targets[0])
        if isinstance(target, ast.Name):
            node.value = _call("__bind", ast.Constant(target.id), node.value)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and len(node.targets) == 1:
            owner = ast.Name(target.value.id, ast.Load())
            node.value = _call("__bind_attribute", ast.Constant(target.attr), owner, node.value)
        elif isinstance(target, ast.Tuple) and not any(isinstance(item, ast.Starred) for item in target.elts):
            names = [ast.Constant(item.id if isinstance(item, ast.Name) else None) for item in target.elts]
            node.value = _call("__bind_each", ast.Tuple(list(names), ast.Load()), node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        self.generic_visit(node)
        if node.value is not None and isinstance(node.target, ast.Name):
            node.value = _call("__bind", ast.Constant(node.target.id), node.value)
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.NamedExpr:
        self.generic_visit(node)
        node.value = _call("__bind", ast.Constant(node.target.id), node.value)
        return node

    def visit_withitem(self, node: ast.withitem) -> ast.withitem:
        self.generic_visit(node)
        if isinstance(node.optional_vars, ast.Name):
            node.context_expr = _call("__name", ast.Constant(node.optional_vars.id), node.context_expr)
        return node


def _call(verb: str, *arguments: ast.expr) -> ast.Call:
    call = ast.Call(ast.Name(verb, ast.Load()), list(arguments), [])
    return ast.copy_location(call, arguments[-1])


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
    try:
        lines, first_line = inspect.getsourcelines(function)
    except OSError:
        raise SignatureError(f"{function.__name__} has no source to read: write it in a file.") from None
    # An indented definition is parsed inside of `if True:`, so that strings over several lines stay what they are.
    nested = lines[0][:1].isspace()
    body = ast.parse(("if True:\n" if nested else "") + "".join(lines)).body[0]
    definition = body.body[0] if isinstance(body, ast.If) else body
    if not isinstance(definition, ast.FunctionDef):
        raise SignatureError(f"{function.__name__} is no plain function: `@ch.inline` goes above a `def`.")
    ast.increment_lineno(definition, first_line - (2 if nested else 1))
    definition.decorator_list = []
    _NameKeeper().visit(definition)
    return definition


def _function_code(definition: ast.FunctionDef, original: FunctionType, free: tuple[str, ...]) -> CodeType:
    """The code of the definition, compiled inside a function whose variables are those that it closes over."""
    outer = ast.parse(f"def __outer({', '.join(free)}): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [definition]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    file, flags = original.__code__.co_filename, _future_flags(original)
    outer_code = compile(module, file, "exec", flags=flags, dont_inherit=True)
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
