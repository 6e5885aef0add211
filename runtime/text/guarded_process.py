"""Work that a checkpoint's author describes, done in a process of its own with limits on time, memory and answer.

A chat template is a program, and a tokenizer's rules may be as bad: either can ask for all memory and all time there
is. The process runs `guarded_worker.py` and nothing else of ours; it is started when first asked, kept for later
questions, ended when it passes a limit, and then started anew. Knows nothing of what the work is.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cheetah.errors import CheetahError
from cheetah.printable import printable

WORKER = Path(__file__).with_name("guarded_worker.py")
WAIT_FACTOR = 8
"""Seconds of waiting for a second of processor time that is granted: others may use the machine."""


class GuardError(CheetahError):
    """Work that passed a limit, failed, or ended its process."""


@dataclass(frozen=True)
class Limits:
    """What one question may take: seconds of processor time, bytes of memory, bytes of answer.

    Each grows with the question's bytes: cpu_s by a second for every 1,000,000, memory 64-fold, the answer 16-fold.
    """

    cpu_s: float
    memory_bytes: int
    answer_bytes: int

    def of(self, question_bytes: int) -> Limits:
        return Limits(
            self.cpu_s + question_bytes / 1e6,
            self.memory_bytes + 64 * question_bytes,
            self.answer_bytes + 16 * question_bytes,
        )


class GuardedProcess:
    """One kind of work in a process of its own. May be asked from any thread; questions wait for each other.

    what: names the work in messages. setup: what the process is told when it starts, `work` among it (a key of
    WORKS in guarded_worker.py). Questions and answers are JSON values.
    """

    def __init__(self, what: str, setup: Mapping[str, Any], limits: Limits) -> None:
        self._what, self._setup, self._limits = what, setup, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._answer_of_setup: Any = None
        self._at_exit: Callable[[], None] | None = None
        self._forget_parents()

    def start(self) -> Any:
        """The answer to `setup`, of the process that runs; one is started if none does."""
        with self._own_lock():
            self._ensure_started()
            return self._answer_of_setup

    def ask(self, question: Mapping[str, Any]) -> Any:
        """The answer to a question; GuardError says which limit was passed, or what the work said."""
        with self._own_lock():
            self._ensure_started()
            return self._exchange(question)

    def close(self) -> None:
        """Ends the process, if one runs. The next question starts another."""
        with self._own_lock():
            self._end()

    def _own_lock(self) -> threading.Lock:
        if self._pid != os.getpid():
            self._forget_parents()
        return self._lock

    def _forget_parents(self) -> None:
        """After a fork the process is the parent's: its answers would reach the process that reads first."""
        self._process, self._at_exit = None, None
        self._lock, self._pid = threading.Lock(), os.getpid()

    def _ensure_started(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        command = [sys.executable, "-I", "-S", "-B", str(WORKER)]
        # The stack of a thread would count as memory; and a backtrace that finds none left waits for ever.
        environment = {**os.environ, "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for us: a question is answered, or its process is ended here
            )
        except OSError as problem:
            raise GuardError(f"{self._what}: its process cannot be started: {problem}") from problem
        self._at_exit = weakref.finalize(self, _kill, self._process, self._pid)
        self._answer_of_setup = self._exchange({"path": [str(folder) for folder in sys.path], **self._setup})

    def _exchange(self, question: Mapping[str, Any]) -> Any:
        data = _as_json(question, self._what)
        limits = self._limits.of(len(data))
        granted = [limits.cpu_s, limits.memory_bytes, limits.answer_bytes]
        try:
            answer = self._answer(json.dumps(granted).encode() + b"\n" + data, limits)
        except BaseException:  # also Ctrl-C: what is under way would be taken for the next answer
            self._end()
            raise
        if "limit" in answer:
            self._end()
            raise GuardError(f"{self._what}: {self._passed(answer['limit'], limits)}")
        if "error" in answer:
            raise GuardError(f"{self._what}{answer['error']}")
        return answer["answer"]

    def _answer(self, data: bytes, limits: Limits) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_FACTOR * limits.cpu_s
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(len(data).to_bytes(8, "big") + data)
            process.stdin.flush()
        except BrokenPipeError:
            raise GuardError(self._death(limits)) from None
        size = int.from_bytes(self._read(8, deadline, limits), "big")
        if size > limits.answer_bytes:
            return {"limit": "answer"}
        answer: dict[str, Any] = json.loads(self._read(size, deadline, limits))
        return answer

    def _read(self, count: int, deadline: float, limits: Limits) -> bytes:
        process = self._process
        assert process is not None and process.stdout is not None
        parts, descriptor = list[bytes](), process.stdout.fileno()
        answered = select.poll()  # `select` knows the first 1024 files of a process alone, and servers open more
        answered.register(descriptor, select.POLLIN)
        while count:
            if not answered.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise GuardError(f"{self._what}: {self._passed('time', limits)}")
            part = os.read(descriptor, min(count, 1 << 20))
            if not part:
                raise GuardError(self._death(limits))
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _death(self, limits: Limits) -> str:
        """Why the process ended."""
        assert self._process is not None
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return f"{self._what}: {self._passed('time', limits)}"
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        memory = f"it may need more than {limits.memory_bytes / 1e6:.0f} MB of memory, or break what reads it"
        return f"{self._what}: ended its process ({name}): {memory}"

    def _passed(self, limit: str, limits: Limits) -> str:
        return {
            "time": f"takes more than {limits.cpu_s:.3g} s of processor time",
            "memory": f"needs more than {limits.memory_bytes / 1e6:.3g} MB of memory",
            "answer": f"gives more than {limits.answer_bytes / 1e6:.3g} MB",
        }[limit]

    def _end(self) -> None:
        self._process = None
        if self._at_exit is not None:
            self._at_exit()  # once: kills the process that it knows


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process, unless this one was forked from its owner."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what could not be written any more
                pass


def _as_json(question: Mapping[str, Any], what: str) -> bytes:
    def plain(value: object) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"{printable(type(value).__name__)} is no JSON value")

    try:
        return json.dumps(question, default=plain).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise GuardError(f"{what}: what it is given must be JSON values: {problem}") from problem
