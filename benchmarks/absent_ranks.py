"""How fast a step by four or eight GPUs would be, on two that are there: a simulation, no measurement of such machines.

    python -m benchmarks.absent_ranks llama-3.1-70b:4 llama-3.1-70b@int4-g128:8 --device cuda:0,1

The two GPUs are ranks 0 and 1 of so many: each has a rank's share of the weights and of the cache, and runs the kernel
of that many ranks. It stores each word as often as there are ranks, half of them over the link: besides its own places
also those of the ranks that are not there and whose number is even as its own is, or odd. So every word is there that a
rank waits for, and the numbers in it are wrong. What is not in the figures: that eight GPUs start and run less evenly
than two, and how stores to seven others share a rank's links.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.exchange_kinds import FlaggedExchange
from cheetah.cli.configs import named_config
from cheetah.lang import ty
from cheetah.manifest import Manifest
from cheetah.runtime.device import open_device
from cheetah.runtime.device.interface import Argument, Device, DeviceInfo
from cheetah.tools.bench import open_bench
from cheetah.tools.circumstances import commit

PRESENT = 2
TURNS = {"candidates": 2}
"""Vectors of which steps take turns with several."""


def standing_for(group: Any, ranks: int) -> Device:
    """A group of two devices, as the first two of so many ranks: peer k of a rank is the one with the same number
    modulo two."""

    class Standing(type(group)):  # type: ignore[misc]
        def describe(self) -> DeviceInfo:
            found: DeviceInfo = replace(super().describe(), ranks=ranks)
            return found

        def _arguments(self, manifest: Manifest, arguments: Mapping[str, Argument]) -> Any:
            return super()._arguments(replace(manifest, world_size=PRESENT), arguments)

    made = Standing.__new__(Standing)
    made.__dict__.update(group.__dict__)
    device: Device = made
    return device


@contextmanager
def words_of_absent_ranks() -> Iterator[None]:
    """Inside, kernels are written whose ranks 0 and 1 store what all even and all odd ones would: to peer k, as which a
    device that is there is given, at the place of the rank that is k further on, or one less where k is odd."""

    def places(self: Any, name: str, index: ch.Value) -> list[ch.Expr]:
        if not self.peers.share(name):
            return [self.place(name, index)]
        ranks = 1 + len(self.peers.exchanges)
        share, rest = divmod(int(self.vectors[name].words), ranks * TURNS.get(name, 1))
        assert not rest, f"{name}: {self.vectors[name].words} words of {ranks} ranks"
        found = []
        for k, words in enumerate([self._words_of(name), *self.peer_words[self.vectors[name].word]]):
            of_rank = ch.cast(ty.u32, index) + k // PRESENT * PRESENT * share
            found.append(words + ch.const(ty.u32, self._word(name, of_rank), name="word"))
        return found

    def publish_later(self: Any, name: str, index: ch.Value, epoch: ch.Value) -> Callable[[ch.Value], None]:
        stored = self._places(name, index)

        def publish(data: ch.Value) -> None:
            self._publish_at(stored, name, self._as_published(name, index, data), epoch)

        return publish

    before = FlaggedExchange._places, FlaggedExchange.publish_later
    later = ch.inline(publish_later)
    FlaggedExchange._places, FlaggedExchange.publish_later = places, later  # type: ignore[method-assign]
    try:
        yield
    finally:
        FlaggedExchange._places, FlaggedExchange.publish_later = before  # type: ignore[method-assign]


def measure(
    model: str, ranks: int, device: str, context: int, steps: int, turns: int, kv_chunk: int = 0
) -> dict[str, Any]:
    """A record: of one sequence behind so many cached tokens. kv_chunk: 0, or fixed, and no M-tile is shared."""
    named = named_config(f"random:{model}")
    with open_device(device, say=lambda line: None, ranks=PRESENT) as group, words_of_absent_ranks():
        standing = standing_for(group, ranks)
        plan = {"max_context": context + 256, "kv_chunk": kv_chunk}
        with open_bench(named.config, named.canonical, None, standing, [context], steps, **plan) as ready:
            found = ready.measure(context, steps, turns, 1)
    return {
        **{"commit": commit(), "model": model, "ranks": ranks, "simulated_on": PRESENT, "context": context},
        **{"ms_per_step": found.ms_per_step, "ms_per_step_samples": found.step_ms, "tokens_per_s": found.tokens_per_s},
        **{"ceiling_gb_per_s": found.ceiling_gb_per_s, "plan": ready.manifest.plan},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+", help="MODEL:RANKS")
    parser.add_argument("--device", default="cuda:0,1", help="two GPUs, or emulator to try it: no speeds")
    parser.add_argument("--context", type=int, default=128, help="tokens cached before a launch")
    parser.add_argument("--kv-chunk", type=int, default=0, help="fixed: bits are one GPU's, and no M-tile is shared")
    parser.add_argument("--steps", type=int, default=64, help="of a launch")
    parser.add_argument("--turns", type=int, default=5, help="timed launches")
    parser.add_argument("--json", type=Path, help="append the records here")
    args = parser.parse_args()
    for work in args.works:
        model, _, ranks = work.rpartition(":")
        found = measure(model, int(ranks), args.device, args.context, args.steps, args.turns, args.kv_chunk)
        of_ranks = f"{model:28} {ranks} ranks, simulated on two GPUs"
        print(f"{of_ranks}: {found['tokens_per_s']:8.1f} tokens/s  {found['ms_per_step']:8.4f} ms", flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
