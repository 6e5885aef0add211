"""How far each block of a launch is, in words: for the report of a launch that hangs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOT_STARTED = 0xFFFFFFFF
"""What a poisoned progress word holds until its block writes it."""

MOST_GROUPS = 12


def describe_progress(progress: Sequence[int], phases: Sequence[str]) -> str:
    """Which blocks have reached which step and phase, the furthest first.

    progress[block] = step * len(phases) + phase, or NOT_STARTED. For example
    "blocks 0-130: step 3, phase attention; block 131: step 3, phase qkv".
    """
    groups = _blocks_by_value(progress)
    lines = [f"{_block_list(blocks)}: {_position(value, phases)}" for value, blocks in groups]
    if len(lines) > MOST_GROUPS:
        # The ends say most: which blocks are ahead, and above all which are behind.
        half = MOST_GROUPS // 2
        lines[half:-half] = [f"({len(lines) - 2 * half} positions between)"]
    return "; ".join(lines) or "no block has reported"


def _blocks_by_value(progress: Sequence[int]) -> list[tuple[int, list[int]]]:
    groups: dict[int, list[int]] = {}
    for block, value in enumerate(progress):
        groups.setdefault(int(value), []).append(block)
    return sorted(groups.items(), key=lambda group: -1 if group[0] == NOT_STARTED else group[0], reverse=True)


def _position(value: int, phases: Sequence[str]) -> str:
    if value == NOT_STARTED:
        return "not started"
    if not phases:
        return f"position {value}"
    step, phase = divmod(value, len(phases))
    return f"step {step}, phase {phases[phase]}"


def _block_list(blocks: list[int]) -> str:
    ranges = list(_ranges(blocks))
    word = "block" if len(blocks) == 1 else "blocks"
    return f"{word} " + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _ranges(numbers: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Ascending numbers as (first, last) of each unbroken run."""
    first = last = None
    for number in numbers:
        if first is None or last is None:
            first = last = number
        elif number == last + 1:
            last = number
        else:
            yield first, last
            first = last = number
    if first is not None and last is not None:
        yield first, last
