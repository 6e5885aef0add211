"""The calls that people try first who know vLLM or transformers: each works as there, or says what to write."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_kernel import FakeDevice, generate_kernel

import cheetah
from cheetah.errors import CheetahError
from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.calls import own_names

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


def test_the_tokenizer_has_the_names_of_transformers(llm: LLM) -> None:
    tokenizer, own = llm.get_tokenizer(), llm.tokenizer
    assert own is not None and tokenizer.vocab_size == len(tokenizer) == own.size == llm.config.vocab_size
    ids = tokenizer.encode("One morning,")
    assert tokenizer("One morning,") == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert tokenizer(["One morning,", "A"])["input_ids"] == [ids, tokenizer.encode("A")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "One morning,"
    assert tokenizer.decode(ids) == tokenizer.bos_token + "One morning,"
    assert tokenizer.batch_decode([ids[1:], ids[1:2]]) == ["One morning,", tokenizer.decode(ids[1])]
    assert tokenizer.convert_tokens_to_ids(tokenizer.bos_token) == tokenizer.bos_token_id == ids[0]
    for name in ("eos_token", "pad_token", "unk_token"):
        token, number = getattr(tokenizer, name), getattr(tokenizer, f"{name}_id")
        assert token == own.special_tokens.get(name) and (number is None or tokenizer.decode(number) == token)
    shown = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert shown == llm.chat(CHAT, ONE).prompt and tokenizer.chat_template == llm.prompts.default_template
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    assert tuple(ids) == llm.chat(CHAT, ONE).prompt_token_ids
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"] == ids
    for call in (lambda: tokenizer("x", return_tensors="pt"), lambda: tokenizer.encode(["x"])):
        with pytest.raises(CheetahError, match="lists|list of them"):
            call()


def test_what_is_told_of_requests_and_of_the_engine(llm: LLM) -> None:
    first, second = llm.generate(["One morning,", "One"], SamplingParams(max_tokens=3, n=2))
    assert int(second.request_id) == int(first.request_id) + 1 and first.metrics is not None
    told = first.metrics
    assert told.arrival_time <= told.first_token_time <= told.last_token_time == told.finished_time
    assert told.num_generation_tokens == 6 and told.first_token_latency >= 0
    found = {metric.name: metric for metric in llm.get_metrics()}
    assert found["vllm:prefix_cache_queries"].value >= len(first.prompt_token_ids)
    assert found["vllm:num_requests_running"].value == 0 and found["vllm:num_requests_running"].kind == "gauge"


def test_the_prefix_cache_is_forgotten(llm: LLM) -> None:
    ids = [*range(1, 60)]
    assert llm.generate(ids, ONE).timings.cached_tokens == 0
    assert llm.generate(ids, ONE).timings.cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert llm.generate(ids, ONE).timings.cached_tokens == 0


def test_names_of_vllm_mean_options_of_ours() -> None:
    given = {"max_model_len": 64, "max_num_seqs": 2, "enable_prefix_caching": False, "kv_cache_dtype": "fp8"}
    named = own_names({"model": "demo", **given, "gpu_memory_utilization": None, "dtype": "auto"})
    assert named == {
        "model": "demo",
        **{"max_context": 64, "batch": 2, "prefix_cache": False, "kv_dtype": "e4m3", "gpu_memory_utilization": None},
    }
    assert own_names({"kv_cache_dtype": "auto", "max_model_len": None}) == {"kv_dtype": None}
    with pytest.raises(CheetahError, match="max_model_len is max_context by another name"):
        own_names({"max_model_len": 64, "max_context": 64})
    with LLM("demo", device=FakeDevice(), generate_kernel=generate_kernel, quiet=True, **given) as opened:
        plan = opened.manifest.plan
        assert (plan["max_context"], plan["batch"], plan["kv_dtype"]) == (64, 2, "e4m3")
        assert opened.prefix_cache is None


def test_a_share_of_the_memory_bounds_the_cache() -> None:
    how: dict[str, Any] = {"generate_kernel": generate_kernel, "quiet": True}
    with LLM("demo", device=FakeDevice(), **how) as opened:
        needed, kv = opened.memory.total_bytes, opened.memory.bytes_of("keys and values")
    share = (needed - kv // 2) / FakeDevice().describe().total_bytes
    with LLM("demo", device=FakeDevice(), gpu_memory_utilization=share, **how) as opened:
        assert needed - kv < opened.memory.total_bytes <= needed - kv // 2
    with pytest.raises(CheetahError, match="are needed"):
        LLM("demo", device=FakeDevice(), gpu_memory_utilization=1e-9, **how)


PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE[PAGE.index("## Coming from vLLM") :], re.MULTILINE)


@pytest.mark.slow
def test_the_table_of_calls_is_true(llm: LLM) -> None:
    """Every line of it is run; what is refused is so by the words that stand there."""

    def opened(*arguments: Any, **options: Any) -> LLM:
        return LLM(*arguments, **options, device=FakeDevice(), generate_kernel=generate_kernel, quiet=True)

    names = {"LLM": opened, "llm": llm, "messages": CHAT, "cheetah": cheetah, "SamplingParams": SamplingParams}
    assert len(ROWS) == 64
    for call, now in ROWS:
        refusal = re.match(r"refused: `(.+?)`", now)
        code = call.replace("llm.generate(", "short(").replace("llm.chat(", "short_chat(")
        names |= {"short": partial(short, llm.generate), "short_chat": partial(short, llm.chat)}
        try:
            found = eval(code, {**names, "StructuredOutputsParams": cheetah.StructuredOutputsParams})
        except (CheetahError, AttributeError) as problem:
            assert refusal is not None and refusal[1] in str(problem), (call, problem)
        else:
            assert refusal is None and now.startswith("works"), call
            if isinstance(found, LLM):
                found.close()


def short(method: Callable[..., Any], prompt: Any, params: Any = None, **others: Any) -> Any:
    """The call with 2 tokens a completion where it says nothing of how many."""
    every = params if isinstance(params, list) else [params or SamplingParams()]
    given = [one if one.max_tokens else dataclasses.replace(one, max_tokens=2) for one in every]
    return method(prompt, given if isinstance(params, list) else given[0], **others)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate("x", ONE)[0], "write output.text"),
        (lambda llm: llm.generate("x", {"max_tokens": 3}), "write SamplingParams"),
        (lambda llm: llm.generate("x", 3), "write SamplingParams"),
        (lambda llm: llm.generate(["x", "y"], [ONE]), "1 sampling_params for 2 prompts"),
        (lambda llm: llm.generate("x", params=ONE), "write sampling_params"),
        (lambda llm: llm.generate("x", ONE, lora_request="a"), "merged when the model is opened"),
        (lambda llm: llm.generate({"text": "x"}), 'give {"prompt": "..."}'),
        (lambda llm: llm.chat(CHAT, ONE, chat_template_content_format="openai"), 'write "string"'),
        (lambda llm: llm.chat([{"role": "user", "content": [{"type": "image_url"}]}]), "image_url"),
        (lambda llm: llm.chat([{"role": "user", "content": 3}]), "expected a list, or text"),
        (lambda llm: llm.chat([*CHAT, {"role": "assistant", "tool_calls": ["f"]}]), "expected tool_calls"),
        (lambda llm: llm.chat(CHAT, ONE, max_tokens=3), "write SamplingParams(max_tokens=...)"),
        (lambda llm: llm.generate("x", max_tokens=3), "write SamplingParams(max_tokens=...)"),
        (lambda llm: llm.generate("x", ONE, prompt_token_ids=[1]), "give the ids as the prompt"),
        (lambda llm: llm.generate({"prompt_embeds": 1}, ONE), "a prompt is text or token ids"),
        (lambda llm: SamplingParams(best_of=3), "write n, and choose"),
        (lambda llm: SamplingParams(detokenize=False), "tokenizer=False"),
        (lambda llm: SamplingParams(logits_processors=[len]), "write logit_bias"),
        (lambda llm: SamplingParams(num_return_sequences=2), "write n"),
        (lambda llm: SamplingParams(logprobs=-1), "from 0 to 20"),
        (lambda llm: getattr(cheetah, "AsyncLLM"), "`cheetah serve` answers many clients"),  # noqa: B009
        (lambda llm: getattr(cheetah, "pipeline"), "write LLM(model)"),  # noqa: B009
        (lambda llm: SamplingParams(stop_token_ids=["<|end|>"]), "texts go into stop"),
        (lambda llm: SamplingParams(stop_token_ids=[True]), "True is not a token id"),
        (lambda llm: SamplingParams(allowed_token_ids=5), "allowed_token_ids=5: expected a list"),
        (lambda llm: SamplingParams(bad_words=5), "bad_words=5: expected a list"),
        (lambda llm: llm.generate(np.array([True, False])), "neither text nor a sequence"),
        (lambda llm: llm.generate([b"One"], ONE), "neither text nor a sequence"),
        (lambda llm: llm.chat(CHAT, ONE, documents=["x"]), "shows no documents"),
        (lambda llm: LLM("demo", gpu_memory_utilization=1.5), "a share above 0, up to 1"),
        (lambda llm: LLM("demo", quantization="awq"), "the weights are not quantised"),
        (lambda llm: LLM("demo", tensor_parallel_size=3), "give one of 1, 2, 4, 8"),
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
