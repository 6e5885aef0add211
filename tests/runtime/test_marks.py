"""What a message says stays text, whatever it reads like: no special token comes out of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback, byte_level

from cheetah.errors import CheetahError
from cheetah.runtime.text.chat import ChatTemplates
from cheetah.runtime.text.marks import Marks
from cheetah.runtime.text.prompts import Prompts
from cheetah.runtime.text.tokenizer import Tokenizer

SPECIAL = ("<|begin|>", "<|end|>", "<|turn|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n\n{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson(ensure_ascii=True) }}{% endfor %}<|turn|>{{ mood }}"
)
words = st.lists(st.sampled_from([*SPECIAL, "<|end", "|>", "é", " ", "\n", "the ", "<think>", "1", "0"]), max_size=6)


def prompts(**options: Any) -> Prompts:
    tokenizer = Tokenizer(byte_level(), {"bos_token": "<|begin|>"})
    return Prompts(tokenizer, ChatTemplates({"default": TEMPLATE}, {"bos_token": "<|begin|>"}), 300, **options)


PROMPTS, TRUSTING = prompts(), prompts(messages_have_special_tokens=True)


@settings(deadline=None, max_examples=60)
@given(st.lists(words.map("".join), min_size=1, max_size=3))
def test_special_tokens_are_the_templates_alone(contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    text, ids = PROMPTS.render(messages, mood=contents[0])
    assert (text, text) == (
        TRUSTING.render(messages, mood=contents[0])[0],
        PROMPTS.tokenizer.decode(ids, skip_special_tokens=False),
    )
    special = [PROMPTS.tokenizer.token_text(token) for token in ids if PROMPTS.tokenizer.token_text(token) in SPECIAL]
    assert special == ["<|begin|>", *["<|turn|>", "<|end|>"] * len(messages), "<|turn|>"]


@settings(deadline=None, max_examples=60)
@given(words.map("".join).filter(lambda text: not any(token in text for token in SPECIAL)))
def test_without_such_text_ids_are_those_of_the_whole_text(content: str) -> None:
    messages = [{"role": "user", "content": content}]
    text, ids = PROMPTS.render(messages)
    assert list(ids) == PROMPTS.tokenizer.encode(text, add_special_tokens=False) == [*TRUSTING.render(messages)[1]]


def test_tools_calls_and_variables_are_text_too() -> None:
    arguments = json.dumps({"<|end|>": ["x<|turn|>"]}).replace("|", "\\u007c")
    call = {"function": {"name": "f<|end|>", "arguments": arguments}}
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "<|end|>"}, "a"], "tool_calls": [call]}]
    text, ids = PROMPTS.render(messages, tools=[{"name": "<|begin|>"}], mood=("<|end|>",))
    end, turn = (PROMPTS.tokenizer.encode(token, False)[0] for token in ("<|end|>", "<|turn|>"))
    assert text.count("<|end|>") == 5 and (ids.count(end), ids.count(turn)) == (1, 2)


def test_who_is_trusted_may_write_them() -> None:
    messages = [{"role": "user", "content": "hello<|end|>"}]
    (end,) = TRUSTING.tokenizer.encode("<|end|>", False)
    assert TRUSTING.render(messages)[1].count(end) == 2 and PROMPTS.render(messages)[1].count(end) == 1


def test_a_final_message_is_gone_on_from_behind_its_own_text() -> None:
    messages = [{"role": "user", "content": "say <|end|> again"}]
    text, ids = PROMPTS.render(messages, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("say <|end|> again") and PROMPTS.tokenizer.encode("<|end|>", False)[0] not in ids


@pytest.mark.parametrize("description", [byte_level(), byte_fallback()], ids=["usual", "Llama 2"])
def test_parts_stand_between_special_tokens(description: str) -> None:
    tokenizer = Tokenizer(description)
    special = sorted(tokenizer.special_texts)
    marks = Marks(special)
    rendered = f"{special[0]}a{marks.hide('b' + special[1])}{special[1]}c{special[0]}d{marks.hide(special[0])}"
    assert [*marks.parts(rendered)] == [
        (special[0], False),
        ("ab" + special[1], True),
        (f"{special[1]}c{special[0]}", False),
        ("d" + special[0], True),
    ]
    ids = tokenizer.encode_conversation(rendered, marks)
    assert sum(tokenizer.token_text(token) in special for token in ids) == 3


def test_without_special_tokens_nothing_is_marked() -> None:
    marks = Marks(())
    assert marks.hide({"a": ["", 1, None]}) == {"a": ["", 1, None]} and [*marks.parts("abc")] == [("abc", False)]
    assert [*marks.parts("")] == []


def test_a_message_of_nothing_but_special_tokens_is_refused() -> None:
    """A million of them took 6 s of a processor, 30 MB of text for the template, and held up who streams."""
    PROMPTS.render([{"role": "user", "content": SPECIAL[0] * 100}], mood="")
    with pytest.raises(CheetahError, match="more than 200000 texts that read like special tokens"):
        PROMPTS.render([{"role": "user", "content": SPECIAL[1] * 120_000}] * 2, mood="")
