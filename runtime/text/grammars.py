"""Grammars of what a completion's text may be, by llguidance: which tokens may come next.

A grammar comes from a client, and to read one can take any time, any memory, or the process: so it is read once by a
process of its own, within limits, before it is read here. Knows nothing of engines.
"""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.extras import installing
from cheetah.runtime.engine.watching import Mask, allows
from cheetah.runtime.structured_outputs import GrammarError, StructuredOutputsParams
from cheetah.runtime.text.guarded_process import GuardedProcess, GuardError, Limits
from cheetah.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

LIMITS = Limits(1.0, 1_000_000_000, 4_000_000)
"""Of reading a grammar; one of a hundred properties takes 0.02 s."""

PARSER_LIMITS: Mapping[str, Any] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Of each step through a grammar, by llguidance's names. Its own limits let a token take 0.3 s, during which every
other completion waits; these 0.03 s for most. States: up to 2 KB each."""

GRAMMARS_KEPT = 64
WHITESPACE = r"\x20?"
"""Between two parts of JSON: small models that may write many blanks write little else."""


class Grammars:
    """The grammars over one tokenizer's tokens. May be used by any thread.

    What llguidance needs of the tokenizer is made when the first grammar is asked for, or by `prepare` before.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._library: llguidance.LLTokenizer | None = None
        self._reader: GuardedProcess | None = None
        self._read: OrderedDict[tuple[str, str, str | None], str] = OrderedDict()

    def prepare(self) -> None:
        """Makes what the first grammar would wait for, where there can be grammars: of 128,000 tokens it takes nearly a
        second. For 0.6 of it the library holds Python's lock, so that nobody's stream goes on."""
        if self._tokenizer is not None and _is_installed():
            with self._lock:
                self._library = self._library or _library_tokenizer(self._tokenizer, self._vocab_size)

    def watcher(
        self, wanted: StructuredOutputsParams | Mapping[str, Any], end_ids: Sequence[int]
    ) -> Callable[[], GrammarWatcher]:
        """Makes what follows a completion through what is wanted of it; `end_ids` may end it where the grammar may.

        GrammarError if the grammar cannot be read, or within limits; CheetahError without llguidance."""
        if self._tokenizer is None:
            raise GrammarError("structured_outputs: a grammar is one of text, and there is no tokenizer")
        if not end_ids:
            raise GrammarError("structured_outputs: the checkpoint names no end-of-text token: give stop_token_ids")
        if not _is_installed():
            raise CheetahError(
                f"structured_outputs needs llguidance, which is not installed: {installing('structured')}"
            )
        import llguidance

        grammar = self._checked(StructuredOutputsParams.of(wanted))
        self.prepare()
        assert self._library is not None
        limits = llguidance.LLParserLimits(**PARSER_LIMITS)
        matcher = llguidance.LLMatcher(self._library, grammar, log_level=0, limits=limits)
        known = np.unique([token for token in end_ids if token < self._vocab_size])
        return GrammarWatcher(matcher, known, self._vocab_size).copy

    def _checked(self, wanted: StructuredOutputsParams) -> str:
        """The grammar in llguidance's form, once the guarded process has read it."""
        whitespace = None if wanted.disable_any_whitespace else wanted.whitespace_pattern or WHITESPACE
        key = (wanted.kind, wanted.source, whitespace)
        with self._lock:
            self._reader = self._reader or GuardedProcess(
                "structured_outputs", {"work": "grammars", "limits": PARSER_LIMITS}, LIMITS
            )
            if key in self._read:
                self._read.move_to_end(key)
                return self._read[key]
        try:
            grammar: str = self._reader.ask(dict(zip(("kind", "source", "whitespace"), key, strict=True)))
        except GuardError as problem:
            raise GrammarError(str(problem)) from None
        with self._lock:
            self._read[key] = grammar
            if len(self._read) > GRAMMARS_KEPT:
                self._read.popitem(last=False)
        return grammar


