"""What was asked of an engine, and how its events become pieces of text. Knows nothing of who drives the engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cheetah.runtime.engine.requests import Event, Failed, Request
from cheetah.runtime.outputs import StreamPiece
from cheetah.runtime.sampling import SamplingParams
from cheetah.runtime.text.prompts import Prompts


@dataclass(frozen=True)
class Ask:
    """A request as the engine takes it, and as its client wrote it."""

    request: Request
    params: SamplingParams


class Asked:
    """The completions of several asks, numbered in order, `ids` being the engine's names for them.

    `unfinished`: the ids of those of which more will come.
    """

    def __init__(self, prompts: Prompts, asks: Sequence[Ask], ids: Sequence[int]):
        completions = [(ask, index) for ask in asks for index in range(ask.request.count)]
        self._pieces = {
            id: (number, prompts.pieces(ask.request.prompt_ids, ask.params, index))
            for number, (id, (ask, index)) in enumerate(zip(ids, completions, strict=True))
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
        return number, piece
