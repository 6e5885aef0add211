"""Passes over prompts of models of experts: against float32 and transformers, in any company and cut, with experts that
all tokens choose and some that none does.

Prompts are drawn such that rounding decides no token's experts: else the numbers behind it are others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cheetah.emulator import SCHEDULERS, EmulatorError
from cheetah.generate import choose_plan
from cheetah.models.config import ModelConfig
from cheetah.models.dense.pass_sizes import PassSizes
from cheetah.models.dense.reference import Reference, rms_norm
from cheetah.models.dense.weights import FINAL_NORM
from cheetah.models.layer_kind import Routing
from cheetah.models.olmoe import OlmoeConfig
from cheetah.models.registry import family_of, preset
from cheetah.models.rounding import as_bf16, exact, round_to_bf16, widen
from cheetah.plan import PlanError, gpu_named
from cheetah.plan.prompt import PassPlan, default_pass_plan, pass_plan_for, pass_tokens
from cheetah.tools.decided import decided_ids
from tests.models.goldens.families import LOGITS, tokens_of
from tests.program.joined import chosen
from tests.program.quantized_weights import QuantizedWeights
from tests.program.rig import RandomWeights, random_weights, relative_error, token_ids
from tests.program.test_experts import MIXTRAL, qwen
from tests.program.test_goldens import GoldenWeights
from tests.program.test_gpt_oss import MXFP4, gpt_oss
from tests.program.test_prompt_pass import PASS, STATES_TOLERANCE, TOLERANCE, PassRig, PassSession, normalised
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

OLMOE = OlmoeConfig(48, 64, 2, 2, 2, 64, 50, max_position_embeddings=256, routing=Routing(40, 2, normalised=False))
FORMATS = {
    "all in four bits, sizes that do not divide": {
        "qkv": "int4-g32-asym",
        "o": "int4",
        "gate_up": "int4",
        "down": "int4-g128",
    },
    "experts in eight bits beside bf16": {"gate_up": "fp8-block128", "down": "int8"},
}
FEW = PassPlan(tokens=64, tile_tokens=16, warpgroups=1, stages=3, cut_tokens=64, key_tile=16, weights_warps=3)
ALL_CHOSEN = qwen(48, 64, experts=4, chosen=4)
# name: (configuration, how it is run)
CASES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "experts that do not divide 32, cuts of other products": (qwen(width=64), {"blocks": 13, "pass_plan": FEW}),
    "more experts than lanes, weights of all, norms over all heads": (OLMOE, {"blocks": 3}),
    "an odd number of K-tiles": (MIXTRAL, {"blocks": 2}),
    "all experts chosen": (ALL_CHOSEN, {"blocks": 5}),
    "narrow q, k, v and router, two warpgroups, tiles of 20 groups": (
        qwen(256, 64, 2, 16),
        {"blocks": 5, "pass_plan": replace(PASS, tokens=320, tile_tokens=160, warpgroups=2, weights_warps=3)},
    ),
}
COUNTS = (30, 23)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt that a model surely knows what to do with, and what it means. weights: the model's."""

    weights: Any
    length: int = sum(COUNTS)

    @property
    def config(self) -> ModelConfig:
        config: ModelConfig = self.weights.config
        return config

    @cached_property
    def ids(self) -> list[int]:
        references = [Reference(self.config, self.weights.tensor, rounding) for rounding in (exact, round_to_bf16)]
        return decided_ids(references, np.random.default_rng(0), self.length)

    @cached_property
    def _wanted(self) -> tuple[Any, Any]:
        reference = Reference(self.config, self.weights.tensor)
        states = np.stack([reference.hidden_state(id_) for id_ in self.ids])
        both = reference.keys, reference.values
        return np.stack([array[:, :, : self.length] for array in both], axis=1), states

    def assert_read(self, session: PassSession, states: Any = None) -> None:
        """The cache's keys and values are the prompt's; states: of its last tokens."""
        assert relative_error(session.keys_and_values(), self._wanted[0]) < TOLERANCE
        if states is not None:
            of_last = normalised(self.config, states)
            assert relative_error(of_last, self._wanted[1][-len(of_last) :]) < STATES_TOLERANCE


