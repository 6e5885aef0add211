"""Between a client's text and an engine's ids: prompts and conversations to ids, ids to pieces of text.

What of it needs a tokenizer is refused where there is none. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cheetah.errors import CheetahError
from cheetah.runtime.sampling import SamplingParams, as_token_ids
from cheetah.runtime.text.chat import ChatTemplates, Message
from cheetah.runtime.text.pieces import Pieces
from cheetah.runtime.text.stream import TextStream
from cheetah.runtime.text.tokenizer import Tokenizer, read_json

if TYPE_CHECKING:
    from cheetah.runtime.checkpoint.loading import Checkpoint

Prompt = str | Sequence[int]
"""Text, or token ids that are used as they are."""


@dataclass(frozen=True)
class Prompts:
    """A checkpoint's tokenizer, if it has one and it is wanted, and its chat templates.

    chat_template: the one used when none is asked for, Jinja text or a name; None for the checkpoint's default.
    """

    tokenizer: Tokenizer | None
    templates: ChatTemplates
    vocab_size: int
    chat_template: str | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, with_tokenizer: bool = True, chat_template: str | None = None) -> Prompts:
        """What a checkpoint's files say."""
        files, tokenizer = checkpoint.files, None
        if with_tokenizer:
            bos = checkpoint.bos_token_id  # absent or, in odd files, a list
            tokenizer = Tokenizer.from_files(files, bos if isinstance(bos, int) else None)
        config = read_json(files.get("tokenizer_config.json"))
        templates = ChatTemplates.from_files(files, config, tokenizer.special_tokens if tokenizer else None)
        return cls(tokenizer, templates, checkpoint.config.vocab_size, chat_template)

    @property
    def default_template(self) -> str | None:
        """The Jinja text that conversations are rendered with unless told otherwise; None if there is none."""
        templates = self.templates.templates
        chosen = self.chat_template or "default"
        return templates.get(chosen, self.chat_template)

    def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a prompt; `add_special_tokens`: of text, with what the checkpoint begins a text with."""
        if not isinstance(prompt, str):
            return as_token_ids(prompt, self.vocab_size)
        tokenizer = self._tokenizer_for("a text prompt")
        return as_token_ids(tokenizer.encode(prompt, add_special_tokens), self.vocab_size)

    def render(
        self, messages: Sequence[Message], *, chat_template: str | None = None, **variables: Any
    ) -> tuple[str, tuple[int, ...]]:
        """A conversation as text and as ids; the template writes the special tokens itself."""
        tokenizer = self._tokenizer_for("chat")
        text = self.templates.render(messages, template=chat_template or self.chat_template, **variables)
        return text, as_token_ids(tokenizer.encode(text, add_special_tokens=False), self.vocab_size)

    def check(self, params: SamplingParams) -> None:
        """CheetahError for what cannot end a completion here."""
        if params.stop:
            self._tokenizer_for("a stop string")
        if params.stop_token_ids:
            as_token_ids(params.stop_token_ids, self.vocab_size, "stop_token_ids")

    def ids_of_words(self, words: Sequence[str]) -> list[int]:
        """The tokens that are these words, at the beginning of a text or behind a space. CheetahError for a word of
        several tokens: a single token is all that can be banned."""
        found = []
        for word in words:
            encode = self._tokenizer_for("a bad word").encode
            alone, behind = encode(word, False), encode(f" {word.lstrip()}", False)
            if len(alone) != 1 and len(behind) != 1:
                raise CheetahError(f"bad_words: {word!r} is {len(alone)} tokens: only words of one token can be banned")
            found += [ids[0] for ids in (alone, behind) if len(ids) == 1]
        return found

    def pieces(self, prompt_ids: Sequence[int], params: SamplingParams, index: int) -> Pieces:
        """What folds the ids of completion `index` of a prompt into pieces of text."""
        if self.tokenizer is None:
            return Pieces(None, index)
        decoder = self.tokenizer.text_decoder(prompt_ids, params.skip_special_tokens)
        shows_stop = params.include_stop_str_in_output
        stream = TextStream(decoder, params.stop, shows_stop, params.min_tokens)
        return Pieces(stream, index, shows_stop, self.tokenizer.token_text)

    def _tokenizer_for(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise CheetahError(f"{what} needs a tokenizer, and there is none (no tokenizer.json): give token ids")
        return self.tokenizer
