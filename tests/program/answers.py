"""Requests that are answered while others are, with the bits of every logit written down by what they follow from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cheetah.runtime.assembly.assemble import Assembly
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.launcher import Launch, LaunchResult, Part
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.requests import Request
from cheetah.runtime.engine.states import StatePool
from cheetah.runtime.engine.step_launches import StepLaunches
from cheetah.runtime.sampling import seed_of
from tests.desk import Asked, Desk


@dataclass
class Record:
    """Bits by name: whatever has been written down once must be the same for ever after. `changed` names what was not.

    What is computed of a token of a prompt has the name of the tokens up to it, whichever prompt they begin; the last
    token of a prompt and those behind it also that of the prompt's length, since they were decoded.
    """

    known: dict[Any, bytes] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    def note(self, what: str, prompt: int, ids: Sequence[int], bits: np.ndarray[Any, Any]) -> None:
        """The bits of `what` that belong to the last of `ids`, of which the first `prompt` are a prompt."""
        decoded_behind = prompt if len(ids) >= prompt else None
        digest = hashlib.blake2b(np.ascontiguousarray(bits).tobytes(), digest_size=16).digest()
        if self.known.setdefault((what, decoded_behind, tuple(ids)), digest) != digest:
            self.changed.append(f"{what} of token {len(ids) - 1} behind a prompt of {prompt}")


class Service:
    """An engine over an assembly, with an empty KV cache and an empty prefix cache, whose bits are recorded.

    Completions that are decoded at the same time need seeds of their own, by which their parts are told apart.
    """

    def __init__(
        self, assembly: Assembly, record: Record, *, launch_steps: int | None = None, prefix_cache: bool = True
    ):
        launcher = assembly.launcher
        old = launcher.cache
        pool = PagePool(old.pool.pages, states=StatePool(old.pool.states.count))
        launcher.cache = CachedSequence(pool, old.page_size, old.context)
        self.assembly, self.record = assembly, record
        self.prefixes = PrefixCache(launcher.cache.pool, old.page_size) if prefix_cache else None
        self.desk = Desk(launcher, launch_steps, self.prefixes, assembly.prompts, assembly.passes)
        self.cached_tokens: list[int] = []
        self._ids: dict[int, tuple[int, list[int]]] = {}

    def answers(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """The token ids of all completions of requests that are submitted together in this order."""
        completions = [one for request in requests for one in self.desk.complete_several(request)]
        with self._recording():
            self.begin(completions)
            found = [tuple(token for part in one for token in part) for one in completions]
        self.cached_tokens += [one.cached_tokens for one in completions]
        self._note_pages(requests)
        return found

    def begin(self, completions: Sequence[Asked]) -> None:
        """Puts completions in line."""
        for one in completions:
            seed = seed_of(one.request.sampling.seed, one.index)
            self._ids[seed] = len(one.request.prompt_ids), list(one.request.prompt_ids)
        self.desk.submit(completions)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """While all launches give logits, which are written down."""
        head = self.assembly.passes[0].head if self.assembly.passes else None
        launchers = [one for one in (self.assembly.launcher, self.assembly.prompts, head) if one is not None]
        for number, launcher in enumerate(launchers):
            room = launcher.max_steps * launcher.tokens * launcher.vocab_size * 4
            logits = self.assembly.device.allocate(room, 0xFF)
            self.assembly.buffers[f"logits {number}"] = logits
            self._record_launches(launcher, logits, are_cached=launcher is head)
        try:
            yield
        finally:
            for number, launcher in enumerate(launchers):
                del launcher.prepare, launcher.finish  # the methods of the class are back
                self.assembly.buffers.pop(f"logits {number}").free()

    def _record_launches(self, launcher: StepLaunches, logits: Any, are_cached: bool) -> None:
        """are_cached: the tokens of a part are in the cache before the launch, which adds none."""
        prepare, finish = launcher.prepare, launcher.finish
        parts: list[Part] = []
        lengths: list[int] = []
        launches: list[Launch] = []

        def prepare_with_logits(of_launch: Sequence[Part], _: Any = None) -> Launch:
            parts[:] = of_launch
            lengths[:] = [part.cache.length - are_cached * part.total for part in of_launch]
            launches[:] = [prepare(of_launch, logits)]
            return launches[0]

        def finish_and_record(launch: Launch) -> list[LaunchResult]:
            results = finish(launch)
            if launch not in launches:  # of a launch that went on when all tokens of the answers before were there
                return results
            found = logits.download(np.float32, (results[0].steps, launcher.tokens, launcher.vocab_size))
            for part, result in zip(parts, results, strict=True):
                self._ids[part.sampling.seed][1].extend(result.token_ids)
            for column, (number, within) in enumerate(launcher.columns):
                part = parts[number]
                rows = found[:, column][: -(-(part.total - within) // part.per_step)]
                prompt, ids = self._ids[part.sampling.seed]
                for step, row in enumerate(rows):
                    position = lengths[number] + step * part.per_step + within
                    if position < len(ids):
                        self.record.note("logits", prompt, ids[: position + 1], row)
            return results

        launcher.prepare = prepare_with_logits  # type: ignore[method-assign]
        launcher.finish = finish_and_record  # type: ignore[method-assign]

    def _note_pages(self, requests: Sequence[Request]) -> None:
        """The keys and values that the prefix cache holds of these prompts."""
        if self.prefixes is None:
            return
        spec = self.assembly.manifest.buffer("kv")
        kv = self.assembly.buffers["kv"].download(np.uint8 if spec.dtype == "u8" else np.uint16, spec.shape)
        for request in requests:
            pages, _ = self.prefixes.lookup(request.prompt_ids)
            for number, page in enumerate(pages, 1):
                ids = request.prompt_ids[: number * self.prefixes.page_size]
                self.record.note("page", len(request.prompt_ids), ids, kv[:, page])