@cache
def prompt_of(config: ModelConfig) -> Prompt:
    return Prompt(random_weights(config))


def read(
    rig: PassRig, prompt: Prompt, scheduler: str = "random", seed: int = 1, first: int = COUNTS[0]
) -> tuple[PassSession, Any]:
    """In two passes, another prompt beside the first; the hidden states of all that the second reads."""
    session, rest = PassSession(rig, seed), prompt.length - first
    session.read({1: token_ids(9, 50), 0: prompt.ids[:first]}, scheduler, seed)
    session.read({0: prompt.ids[first:]}, scheduler, seed, wanted=range(rest))
    return session, session.states(rest)


@pytest.mark.parametrize("case", tiered(CASES, [*CASES][2:]))
def test_a_prompt_in_passes(case: str) -> None:
    config, options = CASES[case]
    rig, prompt, bits = PassRig(config, **options), prompt_of(config), set()
    for scheduler in SCHEDULERS:
        session, states = read(rig, prompt, scheduler)
        prompt.assert_read(session, states)
        bits.add(session.keys_and_values().tobytes() + states.tobytes())
    assert len(bits) == 1


@pytest.mark.parametrize("case", tiered(FORMATS, [*FORMATS][1:]))
def test_quantised_experts(case: str) -> None:
    """Each with its own factors; the input of attention and router may be padded to fewer columns than theirs."""
    config = replace(qwen(160, 128), weight_formats=tuple(FORMATS[case].items()))
    prompt = Prompt(QuantizedWeights(config, scales="bf16"))
    prompt.assert_read(*read(PassRig(config, blocks=3, weights=prompt.weights, stage_bytes=8192), prompt))


GPT_OSS: dict[str, tuple[dict[str, Any], tuple[str, str] | None]] = {
    "as it is": ({"blocks": 3}, None),
    "products that are cut": ({"blocks": 13, "pass_plan": FEW}, None),
    "biases of the first expert": ({"blocks": 3}, ("gate_up_biases + layer * 1344 + expert * 192", "gate_up_biases")),
    "o's biases in down, too": ({"blocks": 3}, ("phase <= 3 ? bias : 0.0f", "bias")),
    "codes of a stage that has none": (
        {"blocks": 3, "pass_plan": replace(PASS, weights_warps=3)},
        ("slot = ring + previous * STAGE_BYTES + warp", "slot = memory + warp"),
    ),
}


@pytest.mark.parametrize("case", tiered(GPT_OSS, [*GPT_OSS][1:]))
def test_gpt_oss(case: str) -> None:
    """Experts in MXFP4 whose widths fill no K-tile, biases everywhere, sinks, a window in a layer, a clamped gate."""
    options, bug = GPT_OSS[case]
    prompt = Prompt(QuantizedWeights(replace(gpt_oss(), weight_formats=MXFP4)))
    rig = PassRig(prompt.config, weights=prompt.weights, stage_bytes=8192, bug=bug, **options)
    if bug is None:
        return prompt.assert_read(*read(rig, prompt))
    with pytest.raises(AssertionError):
        prompt.assert_read(*read(rig, prompt))


@cache
def usual() -> PassRig:
    """Three experts of nine; more tiles of slots than blocks, and blocks without a tile."""
    return PassRig(qwen(width=64), blocks=3)


def test_neither_cuts_nor_company_change_a_bit() -> None:
    """However a prompt is cut into passes, and whatever else these read: other prompts, or the same one."""
    prompt, bits = prompt_of(qwen(width=64)), set()
    for number, cuts in enumerate(((53,), (1, 16, 36), (40, 13))):
        session = PassSession(usual(), seed=number)
        for count in cuts:
            length = session.caches[0].length
            part, other = prompt.ids[length : length + count], token_ids(11 * number + 7, 50, number)
            session.read({2: other, 0: part, 1: part} if number % 2 else {0: part, 1: other}, "random", number)
        prompt.assert_read(session)
        bits.add(session.keys_and_values().tobytes())
    assert len(bits) == 1


