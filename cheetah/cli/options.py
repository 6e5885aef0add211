"""Options that several commands share, each written once: types of single ones, and those that come as one dict.

A parameter of a command is `revision: Revision = None`. Of what opens a model (`LoadOptions`), of the plan's options
and of sampling's a table has the names. `takes_load`, `takes_plan` and `takes_sampling` give them to a command, which
receives those that were given as one dict.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from cheetah.options import About, about, options_of
from cheetah.runtime.options import LoadOptions

DEFAULT_GPU = "h200"
LOAD_OPTIONS: Mapping[str, About] = {name: about(field) for name, field in options_of(LoadOptions).items()}
OFF_BY_DEFAULT = {name for name, field in options_of(LoadOptions).items() if field.default is False}
"""Switches that need no way to turn them off."""


def _option(name: str, said: About, panel: str | None = None) -> Any:
    flags = ["--" + one.replace("_", "-") for one in (name, *said.aliases)]
    if said.kind is bool and name not in OFF_BY_DEFAULT:
        flags = [f"{flag}/--no-{flag[2:]}" for flag in flags]
    return typer.Option(
        *flags, help=said.help, min=said.least, max=said.most, rich_help_panel=panel, show_default=False
    )


Config = Annotated[str, typer.Argument(help="A preset, a folder, a config.json, or a hub id.", show_default=False)]
Model = Annotated[str, typer.Argument(help="demo, a folder, a hub id, or random:PRESET.", show_default=False)]
Revision = Annotated[str | None, _option("revision", LOAD_OPTIONS["revision"])]

MachineGpu = Annotated[
    str, typer.Option(help="The machine: h200, h100, emulator, emulator-2, emulator-8; h200x2: two together.")
]

Seed = Annotated[int, typer.Option(help="Of sampling at a temperature above 0.")]
RequestSeed = Annotated[
    int | None, typer.Option(help="Of requests without one; by default a new one each.", show_default=False)
]

PLAN_OPTIONS: Mapping[str, About] = {
    "sync": LOAD_OPTIONS["sync"],
    "max_context": LOAD_OPTIONS["max_context"],
    "page_size": About("Tokens of a page of the KV cache.", kind=int),
    "stage_bytes": About("Bytes of a stage of the ring, the unit of every copy of weights.", kind=int),
    "stages": About("Stages of the ring.", kind=int),
    "in_flight": About("Most stages that are being filled at a time.", kind=int),
    "in_flight_waiting": About("The same while a block waits for a vector; 0: as many.", kind=int),
    "consumer_warps": About("Warps of a block that compute; others copy.", kind=int),
    "max_steps": About("Most decode steps of one launch.", kind=int),
    "batch": About("Most sequences that share a step, 1 to 8.", kind=int),
    "tokens": About("Most tokens that share a step: of several sequences, or of one prompt.", kind=int),
    "kv_chunk": LOAD_OPTIONS["kv_chunk"],
    "drafts": About("Most drafts that a step verifies; with kv_chunk.", kind=int),
    "kv_dtype": LOAD_OPTIONS["kv_dtype"],
    "fused_router": About("1: experts' logits are made of o's input, one token a step; other bits.", kind=int),
    "taps": About("Layers whose hidden states are kept, for models that draft by them: 1,9,17.", kind=str),
}
"""By field of `cheetah.plan.Plan`. Without the option, a rule chooses."""

SAMPLING_OPTIONS: Mapping[str, About] = {
    "temperature": About("0 is greedy; by default the checkpoint's, else 0.", kind=float),
    "stop": About("A text that ends the completion; repeatable.", kind=list[str]),
    "ignore_eos": About("Go on after an end-of-text token.", kind=bool),
    "top_k": About("Only this many of the likeliest tokens; 0 for all.", kind=int),
    "top_p": About("Only the likeliest tokens that together reach this share of the probability.", kind=float),
    "min_p": About("Only tokens at least this share as likely as the likeliest.", kind=float),
    "repetition_penalty": About("Divides the logits of tokens that the text has.", kind=float),
    "presence_penalty": About("Taken from the logits of tokens that were made.", kind=float),
    "frequency_penalty": About("The same, for each time.", kind=float),
    "bad_words": About("A word that is not written; repeatable.", kind=list[str]),
    "min_tokens": About("No token before this many ends the completion.", kind=int),
    "stop_token_ids": About("A token id that ends it; repeatable.", kind=list[int]),
    "include_stop_str_in_output": About("Show what ended it too.", kind=bool),
    "skip_special_tokens": About("Show no special tokens (the default).", kind=bool),
    "truncate_prompt_tokens": About("Of a longer prompt only this many of the last tokens.", kind=int),
}
"""By field of `cheetah.runtime.SamplingParams`. Without the option it is left open."""


Decorate = Callable[[Callable[..., None]], Callable[..., None]]


def takes_plan(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` an option for each of PLAN_OPTIONS in place of its keyword `plan`, which gets those given."""
    return _takes("plan", PLAN_OPTIONS, "Plan (by rule unless given)")(command)


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """The same with SAMPLING_OPTIONS and its keyword `sampling`."""
    return _takes("sampling", SAMPLING_OPTIONS, "Sampling (the checkpoint's unless given)")(command)


def takes_load(names: str) -> Decorate:
    """The same with these of LOAD_OPTIONS, names with spaces between them, and its keyword `load`."""
    return _takes("load", {name: LOAD_OPTIONS[name] for name in names.split()}, "Model and machine")


def _takes(keyword: str, options: Mapping[str, About], panel: str) -> Decorate:
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            found = {name: given.pop(name) for name in options}
            command(**{keyword: {name: value for name, value in found.items() if value is not None}}, **given)

        own = inspect.signature(command, eval_str=True)
        kept = [parameter for parameter in own.parameters.values() if parameter.name != keyword]
        parameters = [*kept, *(_parameter(name, said, panel) for name, said in options.items())]
        with_options.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_options

    return decorate


def _parameter(name: str, said: About, panel: str) -> inspect.Parameter:
    annotation: Any = Annotated[said.kind | None, _option(name, said, panel)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
