"""What layers leave of the residual stream, kept by steps and passes: `cheetah check --taps` finds what is planted in
it, and nothing without."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cheetah.errors import CheetahError
from cheetah.generate import choose_plan, describe_kernel, describe_pass
from cheetah.models.registry import preset
from cheetah.package import Generated
from cheetah.plan import PlanError, gpu_named
from cheetah.plan.gpu import together
from cheetah.plan.prompt import default_pass_plan
from cheetah.tools.check import Case, _pass_makers, _step_makers
from cheetah.tools.judged_taps import JudgedTaps, JudgedTapsOfPasses
from cheetah.tools.rig import Rig
from cheetah.tools.subjects import Subject
from tests.program.joined import SELECTOR, chosen
from tests.program.planted_sampling import SamplingBug
from tests.tiers import tiered

BUGS = {
    "steps": (
        SamplingBug("two layers change places", r"36u(?= >> layer)", "33u"),
        SamplingBug("every step over the first one's rows", r"step \* 8(?= \+ \(\()", "0u"),
        SamplingBug("every column over the first one's row", r"(?<=\(place \+ )column(?= \* 2\))", "0u"),
        SamplingBug("times the weights of the next norm", r"(?<== f32_to_bf16\()value(?=\))", "value * weight"),
    ),
    "passes": (
        SamplingBug("what attention leaves", r"phase <= 4(?= \? 4294967295u : \(\(\(36u)", "phase > 4"),
        SamplingBug("two tokens in one row", r"lane % 4 \* 2 \+ 1(?=;)", "lane % 4 * 2"),
        SamplingBug("eight rows over eight others", r"(?<=kept_\d\[)8(?=\] =)", "0"),
    ),
}
KINDS = {"steps": JudgedTaps, "passes": JudgedTapsOfPasses}


def case_of(kind: str, model: str = "qwen3-0.6b", ranks: int = 1) -> Case:
    """The one that the check has of a model where the options name layers."""
    subject = Subject("it", preset(model), dict[str, Any]().__getitem__, {"max_context": 128, "taps": "1"})
    gpu = together(gpu_named("emulator"), ranks).name
    makers = {"steps": _step_makers, "passes": _pass_makers}[kind](subject, gpu)
    (case,) = (maker() for maker in makers if KINDS[kind] in (*maker.args, maker.keywords.get("judged")))
    return case


@cache
def planted(kind: str) -> Any:
    """As the check judges a kernel with all bugs in it, none of them on."""
    case = case_of(kind)

    def with_bugs(made: Generated) -> Generated:
        head, end, body = made.text.partition("#endif\n")
        for number, bug in enumerate(BUGS[kind] if made is case.made[0] else (), 1):
            body = bug.planted(body, number)
        return made.with_text(head + end + SELECTOR + body)

    return case.judged(Rig(case.subject.weights, *map(with_bugs, case.made), watched=True))


def finding(kind: str) -> str:
    """What the check says of one run."""
    try:
        agreement = planted(kind).agreement(planted(kind).run("random", 1))
    except CheetahError as error:
        return str(error)
    return "\n".join(agreement.problems)


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", tiered(KINDS, ["passes"]))
def test_nothing_is_found_in_kernels_as_they_are_and_every_bug_that_is_planted(kind: str) -> None:
    assert finding(kind) == ""
    for number, bug in enumerate(BUGS[kind], 1):
        with chosen(planted(kind).rig, number):
            assert re.search(r"what is kept of layer \d of position \d+ is ", finding(kind)), bug.name


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "ranks"), [("gemma-3-1b", 1), ("mixtral-8x7b", 2)])
def test_other_families_keep_what_their_layers_leave(model: str, ranks: int, kind: str) -> None:
    """With norms behind products; with experts, on two GPUs."""
    case = case_of(kind, model, ranks)
    judged = case.judged(Rig(case.subject.weights, *case.made, watched=True))
    agreement = judged.agreement(judged.run("random", 1))  # type: ignore[attr-defined]
    assert agreement.ok, agreement


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3.5-9b"])
def test_a_token_has_a_row_of_each_layer_side_by_side(model: str) -> None:
    """Whatever else is counted by that name."""
    config, gpu = preset(model), gpu_named("h200")
    plan = choose_plan(config, gpu, tokens=8, taps="1,9,17,25,30")
    taps = describe_kernel(config, gpu, plan).buffer("taps")
    assert (taps.shape, taps.dtype) == ((64 * 8, 5, 4096), "bf16")
    of_pass = describe_pass(config, gpu, plan, default_pass_plan(gpu, 2048, config.shape)).buffer("taps")
    assert of_pass.shape == (2048, 5, 4096)


def test_a_plan_without_says_nothing_of_them() -> None:
    config, gpu = preset("qwen3-8b"), gpu_named("h200")
    plan = choose_plan(config, gpu)
    assert "taps" not in plan.to_dict() and replace(plan, taps="3").to_dict()["taps"] == "3"
    assert all(parameter.name != "taps" for parameter in describe_kernel(config, gpu, plan).parameters)


@pytest.mark.parametrize(
    ("taps", "said"),
    [
        ("1;2", "give numbers of layers"),
        ("2,1", "each layer once, ascending"),
        ("1,1", "each layer once, ascending"),
        ("36", "give layers below 36"),
    ],
)
def test_layers_that_cannot_be_kept_are_refused(taps: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        choose_plan(preset("qwen3-8b"), gpu_named("h200"), taps=taps)
