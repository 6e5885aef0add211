"""The rows of the README's table of speeds, from records: python benchmarks/table.py benchmarks/results/*.jsonl

Of several records of one model and one work (contexts, shared tokens, tokens a step), the last one counts; those of
launches after rests, or of a work that was held for seconds, are other measurements. tokens/s are of all sequences
together. GB = 1e9 bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def speed_row(record: Mapping[str, Any]) -> str:
    """One record as a row of the table."""
    figures = (
        f"{record['tokens_per_s']:.0f}",
        f"{record['ms_per_step']:.3f}",
        f"{record['gb_per_s']:.0f}",
        f"{record['ceiling_gb_per_s']:.0f}",
        f"{100 * record['share']:.1f} %",
    )
    return "| " + " | ".join((record["model"], work_of(record), *figures)) + " |"


def work_of(record: Mapping[str, Any]) -> str:
    """What was in the cache: "128" of one sequence, "8 x 128, 64 shared" of eight, "128+500"; also of old records."""
    contexts = record.get("contexts") or [record["context"]] * record.get("batch", 1)
    text = "+".join(map(str, contexts))
    if len(contexts) > 1 and len(set(contexts)) == 1:
        text = f"{len(contexts)} x {contexts[0]}"
    text += f", {record['shared']} shared" if record.get("shared") else ""
    text += f", {record['per_step']} a step" if record.get("per_step", 1) > 1 else ""
    kv_dtype = (record.get("plan") or {}).get("kv_dtype", "bf16")
    return text if kv_dtype == "bf16" else f"{text}, {kv_dtype}"


def read_records(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Every record of these files that tells a speed, by the time: not those of the emulator, nor of other systems, nor
    after rests, nor of what was held."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    records = [json.loads(line) for line in lines]
    ours = (record for record in records if record.get("system") == "cheetah" and record.get("share") is not None)
    speeds = [record for record in ours if not record.get("rest_s") and not record.get("held_s")]
    return sorted(speeds, key=lambda record: str(record.get("measured", "")))  # older ones do not say it


def speed_rows(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A row for each model and work, in the order in which they were first measured."""
    last = {(record["model"], work_of(record)): record for record in records}
    return [speed_row(record) for record in last.values()]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} RESULTS.jsonl ...")
    print("\n".join(speed_rows(read_records(Path(name) for name in sys.argv[1:]))))
