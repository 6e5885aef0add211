"""Lists beside K-tiles in a pass: their numbers are put among the operands of the tiles, whose products are dense.

A lane's numbers of rows g and g + 8 ascend by column (`cheetah.models.formats.lists`), and so do the stages of an
M-tile. So each lane goes along its own numbers, with the next of them loaded ahead from the weights, since what a stage
has of them lies anywhere: no lane waits for another's. A number belongs to a register of one of the four lanes of its
row; operands therefore go to shared memory, each number to its place there, and all back. Nobody but the warp itself is
there. A number is rounded to bf16 where its row has a factor, which the sums are multiplied by: once, as codes are.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.lists import COLUMN, NUMBER, SECOND_ROW
from cheetah.blocks.prompt.machine import PassMachine
from cheetah.lang import prim, ty
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import LIST_UNIT_BYTES, LISTED_TILES, VECTOR_COLUMNS
from cheetah.plan.prompt import LIST_SCRATCH_BYTES, STAGE_TILES

STAGE_COLUMNS = STAGE_TILES * VECTOR_COLUMNS
AHEAD = 4
"""Numbers of a lane that are loaded before they are wanted: a load takes as long as some of them."""
SIZES = 0x7FFF0000
"""Of a number: 0 where a list ends."""


class StageLists:
    """The lists of this warp's M-tile, stage by stage, in the consumer role. window: the stage's number among those of
    the matrix' columns."""

    def __init__(self, machine: PassMachine, window: Any, ahead: Any, taken: Any) -> None:
        self.machine, self.window, self.ahead, self.taken = machine, window, ahead, taken

    @classmethod
    @ch.inline
    def of(cls, machine: PassMachine, window: Any) -> StageLists:
        """Behind the beginning of a tile, whose first stage is number `window`."""
        list_window = ch.var(ty.u32, window)
        ahead = ch.array(ty.u32, AHEAD)
        taken = ch.var(ty.u32, 0)
        return cls(machine, list_window, ahead, taken)

    @ch.function
    def put(
        self, layout: MatrixLayout, weights: ch.Expr, m_tile: ch.Expr, steps: int, fragments: Any, factors: Any
    ) -> None:
        """What the stage's columns have in lists to its `steps` operands, of 16 columns each."""
        lane, of_chunk = self.machine.lane, LISTED_TILES * layout.format.columns // STAGE_COLUMNS
        m_tile = ch.const(ty.u32, ch.minimum(m_tile, layout.m_tiles - 1), name="m_tile")
        chunk = ch.const(ty.u32, self.window // of_chunk, name="chunk")
        within = ch.const(ty.u32, self.window % of_chunk, name="within")
        words = ch.reinterpret(ty.ptr(ty.u32), weights + self._begin(layout, m_tile, chunk)) + lane
        with ch.if_(within == 0):
            self.taken.set(0)
            for number in range(AHEAD):
                self.ahead[number] = self._word(layout, words, number)
        operands = self.machine.region("list_operands", ty.u32x4) + self.machine.warp * (LIST_SCRATCH_BYTES // 16)
        for operand in range(steps):
            operands[operand * 32 + lane] = fragments[operand]
        prim.warp_barrier()  # a lane's numbers belong to operands of its neighbours
        halves = ch.reinterpret(ty.ptr_mut(ty.u16), operands)
        with ch.while_((self.ahead[0] & SIZES != 0) & ((self.ahead[0] & COLUMN) // STAGE_COLUMNS == within)):
            self._put_number(halves, factors)
            self.taken += 1
            for number in range(AHEAD - 1):
                self.ahead[number] = self.ahead[number + 1]
            self.ahead[AHEAD - 1] = self._word(layout, words, self.taken + (AHEAD - 1))
        prim.warp_barrier()  # all numbers are in their places
        for operand in range(steps):
            fragments[operand] = operands[operand * 32 + lane]
        prim.warp_barrier()  # all have read before the next stage's operands come
        self.window += 1

    @staticmethod
    def _begin(layout: MatrixLayout, m_tile: ch.Expr, chunk: ch.Expr) -> ch.Expr:
        """Byte of the M-tile's list beside a chunk (u64)."""
        wave, position = m_tile // layout.blocks, m_tile % layout.blocks
        behind = layout.chunk_address(chunk, position, layout.wave_width(wave)) + layout.chunk_bytes(chunk)
        begin: ch.Expr = layout.wave_address(ty.u64(wave)) + ty.u64(behind - layout.format.list_bytes)
        return begin

    @staticmethod
    def _word(layout: MatrixLayout, words: ch.Expr, unit: Any) -> ch.Expr:
        """This lane's word of a unit, 0 behind the last."""
        found = ch.var(ty.u32, 0, name="word")
        with ch.if_(unit < layout.format.list_units):
            found.set(words[unit * (LIST_UNIT_BYTES // 4)])
        return found

    def _put_number(self, halves: Any, factors: Any) -> None:
        """The next number to its place: a K-tile's operand h has of lane 4g + t columns 8t + 4h .. of rows g and g + 8,
        two of each row, then the next two."""
        word = ch.const(ty.u32, self.ahead[0], name="word")
        is_second = ch.const(ty.boolean, (word & SECOND_ROW) != 0, name="is_second")
        column = ch.const(ty.u32, word & COLUMN, name="column")
        part, of_tile = column // VECTOR_COLUMNS % STAGE_TILES, column % VECTOR_COLUMNS
        operand = part * 2 + of_tile // 4 % 2
        lane = self.machine.lane // 4 * 4 + of_tile // 8
        place = (
            (operand * 32 + lane) * 8 + of_tile // 2 % 2 * 4 + ch.select(is_second, ty.u32(2), ty.u32(0)) + column % 2
        )
        bits = word >> 16
        if factors is not None:
            value = prim.bits_float(word & NUMBER) / ch.select(is_second, factors[1], factors[0])
            bits = prim.pack_bf16x2(value, ty.f32(0.0)) & 0xFFFF
        halves[place] = ty.u16(bits)
