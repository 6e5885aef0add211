"""OpenAI's own client against the server, over the demo model in the emulator: the answers are those of `LLM`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from cheetah.runtime import LLM, RequestOutput, SamplingParams
from tests.serve.serving import Served, served

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

PROMPT = "One morning,"
CHAT = [{"role": "user", "content": "Mia has a red kite. What does Mia have?"}]
TOKENS = 6


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    options = {"device": "emulator", "gpu": "emulator-2", "batch": 4, "kv_chunk": 64, "max_context": 96}
    with LLM("demo", quiet=True, **options) as llm, served(llm, names=("demo", "cheetah/demo")) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def alone(running: Served) -> RequestOutput:
    return running.llm.generate(PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0))


@pytest.fixture(scope="module")
def answer(running: Served) -> RequestOutput:
    return running.llm.chat(CHAT, SamplingParams(temperature=0))


def test_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "cheetah/demo"]
    assert client.models.retrieve("cheetah/demo").id == "cheetah/demo"
    with pytest.raises(openai.NotFoundError) as refusal:
        client.completions.create(model="gpt", prompt=PROMPT)
    assert refusal.value.param == "model" and refusal.value.code == "model_not_found"


def test_a_completion(client: openai.OpenAI, alone: RequestOutput) -> None:
    found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    choice = found.choices[0]
    assert (choice.text, choice.finish_reason, choice.index) == (alone.text, "length", 0)
    assert found.object == "text_completion" and found.id.startswith("cmpl-")
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(alone.prompt_token_ids), TOKENS)
    details = found.usage.completion_tokens_details
    assert details is not None and (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_prompts_of_ids_lists_echo_and_n(client: openai.OpenAI, alone: RequestOutput) -> None:
    ids = list(alone.prompt_token_ids)
    how = {"model": "demo", "max_tokens": TOKENS, "temperature": 0}
    assert client.completions.create(prompt=ids, **how).choices[0].text == alone.text
    both = client.completions.create(prompt=[PROMPT, PROMPT], n=2, echo=True, **how)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in both.choices} == {PROMPT + (alone.text or "")}
    assert both.usage is not None and both.usage.prompt_tokens == 2 * len(ids)
    assert both.usage.completion_tokens == 4 * TOKENS


def test_a_stream_of_several_completions(client: openai.OpenAI, alone: RequestOutput) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    how = {"model": "demo", "max_tokens": TOKENS, "temperature": 0, "n": 2, "echo": True}
    *chunks, last = client.completions.create(prompt=PROMPT, stream=True, stream_options=options, **how)
    texts, reasons = ["", ""], [None, None]
    for chunk in chunks:
        (choice,) = chunk.choices
        assert reasons[choice.index] is None, "a chunk behind the one that ends its choice"
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == [PROMPT + (alone.text or "")] * 2 and reasons == ["length"] * 2
    so_far = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert so_far == sorted(so_far) and len(set(so_far)) > 2 and len(so_far) == len(chunks)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 2 * TOKENS


def test_a_stop_string_and_a_seed(client: openai.OpenAI, alone: RequestOutput) -> None:
    stop = (alone.text or "")[4:8]
    found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=TOKENS, temperature=0, stop=stop)
    assert found.choices[0].text == (alone.text or "")[:4] and found.choices[0].finish_reason == "stop"

    def drawn(**seed: int) -> str:
        how = {"model": "demo", "max_tokens": TOKENS, "temperature": 1.5}
        return client.completions.create(prompt=PROMPT, **how, **seed).choices[0].text

    assert drawn(seed=5) == drawn(seed=5)
    assert len({drawn() for _ in range(4)}) > 1, "without a seed each request draws its own"


def test_parameters_of_sampling_are_those_of_the_llm(running: Served, client: openai.OpenAI) -> None:
    ids = list(running.llm.prompts.encode(PROMPT))
    common = {"max_tokens": TOKENS, "temperature": 1.5, "seed": 3, "top_p": 0.8, "presence_penalty": 0.5}
    ours = {"top_k": 9, "min_p": 0.05, "repetition_penalty": 1.2, "bad_words": [" the"], "truncate_prompt_tokens": 4}
    wanted = running.llm.generate(ids, SamplingParams(**common, **ours, logit_bias={40: 3.0}))
    found = client.completions.create(model="demo", prompt=ids, logit_bias={"40": 3}, extra_body=ours, **common)
    assert found.choices[0].text == wanted.text
    assert found.usage is not None and found.usage.prompt_tokens == 4
    allowed = {"allowed_token_ids": [40, 41, 42]}
    only = client.completions.create(model="demo", prompt=ids, max_tokens=3, extra_body={**allowed, "ignore_eos": True})
    assert set(running.llm.get_tokenizer().encode(only.choices[0].text, False)) <= {40, 41, 42}


def test_a_structure(running: Served, client: openai.OpenAI) -> None:
    """By the kernel's own masks, beside another completion, which keeps its bits."""
    how = {"model": "demo", "prompt": PROMPT, "temperature": 1.0, "seed": 3, "max_tokens": 24}
    alone = client.completions.create(**how).choices[0].text
    schema = {"type": "object", "properties": {"ok": {"enum": [True, False]}}, "required": ["ok"]}
    extra = {"structured_outputs": {"json": schema | {"additionalProperties": False}, "disable_any_whitespace": True}}
    structured: list[str] = []
    asking = threading.Thread(
        target=lambda: structured.append(client.completions.create(**how, extra_body=extra).choices[0].text)
    )
    asking.start()
    assert client.completions.create(**how).choices[0].text == alone
    asking.join()
    assert structured[0] in ('{"ok":true}', '{"ok":false}')


