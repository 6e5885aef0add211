"""The paged KV cache: where a token's keys and values lie. Pages are HND: [pages, 2, kv_heads, page_size, head_dim]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.machine import Machine
from cheetah.blocks.ring import Ring
from cheetah.lang import prim, ty

CACHED_KEYS = "keys and values"
"""What the ring's stages hold for attention."""


@dataclass(frozen=True, eq=False)
class KvCache:
    """The pool of one model (bf16*, or u8* of e4m3 codes), and the page tables of its sequences, one after the other.

    Key j of a table that begins at word `table` lies in page `page_table[table + j // page_size]`.
    """

    machine: Machine
    pool: ch.Expr
    page_table: ch.Expr

    @property
    def _slot_elements(self) -> int:
        return self.machine.shape.head_dim

    @property
    def _head_elements(self) -> int:
        return self.machine.plan.page_size * self._slot_elements

    @property
    def _values_offset(self) -> int:
        """Elements from a token's keys to its values."""
        return self.machine.shape.kv_heads * self._head_elements

    @property
    def _page_elements(self) -> int:
        return 2 * self._values_offset

    @property
    def _layer_elements(self) -> int:
        return self.machine.plan.kv_pages * self._page_elements

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key of one head."""
        return self._slot_elements * self.machine.plan.kv_element_bytes

    @ch.inline
    def key(self, layer: ch.Value, head: ch.Expr, table: ch.Expr, token: ch.Expr) -> Any:
        """The address of key `token` of one head (bf16* or u8*)."""
        page = prim.load_constant_u32(self.page_table + (table + token // self.machine.plan.page_size))
        return self._key_in_page(layer, head, page, token % self.machine.plan.page_size)

    @ch.inline
    def _key_in_page(self, layer: ch.Value, head: ch.Expr, page: ch.Expr, slot: ch.Expr) -> Any:
        offset = ch.cast(ty.u64, layer) * self._layer_elements + ty.u64(page) * self._page_elements
        key = self.pool + (offset + ty.u64(head * self._head_elements + slot * self._slot_elements))
        return key

    def value(self, key: ch.Expr) -> ch.Expr:
        """The address of the value that belongs to a key."""
        return key + self._values_offset

    @ch.inline
    def copy_tokens(
        self, ring: Ring, layer: ch.Value, head: ch.Expr, table: ch.Expr, begin: ch.Expr, end: ch.Expr
    ) -> None:
        """In the copy role: bring keys [begin, end) of a head, a stage at a time: keys in its first half, then values.

        A copy never crosses a page, and stops at the last token: what lies behind it in the stage is stale. The page of
        the next copy is looked up before the wait for its stage, so that the look-up's trip costs nothing.
        """
        machine, token_bytes, page_size = self.machine, self.token_bytes, self.machine.plan.page_size
        ring.fills(CACHED_KEYS)
        stage_tokens = machine.plan.kv_stage_tokens(machine.shape.head_dim)
        with ch.if_(begin < end):
            page = ch.var(ty.u32, prim.load_constant_u32(self.page_table + (table + begin // page_size)))
            with ch.for_(begin, end, stage_tokens, unroll=1) as first:
                count = ch.minimum(end - first, stage_tokens)
                with ring.fill(count * (2 * token_bytes)) as (stage, barrier):
                    done = ch.var(ty.u32, 0)
                    with ch.while_(done < count):
                        token = first + done
                        slot = token % page_size
                        run = ch.minimum(page_size - slot, count - done)
                        key = self._key_in_page(layer, head, page, slot)
                        following = ch.minimum(token + run, end - 1)
                        page.set(prim.load_constant_u32(self.page_table + (table + following // page_size)))
                        prim.bulk_copy(stage + done * token_bytes, key, run * token_bytes, barrier)
                        values = stage + (done * token_bytes + machine.plan.stage_bytes // 2)
                        prim.bulk_copy(values, self.value(key), run * token_bytes, barrier)
                        done += run
