"""Work that goes on in a thread of its own while its caller does something else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result", covariant=True)
_Made = TypeVar("_Made")
_Next = TypeVar("_Next")


@dataclass(frozen=True)
class Started(Generic[_Result]):
    """Work that was begun; called, it waits for its end, and gives its result or raises its error."""

    _future: Future[Any]
    _finish: Callable[[Any], _Result]

    def __call__(self) -> _Result:
        return self._finish(self._future.result())

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._future.done()

    def then(self, finish: Callable[[_Result], _Next]) -> Started[_Next]:
        """The same with something behind it, which the caller's thread does."""
        return Started(self._future, lambda found: finish(self._finish(found)))


def started(work: Callable[[], _Made]) -> Started[_Made]:
    """Begin `work`."""
    pool = ThreadPoolExecutor(1, "background")
    future = pool.submit(work)
    pool.shutdown(wait=False)  # the thread ends with its work
    return Started(future, lambda found: found)
