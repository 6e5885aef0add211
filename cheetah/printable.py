"""Text that a terminal may be given. What a checkpoint, a cache or a manifest holds is never printed as it is.

Knows nothing of ours: the base of our errors stands on it, so that no message needs to remember.
"""

from __future__ import annotations

import math
import re
import reprlib

MESSAGE_CHARACTERS = 20_000
"""Most characters of one message: room for a compiler's log, not for a file."""

# Control characters but line end and tab (escape sequences begin with one), lone surrogates (which no stream takes),
# and what reorders or hides the characters around it.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_LEGIBLE_DIGITS = 60


def printable(text: str, most: int = MESSAGE_CHARACTERS) -> str:
    """`text` with harmful characters as Python would write them (`\\x1b`), and what is longer than `most` cut off."""
    shown = text if len(text) <= most else f"{text[:most]}... ({len(text) - most} more characters)"
    return _HARMFUL.sub(lambda match: repr(match[0])[1:-1], shown)


def shown(value: object) -> str:
    """`value` as Python writes it, on one short line: long texts, lists and numbers are abridged."""
    return printable(_ABRIDGED.repr(value), 400)


def shown_name(name: str) -> str:
    """A name that a file gave, as `shown` but without quotes."""
    return shown(name)[1:-1]


class _Abridged(reprlib.Repr):
    """Enough of a value to find it by."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 8
        self.maxstring = self.maxother = 120

    def repr_int(self, x: int, level: int) -> str:
        digits = int(abs(x).bit_length() * math.log10(2)) + 1  # Python refuses to write more than 4300 of them
        return repr(x) if digits <= _LEGIBLE_DIGITS else f"an integer of about {digits} digits"


_ABRIDGED = _Abridged()
