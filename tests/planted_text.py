"""Bugs planted in a kernel's text."""

from __future__ import annotations

import re


def planted(text: str, right: str, wrong: str) -> str:
    """The text with `wrong` wherever `right` stands, however deep its lines are indented."""
    pattern = r"\n *".join(re.escape(line.strip()) for line in right.split("\n"))
    changed, count = re.subn(pattern, lambda _: wrong, text)
    assert count, right
    return changed
