"""Several kernels in one text, of which a variable says which runs: so bugs of one kernel cost one compilation.

Beside the functions of the kernel as it is stand those in which another differs, under names of their own, and the
kernel's own functions call them where the variable has the other's number. A function that exists in the other alone,
or that takes something else there, brings those that call it with it.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cheetah.package import Generated
from cheetah.tools.rig import Rig

VARIABLE = "CHEETAH_PLANTED"
SELECTOR = f"""
#include <cstdlib>
extern "C" {{ __attribute__((visibility("default"))) uint32_t cheetah_planted; }}
__attribute__((constructor, no_sanitize("thread"))) static void plant() {{
  if (const char* number = std::getenv("{VARIABLE}")) cheetah_planted = std::atoi(number);
}}
"""
FUNCTION = re.compile(r"^  (__device__ [^{]*?\b(\w+)\(([^{}]*)\) \{\n)(.*?^  \}\n)", re.M | re.S)
CONSTANT = re.compile(r"^((?:__device__ )?constexpr \w+ (\w+) .*;\n)", re.M)
RECORD = re.compile(r"^__device__ constexpr .*\n", re.M)
"""A constant of a structure, which stands behind that."""
COMMENT = re.compile(r"^ *//.*\n|^\n", re.M)


@dataclass(frozen=True)
class Item:
    """A constant of a kernel's text, or a function of its structure. head: what its users see of it."""

    head: str
    body: str = ""
    parameters: str = ""

    @property
    def arguments(self) -> str:
        """The function's own parameters as it would give them on."""
        given = re.split(r",\s+", self.parameters) if self.parameters else []
        return ", ".join(re.findall(r"\w+", re.sub(r"\)?\[.*", "", one))[-1] for one in given)

    def mentions(self, names: Iterable[str]) -> bool:
        return any(re.search(rf"\b{name}\b", self.body) for name in names)

    def text_in(self, number: int, names: Iterable[str]) -> str:
        """As it stands in another kernel, with the names of what stands there as well, but not those of members."""
        return re.sub(rf"(?<!\.)(?<!->)\b({'|'.join(names)})\b", rf"\1_in_{number}", self.head + self.body)


@dataclass(frozen=True)
class Text:
    """A kernel's own text. opening: what stands before it. rest: the structure, without functions and comments."""

    opening: str
    body: str
    constants: dict[str, Item]
    functions: dict[str, Item]
    rest: str

    @classmethod
    def of(cls, made: Generated) -> Text:
        head, end, body = made.text.partition("#endif\n")
        constants = {name: Item(line) for line, name in CONSTANT.findall(body)}
        functions = {name: Item(head, text, given) for head, name, given, text in FUNCTION.findall(body)}
        rest = COMMENT.sub("", CONSTANT.sub("", FUNCTION.sub("", body)))
        return cls(head + end, body, constants, functions, rest)

    @property
    def items(self) -> dict[str, Item]:
        return {**self.constants, **self.functions}

    def own(self, clean: Text) -> set[str]:
        """Which items differ from the clean kernel's, by name, with the users of those that look otherwise to them."""
        assert self.rest == clean.rest, "the structure differs"
        there = clean.items
        own = {name for name, item in self.items.items() if item != there.get(name)}
        assert own, "nothing differs"
        while True:
            told = [name for name in own if name not in there or there[name].head != self.items[name].head]
            users = {name for name, item in self.functions.items() if name not in own and item.mentions(told)}
            if not users:
                return own
            own |= users


def joined(clean: Generated, others: Sequence[Generated]) -> Generated:
    """`clean`, and each of the others where the variable has its number, from 1 on; those that are the same as `clean`
    have theirs too."""
    text = Text.of(clean)
    calls = {name: "" for name in text.functions}
    constants = functions = ""
    for number, other in ((number, Text.of(one)) for number, one in enumerate(others, 1) if one.text != clean.text):
        own = other.own(text)
        constants += "".join(item.text_in(number, own) for name, item in other.constants.items() if name in own)
        for name, item in other.functions.items():
            if name in own:
                functions += "  " + item.text_in(number, own)
                if name in calls and item.head == text.functions[name].head:
                    calls[name] += (
                        f"    if (cheetah_planted == {number}) return {name}_in_{number}({item.arguments});\n"
                    )
    body = FUNCTION.sub(lambda match: f"  {match[1]}{calls[match[2]]}{match[4]}", text.body)
    first = FUNCTION.search(body)
    assert first, "a kernel without functions"
    kernel = body.rindex("struct ", 0, first.start())
    records = "".join(RECORD.findall(constants))
    body = body[:kernel] + records + body[kernel : first.start()] + functions + body[first.start() :]
    return clean.with_text(text.opening + SELECTOR + RECORD.sub("", constants) + body)


@contextmanager
def chosen(rig: Rig, number: int) -> Iterator[Rig]:
    """That kernel of the joined ones runs; afterwards the first again, which is as it should be."""
    os.environ[VARIABLE] = str(number)  # for programs that are processes
    try:
        choose(rig, number)
        yield rig
    finally:
        del os.environ[VARIABLE]
        choose(rig, 0)


def choose(rig: Rig, number: int) -> None:
    """From now on that kernel runs, of programs in this process."""
    for kernel in rig.kernels.values():
        _place(kernel.program).value = number


def _place(program: Any) -> ctypes.c_uint32:
    """Where the variable of a program in this process lies."""
    library = getattr(program, "_library", None)
    return ctypes.c_uint32() if library is None else ctypes.c_uint32.in_dll(library, "cheetah_planted")
