"""The ring takes what was read of a stage: a body that says nothing is refused while the kernel is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cheetah import lang as ch
from cheetah.lang import UnusedStageError, prim, ty
from cheetah.plan import ModelShape
from tests.blocks.small_kernel import SmallKernel, plan_of

pytestmark = pytest.mark.compiler

SHAPE = ModelShape(32, 32, 16, 1, 1, 64, 1)
PARAMETERS = ch.Params(source=ty.ptr(ty.u8), sink=ty.ptr_mut(ty.u32))
CHUNK_BYTES = 512
UNREAD = r"nothing says that its loads have read: call `stage.has_read\(word\)`"


def kernel(use: Callable[[Any, Any, Any], None]) -> SmallKernel:
    """One chunk through the ring; `use(machine, ring, sink)` is the consumer role's program."""

    def body(machine: Any, ring: Any, given: dict[str, Any]) -> None:
        with machine.producer:
            with ring.fill(CHUNK_BYTES) as (destination, barrier):
                prim.bulk_copy(destination, given["source"], CHUNK_BYTES, barrier)
        with machine.consumer:
            use(machine, ring, given["sink"])

    return SmallKernel(SHAPE, 1, plan_of(SHAPE, 1), PARAMETERS, body)


def word_of(machine: Any, stage: Any) -> Any:
    return ch.reinterpret(ty.ptr(ty.u32), stage.address)[machine.thread]


def test_what_was_read_is_waited_for_before_the_stage_is_given_back() -> None:
    def use(machine: Any, ring: Any, sink: Any) -> None:
        with ring.use() as stage:
            word = ch.const(ty.u32, word_of(machine, stage), name="word")
            stage.has_read(word)
            sink[machine.thread] = word

    text = kernel(use).text
    assert text.index("wait_for_u32(word);") < text.index("mbarrier_arrive(empty + use_stage);")


def test_a_body_that_says_nothing_is_refused() -> None:
    def use(machine: Any, ring: Any, sink: Any) -> None:
        with ring.use() as stage:
            sink[machine.thread] = word_of(machine, stage)

    with pytest.raises(UnusedStageError, match=UNREAD):
        kernel(use)


def test_a_body_that_works_ahead_and_says_nothing_is_refused() -> None:
    def use(machine: Any, ring: Any, sink: Any) -> None:
        with ring.use_ahead(ty.u32(0), ty.u32(1), machine.lane < 32) as stage:
            sink[machine.thread] = word_of(machine, stage)

    with pytest.raises(UnusedStageError, match=UNREAD):
        kernel(use)


def test_a_stage_that_nobody_reads_is_discarded() -> None:
    text = kernel(lambda machine, ring, sink: ring.discard()).text
    body = text.partition("void run()")[2]
    assert "mbarrier_wait(full + use_stage, use_parity);" in body and "wait_for_u32(" not in body
