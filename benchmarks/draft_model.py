"""What a round of two models costs beside its steps: one drafts, the other verifies.

    python -m benchmarks.draft_model random:llama-3.1-8b random:llama-3.2-1b --drafts 4 --context 1024

The steps are measured in launches of 64, so that starting them costs next to nothing: those of the model that drafts,
and those of the model that verifies so many drafts and the token before them. Rounds are those that an `LLM` makes,
many a launch, with all that the host does for one. Weights may be random ones: then no draft is right, a round makes
one token, and its cost is all that is said.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.engine.draft_model import ReadSequence
from cheetah.runtime.engine.draft_rounds import RoundPart
from cheetah.runtime.engine.drafting import Drafting
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launcher import Launcher, Part
from cheetah.runtime.speculation import drafting_by

STEPS = 64
"""Of a launch without rounds."""
FIRST = 1
"""The token that stands behind the context."""


class RoundsBench:
    """Launches over the pages of a prompt that both models have read."""

    def __init__(self, llm: LLM, drafts: int, context: int, steps: int) -> None:
        self.llm, self.drafts, self.context, self.steps = llm, drafts, context, steps
        made, model = llm.assembly, llm.engine.engine._scheduler._model
        assert made.drafts is not None and model is not None and model.rounds is not None
        self.verifier, self.drafter, self.rounds = made.launcher, made.drafts.solo or made.drafts.launcher, model.rounds
        length = context + room_for(drafts, steps)
        prompt = np.random.default_rng(0).integers(0, llm.config.vocab_size, length).tolist()
        pace = llm.engine.engine._scheduler._pace
        pace.break_even = lambda sequences: 0.0  # type: ignore[method-assign]
        pace.lacks_plain = lambda sequences: False  # type: ignore[method-assign]
        llm.generate(prompt, SamplingParams(max_tokens=2 * drafts, ignore_eos=True, temperature=0.0))

    def draft_step(self) -> float:
        """Milliseconds of a step that drafts."""
        cache = self._at(self.drafter)
        known = [FIRST] * (self.context + 1)
        return self._steps(self.drafter, Part(cache, [FIRST], STEPS, known=known, prompt=self.context))

    def verified_step(self) -> float:
        """Milliseconds of a step that verifies, no draft of which is right."""
        cache, width = self._at(self.verifier), self.drafts + 1
        drafting = Drafting(STEPS, [0] * (STEPS * width - 1))
        known = [FIRST] * (self.context + 1)
        return self._steps(
            self.verifier, Part(cache, [FIRST], STEPS * width, per_step=width, known=known, drafting=drafting)
        )

    def round(self) -> tuple[float, float]:
        """Milliseconds of a round, and how many tokens it made."""
        width, cache = self.drafts + 1, self._at(self.verifier)
        read = ReadSequence(cache.pool, cache.page_size, cache.context)
        read.pages, read.length = cache.pages, self.context
        known = [FIRST] * (self.context + 1)
        by = Part(read, [FIRST], self.drafts, known=known, prompt=self.context)
        drafting = Drafting(self.steps)
        part = RoundPart(cache, [FIRST], self.steps * width, per_step=width, known=known, drafting=drafting, by=by)
        tokens = 0

        def work() -> int:
            nonlocal tokens
            launch = self.rounds.prepare([part])
            self.rounds.start(launch)
            while not self.rounds.wait(launch):
                self.rounds.fresh(launch)
            (result,) = self.rounds.finish(launch)
            tokens = len(result.token_ids)
            return result.steps

        found = self._timed(work)
        return found, tokens / self.steps

    def _at(self, launcher: Launcher) -> CachedSequence:
        """The launcher's own sequence behind the context, in the pages that the prompt had."""
        cache = launcher.cache
        cache.clear()
        cache.reserve(self.context + room_for(self.drafts, self.steps))
        cache.length = self.context
        return cache

    def _steps(self, launcher: Launcher, part: Part) -> float:
        """Milliseconds of a step of one launch, which is prepared before."""
        launch = launcher.prepare([part])

        def work() -> int:
            launcher.start(launch)
            return launcher.finish(launch)[0].steps

        return self._timed(work)

    def _timed(self, work: Callable[[], int]) -> float:
        """By device events."""
        device = self.llm.assembly.device
        start = device.record()
        steps = work()
        return device.elapsed_ms(start, device.record()) / steps


def room_for(drafts: int, rounds: int) -> int:
    """Tokens behind the context of launches of steps and of rounds."""
    return max(STEPS, rounds) * (drafts + 1)


def measured(bench: RoundsBench, repetitions: int) -> dict[str, float]:
    """Medians, in turns, behind one that is not counted."""
    found = [(bench.draft_step(), bench.verified_step(), *bench.round()) for _ in range(repetitions + 1)][1:]
    draft, verified, whole, tokens = (median(column) for column in zip(*found, strict=True))
    together = bench.drafts * draft + verified
    return {
        "draft_step_ms": draft,
        "verified_step_ms": verified,
        "sum_ms": together,
        "round_ms": whole,
        "ratio": whole / together,
        "tokens_a_round": tokens,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line, append a record."""
    options = parser().parse_args(arguments)
    config = drafting_by(options.drafter) | {"num_speculative_tokens": options.drafts}
    room = options.context + room_for(options.drafts, options.rounds)
    with LLM(
        options.model,
        device=options.device,
        speculative_config=config,
        max_context=room + 64,
        batch=1,
        prefix_cache=False,
        tokenizer=False,
        quiet=True,
    ) as llm:
        bench = RoundsBench(llm, options.drafts, options.context, options.rounds)
        found = measured(bench, options.repetitions)
    named = {"model": options.model, "drafter": options.drafter, "drafts": options.drafts, "context": options.context}
    print(
        f"{options.model} drafted for by {options.drafter}, {options.drafts} drafts, context {options.context}: "
        f"a round {found['round_ms']:.3f} ms, its steps {options.drafts} x {found['draft_step_ms']:.3f} + "
        f"{found['verified_step_ms']:.3f} = {found['sum_ms']:.3f} ms: {found['ratio']:.3f}; "
        f"{found['tokens_a_round']:.2f} tokens a round"
    )
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**named, **found}) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.draft_model", description=(__doc__ or "").splitlines()[0])
    made.add_argument("model", help="the one that verifies: random:PRESET, a folder or demo")
    made.add_argument("drafter", help="the one that drafts; mtp: the layer that the model brings for that")
    made.add_argument("--drafts", type=int, default=4, help="of a round")
    made.add_argument("--context", type=int, default=1024, help="tokens before it")
    made.add_argument("--rounds", type=int, default=16, help="of a launch")
    made.add_argument("--repetitions", type=int, default=7, help="launches of each")
    made.add_argument("--json", type=Path, help="append the record here")
    made.add_argument("--device", default="cuda", help="cuda, or emulator to try it")
    return made


if __name__ == "__main__":
    sys.exit(main())
