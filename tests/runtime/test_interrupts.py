"""Interrupts that wait for the end of a piece of work, and what a launch makes of them. Signals are real ones."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cheetah.runtime import interrupts
from tests.tiers import tiered

WORKER = Path(__file__).with_name("interrupted_worker.py")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        assert not interrupts.is_pending()
        interrupt()
        assert interrupts.is_pending()
        done.append(1)
    assert done == [1] and not interrupts.is_pending()
    with pytest.raises(KeyboardInterrupt):
        interrupt()  # at once again


def test_a_second_interrupt_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        interrupt()
        interrupt()
        pytest.fail("the second interrupt waited")
    assert not interrupts.is_pending()


def test_an_error_within_is_not_lost_to_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, interrupts.deferred():
        interrupt()
        raise ValueError("inside")
    assert isinstance(caught.value.__context__, ValueError)
    with pytest.raises(ValueError, match="inside"), interrupts.deferred():
        raise ValueError("inside")


def test_of_two_nested_pieces_the_outer_one_is_finished() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        with interrupts.deferred():
            interrupt()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_the_programs_own_handler_is_called_afterwards() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with interrupts.deferred():
            interrupt()
            assert seen == []
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_python_does_not_handle_is_left_alone(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts.deferred():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_changes_no_handler_and_is_not_interrupted() -> None:
    seen = []

    def work() -> None:
        with interrupts.deferred():
            seen.extend((signal.getsignal(signal.SIGINT), interrupts.is_pending()))

    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        handler = signal.getsignal(signal.SIGINT)
        interrupt()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [handler, False] and interrupts.is_pending()


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize(("batch", "sync"), tiered([(1, "flags"), (4, "barrier")], [(1, "flags")]))
def test_ctrl_c_in_a_launch_of_the_emulator_leaves_an_llm_that_works(batch: int, sync: str) -> None:
    """In a process of its own: it interrupts itself at many offsets, and compares what it makes afterwards."""
    command = [sys.executable, str(WORKER), str(batch), sync]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    hit = int(result.stdout.split()[0])
    assert hit >= 4, result.stdout  # the offsets are spread over what a request takes
