"""One engine, used by several threads at a time: each gets the events of its own requests, whoever drives.

No thread of its own: who waits for events takes a step of the engine if nobody else is in one, and delivers what it
made to all. So a program of one thread runs as if this were not here. A server has a thread that does nothing else
(`drive`), and is called once a step with the events of its requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cheetah.runtime import interrupts
from cheetah.runtime.device.interface import Buffer
from cheetah.runtime.engine.engine import Engine
from cheetah.runtime.engine.requests import Event, Failed, Made, Request

OVERTAKEN = (
    "another request began before this stream was finished, and took its KV cache: finish a stream (or collect it in a "
    "list) before the next request, or open the LLM with a batch above 1"
)


Deliver = Callable[[Sequence[Event]], None]
"""Takes what a step made of its completions, in whatever thread made it: it must neither wait nor raise."""


@dataclass
class _Mailbox:
    """What a completion made and nobody has taken yet; `owner` is the thread that asked for it. With `deliver` it is
    always empty: events are passed on."""

    deliver: Deliver | None = None
    owner: int = field(default_factory=threading.get_ident)
    events: deque[Event] = field(default_factory=deque)

    @property
    def is_abandoned(self) -> bool:
        """Whether its owner, who now does something else, has left it before its end."""
        return self.deliver is None and self.owner == threading.get_ident() and not self._is_complete

    @property
    def _is_complete(self) -> bool:
        last = self.events[-1] if self.events else None
        return isinstance(last, Failed) or (isinstance(last, Made) and last.finish_reason is not None)


class SharedEngine:
    """An engine for any number of threads.

    With a batch of 1 a request ends the unfinished ones of its own thread, which nobody can be waiting for: their next
    event is a failure. Those of other threads are waited for, as with any batch.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._mail: dict[int, _Mailbox] = {}
        self._changed = threading.Condition()
        self._is_driven = False

    def check_open(self) -> None:
        """CheetahError once it is closed."""
        self.engine.check_open()

    def check(self, request: Request) -> None:
        """CheetahError for a request that can never fit."""
        self.engine.check(request)

    def close(self) -> None:
        """Refuses every later call, and tells who waits."""
        self.engine.close()
        with self._changed:
            self._changed.notify_all()

    def submit(self, requests: Sequence[Request], deliver: Deliver | None = None) -> list[int]:
        """Puts requests in line; gives the ids of all their completions, to be released when they are done with.

        deliver: is called once a step with their events, which are then not waited for; some thread must `drive`.
        """
        for request in requests:
            self.engine.check(request)
        self._overtake()
        ids: list[int] = []
        try:
            with interrupts.deferred(), self._changed:  # nothing is delivered before there is a box for it
                for request in requests:
                    ids += self.engine.add(request)
                self._mail.update({id: _Mailbox(deliver) for id in ids})
        except BaseException:
            self.release(ids)
            raise
        return ids

    def wait(self, ids: Iterable[int]) -> list[Event]:
        """What is new of these completions, at least one event, in order; drives the engine until there is."""
        boxes = [self._mail[id] for id in ids]
        while True:
            self.engine.check_open()
            events = [box.events.popleft() for box in boxes for _ in range(len(box.events))]
            if events:
                return events
            if not self._drive():
                with self._changed:
                    if self._is_driven and not any(box.events for box in boxes):
                        self._changed.wait()

    def release(self, ids: Iterable[int]) -> None:
        """Ends completions if they have not, and forgets them. May be called by any thread at any time: it never
        waits."""
        ids = list(ids)
        for id in ids:
            self._mail.pop(id, None)
        self.engine.abort(ids)

    def drive(self) -> None:
        """One step of the engine; or the end of one that another thread is in."""
        if not self._drive():
            with self._changed:
                if self._is_driven:
                    self._changed.wait()

    def score(self, token_ids: Sequence[int], logits: Buffer) -> npt.NDArray[np.float32]:
        """`Engine.score`, once there are pages for it."""
        self._overtake()
        while (scores := self.engine.score(token_ids, logits)) is None:
            self.drive()
        return scores

    def embed(self, prompts: Sequence[Sequence[int]], is_mean: bool) -> list[npt.NDArray[np.float32]]:
        """`Engine.embed` of all of them; others have a launch between two of its passes."""
        self._overtake()
        found: list[npt.NDArray[np.float32]] = []
        while len(found) < len(prompts):
            found += self.engine.embed(prompts[len(found) :], is_mean) or ()
            if not self.engine.is_idle:
                self.drive()
        return found

    def _drive(self) -> bool:
        """One step of the engine, with what it made delivered; False, and nothing done, if another thread is at it."""
        with interrupts.deferred():
            with self._changed:
                if self._is_driven:
                    return False
                self._is_driven = True
            events: list[Event] = []
            try:
                events = self.engine.step()
            finally:
                with self._changed:
                    self._deliver(events)
                    self._is_driven = False
                    self._changed.notify_all()
        return True

    def _deliver(self, events: Sequence[Event]) -> None:
        handed: dict[Deliver, list[Event]] = {}
        for event in events:
            if (box := self._mail.get(event.id)) is not None:
                (box.events if box.deliver is None else handed.setdefault(box.deliver, [])).append(event)
        for deliver, own in handed.items():
            deliver(own)

    def _overtake(self) -> None:
        """With a batch of 1, ends what this thread has left unfinished."""
        if self.engine.launcher.batch > 1:
            return
        with interrupts.deferred(), self._changed:
            for id in [*self._mail]:
                box = self._mail.get(id)
                if box is not None and box.is_abandoned:
                    self.engine.abort([id])
                    box.events.append(Failed(id, OVERTAKEN))
