"""From token ids to text, piece by piece, without a broken character and without a leaked stop string.

Every piece is valid UTF-8, and the pieces together equal `Tokenizer.decode` of all ids (cut at the stop string, if one
was met). A token is never decoded alone: its bytes go to an incremental UTF-8 decoder that holds an incomplete
character back; U+FFFD stands for invalid bytes only, and for an incomplete character at the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class TextDecoder(Protocol):
    """Gives the bytes of the next token of one text."""

    def feed(self, token_id: int) -> bytes: ...


class StopStrings:
    """Holds back what may become a stop string, and cuts the text at the first one that is complete.

    First is the one whose end comes first; of several that end together, the longest. The result does not depend on
    how the text was cut into pieces.
    """

    def __init__(self, stops: Iterable[str] = (), include: bool = False):
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is now safe to show."""
        if not self._stops:
            return text
        self._held += text
        start, end = self._first_match()
        if end:
            self.matched = self._held[start:end]
            shown, self._held = self._held[: end if self._include else start], ""
            return shown
        keep = self._length_held()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def pass_over(self, text: str) -> str:
        """The text, and what was held back, without looking for stop strings in either."""
        return self.finish() + text

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self) -> tuple[int, int]:
        """(start, end) of the match that ends first, (0, 0) if there is none."""
        found = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        end, start = min(found, default=(0, 0))
        return start, end

    def _length_held(self) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """The text of one completion while it is made.

    `feed` takes a token id and gives the text that it makes safe to show, often "". Once `stopped` names the stop
    string that was met, nothing more may be fed. `finish` gives the rest. Stop strings are not looked for in the text
    of the first `min_tokens - 1` tokens.
    """

    def __init__(self, decoder: TextDecoder, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0):
        self._decoder = decoder
        self._to_pass = min_tokens - 1
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stop, include_stop)

    @property
    def stopped(self) -> str | None:
        """The stop string that was met, if one was."""
        return self._stops.matched

    def feed(self, token_id: int) -> str:
        """The text that is safe to show after one more token."""
        assert self.stopped is None, "a token was fed after the stop string"
        text = self._characters.decode(self._decoder.feed(token_id))
        self._to_pass -= 1
        return self._stops.pass_over(text) if self._to_pass >= 0 else self._stops.feed(text)

    def finish(self) -> str:
        """The end of the text: what was held back; an incomplete character as U+FFFD. May meet a stop string."""
        if self.stopped is not None:
            return ""
        shown = self._stops.feed(self._characters.decode(b"", final=True))
        return shown if self.stopped is not None else shown + self._stops.finish()
