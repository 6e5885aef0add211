"""Of wrong numbers `cheetah check` names the first vector of the first phase that is off: here in the awkward model's
kernels with two layers, of steps and of passes, and all the bugs, of which a variable says which there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from cheetah.emulator import EmulatorError
from cheetah.generate import generate_kernel
from cheetah.manifest import sha256_of_text
from cheetah.models.dense.pass_exchanged import vectors_of_passes
from cheetah.models.dense.pass_sizes import PassSizes
from cheetah.models.registry import DEMO, preset
from cheetah.package import Generated
from cheetah.plan import default_plan, gpu_named
from cheetah.plan.prompt import default_pass_plan
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.tools.check import _passes
from cheetah.tools.judged_passes import JudgedPasses
from cheetah.tools.judged_steps import JudgedSteps
from cheetah.tools.rig import Rig
from cheetah.tools.subjects import awkward_subject
from tests.program.joined import SELECTOR, chosen, joined
from tests.program.planted_sampling import SamplingBug
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

BUGS = (
    SamplingBug(
        "a larger embedding",
        r"bf16_to_f32\(\(embedding [^;]*(?=;)",
        r"\g<0> * 1.5f",
        "phase embedding: hidden of position ",
    ),
    SamplingBug(
        "rotated the other way",
        r"is_second \? partner : -partner",
        "is_second ? -partner : partner",
        "layer 0, phase qkv: qkv of position 16, query head 0, dim ",
    ),
    SamplingBug(
        "values cached in the head of keys",
        r"\(head - 4\) % 2",
        "(head - 4) / 2",
        "layer 0, phase qkv: what is cached as ",
    ),
    SamplingBug(
        "two dims of a head in each other's place",
        r"pack_bf16x2\(low, high\)(?=, 60)",
        "pack_bf16x2(high, low)",
        "layer 0, phase attention: attention of position ",
    ),
    SamplingBug(
        "the first layer's norm behind o",
        r"(?<=norms \+ \()layer \* 2 \+ 1",
        "1",
        "layer 1, phase o: middle of position ",
    ),
    SamplingBug(
        "squares behind o",
        r"(?<=float total = )told \* told",
        "told * told * (vector == EXCHANGE_MIDDLE_SQUARES ? 2.0f : 1.0f)",
        "layer 0, phase o: middle_squares of position ",
    ),
    SamplingBug(
        "the activation of the other sign",
        r"(?<=1\.0f \+ exp_f32\()-value",
        "value",
        "layer 0, phase gate_up: gated of position ",
    ),
    SamplingBug(
        "the first layer's norm behind down",
        r"(?<=norms \+ \()layer \* 2 \+ 2",
        "2",
        "layer 1, phase down: hidden of position ",
    ),
    SamplingBug(
        "other logits than those that are drawn from",
        r"(?<=\(token\)\] = )logit(?=;)",
        "logit * 1.5f",
        "phase lm_head: what it was given is right, of token ",
    ),
)
"""`found_by`: what the check says of each."""
OF_PASSES = (
    SamplingBug(
        "a larger embedding of a prompt",
        r"bf16_to_f32\(embedding\[place\w*\]\)",
        r"\g<0> * 1.5f",
        "pass 1, phase embedding: hidden of position 0",
    ),
    SamplingBug(
        "squares of a prompt's embeddings",
        r"total \+= kept\[m_tile \* \w+\];",
        found_by="pass 1, phase embedding: hidden_squares of position 0",
    ),
    SamplingBug(
        "a prompt's keys rotated otherwise",
        r"-second_2 \* angle_2\.y",
        "second_2 * angle_2.y",
        "pass 1, layer 0, phase qkv: what is cached as keys of position ",
    ),
    SamplingBug(
        "a dim for its neighbour in a pass",
        r"output\[0\] \* inverse(?=,)",
        "output[1] * inverse",
        "pass 1, layer 0, phase attention: attention of position 0, head 0, dim 0",
    ),
    SamplingBug(
        "the norm behind down behind o in a pass",
        r"\(phase <= 3 \? 1u : 2u\)",
        "2u",
        "pass 1, layer 0, phase o: middle of position 0",
    ),
    SamplingBug(
        "the activation of the other sign in a pass",
        r"exp_f32\(-first\)",
        "exp_f32(first)",
        "pass 1, layer 0, phase gate_up: gated of position 0",
    ),
    SamplingBug(
        "the norm behind o behind down in a pass",
        r"\(phase <= 3 \? 1u : 2u\)",
        "1u",
        "pass 1, layer 0, phase down: hidden of position 0",
    ),
    SamplingBug(
        "hidden states of the row beside",
        r"(?<=uint32_t row = )place % HIDDEN",
        "(place + 1) % HIDDEN",
        "phase lm_head, or the hidden states before it: what passes hand on is right",
    ),
)
BY_NAME = {bug.name: bug for bug in (*BUGS, *OF_PASSES)}
EXHAUSTIVE = (
    *("a larger embedding", "the activation of the other sign", "squares behind o", "rotated the other way"),
    *("a larger embedding of a prompt", "the norm behind down behind o in a pass"),
    "the activation of the other sign in a pass",
)


def with_all_bugs(made: Generated, bugs: Sequence[SamplingBug]) -> Generated:
    """None of them on."""
    head, end, body = made.text.partition("#endif\n")
    for number, bug in enumerate(bugs, 1):
        body = bug.planted(body, number)
    text = head + end + SELECTOR + body
    return replace(made, text=text, manifest=replace(made.manifest, text_sha256=sha256_of_text(text)))


@cache
def judged_kernel() -> JudgedSteps:
    plan = {"max_context": 64, "max_steps": 16, "batch": 2, "consumer_warps": 2}
    subject = awkward_subject(open_checkpoint(DEMO).config, plan, layers=2)
    made = with_all_bugs(generate_kernel(subject.config, subject.machine("emulator-2"), **subject.plan), BUGS)
    return JudgedSteps(Rig(subject.weights, made, watched=True))


@cache
def judged_passes() -> JudgedPasses:
    config = open_checkpoint(DEMO).config
    subject = awkward_subject(config, {"max_context": 64}, layers=2)
    case = _passes(subject, "emulator", default_pass_plan)
    passes, head = case.made
    return JudgedPasses(Rig(case.subject.weights, with_all_bugs(passes, OF_PASSES), joined(head, []), watched=True))


def said_of(judged: JudgedSteps | JudgedPasses) -> str:
    """What a run shows."""
    if isinstance(judged, JudgedSteps):
        judged._has_explained = False
    try:
        return str(judged.agreement(judged.run("random", 1)))
    except EmulatorError as error:
        return str(error)


@pytest.mark.parametrize("name", tiered(BY_NAME, EXHAUSTIVE))
def test_the_first_vector_that_is_off_is_named(name: str) -> None:
    bug = BY_NAME[name]
    judged, bugs = (judged_kernel(), BUGS) if bug in BUGS else (judged_passes(), OF_PASSES)
    with chosen(judged.rig, bugs.index(bug) + 1):
        said = said_of(judged)
    assert f"first off: {bug.found_by}" in said, said


def test_in_passes_as_they_are_nothing_is_off() -> None:
    judged = judged_passes()
    found = judged.run("random", 1)
    assert judged.agreement(found).ok
    assert judged.first_off(found, 0.0).startswith("phase lm_head, or")


def test_rows_that_are_kept_for_a_norm_are_no_store_to_the_residual() -> None:
    config, gpu = preset("gemma-3-1b"), gpu_named("h200")
    plan = default_plan(gpu, config.shape)
    vectors = vectors_of_passes(PassSizes(config, gpu, plan, default_pass_plan(gpu, 512, config.shape)))
    onto_residual = [(one.name, one.stores, one.before) for one in vectors if one.name in ("middle", "hidden")]
    assert onto_residual == [("middle", 2, 1), ("hidden", 2, 1)]
