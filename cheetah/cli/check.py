"""`cheetah check`: a kernel under many schedules, against float32, and under the race detector."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cheetah.cli.configs import NamedConfig, named_config, print_notes
from cheetah.cli.options import Config, Revision, takes_plan
from cheetah.cli.tables import console

if TYPE_CHECKING:
    from cheetah.models.config import ModelConfig
    from cheetah.models.family import Tensors
    from cheetah.tools.subjects import Subject

EPILOG = "Example: cheetah check llama-3.1-8b --seeds 10 --sync barrier"
SCHEDULERS = "round_robin,random,priority"
FOUND = 1
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "1")
"""Of numpy, whose threads wait for one another by spinning: the references' products are small, and two processes work
already. To choose prompts for the passes of qwen3-30b-a3b took 9.2 s of a busy host with two threads, 1.0 with one."""
GPU = "h200"
"""Whose plan of the model is to have nothing that none of the small models' has."""

LARGEST = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 512}
"""What these sizes are cut to, plus what they are above a multiple of 32, so that the padding stays as it is."""
LARGEST_KV_HEADS = 2
NARROW_FFN, NARROW_BLOCKS = 320, 6
"""Of models whose o and down have narrow M-tiles on the GPU: so many columns and blocks have theirs narrow too."""
NARROW_EXPERTS = 16
"""Of models whose router has: so many experts have them too, where it has columns enough."""
CONTEXT = 128


@takes_plan
def check(
    *,
    config: Config,
    seeds: Annotated[int, typer.Option(min=1, help="Schedules of each scheduler; twice, of awkward models.")] = 1,
    schedulers: Annotated[str, typer.Option(metavar="A,B,...", help="Of the emulator.")] = SCHEDULERS,
    gpu: Annotated[str, typer.Option(help="The emulated machine: emulator, emulator-2, emulator-8.")] = "emulator",
    tensor_parallel_size: Annotated[int, typer.Option(help="So many of them make each step together.")] = 1,
    sanitizer: Annotated[bool, typer.Option(help="Also run once, on 2 blocks, under ThreadSanitizer.")] = True,
    first: Annotated[bool, typer.Option("--first", help="Stop at the first wrong verdict.")] = False,
    revision: Revision = None,
    plan: dict[str, Any],
) -> None:
    """Look for schedules under which a model's kernel goes wrong, in the emulator. Needs g++ and no GPU.

    Launches of every kind (prompts, sampling, an early stop, split and full caches, sequences that ask for different
    things) run under each scheduler with each seed, and must give the same bits, agree with float32, and access nothing
    unordered. So must passes over prompts, where the model has them. Exit code 1 if something is found.

    The demo model is checked as it is; of any other, a smaller one of the same kind with random weights. Before it come
    small models of its kind with awkward sizes and other plans.
    """
    os.environ.setdefault(*ONE_THREAD)  # before numpy is loaded
    from cheetah.plan.gpu import gpu_named, together
    from cheetah.tools.check import check_model

    named = named_config(config, revision)
    print_notes(named.notes)
    subject, shown = subject_of(named, plan, tensor_parallel_size), console()
    _require(gpu, chosen := tuple(schedulers.split(",")))
    gpu = together(gpu_named(gpu), tensor_parallel_size).name
    is_right, features = True, set[str]()
    with _progress() as progress:
        for part, verdict in check_model(subject, gpu, seeds, chosen, sanitizer, first=first, progress=progress):
            shown.print(f"checking {named.canonical}: {part.kind}\n{verdict}")
            is_right, features = is_right and verdict.ok, features | verdict.features
    missing = set() if first and not is_right else _missing(named.config, tensor_parallel_size, plan, features)
    shown.print(_features(features, missing))
    shown.print("verdict: WRONG" if not is_right else "verdict: INCOMPLETE" if missing else "verdict: nothing found")
    if missing or not is_right:
        raise typer.Exit(FOUND)


def subject_of(named: NamedConfig, plan: dict[str, Any], ranks: int = 1) -> Subject:
    """What is checked of a model, by these options of the plan."""
    from cheetah.tools.subjects import Subject

    checked, tensors, kind = _model_of(named, ranks)
    options = {"max_context": min(CONTEXT, checked.max_position_embeddings), **plan}
    blocks = NARROW_BLOCKS if _is_narrow(named.config) and checked is not named.config else None
    return Subject(kind, checked, tensors, options, blocks=blocks)


