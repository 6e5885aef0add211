"""Bookkeeping for rings of stages: what one role fills, another must use, and the other way round."""

from __future__ import annotations

from dataclasses import dataclass, field

from cheetah.lang.errors import Location, UnusedStageError, here
from cheetah.lang.scope import current


@dataclass
class _Stream:
    name: str
    opened: Location
    consumed: Location | None = None


@dataclass
class Streams:
    """The streams of one ring. Made inside a kernel, it checks itself at the kernel's end.

    `key = streams.open("layer weights")` where a copy loop is emitted, `streams.consume(key)` where the matching loop
    of the users is. A stream that stays open leaves its stages full for ever, and the copy loop waiting for them.
    """

    ring: str = "ring"
    _streams: list[_Stream] = field(default_factory=list)

    def __post_init__(self) -> None:
        current().root.at_end.append(self.require_all_consumed)

    def open(self, name: str) -> int:
        """A stream begins to be filled; gives the key to consume it by."""
        self._streams.append(_Stream(name, here()))
        return len(self._streams) - 1

    def consume(self, key: int) -> None:
        """The stream's stages are used and given back; UnusedStageError if they were never filled or used already."""
        if not 0 <= key < len(self._streams):
            raise UnusedStageError(
                f"the {self.ring}: a stream is used that nobody fills; the program would wait for ever."
            )
        stream = self._streams[key]
        if stream.consumed is not None:
            raise UnusedStageError(
                f"the {self.ring}: the stages of `{stream.name}` are used twice, first at {stream.consumed}; "
                "the second use would wait for ever."
            )
        stream.consumed = here()

    def require_all_consumed(self) -> None:
        """UnusedStageError naming the first stream that is filled and never used, at the line that opened it."""
        for stream in self._streams:
            if stream.consumed is None:
                raise UnusedStageError(
                    f"the {self.ring}: the stages of `{stream.name}` are filled but never used; "
                    "the copies behind them would wait for ever.",
                    stream.opened,
                )
