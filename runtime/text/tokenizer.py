"""Text to token ids and back, over the `tokenizers` library.

Encodes as Hugging Face does, with exactly one beginning-of-text token where the checkpoint asks for one. Decoding goes
token by token through bytes (`token_bytes`), so that a streamed text equals the one-shot decode. Knows nothing of
models, devices or chat templates. Everything else in the runtime works on ids alone when there is no tokenizer.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cheetah import untrusted
from cheetah.errors import CheetahError
from cheetah.models.plausible import LARGEST_ID
from cheetah.printable import shown
from cheetah.runtime.text.encoders import open_encoder
from cheetah.runtime.text.long_texts import TextPart, ending, refuse_longer
from cheetah.runtime.text.marks import Marks
from cheetah.runtime.text.token_bytes import TokenBytes
from cheetah.untrusted import parse_json, read_text

TOKENIZER_BYTES = 40_000_000
"""Most bytes of tokenizer.json: that of Gemma 3 has 33,000,000."""

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A checkpoint's tokenizer.

    `special_tokens` maps bos_token, eos_token, ... to their text, as far as the checkpoint names them.
    `bos_id` is the id of the beginning-of-text token, None if the tokenizer has none.
    """

    def __init__(
        self,
        description: str,
        config: Mapping[str, Any] | None = None,
        special_tokens_map: Mapping[str, Any] | None = None,
        bos_token_id: int | None = None,
    ):
        """`description`: text of tokenizer.json. `bos_token_id`: from config.json, used if nothing names bos_token."""
        config = config or {}
        described = parse_json(description.encode("utf-8", "surrogatepass"), "tokenizer.json", CheetahError)
        self._encoder = open_encoder(description, described)
        self._bytes = TokenBytes(described.get("decoder"))
        self.special_tokens = _special_tokens(config, special_tokens_map or {})
        self.bos_id = self._id_of_bos(bos_token_id)
        self._adds_bos = _adds_bos(config)

    @classmethod
    def from_files(cls, files: Mapping[str, Path], bos_token_id: int | None = None) -> Tokenizer | None:
        """The tokenizer of a checkpoint, from its files by name; None if there is no tokenizer.json."""
        if "tokenizer.json" not in files:
            return None
        return cls(
            read_text(files["tokenizer.json"], TOKENIZER_BYTES),
            read_json(files.get("tokenizer_config.json")),
            read_json(files.get("special_tokens_map.json")),
            bos_token_id,
        )

    @property
    def size(self) -> int:
        """One more than the highest id that the tokenizer can give."""
        return self._encoder.size

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None, last: int | None = None
    ) -> list[int]:
        """The ids of a text.

        With `add_special_tokens` the beginning-of-text token stands first where the checkpoint wants it, and never
        twice, even if the text itself starts with it. Without (for the output of a chat template) nothing is added.
        most: TooLongError, soon, for a text with many more ids. last: no more than so many last ids are wanted; of a
        long text not many more are made.
        """
        _refuse_surrogates(text, "the text")
        ids = [
            token
            for part, _ in self._bounded([(text, False)], most, last)
            for token in self._encoder.encode(part, add_special_tokens)
        ]
        return self._with_one_bos(ids) if add_special_tokens else ids

    def encode_conversation(
        self, text: str, marks: Marks, most: int | None = None, last: int | None = None
    ) -> list[int]:
        """The ids of a rendered conversation, whose messages have `marks` where they read like special tokens: these
        are encoded as text. most, last: as of `encode`."""
        _refuse_surrogates(text, "the text")
        parts = self._bounded([*marks.parts(text)], most, last)
        return [token for part, is_plain in parts for token in self._encoder.encode(part, False, is_plain)]

    def tokens(self) -> Iterator[str | None]:
        """Every token by its id, as the vocabulary writes it; None for an id without one."""
        return map(self._encoder.token_of, range(self.size))

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it; None if there is none."""
        return self._encoder.id_of(token)

    @property
    def special_texts(self) -> frozenset[str]:
        """What special tokens look like in a text."""
        return frozenset(text for token in self._encoder.special_ids if (text := self._encoder.token_of(token)))

    def decode(self, ids: Iterable[int], after: Sequence[int] = (), skip_special_tokens: bool = True) -> str:
        """The text of ids, without special tokens unless they are wanted; invalid UTF-8 becomes U+FFFD.

        `after`: the ids that come before them; their text is not given, but a space between the two is kept where the
        decoder would strip it from the start of a text. Equals `tokenizers`' own decode, with one exception: in a run
        of byte-fallback tokens that is not valid UTF-8, the valid characters survive (it replaces the whole run).
        """
        decoder = self.text_decoder(after, skip_special_tokens)
        return codecs.decode(b"".join(decoder.feed(token) for token in ids), "utf-8", "replace")

    def text_decoder(self, after: Sequence[int] = (), skip_special_tokens: bool = True) -> TokenDecoder:
        """A decoder for one text that follows the ids `after`, for `TextStream`."""
        decoder = TokenDecoder(self, skip_special_tokens)
        for token in after:
            if not decoder.is_at_start:  # a prompt has many more
                break
            decoder.feed(token)
        return decoder

    def token_bytes(self, token_id: int, first: bool = False, skip_special_tokens: bool = False) -> bytes | None:
        """The bytes of a token, which is the `first` of a text or not; None if it has no text: unknown to the
        tokenizer, or special where these are skipped."""
        token, is_special = self._encoder.token_of(token_id), token_id in self._encoder.special_ids
        if token is None or (is_special and skip_special_tokens):
            return None
        return token.encode("utf-8", "replace") if is_special else self._bytes.bytes_of(token, first)

    def token_text(self, token_id: int) -> str:
        """The text of a token by itself, "" if it has none; what is no whole character is U+FFFD."""
        return (self.token_bytes(token_id) or b"").decode("utf-8", "replace")

    @property
    def stripped_at_start(self) -> tuple[bytes, int]:
        """The byte that is removed from the start of a text, and how often at most."""
        return self._bytes.stripped, self._bytes.strip_count

    def _bounded(self, parts: list[TextPart], most: int | None, last: int | None) -> list[TextPart]:
        def ids_of(text: str, is_plain: bool) -> list[int]:
            return self._encoder.encode(text, False, is_plain)

        if last is not None:
            parts = ending(parts, last, ids_of)
        if most is not None:
            refuse_longer(parts, most, ids_of)
        return parts

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is None:
            return ids
        body = ids
        while body and body[0] == self.bos_id:
            body = body[1:]
        wanted = len(body) < len(ids) if self._adds_bos is None else self._adds_bos or self._text_starts_with_bos(ids)
        return [self.bos_id, *body] if wanted else body

    def _text_starts_with_bos(self, ids: list[int]) -> bool:
        """Whether the text itself started with the token: there is one more than the post-processor adds."""
        assert self.bos_id is not None
        added = self._encoder.encode("", add_special_tokens=True).count(self.bos_id)
        return ids[added : added + 1] == [self.bos_id]

    def _id_of_bos(self, from_config: int | None) -> int | None:
        named = self.special_tokens.get("bos_token")
        if named is not None:
            return self._encoder.id_of(named)
        if from_config is not None:
            if not 0 <= from_config <= LARGEST_ID:
                raise CheetahError(f"config.json: bos_token_id = {shown(from_config)}: must be from 0 to {LARGEST_ID}")
            token = self._encoder.token_of(from_config)
            if token is None:
                return None
            self.special_tokens["bos_token"] = token
        return from_config


class TokenDecoder:
    """The bytes of one text, token by token; keeps what depends on the start of the text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._first = True
        self._stripped, self._to_strip = tokenizer.stripped_at_start

    @property
    def is_at_start(self) -> bool:
        """Whether the bytes of the next token depend on those before it."""
        return self._first or self._to_strip > 0

    def feed(self, token_id: int) -> bytes:
        """The bytes that this token adds to the text."""
        found = self._tokenizer.token_bytes(token_id, self._first, self._skip_special_tokens)
        if found is None:
            return b""
        self._first = False
        while self._to_strip and found.startswith(self._stripped):
            found, self._to_strip = found[1:], self._to_strip - 1
        if found:
            self._to_strip = 0
        return found


def _refuse_surrogates(text: str, what: str) -> None:
    """A message, a template's output, a prompt or a file may hold one; no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        place = f"{text[problem.start]!r} at character {problem.start}"
        raise CheetahError(f"{what} has a lone surrogate, {place}, which is no Unicode text: remove it") from None


def read_json(path: Path | None) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no file."""
    return {} if path is None else untrusted.read_json(path)


def _adds_bos(config: Mapping[str, Any]) -> bool | None:
    """Whether tokenizer_config.json asks for a beginning-of-text token; None if the post-processor decides."""
    if isinstance(config.get("add_bos_token"), bool):
        return bool(config["add_bos_token"])
    return True if config.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast") else None


def _special_tokens(config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_NAMES:
        token = config.get(name) or special_tokens_map.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            _refuse_surrogates(text, f"{name} of tokenizer_config.json or special_tokens_map.json")
            found[name] = text
    return found
