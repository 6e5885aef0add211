"""Every bug that is planted in how drafts are found, verified and counted is found, and nothing is found without."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from cheetah.errors import CheetahError
from cheetah.generate import generate_kernel
from cheetah.package import Generated
from cheetah.runtime.engine.drafting import Drafting
from cheetah.runtime.engine.launcher import Part
from tests.program import test_verified as verified
from tests.program.joined import SELECTOR, chosen
from tests.program.planted_sampling import SamplingBug
from tests.program.rig import Rig, Session, model, random_weights
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

BUGS = (
    # -- judging
    SamplingBug("a draft is accepted that differs", r"next_input == sampled", "true"),
    SamplingBug("no draft is accepted", r"next_input == sampled", "false"),
    SamplingBug("right behind a wrong one", r"\(leading & before\) == before", "true"),
    SamplingBug("one token too many behind a stop", r"ends == 0(?= && \()", "true"),
    SamplingBug("more tokens than are wanted", r"following < total(?=;)", "true"),
    SamplingBug("goes on from its own input", r"(?<=next_token\[first\] = )min\(sampled, 49u\)", "next_token[first]"),
    # -- how far a sequence is
    SamplingBug("a rejected key is read", r"(?<=keys\.x \+ )\(\(uint32_t\*\)\(arena \+ DONE\)[^;)]*\)\[keys\.y\]",
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
    SamplingBug("the end finds itself", r"position < end(?=\))", "position <= end"),
    SamplingBug("the earliest match", r"best = max\(best, \(length << 24\) \| \w+\);"),
    SamplingBug("a shorter match than wanted", r"length >= shortest", "true"),
    SamplingBug("the same draft in all columns", r"\(number - known\) % period", "0u"),
    # -- counting
    SamplingBug("drafts are counted where there are none", r"(?<=if \()drafted != 0", "true"),
)  # fmt: skip


@cache
def planted_rig() -> Rig:
    """A kernel with all bugs in it, none of them on."""

    def generate(*arguments: Any, **named: Any) -> Generated:
        generated = generate_kernel(*arguments, **named)
        head, end, body = generated.text.partition("#endif\n")
        for number, bug in enumerate(BUGS, 1):
            body = bug.planted(body, number)
        return generated.with_text(head + end + SELECTOR + body)

    plan = {"batch": 2, "tokens": 8, "kv_chunk": 32, "drafts": 7, "stages": 5}
    return Rig(random_weights(model(heads=4, kv_heads=2)), blocks=3, kv_chunk_min=16, generate=generate, **plan)


def found(session: Session) -> Iterator[str]:
    """What is not as without drafts, or comes by other steps."""
    for kind, (every, ngrams) in (
        ("few", (0, (2, 3))),
        ("seeded", (3, (0, 0))),
        ("penalised, seeded", (2, (1, 2))),
        ("filtered", (4, (0, 0))),
        ("penalised", (0, (1, 4))),
    ):
        sampling, wanted = verified.SAMPLINGS[kind], verified.plain(60, verified.SAMPLINGS[kind])[:40]
        drafts = verified.wrong(wanted, every)[:39] if every else []
        made, results = verified.made(session, 40, sampling, per_step=8, drafts=drafts, ngrams=ngrams)
        truth = [*verified.PROMPT, *wanted]
        if made != wanted:
            yield f"{kind}: {made}, not {wanted}"
        meant = verified.expected(truth, len(verified.PROMPT), 8, drafts, ngrams)
        if (results[0].steps, results[0].drafted) != meant:
            yield f"{kind}: {results[0]}"
    yield from stopped(session)
    yield from judged(session)
    yield from behind_a_text(session)
    wanted = masked()
    if (found := verified.masked(session, 20, 4, wanted)) != wanted:
        yield f"masked: {found}, not {wanted}"


@cache
def masked() -> list[int]:
    return verified.masked(verified.rig().session(), 20, 1)


def behind_a_text(session: Session) -> Iterator[str]:
    """A text in which drafts are looked up first."""
    wanted = verified.plain(60, verified.HOT)
    for kind in verified.TEXTS:
        text, ngrams = verified.text_ahead(kind, wanted), (1, 3)
        made, (result,) = verified.made(session, 60, verified.HOT, per_step=8, ngrams=ngrams, text=text)
        meant = verified.expected([*verified.PROMPT, *wanted], len(verified.PROMPT), 8, (), ngrams, text)
        if made != wanted or (result.steps, result.drafted) != meant:
            yield f"{kind}: {made}, {result}"


def stopped(session: Session) -> Iterator[str]:
    """A stop id inside of what was drafted."""
    wanted = verified.plain(60)
    for place in (21, 24, 26):
        sampling = verified.replace(verified.GREEDY, stop_ids=(wanted[place],))
        made, results = verified.made(session, 60, sampling, per_step=8, drafts=wanted[:59])
        first = wanted.index(wanted[place])
        if made != wanted[: first + 1] or results[-1].drafted.accepted > first:
            yield f"stopped at {place}: {made}, {results[-1]}"


def judged(session: Session) -> Iterator[str]:
    """The rows of the logits that judged the tokens."""
    wanted, prompt, cache_ = verified.plain(60, verified.HOT)[:20], verified.PROMPT, session.sequence()
    drafting = Drafting(20, verified.wrong(wanted, 4)[:19])
    part = Part(cache_, prompt, len(prompt) + 19, verified.HOT, 8, known=prompt, prompt=len(prompt), drafting=drafting)
    launch = session.launcher.prepare([part], session.device.allocate_mapped(20 * 8 * 50 * 4))
    session.launcher.start(launch)
    session.launcher.finish(launch)
    rows = np.stack([*session.launcher.logits_after(launch, 0, range(len(prompt) + 19))])
    cache_.clear()
    if not np.array_equal(rows, scored()):
        yield "other logits than those that judged the tokens"


@cache
def scored() -> Any:
    return verified.rig().session().score([*verified.PROMPT, *verified.plain(60, verified.HOT)[:19]])


def finding() -> str | None:
    try:
        return next(found(planted_rig().session("random", 1)), None)
    except (CheetahError, AssertionError) as error:  # a launch that the host cannot go on from
        return repr(error)


def test_nothing_is_found_in_the_kernel_as_it_is() -> None:
    assert finding() is None


@pytest.mark.parametrize("bug", tiered(BUGS, BUGS[::3]), ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_bug_is_found(bug: SamplingBug) -> None:
    with chosen(planted_rig(), BUGS.index(bug) + 1):
        assert finding() is not None
