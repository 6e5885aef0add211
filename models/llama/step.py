"""What the phases of the decode step stand on: the step's beginning and end, reading vectors, finishing rows.

The phases themselves, and so the model, are in `program`. Here are the details that would hide them: who takes the
next token, when the copy lane may fetch new keys, where a finished row goes, what is noted for the host.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.cache import KvCache
from cheetah.blocks.attention.core import LSE_WORDS, Attention, AttentionPort
from cheetah.blocks.attention.schedule import Schedule
from cheetah.blocks.columns import (
    NUMBER,
    POSITION,
    SEQUENCE,
    STATE_WORDS,
    STOPPED,
    TOTAL,
    UNIT,
    Columns,
    fragment_word,
    vector_words,
)
from cheetah.blocks.exchange import Exchange, make_exchange
from cheetah.blocks.linear.epilogue import rotate, scaled
from cheetah.blocks.linear.matvec import Load, Matvec, Rows
from cheetah.blocks.linear.prologue import Part, load_normalised, load_vector, unit_of_token
from cheetah.blocks.machine import Machine
from cheetah.blocks.ring import Ring
from cheetah.blocks.sampling import Sampler
from cheetah.blocks.timeline import Timeline
from cheetah.lang import prim, ty
from cheetah.models.config import ModelConfig
from cheetah.plan import PAIR_COLUMNS, STRIP_ROWS, Gpu, MatrixLayout, ModelShape, Plan, step_matrices
from cheetah.plan.index import ceil_div
from cheetah.plan.kv import KvPlanLayout

LAYER_PHASES = ("qkv", "attention", "o", "gate_up", "down")


def kv_layout(shape: ModelShape, gpu: Gpu, plan: Plan) -> KvPlanLayout:
    """How the KV plans of a launch are encoded."""
    return KvPlanLayout.for_step(plan, shape.group, shape.kv_heads, gpu.blocks)


def exchange_sizes(shape: ModelShape, gpu: Gpu, plan: Plan) -> dict[str, int]:
    """Payload words of each exchanged vector."""
    partial_rows = kv_layout(shape, gpu, plan).max_partial_rows
    return {
        "hidden": vector_words(shape.hidden, plan.tokens),
        "qkv": plan.tokens * shape.qkv_rows // 2,
        "partials": partial_rows * (shape.head_dim + LSE_WORDS),
        "attention": vector_words(shape.query_rows, plan.tokens),
        "middle": vector_words(shape.hidden, plan.tokens),
        "gated": vector_words(shape.ffn, plan.tokens),
        "candidates": 2 * 2 * max(plan.tokens, 2) * gpu.blocks,
    }


class StepPort(AttentionPort):
    """Attention inside the step: queries and new keys come from the exchange, its output goes there."""

    def __init__(self, machine: Machine, exchange: Exchange, columns: Columns, scales: Any = None) -> None:
        self.machine, self.exchange, self.columns, self.scales = machine, exchange, columns, scales
        self.shape = machine.shape
        self.layer: Any = None  # of the layer whose attention is being emitted
        self.head_units = self.shape.head_dim // UNIT

    def query_unit(self, column: ch.Expr, head: ch.Expr, unit: ch.Expr, epoch: ch.Expr) -> Any:
        return self._unit(column, head, unit, epoch)

    def newest_unit(self, column: ch.Expr, kv_head: ch.Expr, value: Any, unit: ch.Expr, epoch: ch.Expr) -> Any:
        first = ch.select(value, ty.u32(self.shape.heads + self.shape.kv_heads), ty.u32(self.shape.heads))
        return self._unit(column, first + kv_head, unit, epoch)

    def _unit(self, column: ch.Expr, head: ch.Expr, unit: ch.Expr, epoch: ch.Expr) -> Any:
        row_units = self.shape.qkv_rows // UNIT
        return self.exchange.read4("qkv", column * row_units + head * self.head_units + unit, epoch)

    def position(self, column: ch.Expr) -> Any:
        return self.columns.state(column, POSITION)

    def scale(self, kv_head: ch.Expr, value: bool) -> Any:
        return self.scale_of(self.layer, kv_head + (self.shape.kv_heads if value else 0))

    def scale_of(self, layer: ch.Expr, kv_row: ch.Expr) -> Any:
        """The scale of a KV head's codes; kv_row counts key heads, then value heads."""
        return self.scales[layer * (2 * self.shape.kv_heads) + kv_row]

    def publish(
        self,
        column: ch.Expr,
        head: ch.Expr,
        dim_pair: ch.Expr,
        low: ch.Expr,
        high: ch.Expr,
        lse: ch.Expr,
        epoch: ch.Expr,
    ) -> None:
        element = head * self.shape.head_dim + dim_pair * 2
        place = fragment_word(element, column, self.columns.limit)
        self.exchange.publish("attention", place, prim.pack_bf16x2(low, high), epoch)


