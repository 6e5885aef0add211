"""Thoughts beside answers: however the text is cut, whole and streamed, with calls of tools behind them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from cheetah.errors import CheetahError
from cheetah.runtime.text.answer_parts import AnswerPart, Thought, ToolCall
from cheetah.serve.reasoning import REASONING_PARSERS, Reasoning
from cheetah.serve.service import Options
from cheetah.serve.tools import Hermes, NoTools, ToolParser
from tests.serve.serving import quick_llm, served
from tests.serve.test_tools import CALL, TEMPLATE, TOOLS, WEATHER, Scripted, parsed


def reasoning(name: str, inner: ToolParser | None = None) -> Reasoning:
    return Reasoning(inner or NoTools(), REASONING_PARSERS[name])


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("qwen3", "<think>\nLet me see.\n</think>\n\nIt rains.", [Thought("\nLet me see.\n"), "It rains."]),
        ("qwen3", "\n<think>a < b </thi nk></think>c</think>", [Thought("a < b </thi nk>"), "c</think>"]),
        ("qwen3", "<think>\n\n</think>", [Thought("\n\n")]),
        ("qwen3", "<think></think>\nyes", ["yes"]),
        ("qwen3", "<thin air", ["<thin air"]),
        ("qwen3", "<thi", ["<thi"]),
        ("qwen3", "<think>cut in the mid", [Thought("cut in the mid")]),
        ("deepseek_r1", "Let me see.</think>It rains.", [Thought("Let me see."), "It rains."]),
        ("deepseek_r1", "<think>Let me see.</think>It rains.", [Thought("Let me see."), "It rains."]),
        ("deepseek_r1", "<th", [Thought("<th")]),
    ],
)
def test_thoughts_however_the_text_is_cut(name: str, text: str, wanted: list[AnswerPart]) -> None:
    assert parsed(reasoning(name), [text]) == wanted and parsed(reasoning(name), list(text)) == wanted
    for cut in range(1, len(text)):
        assert parsed(reasoning(name), [text[:cut], text[cut:]]) == wanted, cut


def test_calls_behind_thoughts() -> None:
    found = parsed(reasoning("qwen3", Hermes()), list(f"<think>which tool? {CALL}</think>\n{CALL}"))
    assert found == [Thought(f"which tool? {CALL}"), WEATHER] and isinstance(found[1], ToolCall)


def test_a_parser_that_nobody_knows_is_refused() -> None:
    with pytest.raises(CheetahError, match="reasoning_parser='x': choose one of qwen3, deepseek_r1"):
        Options(("demo",), reasoning_parser="x")


@pytest.mark.slow
def test_a_client_gets_thoughts_beside_the_answer() -> None:
    with quick_llm(chat_template=TEMPLATE) as llm:
        llm.prompts = Scripted(**vars(llm.prompts), script=f"<think>Let me see.</think>\nWell: {CALL}")
        with served(llm, tool_parser="hermes", reasoning_parser="qwen3") as running:
            client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
            how: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
            how |= {"max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}}
            message = client.chat.completions.create(**how).choices[0].message
            extra = message.model_extra or {}
            assert (extra["reasoning"], message.content) == ("Let me see.", "Well:") and message.tool_calls
            deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **how)]
            thoughts = "".join((delta.model_extra or {}).get("reasoning", "") for delta in deltas)
            assert thoughts == "Let me see." and "".join(delta.content or "" for delta in deltas) == "Well:"
