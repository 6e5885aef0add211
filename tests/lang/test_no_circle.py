"""No module of the language needs another that needs it, not even inside a function; only types may look both ways."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import cheetah.lang

FOLDER = Path(cheetah.lang.__file__).parent


def needed_modules(tree: ast.AST) -> Iterator[str]:
    """What a module imports of the language wherever it runs: everything outside `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "cheetah.lang":
            yield from (f"cheetah.lang.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cheetah.lang."):
            yield node.module
        yield from needed_modules(node)


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    return {name: set(needed_modules(ast.parse(source))) & sources.keys() for name, source in sources.items()}


def sources() -> dict[str, str]:
    paths = [path for path in FOLDER.rglob("*.py") if path != FOLDER / "__init__.py"]
    names = [".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return {f"cheetah.lang.{name}": path.read_text() for name, path in zip(names, paths, strict=True)}


def test_the_language_has_no_circle() -> None:
    order = list(TopologicalSorter(graph(sources())).static_order())
    assert order.index("cheetah.lang.types") < order.index("cheetah.lang.nodes") < order.index("cheetah.lang.operators")


def test_a_circle_inside_a_function_is_seen() -> None:
    planted = {
        **sources(),
        "cheetah.lang.types": "def f():\n    from cheetah.lang.operators import cast",
    }
    with pytest.raises(CycleError):
        TopologicalSorter(graph(planted)).prepare()