class StepParts:
    """The blocks of a launch and the small parts of its steps. `launch` has the kernel's parameters by name."""

    def __init__(self, config: ModelConfig, machine: Machine, launch: SimpleNamespace) -> None:
        self.config, self.machine, self.launch = config, machine, launch
        self.shape = machine.shape
        self.matrices = step_matrices(self.shape, machine.plan, machine.gpu)
        self.phases = self.shape.layers * len(LAYER_PHASES) + 2
        self.timeline = Timeline(machine, getattr(launch, "timeline", None), self.phases)
        self.exchange = make_exchange(machine, launch.exchange, exchange_sizes(self.shape, machine.gpu, machine.plan))
        self.columns = Columns(machine, launch.column_count, launch.columns, launch.sequences)
        self.ring = Ring(machine)
        self.matvec = Matvec(self.columns, self.ring, launch.weights, self.timeline)
        self.cache = KvCache(machine, launch.kv, launch.page_table)
        self.schedule = Schedule(
            machine, kv_layout(self.shape, machine.gpu, machine.plan), launch.kv_plans, launch.plan_count, launch.tiles
        )
        self.port = StepPort(machine, self.exchange, self.columns, getattr(launch, "kv_scales", None))
        self.attention = Attention(
            machine, self.ring, self.exchange, self.schedule, self.cache, self.port, self.timeline
        )
        self.sampler = Sampler(self.matvec, self.exchange, self.shape.vocab, self.timeline)

    # -- setting up and stepping ----------------------------------------------------------------------------------

    @ch.inline
    def _set_up(self) -> None:
        machine, launch = self.machine, self.launch
        step_done = machine.region("step_done", ty.u64)
        next_token = machine.region("next_token", ty.u32)
        self.step_done, self.step_taken, self.next_token = step_done, step_done + 1, next_token
        with ch.if_(machine.thread == 0):
            self.ring.initialise()
            prim.mbarrier_init(self.step_done, 1)
            prim.mbarrier_init(self.step_taken, 1)
            prim.mbarrier_fence_init()
        with ch.if_(machine.thread < launch.column_count):
            sequence = ch.const(ty.u32, self.columns.record(machine.thread, "sequence"), name="sequence")
            number = ch.const(ty.u32, self.columns.record(machine.thread, "number"), name="number")
            next_token[machine.thread] = self._given(sequence, number)
            machine.region("columns", ty.u32)[machine.thread * STATE_WORDS + STOPPED] = 0
        prim.block_barrier()  # orders the barriers' initialisation before their first use by either role
        self.ring.start()
        with machine.math:
            self.exchange.start()

    @ch.inline
    def _begin_step(self, step: Any) -> None:
        machine = self.machine
        with machine.copy:
            self.schedule.advance(machine.copy, step)
        with machine.math:
            has_new_plan = self.schedule.advance(machine.math, step)
            step_epoch = self.launch.epoch + step * (self.shape.layers + 1)
            self.step_epoch = step_epoch
            self.columns.begin_step(step)
            with ch.if_(has_new_plan):
                self.schedule.keep()
            machine.meet()
            self._load_angles()
            self._start_residual()
            machine.meet()

    @ch.inline
    def _load_angles(self) -> None:
        """cos and sin of every column's position."""
        machine, head_dim = self.machine, self.shape.head_dim
        angles = machine.region("rope", ty.f32)
        with ch.for_(machine.thread, self.launch.column_count * head_dim, machine.math_threads, unroll=1) as number:
            position = self.columns.state(number // head_dim, POSITION)
            angles[number] = self.launch.rope[ty.u64(position) * head_dim + ty.u64(number % head_dim)]

    @ch.inline
    def _start_residual(self) -> None:
        """The rows of the tokens' embeddings that this block owns, in f32."""
        machine, matrix, tokens = self.machine, self.matrices.o, self.columns.limit
        residual = machine.region("residual", ty.f32)
        count = matrix.rounds * STRIP_ROWS * tokens
        with ch.for_(machine.thread, count, machine.math_threads, unroll=1, name="place") as place:
            own_row = place // tokens
            strip = matrix.strip(own_row // STRIP_ROWS, matrix.position(machine.block))
            row = strip * STRIP_ROWS + own_row % STRIP_ROWS
            with ch.if_((row < self.shape.hidden) & (place % tokens < self.launch.column_count)):
                residual[place] = prim.bf16_to_f32(self._embedded(place % tokens)[row])
            with ch.else_():
                residual[place] = 0.0

    @ch.inline
    def _begin_layer(self, layer: Any) -> None:
        with self.machine.copy:
            layer_offset = ty.u64(layer) * self.matrices.layer_stride
            self.layer_offset = layer_offset
        with self.machine.math:
            layer_epoch = self.step_epoch + layer
            self.layer_epoch = layer_epoch

    @ch.inline
    def _wait_for_step(self, step: Any) -> None:
        """In the copy role: no key or value of the last step is fetched before all blocks have written theirs.

        The math warps arrive at `step_done` after the rendezvous of all blocks that ends a step (release by each block
        after its stores, acquire by this one); the fence orders those ordinary stores before the copy engine's reads.
        Weights of the first layer are requested before this, so the memory stays busy. If the sequence has ended, the
        math warps use those up and the copy lane leaves.
        """
        with ch.if_(step > 0):
            prim.mbarrier_wait(self.step_done, (step + 1) % 2)
            prim.fence_proxy_async()
            stop = ch.const(ty.u32, self.next_token[self.columns.limit])
            prim.mbarrier_arrive(self.step_taken)
            with ch.if_(stop != 0):
                ch.return_()

    @ch.inline
    def _end_step(self, step: Any) -> None:
        """A warp takes every column's next token, given or chosen, and finds whether to go on; then all pass on
        together."""
        machine = self.machine
        with machine.math:
            ch.comment("the next tokens, and whether the launch ends")
            with ch.if_(machine.warp == 0):
                going_on = ch.var(ty.u32, 0)
                with ch.for_(machine.lane, self.launch.column_count, 32, unroll=1, name="column") as column:
                    self._take_token(column, going_on)
                with ch.for_(5, unroll=1) as level:
                    going_on |= prim.shuffle_xor_u32(going_on, ty.u32(16) >> level)
                prim.warp_barrier()  # every lane's tokens are written before lane 0 lets them be read
                with ch.if_(machine.thread == 0):
                    with ch.if_(machine.block == 0):
                        self.launch.status[0] = ty.i32(step + 1)
                    # The copy lane has seen the end of the last step: a block with nothing to fetch could come two
                    # steps ahead of it, and a parity tells two neighbouring phases apart only. Long since true for the
                    # others.
                    prim.mbarrier_wait(self.step_taken, (step + 1) % 2)
                    self.next_token[self.columns.limit] = ch.select(going_on == 0, ty.u32(1), ty.u32(0))
                    prim.fence_proxy_async()  # what other blocks wrote to the cache, before our copy engine reads it
                    prim.mbarrier_arrive(self.step_done)
            machine.meet()
            with ch.if_(self.next_token[self.columns.limit] != 0):
                ch.comment("the copy lane has fetched what it does not need the tokens for: use it up")
                with ch.if_(step + 1 < self.launch.steps):
                    self.matvec.skip(self.matrices.qkv)
                ch.break_()

    @ch.inline
    def _take_token(self, column: ch.Expr, going_on: Any) -> None:
        """One lane, one column: note what was sampled after its token, and the token that it has in the next step."""
        machine, launch, columns = self.machine, self.launch, self.columns
        sequence = ch.const(ty.u32, columns.state(column, SEQUENCE), name="sequence")
        number = ch.const(ty.u32, columns.state(column, NUMBER), name="number")
        total = ch.const(ty.u32, columns.state(column, TOTAL), name="total")
        given = ch.const(ty.u32, columns.sequence(sequence, "given"), name="given")
        per_step = ch.const(ty.u32, columns.sequence(sequence, "per_step"), name="per_step")
        sampled = ch.const(ty.u32, machine.region("chosen", ty.u32)[column], name="sampled")
        stopped = ch.var(ty.u32, columns.state(column, STOPPED))
        with ch.if_((number + 1 >= given) & (number < total)):
            with ch.if_(machine.block == 0):
                launch.tokens[sequence * (machine.plan.launch_tokens + 1) + number + 1] = ty.i32(sampled)
            first_stop = ch.const(ty.u32, columns.sequence(sequence, "stop_first"), name="first_stop")
            with ch.for_(columns.sequence(sequence, "stop_count"), unroll=1) as stop:
                with ch.if_(ty.u32(launch.stop_ids[first_stop + stop]) == sampled):
                    stopped.set(1)
        following = number + per_step
        with ch.if_(following >= total):
            stopped.set(1)
        machine.region("columns", ty.u32)[column * STATE_WORDS + STOPPED] = stopped
        with ch.if_(stopped == 0):
            going_on.set(1)
        with ch.if_((following >= given) & (per_step == 1)):
            # No logit was a number: the host is told so, and an address in the embedding must be one.
            self.next_token[column] = ch.minimum(sampled, self.shape.vocab - 1)
        with ch.else_():
            self.next_token[column] = self._given(sequence, following)

    @ch.inline
    def _given(self, sequence: ch.Expr, number: ch.Expr) -> Any:
        """An input of a sequence, or 0 where it has none left."""
        launch = self.launch
        token = ch.var(ty.u32, 0)
        with ch.if_(number < self.columns.sequence(sequence, "given")):
            place = sequence * (self.machine.plan.launch_tokens + 1) + number
            token.set(ch.minimum(ty.u32(launch.tokens[place]), self.shape.vocab - 1))
        return token

    # -- reading vectors and finishing rows -----------------------------------------------------------------------

    def _needs_head(self, step: Any) -> Any:
        return (step >= self.launch.head_from) | (self.launch.logits != None)  # noqa: E711 (a device comparison)

    def _norm(self, index: Any) -> Any:
        return self.launch.norms + index * self.shape.padded_hidden

    def _embedded(self, column: Any) -> Any:
        """The embedding of a column's token."""
        return self.launch.embedding + ty.u64(self.next_token[column]) * self.shape.padded_hidden

    @ch.inline
    def _read_embedding(self, data: Any, unit: Any, count: int) -> None:
        """Units of the tokens' embeddings, as `load_normalised` asks for them."""
        tokens, threads = self.columns.limit, self.machine.math_threads
        embedded = self._embedded(unit // (PAIR_COLUMNS // UNIT) % tokens)
        with ch.for_(count, unroll=True, name="number") as number:
            data[number] = prim.load_constant_u32x4(embedded + unit_of_token(unit + number * threads, tokens) * UNIT)

    def _reader(self, name: str, epoch: Any) -> Any:
        """Reads units of an exchanged vector, as `load_vector` and `load_normalised` ask for them."""
        threads = self.machine.math_threads
        return lambda data, unit, count: self.exchange.read_units(name, data, unit, threads, count, epoch)

    def _waiter(self, name: str, epoch: Any) -> Any:
        """Waits for one unit of an exchanged vector on behalf of a warp, before all of it is polled."""
        return lambda unit, when: self.exchange.wait_for_one(name, unit, epoch, when)

    def _load_norm(self, norm: Any, read: Any, wait: Any = None) -> None:
        """The hidden vectors, normalised."""
        part = Part(self.shape.padded_hidden, ceil_div(self.shape.hidden, STRIP_ROWS) * STRIP_ROWS)
        load_normalised(self.columns, part, self.shape.hidden, self.config.rms_norm_eps, norm, read, wait)

    def _slice_loader(self, matrix: MatrixLayout, name: str, available: int, ready: Any) -> Load:
        """Brings the parts of an exchanged vector as the matrix is sliced; `available` of its elements exist."""
        chunk_elements = matrix.pairs_per_chunk * PAIR_COLUMNS

        def load(number: int) -> None:
            first, end = (chunk * chunk_elements for chunk in matrix.slice_range(number))
            end = min(end, matrix.padded_columns)
            part = Part(end - first, min(end, available) - first, first // UNIT * self.columns.limit)
            epoch = self.layer_epoch
            load_vector(self.columns, part, self._reader(name, epoch), self._waiter(name, epoch))
            if number == 0:
                ready()

        return load

    @ch.inline
    def _finish_qkv(self, rows: Rows, layer: Any) -> None:
        shape = self.shape
        strips_per_head = shape.head_dim // STRIP_ROWS
        head = rows.strip // strips_per_head
        strip_of_head = rows.strip % strips_per_head
        value = ch.var(ty.f32, scaled(self.machine, rows))
        dim = ch.var(ty.u32, strip_of_head * STRIP_ROWS + rows.row)
        with ch.if_(head < shape.heads + shape.kv_heads):
            rotated, rotated_dim = rotate(self.machine, rows, value, strip_of_head)
            value.set(rotated)
            dim.set(rotated_dim)
        neighbour = prim.shuffle_xor_f32(value, 1)
        pair = ch.var(ty.u32, prim.pack_bf16x2(value, neighbour))
        with ch.if_((rows.lane < STRIP_ROWS) & (rows.lane % 2 == 0)):
            place = (rows.column * shape.qkv_rows + head * shape.head_dim + dim) // 2
            if self.machine.plan.kv_dtype == "e4m3":
                with ch.if_(head >= shape.heads):
                    # Quantised before anybody uses them, so that later reads of the cache agree.
                    scale = self.port.scale_of(layer, head - shape.heads)
                    codes = prim.e4m3x2_from_f32(prim.divide_f32(value, scale), prim.divide_f32(neighbour, scale))
                    pair.set(prim.e4m3x4_to_bf16(codes).x)
                    self._append_to_cache(layer, head - shape.heads, dim, ty.u16(codes), rows.column)
            else:
                with ch.if_(head >= shape.heads):
                    self._append_to_cache(layer, head - shape.heads, dim, pair, rows.column)
            self.exchange.publish("qkv", place, pair, self.layer_epoch)

    @ch.inline
    def _append_to_cache(self, layer: Any, kv_row: Any, dim: Any, pair: Any, column: Any) -> None:
        """kv_row counts key heads, then value heads."""
        kv_heads, columns = self.shape.kv_heads, self.columns
        with ch.if_(columns.state(column, NUMBER) < columns.state(column, TOTAL)):
            table = columns.state(column, SEQUENCE) * self.machine.plan.pages_per_sequence
            key = self.cache.key(layer, kv_row % kv_heads, table, columns.state(column, POSITION))
            place = ch.select(kv_row < kv_heads, key, self.cache.value(key))
            ch.reinterpret(ty.ptr_mut(pair.type), place + dim)[0] = pair
            prim.fence_proxy_async()  # a later step reads this with the copy engine

    @ch.inline
    def _finish_head(self, rows: Rows, step: Any) -> None:
        launch, vocab = self.launch, self.shape.vocab
        logit = scaled(self.machine, rows)
        token = rows.strip * STRIP_ROWS + rows.row
        with ch.if_((launch.logits != None) & (rows.lane < STRIP_ROWS) & (token < vocab)):  # noqa: E711
            row = ty.u64(step * self.columns.limit + rows.column)
            launch.logits[row * vocab + ty.u64(token)] = logit
        self.sampler.consider(rows, logit)

    @staticmethod
    def _phase(layer: Any, phase: str) -> Any:
        return layer * len(LAYER_PHASES) + LAYER_PHASES.index(phase)

    def _stamp(self, layer: Any, phase: str, event: str) -> None:
        self.timeline.stamp(self._phase(layer, phase), event)

    def _note(self, step: Any, layer: Any, phase: str) -> None:
        self._note_phase(step, self._phase(layer, phase))

    @ch.inline
    def _note_phase(self, step: Any, phase: ch.Value) -> None:
        """Tell the host how far this block is, for a report if the launch hangs."""
        with ch.if_(self.machine.thread == 0):
            prim.store_relaxed_u32(self.launch.progress + self.machine.block, step * self.phases + phase)
        self.timeline.stamp(phase, "begin")
