"""A baseline on a device: chains for some contexts, and measurements of them as records like those of our bench."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.baselines.chain import Chain, Run, System, run
from benchmarks.baselines.weights import random_weights, step_bytes
from cheetah.errors import CheetahError
from cheetah.models.config import ModelConfig
from cheetah.runtime.assembly.kernels import choose_gpu
from cheetah.runtime.device import open_device
from cheetah.tools.bench import Measurement, Work
from cheetah.tools.circumstances import clocks, commit, now
from cheetah.tools.measured_ceiling import ReadCeiling

SYSTEMS = ("plain", "transformers", "gpt-fast")
NOT_A_SPEED = "on the CPU: not a speed"
CEILING_SINK = 1024
Say = Callable[[str], None]


def make_system(
    kind: str, config: ModelConfig, device: str, compiled: bool = True, clone: Path | None = None
) -> System:
    """One of SYSTEMS with random weights on "cuda" or "cpu". Its library is loaded now. clone: gpt-fast's folder.
    CheetahError for weights that it is not measured with."""
    if kind == "gpt-fast":
        from benchmarks.baselines.gpt_fast import GptFastSystem

        return GptFastSystem(config, clone, device, compiled)
    if config.weight_formats:
        weights_in_words = config.formats_in_words
        raise CheetahError(f"{kind}: weights {weights_in_words}: it is measured with bf16; gpt-fast has int4-g128 too")
    weights = random_weights(config, device)
    if kind == "plain":
        from benchmarks.baselines.plain_llama import PlainSystem

        return PlainSystem(config, weights, compiled)
    from benchmarks.baselines.transformers_llama import TransformersSystem

    return TransformersSystem(config, weights, compiled)


class Ceiling:
    """Our own read ceiling beside torch in this process, or the one that was told, or none."""

    def __init__(self, device: str, told: float | None, say: Say) -> None:
        self._told, self._measured, self.driver = told, None, ""
        if device != "cuda":
            return
        try:
            opened = open_device("cuda", say=say)
            info = opened.describe()
            self.driver = info.driver
            # It reads memory of its own, as its second argument is small.
            self._measured = ReadCeiling(opened, choose_gpu(info), opened.allocate(CEILING_SINK))
        except Exception as problem:  # a baseline's speed is worth having without it
            say(f"no ceiling of its own: {type(problem).__name__}: {problem}")

    def gb_per_s(self) -> float | None:
        """Measured now; GB = 1e9 bytes."""
        return self._measured.gb_per_s() if self._measured else self._told


class Session:
    """One system and model. `prepare` compiles; `measure` can then be called again and again."""

    def __init__(
        self,
        kind: str,
        config: ModelConfig,
        model: str,
        device: str,
        compiled: bool,
        told: float | None,
        say: Say,
        clone: Path | None = None,
    ) -> None:
        self._config, self._model, self._device, self._say = config, model, device, say
        begin = time.monotonic()
        self.system = make_system(kind, config, device, compiled, clone)
        if device == "cuda":
            torch.cuda.empty_cache()  # what was only needed to build it is left to others
        self._ceiling = Ceiling(device, told, say)
        self._chains: dict[int, tuple[Chain, int]] = {}
        self._settings: dict[int, dict[str, Any]] = {}
        say(f"{self.system.name}, {model}: weights made in {time.monotonic() - begin:.1f} s")

    def prepare(self, context: int, steps: int) -> None:
        """Compile for this context and `steps` a run, and run once."""
        begin = time.monotonic()
        chain = self.system.chain(context, steps)
        first = run(chain, steps, self._device)
        seconds = time.monotonic() - begin
        self._chains[context] = chain, steps
        self._settings[context] = {**chain.settings, "torch": torch.__version__, "compile_s": round(seconds, 1)}
        self._say(f"context {context}: ready after {seconds:.1f} s, {first.ms / steps:.4f} ms/step")

    @property
    def ready(self) -> list[int]:
        """Contexts that can be measured."""
        return list(self._chains)

    def measure(self, context: int, repetitions: int, warmup: int) -> dict[str, Any]:
        """The record of `repetitions` runs, with the ceiling before and after."""
        chain, steps = self._chains[context]
        before = self._ceiling.gb_per_s()
        runs = [run(chain, steps, self._device) for _ in range(warmup + repetitions)]
        state = clocks() if self._device == "cuda" else {}
        after = self._ceiling.gb_per_s()
        timed = runs[warmup:]
        measurement = Measurement(
            work=Work((context,)),
            steps=steps,
            step_ms=tuple(one.ms / steps for one in timed),
            host_step_ms=tuple(one.host_ms / steps for one in timed),
            bytes_per_step=step_bytes(self._config, context, self.system.weight_bytes),
            ceilings_gb_per_s=None if before is None or after is None else (before, after),
            clocks=state,
        )
        return self._record(measurement, runs)

    def _record(self, measurement: Measurement, runs: Sequence[Run]) -> dict[str, Any]:
        on_gpu = self._device == "cuda"
        same = len({one.tokens for one in runs}) == 1
        (context,) = measurement.work.contexts
        settings = {**self._settings[context], "same_tokens": same, **graph_counters()}
        return {
            "commit": commit(),
            "measured": now(),
            "gpu": torch.cuda.get_device_name() if on_gpu else "none",
            "driver": self._ceiling.driver,
            "backend": f"torch {torch.__version__}",
            "model": self._model,
            "weights": self.system.weights,
            "clocks": measurement.clocks,
            "system": self.system.name,
            "batch": 1,
            "context": context,
            "contexts": [context],
            "shared": 0,
            "per_step": 1,
            "kernel": None,
            **({} if on_gpu else {"note": NOT_A_SPEED}),
            "tokens_per_s": rounded(measurement.tokens_per_s),
            "ms_per_step": rounded(measurement.ms_per_step),
            "ms_per_step_samples": [rounded(one) for one in measurement.step_ms],
            "host_tokens_per_s": rounded(measurement.host_tokens_per_s),
            "host_ms_per_step_samples": [rounded(one) for one in measurement.host_step_ms],
            "bytes_per_step": measurement.bytes_per_step,
            "gb_per_s": rounded(measurement.gb_per_s),
            "ceiling_gb_per_s": rounded(measurement.ceiling_gb_per_s),
            "ceiling_gb_per_s_samples": [rounded(one) for one in measurement.ceilings_gb_per_s or ()] or None,
            "share": rounded(measurement.share),
            "repetitions": len(measurement.step_ms),
            "steps": measurement.steps,
            "plan": {},
            "settings": settings,
        }


def rounded(value: float | None) -> float | None:
    """Six significant digits, as in our own records."""
    return None if value is None else float(f"{value:.6g}")


def line_of(record: dict[str, Any]) -> str:
    """A record for a person who waits."""
    share = "-" if record["share"] is None else f"{record['share']:.1%}"
    samples = record["ms_per_step_samples"]
    return (
        f"{record['system']}, {record['model']}, context {record['context']}: {record['tokens_per_s']:.1f} tok/s, "
        f"{median(samples):.4f} ms ({min(samples):.4f} to {max(samples):.4f}), share {share}"
    )


def graph_counters() -> dict[str, int]:
    """What torch's compiler counted of its CUDA graphs: skips, if any."""
    with suppress(Exception):
        from torch._dynamo.utils import counters as of_torch

        return {name: int(count) for name, count in of_torch["inductor"].items() if "cudagraph" in name}
    return {}
