"""What was asked of an engine, and how its events become pieces of text. Does not know what drives the engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cheetah.runtime.engine.requests import Event, Failed, Request
from cheetah.runtime.outputs import StreamPiece
from cheetah.runtime.sampling import SamplingParams
from cheetah.runtime.text.prompts import Prompts


class Asked:
    """The completions of several requests, numbered in order, `ids` being the engine's names for them.

    `unfinished`: the ids of those of which more will come.
    """

    def __init__(self, prompts: Prompts, requests: Sequence[Request], ids: Sequence[int]):
        completions = [(one, index) for one in requests for index in range(one.count)]
        self._pieces = {
            id: (number, prompts.pieces(one.prompt_ids, one.params or SamplingParams(), index))
            for number, (id, (one, index)) in enumerate(zip(ids, completions, strict=True))
        }
        self._channels = {
            id: one.new_channels()
            for id, (one, _) in zip(ids, completions, strict=True)
            if one.new_channels is not None
        }

    @property
    def unfinished(self) -> Collection[int]:
        return self._pieces.keys()

    def take(self, event: Event) -> tuple[int, StreamPiece] | None:
        """(number of the completion, what the event adds to it); None for what was made behind a stop string.

        Behind a finished piece the engine may still be at work on the completion: release it there. CheetahError where
        the completion failed.
        """
        if event.id not in self._pieces:
            return None
        if isinstance(event, Failed):
            raise event.kind(event.message)
        number, pieces = self._pieces[event.id]
        logprobs = (event.logprobs, event.prompt_logprobs)
        piece = pieces.take(event.token_ids, event.timings, event.finish_reason, *logprobs)
        if piece.finished:
            del self._pieces[event.id]
        channels = self._channels.get(event.id)
        return number, piece if channels is None else channels.take(piece)
