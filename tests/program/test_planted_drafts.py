"""What `cheetah check` does with a kernel that verifies drafts finds every bug that is planted in how they are found,
verified and counted, and nothing without."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from cheetah.errors import CheetahError
from cheetah.generate import generate_kernel
from cheetah.models.registry import preset
from cheetah.package import Generated
from cheetah.tools.check import _step_makers
from cheetah.tools.judged_drafts import JudgedDrafts
from cheetah.tools.subjects import Subject
from tests.program import test_verified as verified
from tests.program.joined import SELECTOR, chosen
from tests.program.planted_sampling import SamplingBug
from tests.program.rig import Rig, model, random_weights
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

BUGS = (
    # -- judging
    SamplingBug("a draft is accepted that differs", r"next_input == sampled", "true"),
    SamplingBug("no draft is accepted", r"next_input == sampled", "false"),
    SamplingBug("right behind a wrong one", r"\(leading & before\) == before", "true"),
    SamplingBug("one token too many behind a stop", r"ends == 0(?= && \()", "true"),
    SamplingBug("more tokens than are wanted", r"following < total(?=;)", "true"),
    SamplingBug("goes on from its own input", r"(?<=next_token\[first\] = )min\(sampled, VOCAB - 1\)",
                "next_token[first]"),
    # -- how far a sequence is
    SamplingBug("a rejected key is read", r"(?<=\n      uint32_t end = min\(record->item\.end, )[^;]*(?=\);)",
                r"\g<0> + 1"),
    SamplingBug("read before it is written", r"(?<=arena \+ DONE\) \+ )step % 2(?= \* 3\)\[sequence\] \+)",
                "(step + 1) % 2"),
    SamplingBug("the first plan for ever", r"\(done \+ per_step - 1\) / per_step", "0u"),
    # -- what sequences ask for
    SamplingBug("penalties miss a draft", r"is_draft && next_token\[other\] == token", "false"),
    SamplingBug("penalties count what was rejected", r"\(\(right >> column\) & 1\) != 0", "true"),
    SamplingBug("a column's filter reads the first one's row", r"(?<=\(weighed\) \+ )column(?= \* \w+;)", "0u"),
    SamplingBug("logits of the first column", r"(?<=judges\[place\] = )step \* 8 \+ column", "step * 8"),
    SamplingBug("the mask of the first column for all",
                r"(?<=\? )2 \+ column(?= : value)", "2u"),
    # -- looking up
    SamplingBug("the text ahead comes last", r"position < ahead \? 8388608u : 0u", "0u"),
    SamplingBug("what was made is appended at its position", r"\(value >> 8\)(?= \+ load_)", "0u"),
    SamplingBug("history one token late", r"(?<=row\[)place_2(?=\] = sampled)", "place_2 + 1"),
    SamplingBug("the end finds itself", r"position < end(?= &&)", "position <= end"),
    SamplingBug("no match ever", r"best = max\(best, \(length << 24\) \| \w+\);"),
    SamplingBug("the earliest match", r"\(length << 24\) \| \w+|\bbest\w* & 8388607", r"(\g<0>) ^ 8388607"),
    SamplingBug("a shorter match than wanted", r"length >= shortest", "true"),
    SamplingBug("the same draft in all columns", r"\(number - known\) % period", "0u"),
    # -- numbers
    SamplingBug("rotated the other way", r"is_second \? partner : -partner", "is_second ? -partner : partner"),
    # -- counting
    SamplingBug("drafts are counted where there are none", r"(?<=if \()drafted != 0", "true"),
)  # fmt: skip


ALWAYS = (
    *("a draft is accepted that differs", "one token too many behind a stop", "a rejected key is read"),
    *("the first plan for ever", "penalties miss a draft", "a column's filter reads the first one's row"),
    *("what was made is appended at its position", "the earliest match"),
    "drafts are counted where there are none",
)
"""Of each kind one or two that `make test` looks for."""


@cache
def planted_rig(is_watched: bool = False) -> Rig:
    """A kernel with all bugs in it, none of them on."""

    def generate(*arguments: Any, **named: Any) -> Generated:
        generated = generate_kernel(*arguments, **named)
        head, end, body = generated.text.partition("#endif\n")
        for number, bug in enumerate(BUGS, 1):
            body = bug.planted(body, number)
        return generated.with_text(head + end + SELECTOR + body)

    plan = {"batch": 2, "tokens": 8, "kv_chunk": 32, "drafts": 7, "stages": 5}
    return Rig(
        random_weights(model(heads=4, kv_heads=2)),
        blocks=3,
        kv_chunk_min=16,
        generate=generate,
        **plan,
        watched=is_watched,
    )


@cache
def judged() -> JudgedDrafts:
    """As `cheetah check --drafts 7` judges a kernel; what is made without drafts is known."""
    return JudgedDrafts(planted_rig(), JudgedDrafts(verified.rig()).without_drafts())


def finding() -> str | None:
    try:
        judged().run("random", 1)
    except (CheetahError, AssertionError) as error:  # a launch that the host cannot go on from
        return repr(error)
    return None


@pytest.mark.parametrize("drafts", [0, 7])
def test_the_check_has_such_a_model_where_the_options_name_drafts(drafts: int) -> None:
    plan = {"max_context": 128, **({"drafts": drafts} if drafts else {})}
    makers = _step_makers(Subject("it", preset("demo"), dict[str, Any]().__getitem__, plan), "emulator")
    kinds = [(maker.args[0].kind, maker.args[0].plan.get("drafts", 0)) for maker in makers]
    assert [kind.partition(" of its")[0] for kind, has in kinds if has] == ["one that verifies drafts"][: drafts // 7]
    assert len(kinds) == 4 + drafts // 7


def test_nothing_is_found_in_the_kernel_as_it_is() -> None:
    assert finding() is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("bug", ["", "rotated the other way"])
def test_of_wrong_numbers_without_drafts_the_first_is_named(bug: str) -> None:
    """In what the kernel makes without drafts, which float32 judges."""
    watched = JudgedDrafts(planted_rig(is_watched=True))
    with chosen(watched.rig, [one.name for one in BUGS].index(bug) + 1 if bug else 0):
        off = watched.first_off(("random", 1, False), 0.05)
    assert off.startswith("first off: layer 0, phase qkv: ") if bug else not off, off


@pytest.mark.parametrize(
    "bug", tiered(BUGS, [bug for bug in BUGS if bug.name not in ALWAYS]), ids=lambda bug: bug.name.replace(" ", "-")
)
def test_a_bug_is_found(bug: SamplingBug) -> None:
    with chosen(planted_rig(), BUGS.index(bug) + 1):
        assert finding() is not None
