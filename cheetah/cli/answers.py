"""Answers as they come: what is for the reader on stdout, what the model thinks before on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cheetah.runtime import StreamPiece

DIM, PLAIN = "\033[2m", "\033[0m"


class AnswerText:
    """Writes the pieces of an answer. Thoughts are dim on a terminal, and end with a line of their own."""

    def __init__(self) -> None:
        self._has_thought = False
        self._marks = (DIM, PLAIN) if sys.stderr.isatty() else ("", "")

    def write(self, piece: StreamPiece) -> str:
        """Writes a piece; its text, or its ids where there is no tokenizer."""
        shown = piece.text if piece.text is not None else "".join(f"{token} " for token in piece.token_ids)
        if piece.reasoning:
            dim, plain = self._marks
            sys.stderr.write(f"{dim}{piece.reasoning}{plain}")
            sys.stderr.flush()
            self._has_thought = True
        if shown or piece.finished:
            self.end_thought()
            sys.stdout.write(shown)
            sys.stdout.flush()
        return shown

    def end_thought(self) -> None:
        """Nothing more will be thought."""
        if self._has_thought:
            sys.stderr.write("\n")
            self._has_thought = False
