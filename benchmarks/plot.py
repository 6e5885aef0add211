"""Draw tokens/s and the share of the read ceiling against context, from the records of `cheetah bench --json`.

    python benchmarks/plot.py benchmarks/results/*.jsonl -o speeds.png

A column for each GPU, model, kind of weights, batch, and what else a step does (tokens that sequences share, tokens of
a prompt, contexts that differ: those stand at the first one's); a line for each system. Whiskers go from the slowest to
the fastest sample. Of several records of one line and context, the last one counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
Lines = dict[str, list[Record]]
"""The records of a line by its label, in ascending context."""


class PlotError(Exception):
    """What the user has to change."""


def read_records(paths: Iterable[Path]) -> list[Record]:
    """Every record that tells a speed, in order: those of the emulator do not. PlotError where one cannot be read."""
    records: list[Record] = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as problem:
            raise PlotError(f"{path}: cannot be read: {problem.strerror}") from problem
        for number, line in enumerate(lines, 1):
            if line.strip():
                records.append(_record(f"{path}:{number}", line))
    return [record for record in records if "note" not in record]


def _record(place: str, line: str) -> Record:
    try:
        record: Record = json.loads(line)
        missing = {"model", "context", "tokens_per_s", "ms_per_step"} - set(record)
    except (ValueError, TypeError) as problem:
        raise PlotError(f"{place}: no JSON record: {problem}") from problem
    if missing:
        raise PlotError(f"{place}: the record has no {', '.join(sorted(missing))}")
    return record


def columns_of(records: Iterable[Record], by: Sequence[str] = ("system",)) -> dict[str, Lines]:
    """Column title -> label -> records. `by`: the fields that make a line, "plan.sync" for one of the plan."""
    last: dict[tuple[str, str, int], Record] = {}
    for record in records:
        label = ", ".join(str(field_of(record, name)) for name in by)
        last[_title(record), label, int(record["context"])] = record
    columns: dict[str, Lines] = {}
    for (title, label, _), record in sorted(last.items(), key=lambda entry: entry[0][2]):
        columns.setdefault(title, {}).setdefault(label, []).append(record)
    return {title: dict(sorted(lines.items())) for title, lines in sorted(columns.items())}


def field_of(record: Record, name: str) -> Any:
    """ "plan.sync" -> record["plan"]["sync"]; "-" where there is none."""
    value: Any = record
    for part in name.split("."):
        value = value.get(part, "-") if isinstance(value, Mapping) else "-"
    return value


def _title(record: Record) -> str:
    weights = str(record.get("weights", "")).removesuffix(" random")  # random numbers are read as fast as others
    parts = [f"{record['model']} {weights}, batch {record.get('batch', 1)}"]
    contexts = record.get("contexts", [])
    parts += ["contexts " + "+".join(map(str, contexts))] if len(set(contexts)) > 1 else []
    parts += [f"{record['shared']} tokens shared"] if record.get("shared") else []
    parts += [f"{record['per_step']} tokens a step"] if record.get("per_step", 1) > 1 else []
    return f"{', '.join(parts)}\n{record.get('gpu', '')}".strip()


def draw(columns: Mapping[str, Lines]) -> Figure:
    """Above tokens/s, below the share of the ceiling. PlotError without matplotlib or without records."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("a plot needs matplotlib: pip install '.[plot]' in Cheetah's checkout") from None
    if not columns:
        raise PlotError("there is no record of a speed to draw")
    figure = Figure(figsize=(max(6.0, 4.5 * len(columns)), 7), layout="constrained")
    panels = figure.subplots(2, len(columns), squeeze=False, sharex="col")
    colours = {
        label: f"C{n}" for n, label in enumerate(sorted({label for lines in columns.values() for label in lines}))
    }
    for (speeds, shares), (title, lines) in zip(panels.T, columns.items(), strict=True):
        speeds.set_title(title, fontsize=9)
        for label, records in lines.items():
            _draw_speed(speeds, label, records, colours[label])
            _draw_share(shares, label, records, colours[label])
        _finish(speeds, shares, {record["context"] for records in lines.values() for record in records})
    panels[0, 0].set_ylabel("tokens/s")
    panels[1, 0].set_ylabel("share of the read ceiling, %")
    return figure


def _draw_speed(axes: Axes, label: str, records: Sequence[Record], colour: str) -> None:
    speeds = [record["tokens_per_s"] for record in records]
    samples = [[record["tokens_per_s"] * record["ms_per_step"] / one for one in _samples(record)] for record in records]
    below = [max(0.0, speed - min(some)) for speed, some in zip(speeds, samples, strict=True)]
    above = [max(0.0, max(some) - speed) for speed, some in zip(speeds, samples, strict=True)]
    contexts = [record["context"] for record in records]
    axes.errorbar(contexts, speeds, yerr=[below, above], label=label, color=colour, marker="o", ms=4, capsize=3)


def _samples(record: Record) -> Sequence[float]:
    """Milliseconds a step."""
    samples: Sequence[float] = record.get("ms_per_step_samples", [record["ms_per_step"]])
    return samples


def _draw_share(axes: Axes, label: str, records: Sequence[Record], colour: str) -> None:
    """Records without a ceiling of their own run have no share."""
    known = [record for record in records if record.get("share") is not None]
    shares = [100 * record["share"] for record in known]
    axes.plot([record["context"] for record in known], shares, label=label, color=colour, marker="o", ms=4)


def _finish(speeds: Axes, shares: Axes, contexts: set[int]) -> None:
    shares.set_xscale("symlog", base=2, linthresh=16)  # context 0 has a place
    shares.set_xticks(sorted(contexts), [str(context) for context in sorted(contexts)], rotation=45)
    shares.set_xlabel("context, tokens")
    speeds.set_ylim(bottom=0)
    shares.set_ylim(0, 100)
    for axes in (speeds, shares):
        axes.grid(alpha=0.3)
    speeds.legend(fontsize=8)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="FILE.jsonl")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.png", help="or svg, or pdf")
    parser.add_argument(
        "--by", default="system", metavar="FIELD,...", help="what makes a line, e.g. system,plan.sync (default: system)"
    )
    given = parser.parse_args(arguments)
    try:
        figure = draw(columns_of(read_records(given.records), given.by.split(",")))
        figure.savefig(given.output, dpi=120)
    except (PlotError, OSError, ValueError) as problem:
        sys.exit(f"{parser.prog}: {problem}")


if __name__ == "__main__":
    main()
