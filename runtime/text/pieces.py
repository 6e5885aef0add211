"""From a completion's token ids to pieces of text: what is shown when, and why it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cheetah.runtime.outputs import CompletionOutput, StreamPiece, Timings
from cheetah.runtime.text.stream import TextStream


class Pieces:
    """A fold over the ids of completion `index`: takes them as they are made, gives a piece each time.

    Without text if `text` is None. A stop string ends the completion at the token that completes it, even if more were
    made. The text of an end token is not shown.
    """

    def __init__(self, text: TextStream | None, index: int = 0):
        self._text, self._index = text, index
        self._taken = 0

    def take(self, token_ids: tuple[int, ...], timings: Timings, finish_reason: str | None = None) -> StreamPiece:
        """The next ids. finish_reason: "stop" if the last is an end token, "length" if no more will come, else None.
        Once a piece is finished, whatever the reason, none may follow."""
        shown = None
        stop_reason: int | str | None = token_ids[-1] if finish_reason == "stop" else None
        if self._text is not None:
            shown, token_ids = _feed(self._text, token_ids, has_end_token=finish_reason == "stop")
            if finish_reason is not None:
                shown += self._text.finish()
            if self._text.stopped is not None:
                finish_reason, stop_reason = "stop", self._text.stopped
        self._taken += len(token_ids)
        if finish_reason is None:
            return StreamPiece(shown, token_ids, index=self._index)
        timings = replace(timings, completion_tokens=self._taken)
        return StreamPiece(shown, token_ids, True, finish_reason, stop_reason, timings, self._index)


def collect(pieces: Iterable[StreamPiece]) -> CompletionOutput:
    """All pieces of a completion as one output."""
    every = list(pieces)
    last = every[-1]
    assert last.finish_reason is not None and last.timings is not None, "the last piece says how it ended"
    return CompletionOutput(
        index=last.index,
        text=None if last.text is None else "".join(piece.text or "" for piece in every),
        token_ids=tuple(token for piece in every for token in piece.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        timings=last.timings,
    )


def _feed(text: TextStream, token_ids: tuple[int, ...], has_end_token: bool) -> tuple[str, tuple[int, ...]]:
    """The text that these ids make safe to show, and the ids up to the one that completes a stop string."""
    shown = ""
    for position, token in enumerate(token_ids[:-1] if has_end_token else token_ids):
        shown += text.feed(token)
        if text.stopped is not None:
            return shown, token_ids[: position + 1]
    return shown, token_ids
