"""A step that drafts blocks gives the logits that float32 has, under every schedule; and every bug that is planted in
what such a step does otherwise shows."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cheetah.generate import generate_kernel
from cheetah.models.rounding import as_bf16, round_to_bf16
from cheetah.plan.known import KNOWN
from cheetah.runtime.checkpoint.drafters import open_drafter
from cheetah.runtime.checkpoint.loading import Checkpoint
from cheetah.runtime.engine.block_launches import BlockLauncher
from cheetah.runtime.engine.launcher import Launcher, Part
from cheetah.tools.rig import Rig
from tests.models.goldens.block_drafter import DSPARK, left_of, weights_of
from tests.models.meaning_of_blocks import BlockReference
from tests.models.test_block_drafter import target, written
from tests.program.joined import SELECTOR, chosen
from tests.program.planted_sampling import SamplingBug

BUGS = (
    SamplingBug("known columns are added to", r"(?<=value = )is_fixed(?= \? residual)", "false"),
    SamplingBug("known columns through the layer's norm", r"(?<=weight = )is_fixed(?= \?)", "false"),
    SamplingBug("the first token for a mask", r"(?<=uint32_t token = )52(?=;)", "0"),
    SamplingBug("what is known of the next slot", r"next_token\[column\] - 1073741824", r"\g<0> + 1"),
    SamplingBug("a block without its last key", r"record->tile\.newest(?=\);\s+return packed)", r"\g<0> - 1"),
)
PLAN = {"batch": 2, "tokens": 16, "max_context": 128, "max_steps": 8, "page_size": 5, "stages": 5}
ROUNDS = (((5, 1), (11, 9)), ((2, 3), (7, 7)))
"""Of each round the tokens of both sequences that become known, and their anchors."""
COLUMNS, NEAR = 4, 0.03
"""Of a block; and of the highest logit, what bf16 makes of it."""


@contextmanager
def drafter() -> Iterator[Checkpoint]:
    folder = Path(tempfile.mkdtemp())
    try:
        yield open_drafter(written(folder, DSPARK, weights_of(DSPARK)), target())
    finally:
        shutil.rmtree(folder)


@cache
def rig() -> tuple[Rig, tuple[tuple[Any, ...], ...]]:
    """A kernel with all bugs in it, none of them on; and what float32 says of each round and sequence: rows of what
    becomes known, and logits."""
    with drafter() as opened:
        made = generate_kernel(opened.config, "emulator-2", **PLAN)
        head, end, body = made.text.partition("#endif\n")
        for number, bug in enumerate(BUGS, 1):
            body = bug.planted(body, number)
        found = Rig(opened, made.with_text(head + end + SELECTOR + body), watched=True)
        left, references = (
            left_of(DSPARK)[0],
            [BlockReference(opened.config, opened.tensor, round_to_bf16) for _ in "ab"],
        )
        wanted = []
        for counts, anchors in ROUNDS:
            for one, count, anchor in zip(references, counts, anchors, strict=True):
                known = left[one.length :][:count]
                rows = [round_to_bf16(np.asarray(one.fc @ row.reshape(-1))) for row in known]
                one.read(known)
                wanted.append((np.stack(rows), anchor, one.logits(anchor)))
    return found, tuple(wanted)


def worst(scheduler: str = "random", seed: int = 1) -> float:
    """How far off a logit is at most, in units of the highest one."""
    of_kernel, wanted = rig()
    session = of_kernel.session(scheduler, seed)
    launcher = BlockLauncher(session._loaded(of_kernel.kernels["decode_step"], session.buffers), session.sequence())
    sequences, size = [session.sequence() for _ in "ab"], PLAN["page_size"]
    found, width = 0.0, of_kernel.config.padded_hidden
    for number in range(len(ROUNDS)):
        parts, of_round = [], wanted[2 * number : 2 * number + 2]
        for one, (rows, anchor, _) in zip(sequences, of_round, strict=True):
            one.reserve(one.length + len(rows) + COLUMNS)
            places = range(one.length, one.length + len(rows))
            slots = [one.pages[place // size] * size + place % size for place in places]
            for slot, row in zip(slots, rows, strict=True):
                bits = np.zeros(width, np.uint16)
                bits[: len(row)] = as_bf16(row)
                session.buffers["known_rows"].upload(bits, slot * width * 2)
            total = len(rows) + COLUMNS
            parts.append(Part(one, [*(KNOWN + slot for slot in slots), anchor], total, per_step=total))
        launch = Launcher.prepare(launcher, parts, session.logits)
        launcher.start(launch)
        launcher.finish(launch)
        logits = session.logits.download(np.float32, (PLAN["tokens"], of_kernel.config.vocab_size))
        first = 0
        for part, (rows, _, right) in zip(parts, of_round, strict=True):
            block = logits[first + len(rows) : first + part.total]
            found = max(found, float(np.nan_to_num(np.abs(block - right), nan=1e9).max() / np.abs(right).max()))
            first += part.total
    return found


@pytest.mark.slow
@pytest.mark.compiler
def test_logits_are_float32s_under_every_schedule_and_bugs_show() -> None:
    schedules = [("round_robin", 0), ("random", 0), ("random", 1), ("priority", 0)]
    assert max(worst(*schedule) for schedule in schedules) < NEAR
    for number, bug in enumerate(BUGS, 1):
        with chosen(rig()[0], number):
            assert not worst() < NEAR, bug.name
