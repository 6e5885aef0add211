"""Texts that are longer than anybody wants their ids: refused, or cut, before all of them is encoded.

Such a text is encoded piece by piece until there are enough ids. A piece has a few more than in company, where a word
is cut at its ends; so many are left uncounted. Knows nothing of tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cheetah.errors import CheetahError

PIECE = 1 << 16
"""Characters that are encoded at a time: some 20 ms."""
UNCOUNTED = 64
"""Ids of each piece."""

TextPart = tuple[str, bool]
"""A text, and whether what reads like a special token in it is plain text."""
Encode = Callable[[str, bool], Sequence[int]]
"""The ids of a text, with nothing added."""


class TooLongError(CheetahError):
    """A text with more ids than are taken."""


def refuse_longer(parts: Sequence[TextPart], most: int, encode: Encode) -> None:
    """TooLongError for parts of text with surely more than `most` ids together."""
    if sum(len(text) for text, _ in parts) <= PIECE:
        return  # quickly encoded, and counted
    found = 0
    for text, is_plain in parts:
        for start in range(0, len(text), PIECE):
            found += _count(text[start : start + PIECE], text, is_plain, encode)
            if found > most:
                characters = sum(len(text) for text, _ in parts)
                raise TooLongError(f"{characters} characters are more than {most} tokens")


def ending(parts: Sequence[TextPart], last: int, encode: Encode) -> list[TextPart]:
    """The end of parts of text, with surely at least `last` ids if they have so many."""
    if sum(len(text) for text, _ in parts) <= PIECE:
        return list(parts)
    found: list[TextPart] = []
    for text, is_plain in reversed(parts):
        if last <= 0:
            break
        start = len(text)
        for piece in _backwards(text):
            start -= len(piece)
            last -= _count(piece, text, is_plain, encode)
            if last <= 0:
                break
        found.append((text[start:], is_plain))
    return found[::-1]


def _count(piece: str, text: str, is_plain: bool, encode: Encode) -> int:
    """Ids that a piece surely has in its text."""
    ids = len(encode(piece, is_plain))
    return ids if piece == text else max(0, ids - UNCOUNTED)


def _backwards(text: str) -> Iterator[str]:
    for end in range(len(text), 0, -PIECE):
        yield text[max(0, end - PIECE) : end]
