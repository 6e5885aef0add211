"""OpenAI's client asks for logprobs: those of `LLM`, in OpenAI's shapes, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from cheetah.runtime import LLM, Logprob, RequestOutput, SamplingParams
from cheetah.serve.logprobs import LEAST, ChatLogprobs, TokenTexts, of_prompt
from tests.serve.serving import Served, served

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

PROMPT = "One morning,"
CHAT = [{"role": "user", "content": "Mia has a red kite. What does Mia have?"}]
HOW = {"model": "demo", "temperature": 0, "max_tokens": 5}


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    options = {"device": "emulator", "gpu": "emulator-2", "batch": 4, "kv_chunk": 64, "max_context": 96}
    with LLM("demo", quiet=True, **options) as llm, served(llm, names=("demo",)) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def alone(running: Served) -> RequestOutput:
    return running.llm.generate(PROMPT, SamplingParams(max_tokens=5, temperature=0, logprobs=2, prompt_logprobs=2))


def test_of_a_completion_with_its_echo(client: openai.OpenAI, running: Served, alone: RequestOutput) -> None:
    choice = client.completions.create(prompt=PROMPT, logprobs=2, echo=True, **HOW).choices[0]
    found, (output,) = choice.logprobs, alone.outputs
    assert found is not None and alone.prompt_logprobs is not None and output.logprobs is not None
    ids = [*alone.prompt_token_ids, *output.token_ids]
    places = [*alone.prompt_logprobs, *output.logprobs]
    text_of = running.llm.get_tokenizer().token_text
    assert found.tokens == [text_of(token) for token in ids]
    assert found.token_logprobs == [place and place[token].logprob for token, place in zip(ids, places, strict=True)]
    assert found.top_logprobs == [
        place and {text_of(token): entry.logprob for token, entry in place.items()} for place in places
    ]
    assert found.text_offset is not None and found.text_offset[:2] == [0, 0]  # what begins a text has none
    for token, offset in [*zip(found.tokens or (), found.text_offset, strict=True)][1:]:
        assert choice.text[offset:].startswith(token)


def test_of_a_prompt_alone(client: openai.OpenAI, alone: RequestOutput) -> None:
    how = {"model": "demo", "prompt": PROMPT, "logprobs": 2, "echo": True}
    longer = client.completions.create(max_tokens=1, **how).choices[0].logprobs
    found = client.completions.create(max_tokens=0, **how)
    choice, tokens = found.choices[0], len(alone.prompt_token_ids)
    assert (choice.text, choice.finish_reason) == (PROMPT, "length") and choice.logprobs is not None
    assert choice.logprobs.token_logprobs == (longer and longer.token_logprobs or [])[:-1]
    assert len(choice.logprobs.tokens or ()) == tokens
    assert found.usage is not None and (found.usage.prompt_tokens, found.usage.completion_tokens) == (tokens, 0)
    chunks = client.completions.create(max_tokens=0, stream=True, **how)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT
    with pytest.raises(openai.BadRequestError, match="max_tokens=0"):
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=0)


def test_of_a_stream_of_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, logprobs=1, echo=True, n=2, **HOW)
    told: list[list[object]] = [[], []]
    for chunk in client.completions.create(prompt=PROMPT, logprobs=1, echo=True, n=2, stream=True, **HOW):
        (choice,) = chunk.choices
        if choice.logprobs is not None:
            lists = choice.logprobs.model_dump()
            told[choice.index] += zip(*lists.values(), strict=True)
    for choice, rows in zip(whole.choices, told, strict=True):
        assert choice.logprobs is not None
        assert rows == [*zip(*choice.logprobs.model_dump().values(), strict=True)]


def test_of_a_chat_whole_and_streamed(client: openai.OpenAI, running: Served) -> None:
    (output,) = running.llm.chat(CHAT, SamplingParams(max_tokens=5, temperature=0, logprobs=3)).outputs
    choice = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **HOW).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None and output.logprobs is not None
    for found, token, place in zip(choice.logprobs.content, output.token_ids, output.logprobs, strict=True):
        assert (found.token, found.logprob) == (place[token].decoded_token, place[token].logprob)
        assert [entry.logprob for entry in found.top_logprobs] == sorted(e.logprob for e in place.values())[::-1][:3]
        assert bytes(found.bytes or ()).decode() == found.token
    told = []
    for chunk in client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, stream=True, **HOW):
        if (logprobs := chunk.choices[0].logprobs) is not None:
            told += logprobs.content or []
    assert told == choice.logprobs.content
    plain = client.chat.completions.create(messages=CHAT, **HOW).choices[0]
    assert plain.logprobs is None and plain.message.content == choice.message.content


def test_of_a_response_whole_and_streamed(client: openai.OpenAI) -> None:
    how = {"model": "demo", "temperature": 0, "max_output_tokens": 5, "input": CHAT[0]["content"], "top_logprobs": 3}
    asked = {**how, "include": ["message.output_text.logprobs"]}
    content = client.responses.create(**asked).output[0].content[0]
    of_chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **HOW).choices[0].logprobs
    assert of_chat is not None and content.logprobs
    assert [one.model_dump() for one in content.logprobs] == [one.model_dump() for one in of_chat.content or ()]
    *events, last = client.responses.create(stream=True, **asked)
    kinds = {"response.output_text.delta", "response.output_text.done"}
    *told, done = [[one.model_dump() for one in event.logprobs] for event in events if event.type in kinds]
    assert [entry for entries in told for entry in entries] == done == [one.model_dump() for one in content.logprobs]
    assert last.response.output[0].content[0].logprobs == content.logprobs
    with pytest.raises(openai.BadRequestError, match="top_logprobs: is given without include"):
        client.responses.create(**how)
    with pytest.raises(openai.BadRequestError, match="include: 'file_search_call.results' is not supported"):
        client.responses.create(**{**how, "include": ["file_search_call.results"]})


def test_of_prompts_by_vllms_name(client: openai.OpenAI, alone: RequestOutput) -> None:
    extra = {"prompt_logprobs": 2}
    for found in (
        client.completions.create(prompt=PROMPT, extra_body=extra, **HOW).choices[0].model_extra,
        client.chat.completions.create(messages=CHAT, extra_body=extra, **HOW).model_extra,
    ):
        assert found is not None and found["prompt_logprobs"][0] is None
        assert all(entry["rank"] >= 1 for place in found["prompt_logprobs"][1:] for entry in place.values())
    for call in (
        lambda: client.completions.create(prompt=PROMPT, extra_body=extra, stream=True, **HOW),
        lambda: client.chat.completions.create(messages=CHAT, extra_body=extra, stream=True, **HOW),
    ):
        with pytest.raises(openai.BadRequestError, match="not told in streams"):
            call()


def test_what_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="logprobs=21: expected"):
        client.completions.create(prompt=PROMPT, logprobs=21, **HOW)
    for fields, words in (
        ({"top_logprobs": 2}, "without logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: is 21: expected an integer from 0 to 20"),
    ):
        with pytest.raises(openai.BadRequestError, match=words) as refusal:
            client.chat.completions.create(messages=CHAT, **fields, **HOW)
        assert refusal.value.param == "top_logprobs"


def test_what_cannot_be_is_a_number_too() -> None:
    place = {3: Logprob(-float("inf"), 9), 4: Logprob(-0.5, 1)}
    (found,) = ChatLogprobs(TokenTexts(None), 1).record([place])["content"]
    assert found["logprob"] == LEAST and [entry["logprob"] for entry in found["top_logprobs"]] == [-0.5]
    (entry,) = of_prompt([place]) or ()
    assert entry is not None and entry["3"] == {"logprob": LEAST, "rank": 9, "decoded_token": None}
