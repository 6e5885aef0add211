"""Rows of tables of speeds, from records: python benchmarks/table.py [--readme | --write] benchmarks/results/*.jsonl

Those of RESULTS.md: of several records of one model and one work (contexts, shared tokens, tokens a step), the last one
counts; those of launches after rests, or of a work that was held for seconds, are other measurements. With --readme
those of the README: ten works, all of the last run that has them, beside what other systems made of the same. --write
puts both into their pages, with the commit of the README's run. tokens/s are of all sequences together. GB = 1e9 bytes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

README_WORKS = (
    ("qwen3-0.6b", "128"),
    ("llama-3.2-1b", "128"),
    ("llama-3.2-3b", "128"),
    ("llama-3.1-8b", "128"),
    ("llama-3.1-8b", "6144"),
    ("llama-3.1-8b", "8 x 128"),
    ("llama-3.1-8b@fp8", "128"),
    ("llama-3.1-8b@int4-g128", "128"),
    ("llama-3.1-8b@int4-g128", "8 x 128"),
    ("llama-3.1-70b@int4-g128", "128"),
)
"""The works of the README's table: a model and what was in the cache."""
OTHERS = ("transformers", "gpt-fast")
"""The systems beside ours in that table, by the first word of a record's `system`."""
Record = Mapping[str, Any]
Records = Iterable[Record]


def speed_row(record: Record) -> str:
    """One record as a row of the table of RESULTS.md."""
    figures = (
        f"{record['tokens_per_s']:.0f}",
        f"{record['ms_per_step']:.3f}",
        f"{record['gb_per_s']:.0f}",
        f"{record['ceiling_gb_per_s']:.0f}",
        f"{100 * record['share']:.1f} %",
    )
    return "| " + " | ".join((record["model"], work_of(record), *figures)) + " |"


def work_of(record: Record) -> str:
    """What was in the cache: "128" of one sequence, "8 x 128, 64 shared" of eight, "128+500"; also of old records."""
    contexts = record.get("contexts") or [record["context"]] * record.get("batch", 1)
    text = "+".join(map(str, contexts))
    if len(contexts) > 1 and len(set(contexts)) == 1:
        text = f"{len(contexts)} x {contexts[0]}"
    text += f", {record['shared']} shared" if record.get("shared") else ""
    text += f", {record['per_step']} a step" if record.get("per_step", 1) > 1 else ""
    kv_dtype = (record.get("plan") or {}).get("kv_dtype", "bf16")
    return text if kv_dtype == "bf16" else f"{text}, {kv_dtype}"


def read_all(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Every record of these files, by the time."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    records = [json.loads(line) for line in lines]
    return sorted(records, key=lambda record: str(record.get("measured", "")))  # older ones do not say it


def read_records(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Every record of these files that tells a speed, by the time: not those of the emulator, nor of other systems, nor
    after rests, nor of what was held."""
    ours = (one for one in read_all(paths) if one.get("system") == "cheetah" and one.get("share") is not None)
    return [record for record in ours if not record.get("rest_s") and not record.get("held_s")]


def speed_rows(records: Records) -> list[str]:
    """A row for each model and work, in the order in which they were first measured."""
    return [speed_row(record) for record in last_of_works(records).values()]


def last_of_works(records: Records) -> dict[tuple[str, str], Record]:
    """The last record of each model and work."""
    return {(record["model"], work_of(record)): record for record in records}


def readme_rows(ours: Records, others: Records) -> list[str]:
    """A row for each of README_WORKS: ours of the last run that has them all, and the last one of each of OTHERS."""
    of_run = last_full_run(ours)
    steps = [one for one in others if "tokens_per_s" in one and "system" in one]
    beside = [last_of_works(one for one in steps if one["system"].split(" ")[0] == name) for name in OTHERS]
    return [readme_row(of_run[work], [speeds.get(work) for speeds in beside]) for work in README_WORKS]


def last_full_run(records: Records) -> Mapping[tuple[str, str], Record]:
    """Of the runs, each of one commit, that have all of README_WORKS, the one that was measured last: its works."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record["commit"], []).append(record)
    works = [last_of_works(run) for run in runs.values()]
    full = [found for found in works if found.keys() >= set(README_WORKS)]
    return max(full, key=lambda found: max(found[work].get("measured", "") for work in README_WORKS))


def readme_row(record: Record, beside: Iterable[Record | None]) -> str:
    """One record as a row of the README's table."""
    figures = (f"{record['tokens_per_s']:.0f}", f"{record['ms_per_step']:.3f}", f"{100 * record['share']:.1f} %")
    others = (" |" if other is None else f" {other['tokens_per_s']:.0f} |" for other in beside)
    return "| " + " | ".join((record["model"], work_of(record), *figures)) + " |" + "".join(others)


def write_tables(root: Path, files: Iterable[Path]) -> None:
    """Put the newest figures into the rows of RESULTS.md, and the last full run and its commit into the README."""
    everything = read_all(files)
    ours = read_records(files)
    newest = {tuple(row.split("|")[1:3]): row for row in speed_rows(ours)}
    replace_rows(root / "benchmarks" / "RESULTS.md", lambda rows: [newest[tuple(row.split("|")[1:3])] for row in rows])
    replace_rows(root / "README.md", lambda rows: readme_rows(ours, everything))
    readme, run = root / "README.md", next(iter(last_full_run(ours).values()))
    text = re.sub(r"\bcommit [0-9a-f]{7}\b", f"commit {run['commit'][:7]}", readme.read_text(encoding="utf-8"))
    readme.write_text(text, encoding="utf-8")


def replace_rows(page: Path, change: Callable[[list[str]], list[str]]) -> None:
    """Change the rows between the marks of a page, below the two lines of the table's head."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition("<!-- speeds")
    table, end, after = rest.partition("<!-- end of speeds -->")
    mark, names, rule, *rows = table.splitlines()
    lines = "\n".join((mark, names, rule, *change(rows), ""))
    page.write_text(before + begin + lines + end + after, encoding="utf-8")


def main(arguments: list[str]) -> None:
    files = [Path(name) for name in arguments if not name.startswith("--")]
    if not files:
        sys.exit(f"usage: {sys.argv[0]} [--readme | --write] RESULTS.jsonl ...")
    if "--write" in arguments:
        write_tables(Path(__file__).parents[1], files)
    else:
        ours = read_records(files)
        print("\n".join(readme_rows(ours, read_all(files)) if "--readme" in arguments else speed_rows(ours)))


if __name__ == "__main__":
    main(sys.argv[1:])
