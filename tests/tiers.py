"""Which points of a property `make test` looks at, and which are left to `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(cases: Iterable[Any], exhaustive: Collection[Any]) -> list[Any]:
    """The cases of a parametrisation in their order, with those of `exhaustive` marked so. A tuple has several
    arguments. AssertionError for one of `exhaustive` that is no case, and where nothing is left."""
    listed = list(cases)
    unknown = [case for case in exhaustive if case not in listed]
    assert not unknown, f"no such case: {unknown}"
    assert len(exhaustive) < len(listed), "nothing is left for `make test`"
    return [_marked(case) if case in exhaustive else case for case in listed]


def _marked(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.exhaustive)
