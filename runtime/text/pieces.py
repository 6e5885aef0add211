"""From a completion's token ids to pieces of text: what is shown when, and why it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from cheetah.models.logprobs import TokenLogprobs
from cheetah.runtime.outputs import CompletionOutput, Logprob, Logprobs, StreamPiece, Timings
from cheetah.runtime.text.stream import TextStream


class Pieces:
    """A fold over the ids of completion `index`: takes them as they are made, gives a piece each time.

    Without text if `text` is None. A stop string ends the completion at the token that completes it, even if more were
    made. The text of an end token is shown if `shows_end_token`. token_text: of a token by itself, for logprobs.
    """

    def __init__(
        self,
        text: TextStream | None,
        index: int = 0,
        shows_end_token: bool = False,
        token_text: Callable[[int], str] | None = None,
    ):
        self._text, self._index, self._shows_end_token = text, index, shows_end_token
        self._token_text = token_text
        self._taken = 0

    def take(
        self,
        token_ids: tuple[int, ...],
        timings: Timings,
        finish_reason: str | None = None,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> StreamPiece:
        """The next ids. finish_reason: "stop" if the last is an end token, "length" if no more will come, else None.
        logprobs: of these ids, or of the prompt's behind its first. Once a piece is finished, whatever the reason, none
        may follow."""
        shown = None
        stop_reason: int | str | None = token_ids[-1] if finish_reason == "stop" else None
        if self._text is not None:
            hides_last = finish_reason == "stop" and not self._shows_end_token
            shown, token_ids = _feed(self._text, token_ids, hides_last)
            if finish_reason is not None:
                shown += self._text.finish()
            if self._text.stopped is not None:
                finish_reason, stop_reason = "stop", self._text.stopped
        self._taken += len(token_ids)
        piece = StreamPiece(
            shown,
            token_ids,
            index=self._index,
            logprobs=None if logprobs is None else tuple(map(self._named, logprobs[: len(token_ids)])),
            prompt_logprobs=None if prompt_logprobs is None else (None, *map(self._named, prompt_logprobs)),
        )
        if finish_reason is None:
            return piece
        timings = replace(timings, completion_tokens=self._taken)
        return replace(piece, finished=True, finish_reason=finish_reason, stop_reason=stop_reason, timings=timings)

    def _named(self, found: TokenLogprobs) -> Logprobs:
        top = {token: (logprob, rank) for rank, (token, logprob) in enumerate(found.top, 1)}
        every = {found.token: (found.logprob, found.rank)} | top
        return {token: Logprob(*numbers, self._text_of(token)) for token, numbers in every.items()}

    def _text_of(self, token: int) -> str | None:
        return None if self._token_text is None else self._token_text(token)


def joined(pieces: Iterable[StreamPiece]) -> StreamPiece:
    """All pieces of a completion as one."""
    every = list(pieces)
    return replace(
        every[-1],
        text=None if every[-1].text is None else "".join(piece.text or "" for piece in every),
        token_ids=tuple(token for piece in every for token in piece.token_ids),
        logprobs=None
        if every[-1].logprobs is None
        else tuple(place for piece in every for place in piece.logprobs or ()),
        prompt_logprobs=every[0].prompt_logprobs,
        reasoning="".join(piece.reasoning for piece in every),
        tool_calls=tuple(call for piece in every for call in piece.tool_calls),
    )


def collect(pieces: Iterable[StreamPiece]) -> CompletionOutput:
    """All pieces of a completion as one output."""
    last = joined(pieces)
    assert last.finish_reason is not None and last.timings is not None, "the last piece says how it ended"
    of_ids = None if last.logprobs is None else zip(last.logprobs, last.token_ids, strict=True)
    return CompletionOutput(
        index=last.index,
        text=last.text,
        token_ids=last.token_ids,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        timings=last.timings,
        logprobs=last.logprobs,
        cumulative_logprob=None if of_ids is None else sum(place[token].logprob for place, token in of_ids),
        reasoning=last.reasoning,
        tool_calls=last.tool_calls,
    )


def _feed(text: TextStream, token_ids: tuple[int, ...], hides_last: bool) -> tuple[str, tuple[int, ...]]:
    """The text that these ids make safe to show, and the ids up to the one that completes a stop string."""
    shown = ""
    for position, token in enumerate(token_ids[:-1] if hides_last else token_ids):
        shown += text.feed(token)
        if text.stopped is not None:
            return shown, token_ids[: position + 1]
    return shown, token_ids
