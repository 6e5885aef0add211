"""Pieces of text as a fold over token ids: what is shown does not depend on how the ids were cut into launches."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

from cheetah.runtime.outputs import CompletionOutput, Timings
from cheetah.runtime.text.pieces import Pieces, collect
from cheetah.runtime.text.stream import TextStream
from cheetah.runtime.text.tokenizer import Tokenizer

TIMINGS = Timings(prompt_tokens=3, completion_tokens=99, prefill_s=1.0, decode_s=2.0, launches=4)
IDS = tuple("the café tells a tale".encode())  # the first 256 ids are the bytes


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


def folded(cuts: list[tuple[int, ...]], reason: str, stop: tuple[str, ...] = ()) -> CompletionOutput:
    """The pieces of ids that came in these cuts, up to the one that is finished, as one output."""
    fold = Pieces(TextStream(tokenizer().text_decoder(), stop), index=2)
    pieces = []
    for number, token_ids in enumerate(cuts):
        pieces.append(fold.take(token_ids, TIMINGS, reason if number == len(cuts) - 1 else None))
        if pieces[-1].finished:
            break
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return collect(pieces)


@st.composite
def cut(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """IDS in parts of at least one."""
    places = sorted(draw(st.sets(st.integers(1, len(IDS) - 1))))
    return [IDS[first:end] for first, end in zip([0, *places], [*places, len(IDS)], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("stop", [(), ("é t",), ("never", "ta"), ("le",), ("é",), ("the",)])
@given(cuts=cut())
def test_any_cut_gives_the_same_output(reason: str, stop: tuple[str, ...], cuts: list[tuple[int, ...]]) -> None:
    assert folded(cuts, reason, stop) == folded([IDS], reason, stop)


def test_a_stop_string_ends_it_at_the_token_that_completes_it() -> None:
    output = folded([IDS[:3], IDS[3:]], "length", ("ta",))
    assert (output.text, output.finish_reason, output.stop_reason) == ("the café tells a ", "stop", "ta")
    assert output.token_ids == IDS[: len("the café tells a ta".encode())]
    assert (output.timings.completion_tokens, output.index) == (len(output.token_ids), 2)


def test_an_end_token_is_an_id_but_no_text() -> None:
    output = folded([IDS], "stop")
    assert (output.text, output.token_ids, output.stop_reason) == ("the café tells a tal", IDS, ord("e"))
    assert output.timings.completion_tokens == len(IDS)


def test_without_text_the_ids_go_through() -> None:
    fold = Pieces(None)
    assert fold.take((1, 2), TIMINGS).text is None
    last = fold.take((3,), TIMINGS, "length")
    assert (last.token_ids, last.finished, last.finish_reason, last.stop_reason) == ((3,), True, "length", None)
    assert last.timings is not None and last.timings.completion_tokens == 3
