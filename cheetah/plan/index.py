"""Index arithmetic that is written once and evaluated twice: on Python ints and on device expressions.

A function that takes an `Index` uses only + - * // % on it and never asks for its truth value, so the kernel
generator can call it with expressions and the tests can exhaust it with ints. Decisions (`if`) look at static fields
alone.
"""

from typing import Any, TypeAlias

Index: TypeAlias = Any
"""An int, or a device expression with + - * // % overloaded; ints in give an int out."""


def ceil_div(count: int, size: int) -> int:
    """How many pieces of `size` cover `count`."""
    return count // size if count % size == 0 else -(-count // size)


def round_up(count: int, size: int) -> int:
    """The smallest multiple of `size` that is not below `count`."""
    return count if count % size == 0 else ceil_div(count, size) * size
