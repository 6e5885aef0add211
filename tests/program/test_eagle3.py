"""Steps of heads that draft, EAGLE-3's and Qwen3.5's, in the emulator against their meaning: what they take of the
target, and what goes on from it.

The features of every token lie by pages, as a target leaves them; a head reads some of them, several tokens a step,
then goes on from its own state.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cheetah.generate import generate_kernel
from cheetah.models.dense.weights import FINAL_NORM, STATE_NORM
from cheetah.models.drafter import BESIDE, OFFSETS, TOKEN_IDS, plain_name, token_ids
from cheetah.models.mtp import FC, drafter_of
from cheetah.models.registry import family_of, read_drafter
from cheetah.models.rounding import as_bf16
from cheetah.models.sampling import Filters, sample
from cheetah.package import Generated
from cheetah.runtime.engine.launcher import Part, Sampling
from tests.models.goldens import mtp
from tests.models.goldens.eagle3 import CONFIGS, HIDDEN, KNOWN, TARGET, VOCAB, features_of, tokens_of, weights_of
from tests.models.goldens.mtp import MTP, OF_EXPERTS
from tests.models.meaning_of_heads import Eagle3Reference, HeadReference, MtpReference
from tests.planted_text import planted
from tests.program.rig import Rig, kept, kept_kernel, relative_error
from tests.tiers import tiered
from tests.tolerances import LOGITS

pytestmark = [pytest.mark.compiler, pytest.mark.slow]


class HeadWeights:
    """A head of the goldens, in bf16, with what it is given."""

    def __init__(self, name: str) -> None:
        self.features, self.tokens = features_of(CONFIGS[name]), tokens_of()
        self.config = read_drafter(CONFIGS[name], TARGET)
        drawn = weights_of(CONFIGS[name])
        self.ids = token_ids(drawn.pop(OFFSETS), KNOWN)
        self.tensors = {plain_name(name): as_bf16(values) for name, values in drawn.items()}

    def tensor(self, name: str) -> NDArray[Any]:
        return self.ids if name == TOKEN_IDS else self.tensors[name]

    def reference(self) -> HeadReference:
        return Eagle3Reference(self.config, self.tensor)


class MtpWeights(HeadWeights):
    """The layer that drafts of Qwen3.5, and what it takes of the model."""

    def __init__(self, name: str = MTP) -> None:
        self.features, self.tokens = mtp.features_of(), mtp.tokens_of()
        self.config = replace(drafter_of(mtp.TARGETS[name]), weight_formats=())
        drawn = {name: as_bf16(values) for name, values in mtp.weights_of(name).items()}
        self.tensors = {plain_name(name.removeprefix(BESIDE)): values for name, values in drawn.items()}
        for name, merged in family_of(self.config).merged_tensors(self.config).items():
            whole, first = self.tensors[name].reshape(-1), 0
            for part, shape in merged.parts.items():
                self.tensors[part] = whole[first : first + math.prod(shape)].reshape(shape)
                first += math.prod(shape)
        of_model = {name: drawn[name] for name in mtp.OF_MODEL}
        self.tensors |= {**of_model, FINAL_NORM: drawn["mtp.norm.weight"], STATE_NORM: drawn[FINAL_NORM]}

    def reference(self) -> HeadReference:
        return MtpReference(self.config, self.tensor)


@cache
def weights_named(name: str) -> HeadWeights:
    return MtpWeights(name) if name in mtp.TARGETS else HeadWeights(name)


class HeadSession:
    """Two sequences whose tokens have features, of which one begins a token later; or one."""

    def __init__(self, rig: Rig, name: str, **schedule: Any) -> None:
        self.rig, self.session = rig, rig.session(**schedule)
        drawn, tokens = weights_named(name).features, weights_named(name).tokens
        self.features, self.tokens = [drawn, drawn[1:]][: rig.plan.batch], [tokens, tokens[1:]][: rig.plan.batch]
        self.caches = [self.session.sequence() for _ in self.tokens]
        buffer = self.session.buffers["features"]
        store = np.zeros(rig.manifest.buffer("features").shape, np.uint16)
        store[...] = 0x7FC0  # NaN, of tokens that have none
        for cached, rows in zip(self.caches, self.features, strict=True):
            self.session.launcher.make_room(cached, len(rows) + 16)
            for position, row in enumerate(rows):
                page, slot = divmod(position, rig.plan.page_size)
                store[cached.pages[page], slot, :, :HIDDEN] = as_bf16(row)
        buffer.upload(store)

    def read(self, number: int, count: int, per_step: int) -> None:
        """A sequence's next tokens, several a step."""
        cached = self.caches[number]
        inputs = self.tokens[number][cached.length :][: count + 1]
        self.session.launcher.launch_together([Part(cached, inputs, count, per_step=per_step)])

    def drafted(self, count: int, sampling: Sampling) -> tuple[list[list[int]], list[NDArray[np.float32]]]:
        """So many tokens behind all of each, and the logits behind what was read for that."""
        inputs = [tokens[one.length :] for tokens, one in zip(self.tokens, self.caches, strict=True)]
        steps = max(map(len, inputs)) - 1 + count
        parts = [Part(one, given, steps, sampling) for one, given in zip(self.caches, inputs, strict=True)]
        results = self.session.launcher.launch_together(parts, self.session.logits)
        logits = self.session.logits_of_parts(steps, len(parts))
        return [[*result.token_ids] for result in results], [
            one[:, : self.rig.config.shape.head_rows] for one in logits
        ]


