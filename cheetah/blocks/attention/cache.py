"""The paged KV cache: where a token's keys and values lie.

Pages are HND: [layers, pages, 2, kv_heads, page_size, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cheetah import lang as ch
from cheetah.blocks.ring import Ring
from cheetah.lang import prim, ty
from cheetah.plan import ModelShape, Plan
from cheetah.plan.formats import KV_TILE_TOKENS

CACHED_KEYS = "keys and values"
"""What the ring's stages hold for attention."""


KEYS_IN_FLIGHT = 2
"""Stages of keys that may be requested also while the block waits: a single one would keep a long context waiting."""
MOST_COPIES = 8
"""Pages of a stage whose copies are written out one by one in the kernel."""


class Sizes(Protocol):
    """Whose cache it is."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def plan(self) -> Plan: ...


def values_at(machine: Sizes) -> int:
    """The byte of a stage at which the values begin, behind the keys."""
    return ch.named("VALUES_AT", machine.plan.kv_values_at(machine.shape.head_dim))


def stage_keys(machine: Sizes) -> int:
    """Keys of a stage, with as many values."""
    return ch.named("STAGE_KEYS", machine.plan.kv_stage_tokens(machine.shape.head_dim))


@dataclass(frozen=True, eq=False)
class KvCache:
    """The pool of one model (bf16*, or u8* of e4m3 codes), and the page tables of its sequences, one after the other.
    pages: of each layer; no matter where there is one layer.

    Key j of a table that begins at word `table` lies in page `page_table[table + j // page_size]`.
    """

    machine: Sizes
    pool: ch.Expr
    page_table: ch.Expr
    pages: ch.Value = 1

    @property
    def _slot_elements(self) -> int:
        return ch.named("HEAD_DIM", self.machine.shape.head_dim)

    @property
    def _head_elements(self) -> int:
        return self.machine.plan.page_size * self._slot_elements

    @property
    def _values_offset(self) -> int:
        """Elements from a token's keys to its values."""
        return ch.named("TO_VALUES", int(self.machine.shape.kv_heads * self._head_elements))

    @property
    def _page_elements(self) -> int:
        return 2 * self._values_offset

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key of one head."""
        return self._slot_elements * self.machine.plan.kv_element_bytes

    @ch.inline
    def key(self, layer: ch.Value, head: ch.Expr, table: ch.Expr, token: ch.Expr) -> ch.Expr:
        """The address of key `token` of one head (bf16* or u8*)."""
        page = prim.load_constant_u32(self.page_table + (table + token // self.machine.plan.page_size))
        return self._key_in_page(layer, head, page, token % self.machine.plan.page_size)

    @ch.inline
    def _key_in_page(self, layer: ch.Value, head: ch.Expr, page: ch.Expr, slot: ch.Expr) -> ch.Expr:
        offset = ty.u64(ch.cast(ty.u32, layer) * self.pages + page) * self._page_elements
        key = self.pool + (offset + ty.u64(head * self._head_elements + slot * self._slot_elements))
        return key

    def value(self, key: ch.Expr) -> ch.Expr:
        """The address of the value that belongs to a key."""
        return key + self._values_offset

    @ch.inline
    def copy_tokens(
        self, ring: Ring, layer: ch.Value, head: ch.Expr, table: ch.Expr, begin: ch.Expr, end: ch.Expr
    ) -> None:
        """In the producer role: bring keys [begin, end) of a head, a stage at a time: keys in its first half, then
        values.

        A copy never crosses a page, and stops at the last token: what lies behind it in the stage is stale. Pages are
        looked up before the wait for a stage, so that the look-up's trip costs nothing.
        """
        ring.fills(CACHED_KEYS)
        if KV_TILE_TOKENS % self.machine.plan.page_size == 0 and self._stage_tokens <= MOST_COPIES * self._page_size:
            self._copy_whole_pages(ring, layer, head, table, begin, end)
        else:
            self._copy_runs(ring, layer, head, table, begin, end)

    @property
    def _page_size(self) -> int:
        return self.machine.plan.page_size

    @property
    def _stage_tokens(self) -> int:
        return stage_keys(self.machine)

    @ch.inline
    def _copy_whole_pages(
        self, ring: Ring, layer: ch.Value, head: ch.Expr, table: ch.Expr, begin: ch.Expr, end: ch.Expr
    ) -> None:
        """Ranges begin at tiles of 16 keys, and so at pages: a stage's copies are known beforehand, and overlap."""
        size, copies = self._page_size, self._stage_tokens // self._page_size
        with ch.for_(begin, end, self._stage_tokens, unroll=1) as first:
            count = ch.minimum(end - first, self._stage_tokens)
            pages = ch.array(ty.u32, copies)
            with ch.for_(copies, unroll=True) as index:
                token = ch.minimum(first + index * size, end - 1)
                pages[index] = prim.load_constant_u32(self.page_table + (table + token // size))
            with ring.fill(count * (2 * self.token_bytes), KEYS_IN_FLIGHT) as (stage, barrier):
                with ch.for_(copies, unroll=True) as index:
                    with ch.if_(index * size < count):
                        run = ch.minimum(count - index * size, size)
                        key = self._key_in_page(layer, head, pages[index], ty.u32(0))
                        self._copy(stage, barrier, key, index * size, run)

    @ch.inline
    def _copy_runs(
        self, ring: Ring, layer: ch.Value, head: ch.Expr, table: ch.Expr, begin: ch.Expr, end: ch.Expr
    ) -> None:
        """Any range and page size. The next copy's page is looked up while this one's is used."""
        size = self._page_size
        with ch.if_(begin < end):
            page = ch.var(ty.u32, prim.load_constant_u32(self.page_table + (table + begin // size)))
            with ch.for_(begin, end, self._stage_tokens, unroll=1) as first:
                count = ch.minimum(end - first, self._stage_tokens)
                with ring.fill(count * (2 * self.token_bytes), KEYS_IN_FLIGHT) as (stage, barrier):
                    done = ch.var(ty.u32, 0)
                    with ch.while_(done < count):
                        token = first + done
                        run = ch.minimum(size - token % size, count - done)
                        key = self._key_in_page(layer, head, page, token % size)
                        following = ch.minimum(token + run, end - 1)
                        page.set(prim.load_constant_u32(self.page_table + (table + following // size)))
                        self._copy(stage, barrier, key, done, run)
                        done += run

    @ch.inline
    def _copy(self, stage: ch.Expr, barrier: ch.Expr, key: ch.Expr, done: ch.Expr, run: ch.Expr) -> None:
        """`run` neighbouring tokens, the keys and then the values, to place `done` of the stage's halves."""
        keys = stage + done * self.token_bytes
        prim.bulk_copy(keys, key, run * self.token_bytes, barrier)
        prim.bulk_copy(keys + values_at(self.machine), self.value(key), run * self.token_bytes, barrier)
