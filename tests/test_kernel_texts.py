"""The committed kernels as texts to be read: numbers have names, and functions are called by what they do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "kernels_generated"
KERNELS = sorted(FOLDER.glob("*.cu"))
SMALL = 100
"""A number up to this is read as it stands: lanes, bits, rows of a tile."""
LITERAL = re.compile(r"(?<![\w.])(0x[0-9a-fA-F]+|\d+)(?:u|ull|ll)?(?![\w.])")
FUNCTION = re.compile(r"__forceinline__ [\w:*<> ]+?[ *&](\w+)\(")


def own_lines(kernel: Path) -> list[str]:
    """The lines of a kernel's structure: behind primitives, constants and records, without comments."""
    _, start, structure = kernel.read_text().partition("#endif\n\n")
    assert start, f"{kernel.name} has no primitives"
    return [line.partition("//")[0] for line in structure.splitlines() if "constexpr" not in line]


def literals_of(line: str) -> list[int]:
    return [int(digits, 0) for digits in LITERAL.findall(line)]


def test_literals_are_found() -> None:
    assert literals_of("x[0x1F] = n * 4096u + 1.5f - 2e3f + p_12 + 128;") == [31, 4096, 128]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.stem)
def test_numbers_in_bodies_have_names(kernel: Path) -> None:
    bare = [
        line.strip()
        for line in own_lines(kernel)
        if "__launch_bounds__" not in line and max(literals_of(line), default=0) > SMALL
    ]
    assert not bare


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.stem)
def test_functions_are_called_by_what_they_do(kernel: Path) -> None:
    names = FUNCTION.findall("\n".join(own_lines(kernel)))
    assert names and len(names) == len(set(names))
    assert not [name for name in names if re.sub(r"_\d+$", "", name) in {*names} - {name}]
