"""One call of the attention kernel as data: what the kernel is made for, the numbers, how they lie in memory, the plan.

Two cases that mean the same have the same `expected`, whatever else they differ in; that is what the relations test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.blocks.attention import shipped_variants as shipped
from cheetah.blocks.attention.variants import CAUSAL, Variant
from tests.attention import reference
from tests.attention.reference import ReferenceVariant, State

Array = NDArray[Any]
KV_TYPES = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}


@dataclass(frozen=True)
class Core:
    """Static choices: one kernel each. batch, queries, levels and max_keys are the most that a call may have.

    shortest_chunk: the smallest F for which there is room (0: for plans by rule).
    """

    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    page_size: int = 16
    blocks: int = 4
    kv_dtype: str = "bf16"
    variant: Variant = field(default=CAUSAL, hash=False)
    max_keys: int = 512
    batch: int = 4
    queries: int = 8
    levels: int = 2
    shortest_chunk: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Prefix:
    """Keys and values [H_kv, n, D] that requests first .. first + count - 1 share and have before their own."""

    first: int
    count: int
    keys: Array
    values: Array


@dataclass(frozen=True)
class Case:
    """queries[b] [l_q, H_q, D]; keys[b], values[b] [H_kv, n, D], of which the last l_q are the queries' own tokens.

    All are float32 that bf16 holds exactly; for an e4m3 cache keys and values are what the codes say, without scales.
    meaning: the reference's variant. parameters: the kernel's, by name. page_seed: which pages the keys lie in (None:
    in order). leftover: the byte that fills all unused slots and pages. chunk: F. costs: alpha and beta. deal: a seed
    with which items are dealt to blocks at random instead of by cost. fold: a seed with which the states of a merge are
    put in another order. empty_level: a first level that has no keys.
    """

    core: Core
    queries: tuple[Array, ...]
    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    meaning: ReferenceVariant = ReferenceVariant()
    parameters: Mapping[str, Array] = field(default_factory=dict)
    prefixes: tuple[Prefix, ...] = ()
    key_scale: float | Array = 1.0
    value_scale: float | Array = 1.0
    page_seed: int | None = 0
    leftover: int = 0xFF
    chunk: int | None = None
    costs: tuple[int, int] = (1, 1)
    deal: int | None = None
    fold: int | None = None
    empty_level: bool = False

    @property
    def batch(self) -> int:
        return len(self.queries)

    @property
    def rows(self) -> Array:
        """qo_indptr, int32 [B + 1]."""
        return np.cumsum([0, *map(len, self.queries)]).astype(np.int32)

    def prefix_of(self, request: int) -> Prefix | None:
        holders = [prefix for prefix in self.prefixes if prefix.first <= request < prefix.first + prefix.count]
        return holders[0] if holders else None

    def offset(self, request: int) -> int:
        """Keys before the request's own."""
        prefix = self.prefix_of(request)
        return prefix.keys.shape[1] if prefix else 0

    def expected(self) -> State:
        """The float64 reference: output [rows, H_q, D] and LSE [rows, H_q]."""
        states = []
        for request, queries in enumerate(self.queries):
            parts = [(self.keys[request], self.values[request])]
            if prefix := self.prefix_of(request):
                parts.insert(0, (prefix.keys, prefix.values))
            wide = [(keys.astype(np.float64), values.astype(np.float64)) for keys, values in parts]
            scales = self.key_scale, self.value_scale
            states.append(reference.attend(queries.astype(np.float64), wide, self.meaning, request, *scales))
        return State(np.concatenate([s.output for s in states]), np.concatenate([s.lse for s in states]))

    def single(self, request: int) -> Case:
        """The request alone; not for masks, whose bits are counted by request."""
        one = slice(request, request + 1)
        prefixes = [replace(prefix, first=0, count=1) for prefix in self.prefixes if prefix is self.prefix_of(request)]
        numbers: dict[str, Any] = dict(queries=self.queries[one], keys=self.keys[one], values=self.values[one])
        return replace(self, **numbers, prefixes=tuple(prefixes))

    def reordered(self, order: Sequence[int]) -> Case:
        """The requests in another order; without prefixes."""
        numbers: dict[str, Any] = {
            name: tuple(getattr(self, name)[b] for b in order) for name in ("queries", "keys", "values")
        }
        return replace(self, **numbers)

    def with_values(self, change: Callable[[Array], Array]) -> Case:
        prefixes = tuple(replace(prefix, values=change(prefix.values)) for prefix in self.prefixes)
        return replace(self, values=tuple(map(change, self.values)), prefixes=prefixes)


def rounded(values: Any) -> Array:
    """The values as bf16 holds them, in float32."""
    return np.asarray(values).astype(ml_dtypes.bfloat16).astype(np.float32)


