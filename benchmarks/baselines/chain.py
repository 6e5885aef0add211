"""Decode steps one after another, each fed with the token before it, and the time that they take.

A `Chain` begins again and again at the same place: a cache taken as filled with `context` tokens, and a first token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from cheetah.tools.bench import FIRST_TOKEN as FIRST_TOKEN


class Chain(Protocol):
    """What a system makes for one context: ready to run, compiled and captured."""

    settings: dict[str, object]

    def reset(self) -> None:
        """Back to `context` tokens in the cache and the first token, in the order of the device's work."""

    def step(self) -> None:
        """Queue one step: a token in, K and V appended, the likeliest token out."""

    def tokens(self) -> list[int]:
        """The tokens made since `reset`, once they are there."""


class System(Protocol):
    """A way to decode, for one model. weights: what they are, in words. weight_bytes: of one, its share of scales
    included."""

    name: str
    weights: str
    weight_bytes: float

    def chain(self, context: int, steps: int) -> Chain:
        """Compile for this context with room for `steps` more tokens, and run once. Takes up to minutes."""


@dataclass(frozen=True)
class Run:
    """ms: by device events around all steps. host_ms: by the host's clock, reset and reading the tokens included."""

    ms: float
    host_ms: float
    tokens: tuple[int, ...]


def run(chain: Chain, steps: int, device: str) -> Run:
    """`steps` steps from the beginning."""
    if device != "cuda":
        return _run_on_cpu(chain, steps)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start = time.perf_counter()
    chain.reset()
    before.record()
    for _ in range(steps):
        chain.step()
    after.record()
    tokens = tuple(chain.tokens())
    host_ms = 1e3 * (time.perf_counter() - start)
    return Run(float(before.elapsed_time(after)), host_ms, tokens)


def _run_on_cpu(chain: Chain, steps: int) -> Run:
    start = time.perf_counter()
    chain.reset()
    for _ in range(steps):
        chain.step()
    tokens = tuple(chain.tokens())
    milliseconds = 1e3 * (time.perf_counter() - start)
    return Run(milliseconds, milliseconds, tokens)
