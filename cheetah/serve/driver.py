"""The engine's thread, and the way between it and asyncio.

One thread makes the engine's steps and sleeps when there is nothing to do; what a step made is handed to the event
loop, where each HTTP request waits for its own completions. Who waits here waits in line in the engine, first come
first served, and the line is bounded. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence

from cheetah.errors import CheetahError
from cheetah.runtime.asked import Asked
from cheetah.runtime.engine.requests import Event, Failed, Made, Request
from cheetah.runtime.engine.shared import SharedEngine
from cheetah.runtime.outputs import StreamPiece
from cheetah.runtime.text.prompts import Prompts

STOPPED = "the server was stopped"
Observe = Callable[[int, StreamPiece], None]
"""Told each piece of a completion, by its number, before its client is."""


class QueueFull(Exception):
    """As many completions as are allowed run or wait."""


class EngineStopped(Exception):
    """The engine has failed, hangs or was stopped: nothing will be made any more."""


class Driver:
    """Drives `engine` from `start` to `stop`, for the event loop that starts it; its other methods are the loop's.

    most_waiting: how many completions may wait for a place, beside those that run. stuck_after_s: a step that takes
    longer counts as one that will not end. on_fault: called once, in the loop, if the engine fails.
    """

    def __init__(
        self,
        engine: SharedEngine,
        prompts: Prompts,
        most_waiting: int,
        stuck_after_s: float,
        on_fault: Callable[[], None] = lambda: None,
    ):
        self._engine, self._prompts, self._on_fault = engine, prompts, on_fault
        self.most = engine.engine.launcher.batch + most_waiting
        self._stuck_after_s = stuck_after_s
        self._live: dict[int, Answers] = {}
        self._something_to_do = threading.Condition()
        self._is_stopping = False
        self._fault: str | None = None
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def hurry(self) -> None:
        """Ends what is unfinished; its clients are told so."""
        with self._something_to_do:
            self._is_stopping = True
            self._something_to_do.notify()
        self._end_all(STOPPED)

    async def stop(self) -> None:
        """Ends what is unfinished, and the thread once its step is over."""
        self.hurry()
        await asyncio.to_thread(self._thread.join)

    def check(self) -> None:
        """EngineStopped unless the engine's thread is alive and its steps end in time."""
        if self._fault is not None:
            raise EngineStopped(self._fault)
        began = self._step_began
        if began is not None and time.monotonic() - began > self._stuck_after_s:
            raise EngineStopped(f"a step of the engine has not ended after {time.monotonic() - began:.0f} s")
        if self._is_stopping:
            raise EngineStopped(STOPPED)
        if not self._thread.is_alive():
            raise EngineStopped("the engine does not run")

    @property
    def is_idle(self) -> bool:
        """Whether no client waits for a completion."""
        return not self._live

    def submit(self, requests: Sequence[Request], observe: Observe = lambda number, piece: None) -> Answers:
        """Puts all completions of these requests in line, to be closed when they are done with. QueueFull, with none in
        line, if there are too many; EngineStopped if none would be made."""
        self.check()
        if len(self._live) + sum(one.count for one in requests) > self.most:
            raise QueueFull
        answers = Answers(self, observe)
        ids = self._engine.submit(requests, self._hand_over)
        answers.asked = Asked(self._prompts, requests, ids)
        self._live |= dict.fromkeys(ids, answers)  # before the loop takes what is handed over meanwhile
        with self._something_to_do:
            self._something_to_do.notify()
        return answers

    def release(self, answers: Answers, ids: Sequence[int]) -> None:
        """Ends these completions of `answers` if they have not ended."""
        ids = [id for id in ids if self._live.get(id) is answers]
        for id in ids:
            del self._live[id]
        self._engine.release(ids)

    def _run(self) -> None:
        while self._waits_for_work():
            self._step_began = time.monotonic()
            try:
                self._engine.drive()
            except Exception as problem:  # a launch that hangs or failed: the device's state is lost
                self._in_loop(self._fail, str(problem) or type(problem).__name__)
                return
            finally:
                self._step_began = None

    def _waits_for_work(self) -> bool:
        """True once there is something to do, False when there will not be."""
        with self._something_to_do:
            while not self._is_stopping and self._engine.engine.is_idle:
                self._something_to_do.wait()
            return not self._is_stopping

    def _hand_over(self, events: Sequence[Event]) -> None:
        """Called by the thread that made the events. The loop is woken once for all of them: each time it is woken, it
        competes with that thread for Python's lock."""
        self._in_loop(self._deliver, events)

    def _in_loop(self, call: Callable[..., None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all that wait in it
            self._loop.call_soon_threadsafe(call, argument)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            if (answers := self._live.get(event.id)) is not None:
                answers.events.put_nowait(event)

    def _fail(self, fault: str) -> None:
        self._fault = fault
        self._end_all(fault)
        self._on_fault()

    def _end_all(self, why: str) -> None:
        for id, answers in list(self._live.items()):
            answers.events.put_nowait(Failed(id, why))


class Answers:
    """The completions of one HTTP request. Close it when nobody wants more."""

    asked: Asked

    def __init__(self, driver: Driver, observe: Observe):
        self._driver, self._observe = driver, observe
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    async def pieces(self) -> AsyncIterator[tuple[int, StreamPiece]]:
        """(number of the completion, piece) as they are made, until all are finished. EngineStopped where the engine
        fails, CheetahError where this completion cannot go on."""
        while self.asked.unfinished:
            event = await self.events.get()
            try:
                found = await self._taken(event)
            except CheetahError:
                self._driver.check()  # whose fault is it?
                raise
            if found is None:
                continue
            self._observe(*found)
            if found[1].finished:
                self._driver.release(self, [event.id])
            yield found

    def close(self) -> None:
        """Ends what is unfinished."""
        self._driver.release(self, list(self.asked.unfinished))

    async def _taken(self, event: Event) -> tuple[int, StreamPiece] | None:
        """What `Asked.take` gives; beside the loop where it comes with the logprobs of a prompt, which may be long."""
        if isinstance(event, Made) and event.prompt_logprobs is not None:
            return await asyncio.to_thread(self.asked.take, event)
        return self.asked.take(event)
