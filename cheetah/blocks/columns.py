"""The tokens of a step: the columns of every product, and how they lie in the vectors that blocks exchange.

A kernel has room for `plan.tokens` columns, a launch uses the first `count` of them. Columns are independent of each
other in every product, so those that are not used may hold anything: nobody loads, finishes or publishes them.

In memory a vector lies in *fragment order*: for each 32 elements (the columns of a K-tile), for each token: its four
units of 8. So lane 4n + t of a warp finds the operand of token n in one 16-byte load, and a vector is copied from the
exchange to shared memory as it is. With one token that is the natural order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.advance import Advance, BySteps
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.plan import VECTOR_COLUMNS
from cheetah.plan.kv import tables
from cheetah.plan.kv.tables import ColumnRecord, SequenceRecord, names_of
from cheetah.plan.plan import COLUMNS

UNIT = 8
"""Elements of a unit, 16 bytes: what a thread loads of a vector at a time."""
UNITS_PER_TILE = VECTOR_COLUMNS // UNIT
POSITION, NUMBER, TOTAL, TEMPERATURE = "position", "number", "total", "temperature"
SEED_LOW, SEED_HIGH, SEQUENCE, STOPPED, CANCELLED = "seed_low", "seed_high", "sequence", "stopped", "cancelled"
OF_A_COLUMN = (POSITION, NUMBER, TOTAL, TEMPERATURE, SEED_LOW, SEED_HIGH, SEQUENCE, STOPPED, CANCELLED)
"""What the block knows of a column in this step, in the region `columns`."""
COLUMN_STATE = ty.struct("ColumnState", **dict.fromkeys(OF_A_COLUMN, ty.u32))
SEQUENCE_RECORD = ty.struct("SequenceRecord", **dict.fromkeys(names_of(SequenceRecord), ty.u32))
COLUMN_RECORD = ty.struct("ColumnRecord", **dict.fromkeys(names_of(ColumnRecord), ty.u32))
"""The records of the launch's tables, with what fills them up: see `cheetah.plan.kv.tables`."""
NO_TOKEN, CANCELLED_TOKEN = ch.bits("NO_TOKEN", tables.NO_TOKEN), ch.bits("CANCELLED_TOKEN", tables.CANCELLED_TOKEN)
PROMPT_TOKEN = ch.bits("PROMPT_TOKEN", tables.PROMPT_TOKEN)
"""What stands for no token, and the bit of a prompt's, under their names in the text."""


def fragment_word(element: Any, column: Any, tokens: int) -> Any:
    """Payload word of a vector in fragment order that holds elements `element` (even) and the next of a token."""
    unit = (element // VECTOR_COLUMNS * tokens + column) * UNITS_PER_TILE + element // UNIT % UNITS_PER_TILE
    return unit * (UNIT // 2) + element % UNIT // 2


def vector_words(elements: int, tokens: int) -> int:
    """Payload words (two bf16 each) of a vector of so many elements a token, padded to whole K-tiles."""
    return -(-elements // VECTOR_COLUMNS) * (VECTOR_COLUMNS // 2) * tokens


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of a launch; the records are the launch's tables."""

    machine: Machine
    count: ch.Expr
    columns: ch.Expr
    sequences: ch.Expr
    advance: Advance = field(default_factory=BySteps)

    @property
    def limit(self) -> int:
        """Columns that the kernel has room for."""
        return self.machine.plan.tokens

    @property
    def tiles(self) -> int:
        """Groups of 8 columns, each an accumulator of the products."""
        return -(-self.limit // COLUMNS)

    def of_thread(self) -> Any:
        """The column that a consumer thread loads: every unit that it takes of a vector belongs to it."""
        return self.machine.thread // UNITS_PER_TILE % self.limit

    def if_active(self, column: ch.Expr) -> ch.if_:
        """Do what follows for a column in use; with room for one column only, it is."""
        return ch.if_(self.limit == 1 or column < self.count)

    # -- what is known of a column ---------------------------------------------------------------------------------

    def state(self, column: ch.Value, what: str) -> Any:
        """Something that the block knows of a column in this step (u32)."""
        return getattr(self.states[column], what)

    @property
    def states(self) -> Any:
        """What the block knows of its columns."""
        return ch.whole("column_states", self.machine.region("columns", COLUMN_STATE))

    def record(self, column: ch.Expr, name: str) -> Any:
        """A field of a column's record (u32)."""
        records = ch.whole("column_records", ch.reinterpret(ty.ptr(COLUMN_RECORD), self.columns))
        return prim.load_constant_u32(ch.address_of(getattr(records[column], name)))

    def sequence(self, sequence: ch.Expr, name: str) -> Any:
        """A field of a sequence's record (u32)."""
        records = ch.whole("sequence_records", ch.reinterpret(ty.ptr(SEQUENCE_RECORD), self.sequences))
        return prim.load_constant_u32(ch.address_of(getattr(records[sequence], name)))

    @ch.function
    def begin_step(self, step: ch.Expr) -> None:
        """Write down every column's place in this step. A barrier of the consumer warps must follow."""
        machine = self.machine
        with ch.if_(machine.thread < self.count):
            column = machine.thread
            sequence = ch.const(ty.u32, self.record(column, "sequence"), name="sequence")
            index = self.advance.number(self, column, sequence, step)
            # Columns without a token left compute something: within the tables, please.
            position = ch.const(ty.u32, self.sequence(sequence, "length") + index, name="position")
            self.states[column].position = ch.minimum(position, machine.plan.max_context - 1)
            self.states[column].number = index
            self.states[column].total = self.sequence(sequence, "total")
            self.states[column].temperature = self.sequence(sequence, "temperature")
            self.states[column].seed_low = self.sequence(sequence, "seed_low")
            self.states[column].seed_high = self.sequence(sequence, "seed_high")
            self.states[column].sequence = sequence
