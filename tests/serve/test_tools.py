"""Calls of tools: as models write them, cut anywhere, and as OpenAI's client gets them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from cheetah.runtime import SamplingParams
from cheetah.runtime.text.answer_parts import AnswerPart, Thought, ToolCall
from cheetah.runtime.text.pieces import Pieces
from cheetah.runtime.text.prompts import Prompts
from cheetah.runtime.text.stream import TextStream
from cheetah.serve.tools import PARSERS, ToolParser, parser_of_template
from tests.serve.serving import quick_llm, served

WEATHER = ToolCall("weather", '{"city": "Köln"}')
TIME = ToolCall("time", "{}")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Köln"}}'


def parsed(parser: ToolParser, pieces: Sequence[str]) -> list[AnswerPart]:
    """What a parser gives, neighbours of a kind as one."""
    found: list[AnswerPart] = []
    for part in [part for piece in pieces for part in parser.feed(piece)] + parser.finish():
        if found and isinstance(found[-1], str) and isinstance(part, str):
            found[-1] += part
        elif found and isinstance(found[-1], Thought) and isinstance(part, Thought):
            found[-1] = Thought(found[-1].text + part.text)
        else:
            found.append(part)
    return found


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("hermes", CALL, [WEATHER]),
        ("hermes", f'Let me see.\n{CALL}\n<tool_call>{{"name": "time"}}</tool_call>', ["Let me see.", WEATHER, TIME]),
        ("hermes", CALL.removesuffix("</tool_call>"), [WEATHER]),
        ("hermes", "1 < 2 and <tool> is none\n", ["1 < 2 and <tool> is none\n"]),
        ("hermes", "<tool_call>nonsense</tool_call>", ["<tool_call>nonsense</tool_call>"]),
        ("hermes", '<tool_call>{"name": "wea', ['<tool_call>{"name": "wea']),
        ("llama3_json", LLAMA_CALL, [WEATHER]),
        ("llama3_json", f'<|python_tag|>{LLAMA_CALL}; {{"name": "time", "parameters": {{}}}}', [WEATHER, TIME]),
        ("llama3_json", "It is sunny in {Köln}.", ["It is sunny in {Köln}."]),
        ("llama3_json", '{"answer": 42}', ['{"answer": 42}']),
        ("llama3_json", LLAMA_CALL[:-3], [LLAMA_CALL[:-3]]),
    ],
)
def test_calls_however_the_text_is_cut(name: str, text: str, wanted: list[AnswerPart]) -> None:
    assert parsed(PARSERS[name](), [text]) == wanted
    assert parsed(PARSERS[name](), list(text)) == wanted
    for cut in range(1, len(text)):
        assert parsed(PARSERS[name](), [text[:cut], text[cut:]]) == wanted, cut


def test_the_template_tells_the_parser() -> None:
    assert parser_of_template("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert parser_of_template('<|start_header_id|> {"name": function name, "parameters": ...}') == "llama3_json"
    assert parser_of_template("{{ messages }}") is None and parser_of_template(None) is None


@dataclasses.dataclass(frozen=True)
class Scripted(Prompts):
    """Prompts whose completions have a text that is given: so many characters a token, whatever the ids."""

    script: str = ""
    characters: int = 3

    def pieces(self, prompt_ids: Sequence[int], params: SamplingParams, index: int) -> Pieces:
        return Pieces(TextStream(ScriptDecoder(self.script, self.characters), params.stop), index)


class ScriptDecoder:
    def __init__(self, script: str, characters: int):
        self.rest, self.characters = script, characters

    def feed(self, token_id: int) -> bytes:
        shown, self.rest = self.rest[: self.characters], self.rest[self.characters :]
        return shown.encode()


TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{# <tool_call> #}"


@pytest.mark.slow
def test_tools_with_the_client() -> None:
    with quick_llm(chat_template=TEMPLATE) as llm:
        llm.prompts = Scripted(**vars(llm.prompts), script=f"Well.\n{CALL}\n{CALL}.END")
        with served(llm) as running:
            client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
            how: dict[str, Any] = {"model": "demo", "stop": ".END", "tools": TOOLS, "extra_body": {"ignore_eos": True}}
            history: list[Any] = [{"role": "user", "content": "x"}]

            choice = client.chat.completions.create(messages=history, **how).choices[0]
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well.")
            calls = choice.message.tool_calls or []
            assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
                ("weather", {"city": "Köln"})
            ] * 2
            assert len({call.id for call in calls}) == 2

            chunks = list(client.chat.completions.create(messages=history, stream=True, **how))
            deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            assert [call.index for call in deltas] == [0, 1] and all(call.id for call in deltas)
            assert chunks[-1].choices[0].finish_reason == "tool_calls"

            one = client.chat.completions.create(messages=history, parallel_tool_calls=False, **how).choices[0]
            assert len(one.message.tool_calls or []) == 1
            cut = client.chat.completions.create(messages=history, max_tokens=30, **how).choices[0]
            assert (cut.finish_reason, len(cut.message.tool_calls or [])) == ("length", 1)

            history += [choice.message, {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}]
            assert client.chat.completions.create(messages=history, **how).choices[0].message.tool_calls
            none = client.chat.completions.create(messages=history, tool_choice="none", **how).choices[0]
            assert none.finish_reason == "stop" and (none.message.content or "").startswith("Well.\n<tool_call>")
