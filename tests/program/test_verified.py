"""Drafts that are verified inside the kernel: the same tokens as without them, whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from cheetah.generate import generate_kernel
from cheetah.models.config import ModelConfig
from cheetah.models.mistral import MistralConfig
from cheetah.models.sampling import Filters, Penalties
from cheetah.runtime.engine.drafting import Drafting
from cheetah.runtime.engine.launcher import Part, Sampling
from cheetah.runtime.engine.launches import LaunchResult
from cheetah.tools import judged_drafts
from cheetah.tools.judged_drafts import expected
from tests.program.kinds import KINDS
from tests.program.rig import Rig, Session, kept, model, random_weights, relative_error, token_ids
from tests.program.test_experts import qwen
from tests.tiers import tiered
from tests.tolerances import SMALL_MARGIN

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

PROMPT = token_ids(9, 50)
HOT = Sampling(temperature=1.2, seed=7)
GREEDY = Sampling()


@cache
def rig(**more: Any) -> Rig:
    """Items of 32 keys, of which a launch crosses several; one block more than there are KV heads."""
    weights = random_weights(model(heads=4, kv_heads=2))
    plan = {"batch": 2, "tokens": 8, "kv_chunk": 32, "drafts": 7, "stages": 5, **more}
    return Rig(weights, blocks=3, kv_chunk_min=16, generate=kept(generate_kernel), **plan)


def made(
    session: Session,
    count: int,
    sampling: Sampling = GREEDY,
    *,
    per_step: int = 1,
    rounds: int = 64,
    drafts: Sequence[int] = (),
    ngrams: tuple[int, int] = (0, 0),
    prompt: Sequence[int] = PROMPT,
    text: Sequence[int] = (),
) -> tuple[list[int], list[LaunchResult]]:
    """`count` tokens behind the prompt, in launches of `rounds` steps. drafts: what is proposed for all of it; text: in
    which drafts are looked up first."""
    ids, results, cache = list(prompt), list[LaunchResult](), session.sequence()
    while len(ids) < len(prompt) + count:
        inputs = ids[cache.length :]
        total = min(len(inputs) - 1 + len(prompt) + count - len(ids), rounds * per_step)
        inputs = inputs[: total + 1]
        ahead = list(drafts[len(ids) - len(prompt) :])[: max(0, total - len(inputs))]
        drafting = Drafting(min(rounds, total), ahead, ngrams, text)
        part = Part(
            cache,
            inputs,
            total,
            sampling,
            per_step,
            known=ids[: cache.length + len(inputs)],
            prompt=len(prompt),
            drafting=drafting,
        )
        result = session.launcher.launch_together([part])[0]
        results.append(result)
        ids += result.token_ids
        if result.token_ids[-1:] and result.token_ids[-1] in sampling.stop_ids:
            break
    cache.clear()
    return ids[len(prompt) :], results


@cache
def plain(count: int, sampling: Sampling = GREEDY) -> list[int]:
    return made(rig().session(), count, sampling)[0]


def wrong(tokens: Sequence[int], every: int) -> list[int]:
    """The tokens, of which each `every`-th is another."""
    return judged_drafts.wrong(tokens, every, 50)


FEW = tuple(range(4, 50, 15))
"""So few tokens repeat themselves."""
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": HOT,
    "few": Sampling(allowed=FEW),
    "penalised": Sampling(allowed=FEW, penalties=Penalties(1.1, 0.2, 0.15)),
    "few, seeded": Sampling(allowed=FEW, temperature=0.7, seed=3),
    "penalised, seeded": Sampling(
        temperature=1.0, seed=2, penalties=Penalties(1.2, 0.3, 0.7), bias=((7, 1.0), (9, 2.0))
    ),
    "filtered": Sampling(temperature=2.0, seed=11, filters=Filters(12, 0.7, 0.01)),
    "filtered, banned": Sampling(temperature=3.0, seed=5, filters=Filters(0, 0.6), banned=tuple(range(0, 50, 2))),
}
DRAFTERS = {
    "right": (100, (0, 0)),
    "wrong": (1, (0, 0)),
    "every second": (2, (0, 0)),
    "every fifth": (5, (0, 0)),
    "looked up": (0, (1, 3)),
    "looked up behind two": (0, (2, 2)),
    "both": (4, (1, 4)),
}
ALL = [(drafter, sampling) for drafter in DRAFTERS for sampling in SAMPLINGS]
SOME = [*zip(list(DRAFTERS) * 2, SAMPLINGS, strict=False), ("looked up", "few"), ("every fifth", "penalised")]


@pytest.mark.parametrize(("drafter", "kind"), tiered(ALL, [case for case in ALL if case not in SOME]))
def test_the_same_tokens_by_fewer_steps(drafter: str, kind: str) -> None:
    (every, ngrams), sampling = DRAFTERS[drafter], SAMPLINGS[kind]
    wanted = plain(60, sampling)
    drafts = wrong(wanted, every)[: 30 if ngrams[1] else 59] if every else []
    found, (result,) = made(rig().session("random", every), 60, sampling, per_step=8, drafts=drafts, ngrams=ngrams)
    assert found == wanted
    assert (result.steps, result.drafted) == expected([*PROMPT, *wanted], len(PROMPT), 8, drafts, ngrams)


TEXTS = ("true, with gaps", "the prompt again")


def text_ahead(kind: str, wanted: Sequence[int]) -> list[int]:
    """In which drafts are looked up first."""
    return [token for place, token in enumerate(wanted) if place % 9] if kind == TEXTS[0] else [3, 4, *PROMPT, 5]


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_ahead_is_looked_up_first(kind: str) -> None:
    wanted, ngrams = plain(60, HOT), (1, 3)
    text = text_ahead(kind, wanted)
    found, (result,) = made(rig().session("random", 5), 60, HOT, per_step=8, ngrams=ngrams, text=text)
    assert found == wanted
    meant = expected([*PROMPT, *wanted], len(PROMPT), 8, (), ngrams, text)
    assert (result.steps, result.drafted) == meant and (kind != TEXTS[0] or result.steps < 30)


OTHERS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "windows in some layers": (KINDS, {}),
    "a window in all layers, which leaves pages behind": (
        MistralConfig(48, 40, 2, 4, 2, 64, 50, max_position_embeddings=256, sliding_window=20),
        {"kv_chunk": 32, "page_size": 16, "max_steps": 4},
    ),
    "experts": (qwen(144, 256, 4, 6), {"kv_chunk": 32}),
}


@cache
def rig_of(kind: str, drafts: int, tokens: int) -> Rig:
    config, more = OTHERS[kind]
    plan = {"batch": min(2, tokens), "tokens": tokens, "kv_chunk": 32, "drafts": drafts, **more}
    return Rig(random_weights(config), blocks=3, generate=generate_kernel, **plan)


@pytest.mark.parametrize("kind", tiered(OTHERS, list(OTHERS)[1:]))
def test_other_kinds_of_layers(kind: str) -> None:
    """Beside a kernel without drafts, of one column."""
    launcher = (session := rig_of(kind, 0, 1).session()).launcher
    wanted, cache = list[int](), session.sequence()
    while len(wanted) < 60:
        inputs = [*PROMPT, *wanted][cache.length :]
        total = min(launcher.max_steps, len(inputs) + 59 - len(wanted))
        (result,) = launcher.launch_together([Part(cache, inputs[: total + 1], total, HOT)])
        wanted += result.token_ids
    for every, ngrams, rounds in ((3, (0, 0), 4), (0, (1, 3), 2), (100, (0, 0), 3)):
        drafts = wrong(wanted, every)[:59] if every else ()
        drafting = rig_of(kind, 7, 8).session("random", every)
        found, results = made(drafting, 60, HOT, per_step=8, rounds=rounds, drafts=drafts, ngrams=ngrams)
        assert found == wanted
        assert not every or sum(result.steps for result in results) < 40


WIDTHS = [(per_step, rounds) for per_step in (2, 5, 8) for rounds in (1, 3)]


@pytest.mark.parametrize(("per_step", "rounds"), tiered(WIDTHS, [(2, 1), (5, 3), (8, 1)]))
def test_any_width_and_any_number_of_steps_a_launch(per_step: int, rounds: int) -> None:
    sampling = SAMPLINGS["penalised"]
    wanted = plain(60, sampling)[:30]
    session = rig().session("priority", per_step)
    assert made(session, 30, sampling, per_step=per_step, rounds=rounds, ngrams=(1, 3))[0] == wanted
    assert made(session, 30, sampling, per_step=per_step, rounds=rounds, drafts=wrong(wanted, 3))[0] == wanted


def test_a_stop_id_ends_it_inside_of_what_was_drafted() -> None:
    """What was drafted behind it counts for nobody: not for the host, nor in what is looked up later."""
    wanted = plain(60)
    for place in (20, 22, 23, 27):
        stop = wanted[place]
        first = wanted.index(stop)
        sampling = replace(GREEDY, stop_ids=(stop, 1000))
        found, results = made(rig().session(), 60, sampling, per_step=8, drafts=wanted[:59])
        assert found == wanted[: first + 1]
        assert results[-1].drafted.accepted <= first


def test_several_sequences_share_steps_with_widths_of_their_own() -> None:
    kinds = ("few", "penalised, seeded")
    wanted = [plain(60, SAMPLINGS[kind]) for kind in kinds]
    session = rig().session("random", 1)
    for widths, drafters in (((5, 3), (0, 2)), ((1, 7), (0, 0)), ((4, 4), (3, 0))):
        caches = [session.sequence() for _ in kinds]
        parts = [
            Part(
                own,
                PROMPT,
                len(PROMPT) - 1 + 40,
                SAMPLINGS[kind],
                width,
                known=PROMPT,
                prompt=len(PROMPT),
                drafting=Drafting(48, wrong(tokens, every)[:39] if every else (), (1, 2)),
            )
            for own, kind, width, tokens, every in zip(caches, kinds, widths, wanted, drafters, strict=True)
        ]
        results = session.launcher.launch_together(parts)
        assert [list(result.token_ids) for result in results] == [tokens[:40] for tokens in wanted]
        for one in caches:
            one.clear()


def test_logits_are_those_that_judged() -> None:
    wanted = plain(60, HOT)
    session = rig().session()
    cache = session.sequence()
    drafting = Drafting(30, wrong(wanted, 4)[:29])
    part = Part(cache, PROMPT, len(PROMPT) + 29, HOT, 8, known=PROMPT, prompt=len(PROMPT), drafting=drafting)
    logits = session.device.allocate_mapped(30 * 8 * 50 * 4)
    launch = session.launcher.prepare([part], logits)
    session.launcher.start(launch)
    (result,) = session.launcher.finish(launch)
    assert list(result.token_ids) == wanted[:30] and session.launcher.fresh(launch) == [result.token_ids]
    assert launch.drafted_of(0) == result.drafted, "each token says what came of the drafts before it"
    rows = [*session.launcher.logits_after(launch, 0, range(len(PROMPT) + 29))]
    scored = session.score([*PROMPT, *wanted[:29]])
    assert relative_error(np.stack(rows), scored) < SMALL_MARGIN


RACELESS = [("penalised", 0, (1, 3)), ("filtered", 3, (1, 2))]


@pytest.mark.parametrize(("kind", "every", "ngrams"), tiered(RACELESS, RACELESS[:1]))
def test_no_race(kind: str, every: int, ngrams: tuple[int, int]) -> None:
    sampling = SAMPLINGS[kind]
    wanted = plain(60, sampling)[:12]
    drafts = wrong(wanted, every)[:8] if every else []
    session = rig(sanitize=True).session("random", 3)
    assert made(session, 12, sampling, per_step=8, drafts=drafts, ngrams=ngrams)[0] == wanted
