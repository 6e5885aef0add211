"""The rows of a router that is fused with o, made of a checkpoint's tensors when it is loaded: see
`cheetah.blocks.experts.fused`.

With the router W [E, H], the weights D of the norm behind attention and the projection O [H, Q], the logits of experts
times the rms of h + O a are W D h + W D O a. The residual h is published times the weights of the norm before
attention, so the first rows are over these; a norm of which one is 0, or so small that the quotient may be none for
bf16, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.dense.weights import matrix_tensors, norms_before
from cheetah.models.formats import PackingError
from cheetah.models.rounding import Bits, as_bf16, widen
from cheetah.plan.products import ROUTER

SMALLEST = 2.0**-30
"""Of the weights of a norm that rows are divided by."""


def router_row_bytes(config: ModelConfig) -> int:
    """Of a layer's rows; 0 of models without experts."""
    experts, heads, o = config.table.experts, config.table.heads, config.table.onto_residual[0]
    return 0 if experts is None else experts.count * (heads.input.padded + o.input.padded) * 2


def router_rows(config: ModelConfig, tensor: Callable[[str], NDArray[Any]], layer: int) -> Bits:
    """A layer's rows, bf16 bits [experts, row]: of each expert those of the residual, then those of attention's output,
    both padded with zeros. tensor: gives bf16 bits, or float32 of a quantised one. PackingError where a norm's weight
    is too small to divide by."""
    table, norms = config.table, norms_before(config)
    heads, o = table.heads, table.onto_residual[0]

    def read(name: str) -> NDArray[np.float32]:
        return widen(tensor(name.format(layer=layer)))

    before, behind = read(norms[heads.name]), read(norms["gate_up"])
    (router,), (projection,) = (matrix_tensors(config, name, layer) for name in (ROUTER, o.name))
    rows = read(router) * behind
    is_small = (np.abs(before) < SMALLEST) & (rows != 0).any(axis=0)
    if is_small.any():
        place = int(np.argmax(is_small))
        raise PackingError(
            f"{norms[heads.name].format(layer=layer)}: weight {place} is {before[place]:g}: rows of a fused router are "
            f"divided by such weights, of which none may be below {SMALLEST:g}: leave fused_router out"
        )
    made = np.zeros((len(rows), heads.input.padded + o.input.padded), np.uint16)
    made[:, : config.hidden_size] = as_bf16(np.divide(rows, before, out=np.zeros_like(rows), where=before != 0))
    attended = heads.input.padded
    made[:, attended : attended + o.columns] = as_bf16(rows @ read(projection))
    return made
