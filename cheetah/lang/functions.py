"""`@ch.inline`: functions that emit device code where they are called, with Python's names kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from cheetah.lang.names import keeping_names

P = ParamSpec("P")
R = TypeVar("R")


def inline(function: Callable[P, R]) -> Callable[P, R]:
    """A function that emits its statements where it is called; its names are made unique there."""
    return wraps(function)(keeping_names(function))
