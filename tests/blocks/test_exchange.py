"""Both exchanges alone: a vector that all blocks make and all blocks read, many times over, in two vectors by turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cheetah import lang as ch
from cheetah.blocks.exchange import BarrierExchange, FlaggedExchange, make_exchange
from cheetah.emulator import allocate, explore
from cheetah.lang import prim, ty
from cheetah.lang.primitives.exchange import UNITS
from cheetah.plan import ModelShape
from tests.blocks.small_kernel import SmallKernel, plan_of

pytestmark = pytest.mark.compiler

SHAPE = ModelShape(64, 64, 64, 1, 1, 64, 1)
PARAMETERS = ch.Params(exchange=ty.ptr_mut(ty.u8), output=ty.ptr_mut(ty.u32), rounds=ty.u32, epoch=ty.u32)
WORDS, ROUNDS = 52, 9
SIZES = {"even": WORDS, "odd": WORDS}
KINDS = {"flags": FlaggedExchange, "barrier": BarrierExchange}


def passing(sync: str, blocks: int, scope: str = "gpu") -> SmallKernel:
    """Round r makes word i from words i and i + 1 of round r - 1; block i % blocks makes word i."""

    def body(machine: Any, ring: Any, given: dict[str, Any]) -> None:
        with machine.consumer:
            exchange = make_exchange(machine, given["exchange"], SIZES, scope)
            exchange.start()
            vector = machine.region("vector", ty.u32)
            units = machine.region("vector", ty.u32x4)
            with ch.for_(machine.thread, WORDS, machine.consumer_threads) as word:
                vector[word] = word * word
            machine.meet()
            with ch.for_(0, given["rounds"], 2) as pair:
                for number, name in enumerate(SIZES):
                    round_ = pair + number
                    first = machine.block + machine.thread * blocks
                    with ch.for_(first, WORDS, machine.consumer_threads * blocks) as word:
                        value = vector[word] * 3 + vector[(word + 1) % WORDS] + round_
                        exchange.publish(name, word, value, given["epoch"] + round_)
                    exchange.meet()
                    machine.meet()
                    with ch.for_(machine.thread, WORDS // 4, machine.consumer_threads) as unit:
                        units[unit] = exchange.read4(name, unit, given["epoch"] + round_)
                    machine.meet()
            with ch.for_(machine.thread, WORDS, machine.consumer_threads) as word:
                given["output"][machine.block * WORDS + word] = vector[word]

    return SmallKernel(SHAPE, blocks, plan_of(SHAPE, blocks, sync=sync), PARAMETERS, body)


def wanted(rounds: int) -> np.ndarray:
    words = np.arange(WORDS, dtype=np.uint32) ** 2
    for number in range(rounds):
        words = words * np.uint32(3) + np.roll(words, -1) + np.uint32(number)
    return words


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "scope"), [(1, "gpu"), (2, "gpu"), (5, "gpu"), (2, "sys")])
@pytest.mark.parametrize("sync", KINDS)
def test_every_block_reads_what_all_blocks_made(sync: str, blocks: int, scope: str) -> None:
    kernel = passing(sync, blocks, scope)

    def run(scheduler: str, seed: int) -> np.ndarray:
        workspace = allocate(KINDS[sync].size_bytes(SIZES), np.uint8, fill=0)
        output = allocate((blocks, WORDS), np.uint32)
        for launch in range(3):  # nothing is reset between launches
            first_epoch = 1 + launch * (ROUNDS + 1)
            arguments = {"exchange": workspace, "output": output, "rounds": ROUNDS + 1, "epoch": first_epoch}
            kernel.launch(arguments, scheduler, seed + launch)
            np.testing.assert_array_equal(output, np.broadcast_to(wanted(ROUNDS + 1), output.shape))
        return output

    report = explore(run, range(8))
    assert report.ok, str(report)


HALVED = ModelShape(64, 2048, 64, 1, 1, 64, 1)
HALVED_PARAMETERS = ch.Params(exchange=ty.ptr_mut(ty.u8), output=ty.ptr_mut(ty.u32x4), epoch=ty.u32)


def reading_by_halves() -> SmallKernel:
    """Two blocks publish words in turns; the threads of each read units of a vector that lies by halves."""

    @ch.inline
    def body(machine: Any, ring: Any, given: dict[str, Any]) -> None:
        with machine.consumer:
            exchange = make_exchange(machine, given["exchange"], {"x": 512}, by_halves=("x",))
            with ch.for_(machine.thread * 2 + machine.block, 512, machine.consumer_threads * 2) as word:
                exchange.publish("x", word, word * 7, given["epoch"])
            exchange.wait_for_one("x", machine.thread, given["epoch"])
            units = ch.array(ty.u32x4, UNITS)
            exchange.read_units("x", units, machine.thread, machine.consumer_threads, 2, given["epoch"])
            with ch.for_(2, unroll=True) as number:
                given["output"][(machine.block * 2 + number) * machine.consumer_threads + machine.thread] = units[
                    number
                ]

    return SmallKernel(HALVED, 2, plan_of(HALVED, 2), HALVED_PARAMETERS, body)


def read_by_halves() -> np.ndarray:
    workspace = allocate(FlaggedExchange.size_bytes({"x": 512}), np.uint8, fill=0)
    output = allocate((2, 512), np.uint32)
    reading_by_halves().launch({"exchange": workspace, "output": output, "epoch": 3}, "random", 1)
    return output


def test_units_that_lie_by_halves() -> None:
    np.testing.assert_array_equal(read_by_halves(), np.broadcast_to(np.arange(512) * 7, (2, 512)))


def test_halves_that_are_taken_for_neighbours_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = prim.wait_flagged_units

    def as_neighbours(data: Any, words: Any, apart: int, *others: Any, **scope: Any) -> None:
        read(data, words, 2, *others, **scope)

    monkeypatch.setattr(prim, "wait_flagged_units", as_neighbours)
    assert not np.array_equal(read_by_halves()[0], np.arange(512) * 7)


@pytest.mark.parametrize("epoch", [2**31 - 4, 2**32 - 12])
def test_large_epochs(epoch: int) -> None:
    workspace = allocate(FlaggedExchange.size_bytes(SIZES), np.uint8, fill=0)
    output = allocate((3, WORDS), np.uint32)
    arguments = {"exchange": workspace, "output": output, "rounds": ROUNDS + 1, "epoch": epoch}
    passing("flags", 3).launch(arguments, "priority", 1)
    np.testing.assert_array_equal(output[2], wanted(ROUNDS + 1))
