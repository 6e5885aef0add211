"""What the phases of the decode step stand on: the step's beginning and end, reading vectors, finishing rows.

The phases themselves, and so the model, are in `program`. Here are the details that would hide them: who takes the
next token, when the copy lane may fetch new keys, where a finished row goes, what is noted for the host.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention import LSE_WORDS, Attention
from cheetah.blocks.exchange import make_exchange
from cheetah.blocks.kv_cache import KvCache
from cheetah.blocks.machine import Machine
from cheetah.blocks.matvec import Matvec, Rows
from cheetah.blocks.ring import Ring
from cheetah.blocks.rows import HALF, rotate
from cheetah.blocks.sampling import Sampler
from cheetah.blocks.schedule import Schedule
from cheetah.blocks.timeline import Timeline
from cheetah.blocks.vector import UNIT, load_normalised, vector_words
from cheetah.lang import prim, ty
from cheetah.models.llama.config import LlamaConfig
from cheetah.plan import STRIP_ROWS, Gpu, ModelShape, Plan, step_matrices
from cheetah.plan.kv import KvPlanLayout

LAYER_PHASES = ("qkv", "attention", "o", "gate_up", "down")


def exchange_sizes(shape: ModelShape, gpu: Gpu, plan: Plan) -> dict[str, int]:
    """Payload words of each exchanged vector."""
    slots = KvPlanLayout(gpu.blocks, shape.kv_heads, plan.batch).max_partials
    return {
        "hidden": vector_words(shape.hidden),
        "qkv": shape.qkv_rows // 2,
        "partials": slots * shape.group * (shape.head_dim + LSE_WORDS),
        "attention": shape.query_rows // 2,
        "middle": vector_words(shape.hidden),
        "gated": vector_words(shape.ffn, HALF),
        "candidates": 2 * 4 * gpu.blocks,
    }


class StepParts:
    """The blocks of a launch and the small parts of its steps. `launch` has the kernel's parameters by name."""

    def __init__(self, config: LlamaConfig, machine: Machine, launch: SimpleNamespace) -> None:
        self.config, self.machine, self.launch = config, machine, launch
        self.shape = machine.shape
        self.matrices = step_matrices(self.shape, machine.plan, machine.gpu)
        self.phases = self.shape.layers * len(LAYER_PHASES) + 2
        self.timeline = Timeline(machine, getattr(launch, "timeline", None), self.phases)
        self.exchange = make_exchange(machine, launch.exchange, exchange_sizes(self.shape, machine.gpu, machine.plan))
        self.ring = Ring(machine)
        self.matvec = Matvec(machine, self.ring, launch.weights, self.timeline)
        self.cache = KvCache(machine, launch.kv, launch.page_table)
        self.schedule = Schedule(machine, launch.kv_plans, launch.plan_count)
        self.attention = Attention(machine, self.ring, self.exchange, self.schedule, self.timeline)
        self.sampler = Sampler(machine, self.exchange, self.shape.vocab, self.timeline)

    # -- setting up and stepping ----------------------------------------------------------------------------------

    @ch.inline
    def _set_up(self) -> None:
        machine = self.machine
        step_done = machine.region("step_done", ty.u64)
        next_token = machine.region("next_token", ty.u32)
        self.step_done, self.step_taken, self.next_token = step_done, step_done + 1, next_token
        with ch.if_(machine.thread == 0):
            self.ring.initialise()
            prim.mbarrier_init(self.step_done, 1)
            prim.mbarrier_init(self.step_taken, 1)
            prim.mbarrier_fence_init()
            next_token[0] = ty.u32(self.launch.tokens[0])
        prim.block_barrier()  # orders the barriers' initialisation before their first use by either role
        self.ring.start()
        with machine.math:
            self.exchange.start()

    @ch.inline
    def _begin_step(self, step: Any) -> None:
        machine, head_dim = self.machine, self.shape.head_dim
        with machine.copy:
            self.schedule.advance(machine.copy, step)
        with machine.math:
            self.schedule.advance(machine.math, step)
            position = self.launch.length + step
            step_epoch = self.launch.epoch + step * (self.shape.layers + 1)
            self.position, self.step_epoch = position, step_epoch
            angles = machine.region("rope", ty.f32)
            with ch.for_(machine.thread, head_dim, machine.math_threads, unroll=1) as number:
                angles[number] = self.launch.rope[ty.u64(position) * head_dim + ty.u64(number)]
            self._start_residual()

    @ch.inline
    def _start_residual(self) -> None:
        """The rows of the token's embedding that this block owns, in f32. Seen by others after the next barrier."""
        machine, matrix = self.machine, self.matrices.o
        residual = machine.region("residual", ty.f32)
        embedded = self._embedded()
        with ch.for_(machine.thread, matrix.rounds * STRIP_ROWS, machine.math_threads, unroll=1) as place:
            row = matrix.strip(place // STRIP_ROWS, matrix.position(machine.block)) * STRIP_ROWS + place % STRIP_ROWS
            with ch.if_(row < self.shape.hidden):
                residual[place] = prim.bf16_to_f32(embedded[row])
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
            stop = ch.const(ty.u32, self.next_token[1])
            prim.mbarrier_arrive(self.step_taken)
            with ch.if_(stop != 0):
                ch.return_()

    @ch.inline
    def _end_step(self, step: Any) -> None:
        """Thread 0 takes the next token, given or chosen, and decides whether to go on; then all pass on together."""
        machine, launch = self.machine, self.launch
        with machine.math:
            ch.comment("the next token, and whether it ends the sequence")
            with ch.if_(machine.thread == 0):
                following = step + 1
                token = ch.var(ty.u32, 0)
                stop = ch.var(ty.u32, 0)
                with ch.if_(following < launch.given):
                    token.set(ty.u32(launch.tokens[following]))
                with ch.else_():
                    token.set(ch.minimum(machine.region("candidates", ty.u32)[0], self.shape.vocab - 1))
                    with ch.for_(launch.stop_count, unroll=1) as number:
                        with ch.if_(ty.u32(launch.stop_ids[number]) == token):
                            stop.set(1)
                with ch.if_(machine.block == 0):
                    with ch.if_(following >= launch.given):
                        launch.tokens[following] = ty.i32(token)
                    launch.status[0] = ty.i32(following)
                # The copy lane has seen the end of the last step: a block with nothing to fetch could come two steps
                # ahead of it, and a parity tells two neighbouring phases apart only. Long since true for the others.
                prim.mbarrier_wait(self.step_taken, (step + 1) % 2)
                self.next_token[0] = token
                self.next_token[1] = stop
                prim.fence_proxy_async()  # what other blocks wrote to the cache, before our copy engine reads it
                prim.mbarrier_arrive(self.step_done)
            machine.meet()
            with ch.if_(self.next_token[1] != 0):
                ch.comment("the copy lane has fetched what it does not need the token for: use it up")
                with ch.if_(step + 1 < launch.steps):
                    self.matvec.skip(self.matrices.qkv)
                ch.break_()

    # -- reading vectors and finishing rows -----------------------------------------------------------------------

    def _needs_head(self, step: Any) -> Any:
        return (step + 1 >= self.launch.given) | (self.launch.logits != None)  # noqa: E711 (a device comparison)

    def _norm(self, index: Any) -> Any:
        return self.launch.norms + index * self.shape.padded_hidden

    def _embedded(self) -> Any:
        """The embedding of the step's token."""
        return self.launch.embedding + ty.u64(self.next_token[0]) * self.shape.padded_hidden

    def _read_embedding(self, data: Any, unit: Any, count: int) -> None:
        """Units of the token's embedding, as `load_normalised` asks for them."""
        embedded = self._embedded()
        with ch.for_(count, unroll=True, name="number") as number:
            data[number] = prim.load_constant_u32x4(embedded + (unit + number * self.machine.math_threads) * UNIT)

    def _reader(self, name: str, epoch: Any) -> Any:
        """Reads units of an exchanged vector, as `load_vector` and `load_normalised` ask for them."""
        threads = self.machine.math_threads
        return lambda data, unit, count: self.exchange.read_units(name, data, unit, threads, count, epoch)

    def _waiter(self, name: str, epoch: Any) -> Any:
        """Waits for one unit of an exchanged vector on behalf of a warp, before all of it is polled."""
        return lambda unit: self.exchange.wait_for_one(name, unit, epoch)

    def _load_norm(self, norm: Any, read: Any, wait: Any = None) -> Any:
        """The hidden vector, normalised; returns 1/rms."""
        available = vector_words(self.shape.hidden) * 2
        return load_normalised(
            self.machine,
            self.shape.padded_hidden,
            available,
            self.shape.hidden,
            self.config.rms_norm_eps,
            norm,
            read,
            wait,
        )

    @ch.inline
    def _finish_qkv(self, rows: Rows, layer: Any, scale: Any) -> None:
        shape = self.shape
        strips_per_head = shape.head_dim // STRIP_ROWS
        head = rows.strip // strips_per_head
        strip_of_head = rows.strip % strips_per_head
        value = ch.var(ty.f32, rows.sum * scale)
        dim = ch.var(ty.u32, strip_of_head * STRIP_ROWS + rows.row)
        with ch.if_(head < shape.heads + shape.kv_heads):
            rotated, rotated_dim = rotate(self.machine, rows, value, strip_of_head)
            value.set(rotated)
            dim.set(rotated_dim)
        neighbour = prim.shuffle_xor_f32(value, 1)
        pair = prim.pack_bf16x2(value, neighbour)
        with ch.if_((rows.lane < STRIP_ROWS) & (rows.lane % 2 == 0)):
            self.exchange.publish("qkv", (head * shape.head_dim + dim) // 2, pair, self.layer_epoch)
            with ch.if_(head >= shape.heads):
                self._append_to_cache(layer, head - shape.heads, dim, pair)

    @ch.inline
    def _append_to_cache(self, layer: Any, kv_row: Any, dim: Any, pair: Any) -> None:
        """kv_row counts key heads, then value heads."""
        kv_heads = self.shape.kv_heads
        key = self.cache.key(layer, kv_row % kv_heads, self.position)
        place = ch.select(kv_row < kv_heads, key, self.cache.value(key))
        ch.reinterpret(ty.ptr_mut(ty.u32), place + dim)[0] = pair
        prim.fence_proxy_async()  # a later step reads this with the copy engine

    @ch.inline
    def _finish_head(self, rows: Rows, step: Any, scale: Any) -> None:
        launch, vocab = self.launch, self.shape.vocab
        logit = rows.sum * scale
        token = rows.strip * STRIP_ROWS + rows.row
        with ch.if_((launch.logits != None) & (rows.lane < STRIP_ROWS) & (token < vocab)):  # noqa: E711
            launch.logits[ty.u64(step) * vocab + ty.u64(token)] = logit
        self.sampler.consider(rows, logit, launch.temperature, launch.seed, self.position + 1)

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
