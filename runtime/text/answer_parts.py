"""What an answer is made of, where more is told apart than its text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolCall:
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Thought:
    """Text that is no part of the answer."""

    text: str


AnswerPart = str | ToolCall | Thought
