"""Streamed pieces are whole characters, hide stop strings, and add up to the one-shot decode."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import KINDS

from cheetah.runtime.text.stream import StopStrings, TextStream
from cheetah.runtime.text.tokenizer import Tokenizer

STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


def pieces_of(kind: str, ids: list[int], stop: list[str] | None = None, include: bool = False) -> list[str]:
    stream = TextStream(tokenizer(kind).text_decoder(), stop or [], include)
    pieces = []
    for token in ids:
        pieces.append(stream.feed(token))
        if stream.stopped is not None:
            break
    return [*pieces, stream.finish()]


def cut_at(text: str, stops: list[str]) -> str:
    """The meaning of stop strings, written down slowly: cut before the one whose end comes first."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start]
    return text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pieces_are_valid_and_equal_the_one_shot_decode(kind: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer(kind).size + 2), max_size=30))
    pieces = pieces_of(kind, ids)
    assert all(piece.encode("utf-8").decode("utf-8") == piece for piece in pieces)
    assert "".join(pieces) == tokenizer(kind).decode(ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=st.text(max_size=20))
def test_no_replacement_characters_for_split_characters(kind: str, text: str) -> None:
    if "\ufffd" in text:
        return
    first = 0 if kind == "byte_level" else 3
    ids = [first + byte for byte in text.encode()]  # every character of more than one byte is split over tokens
    pieces = pieces_of(kind, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == (text if kind == "byte_level" else text.removeprefix(" "))


def test_an_incomplete_character_waits_and_becomes_a_mark_at_the_end_only() -> None:
    ids = list("a😀".encode())
    assert pieces_of("byte_level", ids) == ["a", "", "", "", "😀", ""]
    assert pieces_of("byte_level", ids[:-1]) == ["a", "", "", "", "\ufffd"]


@given(text=st.text(alphabet="abc", max_size=20), stops=STOPS, include=st.booleans(), data=st.data())
def test_stop_strings_cut_alike_however_the_text_arrives(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    filter_ = StopStrings(stops, include)
    shown, rest = "", text
    while rest and filter_.matched is None:
        size = data.draw(st.integers(1, len(rest)))
        shown, rest = shown + filter_.feed(rest[:size]), rest[size:]
        expected = cut_at(text, stops)
        assert expected.startswith(shown) or include, "a stop string leaked"
    if filter_.matched is None:
        shown += filter_.finish()
    assert shown == cut_at(text, stops) + ((filter_.matched or "") if include else "")
    assert (filter_.matched is not None) == any(stop in text for stop in stops)


@given(ids=st.lists(st.sampled_from(list(b"abc\xc3\xa9")), max_size=20), stops=STOPS)
def test_streamed_stop_strings_equal_the_cut_of_the_whole(ids: list[int], stops: list[str]) -> None:
    whole = tokenizer("byte_level").decode(ids)
    assert "".join(pieces_of("byte_level", ids, stops)) == cut_at(whole, stops)


def test_a_possible_stop_string_is_held_back_and_released() -> None:
    stops = StopStrings(["STOP"])
    assert [stops.feed(text) for text in ("a", "S", "TO", "x")] == ["a", "", "", "STOx"]
    assert stops.feed("yST") == "y" and stops.finish() == "ST" and stops.matched is None


def test_a_stop_string_over_tokens_is_cut_or_kept_on_request() -> None:
    ids = list(b"one. Two")
    assert pieces_of("byte_level", ids, [". "])[-3:] == ["", "", ""]
    assert "".join(pieces_of("byte_level", ids, [". "])) == "one"
    assert "".join(pieces_of("byte_level", ids, [". "], include=True)) == "one. "


def test_a_mark_at_the_end_can_complete_a_stop_string() -> None:
    stream = TextStream(tokenizer("byte_level").text_decoder(), ["a\ufffd"])
    assert stream.feed(ord("a")) == "" and stream.feed(0xC3) == ""
    assert stream.finish() == "" and stream.stopped == "a\ufffd"


@pytest.mark.parametrize("least, made", [(0, 1), (1, 1), (2, 2), (4, 4)])
def test_stop_strings_are_not_looked_for_before_min_tokens(least: int, made: int) -> None:
    """Feeding a token after the stop is an error, so this also says that it does not stop earlier."""
    stream = TextStream(tokenizer("byte_level").text_decoder(), ["a"], min_tokens=least)
    shown = [stream.feed(ord("a")) for _ in range(made)]
    assert stream.stopped == "a" and "".join(shown) == "a" * (made - 1)
