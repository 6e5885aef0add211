"""Stores to what several GPUs have each: into this one's memory and, by primitives of their own, into the others'."""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.lang import prim

STORES_TO_PEERS = (
    *(prim.store_to_peer_u16, prim.store_to_peer_u32, prim.store_to_peer_u32x2, prim.store_to_peer_u32x4),
    *(prim.store_to_peer_f32, prim.store_to_peer_bf16),
)
"""By what they store."""


def store_at(pointer: ch.Expr, index: Any, value: ch.Expr, is_peers: bool) -> None:
    """`pointer[index] = value`, in this GPU's memory or another's."""
    if not is_peers:
        pointer[index] = value
        return
    for store in STORES_TO_PEERS:
        if store.parameters["place"] == pointer.type:
            store(pointer + index, value)
