"""Markdown tables of the studies' records, and beside them what the paper says where we know it.

Of several records of one study, case and system, the last counts. GB = 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.studies import paper

Record = Mapping[str, Any]

TITLES = {
    "linear": "Deep linear networks (the paper's Table 4)",
    "stacks": "Stacks of attention and GLU blocks, shape of Llama 3.1 8B (the paper's Table 9)",
    "model": "The whole decode step, unfused and fused (beside the paper's Table 6, bf16)",
    "ring": "Depth and stage size of the ring, whole step (the paper's Table 8)",
}
NOTES = {
    "linear": (
        "y = W x through `layers` square bf16 matrices, batch 1. Unfused: a kernel a layer, from a CUDA graph. Fused: "
        "one kernel, whose producer warp asks for a layer's weights when the layer's input is there. Overlap: the copy "
        "warp runs ahead. Blocks exchange the vector by flagged words, or where it says so by a grid barrier. "
        "Every pass reads weights that are not in L2."
    ),
    "stacks": (
        "Unfused: every phase a kernel of our own blocks (q/k/v, attention, merge, o; gate/up, down), from a CUDA "
        "graph. Fused, overlap: one kernel for all layers. Both give the same bits."
    ),
    "model": (
        "Unfused: the phases of our own kernel, each a kernel, from a CUDA graph, at one position. Fused: the "
        "generated kernel, 8 tokens a launch. Both sample on the GPU. Their logits are equal. The paper's figures are "
        "an H100's, share of its 3350 GB/s; ours is the share of the ceiling measured in the same run."
    ),
    "ring": (
        "Stages of the copy ring, and how many chunks are requested at most at a time: landed ones beyond them wait to "
        "be used."
    ),
}
PAPER_NOTES = {
    "linear": "The paper's columns: a kernel a layer / fused with a grid barrier / with overlap, on one H100.",
    "stacks": "The paper's: a kernel a layer / fused / with overlap, on one H100; its contexts are not known to us.",
    "model": "The paper's: gpt-fast / vLLM / FlashFormer, on one H100, by the length of the prompt.",
    "ring": "The paper's: its own kernel on one H100, at 3072 tokens.",
}
"""What stands in the paper's column: printed there, never measured by us."""


def report(records: Iterable[Record]) -> str:
    """A section a study, in the order of TITLES."""
    listed = list(records)
    sections = [_section(study, [one for one in listed if one["study"] == study]) for study in TITLES]
    return "\n\n".join(section for section in sections if section)


def _section(study: str, records: Sequence[Record]) -> str:
    if not records:
        return ""
    table = {"ring": _ring_table, "model": _model_table}.get(study, _variants_table)
    note = f"{NOTES[study]} {PAPER_NOTES[study]}"
    return "\n\n".join([f"## {TITLES[study]}", note, table(records), _circumstances(records)])


def _circumstances(records: Sequence[Record]) -> str:
    last = records[-1]
    rates = [one["ceiling_gb_per_s"] for one in records if one["ceiling_gb_per_s"] is not None]
    ceiling = f"ceiling {min(rates):.0f} to {max(rates):.0f} GB/s in the same run" if rates else last.get("note", "")
    clocks = ", ".join(f"{name} {value:g}" for name, value in last["clocks"].items())
    parts = [last["gpu"], last["driver"], f"commit {last['commit']}", clocks, ceiling]
    samples = f"medians of {min(one['repetitions'] for one in records)} samples, variants by turns"
    return "; ".join([*(part for part in parts if part), samples]) + "."


def _variants_table(records: Sequence[Record]) -> str:
    """A row a case, a column a variant: microseconds and share of the ceiling; then the paper's."""
    return _pivot(records, lambda one: _cell(f"{1e3 * one['ms']:.1f} us", one), {paper.MACHINE: _paper_times})


def _model_table(records: Sequence[Record]) -> str:
    """The same in tokens/s, with the paper's."""
    return _pivot(records, lambda one: _cell(f"{1e3 / one['ms']:.0f}", one), {paper.MACHINE: _paper_speeds})


def _pivot(
    records: Sequence[Record], cell: Callable[[Record], str], further: Mapping[str, Callable[[Record], str]]
) -> str:
    systems = list(dict.fromkeys(one["system"] for one in records))
    rows: dict[tuple[Any, ...], dict[str, Record]] = {}
    for one in records:
        rows.setdefault(tuple(one["case"].values()), {})[one["system"]] = one
    lines = []
    for case, found in rows.items():
        cells = [cell(found[system]) if system in found else "" for system in systems]
        any_record = next(iter(found.values()))
        lines.append([*map(str, case), *cells, _gain(found), *(make(any_record) for make in further.values())])
    return _table([*records[0]["case"], *systems, "overlap / unfused", *further], lines)


def _ring_table(records: Sequence[Record]) -> str:
    """A row a ring."""
    rings = {one["system"]: one for one in records}
    lines = []
    for one in rings.values():
        plan = one["plan"]
        ring = [plan["stage_bytes"] // 1024, plan["stages"], plan["in_flight"]]
        theirs = paper.RING_TOKENS_PER_S.get((ring[0], ring[1]))
        cells = [f"{one['ms']:.3f}", f"{one['gb_per_s']:.0f}", _share(one), f"{theirs} tokens/s" if theirs else ""]
        lines.append([*map(str, ring), *cells])
    return _table(["stage KB", "stages", "in flight", "ms a step", "GB/s", "share", paper.MACHINE], lines)


def _gain(found: Mapping[str, Record]) -> str:
    """How much faster fused with overlap is than unfused."""
    if "unfused" not in found or "fused, overlap" not in found:
        return ""
    return f"{found['unfused']['ms'] / found['fused, overlap']['ms']:.2f}"


def _cell(text: str, record: Record) -> str:
    return f"{text} ({_share(record)})"


def _share(record: Record) -> str:
    return "-" if record["share"] is None else f"{record['share']:.1%}"


def _paper_times(record: Record) -> str:
    if record["ceiling_gb_per_s"] is None:
        return ""
    first, layers, *_ = record["case"].values()
    times: dict[tuple[Any, Any], tuple[float, float, float]] = {**paper.LINEAR_MS, **paper.STACKS_MS}
    return paper.milliseconds(times.get((first, layers)))


def _paper_speeds(record: Record) -> str:
    return paper.speeds(paper.STEP_TOKENS_PER_S.get(tuple(record["case"].values())), record["bytes"])


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
