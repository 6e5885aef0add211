"""What the emulator says of a kernel's text, brought to the place: the text is kept where it can be read, each line has
its function beside it, each thread its role, and each block the phase that it had reached.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from cheetah.emulator.build import cache_folder
from cheetah.manifest import Manifest, write_atomically
from cheetah.package import Generated
from cheetah.runtime.device.progress import describe_progress

FUNCTION = re.compile(r"^ *(?:__device__|__global__|extern).*?\b(\w+)\(", re.MULTILINE)
PLACE = re.compile(r"\b(\w+)\.cu:(\d+)(?! \()")
THREAD = re.compile(r"\bblock (\d+), thread (\d+)(?! \()")


@lru_cache(maxsize=8)
def _functions(text: str) -> tuple[list[int], list[str]]:
    """The lines on which functions begin, and their names."""
    found = [(text.count("\n", 0, match.start()) + 1, match[1]) for match in FUNCTION.finditer(text)]
    return [line for line, _ in found], [name for _, name in found]


def function_of(text: str, line: int) -> str:
    """The function of a kernel's text that a line (from 1) stands in."""
    lines, names = _functions(text)
    place = bisect_right(lines, line)
    return names[place - 1] if place else "no function"


def role_of(manifest: Manifest, thread: int) -> str:
    """What a thread of a block does in a kernel of decode steps; "" in others."""
    warps = manifest.plan.get("consumer_warps")
    if warps is None:
        return ""
    warp = thread // 32 - int(warps)
    return "consumer" if warp < 0 else "producer" if warp == 0 else "adding warp"


def explained(report: str, made: Generated, progress: Sequence[int] | None = None) -> str:
    """The emulator's report with functions and roles. progress: a word a block, as the manifest's phases count."""

    def with_function(match: re.Match[str]) -> str:
        same = match[1] == made.manifest.kernel
        return f"{match[0]} ({function_of(made.text, int(match[2]))})" if same else match[0]

    def with_role(match: re.Match[str]) -> str:
        role = role_of(made.manifest, int(match[2]))
        return f"{match[0]} ({role})" if role else match[0]

    lines = [THREAD.sub(with_role, PLACE.sub(with_function, report.rstrip()))]
    if progress is not None:
        lines.append(f"reached: {describe_progress(progress, made.manifest.phases)}")
    return "\n".join(lines)


def kept_text(made: Generated) -> Path:
    """Where the kernel's text lies from now on, for the reader of a report."""
    folder: Any = cache_folder(None).parent / "checked"
    folder.mkdir(parents=True, exist_ok=True)
    path: Path = folder / f"{made.manifest.kernel}-{made.manifest.text_sha256[:12]}.cu"
    write_atomically(path, made.text.encode())
    return path
