"""What the nodes' Python operators mean: slots that the modules above the nodes fill.

`a + b` of two nodes must work where the nodes are defined, and what it gives is written in terms of the nodes. So types
and nodes call these slots, `operators`, `binding` and `printer` define them, and imports run one way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cheetah.lang.nodes import Expr, Value
    from cheetah.lang.types import Type


class Meaning:
    """One slot an operation; importing `cheetah.lang` fills them all."""

    binary: Callable[[str, object, object], Expr]
    unary: Callable[[str, Expr], Expr]
    subscript: Callable[[Expr, Value], Expr]
    cast: Callable[[Type, Value], Expr]
    store: Callable[[Expr, Value], None]
    text: Callable[[Expr], str]
    node_attributes: frozenset[str]
    """What the members of a structure cannot be called, because the nodes themselves have it."""


meaning = Meaning()
