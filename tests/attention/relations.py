"""What relates one case to another, or a result to its numbers; on the device that the case's core names.

Errors are relative L2 of each (row, head): the largest output of 33,001 random keys is 0.03, and an absolute tolerance
that suits one key would hide anything there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from tests.attention.adapter import OUTPUT_TOLERANCE, attend
from tests.attention.cases import Array, Case, rounded
from tests.attention.reference import State
from tests.tolerances import ATTENTION_LSE


def output_error(found: Array, expected: Array) -> float:
    """The largest relative L2 error of a (row, head); rows that must be 0 must be 0 exactly."""
    assert found.shape == expected.shape
    norms = np.linalg.norm(expected, axis=-1)
    errors = np.linalg.norm(found.astype(np.float64) - expected, axis=-1)
    assert (errors[norms == 0] == 0).all()
    return float(np.max(errors[norms > 0] / norms[norms > 0], initial=0.0))


def lse_error(found: Array, expected: Array) -> float:
    """The largest error of an LSE over max(1, |LSE|); -inf only where it is expected."""
    assert found.shape == expected.shape
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    real = np.isfinite(expected)
    errors = np.abs(found[real].astype(np.float64) - expected[real]) / np.maximum(1, np.abs(expected[real]))
    return float(np.max(errors, initial=0.0))


def assert_close(found: State, expected: State, what: object = "", factor: float = 1.0) -> None:
    """To the tolerances; factor 2 where both sides are a kernel's."""
    assert np.isfinite(found.output).all(), what
    assert output_error(found.output, expected.output.astype(np.float64)) < factor * OUTPUT_TOLERANCE, what
    assert lse_error(found.lse, expected.lse.astype(np.float64)) < factor * ATTENTION_LSE, what


def assert_meaning(case: Case) -> State:
    """The kernel gives what the float64 reference gives."""
    found = attend(case)
    assert_close(found, case.expected(), describe(case))
    return found


def assert_same_bits(cases: Iterable[Case]) -> State:
    """The kernel gives equal bits for all of them."""
    first, *others = cases
    expected = attend(first)
    for case in others:
        assert_equal(attend(case), expected, describe(case))
    return expected


def assert_equal(found: State, expected: State, what: object = "") -> None:
    assert found.output.tobytes() == expected.output.tobytes(), what
    assert found.lse.tobytes() == expected.lse.tobytes(), what


def describe(case: Case) -> str:
    lengths = [keys.shape[1] for keys in case.keys]
    numbers = (
        f"lengths {lengths}, queries {[*map(len, case.queries)]}, offsets {[*map(case.offset, range(case.batch))]}"
    )
    return f"{case.core}: {numbers}, chunk {case.chunk}"


def rows_of(state: State, case: Case, request: int) -> State:
    part = slice(case.rows[request], case.rows[request + 1])
    return State(state.output[part], state.lse[part])


def joined(states: Iterable[State]) -> State:
    listed = list(states)
    return State(np.concatenate([s.output for s in listed]), np.concatenate([s.lse for s in listed]))


def with_needle(case: Case, request: int, place: int, height: float = 60.0) -> Case:
    """The last query's first head in each group finds one key `height` logits above the rest, at `place`."""
    queries = case.queries[request][-1, :: case.core.group]
    keys = case.keys[request] * np.float32(0.01)
    norms = (queries**2).sum(axis=1, keepdims=True)
    keys[:, place] = rounded(queries * (height * np.sqrt(case.core.head_dim) / norms))
    changed = tuple(keys if b == request else other for b, other in enumerate(case.keys))
    return replace(case, keys=tuple(rounded(part) for part in changed))


def edges(limit: int, sizes: Iterable[int]) -> list[int]:
    """The last and the first place on either side of every multiple of the sizes, below the limit; and both ends."""
    multiples = {multiple for size in sizes for multiple in range(0, limit + 1, size)}
    return sorted({place for edge in multiples | {limit} for place in (edge - 1, edge) if 0 <= place < limit})
