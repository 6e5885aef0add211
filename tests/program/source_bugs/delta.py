"""Bugs planted in Gated DeltaNet, in gated heads of attention beside it, and in the expert that every token has."""

from __future__ import annotations

from functools import partial

from tests.program.source_bugs.bug import SourceBug

HYBRID, OF_EXPERTS, QUANTISED = "qwen3.5-0.8b", "qwen3.5-35b-a3b", "qwen3.5-0.8b@int4-g32"
SHARED = "qwen3.5-4b"
"""Two value heads of which read one key head."""
_Bug = partial(SourceBug, "delta", model=HYBRID)
_OfPasses = partial(SourceBug, "delta in passes", model=HYBRID)
_OfDrafts = partial(SourceBug, "delta with drafts", model=HYBRID, drafts=7)

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
    _Bug(
        "value heads dealt to key heads in turn",
        "blocks/delta/memory.py",
        "of_head = share.key_head * heads.shared + (item - self.numbers_from) % heads.shared",
        "of_head = share.key_head + (item - self.numbers_from) % heads.shared * heads.key_heads",
        model=SHARED,
    ),
    # -- passes
    _OfPasses(
        "the state of the first segment for all",
        "blocks/prompt/delta.py",
        "self.parameters.slots + segment.table // self.pages)",
        "self.parameters.slots)",
    ),
    _OfPasses(
        "a memory that nobody has cleared",
        "blocks/prompt/delta_scan.py",
        "with ch.if_(is_new == False):  # noqa: E712 (a device comparison)\n                    self._load(",
        "with ch.if_(segment.count > 0):\n                    self._load(",
    ),
    _OfPasses(
        "channels that nobody has cleared",
        "blocks/prompt/delta_mixing.py",
        "with ch.else_(), ch.if_(run.is_new == False):  # noqa: E712 (a device comparison)",
        "with ch.else_():",
    ),
    _OfPasses(
        "rows before the segment, of another sequence",
        "blocks/prompt/delta_mixing.py",
        "with ch.if_(run.first > 0):",
        "with ch.if_(run.column > 0):",
    ),
    _OfPasses(
        "the last whole run of a stage token by token",
        "blocks/prompt/delta_scan.py",
        "ch.select(segment.start % RUN == 0, count // RUN * RUN, ty.u32(0))",
        "ch.select(segment.start % RUN == 0, (count - 1) // RUN * RUN, ty.u32(0))",
    ),
    _OfPasses(
        "the last rows but one are kept",
        "blocks/prompt/delta_scan.py",
        "token = column + segment.count - ch.minimum(segment.count, BEFORE) + last",
        "token = column + segment.count - ch.minimum(segment.count, BEFORE) + ch.minimum(last, 1)",
    ),
    _OfPasses(
        "what was kept is forgotten with few tokens",
        "blocks/prompt/delta_scan.py",
        "with ch.if_((is_new == False) & (segment.count < BEFORE)):",
        "with ch.if_((is_new == False) & (segment.count < BEFORE - 1)):",
    ),
    _OfPasses(
        "a stage given back before what it has was taken",
        "blocks/prompt/delta_scan.py",
        "                    self._be_done(memory, made)\n",
        "",
    ),
    _OfPasses(
        "a key's product with the nearest key for all",
        "blocks/prompt/delta_scan.py",
        "numbers[number][number - before], known)",
        "numbers[number][1], known)",
    ),
    _OfPasses(
        "how much is kept by the token before",
        "blocks/prompt/delta_mixing.py",
        'self.mixed[self._word(column, row)], name="pair")',
        'self.mixed[self._word(ch.maximum(column, 1) - 1, row)], name="pair")',
    ),
    _OfPasses(
        "gates of the next head",
        "blocks/prompt/delta.py",
        "heads.z_row + head * DIMS + pair * 8",
        "heads.z_row + (head + 1) % heads.value_heads * DIMS + pair * 8",
    ),
    _OfPasses(
        "1 + weight in the norm of heads, in a pass",
        "blocks/prompt/delta.py",
        "silu(half(gates[pair])) * norm[index]",
        "silu(half(gates[pair])) * (norm[index] + 1.0)",
    ),
    # -- records, where tokens are drafted
    _OfDrafts(
        "the record of a wrong draft too",
        "blocks/delta/records.py",
        'ch.const(ty.u32, now - behind, name="more")',
        'ch.const(ty.u32, ch.select(now == behind, ty.u32(0), now - behind + 1), name="more")',
    ),
    _OfDrafts(
        "a record too few",
        "blocks/delta/records.py",
        'ch.const(ty.u32, now - behind, name="more")',
        'ch.const(ty.u32, ch.select(now == behind, ty.u32(0), now - behind - 1), name="more")',
    ),
    _OfDrafts(
        "no step does what the records of the one before say",
        "blocks/delta/records.py",
        "before = ch.select(step == 0, now, self.advance.done(sequence, step + 1))",
        "before = now",
    ),
    _OfDrafts(
        "what lies in the slot before a first token",
        "blocks/delta/records.py",
        'self.columns.sequence(sequence, "length") + behind',
        'self.columns.sequence(sequence, "length") + now',
    ),
    _OfDrafts(
        "one record for all columns",
        "blocks/delta/records.py",
        "* self.columns.limit + ty.u64(column)",
        "* self.columns.limit",
    ),
    _OfDrafts(
        "records are not done behind the last step",
        "blocks/delta/memory.py",
        "self._catch_up(share, state, column, sequence, step + 1, memory, known)",
        "pass",
    ),
    _OfDrafts(
        "a state stored before its records are done",
        "blocks/delta/memory.py",
        """        with ch.for_(more, unroll=1, name="number") as number:
            record = self.records.of(share.layer, share.number, column + number)
            self._change_by(ch.const(ty.ptr_mut(ty.u32), record, name="record"), memory, known)
        with ch.if_(more != 0):
            self._store(state, memory, known)
""",
        """        with ch.if_(more != 0):
            self._store(state, memory, known)
        with ch.for_(more, unroll=1, name="number") as number:
            record = self.records.of(share.layer, share.number, column + number)
            self._change_by(ch.const(ty.ptr_mut(ty.u32), record, name="record"), memory, known)
""",
    ),
    _OfDrafts(
        "a record's channels are shifted by one",
        "blocks/delta/memory.py",
        "known[number] = prim.make_u32x4(before.y, before.z, records.rows(record)[item], 0)",
        "known[number] = prim.make_u32x4(before.x, before.y, records.rows(record)[item], 0)",
    ),
)
