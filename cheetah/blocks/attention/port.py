"""How the attention core is joined to a kernel: where queries and new keys come from, where the output goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.head_norms import RawHead, RawHeads
from cheetah.lang.errors import LangError


@dataclass(frozen=True, eq=False)
class Finished:
    """The final output (f32) of dims 2 * dim_pair and the next of a column's head, and the natural LSE of its row."""

    column: Any
    head: Any
    dim_pair: Any
    low: Any
    high: Any
    lse: Any


class AttentionPort(ABC):
    """What the core asks of the kernel around it. Columns are those of the step; a unit is 8 elements (u32x4 of bf16).

    The methods emit code in the consumer role and may wait. What a plan or a variant does not need is never called.
    """

    has_newest = True
    """Whether keys of this step come from `newest_unit`; False: all keys are in the cache."""

    heads: RawHeads | None = None
    """How queries and new keys and values are finished and stored by who reads them; None: they come finished, by
    `query_unit` and `newest_unit`."""

    asks = False
    """Whether units can be asked for before they are waited for: whether there are the four methods that follow."""

    def asked(self) -> ch.Expr | None:
        """A place for a unit that is asked for."""
        raise self._missing("asked")

    def ask(self, asked: Any, raw: RawHead) -> None:
        """Begin to read a unit as it is published into such a place."""
        raise self._missing("ask")

    def settle(self, asked: Any, raw: RawHead, epoch: ch.Expr) -> ch.Expr:
        """The unit that was asked for (u32x4), once it is there."""
        raise self._missing("settle")

    def unit(self, raw: RawHead, epoch: ch.Expr) -> ch.Expr:
        """A unit as it is published (u32x4), once it is there."""
        raise self._missing("unit")

    @abstractmethod
    def query_unit(self, column: ch.Expr, head: ch.Expr, unit: ch.Expr, epoch: ch.Expr) -> ch.Expr:
        """Elements 8*unit to 8*unit + 7 of a query."""

    @abstractmethod
    def newest_unit(self, column: ch.Expr, kv_head: ch.Expr, value: Any, unit: ch.Expr, epoch: ch.Expr) -> ch.Expr:
        """The same of the key or (where the condition `value` holds) the value of a new token: as the cache will have
        it, e4m3 codes as the bf16 numbers that they stand for."""

    @abstractmethod
    def position(self, column: ch.Expr) -> ch.Expr:
        """The absolute position of the column's query (u32)."""

    @abstractmethod
    def publish(self, made: Finished, epoch: ch.Expr) -> None:
        """Two dims of the final output."""

    def request(self, column: ch.Expr) -> ch.Expr:
        """The request that a column belongs to (u32); for variants only, like the next two."""
        raise self._missing("request")

    def query(self, column: ch.Expr) -> ch.Expr:
        """The column's number among the queries of its request (u32)."""
        raise self._missing("query")

    def keys(self, column: ch.Expr) -> ch.Expr:
        """How many keys the column's request has, the new ones included (u32)."""
        raise self._missing("keys")

    def scale(self, kv_head: ch.Expr, value: bool) -> ch.Expr:
        """What codes of a KV head's keys or values are multiplied by (f32); for e4m3 only."""
        raise self._missing("scale")

    def _missing(self, name: str) -> LangError:
        return LangError(f"attention: {type(self).__name__} has no `{name}`, which this variant or KV type asks for.")
