"""Structured output and calls that must be made, as OpenAI's client asks for them: every text is what was asked for."""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from cheetah.runtime import SamplingParams
from tests.serve.serving import Served, quick_llm, served

ROOM = 220
CHAT: list[Any] = [{"role": "user", "content": "Who is Finn?"}]
AGE: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9999}},
    "required": ["age"],
    "additionalProperties": False,
}
PERSON = {
    **AGE,
    "properties": {"name": {"type": "string", "maxLength": 8}, **AGE["properties"]},
    "required": ["name", "age"],
}
COMPACT = {"json": PERSON, "disable_any_whitespace": True}


class Kite(pydantic.BaseModel):
    color: Literal["red", "blue"]
    price: int
    flies: bool


class Age(pydantic.BaseModel):
    age: int = pydantic.Field(ge=0, le=9999)


FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE, "strict": True}}


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with quick_llm(max_context=256, batch=4, kv_chunk=64, chat_template=template) as llm, served(llm) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)


def checked(text: str | None, schema: dict[str, Any]) -> Any:
    value = json.loads(text or "")
    jsonschema.validate(value, schema)
    return value


@pytest.mark.slow
def test_a_schema_in_a_chat(client: openai.OpenAI) -> None:
    how: dict[str, Any] = {"model": "demo", "messages": CHAT, "response_format": FORMAT, "max_tokens": ROOM}
    found = client.chat.completions.create(**how, n=2, temperature=4.0, seed=6)
    assert [choice.finish_reason for choice in found.choices] == ["stop", "stop"]
    first, second = (choice.message.content for choice in found.choices)
    assert checked(first, AGE) and checked(second, AGE) and first != second
    chunks = list(client.chat.completions.create(**how, stream=True, temperature=4.0, seed=6))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == first


@pytest.mark.slow
def test_any_object_and_other_kinds(client: openai.OpenAI) -> None:
    kind: Any = {"type": "json_object"}
    free = client.chat.completions.create(model="demo", messages=CHAT, response_format=kind, max_tokens=40)
    assert (free.choices[0].message.content or "").startswith("{")
    for extra, pattern in (
        ({"guided_regex": "[a-z]{3,5}@[a-z]{2}"}, "[a-z]{3,5}@[a-z]{2}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"choice": ["perhaps"]}, "ignore_eos": True, "min_tokens": 30}, "perhaps"),
        ({"guided_grammar": 'root ::= "x" "y"+ "."'}, "xy+[.]"),
        ({"structured_outputs": COMPACT}, r"\{.*\}"),
        ({"guided_json": json.dumps({"enum": [7]})}, "7"),
    ):
        found = client.completions.create(
            model="demo", prompt="One morning,", max_tokens=ROOM, temperature=0.8, extra_body=extra
        )
        assert found.choices[0].finish_reason == "stop" and re.fullmatch(pattern, found.choices[0].text), extra


@pytest.mark.slow
def test_a_response_with_a_format(client: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "age", "schema": AGE}}
    found = client.responses.create(model="demo", input="Who is Finn?", text=text, max_output_tokens=ROOM)
    assert found.status == "completed" and checked(found.output_text, AGE)
    assert client.responses.parse(model="demo", input="Who?", text_format=Age, max_output_tokens=ROOM).output_parsed
    assert found.text is not None and found.text.format is not None and found.text.format.type == "json_schema"
    plain: Any = {"format": {"type": "text"}}
    assert client.responses.create(model="demo", input="x", text=plain, max_output_tokens=1).status == "incomplete"


@pytest.mark.slow
def test_a_small_model_wastes_no_tokens_on_blanks(client: openai.OpenAI) -> None:
    """The demo writes as many as it may: three hundred of them, and then there was no room for the rest."""
    found = client.chat.completions.parse(model="demo", messages=CHAT, response_format=Kite, max_tokens=60)
    assert found.choices[0].message.parsed is not None


@pytest.mark.slow
def test_neighbours_are_not_changed_by_structured_ones(running: Served) -> None:
    """The same bits as alone: the plan has items of a fixed length."""
    llm = running.llm
    params = SamplingParams(max_tokens=40, temperature=1.1, seed=9)
    alone = llm.generate("One morning,", params).token_ids
    structured = SamplingParams(max_tokens=60, temperature=1.0, seed=2, n=2, structured_outputs=COMPACT)
    both = llm.generate(["A long time ago", "One morning,"], [structured, params])
    assert both[1].token_ids == alone
    texts = [output.text for output in both[0].outputs]
    assert all(checked(text, PERSON) for text in texts)
    assert [output.text for output in llm.generate("A long time ago", structured).outputs] == texts


@pytest.mark.slow
def test_a_tag_within_free_text(running: Served, client: openai.OpenAI) -> None:
    """A bias towards what the trigger is made of lets the text reach it soon; what follows is forced."""
    form: Any = {"type": "structural_tag", "triggers": ["A"]}
    form["structures"] = [{"begin": "A<age>", "schema": AGE, "end": "</age>"}]
    (letter,) = running.llm.get_tokenizer().encode("A", False)
    how = {"model": "demo", "messages": CHAT, "max_tokens": 60, "temperature": 0, "logit_bias": {str(letter): 12.0}}
    text = client.chat.completions.create(response_format=form, **how).choices[0].message.content or ""
    _, _, behind = text.partition("A")
    assert behind and re.match(r'<age>\{\s*"age"', behind), text


