"""Edges of a request: several completions in the usage and when their client leaves, and prompts that fill the context.

Each is held as a property of the server, and a bug that is planted there must be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from cheetah.runtime.outputs import StreamPiece
from cheetah.serve.answers import Usage
from cheetah.serve.driver import Answers, Driver
from cheetah.serve.service import Service
from tests.serve.serving import GatedDevice, quick_llm, served, wait_until

pytestmark = pytest.mark.slow

CONTEXT, PROMPT = 96, [*range(1, 60)]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def asked(http: httpx.Client, prompt: Sequence[int], **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": list(prompt), **GREEDY, **fields})


def usage_counts_a_prompt_once() -> None:
    """What was cached of it too, however many completions it has."""
    with quick_llm() as llm, served(llm) as server, httpx.Client(base_url=server.address, timeout=30) as http:
        asked(http, PROMPT, max_tokens=1)
        told = [asked(http, PROMPT, max_tokens=2, n=n).json()["usage"] for n in (1, 2)]
        cached = [one["prompt_tokens_details"]["cached_tokens"] for one in told]
        assert cached[0] == cached[1] > 0
        assert [(one["prompt_tokens"], one["completion_tokens"]) for one in told] == [(59, 2), (59, 4)]


def who_leaves_is_ended() -> None:
    """With all of its completions: the engine makes no more than the launch under way."""
    device = GatedDevice(seconds=0.2)
    with quick_llm(device, launch_steps=4) as llm, served(llm) as server:
        with (
            httpx.Client(base_url=server.address, timeout=30) as http,
            http.stream("POST", "/v1/completions", json=_stream()) as answer,
        ):
            next(answer.iter_lines())
            device.gate.clear()
        driver = llm_driver(server)
        wait_until(lambda: not driver._live)
        device.gate.set()
        wait_until(lambda: llm.engine.engine.is_idle)
        assert llm.engine.engine.load().decoded.steps < 60


def _stream() -> dict[str, Any]:
    return {"prompt": [5, 6], "max_tokens": 90, "n": 2, "stream": True, **GREEDY}


def llm_driver(server: Any) -> Driver:
    driver = server.server.config.app.state.service.driver
    assert isinstance(driver, Driver)
    return driver


def the_context_is_filled() -> None:
    """The last token that is made needs no place: one more than there is room for, and no second one."""
    room = CONTEXT - len(PROMPT)
    with quick_llm() as llm, served(llm) as server, httpx.Client(base_url=server.address, timeout=30) as http:
        for most in (room, room + 1):
            answer = asked(http, PROMPT, max_tokens=most)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == most
            assert answer.json()["choices"][0]["finish_reason"] == "length"
        refused = asked(http, PROMPT, max_tokens=room + 2)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


def counts_each(patch: pytest.MonkeyPatch) -> None:
    def take(usage: Usage, piece: StreamPiece) -> None:
        usage.completion_tokens += len(piece.token_ids)
        usage.cached_tokens += piece.timings.cached_tokens if piece.timings else 0

    patch.setattr(Usage, "take", take)


def ends_the_first(patch: pytest.MonkeyPatch) -> None:
    def release(driver: Driver, answers: Answers, ids: Sequence[int]) -> None:
        ids = [id for id in ids if driver._live.pop(id, None) is answers]
        driver._engine.release(ids[:1])

    patch.setattr(Driver, "release", release)


def leaves_a_place(patch: pytest.MonkeyPatch) -> None:
    plain = Service._check_length

    def check(service: Service, tokens: int, most: int | None, param: str) -> None:
        plain(service, tokens, None if most is None else most + 1, param)

    patch.setattr(Service, "_check_length", check)


PROPERTIES = {
    usage_counts_a_prompt_once: counts_each,
    who_leaves_is_ended: ends_the_first,
    the_context_is_filled: leaves_a_place,
}


@pytest.mark.parametrize("holds", PROPERTIES)
def test_the_property_holds(holds: Callable[[], None]) -> None:
    holds()


@pytest.mark.parametrize("holds", PROPERTIES)
def test_a_planted_bug_is_seen(holds: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    PROPERTIES[holds](monkeypatch)
    with pytest.raises(AssertionError):
        holds()
