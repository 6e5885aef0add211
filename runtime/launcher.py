"""Launches of a generated Llama kernel: its arguments by name, epochs, KV plans, page table, tokens in and out.

The kernel's parameters and their meaning are the manifest's. Knows nothing of prompts, completions or text: `decode`
decides what is launched.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.manifest import Manifest
from cheetah.models.llama.config import LlamaConfig
from cheetah.plan.kv import KvPlanLayout, kv_plans_for_launch, max_plans
from cheetah.runtime.kv_cache import CachedSequence

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Argument, Buffer, Device, Kernel

EPOCH_LIMIT = 2**32 - 1


@dataclass(frozen=True)
class Sampling:
    """What one launch needs to know to sample: temperature 0 is greedy."""

    temperature: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class LaunchResult:
    """`token_ids` were sampled, `steps` were done, in `seconds` by the host's clock."""

    token_ids: tuple[int, ...]
    steps: int
    seconds: float


class Epochs:
    """The numbers that flagged words carry: a launch takes as many as it may need, and none is used twice.

    They start at 1; before they would pass 2**32-1 the exchange must be zeroed and they start again.
    """

    def __init__(self, per_step: int, first: int = 1):
        self._per_step = per_step
        self._next = first

    def take(self, steps: int) -> tuple[int, bool]:
        """(first epoch of a launch of `steps` steps, whether the exchange must be zeroed before it)."""
        needed = steps * self._per_step
        restarted = self._next + needed > EPOCH_LIMIT
        first = 1 if restarted else self._next
        self._next = first + needed
        return first, restarted


class Launcher:
    """Launches of one kernel over one sequence's cache.

    `buffers` holds the device buffers by parameter name. All of the sequence's tokens that were launched are in
    `cache.length`. After a launch that failed or did not end, nothing can be launched any more.
    """

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        manifest: Manifest,
        config: LlamaConfig,
        buffers: Mapping[str, Buffer],
        cache: CachedSequence,
        timeout_s: float | None = None,
    ):
        self._device, self._kernel, self._buffers, self.cache = device, kernel, dict(buffers), cache
        self.vocab_size = config.vocab_size
        self._plans = _Plans(manifest, config)
        self._epochs = Epochs(config.layers + 1)
        self._timeout_s = timeout_s
        self._stop_capacity = buffers["stop_ids"].nbytes // 4
        self._pages = manifest.buffer("page_table").shape[0]
        self._broken: str | None = None
        self.max_steps = int(manifest.plan["max_steps"])

    def restart(self) -> None:
        """Begins another sequence: forgets what is cached."""
        self.cache.clear()

    def launch(self, inputs: Sequence[int], steps: int, sampling: Sampling) -> LaunchResult:
        """`steps` tokens go through the model: `inputs`, then the sampled ones.

        One input more than `steps` samples nothing. A sampled stop id ends the launch early.
        """
        assert 1 <= len(inputs) <= steps + 1 and steps <= self.max_steps, (len(inputs), steps)
        return self._run(inputs, steps, sampling, None)

    def score(self, inputs: Sequence[int], logits: Buffer) -> npt.NDArray[np.float32]:
        """float32 [len(inputs), vocab]: the logits after each input. `logits` has room for max_steps rows."""
        self._run(inputs, len(inputs), Sampling(), logits)
        return logits.download(np.float32, (len(inputs), self.vocab_size))

    def _run(self, inputs: Sequence[int], steps: int, sampling: Sampling, logits: Buffer | None) -> LaunchResult:
        if self._broken is not None:
            raise CheetahError(f"an earlier launch failed, the device's state is lost: open a new LLM ({self._broken})")
        started = time.perf_counter()
        arguments = self._prepare(inputs, steps, sampling, logits)
        try:
            self._device.launch(self._kernel, arguments)
            self._plans.prepare(self.cache.length + steps, self.max_steps)  # while the kernel runs
            self._device.synchronize(self._timeout_s)  # says which phase each block reached if it is not done in time
            done, token_ids = self._read(len(inputs), steps)
        except Exception as error:
            self._broken = str(error).partition("\n")[0]
            raise
        self.cache.length += done
        return LaunchResult(token_ids, done, time.perf_counter() - started)

    def _prepare(
        self, inputs: Sequence[int], steps: int, sampling: Sampling, logits: Buffer | None
    ) -> dict[str, Argument]:
        """Uploads what changed; gives the arguments by parameter name."""
        if self.cache.reserve(self.cache.length + steps):
            self._buffers["page_table"].upload(self.cache.table(self._pages))
        plans = self._plans.encode(self.cache.length, steps)
        stops = np.array(sampling.stop_ids[: self._stop_capacity], np.int32)
        self._buffers["kv_plans"].upload(plans)
        self._buffers["tokens"].upload(np.array(inputs, np.int32))
        if stops.size:
            self._buffers["stop_ids"].upload(stops)
        self._buffers["progress"].fill(0xFF)  # what a block has not written yet says "not started"
        epoch, restarted = self._epochs.take(steps)
        if restarted:
            self._buffers["exchange"].fill(0)
        return {
            **self._buffers,
            "logits": logits,
            "length": self.cache.length,
            "given": len(inputs),
            "steps": steps,
            "plan_count": len(plans),
            "stop_count": stops.size,
            "epoch": epoch,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
        }

    def _read(self, given: int, steps: int) -> tuple[int, tuple[int, ...]]:
        """(steps done, sampled ids). Step s samples tokens[s + 1] if that is not given."""
        done = int(self._buffers["status"].download(np.int32, (8,))[0])
        if not 1 <= done <= steps:
            raise CheetahError(f"the kernel reports {done} of {steps} steps done: it did not run as its manifest says")
        tokens = self._buffers["tokens"].download(np.int32, (steps + 1,))
        sampled = tuple(int(token) for token in tokens[given : done + 1])
        if any(not 0 <= token < self.vocab_size for token in sampled):
            raise CheetahError(f"the kernel sampled {sampled}, outside the vocabulary 0..{self.vocab_size - 1}")
        return done, sampled


class _Plans:
    """The KV plans of a launch in device form; those of the next launch can be made while the kernel runs."""

    def __init__(self, manifest: Manifest, config: LlamaConfig):
        plan = manifest.plan
        self._layout = KvPlanLayout(manifest.launch.blocks, config.kv_heads, int(plan["batch"]))
        self._scheduling = {
            "kv_heads": config.kv_heads,
            "blocks": manifest.launch.blocks,
            "group": config.group,
            "align": int(plan["kv_align"]),
            "minimum": int(plan["kv_chunk_min"]),
        }
        self.prepare(0, 1)
        most = max_plans(int(plan["max_steps"]), int(plan["kv_align"]))
        room = manifest.buffer("kv_plans").shape
        if len(room) != 2 or room[0] < most or room[1] != self._layout.plan_words:
            needed = [most, self._layout.plan_words]
            raise CheetahError(f"manifest: buffer kv_plans is {list(room)}, a launch needs {needed}: generate it again")

    def encode(self, length: int, steps: int) -> npt.NDArray[np.int32]:
        """int32 [plans, plan_words] for `steps` steps after `length` tokens."""
        if self._length != length or self._steps < steps:
            self.prepare(length, steps)
        return self._words[: np.searchsorted(self._words[:, 0], steps)]  # column 0 is the first step, ascending

    def prepare(self, length: int, steps: int) -> None:
        """Makes the plans of a launch to come, of at most `steps` steps, ready for `encode`."""
        self._length, self._steps = length, steps
        self._words = self._layout.encode_launch(kv_plans_for_launch(length, steps, **self._scheduling))
