"""Pieces of work in processes of their own, a few at a time, whose results come in order.

A process is forked for each, from the thread that asks for the results, so that the work sees all that is there; it
sends lines while it goes on, and its result, which must be such as can be sent, at the end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from cheetah.errors import CheetahError

Result = TypeVar("Result")
Say = Callable[[str], None]
Work = Callable[[Say], Result]

_FORK = multiprocessing.get_context("fork")


class _Running(Generic[Result]):
    """A piece of work in its process."""

    def __init__(self, work: Work[Result]) -> None:
        self.connection, theirs = _FORK.Pipe(duplex=False)
        self.process = _FORK.Process(target=_carried_out, args=(work, theirs), daemon=True)
        self.process.start()
        theirs.close()
        _lead_a_group(self.process.pid)

    def end(self) -> None:
        """It and what it started."""
        assert self.process.pid, "it has begun"
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.connection.close()


def _lead_a_group(pid: int | None) -> None:
    """Called by both, so that the group is there whoever comes first; a terminal's Ctrl-C then ends the caller alone,
    who ends the group."""
    with suppress(OSError):
        os.setpgid(pid or 0, pid or 0)


def in_order(works: Iterable[tuple[Work[Result], Say]], together: int) -> Iterator[Result]:
    """The results of pieces of work, each with who hears its lines, at most `together` at a time. What one raises is
    raised here in its turn; CheetahError for a process that ended by itself. Whoever stops listening ends those that
    still run."""
    waiting, running, results = (
        iter(works),
        dict[int, tuple[_Running[Result], Say]](),
        dict[int, Callable[[], Result]](),
    )
    started = given = 0
    is_over = False
    try:
        while True:
            while not is_over and len(running) < together:
                if (following := next(waiting, None)) is None:
                    is_over = True
                else:
                    running[started] = _Running(following[0]), following[1]
                    started += 1
            while given in results:
                yield results.pop(given)()
                given += 1
            if not running:
                return
            results |= _heard(running)
    finally:
        for one, _ in running.values():
            one.end()


def _heard(running: dict[int, tuple[_Running[Result], Say]]) -> dict[int, Callable[[], Result]]:
    """Waits until somebody sends something, passes lines on, and takes out who has ended."""
    ready = wait([one.connection for one, _ in running.values()])
    found: dict[int, Callable[[], Result]] = {}
    for number, (one, say) in list(running.items()):
        if one.connection not in ready:
            continue
        kind, what = _received(one.connection)
        if kind == "line":
            say(what)
        else:
            del running[number]
            one.end()
            found[number] = _raiser(what) if kind == "error" else lambda result=what: result  # type: ignore[misc]
    return found


def _received(connection: Connection) -> tuple[str, Any]:
    try:
        received: tuple[str, Any] = connection.recv()
    except EOFError:
        return "error", CheetahError("a process of the check ended by itself: is there enough memory?")
    return received


def _raiser(error: BaseException) -> Callable[[], Any]:
    def give() -> Any:
        raise error

    return give


def _carried_out(work: Work[Any], connection: Connection) -> None:
    _lead_a_group(None)
    try:
        connection.send(("result", work(lambda line: connection.send(("line", line)))))
    except Exception as error:
        connection.send(("error", error))
