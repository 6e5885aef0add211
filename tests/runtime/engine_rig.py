"""An engine over the tiny model, on the device that runs the reference, and what a request makes alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from fake_kernel import FakeDevice, generate_kernel
from tiny_models import tiny_weights

from cheetah.models.dense.reference import Reference
from cheetah.models.rounding import round_to_bf16
from cheetah.plan.kv.tables import CANCELLED_TOKEN, NOT_YET
from cheetah.runtime.assembly.assemble import assemble
from cheetah.runtime.engine.engine import Engine
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.requests import Event, Made, Request
from cheetah.runtime.sampling import seed_of


class SlowDevice(FakeDevice):
    """Shows a token of each sequence whenever it is asked whether it is done; a sequence that the host has ended gets
    no more. It is done one question behind the last."""

    def launch(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        super().launch(kernel, arguments)
        self.arguments = arguments
        plan = kernel.manifest.plan
        shape = (plan["batch"], plan["max_steps"] * plan["tokens"] + 1)
        self.shown = arguments["emitted"].view(np.uint32, shape)
        self.emitted = self.shown.copy()
        self.shown[:] = NOT_YET
        self.tokens = arguments["tokens"].view(np.uint32, shape)

    def is_done(self) -> bool:
        columns = np.flatnonzero(((self.emitted != NOT_YET) & (self.shown == NOT_YET)).any(0))
        if not columns.size:
            return True
        cancelled = self.arguments["cancelled"].view(np.uint32, len(self.shown))
        for row in np.flatnonzero(cancelled == self.arguments["epoch"]):
            self.emitted[row, columns[0] :] = CANCELLED_TOKEN
            self.tokens[row, columns[0] :] = CANCELLED_TOKEN
        self.shown[:, columns[0]] = self.emitted[:, columns[0]]
        return False


class Rig:
    """An engine, its device and its pool, which `pages` may make smaller."""

    def __init__(
        self,
        pages: int | None = None,
        launch_steps: int | None = None,
        chunk_tokens: int | None = None,
        caches: bool = False,
        solo: bool = False,
        device: FakeDevice | None = None,
        **overrides: Any,
    ):
        self.device = device or FakeDevice()
        assembly = assemble(
            tiny_weights(),
            device=self.device,
            overrides=overrides,
            generate_kernel=generate_kernel,
            quiet=True,
            solo=solo,
        )
        launcher = assembly.launcher
        if pages is not None:
            launcher.cache = CachedSequence(PagePool(pages), launcher.cache.page_size, launcher.cache.context)
        self.pool = launcher.cache.pool
        prefixes = PrefixCache(self.pool, launcher.cache.page_size) if caches else None
        logits = assembly.hosts_logits_buffer
        self.engine = Engine(launcher, launch_steps, prefixes, None, chunk_tokens, assembly.solo, logits)

    def run(self) -> list[Event]:
        """All events until nothing is left to do."""
        events: list[Event] = []
        while not self.engine.is_idle:
            events += self.engine.step()
        return events

    @property
    def launched(self) -> list[int]:
        """How many sequences each launch had."""
        return [len(launch["sequences"]) for launch in self.device.launches]


def alone(request: Request, index: int = 0) -> tuple[int, ...]:
    reference = Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16)
    sampling = request.sampling
    how = {"temperature": sampling.temperature, "seed": seed_of(sampling.seed, index)}
    return tuple(reference.generate(request.prompt_ids, request.max_tokens, **how))


def made_by(events: Iterable[Event]) -> dict[int, tuple[int, ...]]:
    """The ids of each completion; each must end once, with its last event."""
    found: dict[int, tuple[int, ...]] = defaultdict(tuple)
    ended: set[int] = set()
    for event in events:
        assert isinstance(event, Made), event
        assert event.token_ids and event.id not in ended
        found[event.id] += event.token_ids
        assert event.timings.completion_tokens == len(found[event.id])
        if event.finish_reason is not None:
            ended.add(event.id)
    assert ended == set(found)
    return found
