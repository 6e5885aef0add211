"""python -m benchmarks.studies linear|stacks|model|ring|all [--device cuda] [--json FILE], or: report FILE ...

`all` runs each study in a process of its own with a time limit, so that one that fails or hangs stops no other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies import linear, model, ring, stacks
from benchmarks.studies.measuring import Study
from benchmarks.studies.report import report
from cheetah.errors import CheetahError
from cheetah.runtime.device import open_device

STUDIES: dict[str, Callable[[Study], None]] = {
    "linear": linear.run,
    "stacks": stacks.run,
    "model": model.run,
    "ring": ring.run,
}
LIMIT_S = 100
"""Of a study in a process of its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 if a study failed."""
    options = _parser().parse_args(arguments)
    if options.study == "report":
        print(report(read_records(options.files)))
        return 0
    if options.study == "all":
        return run_all(options)
    try:
        records = run_one(options)
    except CheetahError as error:
        print(f"study {options.study}: {error}", file=sys.stderr)
        return 1
    print(report(records))
    return 0


def run_one(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One study in this process; its records, which are in the file by then too."""
    records: list[dict[str, Any]] = []

    def write(record: dict[str, Any]) -> None:
        records.append(record)
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    ordinal = int(options.device.partition(":")[2] or 0)
    with open_device(options.device, say=lambda line: None) as device:
        tiny = options.tiny or device.name == "emulator"
        STUDIES[options.study](Study(options.study, device, write, options.repetitions, tiny, ordinal))
    return records


def run_all(options: argparse.Namespace) -> int:
    """Every study; then the table of all that was measured. Records are in the file as soon as they are made."""
    with tempfile.TemporaryDirectory() as folder:
        results = options.json or Path(folder) / "studies.jsonl"
        results.touch()
        earlier = len(results.read_text(encoding="utf-8").splitlines())
        failed = [study for study in STUDIES if not _succeeds(study, options, results)]
        lines = results.read_text(encoding="utf-8").splitlines()[earlier:]
    print(report(json.loads(line) for line in lines))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _succeeds(study: str, options: argparse.Namespace, results: Path) -> bool:
    command = [sys.executable, "-m", "benchmarks.studies", study, "--device", options.device]
    command += ["--json", str(results), "--repetitions", str(options.repetitions), *(["--tiny"] * options.tiny)]
    started = time.monotonic()
    try:
        status = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=LIMIT_S).returncode
        outcome = "done" if status == 0 else "failed"
    except subprocess.TimeoutExpired:
        outcome = "stopped"
    print(f"study {study}: {outcome} after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return outcome == "done"


def read_records(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The records of these files that are a study's."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [record for record in map(json.loads, lines) if record.get("study") in STUDIES]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies", description=__doc__)
    commands = parser.add_subparsers(dest="study", required=True)
    for name in (*STUDIES, "all"):
        command = commands.add_parser(name)
        command.add_argument("--device", default="cuda", help="cuda, cuda:1 or emulator")
        command.add_argument("--json", type=Path, metavar="FILE", help="append a JSON line a measurement")
        command.add_argument("--repetitions", type=int, default=20, help="samples of each variant")
        command.add_argument("--tiny", action="store_true", help="small sizes; always so in the emulator")
    command = commands.add_parser("report", help="the tables of records, in Markdown")
    command.add_argument("files", type=Path, nargs="+", metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
