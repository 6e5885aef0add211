"""What `LLM`'s calls may be given: prompts and parameters one by one or in lists, by the names that vLLM's users know.

What means nothing here is refused with what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np

from cheetah.errors import CheetahError
from cheetah.options import aliases_of, options_of
from cheetah.printable import shown
from cheetah.runtime.options import LoadOptions
from cheetah.runtime.sampling import SamplingParams
from cheetah.runtime.text.prompts import Prompt

OPTIONS, ALIASES = {"model", *options_of(LoadOptions)}, aliases_of(LoadOptions)
KV_DTYPES: Mapping[Any, str | None] = {"auto": None, "bfloat16": "bf16", "fp8": "e4m3", "fp8_e4m3": "e4m3"}
"""vLLM's words for how keys and values are cached, and ours."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "dtype": ("auto", "bfloat16"),
    "pipeline_parallel_size": (1,),
    "trust_remote_code": (False,),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto",),
    "lora_request": (None,),
    "enable_lora": (False,),
    "priority": (None,),
    "return_tensors": (None,),
    "padding": (False,),
    "truncation": (False, None),
    "max_length": (None,),
    "clean_up_tokenization_spaces": (True, False, None),
    "prompt_token_ids": (None,),
    "tokenization_kwargs": (None,),
    "mm_processor_kwargs": (None,),
    "disable_log_stats": (True, False),
    "enforce_eager": (True, False),
    "chat_template_content_format": ("auto", "string"),
}
"""Of vLLM's names those that may be given, with the values that ask for nothing."""

INSTEAD: Mapping[str, str] = {
    "skip_tokenizer_init": "write tokenizer=False",
    "hf_token": "set HF_TOKEN in the environment, or log in with `hf auth login`",
    "download_dir": "set HF_HUB_CACHE in the environment",
    "dtype": "weights are bf16; others are rounded to it",
    "trust_remote_code": "no code of a checkpoint is ever run",
    "chat_template_content_format": 'content is given to the template as text: leave it out, or write "string"',
    "lora_request": "one adapter, for all requests, is merged when the model is opened: write LLM(model, lora=folder)",
    "priority": "requests are served in the order in which they come",
    "enable_lora": "one adapter is merged when the model is opened: write LLM(model, lora=folder)",
    "return_tensors": "ids are lists: make arrays of them",
    "padding": "every text has its own length",
    "truncation": "write SamplingParams(truncate_prompt_tokens=...)",
    "max_length": "write SamplingParams(truncate_prompt_tokens=...)",
    "params": "write sampling_params",
    "multi_modal_data": "text alone is read",
    "prompt_embeds": "a prompt is text or token ids",
    "prompt_token_ids": 'give the ids as the prompt, or {"prompt_token_ids": [...]}',
    "max_tokens": "write SamplingParams(max_tokens=...)",
    "max_new_tokens": "write SamplingParams(max_tokens=...)",
    "temperature": "write SamplingParams(temperature=...)",
    "guided_options_request": "write SamplingParams(structured_outputs=...)",
}


METHODS_INSTEAD: Mapping[str, str] = {
    "abort": "close a stream",
    "beam_search": "write SamplingParams(n=4, temperature=1, logprobs=0), and choose by cumulative_logprob",
    "classify": "only text is made",
    "encode": "write get_tokenizer().encode(text), or score(text) for logits",
    "from_pretrained": "write LLM(model)",
    "generate_async": "threads may share an LLM, and stream(...) gives pieces; `cheetah serve` answers many clients",
    "shutdown": "write close()",
    "sleep": "write close(), and open it again",
    "wake_up": "write close(), and open it again",
    "llm_engine": "LLM.stream gives pieces, and LLM.get_metrics() says what is going on",
    "start_beam_search": "write SamplingParams(n=4, temperature=1, logprobs=0)",
    "reward": "only text is made, and vectors of texts by embed",
    "collective_rpc": "a model runs on one GPU, in this process",
    "stop_profile": "`cheetah trace` and `cheetah bench` measure",
    "start_profile": "`cheetah trace` and `cheetah bench` measure",
}
"""Methods that other libraries' classes have, and what to write."""


def missing_method(name: str) -> AttributeError:
    """For an attribute that an `LLM` has not."""
    hint = f": {METHODS_INSTEAD[name]}" if name in METHODS_INSTEAD else ""
    return AttributeError(f"an LLM has no {name}{hint}")


