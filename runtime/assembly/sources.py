"""Which of our own sources a module stands on: itself, and what it imports, and so on. Read from the sources' text.

So a hash over the sources that decide about something cannot leave one out that somebody adds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = "cheetah"


def sources_of(module: str, root: Path) -> dict[str, Path]:
    """The modules that `module` imports, directly or not, with itself, by name in order. root: the package's folder.

    Imports inside functions count. A package's own module belongs to each of its modules; the one at the top is not
    followed: it imports on demand, for its users, what is named elsewhere.
    """
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file_of(name, root)
        if path is None or name in found:
            continue
        found[name] = path
        if name != PACKAGE:
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            waiting += [name.rpartition(".")[0], *_imports(ast.parse(path.read_bytes()), package)]
    return dict(sorted(found.items()))


def _file_of(module: str, root: Path) -> Path | None:
    """The source of a module of ours; None for any other name."""
    top, *parts = module.split(".")
    if top != PACKAGE:
        return None
    place = root.joinpath(*parts)
    candidates = (place / "__init__.py", place.with_suffix(".py")) if parts else (place / "__init__.py",)
    return next((path for path in candidates if path.is_file()), None)


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Full names of what is imported; of `from a import b` both a and a.b, which may be a module or not."""
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All statements, with those inside of others: imports are among them, and expressions are nine nodes of ten."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, name, ()))