class GrammarWatcher:
    """Follows one completion through a grammar. GrammarError where the grammar is too hard to be followed.

    mask: uint32 [ceil(vocab / 32)], a bit for each token that may come next, with `end_ids` where the text may end.
    """

    def __init__(self, matcher: llguidance.LLMatcher, end_ids: npt.NDArray[np.int64], vocab_size: int):
        self._matcher, self._end_ids, self._vocab_size = matcher, end_ids, vocab_size
        self._known: list[tuple[int, Mask | None]] = []  # of tokens that may come next: what would be allowed behind
        self.mask = self._next_mask()

    def copy(self) -> GrammarWatcher:
        """Another one, at the same place."""
        other = copy(self)
        other._known = []
        other._matcher = self._matcher.deep_copy()
        return other

    def after(self, token_id: int) -> None:
        """A token was made."""
        self._matcher.consume_token(token_id)
        (token, mask), *self._known = self._known or [(-1, None)]
        if token != token_id:
            self._known = []
        self.mask = self._next_mask() if mask is None or token != token_id else mask

    def forced(self) -> list[int]:
        """What the grammar leaves no choice of, by the tokens that the model would expect."""
        return [token for token in self._matcher.compute_ff_tokens() if token < self._vocab_size]

    def ahead(self, token_ids: Sequence[int]) -> list[Mask | None]:
        """See `TokenWatcher`. What is found is kept for when these are made."""
        other, self._known = self.copy(), []
        for token in token_ids:
            if token in self._end_ids or not allows(other.mask, token):
                break
            try:
                other.after(token)
            except GrammarError:  # it is told where the token is made
                break
            self._known.append((token, other.mask))
        return [mask for _, mask in self._known]

    def _next_mask(self) -> npt.NDArray[np.uint32]:
        from llguidance.numpy import fill_next_token_bitmask

        words = np.zeros((1, self._vocab_size // 32 + 1), np.int32)  # with the library's own end of text
        fill_next_token_bitmask(self._matcher, words)
        if self._matcher.is_error():
            problem = self._matcher.get_error().partition("\n")[0]
            raise GrammarError(f"structured_outputs: the grammar cannot be followed any further: {problem}")
        mask: npt.NDArray[np.uint32] = words[0].view(np.uint32)
        mask[-1] &= (1 << self._vocab_size % 32) - 1
        if self._matcher.is_accepting():
            np.bitwise_or.at(mask, self._end_ids // 32, (1 << self._end_ids % 32).astype(np.uint32))
        return mask[: -(-self._vocab_size // 32)]


class _Tokens:
    """A tokenizer as llguidance's TokenizerWrapper asks for it: the bytes of each of the model's tokens.

    Behind them llguidance puts an end of text of its own: which tokens end a text a request may say for itself."""

    eos_token_id = None
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        # A special token is no text: one that ends a text would do so in the middle of a string of JSON.
        found = [tokenizer.token_bytes(token, skip_special_tokens=True) for token in range(vocab_size)]
        self.tokens = [b"" if text is None else text for text in found]
        self.special_token_ids = [token for token, text in enumerate(found) if text is None]
        self._ids = {text: token for token, text in reversed([*enumerate(self.tokens)]) if text}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of a text that a grammar leaves no choice of: those that the model would expect, if they are
        exactly this text. (Some tokenizers put a space before any text.) The library takes them at their word."""
        try:
            ids = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        except (CheetahError, UnicodeDecodeError):
            return self._longest_tokens(text)
        is_exact = all(token < len(self.tokens) for token in ids) and b"".join(self.tokens[i] for i in ids) == text
        return ids if is_exact else self._longest_tokens(text)

    def _longest_tokens(self, text: bytes) -> list[int]:
        """The longest token that the text begins with, then that of the rest; up to a byte that no token has."""
        ids, place = list[int](), 0
        while place < len(text):
            sizes = range(min(self._longest, len(text) - place), 0, -1)
            fitting = (size for size in sizes if text[place : place + size] in self._ids)
            if (size := next(fitting, 0)) == 0:
                break
            ids.append(self._ids[text[place : place + size]])
            place += size
        return ids


def _library_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> llguidance.LLTokenizer:
    import llguidance

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(tokenizer, vocab_size)))


def _is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None
