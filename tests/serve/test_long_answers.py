"""Long answers do not hold up the event loop: they are made beside it, and no call of the JSON encoder, which keeps
Python's lock, has many values; threads that read or write give the lock away soon."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cheetah.runtime.text.pieces import Pieces
from cheetah.serve import answers, app, replies
from cheetah.serve.answers import PIECE, as_json, long_json
from cheetah.serve.app import SWITCH_SECONDS
from cheetah.serve.logprobs import CompletionLogprobs
from tests.serve.serving import quick_llm, served, wait_until

RECORDS: tuple[Any, ...] = (
    {},
    [],
    {"a": [], "b": {}, "c": [[]], "d": [1, "x", None, True, 0.5]},
    {"data": [{"index": n, "embedding": [n / 7] * 3} for n in range(3)], "lone": "\ud800", "ü": "ö"},
    {"tokens": list(range(3 * PIECE + 1)), "texts": ["é"] * PIECE},
    [[1], 2, [3, [4]]],
)


@pytest.mark.parametrize("record", RECORDS, ids=range(len(RECORDS)))
def test_a_long_answer_is_written_as_any_other(record: Any) -> None:
    assert long_json(record) == as_json(record)


def test_no_call_of_the_encoder_has_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    encoded = answers._encoded

    def noted(value: Any) -> str:
        sizes.append(len(value) if isinstance(value, list) else 1)
        return encoded(value)

    monkeypatch.setattr(answers, "_encoded", noted)
    vectors = [{"embedding": [0.5] * (2 * PIECE + 5)} for _ in range(3)]
    assert json.loads(long_json({"data": vectors}))["data"] == vectors
    assert max(sizes) == PIECE and sizes.count(PIECE) == 6


@pytest.mark.slow
def test_long_answers_are_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """And while a server runs threads give Python's lock away ten times as often as they usually do."""
    threads: list[str] = []

    def noted(record: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return long_json(record)

    monkeypatch.setattr(replies, "long_json", noted)
    monkeypatch.setattr(app, "IDLE_SECONDS", 0.01)
    usual = sys.getswitchinterval()
    with quick_llm() as llm, served(llm) as server:
        assert sys.getswitchinterval() == SWITCH_SECONDS < usual / 5
        wait_until(lambda: llm._grammars._library is not None)  # before anybody asks for structured output
        answer = httpx.post(f"{server.address}/tokenize", json={"prompt": "One morning"}).json()
        assert answer["count"] == len(answer["tokens"])
        assert httpx.post(f"{server.url}/completions", json={"prompt": "One", "max_tokens": 2}).status_code == 200
    assert sys.getswitchinterval() == usual
    assert len(threads) == 2 and all(name.startswith("short bodies") for name in threads), threads


@pytest.mark.slow
def test_logprobs_of_a_prompt_are_told_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and streamed: of 8192 tokens with the 20 likeliest of each they take 0.9 s."""
    threads: dict[str, list[str]] = {"named": [], "told": []}

    def noted(kind: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (threads[kind].append(threading.current_thread().name), plain(*given))[1]

    monkeypatch.setattr(Pieces, "_named", noted("named", Pieces._named))
    monkeypatch.setattr(CompletionLogprobs, "record", noted("told", CompletionLogprobs.record))
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 1, "echo": True, "logprobs": 2}
    with quick_llm() as llm, served(llm) as server:
        whole = httpx.post(f"{server.url}/completions", json=body).json()["choices"][0]["logprobs"]
        lines = httpx.post(f"{server.url}/completions", json={**body, "stream": True}).text.split("\n\n")
        loop = next(thread.name for thread in threading.enumerate() if thread.name.endswith("(run)"))
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["logprobs"] == whole and len(whole["tokens"]) == 5
    assert len(threads["named"]) == 8 and len(threads["told"]) == 2
    assert loop not in threads["named"] + threads["told"], threads
