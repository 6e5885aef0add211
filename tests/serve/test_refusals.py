"""Bad requests, full queues, clients that go away, engines that fail: what the server says, and that it goes on."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.serve.serving import GatedDevice, Served, connected, quick_llm, served, wait_until

CHAT = [{"role": "user", "content": "Hello"}]
TAG = {"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}
JSON = {"content-type": "application/json"}
FUZZED = int(os.environ.get("CHEETAH_FUZZ", "250"))


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with quick_llm() as llm, served(llm, body_bytes=60_000) as server:
        yield server


@pytest.fixture
def http(running: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.address, timeout=60) as client:
        yield client


def completion(**more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "x", "max_tokens": 1, **more}


def chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, **more}


@pytest.mark.parametrize(
    ("request_", "status", "param", "words"),
    [
        (completion(temperature=-1), 400, "temperature", "expected a number from 0"),
        (completion(temperature="hot"), 400, "temperature", "valid number"),
        (completion(max_tokens=0), 400, "max_tokens", "expected an integer >= 1"),
        (completion(max_tokens=1.0), 400, "max_tokens", "integer"),
        (completion(max_tokens=1000), 400, "max_tokens", "do not fit the context of 96"),
        (completion(prompt=[5] * 96), 400, "prompt", "no room in the context of 96"),
        (completion(prompt=[999]), 400, "prompt", "outside the vocabulary"),
        (completion(prompt=[]), 400, "prompt", "is empty"),
        (completion(prompt=["x"] * 300), 400, "n", "300 completions"),
        (completion(prompt=None), 400, "prompt", "Field required"),
        (completion(prompt=5), 400, "prompt", "prompt: expected text, token ids, a list of texts"),
        (completion(prompt=[1.5]), 400, "prompt", "prompt: expected text, token ids, a list of texts"),
        (completion(prompt=[[]]), 400, "prompt", "prompt: has an empty list in it"),
        (completion(prompt="x" * 15_000), 400, "prompt", "15001 tokens leave no room in the context of 96"),
        (completion(prompt=[1.5] * 3_000), 400, "prompt", "expected text, token ids"),
        (completion(stop=["x"] * 1001), 400, "stop", "at most 1000 strings"),
        (completion(bad_words=["x"] * 1001), 400, "bad_words", "at most 1000 items"),
        (completion(bad_words=["x" * 100] * 501), 400, "bad_words", "at most 50000 characters in all"),
        (completion(stop=["x" * 100] * 501), 400, "stop", "of 50000 characters in all"),
        (completion(n=2**31, echo=True), 400, "n", "2147483648 completions"),
        (completion(n=0), 400, "n", "expected an integer >= 1"),
        (completion(stop=""), 400, "stop", "at least one character"),
        (completion(stop=[1]), 400, "stop", "string"),
        (completion(best_of=3), 400, "best_of", "give the value of n"),
        (completion(suffix="end"), 400, "suffix", "not supported"),
        (completion(fantasy=1), 400, "fantasy", "not a field"),
        (completion(logit_bias={"x": 1}), 400, "logit_bias", "no token id"),
        (completion(seed=2**64), 400, "seed", "2**64-1"),
        (completion(model="gpt"), 404, "model", "use demo"),
        (completion(model="g" * 9_000), 404, "model", "ggg...ggg"),
        (completion(**{"f" * 9_000: 1}), 400, f"{'f' * 57}...{'f' * 58}", "not a field"),
        (completion(logit_bias={"5": "x"}), 400, "logit_bias", "not a number"),
        (chat(messages=[]), 400, "messages", "list of messages"),
        (chat(messages=[{"content": "x"}]), 400, "messages", "message 0"),
        (chat(messages=[{"role": "king", "content": "x"}]), 400, "messages", "roles user and assistant"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages", "image_url"),
        (chat(modalities=["audio"]), 400, "modalities", "text"),
        (chat(chat_template="{{ 1 }}"), 400, "chat_template", "--chat-template"),
        (chat(chat_template_kwargs={"tools": []}), 400, "chat_template_kwargs", "tools"),
        (chat(tools=[{"type": "function"}]), 400, "tools", "--tool-call-parser"),
        (completion(structured_outputs={"json_object": 5}), 400, "structured_outputs", "neither true nor false"),
        (("/v1/embeddings", {"input": ""}), 400, "input", "empty text"),
        (("/v1/embeddings", {"input": ["x", ""]}), 400, "input", "empty text"),
        (chat(tool_choice="auto"), 400, "tool_choice", "give tools"),
        (("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}), 400, "tools", "stores nothing"),
        (("/v1/responses", {"input": "x", "previous_response_id": "r"}), 400, "previous_response_id", "stores nothing"),
        (("/tokenize", {}), 400, "prompt", "either a prompt or messages"),
        (("/detokenize", {"tokens": [-1]}), 400, "tokens", "outside the vocabulary"),
        (("/v1/completions", {"prompt": "x" * 60_000}), 413, None, "more than 60000 bytes"),
        (("/v1/embeddings", {"input": "x"}), 400, "input", "passes over prompts, of which there are none"),
        (("/v1/moderations", {"input": "x"}), 404, None, "Not Found"),
    ],
)
def test_a_refusal_names_the_field(
    http: httpx.Client, request_: tuple[str, Any], status: int, param: str | None, words: str
) -> None:
    path, body = request_
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert words in error["message"] and set(error) == {"message", "type", "param", "code"}


def test_bodies_that_are_no_json(http: httpx.Client) -> None:
    for data in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 9000, b'{"prompt": "\\ud800"}'):
        answer = http.post("/v1/completions", content=data, headers=JSON)
        assert answer.status_code == 400 and answer.json()["error"]["message"], data
    twice = http.post("/v1/completions", content=b'{"prompt": "a", "prompt": "b"}', headers=JSON)
    assert twice.status_code == 400 and "key 'prompt' stands twice" in twice.json()["error"]["message"]
    packed = http.post("/v1/completions", content=b'{"prompt": "a"}', headers={**JSON, "content-encoding": "gzip"})
    assert packed.status_code == 415 and "Content-Encoding" in packed.json()["error"]["message"]
    assert http.post("/v1/completions", content=b"prompt=x").status_code == 415
    assert http.get("/v1/completions").status_code == 405


def test_what_cannot_fit_is_refused_before_it_is_encoded(running: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one client's 8 MB take a minute and gigabytes."""
    encoded: list[int] = []
    encoder = running.llm.get_tokenizer()._encoder
    encode = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda text, *more: (encoded.append(len(text)), encode(text, *more))[1])
    long = "x" * 400_000
    bodies: list[tuple[str, dict[str, Any], int]] = [
        (*completion(prompt=long), 400),
        (*completion(prompt=["x", long]), 400),
        (*completion(prompt=long, truncate_prompt_tokens=20), 200),
        (*completion(prompt=long, truncate_prompt_tokens=10**9), 400),
        (*chat(messages=[{"role": "user", "content": long}]), 400),
        (*chat(messages=[{"role": "user", "content": long}], truncate_prompt_tokens=20), 200),
        ("/v1/responses", {"input": long}, 400),
        ("/v1/embeddings", {"input": long}, 400),
        ("/tokenize", {"prompt": long}, 400),
        ("/tokenize", {"messages": [{"role": "user", "content": long}]}, 400),
    ]
    with served(running.llm) as other, httpx.Client(base_url=other.address, timeout=60) as http:
        for path, body, status in bodies:
            encoded.clear()
            answer = http.post(path, json=body)
            assert answer.status_code == status, answer.text
            assert sum(encoded) <= 140_000, (path, encoded)
            if status == 400:
                error = answer.json()["error"]
                assert error["code"] == "context_length_exceeded" and "characters are more than" in error["message"]


