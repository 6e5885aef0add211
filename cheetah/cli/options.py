"""Options that several commands share, each written once: types of single ones, and those that override the plan.

A parameter of a command is `device: Device = None`. Of the plan's options one table has the names; `takes_plan` gives
them to a command, which receives those that were given as one dict. So it is with those of sampling.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import typer

DEFAULT_GPU = "h200"

Config = Annotated[str, typer.Argument(help="A preset, a folder, a config.json, or a hub id.", show_default=False)]
Model = Annotated[str, typer.Argument(help="demo, a folder, a hub id, or random:PRESET.", show_default=False)]
Revision = Annotated[str | None, typer.Option(help="Of a hub id: branch, tag or commit.", show_default=False)]
Verbose = Annotated[bool, typer.Option("--verbose", help="Tell the seconds of each stage of the start.")]

# Where a kernel runs, and the machine that it is generated for.
Device = Annotated[
    str | None, typer.Option(help="cuda, cuda:1, pycuda or emulator; by default what is there.", show_default=False)
]
ServingDevice = Annotated[
    str | None, typer.Option(help="cuda, cuda:1 or emulator; by default what is there.", show_default=False)
]
DevicesGpu = Annotated[
    str | None, typer.Option(help="The machine to generate for; by default the device's.", show_default=False)
]
MachineGpu = Annotated[str, typer.Option(help="The machine: h200, h100, emulator, emulator-2, emulator-8.")]

# Of what is generated.
MaxContext = Annotated[
    int | None, typer.Option(help="Most tokens in all; by default the model's, at most 8192.", show_default=False)
]
KvDtype = Annotated[
    str | None, typer.Option(help="How the cache is kept: bf16 (the default) or e4m3.", show_default=False)
]
PromptPasses = Annotated[
    bool | None,
    typer.Option(help="Read prompts in passes of many tokens; by default on a GPU.", show_default=False),
]
ChatTemplate = Annotated[
    str | None, typer.Option(help="Jinja text, or the name of one of the checkpoint's.", show_default=False)
]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy; by default the checkpoint's, else 0.", show_default=False)
]
Seed = Annotated[int, typer.Option(help="Of sampling at a temperature above 0.")]
RequestSeed = Annotated[
    int | None, typer.Option(help="Of requests without one; by default a new one each.", show_default=False)
]

PLAN_OPTIONS: Mapping[str, tuple[type, str]] = {
    "sync": (str, "How blocks exchange vectors: flags or barrier; by default the faster for so many tokens."),
    "max_context": (int, "Most tokens of prompt and completion together."),
    "page_size": (int, "Tokens of a page of the KV cache."),
    "stage_bytes": (int, "Bytes of a stage of the ring, the unit of every copy of weights."),
    "stages": (int, "Stages of the ring."),
    "in_flight": (int, "Most stages that are being filled at a time."),
    "in_flight_waiting": (int, "The same while a block waits for a vector; 0: as many."),
    "consumer_warps": (int, "Warps of a block that compute; others copy."),
    "max_steps": (int, "Most decode steps of one launch."),
    "batch": (int, "Most sequences that share a step, 1 to 8."),
    "tokens": (int, "Most tokens that share a step: of several sequences, or of one prompt."),
    "kv_chunk": (int, "Cut every head's keys after so many, so that no sequence's bits depend on the others."),
    "kv_dtype": (str, "How keys and values are cached: bf16 or e4m3 (8 bits, with scales)."),
    "pool_pages": (int, "Pages of the KV cache, of all sequences together."),
    "kv_chunk_min": (int, "Fewest keys of a head that a block takes when the cache is split."),
    "trace": (bool, "Time stamps of every block and phase in the kernel, as `cheetah trace` needs them."),
}
"""Field of `cheetah.plan.Plan`: (type, help). Without the option, a rule chooses."""

SAMPLING_OPTIONS: Mapping[str, tuple[Any, str]] = {
    "top_k": (int, "Only the so many likeliest tokens; 0 for all."),
    "top_p": (float, "Only the likeliest tokens that together reach this share of the probability."),
    "min_p": (float, "Only tokens at least so many times as likely as the likeliest."),
    "repetition_penalty": (float, "Divides the logits of tokens that the text has."),
    "presence_penalty": (float, "Taken from the logits of tokens that were made."),
    "frequency_penalty": (float, "The same, for each time."),
    "bad_words": (list[str], "A word that is not written; repeatable."),
    "min_tokens": (int, "None of so many first tokens ends the completion."),
    "stop_token_ids": (list[int], "A token id that ends it; repeatable."),
    "include_stop_str_in_output": (bool, "Show what ended it too."),
    "skip_special_tokens": (bool, "Show no special tokens (the default)."),
    "truncate_prompt_tokens": (int, "Of a longer prompt only so many last tokens."),
}
"""Field of `cheetah.runtime.SamplingParams`: (type, help). Without the option it is left open."""


def takes_plan(command: Callable[..., None], fixed: Collection[str] = ()) -> Callable[..., None]:
    """Give `command` an option for each of PLAN_OPTIONS in place of its keyword `plan`, which gets those given.

    `fixed`: fields that the command itself decides.
    """
    options = {name: entry for name, entry in PLAN_OPTIONS.items() if name not in fixed}
    return _takes(command, "plan", options, "Plan (by rule unless given)")


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """The same with SAMPLING_OPTIONS and its keyword `sampling`."""
    return _takes(command, "sampling", SAMPLING_OPTIONS, "Sampling (the checkpoint's unless given)")


def _takes(
    command: Callable[..., None], keyword: str, options: Mapping[str, tuple[Any, str]], panel: str
) -> Callable[..., None]:
    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        found = {name: given.pop(name) for name in options}
        command(**{keyword: {name: value for name, value in found.items() if value is not None}}, **given)

    own = inspect.signature(command, eval_str=True)
    kept = [parameter for parameter in own.parameters.values() if parameter.name != keyword]
    parameters = [*kept, *(_parameter(name, *entry, panel) for name, entry in options.items())]
    with_options.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def _parameter(name: str, kind: Any, text: str, panel: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    negated = f"{flag}/--no-{flag[2:]}" if name in SAMPLING_OPTIONS and kind is bool else flag
    option = typer.Option(negated, help=text, rich_help_panel=panel, show_default=False)
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
