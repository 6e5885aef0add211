"""Tokens/s against how many weights there are: each sparse format beside dense ones of the same run.

    python -m benchmarks.density --json density-of-today.jsonl --svg density.svg
    python -m benchmarks.density --drawn benchmarks/results/2026-11-23-h200-density.txt --svg density.svg

One model, one sequence behind 128 tokens. Each format has a process of its own; all pack their random weights side by
side, then take turns on the GPU. A line a format: its median, beside bf16's of the run, and the share of the ceiling.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.turns import Tree, TurnWork

MODEL, CONTEXT, WARMUP = "llama-3.1-8b", 128, 1
DENSITIES = {
    **{"bf16": 1.0, "int8": 1.0, "fp8": 1.0, "int4-g128": 1.0, "int4-g128+list5": 1.0},
    **{"2of4": 0.5, "2of4-fp8": 0.5, "2of4-int4-g128": 0.5},
    **{"2of4+list24": 0.3, "2of4+list42": 0.4, "2of4+list65": 0.5},
    **{"blocks-1of4": 0.25, "blocks-2of4": 0.5, "blocks-3of4": 0.75},
    **{"blocks-256of1024": 0.25, "blocks-512of1024": 0.5, "blocks-768of1024": 0.75},
}
"""Of the weights of layers, those that are not zero: lists of so many units beside 2:4 are what random masks need."""
FAMILIES = {"blocks": "#c33", "list": "#36c", "2of4": "#383", "": "#555"}
"""What the name of a format has, and the colour of its points; the first that fits."""
WIDTH, HEIGHT, LEFT, STEP = 640, 400, 50, 200
Record = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.drawn is None:
        records = measured(options.turns, options.device, options.formats)
    else:
        records = records_of(options.drawn.read_text(encoding="utf-8"))
    for line in table(records):
        print(line, flush=True)
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    if options.svg is not None:
        options.svg.write_text(drawing(records), encoding="utf-8")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.density", description=(__doc__ or "").splitlines()[0])
    made.add_argument("formats", nargs="*", default=list(DENSITIES), metavar="FORMAT", help="by default all")
    made.add_argument("--turns", type=int, default=5, help="timed launches of each")
    made.add_argument("--json", type=Path, help="append the records here")
    made.add_argument("--svg", type=Path, help="draw them here")
    made.add_argument("--drawn", type=Path, help="draw what such a table says, measure nothing")
    made.add_argument("--device", default="cuda", help="cuda, or emulator to try it: no speeds")
    return made


def measured(turns: int, device: str, formats: Iterable[str]) -> list[Record]:
    """A record a format: density, ms of each turn, tokens_per_s, share (0 where there is none)."""
    model = MODEL if device != "emulator" else "demo"
    works = {name: TurnWork(model + ("" if name == "bf16" else f"@{name}"), 1, CONTEXT) for name in formats}
    trees = {name: Tree(Path(__file__).resolve().parents[1], work, device) for name, work in works.items()}
    try:
        with ThreadPoolExecutor(len(trees)) as pool:
            list(pool.map(Tree.answer, trees.values()))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for number in range(WARMUP + turns):
            for name, tree in trees.items():
                one = tree.turn()
                if number >= WARMUP:
                    found[name].append(one)
    finally:
        for tree in trees.values():
            tree.close()
    return [_record(model, name, launches) for name, launches in found.items()]


def _record(model: str, name: str, launches: Sequence[Mapping[str, float]]) -> Record:
    ms = [one["ms"] for one in launches]
    share = median(one.get("share", 0.0) for one in launches)
    sizes = {"ms": ms, "tokens_per_s": 1000 / median(ms), "share": share}
    return {"model": model, "format": name, "density": DENSITIES[name], "context": CONTEXT, **sizes}


def table(records: Iterable[Record]) -> list[str]:
    """A line a record, fewest weights first."""
    ordered = sorted(records, key=lambda one: (one["density"], one["tokens_per_s"]))
    dense = next((one["tokens_per_s"] for one in ordered if one["format"] == "bf16"), float("nan"))
    lines = [f"{'format':26} density  tok/s  of bf16  share"]
    for one in ordered:
        beside = one["tokens_per_s"] / dense
        lines.append(
            f"{one['format']:26} {one['density']:7.2f} {one['tokens_per_s']:6.1f} {beside:8.3f} {one['share']:6.3f}"
        )
    return lines


def records_of(text: str) -> list[Record]:
    """The records of a `table`, with the digits that it has."""
    found: list[Record] = []
    for line in text.splitlines():
        name, *numbers = line.split() or [""]
        if name in DENSITIES:
            density, speed, _, share = map(float, numbers[:4])
            found.append({"model": MODEL, "format": name, "density": density, "tokens_per_s": speed, "share": share})
    return found


def drawing(records: Sequence[Record]) -> str:
    """An SVG: a point a record, tokens/s upwards."""
    most = float(max(one["tokens_per_s"] for one in records)) * 1.1

    def x(density: float) -> float:
        return LEFT + (WIDTH - LEFT - 130) * density

    def y(speed: float) -> float:
        return HEIGHT - 40 - (HEIGHT - 60) * speed / most

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif"']
    parts += [' font-size="11"><rect width="100%" height="100%" fill="#fff"/>\n']
    for speed in range(0, int(most) + 1, STEP):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y(speed):.1f}" y2="{y(speed):.1f}" stroke="#ddd"/>\n')
        parts.append(f'<text x="12" y="{y(speed) + 4:.1f}">{speed}</text>\n')
    for density in sorted({one["density"] for one in records}):
        parts.append(f'<text x="{x(density) - 10:.1f}" y="{HEIGHT - 20}">{density:.0%}</text>\n')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 5}">weights that are there; {records[0]["model"]}, tokens/s</text>\n')
    for one in records:
        colour = next(colour for name, colour in FAMILIES.items() if name in one["format"])
        at = x(one["density"]), y(one["tokens_per_s"])
        parts.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{at[0] + 7:.1f}" y="{at[1] + 4:.1f}">{one["format"]}</text>\n')
    return "".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    sys.exit(main())
