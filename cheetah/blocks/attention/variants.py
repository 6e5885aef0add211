"""Variants of attention: small functions in the language that the core calls at fixed places, only where they are set.

Notation (FlashInfer, MLSys 2025, 3.2.3): request b, query number i of the request, key number j of the request (its
absolute position), query head h, KV head. A key of a prefix that several requests share belongs to all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cheetah.lang import ty
from cheetah.lang.errors import LangError

Pair = tuple[Any, Any]
"""Two elements of a vector that rotate together: dims `at.dim` and `at.dim` + head_dim / 2 (f32 expressions)."""
KNOWN = {
    "query_transform": ("request", "query", "head", "kv_head", "position", "keys", "dim"),
    "key_transform": ("request", "key", "kv_head", "position", "keys", "dim"),
    "value_transform": ("request", "key", "kv_head", "position", "keys", "dim"),
    "logits_transform": ("request", "query", "key", "head", "kv_head", "position", "keys"),
    "logits_mask": ("request", "query", "key", "head", "kv_head", "position", "keys"),
    "output_transform": ("request", "query", "head", "kv_head", "position", "keys"),
}
"""What `at` has in each function; the static numbers and `parameters` are there in all of them."""


class At:
    """Where a function of a variant is called. Device values are u32 unless said.

    request: b. query: i. key: j, the absolute position. head, kv_head. position: of the query, p. keys: l_kv of the
    request, its new tokens included. dim. For a key or a value, request, position and keys are those of the last column
    of the tile that reads it: only for a request with one query, and no shared prefix, do they mean just one thing.
    parameters.NAME: the variant's own kernel parameters.
    Static: head_dim, heads, kv_heads (ints), scale (float: that of the variant, by default 1 / sqrt(head_dim)).
    """

    def __init__(
        self,
        function: str,
        parameters: Any,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        values: Mapping[str, Callable[[], Any]],
    ) -> None:
        self.function, self.parameters = function, parameters
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale = math.pow(head_dim, -0.5) if scale is None else scale
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name in KNOWN[self.function]:
            return self._values[name]()
        raise LangError(f"at.{name}: {self.function} knows {', '.join(KNOWN[self.function])} and parameters.")


@dataclass(frozen=True)
class Variant:
    """What attention computes. Functions take expressions and give expressions; unset ones leave no text in the kernel.

    query_transform(pair, at), key_transform(pair, at) -> pair: of the pair's elements, f32; rounded to bf16 after it.
    value_transform(value, at) -> value: one element, f32; rounded to bf16 after it.
    logits_transform(x, at) -> the logit, from the raw dot product x (f32; of codes, times k_scale).
    Unset: x * at.scale.
    logits_mask(at) -> boolean, true keeps; masked logits are -inf, or weights 0 without softmax.
    output_transform(output, lse, at) -> (output, lse): one element of the final output and the natural LSE of its row
    (-inf where no key was kept), once, after the last merge. Called for every element: its LSE must not depend on it.

    softmax: off, the logit is itself the weight, the state is the sum of weighted values, states are added, LSE is 0.
    causal: keys beyond the query's own position are left out before anything else is asked.
    window: keys more than `window` before the query's position are never kept, so the planner need not load them
    (None: all may be). It is a promise to the planner; the exact edge is `logits_mask`'s business.
    parameters: further kernel parameters, by name, that the functions reach as `at.parameters.NAME`.
    scale: what raw dot products are multiplied by, at.scale; None: 1 / sqrt(head_dim).
    one_query: what a key or value becomes depends on who asks, so a request has one query and shares no prefix.
    """

    name: str = "causal"
    query_transform: Callable[[Pair, Any], Pair] | None = None
    key_transform: Callable[[Pair, Any], Pair] | None = None
    value_transform: Callable[[Any, Any], Any] | None = None
    logits_transform: Callable[[Any, Any], Any] | None = None
    logits_mask: Callable[[Any], Any] | None = None
    output_transform: Callable[[Any, Any, Any], Pair] | None = None
    softmax: bool = True
    causal: bool = True
    window: int | None = None
    parameters: Mapping[str, ty.Type] = field(default_factory=dict)
    one_query: bool = False
    scale: float | None = None

    @classmethod
    def windowed(cls, window: Callable[[], Any]) -> Variant:
        """Keep the query's own key and as many before it as `window` says where attention is emitted: an expression,
        where layers differ. Which keys are not loaded is its caller's matter."""

        def keep(at: Any) -> Any:
            return at.key + window() >= at.position

        return cls("sliding_window", logits_mask=keep)

    @property
    def needs_query_context(self) -> bool:
        """A function is called for every logit."""
        return self.logits_transform is not None or self.logits_mask is not None


CAUSAL = Variant()
"""Plain causal attention: the default."""
