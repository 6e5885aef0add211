"""A checkpoint's tokenizer by the names that transformers' tokenizers have: what `LLM.get_tokenizer` gives.

Its methods do what theirs do, for lists of Python. All else of the `Tokenizer` behind it is here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from cheetah.errors import CheetahError
from cheetah.runtime.calls import refuse_others
from cheetah.runtime.text.chat import Message
from cheetah.runtime.text.prompts import Prompts
from cheetah.runtime.text.tokenizer import Tokenizer


class FamiliarTokenizer:
    """prompts: with a tokenizer, and the chat templates beside it."""

    def __init__(self, prompts: Prompts, tokenizer: Tokenizer):
        self._prompts, self._tokenizer = prompts, tokenizer

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True, **others: Any
    ) -> dict[str, list[Any]]:
        """{"input_ids": ids, "attention_mask": a 1 for each}, of a text, or lists of these for a list of texts."""
        refuse_others("a tokenizer's call", others)
        if isinstance(text, str):
            return _as_input(self.encode(text, add_special_tokens))
        ids = [self.encode(one, add_special_tokens) for one in text]
        return {"input_ids": ids, "attention_mask": [[1] * len(one) for one in ids]}

    def encode(self, text: str, add_special_tokens: bool = True, **others: Any) -> list[int]:
        """The ids of a text; see `Tokenizer.encode`."""
        refuse_others("encode", others)
        if not isinstance(text, str):
            raise CheetahError("encode takes one text: call the tokenizer itself with a list of them")
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False, **others: Any) -> str:
        """The text of ids, or of one id; see `Tokenizer.decode`."""
        refuse_others("decode", others)
        ids = token_ids if isinstance(token_ids, Iterable) else (token_ids,)
        return self._tokenizer.decode(map(index, ids), skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        """The text of each."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """A conversation as the template writes it: its ids; with tokenize=False the text, with return_dict=True the
        ids as a call of the tokenizer gives them. variables: what else the template knows."""
        text, ids = self._prompts.render(
            conversation,
            chat_template=chat_template,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        return _as_input([*ids]) if tokenize and return_dict else [*ids] if tokenize else text

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token as the vocabulary writes it, None for one that is not there; of a list, each one's."""
        if isinstance(tokens, str):
            return self._tokenizer.id_of(tokens)
        return [self._tokenizer.id_of(token) for token in tokens]

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return self._tokenizer.size

    def __len__(self) -> int:
        return self._tokenizer.size

    @property
    def chat_template(self) -> str | None:
        """The Jinja text that conversations are rendered with."""
        return self._prompts.default_template

    def __getattr__(self, name: str) -> Any:
        """bos_token, eos_token_id and the like, None where the checkpoint names none; else the tokenizer's own."""
        named = name.removesuffix("_id")
        if named in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = self._tokenizer.special_tokens.get(named)
            return token if name == named or token is None else self._tokenizer.id_of(token)
        return getattr(self._tokenizer, name)


def _as_input(ids: list[int]) -> dict[str, list[Any]]:
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}
