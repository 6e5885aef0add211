"""Of a text that is longer than its ids are wanted no more is encoded than shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

from cheetah.runtime.text import long_texts, marks
from cheetah.runtime.text.long_texts import TooLongError
from cheetah.runtime.text.marks import Marks
from cheetah.runtime.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_level(), {"bos_token": "<|begin|>"})
WORDS = ("the", " he", "lex", "é", " ", "\n", "<|end|>", "<|end", "x" * 50)
texts = st.lists(st.sampled_from(WORDS), max_size=60).map("".join)


@pytest.fixture(autouse=True)
def short_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_texts, "PIECE", 32)
        patch.setattr(long_texts, "UNCOUNTED", 8)
        patch.setattr(marks, "SEARCHED", 5)
        yield


@settings(deadline=None, max_examples=80)
@given(texts, st.booleans(), st.integers(1, 80))
def test_bounds_change_no_id_that_is_wanted(text: str, is_conversation: bool, count: int) -> None:
    found = Marks(TOKENIZER.special_texts)
    marked = f"<|turn|>{found.hide(text)}<|end|>{text}"
    if is_conversation:
        whole, bounded = TOKENIZER.encode_conversation(marked, found), TOKENIZER.encode_conversation
        last, most = bounded(marked, found, None, count), bounded(marked, found, len(whole))
    else:
        whole = TOKENIZER.encode(text)
        last, most = TOKENIZER.encode(text, last=count), TOKENIZER.encode(text, most=len(whole))
    assert most == whole and last[-count:] == whole[-count:]


@pytest.mark.parametrize("is_plain", [True, False])
def test_what_cannot_fit_is_hardly_encoded(is_plain: bool) -> None:
    asked: list[str] = []

    def encode(text: str, plain: bool) -> list[int]:
        assert plain is is_plain
        asked.append(text)
        return [1] * len(text)

    parts = [("a", is_plain), ("x" * 10_000, is_plain)]
    with pytest.raises(TooLongError, match="10001 characters are more than 30 tokens"):
        long_texts.refuse_longer(parts, 30, encode)
    assert len("".join(asked)) == 1 + 2 * 32, "pieces until there are too many, and no more"
    asked.clear()
    assert long_texts.ending([*parts, ("end", is_plain)], 20, encode) == [("x" * 32, is_plain), ("end", is_plain)]
    assert asked == ["end", "x" * 32]
