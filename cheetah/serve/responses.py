"""/v1/responses, text in and text out: OpenAI's newer records, whole or as events. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from cheetah.runtime.outputs import StreamPiece
from cheetah.serve.answers import Record, Usage, new_id
from cheetah.serve.logprobs import ChatLogprobs
from cheetah.serve.records import Messages, ResponseBody
from cheetah.serve.tools import ToolParser


def messages_of(body: ResponseBody) -> Messages:
    """The conversation that a body holds."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*system, {"role": "user", "content": body.input}]
    return [
        *system,
        *({name: item[name] for name in item if name not in ("id", "type", "status")} for item in body.input),
    ]


class ResponseAnswer:
    """One response with one message of one text. logprobs: tells those that pieces have. parser: of whose parts the
    texts are told."""

    def __init__(self, model: str, usage: Usage, body: ResponseBody, logprobs: ChatLogprobs, parser: ToolParser):
        self.usage, self._logprobs, self._parser = usage, logprobs, parser
        self._model, self._body = model, body
        self._id, self._item_id, self._created = new_id("resp"), new_id("msg"), int(time.time())
        self._text, self._entries = "", list[Record]()
        self._events = 0

    def chunks(self, number: int, piece: StreamPiece) -> Iterator[Record]:
        if not self._events:
            yield self._event("response.created", response=self._response("in_progress", []))
            yield self._event("response.in_progress", response=self._response("in_progress", []))
            yield self._event("response.output_item.added", item=self._item("in_progress", []), output_index=0)
            yield self._event("response.content_part.added", part=self._part("", []), **self._place)
        text, entries = self._shown(piece, piece.finished), self._logprobs.entries(piece.logprobs or ())
        if text or entries:
            self._text += text
            self._entries += entries
            yield self._event("response.output_text.delta", delta=text, logprobs=entries, **self._place)
        if piece.finished:
            yield from self._finish(piece.finish_reason)

    def ending(self) -> Iterator[Record]:
        return iter(())

    def whole(self, pieces: Sequence[StreamPiece]) -> Record:
        entries = self._logprobs.entries(pieces[0].logprobs or ())
        return self._finished(self._part(self._shown(pieces[0], True), entries), pieces[0].finish_reason)

    def _shown(self, piece: StreamPiece, is_last: bool) -> str:
        """What of a piece is for the reader."""
        parts = [*self._parser.feed(piece.text or ""), *(self._parser.finish() if is_last else ())]
        return "".join(part for part in parts if isinstance(part, str))

    @property
    def _place(self) -> Record:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _finish(self, reason: str | None) -> Iterator[Record]:
        part = self._part(self._text, self._entries)
        response = self._finished(part, reason)
        yield self._event("response.output_text.done", text=self._text, logprobs=self._entries, **self._place)
        yield self._event("response.content_part.done", part=part, **self._place)
        yield self._event("response.output_item.done", item=response["output"][0], output_index=0)
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **more: Any) -> Record:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **more}

    def _finished(self, part: Record, reason: str | None) -> Record:
        status = "completed" if reason == "stop" else "incomplete"
        return self._response(status, [self._item(status, [part])])

    def _part(self, text: str, logprobs: list[Record]) -> Record:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, status: str, content: list[Record]) -> Record:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[Record]) -> Record:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_logprobs": body.top_logprobs,
            "tool_choice": "none",
            "tools": [],
            "text": body.text or {"format": {"type": "text"}},
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "store": False,
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> Record:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
