"""SamplingParams: checked at once, refused by name; stop ids and defaults from a checkpoint."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from cheetah.errors import CheetahError
from cheetah.models.sampling import Filters, Penalties
from cheetah.runtime.engine.launch_tables import Sampling
from cheetah.runtime.sampling import (
    SamplingParams,
    as_token_ids,
    sampling_of,
    sampling_of_checkpoint,
    seed_of,
    stop_ids,
)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"temperature": -0.1}, r"temperature=-0.1: expected a number from 0 \(greedy\) to 1e6"),
        ({"temperature": 10**400}, "temperature=an integer of about 401 digits"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": 1e-9}, "write 0 for greedy"),
        ({"max_tokens": 0}, "max_tokens=0: expected an integer >= 1"),
        ({"max_tokens": 1.5}, "max_tokens=1.5"),
        ({"n": 0}, "n=0: expected an integer >= 1"),
        ({"n": True}, "n=True"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "from 0 to 2"),
        ({"stop": [""]}, "at least one character"),
        ({"stop": [3]}, "stop: 3 is not a text"),
        ({"stop_token_ids": [-2]}, "-2 is not a token id"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is more than max_tokens=8"),
        ({"top_p": 0}, "top_p=0: expected a number above 0, up to 1"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"top_k": -2}, "top_k=-2: expected an integer >= 1, or 0 or -1 for all tokens"),
        ({"min_p": 1.5}, "min_p=1.5: expected a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: expected a number from 0.001"),
        ({"presence_penalty": 3}, "presence_penalty=3: expected a number from -2 to 2"),
        ({"logit_bias": {5: "much"}}, "logit_bias: 'much' of token 5 is not a number"),
        ({"logit_bias": {"five": 1}}, "logit_bias: 'five' is not a token id"),
        ({"allowed_token_ids": []}, "expected at least one token id"),
        ({"bad_words": [" "]}, "bad_words: ' ' is not a word"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0: expected an integer >= 1"),
        ({"typical_p": 0.9}, "typical_p is not supported: supported are temperature, max_tokens, seed"),
        ({"max_new_tokens": 5}, "max_new_tokens is not supported: write max_tokens"),
        ({"logprobs": 21}, "logprobs=21: expected an integer from 0 to 20, or None"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1: expected an integer from 0 to 20"),
        ({"skip_special_tokens": 1}, "skip_special_tokens=1: expected True or False"),
        ({"temprature": 1.0}, "temprature is not a sampling parameter: supported are temperature"),
    ],
)
def test_each_mistake_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CheetahError, match=message):
        SamplingParams(**given)


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(CheetahError, match="takes names"):
        SamplingParams(0.8)  # type: ignore[misc]


def test_one_stop_string_becomes_a_tuple_and_values_travel() -> None:
    params = SamplingParams(temperature=0.7, stop="x", stop_token_ids=[5])
    assert params.stop == ("x",) and params.stop_token_ids == (5,)
    assert copy.copy(params) == params == pickle.loads(pickle.dumps(params))
    assert dataclasses.replace(params, seed=3).seed == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    "generation, config_eos, expected",
    [
        (None, None, ()),
        ({"eos_token_id": 2}, None, (2,)),
        ({}, 2, (2,)),
        ({"eos_token_id": [128001, 128008, 128009]}, 128009, (128001, 128008, 128009)),
        ({"eos_token_id": [9, 3]}, [3, 4], (3, 4, 9)),
    ],
)
def test_end_ids_are_the_union(generation: dict[str, Any] | None, config_eos: Any, expected: tuple[int, ...]) -> None:
    assert sampling_of_checkpoint(generation, config_eos)[0].stop_ids == expected


def test_differing_end_ids_are_noted_in_one_line() -> None:
    assert sampling_of_checkpoint({"eos_token_id": 2}, 2)[1] == ()
    (note,) = sampling_of_checkpoint({"eos_token_id": [2, 5]}, 3)[1]
    assert "[2, 3, 5]" in note and "\n" not in note


@pytest.mark.parametrize("entry", [-1, "2", [True], 1.0, 2**31, 10**30])
def test_end_ids_of_another_kind_are_refused(entry: Any) -> None:
    with pytest.raises(CheetahError, match="is not a token id"):
        sampling_of_checkpoint({"eos_token_id": entry})


def test_stop_ids_are_the_checkpoints_and_the_callers() -> None:
    defaults = Sampling(stop_ids=(2, 7))
    assert stop_ids(SamplingParams(stop_token_ids=[5, 2]), defaults) == (2, 5, 7)
    assert stop_ids(SamplingParams(stop_token_ids=[5], ignore_eos=True), defaults) == (5,)


@pytest.mark.parametrize(
    "generation, expected",
    [
        (None, 0.0),
        ({"temperature": 0.6}, 0.0),
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": True, "temperature": 0.6}, 0.6),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0}, 0.0),
    ],
)
def test_temperature_comes_from_the_checkpoint_only_if_it_samples(
    generation: dict[str, Any] | None, expected: float
) -> None:
    assert sampling_of_checkpoint(generation)[0].temperature == expected


@pytest.mark.parametrize("value", [-1, "hot", True, 10**400, 1e300])
def test_a_default_temperature_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(CheetahError, match="generation_config.json: temperature .* is not a number from 0 to 1e6"):
        sampling_of_checkpoint({"do_sample": True, "temperature": value})


def test_defaults_that_cannot_be_honoured_are_noted() -> None:
    (note,) = sampling_of_checkpoint({"do_sample": True, "typical_p": 0.9, "min_p": None})[1]
    assert "typical_p=0.9" in note and "min_p" not in note


def test_filters_and_penalties_come_from_the_checkpoint_where_a_request_has_none() -> None:
    generation = {"do_sample": True, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "min_p": None}
    defaults, _ = sampling_of_checkpoint(generation, seed=3)
    assert defaults.filters == Filters(50, 0.9) and defaults.penalties == Penalties(1.1)
    found = sampling_of(SamplingParams(top_k=-1, presence_penalty=0.5), defaults, 100)
    assert found.filters == Filters(0, 0.9) and found.penalties == Penalties(1.1, 0.5) and found.seed == 3
    with pytest.raises(CheetahError, match="generation_config.json: top_p='x'"):
        sampling_of_checkpoint({"top_p": "x"})


def test_tokens_of_a_request_are_in_the_vocabulary() -> None:
    params = SamplingParams(logit_bias={"7": 2, 3: float("-inf")}, allowed_token_ids=[9, 3, 9])
    found = sampling_of(params, Sampling(), 100, banned=[8, 8])
    assert found.bias == ((3, float("-inf")), (7, 2.0)) and found.allowed == (3, 9) and found.banned == (8,)
    with pytest.raises(CheetahError, match=r"logit_bias: id 7 is outside the vocabulary 0\.\.4"):
        sampling_of(params, Sampling(), 5)
    assert sampling_of_checkpoint({"do_sample": False, "top_p": 0.9})[1] == ()


def test_ids_outside_the_vocabulary_are_refused_with_their_place() -> None:
    assert as_token_ids([0, 31], 32) == (0, 31)
    with pytest.raises(CheetahError, match=r"prompt: id 32 at position 1 is outside the vocabulary 0\.\.31"):
        as_token_ids([0, 32], 32)
    with pytest.raises(CheetahError, match="id -1"):
        as_token_ids([-1], 32)
    with pytest.raises(CheetahError, match="has no tokens"):
        as_token_ids([], 32)


def test_seeds_of_completions_are_their_own_and_do_not_change() -> None:
    assert [seed_of(0, i) for i in range(3)] == [0, 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # SplitMix64's, seed 0
    found = {seed_of(seed, i) for seed in (0, 1, 2, 2**64 - 1) for i in range(100)}
    assert len(found) == 400 and all(0 <= seed < 2**64 for seed in found)
