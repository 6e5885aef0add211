"""What the studies share: variants that are timed by turns, the read ceiling of the same run, one record a variant.

GB = 1e9 bytes. A sample is taken by device events around one launch of a variant (most start from a CUDA graph), with
another one directly before, so that the processor is ahead of the GPU and no start-up is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.plan import Gpu
from cheetah.runtime.assembly.kernels import choose_gpu
from cheetah.runtime.device.driver import DriverError
from cheetah.tools.bench import EMULATED
from cheetah.tools.circumstances import clocks, commit, now
from cheetah.tools.measured_ceiling import ReadCeiling

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer, Device

TIMEOUT_S = 20.0
"""No sample takes a tenth of it: what does, hangs."""
WARMUP = 3
TOLERANCE = 2e-2
"""Largest relative L2 error of a result against float32 with bf16 rounding at the same places."""


class StudyError(CheetahError):
    """A study whose kernel computes something else than it should, or that cannot run here."""


@dataclass(frozen=True)
class Launch:
    """Launches a variant's kernels when called."""

    work: Callable[[], None]
    from_graph: bool

    def __call__(self) -> None:
        self.work()


@dataclass(frozen=True)
class Variant:
    """Something to time. launch: makes `passes` passes in a row. bytes_per_pass: what a pass must read.

    error: relative L2 error of its result, already found small; None where equal tokens were asked for instead.
    about: what else its record says (kernel, plan)."""

    launch: Launch
    passes: int
    bytes_per_pass: int
    error: float | None
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Study:
    """Where a study runs and where its records go. tiny: sizes for the emulator, to try the whole thing out."""

    name: str
    device: Device
    write: Callable[[dict[str, Any]], None]
    repetitions: int
    tiny: bool = False
    ordinal: int = 0

    def __post_init__(self) -> None:
        self.gpu: Gpu = choose_gpu(self.device.describe())
        self._ceiling: ReadCeiling | None = None

    def wait(self) -> None:
        """Until all work is done; LaunchTimeout if it hangs."""
        self.device.synchronize(None if self.gpu.emulated else TIMEOUT_S)

    def compare(self, case: Mapping[str, Any], variants: Mapping[str, Variant], weights: Buffer) -> None:
        """Time the variants by turns and write a record of each. `weights`: what the ceiling reads if need be."""
        before = self._ceiling_gb_per_s(weights)
        samples = self._samples({name: variant.launch for name, variant in variants.items()})
        state = {} if self.gpu.emulated else clocks(self.ordinal)
        after = self._ceiling_gb_per_s(weights)
        for name, variant in variants.items():
            milliseconds = [sample / variant.passes for sample in samples[name]]
            ceiling = fmean((before, after)) if before and after else None
            self.write(self._record(case, name, variant, milliseconds, ceiling, state))

    def _samples(self, works: Mapping[str, Callable[[], None]]) -> dict[str, list[float]]:
        """Milliseconds of each work, `repetitions` times, the works by turns and in changing order."""
        names = list(works)
        samples: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(WARMUP + self.repetitions):
            for name in names if turn % 2 else reversed(names):
                milliseconds = self._sample(works[name])
                if turn >= WARMUP:
                    samples[name].append(milliseconds)
        return samples

    def _sample(self, work: Callable[[], None]) -> float:
        work()
        begin = self.device.record()
        work()
        end = self.device.record()
        self.wait()
        return self.device.elapsed_ms(begin, end)

    def _ceiling_gb_per_s(self, weights: Buffer) -> float | None:
        if self.gpu.emulated:
            return None
        if self._ceiling is None:
            self._ceiling = ReadCeiling(self.device, self.gpu, weights)
        return self._ceiling.gb_per_s()

    def _record(
        self,
        case: Mapping[str, Any],
        name: str,
        variant: Variant,
        milliseconds: Sequence[float],
        ceiling: float | None,
        state: Mapping[str, float],
    ) -> dict[str, Any]:
        info = self.device.describe()
        rate = variant.bytes_per_pass / median(milliseconds) / 1e6
        return {
            "commit": commit(),
            "measured": now(),
            "gpu": info.name,
            "driver": info.driver,
            "backend": info.backend,
            "clocks": dict(state),
            "study": self.name,
            "case": dict(case),
            "system": name,
            "weights": "bf16 random",
            "batch": 1,
            **({"note": EMULATED} if self.gpu.emulated else {}),
            "ms": digits(median(milliseconds)),
            "ms_samples": [digits(one) for one in milliseconds],
            "bytes": variant.bytes_per_pass,
            "gb_per_s": digits(rate),
            "ceiling_gb_per_s": None if ceiling is None else digits(ceiling),
            "share": None if ceiling is None else digits(rate / ceiling),
            "relative_error": None if variant.error is None else digits(variant.error),
            "repetitions": len(milliseconds),
            "passes": variant.passes,
            "from_graph": variant.launch.from_graph,
            **variant.about,
        }


def digits(value: float) -> float:
    """Six significant digits: more were never measured."""
    return float(f"{value:.6g}")


def in_graph(device: Any, work: Callable[[], None]) -> Launch:
    """`work`, whose launches start from a CUDA graph; as it is where the device has no graphs or refuses this one."""
    if hasattr(device, "capture"):
        with suppress(DriverError):
            return Launch(device.capture(work).launch, from_graph=True)
    return Launch(work, from_graph=False)


def require_close(what: str, found: NDArray[np.float32], wanted: NDArray[np.float32], most: float = TOLERANCE) -> float:
    """The relative L2 error of `found`; StudyError if it is more than `most`, or not a number."""
    error = float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted))
    if not error <= most:
        raise StudyError(f"{what}: relative error {error:.3g}, at most {most:g} is right: nothing was timed")
    return error
