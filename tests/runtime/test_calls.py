"""The calls that people try first who know vLLM or transformers: each works as there, or says what to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_kernel import FakeDevice, generate_kernel

from cheetah.errors import CheetahError
from cheetah.runtime import LLM, SamplingParams

ONE = SamplingParams(max_tokens=3)
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device=FakeDevice(), generate_kernel=generate_kernel, batch=2, quiet=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def text(llm: LLM) -> str | None:
    return llm.generate("One morning,", ONE).text


def test_prompts_however_they_are_given(llm: LLM, text: str | None) -> None:
    ids = llm.get_tokenizer().encode("One morning,")
    assert llm.generate("One morning,", sampling_params=ONE, use_tqdm=False).text == text
    assert llm.generate({"prompt": "One morning,"}, ONE).text == text
    assert llm.generate({"prompt_token_ids": ids, "prompt": "x"}, ONE).text == text
    prompts: list[Any] = ["One morning,", {"prompt": "One morning,"}, {"prompt_token_ids": ids}, ids]
    outputs = llm.generate(prompts, ONE)
    assert [output.outputs[0].text for output in outputs] == [text] * 4
    assert [output.prompt for output in outputs] == ["One morning,"] * 2 + [None] * 2
    assert all(output.finished for output in outputs)


def test_a_list_of_parameters(llm: LLM, text: str | None) -> None:
    params = [SamplingParams(max_tokens=count, n=count) for count in (1, 3, 2)]
    outputs = llm.generate(["One morning,"] * 3, params)
    assert [[len(one.token_ids) for one in output.outputs] for output in outputs] == [[1], [3] * 3, [2] * 2]
    assert outputs[1].text == text


def test_absent_lists_are_empty_ones(llm: LLM, text: str | None) -> None:
    params: dict[str, Any] = {"max_tokens": 3, "stop": None, "stop_token_ids": None}
    assert SamplingParams(**params) == ONE
    assert llm.generate("One morning,", SamplingParams(**params)).text == text


def test_chats_however_they_are_given(llm: LLM) -> None:
    wanted = llm.chat(CHAT, ONE)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert llm.chat(parts, sampling_params=ONE, chat_template_content_format="auto").prompt == wanted.prompt
    both = llm.chat([CHAT, CHAT], [ONE, ONE], use_tqdm=True)
    assert [output.text for output in both] == [wanted.text] * 2
    template = "{{ mood }}{{ messages[0].content }}"
    for more in ({"mood": "x"}, {"chat_template_kwargs": {"mood": "x"}}):
        assert llm.chat(CHAT, ONE, chat_template=template, **more).prompt == "xHello"


def test_the_last_message_is_gone_on_from(llm: LLM) -> None:
    begun = [*CHAT, {"role": "assistant", "content": "One morning, "}]
    output = llm.chat(begun, ONE, continue_final_message=True, add_generation_prompt=False)
    assert (output.prompt or "").endswith("<|assistant|>One morning,")
    with pytest.raises(CheetahError, match="add_generation_prompt=False"):
        llm.chat(begun, ONE, continue_final_message=True)
    with pytest.raises(CheetahError, match="does not show the last message"):
        how: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
        llm.chat(begun, ONE, chat_template="nothing", **how)


def test_a_message_without_text(llm: LLM) -> None:
    call = {"function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = (
        "{% for m in messages %}[{{ m.content }}]{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.a[0] }}"
    )
    output = llm.chat(messages, ONE, chat_template=template + "{% endif %}{% endfor %}")
    assert output.prompt == "[Hello][]1"


def test_what_an_llm_is(llm: LLM) -> None:
    assert repr(llm) == "LLM('demo', device='emulator', batch=2, max_context=512)"
    assert llm.get_tokenizer() is llm.tokenizer


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate("x", ONE)[0], "write output.text"),
        (lambda llm: llm.generate("x", {"max_tokens": 3}), "write SamplingParams"),
        (lambda llm: llm.generate("x", 3), "write SamplingParams"),
        (lambda llm: llm.generate(["x", "y"], [ONE]), "1 sampling_params for 2 prompts"),
        (lambda llm: llm.generate("x", params=ONE), "write sampling_params"),
        (lambda llm: llm.generate("x", ONE, lora_request="a"), "merge them"),
        (lambda llm: llm.generate({"text": "x"}), 'give {"prompt": "..."}'),
        (lambda llm: llm.chat(CHAT, ONE, chat_template_content_format="openai"), 'write "string"'),
        (lambda llm: llm.chat([{"role": "user", "content": [{"type": "image_url"}]}]), "image_url"),
        (lambda llm: llm.chat([{"role": "user", "content": 3}]), "expected a list, or text"),
        (lambda llm: llm.chat([*CHAT, {"role": "assistant", "tool_calls": ["f"]}]), "expected tool_calls"),
        (lambda llm: SamplingParams(stop_token_ids=["<|end|>"]), "texts go into stop"),
        (lambda llm: LLM("demo", max_model_len=64), "write max_context"),
        (lambda llm: LLM("demo", tensor_parallel_size=2), "one GPU"),
    ],
)
def test_what_to_write_instead(llm: LLM, call: Callable[[LLM], Any], words: str) -> None:
    with pytest.raises(CheetahError) as refusal:
        call(llm)
    assert words in str(refusal.value)
