"""Rotary position embedding: the frequencies a checkpoint asks for, and the table of cosines and sines to read.

Llama checkpoints in the Hugging Face layout pair element k of a head with element k + D/2 ("rotate-half"). With
f_k = theta^(-2k/D), k = 0..D/2-1, position p turns pair k by the angle p * f'_k, where f' is f after the scaling
named in the configuration. Four kinds are static, hence possible with a cache of rotated keys: default, linear,
llama3 and yarn. Every other kind is refused by name (dynamic scaling, for one, would make cached keys stale).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.plausible import RANGES, implausible
from cheetah.printable import shown

KINDS = ("default", "linear", "llama3", "yarn")


class RopeError(CheetahError):
    """Rope parameters that are incomplete, out of range, or of a kind that is not supported."""


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the rotary embedding; fields that a kind does not use keep their defaults.

    Field names are those of `rope_parameters` in config.json. `attention_factor` None means "derive it" (yarn only).
    """

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.rope_type not in KINDS:
            raise RopeError(f"rope type {shown(self.rope_type)} is not supported; supported: {', '.join(KINDS)}")
        for name in ("rope_theta", *FIELDS_OF_KIND[self.rope_type]):
            value = getattr(self, name)
            problem = implausible(name, value) if name in RANGES and value is not None else None
            if problem:
                raise RopeError(f"rope {problem}")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            above = f"greater than low_freq_factor = {self.low_freq_factor:g}"
            raise RopeError(f"rope high_freq_factor = {self.high_freq_factor}: must be {above}")

    def to_dict(self) -> dict[str, object]:
        """The `rope_parameters` object of config.json that gives this value back, without fields at their default."""
        used = {"rope_theta", "rope_type"} | {
            name for name in FIELDS_OF_KIND[self.rope_type] if getattr(self, name) != getattr(Rope, name)
        }
        used |= set(REQUIRED_OF_KIND[self.rope_type])
        if self.rope_type in ("llama3", "yarn"):
            used.add("original_max_position_embeddings")
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name in used}

    def attention_scale(self) -> float:
        """What cosines and sines are multiplied by: 1, except for yarn."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._yarn_magnitude(self.mscale) / self._yarn_magnitude(self.mscale_all_dim)
        return self._yarn_magnitude(1.0)

    def _yarn_magnitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


REQUIRED_OF_KIND: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
FIELDS_OF_KIND: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
}


def frequencies(rope: Rope, head_dim: int) -> NDArray[np.float32]:
    """The head_dim/2 scaled frequencies f'_k in radians per position: computed in float64, rounded once to float32."""
    return _frequencies_f64(rope, head_dim).astype(np.float32)


def rope_table(rope: Rope, head_dim: int, max_context: int) -> NDArray[np.float32]:
    """Cosine and sine of position * f'_k, times the attention scale: float32 [max_context, head_dim/2, 2].

    f'_k is the float32 frequency; angle, cosine and sine are taken in float64 and rounded once, so that a late
    position is as exact as an early one.
    """
    turns = frequencies(rope, head_dim).astype(np.float64)
    angles = np.arange(max_context, dtype=np.float64)[:, None] * turns
    scale = rope.attention_scale()
    table = np.empty((max_context, head_dim // 2, 2), dtype=np.float32)
    table[..., 0] = scale * np.cos(angles)
    table[..., 1] = scale * np.sin(angles)
    return table


def _frequencies_f64(rope: Rope, head_dim: int) -> NDArray[np.float64]:
    if head_dim < 2 or head_dim % 2:
        raise RopeError(f"head_dim = {head_dim}: rotary embedding needs an even head_dim")
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    base = rope.rope_theta**-exponents
    if rope.rope_type == "linear":
        return base / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, base)
    if rope.rope_type == "yarn":
        return _yarn(rope, base, head_dim)
    return base


def _llama3(rope: Rope, base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Short wavelengths keep their frequency, long ones are divided by the factor, those between are blended."""
    turns = rope.original_max_position_embeddings * base / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(blend, 0.0, 1.0)
    return np.asarray(base * ((1.0 - kept) / rope.factor + kept))


def _yarn(rope: Rope, base: NDArray[np.float64], head_dim: int) -> NDArray[np.float64]:
    """Yarn: a linear ramp over k between the pairs that turn beta_fast and beta_slow times in the original context."""
    low = _yarn_pair(rope, rope.beta_fast, head_dim)
    high = _yarn_pair(rope, rope.beta_slow, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return np.asarray(base * ((1.0 - ramp) + ramp / rope.factor))


def _yarn_pair(rope: Rope, turns: float, head_dim: int) -> float:
    """The (fractional) pair index whose frequency makes `turns` turns over the original context."""
    positions = rope.original_max_position_embeddings
    return head_dim * math.log(positions / (2 * math.pi * turns)) / (2 * math.log(rope.rope_theta))