def test_of_equal_logits_the_lowest_experts_count() -> None:
    """A router of zeros: all tokens are given to the first three experts, and none to the others."""
    weights = RandomWeights(qwen(width=64))
    for name, tensor in weights.tensors.items():
        if name.endswith("mlp.gate.weight"):
            weights.tensors[name] = np.zeros_like(tensor)
    prompt = Prompt(weights)
    prompt.assert_read(*read(PassRig(prompt.config, blocks=3, weights=weights), prompt))


def test_a_token_that_is_no_number_changes_no_other() -> None:
    """Its logits are none: it is given to the lowest experts, and makes no address of any kind."""
    config, broken = qwen(width=64), RandomWeights(qwen(width=64))
    prompt = Prompt(random_weights(config), 30)
    other = next(id_ for id_ in range(50) if id_ not in prompt.ids)
    broken.tensors["model.embed_tokens.weight"][other] = as_bf16(np.full(80, np.nan))
    bits = []
    for rig in (PassRig(config, blocks=3, weights=broken), usual()):
        session = PassSession(rig)
        session.read({1: [other] * 12, 0: prompt.ids})
        bits.append(session.keys_and_values().tobytes())
        prompt.assert_read(session)
    assert bits[0] == bits[1]


GOLDENS = ("qwen3_moe, of the softmax over all", "mixtral", "olmoe", "gpt_oss")
GOLDEN_TOLERANCE = 0.06
"""Relative error of a position's logits (rounding the reference to bf16 gives 0.04 by itself)."""
LEAST_NEARNESS = 0.015
"""Of the logits of experts, in standard deviations: nearer ones may be chosen otherwise."""


@pytest.mark.parametrize("name", tiered(GOLDENS, GOLDENS[1:]))
def test_logits_are_those_of_transformers(name: str) -> None:
    """Of the positions whose experts rounding does not decide."""
    weights = GoldenWeights(name)
    config = weights.config
    ids = tokens_of(config.vocab_size)
    session = PassSession(PassRig(config, blocks=2, weights=weights))
    session.read({0: ids}, wanted=range(len(ids)))
    norm, head = (widen(weights.tensor(tensor)) for tensor in (FINAL_NORM, family_of(config).head_tensor))
    found = np.stack([rms_norm(state, norm, config.rms_norm_eps) @ head.T for state in session.states(len(ids))])
    reference, wanted = Reference(config, weights.tensor), load_file(LOGITS)[name]
    reference.forward(ids)
    sure = np.array(reference.nearness) > LEAST_NEARNESS
    assert sure.mean() > 0.7 and relative_error(found[sure], wanted[sure]) < GOLDEN_TOLERANCE


