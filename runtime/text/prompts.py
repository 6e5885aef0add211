"""Between a client's text and an engine's ids: prompts and conversations to ids, ids to pieces of text.

What of it needs a tokenizer is refused where there is none. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cheetah.errors import CheetahError
from cheetah.runtime.sampling import SamplingParams, as_token_ids
from cheetah.runtime.text.chat import ChatTemplates, Message
from cheetah.runtime.text.marks import Marks
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
    messages_have_special_tokens: what reads like a special token in a message is one; else it is text.
    """

    tokenizer: Tokenizer | None
    templates: ChatTemplates
    vocab_size: int
    chat_template: str | None = None
    messages_have_special_tokens: bool = False

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        with_tokenizer: bool = True,
        chat_template: str | None = None,
        messages_have_special_tokens: bool = False,
    ) -> Prompts:
        """What a checkpoint's files say. chat_template: also a file of one."""
        files, tokenizer = checkpoint.files, None
        if with_tokenizer:
            bos = checkpoint.bos_token_id  # absent or, in odd files, a list
            tokenizer = Tokenizer.from_files(files, bos if isinstance(bos, int) else None)
        config = read_json(files.get("tokenizer_config.json"))
        templates = ChatTemplates.from_files(files, config, tokenizer.special_tokens if tokenizer else None)
        chat_template = None if chat_template is None else templates.given(chat_template)
        return cls(tokenizer, templates, checkpoint.config.vocab_size, chat_template, messages_have_special_tokens)

    @property
    def default_template(self) -> str | None:
        """The Jinja text that conversations are rendered with unless told otherwise; None if there is none."""
        templates = self.templates.templates
        chosen = self.chat_template or "default"
        return templates.get(chosen, self.chat_template)

    def encode(
        self, prompt: Prompt, add_special_tokens: bool = True, most: int | None = None, last: int | None = None
    ) -> tuple[int, ...]:
        """The ids of a prompt; `add_special_tokens`: of text, with what the checkpoint begins a text with. most, last:
        bounds of a long text's ids, as `Tokenizer.encode` has them."""
        if not isinstance(prompt, str):
            return as_token_ids(prompt, self.vocab_size)
        tokenizer = self._tokenizer_for("a text prompt")
        return as_token_ids(tokenizer.encode(prompt, add_special_tokens, most, last), self.vocab_size)

    def render(
        self,
        messages: Sequence[Message],
        most: int | None = None,
        last: int | None = None,
        /,
        *,
        chat_template: str | None = None,
        **variables: Any,
    ) -> tuple[str, tuple[int, ...]]:
        """A conversation as text and as ids; the template writes the special tokens itself. most, last: bounds of the
        ids, as `Tokenizer.encode` has them."""
        tokenizer = self._tokenizer_for("chat")
        marks = Marks(() if self.messages_have_special_tokens else tokenizer.special_texts)
        text = self.templates.render(messages, template=chat_template or self.chat_template, marks=marks, **variables)
        return marks.reveal(text), as_token_ids(tokenizer.encode_conversation(text, marks, most, last), self.vocab_size)

    def check_shown(self, variables: Mapping[str, Any]) -> None:
        """CheetahError for tools or documents that the template would leave out: nobody would see them."""
        for name in ("tools", "documents"):
            chosen = variables.get("chat_template") or self.chat_template
            if variables.get(name) and not self.templates.mentions(name, chosen):
                raise CheetahError(f"the chat template shows no {name}: leave them out, or give chat_template=...")

    def check(self, params: SamplingParams) -> None:
        """CheetahError for what cannot end a completion here."""
        if params.stop:
            self._tokenizer_for("a stop string")
        if params.stop_token_ids:
            as_token_ids(params.stop_token_ids, self.vocab_size, "stop_token_ids")

    def ids_of_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The ids that write these words, at the beginning of a text and behind a space. What else a tokenizer could
        write them with is not among them."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                ids = tuple(self._tokenizer_for("a bad word").encode(text, False))
                if any(token >= self.vocab_size for token in ids):
                    raise CheetahError(f"bad_words: {word!r} has ids that the model has not, of {list(ids)}")
                found[ids] = None
        return [ids for ids in found if ids]

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
