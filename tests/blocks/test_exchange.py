"""Both exchanges alone: a vector that all blocks make and all blocks read, many times over, in two vectors by turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cheetah import lang as ch
from cheetah.blocks.exchange_kinds import BarrierExchange, FlaggedExchange, make_exchange
from cheetah.blocks.exchange_vectors import COUNTER_BYTES
from cheetah.emulator import allocate, explore
from cheetah.lang import prim, ty
from cheetah.lang.primitives.exchange import UNITS
from cheetah.plan import ModelShape
from cheetah.plan.halves import PART_BYTES, half_of
from tests.blocks.small_kernel import SmallKernel, plan_of

pytestmark = pytest.mark.compiler

SHAPE = ModelShape(64, 64, 64, 1, 1, 64, 1)
PARAMETERS = ch.Params(exchange=ty.ptr_mut(ty.u8), output=ty.ptr_mut(ty.u32), rounds=ty.u32, epoch=ty.u32)
WORDS, ROUNDS = 52, 9
SIZES = {"even": WORDS, "odd": WORDS}
KINDS = {"flags": FlaggedExchange, "barrier": BarrierExchange}


def passing(sync: str, blocks: int, scope: str = "gpu", inputs: dict[str, int] | None = None) -> SmallKernel:
    """Round r makes word i from words i and i + 1 of round r - 1; block i % blocks makes word i. inputs: words are
    pairs of bf16, as inputs of products: (i % 8 + r, the first of word i + 1 of round r - 1)."""

    @ch.inline
    def made(vector: Any, word: Any, round_: Any) -> Any:
        if inputs is None:
            return vector[word] * 3 + vector[(word + 1) % WORDS] + round_
        low = ch.cast(ty.f32, word % 8 + round_)
        return prim.pack_bf16x2(low, prim.bf16x2_low(vector[(word + 1) % WORDS]))

    @ch.inline
    def read(machine: Any, exchange: Any, name: str, epoch: Any) -> None:
        units = machine.region("vector", ty.u32x4)
        if inputs is not None:
            exchange.wait_for_one(name, machine.thread % (WORDS // 4), epoch)
        with ch.for_(machine.thread, WORDS // 4, machine.consumer_threads) as unit:
            if inputs is None:
                units[unit] = exchange.read4(name, unit, epoch)
            else:
                data = ch.array(ty.u32x4, UNITS)
                exchange.read_units(name, data, unit, machine.consumer_threads, 1, epoch)
                units[unit] = data[0]

    def body(machine: Any, ring: Any, given: dict[str, Any]) -> None:
        with machine.consumer:
            exchange = make_exchange(machine, given["exchange"], SIZES, scope, inputs=inputs)
            exchange.start()
            vector = machine.region("vector", ty.u32)
            with ch.for_(machine.thread, WORDS, machine.consumer_threads) as word:
                vector[word] = word * word if inputs is None else 0
            machine.meet()
            with ch.for_(0, given["rounds"], 2) as pair:
                for number, name in enumerate(SIZES):
                    round_ = pair + number
                    first = machine.block + machine.thread * blocks
                    with ch.for_(first, WORDS, machine.consumer_threads * blocks) as word:
                        exchange.publish(name, word, made(vector, word, round_), given["epoch"] + round_)
                    if inputs is None:
                        exchange.meet()
                    machine.meet()
                    read(machine, exchange, name, given["epoch"] + round_)
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
        for launch in range(3):  # flagged words are not reset between launches
            first_epoch = 1 + launch * (ROUNDS + 1)
            arguments = {"exchange": workspace, "output": output, "rounds": ROUNDS + 1, "epoch": first_epoch}
            kernel.launch(arguments, scheduler, seed + launch)
            np.testing.assert_array_equal(output, np.broadcast_to(wanted(ROUNDS + 1), output.shape))
        return output

    report = explore(run, range(8))
    assert report.ok, str(report)


INPUTS = dict.fromkeys(SIZES, 32)


def inputs_passed(kernel: SmallKernel, blocks: int, scheduler: str, seed: int) -> np.ndarray:
    workspace = allocate(FlaggedExchange.size_bytes(SIZES, INPUTS), np.uint8, fill=0)
    output = allocate((blocks, WORDS), np.uint32)
    arguments = {"exchange": workspace, "output": output, "rounds": ROUNDS + 1, "epoch": 7}
    kernel.launch(arguments, scheduler, seed)
    return output


def wanted_inputs() -> np.ndarray:
    first = np.arange(WORDS) % 8 + ROUNDS
    return bf16_pairs(first, np.roll(first - 1, -1))


def bf16_pairs(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Words of two bf16 numbers each, of numbers that bf16 has."""
    pairs = np.stack([low, high], 1).astype(np.float32)
    return (pairs.view(np.uint32) >> 16) @ np.array([1, 1 << 16], np.uint32)


