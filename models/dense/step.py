"""What the decode step stands on: how its blocks are wired, where a step and a layer begin, what a line of the page is
made of.

The model itself is in `program`; here is what would hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.cache import KvCache
from cheetah.blocks.attention.core import Attention
from cheetah.blocks.attention.head_norms import HeadNorms, JointNorms, RawHeads
from cheetah.blocks.attention.schedule import Schedule
from cheetah.blocks.attention.shipped_variants import combined, full, learned_sink, soft_cap
from cheetah.blocks.attention.step_port import LayerSinks, ProjectedHeads, Projection, StepPort
from cheetah.blocks.attention.variants import CAUSAL, Variant
from cheetah.blocks.by_layer import by_layer, chosen, number_among, window_keys
from cheetah.blocks.columns import POSITION
from cheetah.blocks.delta.memory import DeltaMemory, DeltaParameters
from cheetah.blocks.delta.norms import NormedHeads
from cheetah.blocks.delta.rows import PublishedPairs
from cheetah.blocks.exchange import Exchange, Peers, Published
from cheetah.blocks.exchange_kinds import make_exchange
from cheetah.blocks.experts.choice import Choice, PublishedLogits
from cheetah.blocks.experts.fused import Routing, RowsBeside, prefetch_row
from cheetah.blocks.experts.products import (
    AllParts,
    ChosenRows,
    ExpertProducts,
    PartsInTurn,
    SharedRows,
    WeighedBiases,
)
from cheetah.blocks.linear.epilogue import Biases, GatedRows, NormWeights, PublishedRows, RowBiases
from cheetah.blocks.linear.interface import Epilogue, Prologue
from cheetah.blocks.linear.k_parts import AddedParts, PartsShare
from cheetah.blocks.linear.norm_behind import KeepRows, finish_kept_rows
from cheetah.blocks.linear.prologue import Prefetching, Slices
from cheetah.blocks.linear.rms import PublishedSquares
from cheetah.blocks.linear.taps import Tap, place_of_layer
from cheetah.blocks.machine import Machine
from cheetah.blocks.verified_tokens import VerifiedTokens
from cheetah.lang import ty
from cheetah.models.config import ModelConfig
from cheetah.models.dense.head_parts import HeadParts
from cheetah.models.dense.launch import Launch, bias_rows, biases_of_layer, in_all_memories
from cheetah.models.dense.page import (
    ChooseExperts,
    Gated,
    Heads,
    Kept,
    Line,
    Mixed,
    Multiply,
    MultiplyBeside,
    MultiplyBoth,
    NormBehind,
    OntoResidual,
    Remember,
    Routes,
    Weighed,
    page_of_plan,
)
from cheetah.models.dense.step_sizes import (
    exchange_sizes,
    kv_layout,
    own_vectors,
    product_inputs,
    published_kinds,
    router_row_elements,
)
from cheetah.plan import M_TILE_ROWS, MatrixLayout
from cheetah.plan.delta import TAPS, DeltaHeads
from cheetah.plan.k_parts import k_parts, parts_vector
from cheetah.plan.products import IN_PROJ, ROUTES, SHARED_UP, Product, Vector


class StepParts(HeadParts):
    """The blocks of a decode step, and what its phases are written with."""

    def __init__(self, config: ModelConfig, machine: Machine, launch: Launch, exchange: Exchange | None = None) -> None:
        made = exchange or make_exchange(
            machine,
            launch.exchange,
            exchange_sizes(machine.model, machine.gpu, machine.plan),
            inputs=product_inputs(machine.model, machine.gpu, machine.plan),
            copied=published_kinds(config, machine.plan),
            peers=Peers(launch.peers.get("exchange", ()), own_vectors(machine.stack)),
        )
        super().__init__(config, machine, launch, made, page_of_plan(config, machine.plan))
        self.layers = config.attention_layers(machine.plan.max_context)
        self.cache = KvCache(machine, launch.kv, launch.page_table, launch.kv_pages)
        self.schedule = Schedule(
            machine,
            kv_layout(self.shape, machine.gpu, machine.plan),
            *(launch.kv_plans, launch.plan_count, launch.tiles),
            kinds=len(self.layers.windows),
            steps=self.columns.advance,
        )
        self.memory = self._memory()
        self.experts = self._experts()
        if self.experts is not None:
            self.lists = (self.experts.list,)
        self.port = StepPort(self.exchange, self.columns, self.table.attention, launch.kv_scales)
        self.projection = Projection(self.port, self.cache, launch.biases)
        if launch.head_norms is not None:
            self._normalise_heads(launch.head_norms)
        self.attention = Attention(
            *(machine, self.ring, self.exchange, self.schedule, self.cache, self.port, self.timeline, self._variant()),
            parameters=SimpleNamespace(sinks=LayerSinks(self.port, launch.sinks)),
        )

    def _memory(self) -> DeltaMemory | None:
        """What layers of Gated DeltaNet remember, where there are some."""
        heads, launch = self.machine.shape.delta, self.launch
        if heads is None:
            return None
        parameters = [launch.delta_taps, launch.delta_numbers, launch.states, launch.state_slots, launch.delta_records]
        given = DeltaParameters(*(one for one in parameters if one is not None))
        return DeltaMemory(self.columns, heads, given, self.timeline)

    def _experts(self) -> ExpertProducts | None:
        """The products of experts, where layers have some."""
        experts, routing = self.table.experts, self.config.routing
        if experts is None or routing is None:
            return None
        choice = Choice(self.columns, experts, routing.normalised, self.timeline)
        assert self.table.dealt is not None
        beside = self.matrices.named(SHARED_UP) if experts.shared else None
        return ExpertProducts(self.linear, choice, self.matrices[self.table.dealt], routing.biases, beside)

    def _normalise_heads(self, weights: ch.Expr) -> None:
        """Queries and keys are finished by who reads them."""
        what = self.machine, weights, self.config.rms_norm_eps, self.port.angles
        norms = HeadNorms(*what, plus_one=self.config.norms.plus_one)
        if self.shape.joint_norms:
            vector, m_tiles = self.table.attention.input.squares, self.machine.model.rotated_rows // M_TILE_ROWS

            def squares(epoch: ch.Expr, part: range) -> PublishedSquares:
                return PublishedSquares(self.columns, self.exchange.at(vector, epoch), m_tiles, part)

            norms = joint = JointNorms(*what, squares=squares, plus_one=self.config.norms.plus_one)
            self.projection.norms = joint
        self.port.heads = RawHeads(self.port, self.cache, norms)

    def _variant(self) -> Variant:
        """What attention computes in a layer."""
        kind, windows = self.layers.common, self.layers.windows
        variants = [CAUSAL if kind.causal else full()]
        before = [ty.u32(window_keys(window, windows) - 1) for window in windows]
        if windows != (None,):
            variants.append(Variant.windowed(lambda: chosen(before, self.schedule.kind)))
        if kind.soft_cap is not None:
            variants.append(soft_cap(kind.soft_cap))
        if kind.sinks:
            variants.append(learned_sink())
        return replace(combined(*variants), scale=kind.scale)

    # -- setting up and stepping ----------------------------------------------------------------------------------

    @ch.inline
    def set_up(self) -> None:
        HeadParts.set_up(self)
        if isinstance(self.tokens, VerifiedTokens):
            with self.machine.consumer:
                self.tokens.draft_first()

    @ch.inline
    def begin_step(self, step: Any) -> None:
        """The step's KV plan, its columns, the residual of their tokens, the angles of their positions. Published
        before the plan is looked at, embeddings made a kernel spill (8B in int4, 8 tokens: 60 + 212 bytes)."""
        machine = self.machine
        self.phase.step = step
        self.begin_epochs(step)
        if not self.schedule.steps.is_counted:
            with machine.producer:
                self.schedule.advance(machine.producer, step)
        first, multiplier = self.table.first, self.config.embedding_multiplier
        with machine.consumer:
            has_new_plan = self.schedule.advance(machine.consumer, step)
            self.columns.begin_step(step)
            with ch.if_(has_new_plan):
                self.schedule.keep_all()
            machine.meet()
            self.publish_embeddings(first.input, self.norm(self.table.norm_row(first, 0)), multiplier)
            self.load_angles()
            machine.meet()
            self.exchange.meet()

    @ch.function
    def load_angles(self) -> None:
        """cos and sin of every column's position."""
        machine, head_dim = self.machine, self.machine.head_dim
        angles = machine.region("rope", ty.f32)
        with ch.for_(machine.thread, self.launch.column_count * head_dim, machine.consumer_threads, unroll=1) as index:
            position = self.columns.state(index // head_dim, POSITION)
            for table in range(self.shape.rotations):
                first = table * machine.plan.max_context
                angles[index + table * machine.plan.tokens * head_dim] = self.launch.rope[
                    (ty.u64(position) + first) * head_dim + ty.u64(index % head_dim)
                ]

    @ch.inline
    def begin_layer(self, layer: Any) -> None:
        """The products and vectors that follow are this layer's."""
        self.phase.layer = layer
        machine, layers = self.machine, self.layers
        with machine.producer:
            self.linear.begin_layer(layer, self.matrices.layer_stride)
        # As expressions: named, they would take registers from layer to layer (Gemma 3: 16 more bytes spilled).
        self.schedule.kind = by_layer(layers.window_of_layer, layer)
        self.port.query_angles = self.port.key_angles = by_layer(layers.query_rotations, layer)
        if not layers.rotates_alike:
            self.port.key_angles = by_layer(layers.key_rotations, layer)
        self.layer_epoch = self._epoch("layer_epoch", self.step_epoch + (layer + 1))
        if machine.plan.taps:
            finishing = machine.consumer if self.config.norms.after else machine.adder
            self.tap_place = ch.roles_const((finishing,), ty.u32, self._place_of_taps(layer), "tap_place")

    def _place_of_taps(self, layer: Any) -> Any:
        """Of the step's first column, in this layer."""
        tapped = self.machine.plan.tapped_layers
        before = ch.cast(ty.u32, self.phase.step) * (self.machine.plan.tokens * len(tapped))
        return place_of_layer(tapped, self.shape.layers, layer, before)

    def end_layers(self) -> None:
        """What follows belongs to no layer; its input is the last one's output."""
        self.linear.end_layers()
        self.layer_epoch = self.step_epoch + self.shape.layers

    @ch.inline
    def end_step(self, step: Any) -> None:
        """The next tokens are taken; if the launch ends, what was fetched of the next step is used up."""
        with self.machine.consumer:
            self.tokens.end_step(step, self._use_up, self._settling(step))
        with self.machine.adding():
            self.tokens.leave_after(step)

    def _settling(self, step: Any) -> Callable[[], None] | None:
        """What is due behind the launch's last step."""
        memory = self.memory
        return None if memory is None or memory.records is None else lambda: memory.settle(step)

    def _use_up(self) -> None:
        for matrix in self._first_matrices:
            self.linear.skip(matrix)

    @property
    def _first_matrices(self) -> Iterator[MatrixLayout]:
        """Those of the first phase of layer 0, in the order in which they are fetched."""
        lines = self.page.delta if 0 in self.page.delta_layers else self.page.layer
        first = next(line for line in lines if isinstance(line, Multiply))
        if isinstance(first, MultiplyBoth):
            yield self.matrices[first.beside]
        yield self.matrices[first.product]

    @property
    def _first_inputs(self) -> tuple[Vector, ...]:
        """The vectors that are there when a layer begins, or are made before its heads."""
        return self.table.first.input, self.table.heads.input

    # -- phases ---------------------------------------------------------------------------------------------------

    def _is_delta(self, layer: Any) -> Any:
        """Whether a layer is one of Gated DeltaNet."""
        return by_layer([int(number in self.page.delta_layers) for number in range(self.shape.layers)], layer) == 1

    def emit_own(self, step: Any, layer: Any) -> None:
        """The phases that not all layers have."""
        delta, others = (
            [one for one in of if one not in self.page.common] for of in (self.page.delta, self.page.layer)
        )
        if not delta:
            return
        with ch.roles_if(self.machine.roles, self._is_delta(layer)):
            for line in delta:
                self.emit_line(line, step, layer)
        with ch.roles_else(self.machine.roles):
            for line in others:
                self.emit_line(line, step, layer)

    def emit_line(self, line: Line, step: Any, layer: Any) -> None:
        """A phase of a layer."""
        with self.phase(line.text):
            if isinstance(line, NormBehind):
                return self.finish_kept_rows(line, layer)
            if isinstance(line, ChooseExperts):
                return self.choose_experts(line, layer)
            if isinstance(line, Remember):
                return self.remember(line, step, layer)
            if not isinstance(line, Multiply):
                return self.attend(step, layer)
            prologue, epilogue = self.input_of(line.product, layer), self.epilogue_of(line, layer)
            assert (line.waits, line.makes) == (prologue.waits, (*epilogue.makes, *prologue.makes)), line
            if isinstance(line, MultiplyBoth):
                self._multiply_beside(line, layer)
            self._multiply(line)(self.matrices[line.product], prologue, epilogue)

    def _multiply(self, line: Multiply) -> Callable[[MatrixLayout, Prologue, Epilogue], None]:
        """How a line's product is multiplied."""
        product = line.product
        if self.experts is not None and isinstance(line, MultiplyBeside):
            return self.experts.beside
        if (parts := k_parts(product, self.matrices[product], self.machine.plan, self.machine.gpu)) > 1:
            return partial(self._multiply_parts, parts_vector(product), parts)
        if self.experts is None or not (product.experts or isinstance(line.then, Routes)):
            return self.linear
        if isinstance(line.then, Routes):
            return self.experts.route
        return self.experts.add if product.adds else self.experts.deal

    def _multiply_beside(self, line: MultiplyBoth, layer: Any) -> None:
        """The other product of a line: its rows lie behind those of the line's own."""
        product, into = line.beside, line.beside.output
        assert into is not None
        prologue = self._input(product.input, self.layer_epoch - 1, self.places(product, layer))
        self.linear(
            *(self.matrices[product], prologue),
            PublishedPairs(self.vector(into), self._own_delta.mixed_rows, self._own_delta.b_row),
        )

    @property
    def _own_delta(self) -> DeltaHeads:
        """The rank's heads of Gated DeltaNet."""
        heads = self.machine.shape.delta
        assert heads is not None
        return heads

    def _multiply_parts(
        self, vector: str, parts: int, matrix: MatrixLayout, prologue: Prologue, epilogue: Epilogue
    ) -> None:
        """By several blocks an M-tile."""
        share, published = PartsShare(self.machine, matrix, parts), self.exchange.at(vector, self.layer_epoch)
        self.linear.of_share(share, prologue, AddedParts(share, published, epilogue))

    def choose_experts(self, line: ChooseExperts, layer: Any) -> None:
        """Every block's choice, of the logits that all have made."""
        assert self.experts is not None
        with self.machine.consumer:
            if self.launch.router_rows is not None:
                for row in self._router_rows((layer + 1) % self.shape.layers):
                    prefetch_row(self.machine, row, router_row_elements(self.shape) * 2)
            self.experts.choice.make(self.vector(line.phase.input))
            self.timeline.stamp_here("done")

    def attend(self, step: Any, layer: Any) -> None:
        """The block's items of the KV plan, then its merges of heads that were split."""
        machine, attention = self.machine, self.attention
        number = self._number(layer, is_delta=False)
        with machine.producer:
            if 0 not in self.page.delta_layers:
                self._leave_after_last(step, layer)
            if self.schedule.steps.is_counted:  # which is known behind that
                with ch.if_(number == 0):
                    self.schedule.advance(machine.producer, step)
            attention.copy(number, step)
        with machine.consumer:
            self.port.layer = number
            attention.attend(step, self.layer_epoch)
            self.timeline.stamp_here("attended")
            ch.comment("merge of partial states")
            attention.merge(self.layer_epoch)
            self.timeline.stamp_here("done")

    def _leave_after_last(self, step: Any, layer: Any) -> None:
        """In the producer role: nothing is fetched that a step writes before it is known whether another follows."""
        with ch.if_((layer == 0) & (step > 0)), ch.if_(self.tokens.launch_is_over(step)):
            ch.return_()

    def remember(self, line: Remember, step: Any, layer: Any) -> None:
        """The block's shares of what sequences remember."""
        assert self.memory is not None
        with self.machine.producer:
            if 0 in self.page.delta_layers:
                self._leave_after_last(step, layer)
        with self.machine.consumer:
            vectors = [line.phase.input.name, line.phase.output.name, line.phase.squares]
            published = [self.exchange.at(name, self.layer_epoch) for name in vectors]
            with self.machine.placed_anew(always=self.machine.plan.tokens == 1):
                self.memory.remember(step, self._number(layer, is_delta=True), *published)
            self.timeline.stamp_here("done")

    def _number(self, layer: Any, is_delta: bool) -> Any:
        """The number of a layer among those of Gated DeltaNet, or among the others."""
        deltas, count = self.page.delta_layers, self.page.names.layers
        if not deltas:
            return layer
        return number_among([(number in deltas) == is_delta for number in range(count)], layer)

    # -- vectors, prologues and epilogues -------------------------------------------------------------------------

    def vector(self, vector: Vector | None) -> Published:
        """A vector of the present layer."""
        assert vector is not None
        return self.exchange.at(vector.name, self.layer_epoch)

    def input_of(self, product: Product, layer: Any) -> Prologue:
        """What brings the input of a product of a layer; meanwhile it has what is needed behind it brought into L2."""
        places, is_first = self.places(product, layer), product.input in self._first_inputs
        if is_first:
            prologue = self._input(product.input, self.layer_epoch - 1, places)
        else:
            prologue = self.made_before(product, places, layer)
        if self.launch.router_rows is not None and product.experts is None:
            prologue = self._routing(product, prologue, layer)
        needed = self._needed_by_heads(layer) if product is self.table.heads else []
        if product.adds:
            norms = [self.norm(self.table.norm_behind(product, layer))]
            if self.table.norm_phase(product) is not None:
                norms.append(self._norm_behind(product, layer))
            needed += [(norm.weights, self.machine.hidden * 2) for norm in norms]
        if product.name == IN_PROJ:
            return self._before_memory(prologue, layer)
        return Prefetching(prologue, self.machine, needed) if needed else prologue

    def _routing(self, product: Product, prologue: Prologue, layer: Any) -> Prologue:
        """The input of q, k and v or of o, beside which the block's rows of a fused router are multiplied."""
        experts, ends = self.table.experts, product.adds
        assert isinstance(prologue, Slices) and experts is not None
        rows = self._router_rows(layer)
        if ends:
            rows = [row + self.table.heads.input.padded for row in rows]
        prologue = replace(prologue, beside=RowsBeside(self.machine, tuple(rows), ends))
        if not ends:
            return prologue
        position = ch.const(ty.u32, self.residual.position(self.machine.block), name="row_position")
        into = self.exchange.at(ROUTES, self.layer_epoch)
        return Routing(prologue, self.machine, into, experts, position, len(self.residual.owners))

    def _router_rows(self, layer: Any) -> list[ch.Expr]:
        """Where the block's rows of a layer's fused router begin."""
        experts, o = self.table.experts, self.residual
        assert experts is not None and self.launch.router_rows is not None
        size, position = ch.named("ROUTER_ROW", router_row_elements(self.shape)), o.position(self.machine.block)
        numbers = (ch.minimum(position + first, experts.count - 1) for first in range(0, experts.count, len(o.owners)))
        return [self.launch.router_rows + (layer * experts.count + number) * size for number in numbers]

    def _before_memory(self, prologue: Prologue, layer: Any) -> Prologue:
        """What a layer of Gated DeltaNet needs beside its matrices."""
        memory, number = self.memory, self._number(layer, is_delta=True)
        assert memory is not None
        heads, parameters = memory.heads, memory.parameters
        needed = [
            (parameters.taps + number * (heads.channels * TAPS), heads.channels * TAPS * 2),
            (parameters.numbers + number * heads.numbers, heads.numbers * 4),
        ]
        return Prefetching(prologue, self.machine, needed, lambda: memory.prefetch(number))

    def made_before(self, product: Product, places: Any, layer: Any) -> Prologue:
        """What a phase of the same layer made, slice by slice. Where waiting is most of a step all lanes poll the
        output of attention, since they come to it long before (qwen3-0.6b: 1.8 %); 1B loses 6 % so."""
        vector = product.input
        if vector.is_normed:
            return self._input(vector, self.layer_epoch, places)
        if vector.parts > 1:
            assert self.experts is not None
            parts = self.experts.choice, self.vector(vector), vector.elements
            in_parts = self.machine.plan.down_slices
            return AllParts(*parts) if in_parts == 1 else PartsInTurn(*parts, product.in_turn(in_parts)[0])
        polled_by_all = self.table.is_attended(vector) and self.machine.plan.waits_most
        published = replace(self.vector(vector), one_waits=not polled_by_all)
        phase = self.table.delta_phase
        if phase is None or vector != phase.output:
            return Slices(self.columns, published, vector.published, places)
        squares = self.exchange.at(phase.squares, self.layer_epoch)
        norm = phase.heads, self.config.rms_norm_eps, self._is_delta(layer)
        source = NormedHeads(self.columns, published, squares, *norm)
        return Slices(self.columns, source, vector.published, places)

    def epilogue_of(self, line: Multiply, layer: Any) -> PublishedRows:
        """What becomes of the rows of a line's product."""
        product = line.product
        if isinstance(line.then, Heads):
            return ProjectedHeads(self.projection, layer, self.layer_epoch)
        if isinstance(line.then, Mixed):
            assert product.output is not None
            return PublishedPairs(self.vector(product.output), self._own_delta.mixed_rows)
        if isinstance(line.then, Kept):
            assert product.output is not None
            return KeepRows(self.machine, self.squares_of(product.output, self.layer_epoch))
        if isinstance(line.then, OntoResidual):
            norm, biases = self.norm(self.table.norm_behind(product, layer)), self.biases_of(product, layer)
            multiplier, tap = line.then.multiplier, self.tap_of(product)
            return self.onto_residual(product.output, norm, self.layer_epoch, multiplier, biases=biases, tap=tap)
        if isinstance(line.then, Routes):
            assert self.table.experts is not None
            return PublishedLogits(self.vector(product.output), self.table.experts, self.biases_of(product, layer))
        if isinstance(line.then, Weighed):
            assert self.experts is not None
            return SharedRows(self.machine, self.experts.choice)
        assert isinstance(line.then, Gated), line
        gated = self.machine, self.vector(product.output), line.then.activation
        if product.experts is None:
            return GatedRows(*gated)
        assert self.experts is not None
        biases = biases_of_layer(self.launch, product, layer)
        return ChosenRows(*gated, self.experts.choice, self.matrices[product], biases)

    def biases_of(self, product: Product, layer: Any) -> Biases | None:
        """What is added to the rows of a product, if it has biases."""
        biases = biases_of_layer(self.launch, product, layer)
        if biases is None or product.experts is None:
            return None if biases is None else RowBiases(biases)
        assert self.experts is not None
        return WeighedBiases(self.experts.choice, biases, bias_rows(product))

    def tap_of(self, product: Product) -> Tap | None:
        """Where the residual behind a product is kept: what the layer leaves, if it is tapped."""
        tapped = self.machine.plan.tapped_layers
        if not tapped or product is not self.table.onto_residual[-1]:
            return None
        return Tap(in_all_memories(self.launch, "taps"), len(tapped), self.machine.hidden, self.tap_place)

    def finish_kept_rows(self, line: NormBehind, layer: Any) -> None:
        """The norm behind a product: its rows added to the residual."""
        product = line.product
        scale = self.inverse_rms(line.phase.input, self.layer_epoch)
        norm = self.norm(self.table.norm_behind(product, layer))
        multiplier, tap = line.then.multiplier, self.tap_of(product)
        onto = self.onto_residual(line.phase.output, norm, self.layer_epoch, multiplier, tap=tap)
        with self.machine.consumer:
            finish_kept_rows(self.linear.adding, self.residual, scale, self._norm_behind(product, layer), onto)
            self.timeline.stamp_here("done")

    def _norm_behind(self, product: Product, layer: Any) -> NormWeights:
        """The weights of the norm that a product's rows go through."""
        number = self.table.onto_residual.index(product)
        return self._norm_weights(self.launch.norms_behind, layer * len(self.table.onto_residual) + number)

    def _input(self, vector: Vector, epoch: ch.Expr, places: ch.Expr | None) -> Prologue:
        """What a sublayer takes of the residual."""
        return self.normalised(vector, epoch, places, self.config.norms.before)

    @property
    def _head_norm_row(self) -> int:
        """Weights of the norms of a layer's queries and keys."""
        if self.shape.joint_norms:
            return ch.named("ROTATED_ROWS", self.machine.model.rotated_rows)
        weights: int = 2 * self.machine.head_dim
        return weights

    def _needed_by_heads(self, layer: Any) -> list[tuple[ch.Expr, int]]:
        """(address, bytes) of what the layer's projection and attention need beside its matrices."""
        vectors = {self.launch.biases: self.machine.projected_rows, self.launch.head_norms: self._head_norm_row}
        layer = self._number(layer, is_delta=False)
        found = [(vector + layer * size, size * 2) for vector, size in vectors.items() if vector is not None]
        if self.launch.places is not None:  # of the products behind, and of the next layer's first or the head
            behind = self.table.places_row(self.table.placed[0], layer) + 1
            row = self._places_row
            found.append((self.launch.places + behind * row, len(self.table.placed) * row * 2))
        return found