def test_a_chat(client: openai.OpenAI, answer: RequestOutput) -> None:
    found = client.chat.completions.create(model="demo", messages=CHAT, temperature=0, max_completion_tokens=40)
    choice = found.choices[0]
    assert (choice.message.content, choice.message.role) == (answer.text, "assistant")
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    again = client.chat.completions.create(model="demo", messages=parts, temperature=0, top_p=1, user="somebody")
    assert again.choices[0].message.content == answer.text
    # 16 tokens fill a page, which is found again but for the tokens that share its step with the last one
    assert again.usage is not None and again.usage.prompt_tokens == len(answer.prompt_token_ids)


def test_a_stream_of_a_chat(client: openai.OpenAI, answer: RequestOutput) -> None:
    options = {"include_usage": True}
    first, *deltas, end, usage = client.chat.completions.create(
        model="demo", messages=CHAT, temperature=0, stream=True, stream_options=options
    )
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == answer.text
    assert all(chunk.choices[0].finish_reason is None and chunk.choices[0].delta.content for chunk in deltas)
    assert all(chunk.usage is None for chunk in deltas), "it is told in the end"
    assert end.choices[0].finish_reason == "stop" and not end.choices[0].delta.model_dump(exclude_none=True)
    assert usage.choices == [] and usage.usage is not None
    assert usage.usage.total_tokens == len(answer.prompt_token_ids) + len(answer.token_ids)
    assert len({chunk.id for chunk in (first, *deltas, end, usage)}) == 1


def test_several_async_clients_get_what_each_gets_alone(running: Served) -> None:
    prompts = [PROMPT, "Mia has", "A green boat", "The fox", "He had", "Max"]
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=3)
    wanted = [running.llm.generate(prompt, params).text for prompt in prompts]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=running.url, api_key="none") as client:

            async def ask(prompt: str) -> str:
                how = {"model": "demo", "max_tokens": TOKENS, "temperature": 1.0, "seed": 3}
                stream = await client.completions.create(prompt=prompt, stream=True, **how)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(ask, prompts))

    assert asyncio.run(ask_all()) == wanted


def test_a_response(client: openai.OpenAI, answer: RequestOutput) -> None:
    found = client.responses.create(model="demo", input=CHAT[0]["content"], temperature=0)
    assert (found.output_text, found.status) == (answer.text, "completed")
    assert found.usage is not None and found.usage.input_tokens == len(answer.prompt_token_ids)
    message = {"role": "user", "content": [{"type": "input_text", "text": CHAT[0]["content"]}]}
    *events, last = client.responses.create(
        model="demo", input=[message], temperature=0, max_output_tokens=2, stream=True
    )
    assert events[0].type == "response.created" and last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert told == last.response.output_text and (answer.text or "").startswith(told) and told


def test_tokens_and_text(running: Served, alone: RequestOutput) -> None:
    with httpx.Client(base_url=running.address) as http:
        found = http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
        assert found["tokens"] == list(alone.prompt_token_ids) and found["count"] == len(found["tokens"])
        assert "".join(found["token_strs"]) == PROMPT and found["max_model_len"] == 96
        bare = http.post("/tokenize", json={"prompt": PROMPT, "add_special_tokens": False}).json()
        assert bare["tokens"] == found["tokens"][1:]
        chat = http.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False}).json()
        assert chat["tokens"] == list(running.llm.prompts.render(CHAT, add_generation_prompt=False)[1])
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": PROMPT}


def test_health_version_and_metrics(running: Served, alone: RequestOutput) -> None:
    with httpx.Client(base_url=running.address) as http:
        assert http.get("/health").status_code == 200 and "version" in http.get("/version").json()
        before = metrics(http)
        http.post("/v1/completions", json={"prompt": list(alone.prompt_token_ids), "max_tokens": 3, "temperature": 0})
        after = metrics(http)
    counted = {"prompt_tokens_total": len(alone.prompt_token_ids), "generation_tokens_total": 3}
    counted |= {"time_to_first_token_seconds_count": 1, "request_generation_tokens_sum": 3}
    assert {name: after[name] - before[name] for name in counted} == counted
    assert after["decode_steps_total"] > before["decode_steps_total"] and after["decode_bytes_per_step"] > 1e6
    assert not [name for name in after if "ceiling" in name or "gb_per" in name], "an emulator has no speed"
    assert (after["num_requests_running"], after["num_requests_waiting"], after["kv_cache_usage_perc"]) == (0, 0, 0)


def metrics(http: httpx.Client) -> dict[str, float]:
    """The samples of /metrics that tell of the model, by name, those of one name added up."""
    found: dict[str, float] = {}
    for line in http.get("/metrics").text.splitlines():
        if line.startswith(("vllm:", "cheetah:")):
            name, _, rest = line.partition(":")[2].partition("{")
            assert 'model_name="demo"' in rest
            found[name] = found.get(name, 0) + float(rest.rpartition(" ")[2])
    return found
