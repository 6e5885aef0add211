"""Mistakes of the kind that a maintainer makes, planted in the kernels that `cheetah check` generates, or beside them.

An edit is (pattern, replacement) of every place of the kernel's body that matches; each bug must change one kernel of
those that are checked at least. `words`: what the check says of it, in its report or as a problem.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cheetah.generate import Generated
from cheetah.runtime.engine.launcher import Epochs
from cheetah.runtime.engine.step_launches import StepLaunches

Patch = pytest.MonkeyPatch
Edit = tuple[str, str]


@dataclass(frozen=True)
class MaintainersBug:
    """edits: of the text. change: beside it."""

    name: str
    words: str
    edits: tuple[Edit, ...] = ()
    change: Callable[[Patch], None] | None = None

    def planted(self, made: Generated) -> Generated:
        head, start, body = made.text.partition("#endif\n")
        for pattern, replacement in self.edits:
            body = re.sub(pattern, replacement, body)
        text = head + start + body
        return made.with_text(text)


def without(pattern: str, before: str = "", after: str = "") -> Edit:
    """The edit that takes away what matches `pattern` between `before` and `after`."""
    return (f"({before}){pattern}({after})", r"\1;\2")


def leave_words(patch: Patch) -> None:
    """Those of the launch before stay in the exchange, also where words say themselves that they are there."""
    prepare = StepLaunches._prepare

    def as_with_the_barrier(self: StepLaunches, *arguments: Any) -> Any:
        plan = self._plan
        self._plan = replace(plan, sync="barrier")
        try:
            return prepare(self, *arguments)
        finally:
            self._plan = plan

    patch.setattr(StepLaunches, "_prepare", as_with_the_barrier)


def hand_out_epochs_twice(patch: Patch) -> None:
    leave_words(patch)

    def take(self: Epochs, steps: int) -> tuple[int, bool]:
        first, self._next = self._next, self._next + steps
        return first, False

    patch.setattr(Epochs, "take", take)


def begin_epochs_again(patch: Patch) -> None:
    leave_words(patch)
    patch.setattr(Epochs, "take", lambda self, steps: (1, False))


FENCE = r"fence_proxy_async\(\);"
LANDED = r"mbarrier_wait\(full \+ landed_stage, landed_parity\);"
COLUMN = r"column_states\[column\]\."
STORE_KEY = r"\(\(uint32_t\*\)\(place\w* \+ dim\)\)\[0\] = pair;"
UNREAD, UNFENCED = "has loaded without waiting", "that thread has made no fence_proxy_async"
SAMPLED, FLOAT32, CHUNKS = "was sampled at position", "from float32", "chunks of this block are under way"
OF_QKV = "first off: layer 0, phase qkv"
"""Where columns that change their order change what is drawn, which is told before logits are compared."""


def bug(name: str, words: str, *edits: Edit) -> MaintainersBug:
    return MaintainersBug(name, words, edits)


TRIED = (
    bug("the wrong parity of a stage ahead", "", (r"\(use_parity \+ (place\w*) / ", r"(use_parity + 1 + \1 / ")),
    bug(
        "no warp barrier before attention gives a stage back",
        "",
        without(r"warp_barrier\(\);", after=r"\s*if \([^{;]*lane == 0[^{;]*mbarrier_arrive_many"),
    ),
    bug("mbarriers that nobody initialised", "used before init", without(r"mbarrier_init\(empty[^;]*;")),
    bug("the newest key's page at the end of a page", "", (rf"(\(table \+) ({COLUMN}position) / ", r"\1 (\2 + 1) / ")),
    MaintainersBug("epochs handed out twice, over words that were left", "", change=hand_out_epochs_twice),
    MaintainersBug("epochs that begin again, over words that were left", "", change=begin_epochs_again),
    bug("newest keys put a row too far behind the cached ones", "", (r"(join_newest\(row \+ cached % 16)", r"\1 + 1")),
    bug("newest keys never put behind the cached ones", "", without(r"join_newest\(row[^;]*;")),
    bug("the parity of the step's end", "", (r"(mbarrier_wait\(step_done,) \(step \+ 1\) % 2", r"\1 step % 2")),
    bug("draws keyed by the position before", SAMPLED, (r"(uint32_t c1 = \w+);", r"\1 - 1;")),
    bug("no bound on the chunks in flight", CHUNKS, without(LANDED)),
    bug(
        "the page of the end looked up, not of the last key",
        "of buffer page_table holds nothing",
        (r"min\(([^;]*), end - 1\)", r"min(\1, end)"),
    ),
    bug(
        "no warp barrier where one lane waits for all",
        "alone has waited for words before",
        without(r"warp_barrier\(\);", before=r"[{);]\s*wait_tagged4\([^;]*;\s*\}\s*"),
    ),
    bug(
        "no warp barrier before the step's end is told",
        "before the lanes last met",
        without(r"warp_barrier\(\);", after=r"\s*if \(thread == 0\) \{\s*if \(block == 0\) \{?\s*status"),
    ),
    bug("products that do not wait for their loads", UNREAD, without(r"wait_for_u32\((?:first|read)[^;]*;")),
    bug("attention that does not wait for its loads", UNREAD, without(r"wait_for_u32\(float_bits[^;]*;")),
    bug("no fence after a key is cached", UNFENCED, without(FENCE, before=r"= pair;\s*")),
    bug(
        "no fence in the producer lane",
        "the thread that issues this copy has made no fence_proxy_async",
        without(FENCE, before=r"mbarrier_wait\(step_done, [^;]*;\s*"),
    ),
    bug("the norm's epsilon left out", FLOAT32, (r", 1e-05f\);", ", 0.0f);")),
    bug("the highest id on ties", SAMPLED, (r"&& other_token < ", "&& other_token > ")),
    bug("the upper half of the seed ignored", SAMPLED, (r"(uint32_t k1) = [^;]*;", r"\1 = 0;")),
    bug("a chunk more requested than has landed", CHUNKS, (r"(i = most; i < under_way) \+ 1;", r"\1;")),
    bug("the mean of squares over the padded size", FLOAT32, (r"0\.013888889f", "0.010416667f")),
)
"""What was tried on the kernels of an earlier commit: 21 bugs, of which the check of that time found 8."""

MORE = (
    bug("a chunk counted that nobody requested", "never had more than", (r"(under_way) = 0;", r"\1 = 1;")),
    bug("a block that waits for ever", "never had more than", (r"store_shared_u32\(block_waits, 0\);", ";")),
    bug("the fence before the store", UNFENCED, (rf"({STORE_KEY})\s*({FENCE})", r"\2 \1")),
    bug("one lane waits for the loads of all", UNREAD, (r"(wait_for_u32\((?:first|read)\b)", r"if (lane == 0) \1")),
    bug("a whole stage announced for the last keys", "Deadlock", (r"(expect_tx\(barrier), count \* ", r"\1, 16 * ")),
    bug("values cached over their keys", "", (r"\? key : key \+ TO_VALUES;", "? key : key;")),
    bug("keys cached in the first sequence's pages", "", (rf"(uint32_t table) = {COLUMN}sequence[^;]*;", r"\1 = 0;")),
    bug("the first column's angles for all", OF_QKV, (r"(\+ ROPE\)) \+ column \* \d+;", r"\1;")),
    bug("the first column's norm for all", OF_QKV, (r"(places\w*\[\d\] =) column \*", r"\1 0 *")),
    bug("keys copied into the place of values", "", (r"(bulk_copy\(keys\w* \+ VALUES_AT, key) \+ TO_VALUES,", r"\1,")),
    bug("a query that sees a key too many", "", (r"(visible\w* = \w+ > [^?;]*\? \w+) - ", r"\1 + 1 - ")),
    bug("rows of padding among the candidates", "", (r"if \(\w+ < VOCAB && (candidate > best\))", r"if (\1")),
)
"""Ten more, and two."""
