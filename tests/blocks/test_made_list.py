"""A list that the consumer warps make on the device, and that the other roles follow, many times over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cheetah import lang as ch
from cheetah.blocks.made_list import MadeList
from cheetah.emulator import SCHEDULERS, allocate, explore
from cheetah.errors import CheetahError
from cheetah.lang import ty
from cheetah.plan import ModelShape
from cheetah.plan.products import EXPERT_LIST, Experts
from tests.blocks.small_kernel import SmallKernel, initialise, plan_of
from tests.tiers import tiered

pytestmark = pytest.mark.compiler

ROOM, LIMIT, ROUNDS, FOLLOWERS = 6, 50, 7, 3
SHAPE = ModelShape(64, 64, 64, 1, 1, 64, 1, experts=Experts(LIMIT, ROOM))
PARAMETERS = ch.Params(lengths=ty.ptr(ty.u32), numbers=ty.ptr(ty.u32), output=ty.ptr_mut(ty.u32), rounds=ty.u32)


def passing(**how: Any) -> SmallKernel:
    """Round r makes a list of lengths[r] of numbers[r]; each follower (the producer lane and two adding warps) writes
    what it finds, entry by entry, zeros behind the last."""

    def body(machine: Any, ring: Any, given: dict[str, Any]) -> None:
        made = MadeList(machine, EXPERT_LIST, ROOM, LIMIT)
        made.declare()
        initialise(machine, made)
        with ch.roles_for(machine.roles, given["rounds"], name="round") as round_:
            with machine.consumer:
                made.begin_making()
                with ch.if_(machine.thread == 32):  # another warp than the one that arrives
                    made.words[0] = given["lengths"][round_]
                with ch.for_(machine.thread, ROOM, machine.consumer_threads) as index:
                    made.words[index + 1] = given["numbers"][round_ * ROOM + index]
                made.finish_making()
                machine.meet()  # its own reads end between two meetings
            with machine.producer:
                follow(made, machine.producer, given["output"] + round_ * (FOLLOWERS * ROOM), ty.u32(0))
            with machine.adder:
                own = given["output"] + (round_ * FOLLOWERS + 1 + machine.adder_number) * ROOM
                follow(made, machine.adder, own, machine.lane)

    return SmallKernel(SHAPE, 1, plan_of(SHAPE, 1, adding_warps=2), PARAMETERS, body, **how)


@ch.inline
def follow(made: MadeList, role: ch.Role, output: Any, lane: Any) -> None:
    made.begin_following(role)
    with ch.for_(made.count) as index, ch.if_(lane == index):
        output[index] = made.entry(index)
    if role is made.machine.producer:
        with ch.for_(made.count) as index:
            output[index] = made.entry(index)
    made.finish_following(role)


LENGTHS = np.array([3, 0, 6, 1, 9, 2, 4], np.uint32)
NUMBERS = np.random.default_rng(0).integers(0, LIMIT, (ROUNDS, ROOM), np.uint32)
NUMBERS[3, 0] = 2**31
"""A length and a number that there cannot be: both are bounded."""


def wanted() -> np.ndarray:
    of_each = [np.where(np.arange(ROOM) < length, row, 0) for length, row in zip(LENGTHS, NUMBERS, strict=True)]
    return np.repeat(np.minimum(of_each, LIMIT - 1)[:, None], FOLLOWERS, axis=1)


def run(kernel: SmallKernel, scheduler: str, seed: int) -> np.ndarray:
    output = allocate((ROUNDS, FOLLOWERS, ROOM), np.uint32, fill=0)
    kernel.launch({"lengths": LENGTHS, "numbers": NUMBERS, "output": output, "rounds": ROUNDS}, scheduler, seed)
    return output


@pytest.mark.slow
def test_every_follower_finds_every_list() -> None:
    kernel = passing()

    def checked(scheduler: str, seed: int) -> np.ndarray:
        output = run(kernel, scheduler, seed)
        np.testing.assert_array_equal(output, wanted())
        return output

    report = explore(checked, range(6))
    assert report.ok, str(report)


# name: (a piece of the text, what stands there instead)
BUGS = {
    "nobody waits for the list": ("mbarrier_wait(made, experts_parity);", ";"),
    "replaced under its followers": ("mbarrier_wait(made + 1, experts_parity ^ 1);", ";"),
    "replaced when one has followed it": ("mbarrier_init(made + 1, 3);", "mbarrier_init(made + 1, 1);"),
    "told before all warps have written": ("named_barrier(1, CONSUMERS);\n      if (thread == 0)", "if (thread == 0)"),
    "the last list's arrival is enough": ("mbarrier_wait(made, experts_parity);", "mbarrier_wait(made, 1);"),
    "an entry is an address as it is": (
        "min(((uint32_t*)(arena + EXPERTS))[index + 1], 49u)",
        "((uint32_t*)(arena + EXPERTS))[index + 1]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", tiered(BUGS, [*BUGS][3:]))
def test_a_planted_bug_is_found(bug: str) -> None:
    """By other results, or by an error, under some schedule."""
    kernel = passing(bug=BUGS[bug])

    def is_found(scheduler: str, seed: int) -> bool:
        try:
            return not np.array_equal(run(kernel, scheduler, seed), wanted())
        except CheetahError:
            return True

    assert any(is_found(scheduler, seed) for seed in range(20) for scheduler in SCHEDULERS)


@pytest.mark.slow
def test_the_race_detector_finds_nothing() -> None:
    np.testing.assert_array_equal(run(passing(sanitize=True), "random", 1), wanted())
