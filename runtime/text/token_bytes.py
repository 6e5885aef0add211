"""Which bytes each token adds to a text, read from the `decoder` entry of `tokenizer.json`.

Knows the decoders that Llama checkpoints use: ByteLevel (Llama 3), the Llama 2 sequence (Replace, ByteFallback, Fuse,
Strip), Metaspace, and none. Anything else is refused by name. Knows nothing of ids, special tokens or UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from cheetah.errors import CheetahError

Rule = Callable[[str, bool], str | bytes]
"""(token or what is left of it, whether it is the text's first token) -> text, or bytes when no later rule applies."""

TOKEN_CHARACTERS = 4096
"""Most characters of a token before a rule of the decoder: the longest of published models have 256."""
MOST_RULES = 16

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_level_alphabet() -> Mapping[str, int]:
    """GPT-2's alphabet: the printable character that stands for each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class TokenBytes:
    """The bytes of a token, and the characters that a text loses at its very start.

    `stripped` is a byte that is removed up to `strip_count` times from the start of the whole text (Llama 2 writes a
    space before the first word and takes it away again when decoding).
    """

    def __init__(self, decoder: Mapping[str, Any] | None):
        self._rules: list[Rule] = []
        self._fused = False
        self.stripped = b" "
        self.strip_count = 0
        if decoder is None:
            self._rules.append(lambda token, first: token if first else " " + token)
        else:
            self._add(decoder)

    def bytes_of(self, token: str, first: bool) -> bytes:
        """The bytes of one token; `first` when no token of the text came before it."""
        value: str | bytes = token
        for rule in self._rules:
            if isinstance(value, bytes):
                return value
            _check_length(value)
            value = rule(value, first)
        if isinstance(value, bytes):
            return value
        _check_length(value)
        return value.encode("utf-8", "replace")

    def _add(self, decoder: Mapping[str, Any]) -> None:
        kind = str(decoder.get("type"))
        add = getattr(self, f"_add_{kind.lower()}", None)
        if add is None:
            raise CheetahError(
                f"tokenizer.json: decoder {kind!r} is not supported (ByteLevel, Metaspace, ByteFallback, Replace, "
                "Fuse, Strip and sequences of them are): pass tokenizer=False and use token ids"
            )
        add(decoder)
        if len(self._rules) > MOST_RULES:
            raise CheetahError(f"tokenizer.json: its decoder has more than {MOST_RULES} rules: pass tokenizer=False")

    def _add_sequence(self, decoder: Mapping[str, Any]) -> None:
        for part in decoder["decoders"]:
            self._add(part)

    def _add_bytelevel(self, decoder: Mapping[str, Any]) -> None:
        self._rules.append(lambda token, first: _from_byte_level(token))

    def _add_bytefallback(self, decoder: Mapping[str, Any]) -> None:
        self._rules.append(lambda token, first: _from_byte_token(token))

    def _add_fuse(self, decoder: Mapping[str, Any]) -> None:
        self._fused = True

    def _add_replace(self, decoder: Mapping[str, Any]) -> None:
        pattern, content = decoder["pattern"].get("String"), decoder["content"]
        if pattern is None or self._fused:
            raise CheetahError("tokenizer.json: decoder 'Replace' is supported for plain strings, before 'Fuse' only")
        if len(content) > TOKEN_CHARACTERS:
            raise CheetahError(f"tokenizer.json: decoder 'Replace' puts in {len(content)} characters")
        self._rules.append(lambda token, first: token.replace(pattern, content))

    def _add_metaspace(self, decoder: Mapping[str, Any]) -> None:
        mark = decoder.get("replacement", "\u2581")
        prepended = decoder.get("prepend_scheme", "always") != "never" and decoder.get("add_prefix_space", True)
        self._rules.append(lambda token, first: token.replace(mark, "" if first and prepended else " "))

    def _add_strip(self, decoder: Mapping[str, Any]) -> None:
        if not self._fused or decoder.get("stop") or len(decoder["content"].encode()) != 1:
            raise CheetahError("tokenizer.json: decoder 'Strip' is supported at the start of a fused text only")
        self.stripped, self.strip_count = decoder["content"].encode(), int(decoder["start"])


def _check_length(token: str) -> None:
    """Replacements may lengthen a token again and again."""
    if len(token) > TOKEN_CHARACTERS:
        raise CheetahError(f"tokenizer.json: its decoder makes {len(token)} characters of one token: at most 4096")


def _from_byte_level(token: str) -> bytes:
    """The bytes that a ByteLevel token stands for; a token outside the alphabet (an added one) stands for itself."""
    try:
        return bytes(map(byte_level_alphabet().__getitem__, token))
    except KeyError:
        return token.encode("utf-8", "replace")


def _from_byte_token(token: str) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match.group(1), 16)]) if match else token