def refuse_others(call: str, others: Mapping[str, Any]) -> None:
    """CheetahError for the first name that means something else elsewhere, or nothing anywhere."""
    for name, value in others.items():
        if value not in NEUTRAL.get(name, ()):
            hint = INSTEAD.get(name, "leave it out")
            raise CheetahError(f"{call}: {name}={shown(value)} is not supported: {hint}")


def own_names(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """`LLM`'s options of what it was called with, by their names here; others are refused, or ask for nothing."""
    own = {name: value for name, value in given.items() if name in OPTIONS}
    aliases = {name: value for name, value in given.items() if name in ALIASES}
    refuse_others("LLM", {name: value for name, value in given.items() if name not in {*own, *aliases}})
    for alias, value in aliases.items():
        if own.get(name := ALIASES[alias]) is not None:
            raise CheetahError(f"LLM: {alias} is {name} by another name: give one of them")
        own |= {} if value is None else {name: value}
    if own.get("kv_dtype") in KV_DTYPES:
        own["kv_dtype"] = KV_DTYPES[own["kv_dtype"]]
    return own


PROMPT_NAMES = ("prompt_token_ids", "prompt")
NO_PART: Mapping[str, tuple[Any, ...]] = {
    "multi_modal_data": (None, {}),
    "multi_modal_uuids": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "cache_salt": (None,),
}
"""Of vLLM's names in a dict prompt those that may be there beside, with the values that ask for nothing."""


def prompt_of(prompt: Any) -> Prompt:
    """Text or ids, as they are or under their names in a dict."""
    if not isinstance(prompt, Mapping):
        return cast(Prompt, prompt)
    for name, value in prompt.items():
        if name not in PROMPT_NAMES and value not in NO_PART.get(name, ()):
            hint = INSTEAD.get(name, 'give {"prompt": "..."} or {"prompt_token_ids": [...]}')
            raise CheetahError(f"a prompt with {shown(name)}: {hint}")
    for name in PROMPT_NAMES:
        if prompt.get(name) is not None:
            return cast(Prompt, prompt[name])
    names = ", ".join(map(str, prompt))
    raise CheetahError(f'a prompt with {names}: give {{"prompt": "..."}} or {{"prompt_token_ids": [...]}}')


def prompts_of(prompts: Any) -> tuple[list[Prompt], bool]:
    """(the prompts, whether it was one that was given by itself): text, ids, {"prompt": text} or
    {"prompt_token_ids": ids}, or a list of these."""
    if _is_one(prompts):
        return [prompt_of(prompts)], True
    return [prompt_of(prompt) for prompt in prompts], False


def params_for(sampling_params: Any, count: int) -> list[SamplingParams]:
    """The parameters of each of `count` prompts: one for all, or a list with one for each; None is the default."""
    if isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str):
        if len(sampling_params) != count:
            given = len(sampling_params)
            raise CheetahError(f"{given} sampling_params for {count} prompts: give one for each, or one for all")
        return [_params_of(params) for params in sampling_params]
    return [_params_of(sampling_params)] * count


def conversations_of(messages: Any) -> tuple[list[Any], bool]:
    """(the conversations, whether it was one): a list of messages, or a list of such lists."""
    is_several = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
    return (list(messages), False) if is_several else ([messages], True)


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt: text, or a sequence of integers (an empty one is an empty prompt)."""
    if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__"):
        return True
    if isinstance(prompts, bytes | bytearray | memoryview):
        raise CheetahError("a prompt of bytes is neither text nor token ids: decode it")
    if not hasattr(prompts, "__getitem__"):
        raise CheetahError(f"a {type(prompts).__name__} of prompts has no order: give a list")
    return len(prompts) == 0 or isinstance(prompts[0], int | np.integer | np.bool_)


def _params_of(params: Any) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if isinstance(params, Mapping):
        raise CheetahError("sampling_params is a dict: write SamplingParams(temperature=..., max_tokens=...)")
    if not isinstance(params, SamplingParams):
        raise CheetahError(f"sampling_params is {shown(params)}: write SamplingParams(...), a list of them, or None")
    return params


class Advance(Protocol):
    """Says that one more is done."""

    def __call__(self) -> None: ...


@contextmanager
def progress_of(count: int, is_wanted: bool) -> Iterator[Advance]:
    """A bar on standard error over `count` completions, if it is wanted and somebody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("completions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (is_wanted and console.is_terminal)) as bar:
        task = bar.add_task("completions", total=count)
        yield lambda: bar.advance(task)