RIGS: dict[tuple[str, int], dict[str, Any]] = {
    ("safeai", 4): {},
    ("speculators", 4): {"sync": "barrier", "blocks": 3},
    ("3.1", 4): {"blocks": 5},
    ("one norm before fc", 2): {"page_size": 4},
    ("safeai", 1): {"blocks": 3},
    ("one norm before fc", 1): {"sync": "barrier"},
    ("3.1", 16): {},
    (OF_EXPERTS, 1): {"blocks": 3},
    (OF_EXPERTS, 2): {"sync": "barrier", "blocks": 2},
    (OF_EXPERTS, 4): {"blocks": 3},
    (MTP, 1): {"blocks": 5},
    (MTP, 16): {"blocks": 2},
    (MTP, 2): {"sync": "barrier", "blocks": 3},
    (MTP, 4): {"blocks": 3},
}
"""By name of the head and columns the plan."""


@cache
def rig_of(name: str, tokens: int) -> Rig:
    plan = {"tokens": tokens, "batch": min(2, tokens), "page_size": 16, **RIGS[name, tokens]}
    return Rig(weights_named(name), generate=kept_kernel, **plan)


def differing(made: HeadSession, name: str, sampling: Sampling = Sampling(), drafts: int = 5) -> float:  # noqa: B008
    """How far the logits are from the reference's, where it takes the same tokens; infinite where other tokens were
    chosen than it would have from the same logits."""
    most = min(4, made.rig.plan.tokens)
    made.read(0, 5, most)
    made.read(0, 2, 1)
    for number in range(1, len(made.caches)):
        made.read(number, 3, 2)
    starts = [one.length for one in made.caches]
    found, logits = made.drafted(drafts, sampling)
    if any(len(ids) < drafts for ids in found):
        return float("inf")  # no logit was a number
    worst = 0.0
    for start, tokens, features, ids, rows in zip(starts, made.tokens, made.features, found, logits, strict=True):
        reference = weights_named(name).reference()
        wanted = [*reference.forward(tokens, features), *(reference.step(token) for token in ids[:-1])][start:]
        worst = max(worst, relative_error(rows, np.stack(wanted)))
        spread = np.full((len(ids), VOCAB), -np.inf, np.float32)
        spread[:, reference.token_ids] = rows[-len(ids) :]
        places = enumerate(spread, len(tokens) + 1)
        how = sampling.temperature, sampling.seed
        judged = [sample(one, *how, place, sampling.filters) for place, one in places]
        if judged != ids:
            return float("inf")
    return worst


@pytest.mark.parametrize(("name", "tokens"), tiered(RIGS, [*RIGS][-4:]))
def test_a_head_goes_on_from_features_and_then_from_its_own_state(name: str, tokens: int) -> None:
    assert differing(HeadSession(rig_of(name, tokens), name), name) < LOGITS


@pytest.mark.parametrize("name", ["safeai", MTP])
def test_drafts_are_drawn_with_the_noise_of_the_tokens_that_they_are_for(name: str) -> None:
    """And, where all tokens are known, of those that are left of a filter."""
    sampling, rig = Sampling(temperature=0.9, seed=5), rig_of("safeai", 4)
    if name == MTP:
        sampling = replace(sampling, temperature=3.0, filters=Filters(top_k=3))
        rig = Rig(weights_named(name), generate=kept(generate_kernel), tokens=4, batch=2, page_size=16, blocks=3)
    assert differing(HeadSession(rig, name, scheduler="random", seed=3), name, sampling) < LOGITS


PLANTED = {
    "every token has features": ("safeai", "if (column_states[column].number < value) {", "if (value > 0) {"),
    "own states are forgotten": ("safeai", "value = residual[place_of_row];", "value = 0.0f;"),
    "tokens of the head are the first of all": (
        *("safeai", "load_constant_u32(token_ids + (m_tile * 16 + row));", "m_tile * 16 + row;"),
    ),
    "one layer twice": ("safeai", "* 3 + 1) * HIDDEN;", "* 3) * HIDDEN;"),
    "a state before the model's norm": (MTP, "(bf16_to_f32(state_norm[", "(0.0f * bf16_to_f32(state_norm["),
    "own states before the norm": (MTP, "* weight_behind;", "* 1.0f;"),
    "the state of the token before": (
        MTP,
        "found = page * PAGE_SIZE + position",
        "found = page * PAGE_SIZE - 1 + position",
    ),
    "a residual that begins without the token": (MTP, "RESIDUAL))[place] = value;", "RESIDUAL))[place] = 0.0f;"),
}


@pytest.mark.parametrize("bug", tiered(PLANTED, list(PLANTED)[1:4] + list(PLANTED)[5:]))
def test_bugs_in_what_goes_in_are_seen(bug: str) -> None:
    name, *change = PLANTED[bug]

    def wrong(*given: Any, **plan: Any) -> Generated:
        right = kept_kernel(*given, **plan)
        return right.with_text(planted(right.text, *change))

    rig = Rig(weights_named(name), generate=wrong, tokens=4, batch=2, page_size=16)
    assert not differing(HeadSession(rig, name), name) < LOGITS


def test_an_embedding_behind_the_state_is_seen() -> None:
    """Halves of `fc` the other way round."""
    weights = MtpWeights()
    weights.tensors[FC] = np.roll(weights.tensors[FC], mtp.HIDDEN, axis=1)
    rig = Rig(weights, generate=kept_kernel, **{"tokens": 4, "batch": 2, "page_size": 16, **RIGS[MTP, 4]})
    assert not differing(HeadSession(rig, MTP), MTP) < LOGITS