@pytest.mark.parametrize("name", ["user", "model", "stop", "bad_words", "prompt", "suffix", "guided_regex", "unknown"])
def test_a_lone_surrogate_is_no_fault_of_the_server(http: httpx.Client, name: str) -> None:
    path, body = completion(**{name: "\ud800"})
    assert http.post(path, content=json.dumps(body), headers=JSON).status_code < 500


def test_a_field_that_changes_nothing_is_taken(http: httpx.Client) -> None:
    bench = {"repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True, "top_p": 1, "top_k": -1, "min_p": 0.0}
    path, body = completion(**bench, response_format={"type": "text"}, logit_bias={}, frequency_penalty=0, seed=-1)
    answer = http.post(path, json=body, headers={"x-request-id": "7"})
    assert answer.status_code == 200, answer.text
    of_router = {"no_stop_trim": False, "separate_reasoning": True, "stream_reasoning": True, "include_reasoning": True}
    of_router |= {"logprobs": False, "skip_special_tokens": True, "return_hidden_states": False}
    path, body = chat(**of_router)
    assert http.post(path, json=body).status_code == 200
    path, body = chat(store=False, metadata={"a": "b"}, parallel_tool_calls=True, reasoning_effort="low", tools=None)
    assert http.post(path, json=body).status_code == 200


@pytest.mark.slow
def test_any_body_is_answered_without_a_server_error(http: httpx.Client) -> None:
    draw = random.Random(FUZZED)
    statuses: dict[int, int] = {}
    for _ in range(FUZZED):
        path, data = fuzzed(draw)
        answer = http.post(path, content=data, headers=JSON)
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, (path, data, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], (path, data)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
    assert http.get("/health").status_code == 200
    assert statuses.get(200, 0) and statuses.get(400, 0) > FUZZED / 3, statuses


BODIES: list[tuple[str, dict[str, Any]]] = [
    completion(stop=["a", "b"], seed=1, temperature=0.5, stream=False, echo=True),
    completion(prompt=[1, 2, 3], stream=True, stream_options={"include_usage": True}),
    completion(top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, logit_bias={"5": 2}, bad_words=["x"]),
    completion(allowed_token_ids=[5, 6], truncate_prompt_tokens=3, presence_penalty=1, frequency_penalty=-1),
    completion(prompt=[[1], [2]], n=2, min_tokens=1, stop_token_ids=[3], ignore_eos=True),
    chat(stream=True, chat_template_kwargs={"x": 1}, tools=[], tool_choice="none"),
    chat(messages=[*CHAT, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}, *CHAT], n=1),
    chat(messages=[*CHAT, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]),
    ("/v1/responses", {"input": CHAT, "max_output_tokens": 1, "instructions": None}),
    ("/v1/responses", {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": True}),
    completion(structured_outputs={"choice": ["a", "b"]}, stream_options={"continuous_usage_stats": True}),
    chat(response_format={"type": "structural_tag", "triggers": ["<"], "structures": [TAG]}, logprobs=True),
    ("/tokenize", {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": False}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, -(2**63), 2**64, 10**40, 0.5, -0.0, 1e308, 1e-320, "", "x", "\x00", "\u202e"),
    *("9" * 50, "\ud83d\ude00", [], [[]], {}, {"": None}, [None], [0.5], ["x", 1], {"type": "text"}, [{"role": 3}]),
    *([[[[[[]]]]]], "auto", "{{ 1 }}", "<|end|>", [1] * 200, {"role": "user"}, {"type": "json_object"}, [-1], [2**40]),
]


def fuzzed(draw: random.Random) -> tuple[str, bytes]:
    """A request that is nearly right."""
    path, body = draw.choice(BODIES)
    changed = json.loads(json.dumps(body))
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        change(changed, draw)
    data = json.dumps(changed, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    if draw.random() < 0.1:
        place = draw.randrange(len(data) + 1)
        data = data[:place] + draw.choice([b"", b"\x00", b"NaN", b"}", b'"', b"\xff", b"1" * 5000]) + data[place + 1 :]
    return path, data


def change(value: Any, draw: random.Random) -> None:
    """Replaces, removes or adds something, at some depth."""
    inner = [
        entry for entry in (value.values() if isinstance(value, dict) else value) if isinstance(entry, dict | list)
    ]
    if inner and draw.random() < 0.5:
        change(draw.choice(inner), draw)
    elif isinstance(value, list):
        value.insert(draw.randrange(len(value) + 1), copy.deepcopy(draw.choice(JUNK)))
    else:
        names = [*value, "tools", "logprobs", "top_k", "response_format", "logit_bias", "unknown", "n", "seed", "top_p"]
        name = draw.choice(names)
        value[name] = copy.deepcopy(draw.choice(JUNK))
        if draw.random() < 0.2:
            del value[name]


@pytest.mark.slow
def test_keys() -> None:
    with quick_llm() as llm, served(llm, api_keys=("first", "second")) as running:
        with httpx.Client(base_url=running.address) as http:
            for path in ("/v1/models", "/metrics", "/version"):
                refusal = http.get(path)
                assert refusal.status_code == 401 and "Bearer" in refusal.json()["error"]["message"]
            assert http.get("/health").status_code == 200
            for scheme, status in (("bearer", 200), ("BEARER ", 200), ("Basic", 401)):
                answer = http.get("/version", headers={"authorization": f"{scheme} second"})
                assert answer.status_code == status, scheme
        for key in ("first", "second"):
            assert openai.OpenAI(base_url=running.url, api_key=key).models.list().data
        for key in ("f", "firs", "firsts", "wrong"):
            with pytest.raises(openai.AuthenticationError):
                openai.OpenAI(base_url=running.url, api_key=key).models.list()


@pytest.mark.slow
def test_a_full_queue_says_when_to_try_again() -> None:
    device = GatedDevice()
    with quick_llm(device) as llm, served(llm, most_waiting=1) as running:
        client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
        how = {"model": "demo", "max_tokens": 4, "temperature": 0, "extra_body": {"ignore_eos": True}}
        device.gate.clear()
        # Two run and one waits; a stream's headers come at once, its text with the first token.
        streams = [client.completions.create(prompt="One morning,", stream=True, **how) for _ in range(3)]
        with pytest.raises(openai.RateLimitError) as refusal:
            client.completions.create(prompt="x", **how)
        assert refusal.value.response.headers["retry-after"] == "1"
        device.gate.set()
        texts = ["".join(chunk.choices[0].text for chunk in stream) for stream in streams]
        assert len(set(texts)) == 1 and texts[0]
        assert client.completions.create(prompt="x", **how).choices[0].finish_reason == "length"


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.slow
def test_a_client_that_goes_away_is_cancelled(streams: bool) -> None:
    device = GatedDevice()
    with quick_llm(device) as llm, served(llm) as running:
        device.gate.clear()
        body = json.dumps({"prompt": "One morning,", "max_tokens": 80, "ignore_eos": True, "stream": streams})
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with connected(running, f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()):
            wait_until(lambda: len(device.launches) > 0)
        launches = len(device.launches)
        aborted = 'finished_reason="abort",model_name="demo"} 1.0'
        wait_until(lambda: aborted in httpx.get(f"{running.address}/metrics").text)
        device.gate.set()
        wait_until(lambda: llm.engine.engine.is_idle)
        assert len(device.launches) <= launches + 1, "nothing is launched for a client that has gone"
        pool = llm.engine.engine.launcher.cache.pool
        assert pool.available_pages == pool.pages and aborted in httpx.get(f"{running.address}/metrics").text


@pytest.mark.slow
def test_an_engine_that_hangs_is_ill_and_one_that_fails_is_given_up() -> None:
    device = GatedDevice()
    with quick_llm(device) as llm, served(llm, stuck_after_s=0.05) as running:
        client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
        device.gate.clear()
        stream = client.completions.create(model="demo", prompt="x", max_tokens=3, stream=True)
        wait_until(lambda: httpx.get(f"{running.address}/health").status_code == 503)
        assert "has not ended" in httpx.get(f"{running.address}/health").json()["error"]["message"]
        device.gate.set()
        assert list(stream)
        wait_until(lambda: httpx.get(f"{running.address}/health").status_code == 200)

        device.hang = True
        with pytest.raises(openai.InternalServerError, match="did not finish"):
            client.completions.create(model="demo", prompt="x", max_tokens=3)
        assert running.faults == [1]
        assert httpx.get(f"{running.address}/health").status_code == 503
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="demo", prompt="x")


@pytest.mark.slow
def test_requests_under_way_are_finished_when_the_server_is_told_to_stop() -> None:
    device = GatedDevice(seconds=0.02)
    with quick_llm(device, launch_steps=2) as llm, served(llm) as running:
        client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
        extra = {"ignore_eos": True}
        stream = client.completions.create(model="demo", prompt="x", max_tokens=40, stream=True, extra_body=extra)
        next(stream)
        running.server.should_exit = True
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(model="demo", prompt="x")
