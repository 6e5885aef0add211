"""Options that several commands share, each written once: types of single ones, and those that come as one dict.

A parameter of a command is `revision: Revision = None`. What opens a model is described by `LoadOptions`; of the plan's
options and of sampling's a table has the names. `takes_load`, `takes_plan` and `takes_sampling` give them to a command,
which receives those that were given as one dict.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from cheetah.options import about, options_of
from cheetah.runtime.options import LoadOptions

DEFAULT_GPU = "h200"
LOAD_OPTIONS = options_of(LoadOptions)


def load_option(name: str, panel: str | None = None) -> Any:
    """The command's option for one of LOAD_OPTIONS."""
    said = about(LOAD_OPTIONS[name])
    flags = ["--" + one.replace("_", "-") for one in (name, *said.aliases)]
    if said.kind is bool and LOAD_OPTIONS[name].default is not False:
        flags = [f"{flag}/--no-{flag[2:]}" for flag in flags]
    return typer.Option(
        *flags, help=said.help, min=said.least, max=said.most, rich_help_panel=panel, show_default=False
    )


Config = Annotated[str, typer.Argument(help="A preset, a folder, a config.json, or a hub id.", show_default=False)]
Model = Annotated[str, typer.Argument(help="demo, a folder, a hub id, or random:PRESET.", show_default=False)]
Revision = Annotated[str | None, load_option("revision")]

MachineGpu = Annotated[str, typer.Option(help="The machine: h200, h100, emulator, emulator-2, emulator-8.")]

Seed = Annotated[int, typer.Option(help="Of sampling at a temperature above 0.")]
RequestSeed = Annotated[
    int | None, typer.Option(help="Of requests without one; by default a new one each.", show_default=False)
]

PLAN_OPTIONS: Mapping[str, tuple[type, str]] = {
    "sync": (str, about(LOAD_OPTIONS["sync"]).help),
    "max_context": (int, about(LOAD_OPTIONS["max_context"]).help),
    "page_size": (int, "Tokens of a page of the KV cache."),
    "stage_bytes": (int, "Bytes of a stage of the ring, the unit of every copy of weights."),
    "stages": (int, "Stages of the ring."),
    "in_flight": (int, "Most stages that are being filled at a time."),
    "in_flight_waiting": (int, "The same while a block waits for a vector; 0: as many."),
    "consumer_warps": (int, "Warps of a block that compute; others copy."),
    "max_steps": (int, "Most decode steps of one launch."),
    "batch": (int, "Most sequences that share a step, 1 to 8."),
    "tokens": (int, "Most tokens that share a step: of several sequences, or of one prompt."),
    "kv_chunk": (int, about(LOAD_OPTIONS["kv_chunk"]).help),
    "kv_dtype": (str, about(LOAD_OPTIONS["kv_dtype"]).help),
}
"""Field of `cheetah.plan.Plan`: (type, help). Without the option, a rule chooses."""

SAMPLING_OPTIONS: Mapping[str, tuple[Any, str]] = {
    "temperature": (float, "0 is greedy; by default the checkpoint's, else 0."),
    "stop": (list[str], "A text that ends the completion; repeatable."),
    "ignore_eos": (bool, "Go on after an end-of-text token."),
    "top_k": (int, "Only this many of the likeliest tokens; 0 for all."),
    "top_p": (float, "Only the likeliest tokens that together reach this share of the probability."),
    "min_p": (float, "Only tokens at least this share as likely as the likeliest."),
    "repetition_penalty": (float, "Divides the logits of tokens that the text has."),
    "presence_penalty": (float, "Taken from the logits of tokens that were made."),
    "frequency_penalty": (float, "The same, for each time."),
    "bad_words": (list[str], "A word that is not written; repeatable."),
    "min_tokens": (int, "No token before this many ends the completion."),
    "stop_token_ids": (list[int], "A token id that ends it; repeatable."),
    "include_stop_str_in_output": (bool, "Show what ended it too."),
    "skip_special_tokens": (bool, "Show no special tokens (the default)."),
    "truncate_prompt_tokens": (int, "Of a longer prompt only this many of the last tokens."),
}
"""Field of `cheetah.runtime.SamplingParams`: (type, help). Without the option it is left open."""


def takes_plan(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` an option for each of PLAN_OPTIONS in place of its keyword `plan`, which gets those given."""
    return _takes(command, "plan", _parameters(PLAN_OPTIONS, "Plan (by rule unless given)"))


def takes_load(names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of these of LOAD_OPTIONS, names with spaces between them, in place of its
    keyword `load`, which gets those that were given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        return _takes(command, "load", [_load_parameter(name) for name in names.split()])

    return decorate


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """The same with SAMPLING_OPTIONS and its keyword `sampling`."""
    return _takes(command, "sampling", _parameters(SAMPLING_OPTIONS, "Sampling (the checkpoint's unless given)"))


def _takes(command: Callable[..., None], keyword: str, options: Sequence[inspect.Parameter]) -> Callable[..., None]:
    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        found = {one.name: given.pop(one.name) for one in options}
        command(**{keyword: {name: value for name, value in found.items() if value is not None}}, **given)

    own = inspect.signature(command, eval_str=True)
    kept = [parameter for parameter in own.parameters.values() if parameter.name != keyword]
    parameters = [*kept, *options]
    with_options.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def _parameters(options: Mapping[str, tuple[Any, str]], panel: str) -> list[inspect.Parameter]:
    """Of a table of names, types and helps; none has a default."""
    found = []
    for name, (kind, text) in options.items():
        flag = "--" + name.replace("_", "-")
        negated = f"{flag}/--no-{flag[2:]}" if name in SAMPLING_OPTIONS and kind is bool else flag
        option = typer.Option(negated, help=text, rich_help_panel=panel, show_default=False)
        found.append(_parameter(name, kind, option))
    return found


def _load_parameter(name: str) -> inspect.Parameter:
    return _parameter(name, about(LOAD_OPTIONS[name]).kind, load_option(name, "Model and machine"))


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
