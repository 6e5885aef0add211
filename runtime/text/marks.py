"""Text of messages that reads like a special token stays text.

A chat template writes special tokens around what people say, and the tokenizer finds them again wherever they stand in
the rendered text: a user who wrote <|eot_id|> into a message would end the turn, and could go on in another role. So
what reads like one is replaced by a mark before the template sees it. Behind the template, text between special tokens
that has a mark is encoded as nothing but text. A rendered text without marks is encoded whole, as everywhere.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from cheetah.errors import CheetahError

NUMBER_DIGITS = 6
MOST = 200_000
"""Marks of a conversation, more than a context has tokens: each takes some microseconds, and a message of 8 MB has room
for a million."""
SEARCHED = 1 << 16
"""Characters that are searched at a time: no other thread runs meanwhile, and a search may take 1 us a character."""


class Marks:
    """The marks of one conversation: digits alone, which templates leave as they are, and which nobody can guess.

    special: the texts of the tokenizer's special tokens. CheetahError from `hide` where more than MOST would be needed.
    """

    def __init__(self, special: Collection[str]) -> None:
        self._special = sorted(special, key=lambda text: (-len(text), text))
        self._numbers = {text: number for number, text in enumerate(self._special)}
        self._any_special = re.compile("|".join(map(re.escape, self._special)) or r"(?!)")
        self._longest = max(map(len, self._special), default=0)
        self._left = MOST
        self._secret = f"{secrets.randbelow(10**20):020}"
        self._any_mark = re.compile(rf"{self._secret}(\d{{{NUMBER_DIGITS}}})")

    def hide(self, value: Any) -> Any:
        """A value of JSON's kinds, with marks in all its texts in place of what reads like a special token.
        CheetahError where it is nested too deeply."""
        try:
            return self._hide(value)
        except RecursionError:
            raise CheetahError("a message or a variable of the chat template is nested too deeply") from None

    def reveal(self, text: str) -> str:
        """The text with what the marks stand for."""
        return self._any_mark.sub(lambda mark: self._special[int(mark[1])], text)

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """A rendered text in parts, revealed, and whether each is encoded as text alone: those between two special
        tokens that have marks."""
        begun = 0
        for place in self._between_special_tokens(text):
            if self._any_mark.search(text, place.start, place.stop):
                if begun < place.start:
                    yield text[begun : place.start], False
                yield self.reveal(text[place.start : place.stop]), True
                begun = place.stop
        if begun < len(text):
            yield text[begun:], False

    def _hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self._hide(name): self._hide(entry) for name, entry in value.items()}
        return [*map(self._hide, value)] if isinstance(value, list | tuple) else value

    def _between_special_tokens(self, text: str) -> Iterator[slice]:
        begun = 0
        for token in self._special_tokens(text):
            yield slice(begun, token.start())
            begun = token.end()
        yield slice(begun, len(text))

    def _special_tokens(self, text: str) -> Iterator[re.Match[str]]:
        place = 0
        while place < len(text):
            end = place + SEARCHED
            found = self._any_special.search(text, place, end + self._longest)  # whole, if it begins before the end
            if found is not None and found.start() < end:
                yield found
                place = found.end()
            else:
                place = end

    def _marked(self, text: str) -> str:
        parts, begun = list[str](), 0
        for found in self._special_tokens(text):
            parts += text[begun : found.start()], f"{self._secret}{self._numbers[found[0]]:0{NUMBER_DIGITS}}"
            begun, self._left = found.end(), self._left - 1
            if self._left < 0:
                raise CheetahError(f"a conversation has more than {MOST} texts that read like special tokens")
        return "".join([*parts, text[begun:]])
