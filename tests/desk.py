"""Completions of an engine, asked for and iterated one by one: the ids alone, as a client of the engine sees them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from cheetah.errors import CheetahError
from cheetah.runtime.engine.engine import Engine
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.prompt_passes import PassLauncher
from cheetah.runtime.engine.requests import Failed, Made, Request
from cheetah.runtime.engine.shared import SharedEngine
from cheetah.runtime.outputs import Timings


@dataclass
class Asked:
    """Number `index` of a request's completions. Iterate to get its ids, some at a time; it begins then."""

    desk: Desk
    request: Request
    index: int
    ids: list[int] = field(default_factory=list)  # of all completions of the request, once they are submitted
    made: list[Made] = field(default_factory=list)

    @property
    def id(self) -> int:
        return self.ids[self.index]

    @property
    def timings(self) -> Timings:
        return self.made[-1].timings

    @property
    def cached_tokens(self) -> int:
        return self.timings.cached_tokens

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return self.parts()

    def parts(self) -> Generator[tuple[int, ...], None, None]:
        shared = self.desk.shared
        self.desk.submit([self])
        try:
            while True:
                for event in shared.wait([self.id]):
                    if isinstance(event, Failed):
                        raise CheetahError(event.message)
                    self.made.append(event)
                    yield event.token_ids
                    if event.finish_reason is not None:
                        return
        finally:
            shared.release([self.id])


class Desk:
    """An engine and one who asks it."""

    def __init__(
        self,
        launcher: Launcher,
        launch_steps: int | None = None,
        prefixes: PrefixCache | None = None,
        prompts: Launcher | None = None,
        passes: Sequence[PassLauncher] = (),
    ):
        self.engine = Engine(launcher, launch_steps, prefixes, prompts, passes=passes)
        self.shared = SharedEngine(self.engine)
        self.launcher, self.prefixes = launcher, prefixes

    def complete(self, request: Request) -> Asked:
        return self.complete_several(request)[0]

    def complete_several(self, request: Request) -> list[Asked]:
        self.engine.check(request)
        ids: list[int] = []
        return [Asked(self, request, index, ids) for index in range(request.count)]

    def submit(self, several: Sequence[Asked]) -> None:
        """Puts those in line that are not there yet, together, with all completions of their requests."""
        new = list({id(one.ids): one for one in several if not one.ids}.values())
        if new:
            ids = iter(self.shared.submit([one.request for one in new]))
            for one in new:
                one.ids += islice(ids, one.request.count)

    def score(self, token_ids: Sequence[int], logits: Any) -> Any:
        return self.shared.score(token_ids, logits)
