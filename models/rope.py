"""Rotary position embedding: the frequencies a checkpoint asks for, and the table of cosines and sines to read.

Llama checkpoints in the Hugging Face layout pair element k of a head with element k + D/2 ("rotate-half"). With
f_k = theta^(-2k/D), k = 0..D/2-1, position p turns pair k by the angle p * f'_k, where f' is f after the scaling
named in the configuration. Five kinds are static, hence possible with a cache of rotated keys: default, linear,
llama3, yarn, and longrope with the factors that its context chooses once. Every other kind is refused by name (dynamic
scaling, for one, would make cached keys stale).

Where only the first R of D elements are rotated (partial_rotary_factor), k pairs with k + R/2 among those. Heads are
then kept in another order, `rotary_order`, in which k pairs with k + D/2 as everywhere, and the pairs behind R/2 are
turned by no angle: q.k is the same in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.plausible import RANGES, implausible
from cheetah.printable import shown

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
GROUP_ELEMENTS = 8
"""Elements of a head that stay side by side in a packed matrix: the order of a head can move no fewer."""


class RopeError(CheetahError):
    """Rope parameters that are incomplete, out of range, or of a kind that is not supported."""


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the rotary embedding; fields that a kind does not use keep their defaults.

    Field names are those of `rope_parameters` in config.json. `attention_factor` None means "derive it" (yarn and
    longrope). factor: of longrope, by how much the context is longer than that of pretraining, where the file gives no
    `attention_factor`. short_factor, long_factor: what longrope divides the frequencies by, one for each rotated pair,
    the long ones where the context has more tokens than the original one.
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
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in KINDS:
            raise RopeError(f"rope type {shown(self.rope_type)} is not supported; supported: {', '.join(KINDS)}")
        for name in ("rope_theta", "partial_rotary_factor", *FIELDS_OF_KIND[self.rope_type]):
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,) if value is not None else ()
            problems = (implausible(name, one) for one in values if name in RANGES)
            if problem := next((one for one in problems if one), None):
                raise RopeError(f"rope {problem}")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            above = f"greater than low_freq_factor = {self.low_freq_factor:g}"
            raise RopeError(f"rope high_freq_factor = {self.high_freq_factor}: must be {above}")
        if self.rope_type == "longrope" and self.original_max_position_embeddings < 2:
            raise RopeError("rope type 'longrope' needs original_max_position_embeddings, of 2 or more")

    def to_dict(self) -> dict[str, object]:
        """The `rope_parameters` object of config.json that gives this value back, without fields at their default."""
        used = {"rope_theta", "rope_type"} | {
            name for name in FIELDS_OF_KIND[self.rope_type] if getattr(self, name) != getattr(Rope, name)
        }
        used |= set(REQUIRED_OF_KIND[self.rope_type])
        if self.rope_type in OF_ORIGINAL_CONTEXT:
            used.add("original_max_position_embeddings")
        if self.partial_rotary_factor != 1.0:
            used.add("partial_rotary_factor")
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name in used}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def rotated(self, head_dim: int) -> int:
        """How many elements of a head are rotated, the first ones."""
        return int(head_dim * self.partial_rotary_factor)

    def attention_scale(self) -> float:
        """What cosines and sines are multiplied by: 1, except for yarn and longrope."""
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            lengths = math.log(self.factor) / math.log(self.original_max_position_embeddings) if self.factor > 1 else 0
            return math.sqrt(1.0 + lengths)
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
    "longrope": ("short_factor", "long_factor"),
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
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    ),
}
OF_ORIGINAL_CONTEXT = ("llama3", "yarn", "longrope")
"""Kinds that know the context of pretraining."""


def frequencies(rope: Rope, head_dim: int, max_context: int = 0) -> NDArray[np.float32]:
    """The scaled frequencies f'_k of the rotated pairs in radians per position: computed in float64, rounded once to
    float32. max_context: chooses among the factors of longrope."""
    return _frequencies_f64(rope, rope.rotated(head_dim), max_context).astype(np.float32)


def rope_table(rope: Rope | None, head_dim: int, positions: int, max_context: int | None = None) -> NDArray[np.float32]:
    """Cosine and sine of position * f'_k, times the attention scale: float32 [positions, head_dim/2, 2].

    f'_k is the float32 frequency; angle, cosine and sine are taken in float64 and rounded once, so that a late
    position is as exact as an early one. Pairs that are not rotated have cosine 1 and sine 0; so have all without a
    rope. max_context: tokens that a sequence may have, by default `positions`.
    """
    table = np.zeros((positions, head_dim // 2, 2), dtype=np.float32)
    table[..., 0] = 1.0
    if rope is None:
        return table
    turns = frequencies(rope, head_dim, max_context or positions).astype(np.float64)
    angles = np.arange(positions, dtype=np.float64)[:, None] * turns
    scale = rope.attention_scale()
    table[:, : len(turns), 0] = scale * np.cos(angles)
    table[:, : len(turns), 1] = scale * np.sin(angles)
    return table


def rotary_order(rope: Rope | None, head_dim: int) -> NDArray[np.int64]:
    """Which element of a checkpoint's head is element i of one whose pairs are all head_dim/2 apart, int64 [head_dim]:
    the rotated ones lie at the beginning of both halves, in their order, and behind them the others."""
    half = head_dim if rope is None else rope.rotated(head_dim) // 2
    if rope is None or 2 * half == head_dim:
        return np.arange(head_dim)
    low, high, others = np.split(np.arange(head_dim), [half, 2 * half])
    behind_low, behind_high = np.split(others, 2)
    return np.concatenate([low, behind_low, high, behind_high])


def _frequencies_f64(rope: Rope, rotated: int, max_context: int) -> NDArray[np.float64]:
    if rotated < 2 or rotated % 2:
        raise RopeError(f"{rotated} elements of a head are rotated: rotary embedding needs an even number of them")
    exponents = np.arange(0, rotated, 2, dtype=np.float64) / rotated
    base = rope.rope_theta**-exponents
    if rope.rope_type == "linear":
        return base / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, base)
    if rope.rope_type == "yarn":
        return _yarn(rope, base, rotated)
    if rope.rope_type == "longrope":
        return base / _longrope_factors(rope, len(base), max_context)
    return base


def _longrope_factors(rope: Rope, pairs: int, max_context: int) -> NDArray[np.float64]:
    """Those of a context: chosen once, since keys in a cache have been rotated."""
    is_long = max_context > rope.original_max_position_embeddings
    name, factors = ("long_factor", rope.long_factor) if is_long else ("short_factor", rope.short_factor)
    if len(factors) != pairs:
        raise RopeError(f"rope {name} has {len(factors)} numbers, for {pairs} rotated pairs of a head")
    return np.array(factors, np.float64)


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
