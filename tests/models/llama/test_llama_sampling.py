"""Philox against the published test vectors; the Gumbel rule against the distribution it must give."""

import math

import numpy as np
import pytest

from cheetah.models.sampling import (
    Filters,
    Penalties,
    adjusted,
    gumbel_noise,
    kept,
    philox4x32,
    sample,
    uniform,
)
from cheetah.plan.kv.tables import NO_TOKEN
from tests.models.warpers import CASES, answers, as_answer

ONES = 0xFFFFFFFF
KNOWN = [  # counter, key, output: the known-answer tests published with Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_philox_known_answers():
    for counter, key, output in KNOWN:
        assert tuple(int(word) for word in philox4x32(counter, key)) == output


def test_philox_is_elementwise():
    words = philox4x32((np.arange(5), 7, 0, 0), (3, 4))
    alone = philox4x32((3, 7, 0, 0), (3, 4))
    assert [int(word[3]) for word in words] == [int(word) for word in alone]


def test_uniform_is_exact_and_inside_the_open_interval():
    words = np.array([0, 511, 512, ONES], dtype=np.uint32)
    assert uniform(words).dtype == np.float32
    assert uniform(words).tolist() == [2**-24, 2**-24, 3 * 2**-24, 1 - 2**-24]


def test_nan_is_never_taken_and_nothing_is_where_no_logit_is_a_number():
    for temperature in (0.0, 0.7):
        assert sample(np.array([np.nan, -50.0, np.nan], np.float32), temperature, seed=1, position=4) == 1
        for nothing in (np.nan, -np.inf):
            assert sample(np.full(8, nothing, np.float32), temperature, seed=1, position=4) == NO_TOKEN


def test_noise_is_finite_at_both_ends():
    ends = uniform(np.array([0, ONES], dtype=np.uint32))
    assert np.isfinite(-np.log(-np.log(ends))).all()


def test_noise_has_the_mean_and_spread_of_a_gumbel():
    noise = gumbel_noise(np.arange(200_000), seed=2**40 + 5, position=9).astype(np.float64)
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.03


def test_noise_depends_on_each_of_seed_position_and_token():
    noises = {
        float(gumbel_noise(token, seed, position))
        for token in (0, 1)
        for seed in (0, 1, 1 << 32)
        for position in (0, 1)
    }
    assert len(noises) == 12


@pytest.mark.slow
def test_samples_follow_the_softmax():
    logits = np.array([1.0, 0.0, 2.0, -1.0], dtype=np.float32)
    temperature, count = 0.7, 4000
    wanted = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    drawn = np.bincount([sample(logits, temperature, 11, position) for position in range(count)], minlength=4) / count
    assert np.abs(drawn - wanted).max() < 4 * math.sqrt(0.25 / count)


def test_greedy_takes_the_lowest_id_on_ties():
    assert sample(np.array([1.0, 3.0, 3.0], dtype=np.float32), 0, 0, 0) == 1


LOGITS = np.array([2.0, 0.5, -1.0, 1.5, 1.5, -0.25, 3.0, 0.0, -4.0, 1.0], np.float32)


def test_filters_and_the_penalty_are_those_of_transformers() -> None:
    """The answers that transformers gave; on the GPU's machine it is asked again."""
    assert [as_answer(*case.ours()) for case in CASES] == answers()


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        (Filters(top_k=3), [0, 3, 4, 6]),
        (Filters(top_k=4, top_p=0.7), [0, 6]),
        (Filters(top_p=0.75), [0, 3, 4, 6]),
        (Filters(min_p=0.2), [0, 3, 4, 6]),
    ],
    ids=str,
)
def test_tokens_that_tie_are_kept_together(filters: Filters, wanted: list[int]) -> None:
    """Tokens 3 and 4 are equally likely. transformers' top-p keeps as many of them as are needed, by their order."""
    assert np.flatnonzero(kept(LOGITS, filters)).tolist() == wanted


@pytest.mark.parametrize("filters", [Filters(), Filters(top_k=6, top_p=0.93)], ids=["all", "top_k, top_p"])
def test_draws_follow_the_filtered_distribution(filters: Filters) -> None:
    """Pearson's chi-square over 10^5 draws, the highest noisy number of what is kept at as many positions."""
    draws, seed = 100_000, 5
    scaled = LOGITS / np.float32(1.3)
    keep = kept(scaled, filters)
    words = philox4x32((np.arange(LOGITS.size), np.arange(draws)[:, None], 0, 0), (seed, 0))[0]
    noisy = np.where(keep, scaled - np.log(-np.log(uniform(words))), -np.inf)
    found = np.bincount(noisy.argmax(axis=1), minlength=LOGITS.size)
    assert [sample(LOGITS, 1.3, seed, place, filters) for place in range(50)] == noisy.argmax(axis=1)[:50].tolist()
    wanted = np.where(keep, np.exp(scaled), 0) / np.exp(scaled[keep]).sum()
    assert not found[~keep].any()
    chi_square = ((found - draws * wanted)[keep] ** 2 / (draws * wanted[keep])).sum()
    assert chi_square < 40, "at most 9 degrees of freedom: one in 100,000"


def test_penalties_are_those_of_vllm() -> None:
    counts = np.array([2, 0, 1, 0, 0, 0, 0, 0, 0, 0], np.uint32)
    in_prompt = np.arange(10) == 3
    found = adjusted(LOGITS, None, None, Penalties(2.0, 0.5, 0.25), in_prompt, counts)
    wanted = LOGITS.copy()
    wanted[[0, 2, 3]] = [2.0 / 2 - 0.5 - 2 * 0.25, -1.0 * 2 - 0.5 - 0.25, 1.5 / 2]
    np.testing.assert_array_equal(found, wanted)
