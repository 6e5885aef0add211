"""Encoding like Hugging Face with exactly one BOS; decoding through bytes equals the `tokenizers` library's."""

from __future__ import annotations

import json
from functools import cache

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import KINDS, byte_fallback, byte_level

from cheetah.errors import CheetahError
from cheetah.runtime.text.tokenizer import Tokenizer


@cache
def ours(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


@cache
def theirs(kind: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(KINDS[kind]())


def is_valid_in_byte_runs(ids: list[int]) -> bool:
    """Whether every run of byte-fallback tokens is UTF-8 by itself; others the library replaces as a whole."""
    runs, run = [], b""
    for token in [*ids, 300]:
        if 3 <= token < 259:
            run += bytes([token - 3])
        elif token > 2:
            runs, run = [*runs, run], b""
    try:
        return all(run.decode() is not None for run in runs)
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "whole_words"])
@given(data=st.data())
def test_decode_equals_the_library_for_any_ids(kind: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, ours(kind).size + 2), max_size=20))
    assert ours(kind).decode(ids) == theirs(kind).decode(ids, skip_special_tokens=True)


@given(st.lists(st.one_of(st.integers(0, 2), st.integers(0x41 + 3, 0x60 + 3), st.integers(258, 273)), max_size=20))
def test_decode_equals_the_library_for_llama_2(ids: list[int]) -> None:
    if is_valid_in_byte_runs(ids):
        assert ours("byte_fallback").decode(ids) == theirs("byte_fallback").decode(ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=st.text(max_size=30))
def test_encode_equals_the_library_and_decodes_back(kind: str, text: str) -> None:
    ids = ours(kind).encode(text, add_special_tokens=False)
    assert ids == theirs(kind).encode(text, add_special_tokens=False).ids
    if kind == "byte_level":
        assert ours(kind).decode(ids) == text


def test_valid_characters_survive_in_an_invalid_byte_run() -> None:
    ids = [3 + byte for byte in "é".encode() + b"\xff" + "€".encode()]
    assert ours("byte_fallback").decode(ids) == "é\ufffd€"


def test_ignore_merges_is_respected() -> None:
    tokenizer = ours("byte_level")
    assert [tokenizer.decode([token]) for token in tokenizer.encode("lex", add_special_tokens=False)] == ["lex"]


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(CheetahError, match=r"lone surrogate, '\\ud800' at character 3"):
        ours("byte_level").encode("abc\ud800")


def test_a_continuation_keeps_its_leading_space() -> None:
    tokenizer = ours("byte_fallback")
    prompt, rest = tokenizer.encode("ab"), tokenizer.encode("the")
    assert tokenizer.decode(rest) == "the"
    assert tokenizer.decode(rest, after=prompt) == " the"
    assert tokenizer.decode(rest, after=[1]) == "the", "a special token is no text before it"


@pytest.mark.parametrize("kind", KINDS)
def test_of_what_stands_before_a_text_no_more_is_read_than_changes_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's event loop makes a decoder for each completion, whatever the length of its prompt."""
    read: list[int] = []
    token_bytes = Tokenizer.token_bytes
    monkeypatch.setattr(
        Tokenizer, "token_bytes", lambda self, id, *more: (read.append(id), token_bytes(self, id, *more))[1]
    )
    ours(kind).text_decoder(ours(kind).encode("the", False) * 9000)
    assert len(read) < 9


@pytest.mark.parametrize("text", ["he", "", "<|begin|>he", "<|begin|><|begin|>he"])
def test_post_processor_gives_exactly_one_bos(text: str) -> None:
    tokenizer = Tokenizer(byte_level(), {"bos_token": "<|begin|>"})
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids) == text.replace("<|begin|>", "")


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"add_bos_token": True}, [1]),
        ({"add_bos_token": False}, []),
        ({"tokenizer_class": "LlamaTokenizer"}, [1]),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, []),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, []),
        ({}, []),
    ],
)
def test_without_a_post_processor_the_config_decides(config: dict[str, object], expected: list[int]) -> None:
    tokenizer = Tokenizer(byte_fallback(), config | {"bos_token": {"content": "<s>"}})
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == expected + plain
    assert tokenizer.encode("<s>the")[:2] != [1, 1]


def test_an_explicit_no_wins_over_the_post_processor_but_not_over_the_text() -> None:
    tokenizer = Tokenizer(byte_level(), {"bos_token": "<|begin|>", "add_bos_token": False})
    assert tokenizer.bos_id not in tokenizer.encode("he")
    assert tokenizer.encode("<|begin|>he").count(tokenizer.bos_id) == 1


def test_bos_comes_from_the_model_config_if_nothing_else_names_it() -> None:
    assert Tokenizer(byte_fallback(), {"add_bos_token": True}, bos_token_id=1).encode("a")[0] == 1
    assert Tokenizer(byte_fallback(), {}, {"bos_token": "<s>"}).bos_id == 1
    assert Tokenizer(byte_fallback(), {}, bos_token_id=1).special_tokens["bos_token"] == "<s>"


def test_stored_truncation_and_padding_are_switched_off() -> None:
    stored = tokenizers.Tokenizer.from_str(byte_level())
    stored.enable_truncation(3)
    stored.enable_padding(length=50)
    assert len(Tokenizer(stored.to_str()).encode("1 2 3 4", add_special_tokens=False)) == 7


@pytest.mark.parametrize(
    "decoder, message",
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "decoder 'WordPiece' is not supported"),
        ({"type": "Strip", "content": " ", "start": 1, "stop": 0}, "'Strip' is supported at the start of a fused text"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}, "'Replace' is supported for plain strings"),
    ],
)
def test_unknown_decoders_are_refused_by_name(decoder: dict[str, object], message: str) -> None:
    description = json.loads(byte_fallback()) | {"decoder": decoder}
    with pytest.raises(CheetahError, match=message):
        Tokenizer(json.dumps(description))


def test_a_broken_file_is_refused() -> None:
    with pytest.raises(CheetahError, match=r"tokenizer\.json: .*Model missing"):
        Tokenizer("{}")
