"""The calls that people try first who know vLLM or transformers: each works as there, or says what to write."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_kernel import FakeDevice, generate_kernel

import cheetah
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


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 3},
        {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"stop": ["x"], "stop_token_ids": [3], "ignore_eos": True, "min_tokens": 2},
        {"bad_words": ["kite", "the big red kite"], "logit_bias": {7: -5}, "allowed_token_ids": None},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False, "include_stop_str_in_output": True},
        {"logprobs": 2, "prompt_logprobs": 1, "flat_logprobs": False, "detokenize": True},
        {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "logits_processors": None},
        {"truncate_prompt_tokens": 2, "n": 2, "extra_args": None, "guided_decoding": None},
    ],
    ids=lambda params: next(iter(params)),
)
def test_parameters_of_vllm_are_taken(llm: LLM, params: dict[str, Any]) -> None:
    output = llm.generate("One morning,", SamplingParams(max_tokens=3, **params))
    assert [len(one.token_ids) for one in output.outputs] == [3] * params.get("n", 1)
    assert len(output.prompt_token_ids) == params.get("truncate_prompt_tokens", len(output.prompt_token_ids))
    names = ("index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason")
    assert all(hasattr(output.outputs[0], name) for name in names)
    names = ("prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished")
    assert all(hasattr(output, name) for name in names)


def test_special_tokens_and_end_tokens_are_shown_where_they_are_asked_for(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (end,) = tokenizer.encode("<|end|>", False)
    how: dict[str, Any] = {"allowed_token_ids": [end], "ignore_eos": True, "max_tokens": 2}
    for skipped, text in ((True, ""), (False, "<|end|>" * 2)):
        assert llm.generate("x", SamplingParams(skip_special_tokens=skipped, **how)).text == text
    for shown, text in ((False, ""), (True, "<|end|>")):
        stopped = how | {"stop_token_ids": [end], "include_stop_str_in_output": shown, "skip_special_tokens": False}
        output = llm.generate("x", SamplingParams(**stopped))
        assert (output.text, output.stop_reason, len(output.token_ids)) == (text, end, 1)


def test_defaults_are_those_of_the_checkpoint(llm: LLM, text: str | None) -> None:
    params = llm.get_default_sampling_params()
    assert isinstance(params.temperature, float) and params.top_k == 0
    assert llm.generate("One morning,", dataclasses.replace(params, max_tokens=3)).text == text


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
        (lambda llm: llm.chat(CHAT, ONE, max_tokens=3), "write SamplingParams(max_tokens=...)"),
        (lambda llm: llm.generate("x", max_tokens=3), "write SamplingParams(max_tokens=...)"),
        (lambda llm: llm.generate("x", ONE, prompt_token_ids=[1]), "give the ids as the prompt"),
        (lambda llm: llm.generate({"prompt_embeds": 1}, ONE), 'give {"prompt": "..."}'),
        (lambda llm: SamplingParams(best_of=3), "write n, and choose"),
        (lambda llm: SamplingParams(detokenize=False), "tokenizer=False"),
        (lambda llm: SamplingParams(logits_processors=[len]), "write logit_bias"),
        (lambda llm: SamplingParams(num_return_sequences=2), "write n"),
        (lambda llm: SamplingParams(logprobs=-1), "from 0 to 20"),
        (lambda llm: getattr(cheetah, "AsyncLLM"), "`cheetah serve` answers many clients"),  # noqa: B009
        (lambda llm: getattr(cheetah, "pipeline"), "write LLM(model)"),  # noqa: B009
        (lambda llm: SamplingParams(stop_token_ids=["<|end|>"]), "texts go into stop"),
        (lambda llm: LLM("demo", max_model_len=64), "write max_context"),
        (lambda llm: LLM("demo", tensor_parallel_size=2), "one GPU"),
    ],
)
def test_what_to_write_instead(llm: LLM, call: Callable[[LLM], Any], words: str) -> None:
    with pytest.raises(CheetahError) as refusal:
        call(llm)
    assert words in str(refusal.value)


def test_methods_that_are_not_there_say_what_to_write(llm: LLM) -> None:
    for name, words in (
        ("beam_search", "cumulative_logprob"),
        ("from_pretrained", "LLM(model)"),
        ("nothing", "has no"),
    ):
        with pytest.raises(AttributeError, match=re.escape(words)):
            getattr(llm, name)
        assert not hasattr(llm, name)
