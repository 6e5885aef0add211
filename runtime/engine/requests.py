"""What an engine is asked and what it answers: requests, and events of their completions. Plain values, ids only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cheetah.errors import CheetahError
from cheetah.models.logprobs import TokenLogprobs
from cheetah.runtime.engine.drafting import NOTHING_DRAFTED, Drafted
from cheetah.runtime.engine.launch_tables import Sampling
from cheetah.runtime.engine.watching import NewWatcher
from cheetah.runtime.outputs import Timings

if TYPE_CHECKING:
    from cheetah.runtime.sampling import SamplingParams
    from cheetah.runtime.text.harmony import NewChannels


@dataclass(frozen=True)
class Request:
    """Completions to make of one prompt, `count` of them: at most `max_tokens` each, ended by a stop id, which none of
    the first `min_tokens` is. Number i draws with `seed_of(sampling.seed, i)`.

    watchers: of each completion, which then has launches of one step. logprobs, prompt_logprobs: with each token that
    is made, or of the prompt, comes how likely it was, and so many of the likeliest; None for neither. speculates:
    whether its tokens are drafted, where the engine does that; prediction: ids in which they are looked up first.
    params, new_channels: what its client wrote, and what tells its answers' channels apart; the engine looks at
    neither."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    min_tokens: int = 0
    count: int = 1
    watchers: tuple[NewWatcher, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculates: bool = True
    prediction: tuple[int, ...] = ()
    params: SamplingParams | None = None
    new_channels: NewChannels | None = None

    @property
    def wants_logits(self) -> bool:
        """Whether more than the ids is asked for."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def most_cached(self) -> int:
        """Tokens that a completion may have in the cache; the last one that is made needs no place there."""
        return len(self.prompt_ids) + self.max_tokens - 1


@dataclass(frozen=True)
class Made:
    """Ids that completion `id` goes on with, at least one. finish_reason: None while more may come, "stop" if the last
    of them is a stop id, "length" if there are `max_tokens`. timings: up to here, of all the ids made. logprobs: of
    each id, if they are wanted. prompt_logprobs: of all ids of the prompt but the first, with the first ids made."""

    id: int
    token_ids: tuple[int, ...]
    timings: Timings
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class NothingAllowed(CheetahError):
    """What a request allows leaves no token to choose from."""


@dataclass(frozen=True)
class Failed:
    """Completion `id` ends without a result: why, and what to do. kind: what its reader may raise it as."""

    id: int
    message: str
    kind: type[CheetahError] = CheetahError


Event = Made | Failed


@dataclass(frozen=True)
class Decoded:
    """Launches in which completions were decoded: their steps, seconds by the host's clock, and the bytes that they
    read of the device's memory: weights, and keys and values of what is cached. drafted: what came of drafts."""

    steps: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    drafted: Drafted = NOTHING_DRAFTED

    def __add__(self, other: Decoded) -> Decoded:
        sums = (self.steps + other.steps, self.seconds + other.seconds, self.nbytes + other.nbytes)
        return Decoded(*sums, self.drafted + other.drafted)

    @property
    def bytes_per_step(self) -> float:
        return self.nbytes / self.steps if self.steps else 0.0

    @property
    def gb_per_s(self) -> float:
        """GB = 1e9 bytes."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class Load:
    """What an engine is doing: completions that have begun and that wait in line, the share of the cache's pages that
    they hold (0 to 1), and since the engine was made: tokens of prompts that have begun, those of them that were
    cached, how often a completion had to give its pages to another, and what was decoded; `latest` by one launch."""

    running: int
    waiting: int
    pages_used: float
    tokens_looked_up: int
    tokens_found: int
    preemptions: int
    decoded: Decoded = Decoded()
    latest: Decoded = Decoded()
