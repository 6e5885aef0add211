"""Sequences of a model that remembers beside its pages: several answers to a prompt, and who has to give its pages
back."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import pytest
from safetensors.numpy import save_file

from cheetah import LLM, SamplingParams
from cheetah.models.registry import read_config
from cheetah.runtime.assembly.kernels import MOST_PREFIX_STATES
from tests.cli.commands import refused
from tests.program.test_hybrids import hybrid, weights
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

PROMPTS = [[3, 5, 7, 9, 11, 13, 2], [8, 1, 4], [20, 30, 40, 10, 2]]
TOKENS = 20


def params(**asked: Any) -> SamplingParams:
    chosen: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **asked}
    return SamplingParams(**chosen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    config = hybrid(1, 2, (0, 1, 2), layers=4, heads=2, dims=128)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def opened(folder: Path, **options: Any) -> LLM:
    chosen: dict[str, Any] = {
        "batch": 3,
        "max_context": 32,
        "prompt_tokens": 4,
        "kv_chunk": 16,
        "gpu": "emulator-2",
        **options,
    }
    return LLM(f"random:{folder}", device="emulator", quiet=True, plan={"consumer_warps": 2}, **chosen)


def answers(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> list[list[tuple[int, ...]]]:
    asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
    found: Any = llm.generate(asked, sampling)
    return [[one.token_ids for one in output.outputs] for output in found]


@cache
def alone(folder: Path) -> list[tuple[int, ...]]:
    """Each prompt's answer, one after another."""
    with opened(folder) as llm:
        return [answers(llm, [ids], params())[0][0] for ids in PROMPTS]


def test_answers_are_those_of_each_alone_also_where_pages_are_few(folder: Path) -> None:
    """Pages of 16 tokens: three sequences of up to 27 need 6, and have 4."""
    with opened(folder, pool_pages=4, launch_steps=4) as llm:
        found = answers(llm, PROMPTS, params())
        assert [one for (one,) in found] == alone(folder)
        load = llm.engine.engine.load()
        assert load.preemptions > 0
        pool = llm.engine.engine.launcher.cache.pool
        assert pool.free_pages == pool.pages and pool.states.free == pool.states.count == 4 + MOST_PREFIX_STATES


def test_answers_to_one_prompt_go_on_from_what_it_left(folder: Path) -> None:
    """Three that are sampled with seeds of their own, beside the same ones asked for one by one."""
    sampling = params(temperature=1.0, seed=5)
    with opened(folder) as llm:
        ((*several,),) = answers(llm, PROMPTS[:1], params(temperature=1.0, seed=5, n=3))
        assert len(set(several)) == 3 and answers(llm, PROMPTS[:1], sampling)[0][0] == several[0]
        assert answers(llm, PROMPTS[:1], params(n=2))[0] == [alone(folder)[0]] * 2


@pytest.mark.parametrize("passes", tiered([False, 64], [64]))
def test_what_begins_with_a_kept_state_has_the_bits_of_what_was_read_whole(
    folder: Path, passes: bool | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the state behind the first page is left of a longer prompt, and of answers read again."""
    monkeypatch.setattr("cheetah.runtime.engine.prefill_rules.LEAST_KEPT", 16)
    prompt, sampling = [number * 7 % 50 for number in range(22)], params(max_tokens=5, logprobs=2)

    def made(llm: LLM, ids: list[int]) -> tuple[int, Any]:
        output: Any = llm.generate([{"prompt_token_ids": ids}], sampling)[0]
        return output.timings.cached_tokens, (output.outputs[0].token_ids, output.outputs[0].logprobs)

    with opened(folder, prefix_cache=False, prompt_passes=passes) as llm:
        assert llm.prefix_cache is None
        whole = [made(llm, ids) for ids in (prompt, [*prompt[:18], 1, 2])]
    with opened(folder, prefix_states=1, prompt_passes=passes) as llm:
        assert made(llm, prompt) == whole[0] and [made(llm, prompt), made(llm, [*prompt[:18], 1, 2])] == [
            (16, one) for _, one in whole
        ]
        assert "(4 of 438.0 KB, and 1 for prompts that begin alike)" in llm.memory.table()


def test_drafts_change_no_answer(folder: Path) -> None:
    """What stood behind the same tokens is looked up; what is allowed repeats itself. Beside prompts that go on from a
    kept state, who is stopped, and kernels that draft nothing."""
    few = params(temperature=0.7, seed=3, allowed_token_ids=[2, 9, 11], stop_token_ids=[9], min_tokens=6, n=2)
    prompts = [[number % 5 for number in range(18)], PROMPTS[0]]
    with opened(folder, kv_chunk=32, max_context=64) as llm:
        wanted = [answers(llm, prompts, asked) for asked in (params(allowed_token_ids=[7, 11]), few)]
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    with opened(folder, kv_chunk=32, max_context=64, speculative_config=speculation) as llm:
        found = [answers(llm, prompts, asked) for asked in (params(allowed_token_ids=[7, 11]), few)]
        assert found == wanted and [answers(llm, prompts, few)] == wanted[1:]
        assert llm.engine.engine.load().decoded.drafted.accepted > 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["random:eagle3", "random:dspark"])
def test_what_another_model_drafts_changes_no_answer(tmp_path: Path, model: str) -> None:
    """In rounds on the device: each ends with states of what was right."""
    config = hybrid(1, 2, (0, 1, 2, 4, 5, 6), layers=8, heads=2, dims=128)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with opened(tmp_path, kv_chunk=32, max_context=64) as llm:
        wanted = answers(llm, PROMPTS, params())
    speculation = {"model": model, "num_speculative_tokens": 3}
    with opened(tmp_path, kv_chunk=32, max_context=64, batch=2, tokenizer=False, speculative_config=speculation) as llm:
        assert answers(llm, PROMPTS, params()) == wanted == answers(llm, PROMPTS, params())


def test_commands_that_would_make_what_no_kernel_has_refuse_such_models(folder: Path, tmp_path: Path) -> None:
    tensors = weights(read_config(folder / "config.json")).tensors
    stored = {name: one.view(ml_dtypes.bfloat16) if one.itemsize == 2 else one for name, one in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert "have no sparse weights" in refused("sparsify", tmp_path, "--out", tmp_path / "made")
    text = ("--text", tmp_path / "config.json")
    assert "are cached in bf16 alone" in refused("calibrate", tmp_path, "--out", tmp_path / "made", *text)
    assert not (tmp_path / "made").exists()