def test_a_stop_string_and_a_length_end_a_structure_early(running: Served) -> None:
    stopped = running.llm.generate("x", SamplingParams(stop='"age"', max_tokens=ROOM, structured_outputs=COMPACT))
    assert stopped.stop_reason == '"age"' and (stopped.text or "").startswith('{"name":')
    cut = running.llm.generate("x", SamplingParams(max_tokens=4, structured_outputs=COMPACT))
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 4)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("chat/completions", {"response_format": {"type": "json"}}, "response_format", "expected text, json_object"),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "json_schema.schema: None",
        ),
        ("chat/completions", {"response_format": {"type": "structural_tag"}}, "response_format", "triggers: None"),
        ("completions", {"structured_outputs": {"json": {"type": "foo"}}}, "structured_outputs", "Invalid type: foo"),
        ("completions", {"structured_outputs": {"speed": 1}}, "structured_outputs", "speed is not supported"),
        ("completions", {"guided_regex": "("}, "guided_regex", "unclosed group"),
        ("completions", {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex says already"),
        ("completions", {"guided_json": "{", "stream": True}, "guided_json", "cannot be read as JSON"),
        ("completions", {"guided_regex": "((a{1,900}){1,900}){1,900}"}, "structured_outputs", "followed any further"),
        ("completions", {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [7]}, None, "none is left of"),
        ("completions", {"allowed_token_ids": [78], "bad_words": ["k"]}, None, "none is left of those that may"),
        ("responses", {"text": {"format": {"type": "xml"}}}, "text", "expected text, json_object or json_schema"),
        ("responses", {"text": {"voice": "low"}}, "text", "voice is not supported"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(
    running: Served, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    what = {"chat/completions": {"messages": CHAT}, "completions": {"prompt": "x"}, "responses": {"input": "x"}}[path]
    more = {} if path == "responses" else {"max_tokens": 200}
    answer = httpx.post(f"{running.url}/{path}", json={**what, **more, **body}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"], error


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "find_person", "parameters": AGE, "strict": True}},
    {
        "type": "function",
        "function": {
            "name": "time",
            "parameters": {
                "$defs": {"zone": {"enum": ["UTC", "CET"]}},
                "type": "object",
                "properties": {"zone": {"$ref": "#/$defs/zone"}},
                "required": ["zone"],
                "additionalProperties": False,
                "not": {"type": "null"},  # which llguidance does not know
            },
        },
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_calls_that_must_be_made(running: Served, form: str) -> None:
    with served(running.llm, tool_parser=form) as running:
        client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
        how: dict[str, Any] = {"model": "demo", "messages": CHAT, "tools": TOOLS, "temperature": 1.0, "seed": 3}
        named: Any = {"type": "function", "function": {"name": "time"}}
        choice = client.chat.completions.create(**how, tool_choice=named).choices[0]
        (call,) = choice.message.tool_calls or []
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert call.function.name == "time" and json.loads(call.function.arguments)["zone"] in ("UTC", "CET")

        seen = set()
        for seed in range(2):
            one = {**how, "seed": seed, "parallel_tool_calls": False}
            chunks = list(client.chat.completions.create(**one, tool_choice="required", stream=True))
            (part,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            assert chunks[-1].choices[0].finish_reason == "tool_calls" and part.function is not None
            seen.add(part.function.name)
            if part.function.name == "find_person":
                checked(part.function.arguments, AGE)
        assert seen <= {"find_person", "time"}

        for wrong, words in (
            ({"type": "function", "function": {"name": "weather"}}, "there is no tool 'weather'"),
            ({"type": "function"}, 'expected "auto", "none", "required"'),
        ):
            with pytest.raises(openai.BadRequestError, match=words) as refusal:
                client.chat.completions.create(**how, tool_choice=wrong)  # type: ignore[call-overload]
            assert refusal.value.param == "tool_choice"
        strict = [{"type": "function", "function": {**TOOLS[1]["function"], "strict": True}}]
        with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as refusal:
            client.chat.completions.create(**{**how, "tools": strict}, tool_choice="required")
        assert refusal.value.param == "tools"
        for name in ("", "a b", "a\n", "\0", "ü", "x" * 65):
            renamed = [{"type": "function", "function": {"name": name}}]
            for chosen in ("required", "auto"):
                with pytest.raises(openai.BadRequestError, match="tools: the name .* expected"):
                    client.chat.completions.create(**{**how, "tools": renamed}, tool_choice=chosen)


def test_many_at_a_time_follow_their_own_grammars(client: openai.OpenAI) -> None:
    def ask(number: int) -> str:
        extra = {"structured_outputs": {"regex": f"{number}-[a-z]{{4,9}}"}}
        found = client.completions.create(
            model="demo", prompt="x", max_tokens=ROOM, temperature=1.0, seed=number, extra_body=extra
        )
        return found.choices[0].text

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for number, text in enumerate(pool.map(ask, range(6))):
            assert re.fullmatch(f"{number}-[a-z]{{4,9}}", text)
