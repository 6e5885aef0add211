"""Files of requests in OpenAI's batch format: a line for each request, a line for each answer.

An answer is written whole as soon as it is there, in the order in which they end. So whatever ends the program, what is
in the file stands: `finished_ids` tells which requests it answers, and a line that was cut is taken out again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from cheetah.errors import CheetahError, writing
from cheetah.printable import shown
from cheetah.runtime.structured_outputs import GrammarError
from cheetah.serve.answers import as_json, new_id
from cheetah.serve.errors import ApiError, of_failure, of_validation
from cheetah.serve.records import Body, ChatBody, CompletionBody, Streamed
from cheetah.serve.service import Answering, Prepared, Service

SomeBody = TypeVar("SomeBody", bound=Streamed)
ID = "batch_req"
BEGIN = b'{"id":"' + ID.encode()
"""What an answer's line begins with, also one that was cut."""


class BatchLine(Body):
    """One request of a batch file."""

    custom_id: str = Field(min_length=1)
    method: str = "POST"
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BatchFile:
    """A file of requests that was found to be whole: every line can be read, and no two have one custom_id."""

    path: Path

    @classmethod
    def checked(cls, path: Path) -> BatchFile:
        """CheetahError names the first line that is wrong."""
        file, known = cls(path), set[str]()
        for number, line in file._numbered_lines():
            if line.custom_id in known:
                raise CheetahError(f"{path}, line {number}: custom_id {shown(line.custom_id)} stands there twice")
            known.add(line.custom_id)
        return file

    def lines(self) -> Iterator[BatchLine]:
        return (line for _, line in self._numbered_lines())

    def _numbered_lines(self) -> Iterator[tuple[int, BatchLine]]:
        try:
            with self.path.open("rb") as file:
                for number, data in enumerate(file, 1):
                    if data.strip():
                        yield number, self._line(number, data)
        except OSError as problem:
            raise CheetahError(f"{self.path}: {problem.strerror}") from None

    def _line(self, number: int, data: bytes) -> BatchLine:
        try:
            return BatchLine.model_validate_json(data)
        except ValidationError as problem:
            raise CheetahError(f"{self.path}, line {number}: {of_validation(problem).message}") from None
        except ApiError as problem:
            raise CheetahError(f"{self.path}, line {number}: {problem.message}") from None


def finished_ids(path: Path) -> set[str]:
    """The custom_ids that a file of answers has; an answer that was cut at its end is removed. CheetahError for another
    file, which stays as it is."""
    found, whole = set[str](), 0
    if not path.exists():
        return found
    if not path.is_file():
        raise CheetahError(f"{path}: is no ordinary file: name another one for the answers")
    with writing(path), path.open("r+b") as file:
        for number, data in enumerate(file, 1):
            if not data.endswith(b"\n") and (data.startswith(BEGIN) or BEGIN.startswith(data)):
                file.truncate(whole)
                break
            try:
                answer = json.loads(data)
                _ = answer["response"]  # which requests have not
                found.add(answer["custom_id"])
            except (ValueError, TypeError, KeyError, RecursionError):
                raise CheetahError(f"{path}, line {number}: no answer of a batch: name another file") from None
            whole += len(data)
    return found


async def answers(service: Service, lines: Iterable[BatchLine], together: int) -> AsyncIterator[bytes]:
    """The answers' lines as they end, with `together` requests in the engine at a time."""
    waiting, running = iter(lines), set[asyncio.Task[bytes]]()
    try:
        while True:
            for line in _up_to(together - len(running), waiting):
                running.add(asyncio.create_task(_answer(service, line)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _up_to(count: int, lines: Iterator[BatchLine]) -> Iterator[BatchLine]:
    for _ in range(count):
        if (line := next(lines, None)) is None:
            return
        yield line


async def _answer(service: Service, line: BatchLine) -> bytes:
    status, body = 200, dict[str, Any]()
    try:
        work = await _work(service, line)
        try:
            body = (await work.whole())()
        finally:
            work.close()
    except (ApiError, GrammarError) as problem:
        refusal = problem if isinstance(problem, ApiError) else of_failure(problem)
        status, body = refusal.status, refusal.body
    response = {"status_code": status, "request_id": new_id("req"), "body": body}
    return as_json({"id": new_id(ID), "custom_id": line.custom_id, "response": response, "error": None}) + b"\n"


async def _work(service: Service, line: BatchLine) -> Answering:
    """What a line asks for. ApiError if it is refused."""
    readers: dict[str, Callable[[], Prepared]] = {
        "/v1/chat/completions": lambda: service.chat(_unstreamed(ChatBody.model_validate(line.body))),
        "/v1/completions": lambda: service.completion(_unstreamed(CompletionBody.model_validate(line.body))),
    }
    if line.url not in readers:
        raise ApiError(404, f"url {shown(line.url)}: use {' or '.join(readers)}", "url")
    try:
        return await service.begin(await asyncio.to_thread(readers[line.url]))
    except ValidationError as problem:
        raise of_validation(problem) from None


def _unstreamed(body: SomeBody) -> SomeBody:
    if body.stream:
        raise ApiError(400, "stream: a batch has whole answers: leave it out", "stream")
    return body
