"""Bugs that stand together in the awkward model's kernel, of which a variable says which there is: the launches of
`cheetah check` find each under one schedule. So they cost one compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cheetah.emulator import EmulatorError
from cheetah.generate import generate_kernel
from cheetah.manifest import sha256_of_text
from cheetah.models.registry import DEMO
from cheetah.package import Generated
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.tools.judged_steps import JudgedSteps
from cheetah.tools.rig import Rig
from cheetah.tools.subjects import awkward_subject
from tests.program.joined import SELECTOR, chosen
from tests.program.planted_sampling import SamplingBug
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

COLUMN = r"column_states\[column\]\."
BUGS = (
    # -- keys that are brought
    SamplingBug("a run over a page's end", r"PAGE_SIZE - token % PAGE_SIZE(?=, count - done)", "PAGE_SIZE"),
    SamplingBug("the page of this run, not of the next", r"(?<=tile\.table \+ )following(?= / PAGE_SIZE)", "token"),
    SamplingBug(
        "cached keys of a step ahead",
        r"(?<=\n      uint32_t end = min\(record->item\.end, )[^;]*(?=\);)",
        r"record->tile.length + record->tile.stride * (step + 1)",
    ),
    SamplingBug("a plan that begins a step late", r"first_step <= step", "first_step < step"),
    # -- rows that are finished
    SamplingBug("rotated the other way", r"is_second \? partner : -partner", "is_second ? -partner : partner"),
    SamplingBug("values cached in the head of keys", r"\(head - 4\) % 2", "(head - 4) / 2"),
    SamplingBug("cached behind a sequence's last token", rf"{COLUMN}number < {COLUMN}total", "true"),
    SamplingBug("units behind the last of the squares", r"first < 2 \? of_unit : 0\.0f", "of_unit"),
    SamplingBug("too large negative numbers are not told", r"published > -8589934592\.0f", "true"),
    SamplingBug("the residual is not kept", r"residual\[place\] = value;"),
    SamplingBug("rows finished before they are summed", r"mbarrier_wait\(summed \+ adding, adding_parity\);"),
    SamplingBug("sums laid over those that nobody took", r"mbarrier_wait\(taken \+ turn, turn_parity \^ 1\);"),
    # -- attention
    SamplingBug("the last tile of keys is left out", r"(?<= tiles = )\(cached \+ 15\) / 16", "cached / 16"),
    SamplingBug("sums of weights do not shrink", r"(?<=fma_f32\(weight_sum\[column\], )shrink", "1.0f"),
    SamplingBug("a key's place in its tile", r"(?<=tile_key = )index \+ 8", "index + 7"),
    SamplingBug("a query row's column", r"(?<=first_column \+ )row / 2(?=\]\.position)", "row"),
    SamplingBug("an item twice round the ring", r"\(use_parity \+ place / 4\)", "(use_parity + (place >= 4))"),
    # -- tokens
    SamplingBug("the last stop id is ignored", r"stop < stop_count", "stop + 1 < stop_count"),
    SamplingBug("few columns say whether to go on", r"level < 5(?=; \+\+level\) going_on)", "level < 1"),
    SamplingBug("ties within a lane", r"(?<=token < VOCAB && )candidate > best", "candidate >= best"),
    SamplingBug("noise repeats", r"gumbel\(token, position, seed\)", "gumbel(token % 64, position, seed)"),
    SamplingBug("padding is NaN", r"make_u32x4\(0, 0, 0, 0\)", "make_u32x4(0x7fc07fc0, 0, 0, 0)"),
)


def with_all_bugs(made: Generated) -> Generated:
    """None of them on."""
    head, end, body = made.text.partition("#endif\n")
    for number, bug in enumerate(BUGS, 1):
        body = bug.planted(body, number)
    text = head + end + SELECTOR + body
    return replace(made, text=text, manifest=replace(made.manifest, text_sha256=sha256_of_text(text)))


def found(judged: JudgedSteps, expected: dict[str, bytes]) -> Iterator[str]:
    """What a run shows: an error, numbers that are none of float32's, or other bits than the right kernel's."""
    try:
        transcript = judged.run("random", 0)
    except EmulatorError as error:
        yield str(error)
        return
    yield from judged.agreement(transcript).problems
    outputs = judged.outputs(transcript)
    yield from (name for name, array in outputs.items() if expected and array.tobytes() != expected[name])


@cache
def judged_kernel() -> tuple[JudgedSteps, dict[str, bytes]]:
    """The kernel with none of the bugs on, which is right, and what a run of it gives."""
    subject = awkward_subject(open_checkpoint(DEMO).config, {"max_context": 128, "consumer_warps": 2})
    made = with_all_bugs(generate_kernel(subject.config, subject.machine("emulator-2"), **subject.plan))
    judged = JudgedSteps(Rig(subject.weights, made, watched=True))
    right = judged.run("random", 0)
    assert not judged.agreement(right).problems
    expected = {name: np.asarray(array).tobytes() for name, array in judged.outputs(right).items()}
    return judged, expected


OF_BOTH_TIERS = (
    *("the page of this run, not of the next", "cached behind a sequence's last token", "the last stop id is ignored"),
    *("too large negative numbers are not told", "an item twice round the ring"),
    "sums laid over those that nobody took",
)
BY_NAME = {bug.name: number for number, bug in enumerate(BUGS, 1)}


@pytest.mark.parametrize("name", tiered(BY_NAME, [name for name in BY_NAME if name not in OF_BOTH_TIERS]))
def test_a_run_finds(name: str) -> None:
    judged, expected = judged_kernel()
    with chosen(judged.rig, BY_NAME[name]):
        assert any(found(judged, expected))
