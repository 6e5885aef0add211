"""The draws alone: Philox words bit for bit, and Gumbel noise, against numpy."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from cheetah import lang as ch
from cheetah.blocks.sampling import gumbel, philox_word
from cheetah.emulator import allocate
from cheetah.lang import ty
from cheetah.models.sampling import gumbel_noise, philox4x32
from cheetah.plan import ModelShape
from tests.blocks.small_kernel import SmallKernel, plan_of

pytestmark = pytest.mark.compiler

COUNT = 4096
PARAMETERS = ch.Params(
    words=ty.ptr_mut(ty.u32), noise=ty.ptr_mut(ty.f32), first=ty.u32, position=ty.u32, seed=ty.u64, count=ty.u32
)


@cache
def drawing() -> SmallKernel:
    """words and noise of the token ids first .. first + count - 1."""
    shape = ModelShape(16, 16, 16, 1, 1, 64, 1)

    def body(machine: Any, ring: Any, given: dict[str, Any]) -> None:
        with machine.consumer:
            with ch.for_(machine.thread, given["count"], machine.consumer_threads) as number:
                token = given["first"] + number
                given["words"][number] = philox_word(token, given["position"], given["seed"])
                given["noise"][number] = gumbel(token, given["position"], given["seed"])

    return SmallKernel(shape, 1, plan_of(shape, 1), PARAMETERS, body)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 0x0123456789ABCDEF, 2**64 - 1])
@pytest.mark.parametrize(("first", "position"), [(0, 0), (0, 1), (124160, 8191), (2**32 - COUNT, 2**32 - 1)])
def test_draws_are_numpy_s(seed: int, first: int, position: int) -> None:
    words, noise = allocate(COUNT, np.uint32), allocate(COUNT, np.float32)
    arguments = {"words": words, "noise": noise, "first": first, "position": position, "seed": seed, "count": COUNT}
    drawing().launch(arguments)
    tokens = np.arange(first, first + COUNT)
    expected = philox4x32((tokens, position, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))[0]
    np.testing.assert_array_equal(words, expected)
    np.testing.assert_allclose(noise, gumbel_noise(tokens, seed, position), rtol=1e-5, atol=1e-6)
    assert np.isfinite(noise).all()


def test_noise_is_gumbel_distributed() -> None:
    words, noise = allocate(COUNT * 8, np.uint32), allocate(COUNT * 8, np.float32)
    arguments = {"words": words, "noise": noise, "first": 0, "position": 3, "seed": 9, "count": COUNT * 8}
    drawing().launch(arguments)
    assert abs(noise.mean() - np.euler_gamma) < 0.03 and abs(noise.var() - np.pi**2 / 6) < 0.06
    below = np.sort(noise)
    assert np.abs(np.exp(-np.exp(-below)) - (np.arange(below.size) + 0.5) / below.size).max() < 0.01