def test_inputs_of_products_carry_tags() -> None:
    kernel = passing("flags", 3, inputs=INPUTS)

    def run(scheduler: str, seed: int) -> np.ndarray:
        output = inputs_passed(kernel, 3, scheduler, seed)
        np.testing.assert_array_equal(output, np.broadcast_to(wanted_inputs(), output.shape))
        return output

    report = explore(run, range(8))
    assert report.ok, str(report)


PARTS = {"first": 2048}
"""Words of an input of two parts, which do not lie side by side."""


def read_twice() -> SmallKernel:
    """Two blocks publish numbers; both read all of them, units of a thread apart by whole parts, then by less."""
    parameters = ch.Params(exchange=ty.ptr_mut(ty.u8), output=ty.ptr_mut(ty.u32x4))

    @ch.inline
    def body(machine: Any, ring: Any, given: dict[str, Any]) -> None:
        with machine.consumer:
            exchange = make_exchange(machine, given["exchange"], PARTS, inputs=dict.fromkeys(PARTS, 32))
            with ch.for_(machine.block + machine.thread * 2, PARTS["first"], machine.consumer_threads * 2) as word:
                made = prim.pack_bf16x2(ch.cast(ty.f32, word % 128), ch.cast(ty.f32, word // 128))
                exchange.publish("first", word, made, 1)
            for number, (stride, count) in enumerate(((256, 2), (64, 8))):
                with ch.for_(machine.thread, stride, machine.consumer_threads) as unit:
                    data = ch.array(ty.u32x4, UNITS)
                    exchange.read_units("first", data, unit, stride, count, 1)
                    with ch.for_(count) as index:
                        given["output"][(machine.block * 2 + number) * 512 + unit + index * stride] = data[index]

    return SmallKernel(SHAPE, 2, plan_of(SHAPE, 2), parameters, body)


def test_parts_of_an_input_are_read_where_they_were_published() -> None:
    words = np.arange(PARTS["first"])
    numbers = bf16_pairs(words % 128, words // 128)
    kernel = read_twice()

    def run(scheduler: str, seed: int) -> np.ndarray:
        workspace = allocate(FlaggedExchange.size_bytes(PARTS, PARTS), np.uint8, fill=0)
        output = allocate((2, 2, PARTS["first"]), np.uint32)
        kernel.launch({"exchange": workspace, "output": output}, scheduler, seed)
        np.testing.assert_array_equal(output, np.broadcast_to(numbers, output.shape))
        return output

    report = explore(run, range(4))
    assert report.ok, str(report)


def test_inputs_lie_in_halves_of_l2_and_nothing_lies_twice() -> None:
    sizes = {"hidden": 2048, "qkv": 3072, "attention": 2048, "gated": 7168, "long": 9000}
    inputs = {"hidden", "attention", "gated", "long"}
    vectors = FlaggedExchange.lay_out(sizes, inputs)
    places = {name: vector.number(np.arange(vector.words)) * vector.word.bytes // 4 for name, vector in vectors.items()}
    halves = {name: {half_of(int(part)) for part in place // (PART_BYTES // 4)} for name, place in places.items()}
    assert halves["hidden"] == {0}
    assert halves["attention"] == halves["gated"] == {1}
    assert vectors["long"].apart == 1
    taken = np.concatenate([*places.values(), places["qkv"] + 1])
    assert len(np.unique(taken)) == len(taken)
    assert taken.max() * 4 < FlaggedExchange.size_bytes(sizes, inputs)


def test_inputs_lie_as_they_come_beside_one_of_a_single_part() -> None:
    sizes = {"hidden": 1024, "attention": 2048}
    assert [vector.apart for vector in FlaggedExchange.lay_out(sizes, sizes).values()] == [1, 1]
    assert FlaggedExchange.size_bytes(sizes, sizes) == COUNTER_BYTES + 3 * PART_BYTES


@pytest.mark.slow
def test_tags_that_repeat_at_once_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("publish_tagged", "wait_tagged4", "wait_tagged_units"):
        primitive = getattr(prim, name)

        def with_one_tag(*arguments: Any, primitive: Any = primitive, **scope: Any) -> Any:
            return primitive(*arguments[:-1], arguments[-1] * 3, **scope)

        monkeypatch.setattr(prim, name, with_one_tag)
    kernel = passing("flags", 3, inputs=INPUTS)
    outputs = [inputs_passed(kernel, 3, scheduler, seed) for scheduler in ("random", "priority") for seed in range(8)]
    assert not all(np.array_equal(output, np.broadcast_to(wanted_inputs(), output.shape)) for output in outputs)


@pytest.mark.parametrize("epoch", [2**31 - 4, 2**32 - 12])
def test_large_epochs(epoch: int) -> None:
    workspace = allocate(FlaggedExchange.size_bytes(SIZES), np.uint8, fill=0)
    output = allocate((3, WORDS), np.uint32)
    arguments = {"exchange": workspace, "output": output, "rounds": ROUNDS + 1, "epoch": epoch}
    passing("flags", 3).launch(arguments, "priority", 1)
    np.testing.assert_array_equal(output[2], wanted(ROUNDS + 1))
