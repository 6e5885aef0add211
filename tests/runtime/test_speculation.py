"""`speculative_config`: what it may say, how columns are shared, and that a model answers the same with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import exp
from typing import Any

import pytest

from cheetah.errors import CheetahError
from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime import llm as llm_module
from cheetah.runtime.engine.drafting import LEAST_RATIO, Drafted, Pace, ReplayedWorth, Speculation, first_steps
from cheetah.runtime.engine.step_launches import StepLaunches
from cheetah.runtime.speculation import draft_model_of, speculation_of


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"method": "ngram"}, Speculation(7, (2, 5))),
        ('{"method": "ngram_gpu", "num_speculative_tokens": 3}', Speculation(3, (2, 5))),
        ({"model": "[ngram]", "prompt_lookup_max": 4}, Speculation(7, (4, 4))),
        ({"prompt_lookup_min": 3}, Speculation(7, (3, 3))),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 3, "enforce_eager": True}, Speculation(7, (1, 3))),
        ({"method": "ngram", "rejection_sample_method": "standard"}, Speculation(7, (2, 5))),
        ({"model": "meta-llama/Llama-3.2-1B"}, Speculation(4)),
        ({"method": "draft_model", "model": "some/model", "num_speculative_tokens": 5}, Speculation(5)),
        ({"method": "eagle3", "model": "some/head", "num_speculative_tokens": 3}, Speculation(3)),
    ],
)
def test_what_a_config_says(config: Any, wanted: Speculation) -> None:
    assert speculation_of(config) == wanted
    assert (draft_model_of(config) is not None) == wanted.by_model


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"method": "eagle", "model": "some/head"}, "method 'eagle' is not there"),
        ({"method": "eagle3"}, "method eagle3 needs `model`"),
        ({"method": "eagle3", "model": "some/head", "prompt_lookup_max": 3}, "prompt_lookup_max 3 of method eagle3"),
        ({"method": "draft_model"}, "needs `model`"),
        ({"model": "some/model", "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"model": "some/model", "draft_sample_method": "greedy"}, "greedy"),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, "which has no model"),
        ({"model": "some/model", "revision": 3}, "expected a text"),
        ({"method": "ngram", "quantization": "gptq"}, "quantization"),
        ({"method": "n-gram"}, "n-gram"),
        ({"method": "ngram", "model": "some/model"}, "some/model"),
        ({"method": "ngram", "draft_tensor_parallel": 1}, "draft_tensor_parallel"),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, "synthetic"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 32}, "num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"prompt_lookup_max": 33}, "prompt_lookup_max"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min"),
        ("{method}", "JSON"),
        ("[]", "dict"),
    ],
)
def test_what_is_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(CheetahError, match="speculative_config") as refused:
        draft_model_of(config)
        speculation_of(config)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("wanted", "columns", "widths"),
    [
        ([True], 8, [8]),
        ([True], 16, [8]),
        ([False], 8, [1]),
        ([True, True], 8, [4, 4]),
        ([True, False, True], 8, [4, 1, 3]),
        ([2.0, 0.0, 3.0], 8, [3, 1, 4]),
        ([1.1, 1.5, 1.2, 1.3, 1.4], 8, [1, 2, 1, 2, 2]),
        ([True] * 8, 8, [1] * 8),
        ([True] * 7, 8, [2] + [1] * 6),
    ],
)
def test_who_has_how_many_columns(wanted: list[float], columns: int, widths: list[int]) -> None:
    assert Speculation(7, (2, 5)).widths(wanted, columns) == widths


def test_what_came_of_drafts_adds_up() -> None:
    assert Drafted(2, 9, (2, 1)) + Drafted(1, 4, (1, 1, 1)) == Drafted(3, 13, (3, 2, 1))
    assert Drafted(3, 13, (3, 2, 1)).accepted == 6


def test_a_mean_length_forgets_and_what_was_made_without_drafts_is_replayed() -> None:
    worth = ReplayedWorth(Speculation(3, (2, 5)))
    ids = list(range(40))
    assert worth.length == 2.0
    for _ in range(30):  # what never comes true
        ids += [len(ids) + 1000, len(ids) + 2000]
        worth.note(ids, 2, steps=2)
    assert worth.length == pytest.approx(1.0 + exp(-60 / 8))
    for _ in range(5):  # nothing repeats itself
        ids += [len(ids) + 3000]
        worth.note(ids, 1, steps=None)
    known = worth.length
    ids += [*range(10, 30)]  # in one launch without drafts: 10 and 11 are new, then 3 drafts of each step are right
    worth.note(ids, 20, steps=None)
    assert worth.length == pytest.approx(20 / 7 + (known - 20 / 7) * exp(-7 / 8))
    assert first_steps(51, [worth, None]) == 16 and first_steps(7, [None]) == 7 and first_steps(51, [worth]) == 51


def test_drafts_pay_from_what_their_steps_take_more() -> None:
    pace = Pace()
    assert pace.break_even(1) == 1.1 and not pace.lacks_plain(1), "before anything was measured"
    pace.note(1, True, 3, 9.0)
    assert not pace.lacks_plain(1), "three steps say nothing"
    pace.note(1, True, 10, 1.3)
    assert pace.lacks_plain(1) and not pace.lacks_plain(2)
    pace.note(1, False, 10, 1.0)
    assert pace.break_even(1) == pytest.approx(1.3) and not pace.lacks_plain(1)
    pace.note(1, True, 10, 2.3)
    assert pace.break_even(1) == pytest.approx(1.6), "1.3 + 0.3 * 1.0"
    pace.note(1, False, 10, 9.0)
    assert pace.break_even(1) == 1.02, "drafts are never for nothing"
    pace.note(2, True, 4, 1.0)
    pace.note(2, False, 1, 1.0)
    assert pace.break_even(2) == 1.1 and not pace.lacks_plain(2), "one launch without drafts is tried"


asked_of = llm_module.assembly_options
TEXT = "the cat sat on the mat and the cat sat on the mat and the cat"
ASKED = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 1.1, "seed": 1, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 1.3, "seed": 2, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": list(range(100, 500))},
    {"temperature": 0.7, "seed": 3, "bad_words": ["and the"], "logit_bias": {"5": 1.0}},
    {"temperature": 0.5, "seed": 8, "structured_outputs": {"regex": "the cat sat on the (mat|hat) and then [a-z ]{9}"}},
    {"temperature": 0.8, "seed": 6, "n": 3},
]


def opened(**more: Any) -> LLM:
    """As on a GPU: prompts are read in passes; who is alone, and has no drafts, is decoded by another kernel. Launches
    of a few steps: in one of each engine nothing is drafted. What drafts must make to pay is given, and not
    measured: how long steps take on a busy host must decide nothing here."""
    config = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1}
    options: dict[str, Any] = {"batch": 4, "speculative_config": config, "max_context": 192, "launch_steps": 8}
    plan = {"consumer_warps": 2, **more.pop("plan", {})}  # two blocks of two warps: half of the emulator's time
    options |= {"prompt_passes": True, "gpu": "emulator-2", "plan": plan, **more}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "assembly_options", lambda *known: replace(asked_of(*known), solo=True))
        made = LLM("demo", device="emulator", quiet=True, **options)
    pace = made.engine.engine._scheduler._pace
    pace.break_even = lambda sequences: LEAST_RATIO  # type: ignore[method-assign]
    return made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with opened() as made:
        yield made


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: " ".join(asked))
def test_the_same_answer_with_and_without(llm: LLM, asked: dict[str, Any]) -> None:
    before = llm.engine.engine.load().decoded
    found, plain = (
        llm.generate(TEXT, SamplingParams(max_tokens=24, speculation=speculation, **asked))
        for speculation in (True, False)
    )
    assert [one.token_ids for one in found.outputs] == [one.token_ids for one in plain.outputs]
    after = llm.engine.engine.load().decoded
    drafted = sum(one.timings.drafted_tokens for one in found.outputs)
    accepted = sum(one.timings.accepted_tokens for one in found.outputs)
    assert after.drafted.tokens - before.drafted.tokens == drafted > 0
    assert after.drafted.accepted - before.drafted.accepted == accepted
    assert accepted > 4 or "structured_outputs" not in asked
    assert not any(one.timings.drafted_tokens for one in plain.outputs)


@pytest.mark.slow
@pytest.mark.compiler
def test_a_prediction_is_looked_up_first_and_changes_nothing(llm: LLM) -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 40}
    plain = llm.generate(TEXT, SamplingParams(speculation=False, **asked))
    for prediction in (plain.text, plain.token_ids):
        found = llm.generate(TEXT, SamplingParams(prediction=prediction, **asked))
        assert found.token_ids == plain.token_ids
        assert found.timings.accepted_tokens > 20
    with pytest.raises(CheetahError, match="prediction: expected|expected a text, or token ids"):
        SamplingParams(prediction=[0.5])  # type: ignore[list-item]


@pytest.mark.slow
@pytest.mark.compiler
def test_pages_that_run_out_and_answers_that_are_given_up(llm: LLM) -> None:
    """Who gives pages back reads again what it had, several tokens a step. Who leaves in the middle of a launch, by
    itself or by a stop string, changes nothing for the others. All prompts begin alike, and are cached."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.4},
        {"temperature": 0.7, "seed": 5, "top_p": 0.9},
        {"temperature": 0.0, "stop": ["the mat"]},
    ]
    prompts = [TEXT + " " * (number > 1) + " and" * (number > 2) for number in range(4)]
    plain = [SamplingParams(max_tokens=44, speculation=False, **kind) for kind in kinds]
    wanted = [one.token_ids for one in llm.generate(prompts, plain, use_tqdm=False)]
    with opened(pool_pages=12, launch_steps=2, plan={"page_size": 16}) as few:
        found = few.generate(prompts, [replace(one, speculation=True) for one in plain], use_tqdm=False)
        assert [one.token_ids for one in found] == wanted
        assert few.engine.engine.load().preemptions > 0
        assert sum(one.timings.drafted_tokens for one in found) > 0
        left = few.stream(prompts[0], SamplingParams(max_tokens=60, temperature=1.0))
        next(left)
        left.close()
        again = few.generate(prompts[1], replace(plain[1], speculation=True))
        assert again.token_ids == wanted[1] and again.timings.cached_tokens > 0


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("top_p", "columns"), [(1.0, 1), (0.5, 8)])
def test_who_is_alone_without_drafts_has_a_kernel_of_one_column(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, top_p: float, columns: int
) -> None:
    """But for who is filtered: sums of top-p follow from the kernel."""
    used = []
    prepare = StepLaunches.prepare
    monkeypatch.setattr(StepLaunches, "prepare", lambda own, *more: (used.append(own.tokens), prepare(own, *more))[1])
    llm.generate(TEXT, SamplingParams(max_tokens=3, temperature=1.0, top_p=top_p, speculation=False))
    assert used[-1] == columns


@pytest.mark.slow
@pytest.mark.compiler
def test_the_same_answers_in_company_and_metrics_by_vllm_s_names(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=12, temperature=0.6, seed=seed, logprobs=2) for seed in range(5)]
    together = llm.generate([TEXT] * 5, params)
    for output, one in zip(together, params, strict=True):
        alone = llm.generate(TEXT, one)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.outputs[0].logprobs == alone.outputs[0].logprobs
    drafted = llm.engine.engine.load().decoded.drafted
    metrics = {(one.name, one.labels.get("position")): one.value for one in llm.get_metrics()}
    assert metrics["vllm:spec_decode_num_drafts", None] == drafted.steps > 0
    assert metrics["vllm:spec_decode_num_draft_tokens", None] == drafted.tokens
    assert metrics["vllm:spec_decode_num_accepted_tokens", None] == drafted.accepted
    assert metrics["vllm:spec_decode_num_accepted_tokens_per_pos", "0"] == drafted.right[0]
