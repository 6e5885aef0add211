"""The decode loop: a prompt and a budget in, token ids out, some at a time.

Decides how many tokens each launch makes and when a completion ends. Bits and tokens do not depend on how steps are
grouped into launches. Knows nothing of text, checkpoints or the kernel's parameters (`launcher` does).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.runtime.launcher import Launcher, LaunchResult, Sampling
from cheetah.runtime.outputs import Timings

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer

LAUNCH_SECONDS = 0.1
"""About how long one decode launch takes: short enough to stream, long enough that launching costs nothing."""


class LaunchPace:
    """How many tokens the next decode launch makes: what takes about LAUNCH_SECONDS at the pace seen so far."""

    def __init__(self, max_steps: int, target_s: float = LAUNCH_SECONDS):
        self._max_steps = max_steps
        self._target_s = target_s
        self._step_s = target_s

    def note(self, steps: int, seconds: float) -> None:
        """Remembers how long a launch took."""
        self._step_s = seconds / steps

    def steps(self, wanted: int) -> int:
        """Steps of the next launch, at most `wanted`."""
        fitting = int(self._target_s / self._step_s) if self._step_s > 0 else self._max_steps
        return max(1, min(wanted, self._max_steps, fitting))


@dataclass(frozen=True)
class Request:
    """One completion to make: at most `max_tokens`, ended by a stop id but not before `min_tokens`."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    min_tokens: int = 0


class Completion:
    """One request while it is decoded. Iterate to get the sampled ids, some at a time; the last may be a stop id.

    `stop_id` names the stop id that ended it. Another completion on the same decoder ends this one with an error.
    """

    def __init__(self, decoder: Decoder, request: Request):
        self._decoder, self._launcher, self._request = decoder, decoder.launcher, request
        self._pace = LaunchPace(decoder.launch_steps)
        self.stop_id: int | None = None
        self._made = 0
        self._prefill_s = self._decode_s = 0.0
        self._launches = 0

    def timings(self, completion_tokens: int) -> Timings:
        """Seconds so far; `completion_tokens` of the ids made are in the caller's output."""
        prompt_tokens = len(self._request.prompt_ids)
        return Timings(prompt_tokens, completion_tokens, self._prefill_s, self._decode_s, self._launches)

    @property
    def finished(self) -> bool:
        """Whether no more ids will come."""
        return self.stop_id is not None or self._made >= self._request.max_tokens

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        token_ids = self._prefill()
        while True:
            self._made += len(token_ids)
            token_ids = self._cut_at_stop(token_ids)
            yield token_ids
            if self.finished:
                return
            token_ids = self._decode(token_ids[-1])

    def _prefill(self) -> tuple[int, ...]:
        """The prompt, in as few launches as may be, and the first sampled id."""
        self._decoder.begin(self)
        rest, most = self._request.prompt_ids, self._decoder.launch_steps
        while len(rest) > most:
            self._launch(rest[: most + 1], most)  # one input more than steps: the head need not run
            rest = rest[most:]
        return self._launch(rest, len(rest)).token_ids

    def _decode(self, last: int) -> tuple[int, ...]:
        steps = self._pace.steps(self._request.max_tokens - self._made)
        unstoppable = self._request.min_tokens - 1 - self._made
        return self._launch((last,), min(steps, unstoppable) if unstoppable > 0 else steps).token_ids

    def _launch(self, inputs: tuple[int, ...], steps: int) -> LaunchResult:
        self._decoder.check_current(self)
        sampling = self._request.sampling
        if self._made + steps + 1 - len(inputs) < self._request.min_tokens:
            sampling = Sampling(sampling.temperature, sampling.seed)
        result = self._launcher.launch(inputs, steps, sampling)
        self._pace.note(result.steps, result.seconds)
        self._launches += 1
        if self._made == 0:
            self._prefill_s += result.seconds
        else:
            self._decode_s += result.seconds
        return result

    def _cut_at_stop(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids up to the first stop id; the device knows the first few stop ids only, the host all of them."""
        before = self._made - len(token_ids)
        for position, token in enumerate(token_ids):
            if token in self._request.sampling.stop_ids and before + position + 1 >= self._request.min_tokens:
                self.stop_id = token
                return token_ids[: position + 1]
        return token_ids


class Decoder:
    """Turns requests into completions, one at a time.

    `launch_steps`: most tokens of one launch (default: what the kernel allows); for tests and for finding faults.
    """

    def __init__(self, launcher: Launcher, launch_steps: int | None = None):
        self.launcher = launcher
        self.launch_steps = min(launch_steps or launcher.max_steps, launcher.max_steps)
        self._current: object | None = None
        self.closed = False

    def complete(self, request: Request) -> Completion:
        """A completion, begun when it is iterated. CheetahError at once if prompt and max_tokens exceed the context."""
        self.launcher.cache.check_fits(len(request.prompt_ids) + request.max_tokens - 1)
        return Completion(self, request)

    def begin(self, completion: object) -> None:
        """Gives the cache, empty, to a completion (or to nobody)."""
        self.check_open()
        self._current = completion
        self.launcher.restart()

    def score(self, token_ids: Sequence[int], logits: Buffer) -> npt.NDArray[np.float32]:
        """float32 [len(token_ids), vocab]: row i are the logits after the ids 0 .. i."""
        self.launcher.cache.check_fits(len(token_ids))
        self.begin(None)
        most = self.launch_steps
        parts = [self.launcher.score(token_ids[i : i + most], logits) for i in range(0, len(token_ids), most)]
        return np.concatenate(parts)

    def check_open(self) -> None:
        """CheetahError once the device's memory was given back."""
        if self.closed:
            raise CheetahError("this LLM is closed: open a new one")

    def check_current(self, completion: object) -> None:
        """CheetahError if another request has taken the KV cache since this one began."""
        self.check_open()
        if completion is not self._current:
            raise CheetahError(
                "another request began before this stream was finished, and took its KV cache: finish a stream (or "
                "collect it in a list) before the next request"
            )
