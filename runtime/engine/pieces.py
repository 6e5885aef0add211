"""From a completion's token ids to pieces of text: what is shown when, and why it ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

from cheetah.runtime.engine.decode import Completion, Decoder
from cheetah.runtime.outputs import CompletionOutput, StreamPiece
from cheetah.runtime.text.stream import TextStream


def pieces_of(completion: Completion, text: TextStream | None) -> Iterator[StreamPiece]:
    """The completion piece by piece, one for each launch; without text if `text` is None.

    A stop string ends it at the token that completes it, even if the launch made more. The text of an end token is not
    shown.
    """
    made = 0
    with closing(completion.parts()) as parts:  # at a stop string the rest is given up
        for token_ids in parts:
            shown = None
            if text is not None:
                shown, token_ids = _feed(text, token_ids, completion.stop_id)
                if completion.finished:
                    shown += text.finish()
            made += len(token_ids)
            met = None if text is None else text.stopped
            if met is not None or completion.finished:
                reason = completion.stop_id if met is None else met
                why = "length" if reason is None else "stop"
                timings = completion.timings(made)
                yield StreamPiece(shown, token_ids, True, why, reason, timings, completion.index)
                return
            yield StreamPiece(shown, token_ids, index=completion.index)


def pieces_together(
    decoder: Decoder, jobs: Sequence[tuple[Completion, Iterator[StreamPiece]]]
) -> Iterator[tuple[int, StreamPiece]]:
    """(number of the job, piece) of completions that are decoded together, as they are made."""
    left = dict(enumerate(jobs))
    try:
        decoder.submit([completion for completion, _ in jobs])
        while left:
            if not any(completion.is_ready for completion, _ in left.values()):
                decoder.step()
            for number, (completion, pieces) in list(left.items()):
                if completion.is_ready:
                    piece = next(pieces)
                    if piece.finished:
                        del left[number]
                    yield number, piece
    finally:
        for completion, _ in jobs:
            decoder.drop(completion)


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


def _feed(text: TextStream, token_ids: tuple[int, ...], stop_id: int | None) -> tuple[str, tuple[int, ...]]:
    """The text that these ids make safe to show, and the ids up to the one that completes a stop string."""
    shown = ""
    last = len(token_ids) - 1
    for position, token in enumerate(token_ids):
        if stop_id is not None and position == last:
            break  # the end token
        shown += text.feed(token)
        if text.stopped is not None:
            return shown, token_ids[: position + 1]
    return shown, token_ids
