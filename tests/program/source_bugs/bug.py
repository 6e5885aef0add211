"""A bug planted in the source of a building block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[3] / "cheetah"


@dataclass(frozen=True)
class SourceBug:
    """right: text of the module at `path`, which stands there once; wrong: what stands there instead. model: whose
    kernels have it; drafts: that they verify. harmless: why nothing can go wrong; missed: why the check misses it."""

    kind: str
    name: str
    path: str
    right: str
    wrong: str
    model: str = "demo"
    drafts: int = 0
    harmless: str = ""
    missed: str = ""

    @property
    def file(self) -> Path:
        return (SOURCES / self.path).resolve()

    def planted(self) -> str:
        """The module with the bug; AssertionError where the text to be changed is not there."""
        text = self.file.read_text()
        assert text.count(self.right) == 1, f"{self.name}: {self.path} has {text.count(self.right)} of {self.right!r}"
        return text.replace(self.right, self.wrong)
