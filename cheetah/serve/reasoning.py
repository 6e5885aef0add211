"""What a model thinks before it answers, told beside the answer: what stands between <think> and </think> before it.

Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from cheetah.runtime.text.answer_parts import AnswerPart, Thought
from cheetah.serve.tools import CallForm, ToolParser

OPEN, CLOSE = "<think>", "</think>"

REASONING_PARSERS: Mapping[str, bool] = {"qwen3": False, "deepseek_r1": True}
"""By vLLM's names: whether a text without <think> begins with a thought, as where the chat template has opened it."""

HARMONY_REASONING = "openai_gptoss"
"""vLLM's name for what tells answers of several channels apart: see `runtime.text.harmony`."""


class _Place(Enum):
    BEFORE = auto()
    INSIDE = auto()
    JUST_BEHIND = auto()  # where line ends are passed over
    BEHIND = auto()


class Reasoning:
    """A parser that gives `Thought`s, and what follows them to another, `inner`."""

    def __init__(self, inner: ToolParser, begins_inside: bool) -> None:
        self._inner, self._begins_inside = inner, begins_inside
        self._place, self._held = _Place.BEFORE, ""

    @property
    def form(self) -> CallForm | None:
        return self._inner.form

    def feed(self, text: str) -> list[AnswerPart]:
        self._held += text
        if self._place is _Place.BEFORE and not self._has_begun():
            return []
        found: list[AnswerPart] = []
        if self._place is _Place.INSIDE:
            found += self._thought()
        if self._place is _Place.JUST_BEHIND:
            self._held = self._held.lstrip("\n")
            self._place = _Place.BEHIND if self._held else self._place
        if self._place is _Place.BEHIND:
            found += self._inner.feed(self._take_held())
        return found

    def finish(self) -> list[AnswerPart]:
        rest = self._take_held()
        is_thought = self._place is _Place.INSIDE or (self._place is _Place.BEFORE and self._begins_inside)
        return [*([Thought(rest)] if is_thought and rest else self._inner.feed(rest)), *self._inner.finish()]

    def _has_begun(self) -> bool:
        """Whether it is known what the text begins with."""
        begun = self._held.lstrip()
        if len(begun) < len(OPEN) and OPEN.startswith(begun):
            return False
        is_open = begun.startswith(OPEN)
        self._held = begun.removeprefix(OPEN) if is_open else self._held
        self._place = _Place.INSIDE if is_open or self._begins_inside else _Place.BEHIND
        return True

    def _thought(self) -> list[AnswerPart]:
        """What is held up to the thought's end, or to what may become it."""
        inside, closed, behind = self._held.partition(CLOSE)
        if closed:
            self._place, self._held = _Place.JUST_BEHIND, behind
        else:
            kept = next((n for n in range(len(CLOSE) - 1, 0, -1) if inside.endswith(CLOSE[:n])), 0)
            inside, self._held = inside[: len(inside) - kept], inside[len(inside) - kept :]
        return [Thought(inside)] if inside else []

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held
