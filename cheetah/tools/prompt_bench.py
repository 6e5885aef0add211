"""How long a prompt takes: from a request of an idle engine to its first token, by the host's clock.

The engine is the one that `LLM` has, with an empty cache each time. How it is shown is the command line's business.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from cheetah.errors import CheetahError
from cheetah.generate import choose_plan
from cheetah.models.config import ModelConfig
from cheetah.plan import Gpu, PlanError
from cheetah.plan.defaults import default_context
from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.assembly.buffers import Weights, upload_weights
from cheetah.runtime.assembly.kernels import choose_gpu
from cheetah.runtime.device import Device
from cheetah.runtime.engine.engine import Engine
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.requests import Failed, Request
from cheetah.tools.bench import check_depths
from cheetah.tools.random_buffers import fill_random


@dataclass(frozen=True)
class PromptMeasurement:
    """One length. first_token_ms: an entry for each repetition. launches: of the first token's way. rest_s: seconds
    before each request in which the GPU did nothing."""

    tokens: int
    first_token_ms: tuple[float, ...]
    launches: int
    rest_s: float = 0.0

    @property
    def ms(self) -> float:
        """The median."""
        return median(self.first_token_ms)

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.tokens / self.ms


@dataclass(frozen=True)
class _Unnamed:
    """A model whose weights are made on the device."""

    config: ModelConfig

    def tensor(self, name: str) -> Any:
        raise AssertionError(name)


def _as_many_sequences(config: ModelConfig, machine: Gpu, plan: dict[str, Any]) -> dict[str, Any]:
    """The overrides with as many sequences as a kernel takes, unless they say how many."""
    for batch in (8, 4, 2):
        with suppress(PlanError):
            choose_plan(config, machine, **{"batch": batch, **plan})
            return {"batch": batch, **plan}
    return plan


class PromptBench:
    """A model on a device, ready to read prompts of up to `longest` tokens.

    weights: the model's, or None for random ones, made in seconds. prompt_passes, prompt_tokens, plan: as `assemble`
    takes them.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights | None,
        device: Device,
        longest: int,
        gpu: str | None = None,
        prompt_passes: bool | int | None = None,
        prompt_tokens: int | None = None,
        **plan: Any,
    ) -> None:
        check_depths(config, [longest], 1)
        self.config = config
        self.assembly: Assembly = assemble(
            weights or _Unnamed(config),
            device=device,
            gpu=gpu,
            overrides=_as_many_sequences(
                config,
                choose_gpu(device.describe(), gpu),
                {"max_context": max(longest, default_context(config.max_position_embeddings)), **plan},
            ),
            prompt_passes=prompt_passes,
            prompt_tokens=prompt_tokens,
            pool_follows_memory=True,
            upload=upload_weights
            if weights
            else lambda _, manifest, buffers, *__: fill_random(config, manifest, buffers),
        )
        ready = self.assembly
        self.engine = Engine(ready.launcher, prompts=ready.prompts, solo=ready.solo, passes=ready.passes)

    def measure(self, tokens: int, repetitions: int, warmup: int, rest_s: float = 0.0) -> PromptMeasurement:
        """Random prompts of so many tokens, one after the other, each after `rest_s` seconds. CheetahError if one is
        answered differently when it is asked again: such a speed is worth nothing."""
        found = []
        for number in range(warmup + repetitions):
            time.sleep(rest_s)
            found.append(self.first_token(tokens, number % 2))
        if any(len({token for _, token, _ in found[first::2]}) > 1 for first in (0, 1)):
            raise CheetahError(f"a prompt of {tokens} tokens was answered differently: its speed is worth nothing")
        return PromptMeasurement(tokens, tuple(ms for ms, _, _ in found[warmup:]), found[-1][2], rest_s)

    def prompt(self, tokens: int, seed: int) -> tuple[int, ...]:
        """Random ids, the same for the same seed."""
        return tuple(map(int, np.random.default_rng(seed).integers(0, self.config.vocab_size, tokens)))

    def first_token(self, tokens: int, seed: int) -> tuple[float, int, int]:
        """Milliseconds to the first token, the token, and the launches it took."""
        request = Request(self.prompt(tokens, seed), 1, Sampling())
        started = time.perf_counter()
        self.engine.add(request)
        while not (events := self.engine.step()):
            pass
        seconds = time.perf_counter() - started
        while not self.engine.is_idle:
            self.engine.step()
        (event,) = events
        if isinstance(event, Failed):
            raise CheetahError(event.message)
        return 1e3 * seconds, event.token_ids[0], event.timings.launches

    def close(self) -> None:
        """Gives the device's memory back."""
        self.assembly.close()


def open_prompt_bench(*arguments: Any, **options: Any) -> AbstractContextManager[PromptBench]:
    """A `PromptBench` that is closed at the end."""
    return closing(PromptBench(*arguments, **options))


def prompt_record(measurement: PromptMeasurement, bench: PromptBench, circumstances: dict[str, Any]) -> dict[str, Any]:
    """One line of a results file; `circumstances` as in `cheetah.tools.bench.record`."""
    passes = bench.assembly.passes
    return {
        **circumstances,
        "system": "cheetah",
        "prompt_tokens": measurement.tokens,
        "pass_tokens": [one.tokens for one in passes],
        "first_token_ms": float(f"{measurement.ms:.6g}"),
        "first_token_ms_samples": [float(f"{one:.6g}") for one in measurement.first_token_ms],
        "launches": measurement.launches,
        "rest_s": measurement.rest_s,
        "plan": bench.assembly.manifest.plan,
    }


def parsed_prompts(text: str) -> Sequence[int]:
    """ "128,2048" -> (128, 2048)."""
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise CheetahError(f"--prompts {text}: expected numbers of tokens, e.g. --prompts 128,512,2048")
    return lengths
