"""Plans that `cheetah tune` found fastest on a GPU, kept beside the cubins and used where nothing else is asked.

One JSON file for a model's shape and a machine. What was measured with other sources of the generator counts for
nothing, nor does what cannot be read: such a record is passed over with a note, and `cheetah tune` writes it anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cheetah import manifest
from cheetah.errors import CheetahError
from cheetah.models.config import ModelConfig
from cheetah.plan import Gpu, ModelShape, default_plan
from cheetah.printable import shown
from cheetah.records import record_from_json
from cheetah.runtime.assembly.cubin import cache_folder
from cheetah.runtime.assembly.sources import sources_of
from cheetah.untrusted import UnreadableError, read_json
from cheetah.version import __version__

SEARCHED = ("stage_bytes", "in_flight", "consumer_warps", "kv_chunk_min", "sync")
"""Fields of the plan that a record holds."""

INDEPENDENT = ("max_context", "page_size", "max_steps", "trace")
"""Fields that may be asked for beside a record; any other one means that the user chooses, and the rule the rest."""

GENERATOR = "cheetah.generate"
"""Decides about a kernel's text, with all that it imports."""

RECORD_BYTES = 100_000
"""Most bytes of a record's file: one has 1000."""


@dataclass(frozen=True)
class TunedPlan:
    """What was found. gpu: the plan's name of the machine; device: the driver's. generator: `generator_hash` then.

    model: what the command line called it. plan: SEARCHED fields. ms_per_step, rule_ms_per_step: medians of the winner
    and of the rule's plan, measured in turn, by context. commit: of the checkout.
    """

    model: str
    shape: dict[str, int | str]
    gpu: str
    device: str
    generator: str
    commit: str
    plan: dict[str, int | str]
    ms_per_step: dict[str, float]
    rule_ms_per_step: dict[str, float]

    def store(self, cache: Path | None = None) -> Path:
        """Write the record, whole or not at all; its path. OSError if the folder cannot be written."""
        path = _path(self.shape, self.gpu, cache)
        manifest.write_atomically(path, (json.dumps(asdict(self), indent=2) + "\n").encode())
        return path


def stored_plan(
    config: ModelConfig, gpu: Gpu, cache: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> TunedPlan | None:
    """The record for this shape and machine, of whatever sources; None where there is none, or none that can be read,
    which is said."""
    shape = config.shape.describe()
    path = _path(shape, gpu.name, cache)
    if not os.path.lexists(path):
        return None
    try:
        record = record_from_json(TunedPlan, read_json(path, RECORD_BYTES), str(path), UnreadableError)
        _check(record, config.shape, gpu, str(path))
        return record
    except CheetahError as problem:
        say(f"a tuned plan is not used: {problem}")
        return None


def _check(record: TunedPlan, shape: ModelShape, gpu: Gpu, place: str) -> None:
    """UnreadableError if the record is of another shape; PlanError if no kernel can be made with its plan."""
    if record.shape != shape.describe():
        raise UnreadableError(f"{place}: is for another model: {shown(record.shape)}")
    if unknown := sorted(set(record.plan) - set(SEARCHED)):
        raise UnreadableError(f"{place}: has fields of a plan that are not searched: {shown(unknown)}")
    fields: dict[str, Any] = {**record.plan}
    default_plan(gpu, shape, **fields)


def with_tuned(
    config: ModelConfig,
    gpu: Gpu,
    device: str | None,
    overrides: Mapping[str, Any],
    say: Callable[[str], None],
    cache: Path | None = None,
) -> dict[str, Any]:
    """`overrides`, and the stored plan's fields where all else is left to the rule. Says in a line what it took.

    device: the GPU as its driver calls it, which must be the one that was measured; None where there is none at hand.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    record = stored_plan(config, gpu, cache, say)
    if record is None or not set(given) <= set(INDEPENDENT) or device not in (None, record.device):
        return given
    if record.generator != generator_hash():
        say(f"a plan tuned for {record.device} is from other sources and is not used: run cheetah tune again")
        return given
    say(f"plan tuned for {record.device}: {plan_text(record.plan)} (--no-tuned, or tuned=False: by rule)")
    return {**record.plan, **given}


def plan_text(plan: Mapping[str, int | str]) -> str:
    """The fields in words, in the usual order."""
    return ", ".join(f"{name} {plan[name]}" for name in SEARCHED if name in plan)


@functools.cache
def generator_hash() -> str:
    """Of the version and of the sources that decide about a kernel's text: 16 hexadecimal digits."""
    root = Path(manifest.__file__).parent
    digest = hashlib.sha256(__version__.encode())
    for name, path in sources_of(GENERATOR, root).items():
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _path(shape: Mapping[str, int | str], gpu: str, cache: Path | None) -> Path:
    key = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]
    return (cache or cache_folder()) / "tuned" / f"{gpu}-{key}.json"
