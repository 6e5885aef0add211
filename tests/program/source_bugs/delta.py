"""Bugs planted in Gated DeltaNet, in gated heads of attention beside it, and in the expert that every token has."""

from __future__ import annotations

from functools import partial

from tests.program.source_bugs.bug import SourceBug

HYBRID, OF_EXPERTS, QUANTISED = "qwen3.5-0.8b", "qwen3.5-35b-a3b", "qwen3.5-0.8b@int4-g32"
_Bug = partial(SourceBug, "delta", model=HYBRID)

BUGS = (
    _Bug(
        "the state of the first sequence for all",
        "blocks/delta/memory.py",
        "self.parameters.slots + sequence)",
        "self.parameters.slots)",
    ),
    _Bug(
        "a state as it lies, before a sequence's first token",
        "blocks/delta/memory.py",
        "is_new: ch.Expr = self.columns.state(column, POSITION) == 0",
        "is_new: ch.Expr = self.columns.state(column, POSITION) == 1",
    ),
    _Bug(
        "a stopped column's state goes on",
        "blocks/delta/memory.py",
        "has_token & (self.columns.state(column, STOPPED) == 0)",
        "has_token",
    ),
    _Bug(
        "the state goes on behind a last token",
        "blocks/delta/memory.py",
        "has_token & (self.columns.state(column, STOPPED) == 0)",
        "self.columns.state(column, STOPPED) == 0",
    ),
    _Bug(
        "a channel's tokens before are shifted by one",
        "blocks/delta/memory.py",
        "known[number] = prim.make_u32x4(before.y, before.z, word, 0)",
        "known[number] = prim.make_u32x4(before.x, before.y, word, 0)",
    ),
    _Bug(
        "a state is stored behind its first column",
        "blocks/delta/memory.py",
        "with ch.if_(is_last):",
        "with ch.if_(is_first):",
    ),
    _Bug(
        "columns of the values of another head",
        "blocks/delta/memory.py",
        "value_head = share.key_head * heads.shared + number // PAIRS",
        "value_head = (share.key_head + 1) % heads.key_heads * heads.shared + number // PAIRS",
    ),
    _Bug(
        "1 + weight in the norm of heads",
        "blocks/delta/memory.py",
        "silu(prim.bf16x2_low(word)) * prim.bits_float(before.x)",
        "silu(prim.bf16x2_low(word)) * (prim.bits_float(before.x) + 1.0)",
    ),
    _Bug(
        "no barrier between what is mixed and what takes it",
        "blocks/delta/memory.py",
        '                machine.meet()\n                self.timeline.stamp_here("ready")',
        '                self.timeline.stamp_here("ready")',
    ),
    _Bug(
        "the norm of the first head for all",
        "blocks/delta/norms.py",
        "(column * self.heads.value_heads + head) * (PARTS // 4)",
        "(column * self.heads.value_heads) * (PARTS // 4)",
    ),
    _Bug(
        "squares of one half of a head",
        "blocks/delta/norms.py",
        "exchange.read4(name, first + index, epoch)",
        "exchange.read4(name, first, epoch)",
    ),
    _Bug(
        "values in the place of gates",
        "blocks/attention/step_port.py",
        "head + (self.shape.heads + 2 * self.shape.kv_heads)",
        "head + (self.shape.heads + self.shape.kv_heads)",
    ),
    _Bug(
        "the first column's weight of the expert that every token has",
        "blocks/experts/choice.py",
        "return self.weights[self.experts.chosen * self.columns.limit + column]",
        "return self.weights[self.experts.chosen * self.columns.limit]",
        model=OF_EXPERTS,
    ),
    _Bug(
        "the expert that every token has is not added",
        "blocks/experts/products.py",
        "residual[place] = prim.fma_f32(value, weight, residual[place])",
        "residual[place] = prim.fma_f32(value, weight * 0.0, residual[place])",
        model=OF_EXPERTS,
    ),
    _Bug(
        "rows of b and a over the last gates",
        "../models/dense/step.py",
        "self._own_delta.b_row),",
        "self._own_delta.b_row - 16),",
        model=QUANTISED,
    ),
)
