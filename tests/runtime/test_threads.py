"""One `LLM` in several threads: each gets what it would get alone, whoever drives, waits, gives up or closes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_kernel import FakeDevice, generate_kernel
from tiny_models import tiny_weights, write_checkpoint

from cheetah.errors import CheetahError
from cheetah.models.dense.reference import Reference
from cheetah.models.rounding import round_to_bf16
from cheetah.runtime import LLM, SamplingParams

THREADS, ROUNDS = 3, 6
PLACES = [
    *(("fake", 1), ("fake", 4)),
    pytest.param("emulator", 1, marks=[pytest.mark.compiler, pytest.mark.exhaustive]),
    pytest.param("emulator", 4, marks=pytest.mark.compiler),
    *(pytest.param("cuda", batch, marks=pytest.mark.gpu) for batch in (1, 4)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tiny_weights())


def opened(folder: Path, device: Any = "fake", **options: Any) -> LLM:
    if device == "emulator":
        place: dict[str, Any] = {"device": "emulator", "gpu": "emulator-2", "max_context": 64}
    elif device == "cuda":
        place = {"device": "cuda", "max_context": 64}
    else:
        place = {"device": FakeDevice() if device == "fake" else device, "generate_kernel": generate_kernel}
    return LLM(folder, quiet=True, **place, **options)


def params(number: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6 + number, "temperature": 1.0, "seed": number, **more})


def prompt(number: int) -> list[int]:
    return [number + 1, 7, 9 * number + 2][: 1 + number % 3]


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "batch"), PLACES)
def test_threads_that_generate_at_the_same_time(folder: Path, device: str, batch: int) -> None:
    rounds = 2 if device == "emulator" else ROUNDS
    with opened(folder, device, batch=batch, kv_chunk=256) as llm:
        numbers = range(THREADS * rounds)
        alone = [llm.generate(prompt(number), params(number)).token_ids for number in numbers]

        def work(thread: int) -> list[tuple[int, ...]]:
            own = range(thread * rounds, (thread + 1) * rounds)
            return [llm.generate(prompt(number), params(number)).token_ids for number in own]

        assert [ids for found in in_threads(work) for ids in found] == alone
        pool = llm.engine.engine.launcher.cache.pool
        assert pool.available_pages == pool.pages and llm.engine.engine.is_idle


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_threads_that_stream_score_and_give_up(folder: Path, batch: int) -> None:
    reference = Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16)
    scores = reference.forward([1, 2, 3])
    with opened(folder, batch=batch, launch_steps=2) as llm:
        wanted = [llm.generate(prompt(number), params(number, n=2)).outputs for number in range(THREADS)]

        def work(thread: int) -> bool:
            for _ in range(ROUNDS):
                abandoned = llm.stream(prompt(thread), params(thread))
                next(abandoned)
                del abandoned
                pieces = list(llm.stream(prompt(thread), params(thread, n=2)))
                for one in wanted[thread]:
                    own = (token for piece in pieces if piece.index == one.index for token in piece.token_ids)
                    assert tuple(own) == one.token_ids
                assert (llm.score([1, 2, 3]) == scores).all()
            return True

        assert in_threads(work) == [True] * THREADS
        pool = llm.engine.engine.launcher.cache.pool
        assert pool.available_pages == pool.pages and llm.engine.engine.is_idle


def test_with_a_batch_of_1_a_request_ends_those_of_its_own_thread_only(folder: Path) -> None:
    with opened(folder, launch_steps=1, batch=1) as llm:
        mine = llm.stream([1], params(1))
        next(mine)
        other = in_threads(lambda _: llm.generate([2], params(2)).token_ids, 1)[0]
        rest = [token for piece in mine for token in piece.token_ids]
        assert len(rest) == params(1).max_tokens - 1 and len(other) == params(2).max_tokens
        mine = llm.stream([1], params(1))
        next(mine)
        assert llm.generate([2], params(2)).token_ids == other
        with pytest.raises(CheetahError, match="another request began before this stream was finished"):
            next(mine)


def test_closing_ends_the_wait_of_every_thread(folder: Path) -> None:
    llm = opened(folder, launch_steps=1, batch=4)
    begun = threading.Barrier(THREADS + 1)

    def work(thread: int) -> str:
        stream = llm.stream([thread + 1], SamplingParams(max_tokens=150))
        next(stream)
        begun.wait(timeout=30)
        with pytest.raises(CheetahError) as caught:
            for _ in stream:
                pass
        return str(caught.value)

    with ThreadPoolExecutor(THREADS) as threads:
        ends = [threads.submit(work, thread) for thread in range(THREADS)]
        begun.wait(timeout=30)
        llm.close()
        assert {end.result(timeout=60) for end in ends} == {"this LLM is closed: open a new one"}


@pytest.mark.slow
def test_an_interrupt_of_the_main_thread_leaves_the_requests_of_others(folder: Path) -> None:
    """Real signals, while this thread drives and while it waits for another that does."""
    with opened(folder, launch_steps=1, batch=4) as llm:
        wanted = llm.generate([3, 4], params(40)).token_ids
        with ThreadPoolExecutor(1) as threads:
            others = threads.submit(lambda: [llm.generate([3, 4], params(40)).token_ids for _ in range(5)])
            for number in range(8):
                timer = threading.Timer(0.02 * (number + 1), os.kill, [os.getpid(), signal.SIGINT])
                with pytest.raises(KeyboardInterrupt):
                    timer.start()
                    while True:
                        llm.generate([1, 2], params(90))
            assert others.result(timeout=60) == [wanted] * 5
        pool = llm.engine.engine.launcher.cache.pool
        assert pool.available_pages == pool.pages and llm.engine.engine.is_idle


def test_a_failed_launch_ends_every_thread_with_the_reason(folder: Path) -> None:
    device = FakeDevice()
    llm = opened(folder, device, batch=4, launch_steps=1)

    def work(thread: int) -> str:
        with pytest.raises(CheetahError) as caught:
            while True:
                llm.generate([thread + 1], params(9))
        return str(caught.value)

    with ThreadPoolExecutor(THREADS) as threads:
        ends = [threads.submit(work, thread) for thread in range(THREADS)]
        time.sleep(0.05)
        device.hang = True
        for end in ends:
            assert "the launch did not finish" in end.result(timeout=60)
