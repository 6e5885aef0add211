"""Of wrong numbers `cheetah check` names the first vector of the first phase that is off: here in the awkward model's
kernel with two layers and all the bugs, of which a variable says which there is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

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
        "layer 0, phase qkv: qkv of position 1, query head 0, dim ",
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
NUMBERS = {bug.name: number for number, bug in enumerate(BUGS, 1)}
BY_NAME = {bug.name: bug for bug in BUGS}
EXHAUSTIVE = ("a larger embedding", "the activation of the other sign", "squares behind o", "rotated the other way")


def with_all_bugs(made: Generated) -> Generated:
    """None of them on."""
    head, end, body = made.text.partition("#endif\n")
    for number, bug in enumerate(BUGS, 1):
        body = bug.planted(body, number)
    text = head + end + SELECTOR + body
    return replace(made, text=text, manifest=replace(made.manifest, text_sha256=sha256_of_text(text)))


@cache
def judged_kernel() -> JudgedSteps:
    subject = awkward_subject(open_checkpoint(DEMO).config, {"max_context": 64, "max_steps": 16, "batch": 2}, layers=2)
    made = with_all_bugs(generate_kernel(subject.config, subject.machine("emulator"), **subject.plan))
    return JudgedSteps(Rig(subject.weights, made, watched=True))


def said_of(judged: JudgedSteps) -> str:
    """What a run shows."""
    judged._has_explained = False
    try:
        return str(judged.agreement(judged.run("random", 1)))
    except EmulatorError as error:
        return str(error)


@pytest.mark.parametrize("name", tiered(BY_NAME, EXHAUSTIVE))
def test_the_first_vector_that_is_off_is_named(name: str) -> None:
    judged = judged_kernel()
    with chosen(judged.rig, NUMBERS[name]):
        said = said_of(judged)
    assert f"first off: {BY_NAME[name].found_by}" in said, said