def _missing(config: ModelConfig, ranks: int, plan: dict[str, Any], features: set[str]) -> set[str]:
    """What the model's own kernels have on a GPU by these options, and none of those that were looked at; nothing where
    there is no such plan."""
    from cheetah.plan import PlanError, gpu_named
    from cheetah.plan.gpu import together
    from cheetah.tools.features import features_on

    try:
        return features_on(together(gpu_named(GPU), ranks), config, **plan) - features
    except PlanError:
        return set()


def _features(features: set[str], missing: set[str]) -> str:
    found = f"kernels looked at have: {', '.join(sorted(features))}"
    return (
        f"{found}\nof the model's plan on an {GPU.upper()} no kernel had: {', '.join(sorted(missing))}"
        if missing
        else found
    )


def shrunk(config: ModelConfig, ranks: int = 1) -> ModelConfig:
    """A small model of the same kind, whose heads so many ranks can share."""
    from cheetah.plan.narrow import LEAST_COLUMNS_EMULATED
    from cheetah.tools.subjects import sized

    sizes = {name: _cut(getattr(config, name), largest) for name, largest in LARGEST.items()}
    if _is_narrow(config):
        sizes["intermediate_size"] = NARROW_FFN
    if not _has_narrow_router(config):
        return sized(config, sizes, min(config.kv_heads, LARGEST_KV_HEADS), ranks=ranks)
    sizes["hidden_size"] = LEAST_COLUMNS_EMULATED
    small = sized(config, sizes, min(config.kv_heads, LARGEST_KV_HEADS), ranks=ranks)
    assert small.routing is not None
    return replace(small, routing=replace(small.routing, experts=NARROW_EXPERTS))


def _is_narrow(config: ModelConfig) -> bool:
    """Whether o and down have M-tiles of 8 rows on the GPU."""
    from cheetah.plan import gpu_named
    from cheetah.plan.formats import NARROW_ROWS
    from cheetah.plan.narrow import residual_tile_rows

    return residual_tile_rows(config.shape, gpu_named(GPU)) == NARROW_ROWS


def _has_narrow_router(config: ModelConfig) -> bool:
    """Whether the router of experts has them."""
    from cheetah.plan import gpu_named
    from cheetah.plan.formats import NARROW_ROWS
    from cheetah.plan.narrow import tile_rows
    from cheetah.plan.products import ROUTER

    routers = (one for one in config.shape.table.products if one.name == ROUTER)
    return any(tile_rows(one, config.shape, gpu_named(GPU)) == NARROW_ROWS for one in routers)


def _cut(size: int, largest: int) -> int:
    return size if size <= largest else largest + size % 32


def _model_of(named: NamedConfig, ranks: int) -> tuple[ModelConfig, Tensors, str]:
    """(what is checked, its tensors, what that is in words)."""
    from cheetah.models.registry import DEMO
    from cheetah.runtime.checkpoint.loading import open_checkpoint
    from cheetah.runtime.checkpoint.random_weights import random_tensors

    if named.canonical == DEMO:
        return named.config, open_checkpoint(DEMO).tensor, "the whole model"
    small = shrunk(named.config, ranks)
    heads = f"{small.query_heads} query and {small.kv_heads} KV heads of {small.head_dim}"
    sizes = f"hidden {small.hidden_size}, ffn {small.intermediate_size}, vocab {small.vocab_size}"
    kind = f"shrunk to {small.layers} layers, {heads}, {sizes}; random weights"
    return small, random_tensors(small), kind


def _require(gpu: str, schedulers: tuple[str, ...]) -> None:
    """CheetahError unless this is an emulated machine, and schedulers of the emulator."""
    from cheetah.emulator import SCHEDULERS
    from cheetah.errors import CheetahError

    if unknown := set(schedulers) - set(SCHEDULERS):
        raise CheetahError(f"no scheduler {', '.join(sorted(unknown))}: there are {', '.join(SCHEDULERS)}")
    require_emulated(gpu)


def require_emulated(gpu: str) -> None:
    """CheetahError unless `gpu` is one of the emulator's machines."""
    from cheetah.errors import CheetahError
    from cheetah.plan import GPUS, gpu_named

    if not gpu_named(gpu).emulated:
        emulated = ", ".join(name for name, machine in GPUS.items() if machine.emulated)
        raise CheetahError(f"--gpu {gpu}: check runs in the emulator: choose one of {emulated}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows on stderr, where that is a terminal, which run is going on."""
    from rich.console import Console

    with Console(stderr=True).status("compiling for the emulator") as status:
        yield lambda line: status.update(line)
