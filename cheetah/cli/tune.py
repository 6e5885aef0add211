"""`cheetah tune`: the fastest plan for a model on the GPU at hand, found by measuring, and kept."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from cheetah.cli.bench import parsed_contexts
from cheetah.cli.options import Device, DevicesGpu, Revision
from cheetah.errors import CheetahError

if TYPE_CHECKING:
    from rich.table import Table

    from cheetah.models.config import ModelConfig
    from cheetah.plan import Plan
    from cheetah.tools.plan_variants import Variants
    from cheetah.tools.tune import Space

EPILOG = "Example: cheetah tune llama-3.1-8b --contexts 128,6144"
CONTEXTS = "128,1024,6144"
WIDTH = 120  # the table's, whatever the terminal's
EMULATED = "emulated times are not speeds: this ranking says nothing of a GPU"


def tune(
    model: Annotated[str, typer.Argument(help="A preset, a folder, a config.json, or a hub id: no weights are read.")],
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help=f"Tokens in the cache before a launch; by default those of {CONTEXTS} that the model has room for.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of a launch.")] = 16,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed launches of a plan at each context and turn.")] = 3,
    search: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Fields of the plan to search; by default all.", show_default=False),
    ] = None,
    store: Annotated[
        bool | None,
        typer.Option(help="Keep the winner; by default on a GPU, never on the emulator.", show_default=False),
    ] = None,
    device: Device = None,
    gpu: DevicesGpu = None,
    revision: Revision = None,
) -> None:
    """Search the plans around the rule's for the fastest on this GPU, and keep it beside the cache.

    LLM, run, bench, trace and generate then use it for models of this shape, unless told --no-tuned or given plan
    fields of their own. Weights are random numbers: speed does not depend on them.
    """
    from cheetah.cli.configs import named_config, print_notes
    from cheetah.runtime.assembly.kernels import choose_gpu
    from cheetah.runtime.assembly.tuned import SEARCHED
    from cheetah.runtime.device import open_device
    from cheetah.tools.bench import check_depths
    from cheetah.tools.plan_variants import open_variants
    from cheetah.tools.tune import Space

    fields = SEARCHED if search is None else tuple(search.split(","))
    named = named_config(model, revision)
    print_notes(named.notes)
    depths = parsed_contexts(contexts) if contexts else _fitting(named.config, steps)
    check_depths(named.config, depths, steps)
    started = time.monotonic()
    with open_device(device) as opened:
        machine = choose_gpu(opened.describe(), gpu)
        with open_variants(named.config, named.canonical, opened, machine, depths, steps, repetitions) as variants:
            space = Space(named.config, machine, variants.room, fields)
            winner = _search(space, variants)
            title = (
                f"{named.canonical}, batch 1, {named.config.formats_in_words} random weights, {opened.describe().name}"
            )
            _print(_table(title, variants, space.rule, winner))
            print(f"{len(variants.found)} plans in {time.monotonic() - started:.0f} s")
            if machine.emulated:
                print(EMULATED)
            if store is None and machine.emulated or store is False:
                print("nothing stored")
            else:
                print(_store(named.config, named.canonical, opened.describe().name, variants, space.rule, winner))


def register(app: typer.Typer) -> None:
    """Make this a command of `app`."""
    app.command(epilog=EPILOG)(tune)


def _fitting(config: ModelConfig, steps: int) -> list[int]:
    depths = parsed_contexts(CONTEXTS)
    return [depth for depth in depths if depth + steps <= config.max_position_embeddings] or depths[:1]


def _search(space: Space, variants: Variants) -> Plan:
    """Descent, then the best few and the rule's once more in turn, as what was measured apart may differ by chance."""
    from cheetah.runtime.device import say_to_stderr
    from cheetah.tools.tune import FINALISTS, chosen, descend

    rule = space.rule
    variants.compile_ahead([rule, *(plan for field in space.fields for plan in space.around(rule, field))])
    variants.fill(rule)
    best = descend(space, variants.measure, say_to_stderr)
    fastest = sorted(variants.found.values(), key=lambda variant: variant.score)[:FINALISTS]
    finalists = list(dict.fromkeys([best, *(variant.plan for variant in fastest), rule]))
    scores = dict(zip(finalists, variants.measure(finalists, 2 * variants.repetitions + 1), strict=True))
    winner = chosen(finalists, list(scores.values()))
    return chosen([rule, winner], [scores[rule], scores[winner]])


def _table(title: str, variants: Variants, rule: Plan, winner: Plan) -> Table:
    from rich.table import Table

    from cheetah.runtime.assembly.tuned import SEARCHED

    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in (*SEARCHED, *(f"ms at {context}" for context in variants.contexts), "to the rule", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    usual = variants.found[rule].score
    for variant in sorted(variants.found.values(), key=lambda variant: (variant.plan != winner, variant.score)):
        marks = [mark for mark, plan in (("winner", winner), ("rule", rule)) if variant.plan == plan]
        times = [f"{value:.4f}" for value in variant.ms_per_step.values()]
        table.add_row(
            *(str(getattr(variant.plan, name)) for name in SEARCHED),
            *(times or ["-"] * len(variants.contexts)),
            "-" if variant.remark else f"{variant.score / usual - 1:+.2%}",
            ", ".join([variant.remark] if variant.remark else marks),
        )
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    Console(width=WIDTH, soft_wrap=True, highlight=False, markup=False).print(table)


def _store(config: ModelConfig, name: str, device: str, variants: Variants, rule: Plan, winner: Plan) -> str:
    """Keeps the winner, also where it is the rule's; a line that says where."""

    from cheetah.runtime.assembly.tuned import TunedPlan, generator_hash
    from cheetah.tools.circumstances import commit
    from cheetah.tools.tune import choice_of

    def times(plan: Plan) -> dict[str, float]:
        return {str(context): round(value, 5) for context, value in variants.found[plan].ms_per_step.items()}

    record = TunedPlan(
        model=name,
        shape=config.shape.describe(),
        gpu=variants.gpu.name,
        device=device,
        generator=generator_hash(),
        commit=commit(),
        plan=choice_of(winner),
        ms_per_step=times(winner),
        rule_ms_per_step=times(rule),
    )
    try:
        path = record.store()
    except OSError as problem:
        raise CheetahError(f"the winner cannot be stored: {problem}") from problem
    what = "the rule's plan is the fastest" if winner == rule else "stored the winner"
    return f"{what}: {path}"
