"""Every field that clients send: each means something here, changes nothing, or is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from cheetah.serve.records import ChatBody, CompletionBody
from tests.serve.serving import quick_llm, served

CHAT = [{"role": "user", "content": "Hello"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

UNKNOWN = {"audio", "function_call", "functions", "moderation", "prompt_cache_options"}
UNKNOWN |= {"web_search_options"}
"""Of OpenAI's fields, those that ask for what a text model on one GPU cannot do: refused by name."""

TAKEN: dict[str, Any] = {
    "allowed_token_ids": [40, 41],
    "bad_words": ["kite", "a red kite"],
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "length_penalty": 1.0,
    "logit_bias": {"40": 1},
    "metadata": {"a": "b"},
    "min_p": 0.1,
    "min_tokens": 1,
    "n": 2,
    "presence_penalty": 0.5,
    "prompt_logprobs": 1,
    "repetition_penalty": 1.1,
    "seed": 7,
    "service_tier": "auto",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": ["x"],
    "stop_token_ids": [3],
    "store": False,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "truncate_prompt_tokens": 2,
    "use_beam_search": False,
    "user": "somebody",
}
TAKEN_BY = {
    COMPLETIONS: {"echo": True, "logprobs": 2, "add_special_tokens": False, "return_token_ids": True, "best_of": 1},
    CHATS: {
        "logprobs": True,
        "reasoning_effort": "low",
        "prediction": {"type": "content", "content": [{"type": "text", "text": "Hello"}]},
        "chat_template_kwargs": {"x": 1},
        "max_completion_tokens": 2,
        "parallel_tool_calls": False,
    },
}
REFUSED: list[tuple[str, str, Any, str]] = [
    (COMPLETIONS, "suffix", "x", "put what comes behind into the prompt"),
    (COMPLETIONS, "best_of", 3, "give the value of n"),
    (COMPLETIONS, "logprobs", 21, "from 0 to 20"),
    (COMPLETIONS, "prompt_logprobs", -1, "from 0 to 20"),
    (COMPLETIONS, "use_beam_search", True, "is not supported"),
    (CHATS, "top_logprobs", 2, "without logprobs: true"),
    (CHATS, "modalities", ["audio"], 'only ["text"]'),
    (CHATS, "prediction", "x", "valid dictionary"),
    *((CHATS, name, {"x": 1}, "not a field that this server knows") for name in sorted(UNKNOWN)),
]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with quick_llm() as llm, served(llm) as running, httpx.Client(base_url=running.address, timeout=60) as client:
        yield client


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": 2, **({"prompt": "One morning,"} if path == COMPLETIONS else {"messages": CHAT}), **fields}


def test_all_of_openais_fields_are_thought_of() -> None:
    for body, params in (
        (CompletionBody, completion_create_params.CompletionCreateParamsBase),
        (ChatBody, chat_create_params.CompletionCreateParamsBase),
    ):
        assert {*params.__annotations__} - {*body.model_fields} <= UNKNOWN
        assert not UNKNOWN & {*body.model_fields}


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_field_is_taken(http: httpx.Client, path: str) -> None:
    for name, value in (TAKEN | TAKEN_BY[path]).items():
        answer = http.post(path, json=body_of(path, {name: value}))
        assert answer.status_code == 200, (name, answer.text)
        assert len(answer.json()["choices"]) == (value if name == "n" else 1)


@pytest.mark.parametrize(("path", "name", "value", "words"), REFUSED, ids=lambda value: str(value)[:20])
def test_a_field_is_refused(http: httpx.Client, path: str, name: str, value: Any, words: str) -> None:
    answer = http.post(path, json=body_of(path, {name: value}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name) and words in error["message"], error