PLACES = "((uint32_t*)(arena + EXPERT_PLACES))[expert]"
OF_LIST = "((uint32_t*)(arena + EXPERTS))"
BUGS = {
    "a count off by one": ("[expert] = (count + 7) / 8", "[expert] = (count + 6) / 8"),
    "tokens of an earlier word are not counted": ("before = total - count;", "before = 0u;"),
    "the first token of a word for all": ("left &= left - 1;", ";"),
    "weights of the neighbour's expert": (
        "(uint64_t)(expert) * (GATE_UP_ROWS / 16",
        "(uint64_t)(min(expert + 1, 8u)) * (GATE_UP_ROWS / 16",
    ),
    "down's weights of the first expert": ("(uint64_t)(expert) * (DOWN_ROWS / 16", "0 * (DOWN_ROWS / 16"),
    "a weight of the other slot": ("of_slots[first_group * 8 + thread]", "of_slots[first_group * 8 + (thread ^ 1)]"),
    "the factors of the tile before": ("(slot_factors + factor_turn * TILE_TOKENS)[thread]", "(slot_factors)[thread]"),
    "the second tile of an expert is the first": ("* 2;\nuint32_t first_group", "* 0;\nuint32_t first_group"),
    "groups of other experts are finished": (f"min({PLACES} - before, 2u)", "2u"),
    "the rows of one expert for all": ("(slots[index]) * 40", "(slots[index / 3 * 3]) * 40"),
    "the list is followed before it is made": ("mbarrier_wait(made, experts_parity);", ";"),
    "the list ends a tile early": (f"{OF_LIST}[0] = tile;", f"{OF_LIST}[0] = tile - 1;"),
    "words are stored before all tokens have chosen": (
        "[in_word * 32 + lane_2] = chosen;\n}\nnamed_barrier(1, CONSUMERS);",
        "[in_word * 32 + lane_2] = chosen;\n}",
    ),
    "tokens choose while words are stored": (
        "* 8 + word] = chose;\n}\nnamed_barrier(1, CONSUMERS);",
        "* 8 + word] = chose;\n}",
    ),
    "ranks from the highest lane down": ("lane_2 >= distance ? other : 0", "lane_2 > distance ? other : 0"),
}
OF_MANY_EXPERTS = {
    "experts are counted by some warps alone": (
        "[expert] = (count + 7) / 8;\n}\nnamed_barrier(1, CONSUMERS);",
        "[expert] = (count + 7) / 8;\n}",
    ),
}
"""Of which a warp has fewer lanes."""


@cache
def with_bugs(of_many_experts: bool) -> PassRig:
    if of_many_experts:
        return PassRig(qwen(width=64, experts=40), blocks=5, bugs=[*OF_MANY_EXPERTS.values()])
    return PassRig(qwen(width=64), blocks=3, bugs=[*BUGS.values()])


def find(rig: PassRig, prompt: Prompt) -> None:
    """Cut in several ways, so that experts have any number of tokens."""
    bits = set()
    for number, first in enumerate((30, 31, 33, 41, 44, 47)):
        session, states = read(rig, prompt, SCHEDULERS[number % 3], number, first)
        prompt.assert_read(session, states)
        bits.add(session.keys_and_values().tobytes())
    assert len(bits) == 1


@pytest.mark.parametrize("bug", tiered([*BUGS, *OF_MANY_EXPERTS], [*OF_MANY_EXPERTS]))
def test_planted_bugs_are_found(bug: str) -> None:
    company = BUGS if bug in BUGS else OF_MANY_EXPERTS
    rig = with_bugs(company is OF_MANY_EXPERTS)
    with chosen(rig, [*company].index(bug) + 1), pytest.raises((EmulatorError, AssertionError)):
        find(rig, prompt_of(rig.config))


def test_what_a_pass_of_experts_cannot_do_is_said() -> None:
    with pytest.raises(PlanError, match="two K-tiles or more each; down has one"):
        PassRig(qwen(width=32), blocks=3)


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b"])
def test_presets_have_passes(model: str) -> None:
    """Of few tokens and of many; tiles have as many tokens as an expert has, about."""
    config, gpu = preset(model), gpu_named("h200")
    for tokens in (128, 512, 8192, 2048):
        pass_plan = pass_plan_for(gpu, tokens, config.shape)
        sizes = PassSizes(config, gpu, choose_plan(config, gpu), pass_plan)
        assert sizes.shared.total_bytes <= gpu.shared_bytes
        assert {phase.name for phase in sizes.phases} >= {"router", "choice", "sort", "gate_up", "down", "down-sums"}
    assert pass_plan.tile_tokens == {"qwen3-30b-a3b": 160}.get(model, 256)
    assert [default_pass_plan(gpu, tokens, config.shape).tokens for tokens in pass_tokens(config.shape, gpu)][0] == 8192
