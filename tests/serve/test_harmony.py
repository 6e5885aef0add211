"""Answers of several channels, as gpt-oss writes them: however the text is cut, and as `LLM.chat` and OpenAI's client
give them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.text.answer_parts import AnswerPart, Thought, ToolCall
from cheetah.runtime.text.harmony import Harmony
from cheetah.runtime.text.pieces import Pieces
from cheetah.serve.tools import HARMONY, parser_of_template
from tests.serve.serving import quick_llm, served
from tests.serve.test_tools import TOOLS, Scripted, parsed

ANALYSIS = "<|channel|>analysis<|message|>Which city? <b>Köln</b>.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains <|in Köln."
CALL = (
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln"}<|call|>'
)
OTHER_CALL = '<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{"zone": 1}'
THOUGHT = Thought("Which city? <b>Köln</b>.")
WEATHER = ToolCall("weather", '{"city": "Köln"}')


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (ANALYSIS + FINAL, [THOUGHT, "It rains <|in Köln."]),
        (ANALYSIS + FINAL + "<|return|>", [THOUGHT, "It rains <|in Köln."]),
        (ANALYSIS + CALL, [THOUGHT, WEATHER]),
        (CALL.removesuffix("<|call|>"), [WEATHER]),
        (CALL + OTHER_CALL, [WEATHER, ToolCall("time", '{"zone": 1}')]),
        ("<|channel|>commentary<|message|>Let me see. <|end|>" + CALL, ["Let me see. ", WEATHER]),
        (CALL.replace('"}<|call|>', ""), ['{"city": "Köln']),
        (CALL.replace('{"city": "Köln"}', ""), [ToolCall("weather", "{}")]),
        (ANALYSIS[:-20], [Thought(ANALYSIS[len("<|channel|>analysis<|message|>") : -20])]),
        ("<|channel|>ana", []),
        ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", [Thought("1 + 1")]),
        ("It rains.", ["It rains."]),
        ("It rains. " * 200, ["It rains. " * 200]),
    ],
)
def test_channels_however_the_text_is_cut(text: str, wanted: list[AnswerPart]) -> None:
    assert parsed(Harmony(), [text]) == wanted and parsed(Harmony(), list(text)) == wanted
    for cut in range(1, min(len(text), 200)):
        assert parsed(Harmony(), [text[:cut], text[cut:]]) == wanted, cut


def test_calls_of_what_nobody_gave_are_thoughts() -> None:
    assert parsed(Harmony(has_tools=False), [ANALYSIS + CALL + FINAL]) == [
        Thought(THOUGHT.text + '{"city": "Köln"}'),
        "It rains <|in Köln.",
    ]


def test_the_template_tells_it() -> None:
    assert parser_of_template("{{ '<|channel|>' }} <tool_call>") == HARMONY


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{# <|channel|> #}"
CHAT = [{"role": "user", "content": "x"}]


@dataclasses.dataclass(frozen=True)
class Unskipped(Scripted):
    """As `Scripted`, where special tokens have to be shown."""

    def pieces(self, prompt_ids: Sequence[int], params: SamplingParams, index: int) -> Pieces:
        assert not params.skip_special_tokens
        return super().pieces(prompt_ids, params, index)


@pytest.mark.slow
def test_channels_come_apart_in_python_and_to_a_client() -> None:
    with quick_llm(chat_template=TEMPLATE) as llm:
        plain, script = vars(llm.prompts), ANALYSIS + CALL + FINAL + "<|end|>"
        llm.prompts = Unskipped(**plain, script=script, characters=40)
        chats_have_channels_apart(llm)
        llm.prompts = Unskipped(**plain, script=script, characters=400)  # one token, which may be the last
        with served(llm) as running:
            client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
            how: dict[str, Any] = {"model": "demo", "messages": CHAT, "max_tokens": 9}
            how |= {"temperature": 0, "extra_body": {"ignore_eos": True}}
            message = client.chat.completions.create(tools=TOOLS, **how).choices[0].message
            assert ((message.model_extra or {})["reasoning"], message.content) == (THOUGHT.text, "It rains <|in Köln.")
            calls = [call.function for call in message.tool_calls or []]
            assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Köln"})]
            deltas = [one.choices[0].delta for one in client.chat.completions.create(stream=True, **how)]
            thoughts = "".join((delta.model_extra or {}).get("reasoning", "") for delta in deltas)
            assert thoughts == THOUGHT.text + '{"city": "Köln"}'
            assert "".join(delta.content or "" for delta in deltas) == "It rains <|in Köln."
            response = client.responses.create(model="demo", input="x", max_output_tokens=9, temperature=0)
            assert response.output_text == "It rains <|in Köln."
            with pytest.raises(openai.BadRequestError, match="answers of several channels cannot be held to calls"):
                client.chat.completions.create(tools=TOOLS, tool_choice="required", **how)


def chats_have_channels_apart(llm: LLM) -> None:
    how: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "ignore_eos": True, "n": 2}
    output = llm.chat(CHAT, SamplingParams(**how), tools=TOOLS, chat_template=TEMPLATE + "{# tools #}")
    for one in (output, output.outputs[1]):
        assert (one.reasoning, one.text, one.tool_calls) == (THOUGHT.text, "It rains <|in Köln.", (WEATHER,))
    pieces = [piece for piece in llm.stream_chat(CHAT, SamplingParams(**how)) if piece.index == 1]
    thoughts = THOUGHT.text + '{"city": "Köln"}'
    for name, wanted in (("reasoning", thoughts), ("text", "It rains <|in Köln.")):
        assert "".join(getattr(piece, name) for piece in pieces) == wanted
    raw = llm.chat(CHAT, SamplingParams(skip_special_tokens=False, **how))
    assert (raw.text or "").startswith(ANALYSIS) and not raw.reasoning, "who asks for special tokens gets them"