def random_case(
    core: Core,
    lengths: Sequence[int],
    queries: Sequence[int] | int = 1,
    seed: int = 0,
    scale: float = 1.0,
    prefix: tuple[int, int, int] | None = None,
    **more: Any,
) -> Case:
    """Normal numbers, logits of about `scale`; lengths[b] keys and at most `queries` queries of request b.

    prefix: (first request, requests, keys) of one shared prefix, beside the lengths.
    """
    counts = [queries] * len(lengths) if isinstance(queries, int) else list(queries)
    counts = [min(count, length) if length else 1 for count, length in zip(counts, lengths, strict=True)]
    draw = np.random.default_rng([seed, *lengths])
    numbers = [numbers_of(core, length, draw) for length in lengths]
    shape = (core.heads, core.head_dim)
    prefixes = (Prefix(*prefix[:2], *numbers_of(core, prefix[2], draw)),) if prefix else ()
    return Case(
        core,
        tuple(rounded(draw.standard_normal((count, *shape)) * scale) for count in counts),
        tuple(keys for keys, _ in numbers),
        tuple(values for _, values in numbers),
        prefixes=prefixes,
        **more,
    )


def numbers_of(core: Core, length: int, draw: np.random.Generator) -> tuple[Array, Array]:
    """Keys and values [H_kv, length, D] that the core's cache holds exactly."""
    both = draw.standard_normal((2, core.kv_heads, length, core.head_dim), dtype=np.float32)
    keys, values = (1.0 * both).astype(KV_TYPES[core.kv_dtype]).astype(np.float32)
    return keys, values


# -- what goes with a shipped variant ---------------------------------------------------------------------------------


def with_sliding_window(case: Case, window: int) -> Case:
    core = replace(case.core, variant=shipped.sliding_window(window))
    return replace(case, core=core, meaning=reference.sliding_window(window))


def with_soft_cap(case: Case, cap: float) -> Case:
    return replace(case, core=replace(case.core, variant=shipped.soft_cap(cap)), meaning=reference.soft_cap(cap))


def with_sigmoid(case: Case, scale: float | None = None, bias: float = 0.0) -> Case:
    core = replace(case.core, variant=shipped.sigmoid(scale, bias))
    return replace(case, core=core, meaning=reference.sigmoid(scale, bias))


def with_mask(case: Case, masks: Sequence[Array]) -> Case:
    """masks[b] [l_q, l_kv] of every request."""
    mask, indptr = shipped.packed_mask(masks)
    core = replace(case.core, variant=shipped.custom_mask())
    return replace(
        case, core=core, meaning=reference.custom_mask(mask, indptr), parameters={"mask": mask, "mask_indptr": indptr}
    )


def with_alibi(case: Case, slopes: Array | None = None) -> Case:
    slopes = shipped.alibi_slopes(case.core.heads) if slopes is None else slopes.astype(np.float32)
    core = replace(case.core, variant=shipped.alibi())
    return replace(case, core=core, meaning=reference.alibi(slopes.astype(np.float64)), parameters={"slopes": slopes})


def with_sink(case: Case, sinks: Array) -> Case:
    sinks = sinks.astype(np.float32)
    core = replace(case.core, variant=shipped.learned_sink())
    meaning = reference.learned_sink(sinks.astype(np.float64))
    return replace(case, core=core, meaning=meaning, parameters={"sinks": sinks})


def with_streaming(case: Case, sinks: int, recent: int, table: Array) -> Case:
    """table [sinks + recent, D / 2, 2]."""
    table = table.astype(np.float32)
    core = replace(case.core, variant=shipped.streaming_llm(sinks, recent))
    meaning = replace(reference.streaming_llm(sinks, recent, table.astype(np.float64)), rounding=rounded_to_bf16)
    return replace(case, core=core, meaning=meaning, parameters={"rope": table})


def with_both(case: Case, first: Case, second: Case) -> Case:
    """The variants of two of the cases above together."""
    one, two = first.meaning, second.meaning
    functions = {name: getattr(one, name) or getattr(two, name) for name in shipped.FUNCTIONS}
    meaning = ReferenceVariant(one.name, **functions, causal=one.causal and two.causal)
    core = replace(case.core, variant=both_variants(first.core.variant, second.core.variant))
    return replace(case, core=core, meaning=meaning, parameters={**first.parameters, **second.parameters})


_BOTH: dict[tuple[int, int], Variant] = {}


def both_variants(first: Variant, second: Variant) -> Variant:
    """`shipped.combined`, the same object for the same two."""
    key = id(first), id(second)
    if key not in _BOTH:
        _BOTH[key] = shipped.combined(first, second)
    return _BOTH[key]


def rounded_to_bf16(values: Array) -> Array:
    return values.astype(ml_dtypes.bfloat16).astype(values.dtype)
