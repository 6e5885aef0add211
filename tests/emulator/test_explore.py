"""Exploring needs no compiler: what it runs is any function of scheduler and seed."""

import numpy as np
import pytest

from cheetah.emulator import SCHEDULERS, Deadlock, explore


def test_the_same_bits_everywhere_are_well() -> None:
    calls = []

    def run(scheduler: str, seed: int) -> bytes:
        calls.append((scheduler, seed))
        return b"same"

    report = explore(run, range(3))
    assert report.ok and report.runs == 9
    assert calls == [(scheduler, seed) for scheduler in SCHEDULERS for seed in range(3)]
    assert str(report) == "9 launches, no error, the same bits in all"


def test_a_difference_is_told_with_its_place() -> None:
    def run(scheduler: str, seed: int) -> list[np.ndarray]:
        x = np.zeros((2, 3), np.float32)
        x[1, 0] = scheduler == "random" and seed == 7
        return [np.zeros(1), x]

    report = explore(run, range(10))
    assert report.failed == {"round_robin": 0, "random": 1, "priority": 0}
    assert str(report) == (
        "1 of 30 launches failed: 1 under random\nrandom, seed 7: different output: output 1 differs from byte 14 on"
    )


def test_nan_is_compared_by_its_bits_and_minus_zero_is_not_zero() -> None:
    assert explore(lambda *_: np.full(2, np.nan), range(2)).ok
    assert not explore(lambda *_: np.zeros(1), range(1), expected=-np.zeros(1)).ok


def test_errors_of_the_emulator_are_collected_and_others_pass() -> None:
    def run(scheduler: str, seed: int) -> bytes:
        raise Deadlock(f"stuck {seed}")

    report = explore(run, range(4), ["priority"], kept_failures=2)
    assert [str(failure) for failure in report.failures] == [
        "priority, seed 0: Deadlock: stuck 0",
        "priority, seed 1: Deadlock: stuck 1",
    ]
    assert report.failed == {"priority": 4}
    with pytest.raises(ZeroDivisionError):
        explore(lambda *_: bytes(1 // 0), range(1))
