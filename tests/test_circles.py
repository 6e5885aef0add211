"""No module imports itself by way of others: not when it is loaded, not inside a function, not for types alone.

So every module can be understood, and tested, with what stands below it.
"""

from graphlib import CycleError, TopologicalSorter

import pytest

from tests.test_layers import imports_of, module_files

Graph = dict[str, set[str]]

# Modules that name each other in annotations only (under TYPE_CHECKING). A kind of value is known by its type and its
# scope, types cast values, and `meaning` has the slots by which the operations of all of them are found.
OF_TYPES_ALONE = {f"cheetah.lang.{module}" for module in ("meaning", "nodes", "scope", "types")}


def import_graph(sources: dict[str, str]) -> Graph:
    """For each module those that it imports, wherever the import stands; what a package gives is its __init__'s."""

    def module_of(name: str) -> str | None:
        while name and name not in sources and f"{name}.__init__" not in sources:
            name = name.rpartition(".")[0]
        return name if name in sources else f"{name}.__init__" if name else None

    found = {module: {module_of(name) for _, name in imports_of(module, source)} for module, source in sources.items()}
    return {module: {name for name in names if name and name != module} for module, names in found.items()}


def taken_as_one(graph: Graph, group: set[str], name: str) -> Graph:
    """The graph with the modules of a group as one."""
    merged: Graph = {}
    for module, imported in graph.items():
        target = name if module in group else module
        merged.setdefault(target, set()).update(name if one in group else one for one in imported)
        merged[target].discard(target)
    return merged


def circle(graph: Graph) -> list[str]:
    """A circle, if there is one, from a module to itself."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def sources_of_all() -> dict[str, str]:
    return {module: path.read_text() for module, path in module_files().items()}


def without_types_alone(source: str) -> str:
    """The module without what stands under `if TYPE_CHECKING:`."""
    lines, skipping = [], False
    for line in source.splitlines():
        skipping = line == "if TYPE_CHECKING:" or (skipping and (line.startswith("    ") or not line))
        lines.append("" if skipping else line)
    return "\n".join(lines)


def test_no_circle_of_modules() -> None:
    graph = taken_as_one(import_graph(sources_of_all()), OF_TYPES_ALONE, "the language's values")
    assert not circle(graph), " -> ".join(circle(graph))


@pytest.mark.slow
def test_those_that_name_each_other_in_annotations_do_not_when_they_run() -> None:
    sources = {module: without_types_alone(source) for module, source in sources_of_all().items()}
    graph = {module: imported & OF_TYPES_ALONE for module, imported in import_graph(sources).items()}
    assert not circle(graph), " -> ".join(circle(graph))


@pytest.mark.parametrize(
    "source",
    [
        "from cheetah.plan.b import B",
        "from cheetah.plan import b",
        "def f():\n    from cheetah.plan import b",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from .b import B",
        "import cheetah.plan",
    ],
)
def test_a_circle_is_seen(source: str) -> None:
    sources = {"cheetah.plan.a": source, "cheetah.plan.b": "from cheetah.plan.a import A"}
    sources["cheetah.plan.__init__"] = "from cheetah.plan.b import B"
    assert "cheetah.plan.a" in circle(import_graph(sources))
    assert not circle(import_graph({**sources, "cheetah.plan.a": "import math"}))
