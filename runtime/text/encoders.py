"""The `tokenizers` library behind one small interface: in this process, or in a guarded one.

Which of the two follows from the rules that tokenizer.json holds (`tokenizer_rules`): those of published models are
harmless and run here; any other may do what it likes with a process of its own, within limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol, TypeVar

from cheetah.errors import CheetahError
from cheetah.models.plausible import LARGEST_ID
from cheetah.runtime.text.guarded_process import GuardedProcess, Limits
from cheetah.runtime.text.tokenizer_rules import unusual_rule

LIMITS = Limits(5.0, 512_000_000, 4_000_000)
_Result = TypeVar("_Result")


class Encoder(Protocol):
    """A text's ids, and what each id is. `special_ids`: those that decoding leaves out. `size`: the highest id + 1.
    is_plain: what reads like a special token is encoded as the text that it is."""

    special_ids: frozenset[int]
    size: int

    def encode(self, text: str, add_special_tokens: bool, is_plain: bool = False) -> list[int]: ...

    def token_of(self, token_id: int) -> str | None: ...

    def id_of(self, token: str) -> int | None: ...


def open_encoder(text: str, description: Mapping[str, Any]) -> Encoder:
    """The encoder that the text of a tokenizer.json describes; `description` is its JSON object.

    CheetahError where the library cannot read it, where it passes a limit, or has no vocabulary.
    """
    model = description.get("model")
    if isinstance(model, Mapping) and not model.get("vocab"):
        raise CheetahError("tokenizer.json: model.vocab is empty: no text has tokens in it; download the file again")
    encoder: Encoder = LibraryEncoder(text) if unusual_rule(description) is None else GuardedEncoder(text)
    if encoder.size > LARGEST_ID:
        raise CheetahError(f"tokenizer.json: its ids end at {encoder.size - 1}: expected ids below 2**31")
    return encoder


class LibraryEncoder:
    """In this process."""

    def __init__(self, text: str) -> None:
        self._description = text
        self._library = _read(text)
        added = self._library.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.size = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool, is_plain: bool = False) -> list[int]:
        library = self._plain_library if is_plain else self._library

        def encoded() -> list[int]:
            # Of a batch, also of one text, other threads may run meanwhile; `encode` keeps Python's lock.
            ids: list[int] = library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return ids

        return _reported("tokenizer.json: its rules fail on this text", encoded)

    def token_of(self, token_id: int) -> str | None:
        token: str | None = self._library.id_to_token(token_id) if 0 <= token_id <= LARGEST_ID else None
        return token

    def id_of(self, token: str) -> int | None:
        found: int | None = self._library.token_to_id(token)
        return found

    @cached_property
    def _plain_library(self) -> Any:
        """Another one: what it takes for special is a setting, and several threads encode at a time."""
        library = _read(self._description)
        library.encode_special_tokens = True
        return library


def _read(text: str) -> Any:
    import tokenizers

    read = tokenizers.Tokenizer.from_str
    library = _reported("tokenizer.json: the tokenizers library cannot read it", lambda: read(text))
    library.no_truncation()  # some checkpoints store the settings of their last training run
    library.no_padding()
    return library


class GuardedEncoder:
    """In a process of its own, which gives the vocabulary when it starts."""

    def __init__(self, text: str) -> None:
        self._process = GuardedProcess("tokenizer.json", {"work": "tokenizer", "description": text}, LIMITS)
        found = self._process.start()
        self._ids: dict[str, int] = found["ids"]
        self._tokens = {token_id: token for token, token_id in self._ids.items()}
        self.special_ids = frozenset(found["special"])
        self.size = max(self._tokens, default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool, is_plain: bool = False) -> list[int]:
        question = {"text": text, "add_special_tokens": add_special_tokens, "is_plain": is_plain}
        ids: list[int] = self._process.ask(question)
        return ids

    def token_of(self, token_id: int) -> str | None:
        return self._tokens.get(token_id)

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)


def _reported(what: str, call: Callable[[], _Result]) -> _Result:
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and a panic of Rust is not even that
        raise CheetahError(f"{what}: {error}") from error
