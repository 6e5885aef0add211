"""The rows of the README's table of speeds, from records: python benchmarks/table.py benchmarks/results/*.jsonl

Of several records of one model and context, the last one counts. GB = 1e9 bytes.
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
    return "| " + " | ".join((record["model"], str(record["context"]), *figures)) + " |"


def read_records(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Every record of these files that tells a speed: not those of the emulator, nor of other systems."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    records = [json.loads(line) for line in lines]
    return [record for record in records if record.get("system") == "cheetah" and record.get("share") is not None]


def speed_rows(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A row for each model and context, in the order in which they were first measured."""
    last = {(record["model"], record["context"]): record for record in records}
    return [speed_row(record) for record in last.values()]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} RESULTS.jsonl ...")
    print("\n".join(speed_rows(read_records(Path(name) for name in sys.argv[1:]))))
