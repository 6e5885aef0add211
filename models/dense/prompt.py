"""A pass over a prompt as one kernel: its tokens' keys and values into the cache, with the weights packed for decoding.

One persistent launch reads the weights once for all tokens of a pass. It ends with the keys and values of the last
layer, or, where hidden states are wanted, with those of the columns that are named: rows for a head (`head`). Numerics
as in the decode step: bf16 weights and activations, f32 accumulation, softmax and residual.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.by_layer import by_layer
from cheetah.blocks.linear.taps import NO_TAP, Tap, place_of_layer
from cheetah.blocks.prompt.barrier import PassBarrier
from cheetah.blocks.prompt.cases import Case, Finish, Given
from cheetah.blocks.prompt.delta import HeadNorms, StoreMixed
from cheetah.blocks.prompt.delta_mixing import Mixing
from cheetah.blocks.prompt.delta_scan import Scan
from cheetah.blocks.prompt.finish import StoreGated
from cheetah.blocks.prompt.keys import StoreHeads, bring_earlier_keys
from cheetah.blocks.prompt.machine import GROUP_BYTES, emit_pass, start_pass
from cheetah.blocks.prompt.parts import AddParts, AddWeighed, StoreParts
from cheetah.blocks.prompt.product import TileProduct
from cheetah.blocks.prompt.pushes import UNIT, Pushed, Pushes
from cheetah.lang import prim, ty
from cheetah.models.config import ModelConfig
from cheetah.models.dense.launch import biases_of_layer, in_all_memories
from cheetah.models.dense.page import (
    ChooseExperts,
    Gated,
    Heads,
    Kept,
    Line,
    Mixed,
    Multiply,
    NormBehind,
    OntoResidual,
    Remember,
    Routes,
    Weighed,
)
from cheetah.models.dense.pass_exchanged import vectors_of_passes
from cheetah.models.dense.pass_experts import PassExperts
from cheetah.models.dense.pass_launch import PassLaunch
from cheetah.models.dense.pass_launch import pass_parameters as pass_parameters
from cheetah.models.dense.pass_parts import PassParts
from cheetah.models.dense.pass_sizes import MIXED, PassPhase, PassSizes, input_section, section_of
from cheetah.models.dense.program import sizes as sizes_of_step
from cheetah.models.exchanged import ExchangedVector
from cheetah.models.family import PhaseRow
from cheetah.plan import Gpu, Plan, SharedMap
from cheetah.plan.formats import M_TILE_ROWS, VECTOR_COLUMNS
from cheetah.plan.pass_tables import SEGMENT_COLUMNS
from cheetah.plan.products import ROUTER, Product
from cheetah.plan.prompt import PassPlan

KERNEL_NAME = "prompt_pass"


def sizes(config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> dict[str, int]:
    """The sizes that the shapes of the kernel's parameters name."""
    return {
        **sizes_of_step(config, gpu, plan),
        "tokens": pass_plan.tokens,
        "hidden_rows": pass_plan.tokens,
        "tap_rows": pass_plan.tokens,
        "token_groups": pass_plan.groups,
        "token_segments": pass_plan.tokens // SEGMENT_COLUMNS,
        "workspace_bytes": PassSizes(config, gpu, plan, pass_plan).sections.total,
        "phases": PassSizes(config, gpu, plan, pass_plan).phase_count,
    }


def shared(config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> SharedMap:
    """The arena of a block."""
    return PassSizes(config, gpu, plan, pass_plan).shared


def phase_names(config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> tuple[str, ...]:
    """The phases of a launch."""
    return PassSizes(config, gpu, plan, pass_plan).phase_names


def rows_of_keys(config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> list[slice]:
    """The bytes of the workspace that hold keys, and those that hold values."""
    sections = PassSizes(config, gpu, plan, pass_plan).sections
    begins = [(sections.offsets[name], sections.sizes[name]) for name in ("keys", "values")]
    return [slice(begin, begin + size) for begin, size in begins]


def exchanged_vectors(config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> tuple[ExchangedVector, ...]:
    """Where the vectors that phases hand on lie in the workspace."""
    return vectors_of_passes(PassSizes(config, gpu, plan, pass_plan))


def cuts(config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> dict[str, tuple[int | None, int]]:
    """How each product of a layer is cut, by its name: M-tiles of its tiles, None where they are as many as there is
    room for, and parts of k."""
    sizes = PassSizes(config, gpu, plan, pass_plan)
    of_layer = {layout.name for layout in sizes.matrices.of_layer}
    products = [product for product in sizes.table.products if product.name in of_layer]
    return {product.name: (sizes.height(product), sizes.parts(product)) for product in products}


def phase_rows(config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> tuple[PhaseRow, ...]:
    """The same, as people read them: `waits` and `makes` are sections of the workspace."""
    return PassSizes(config, gpu, plan, pass_plan).rows


def build_kernel(config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan, traced: bool = False) -> ch.Kernel:
    """The kernel of passes beside the decode kernel of `plan`. PlanError where there can be none, with the reason.
    traced: with time stamps of every block and phase."""
    sizes = PassSizes(config, gpu, plan, pass_plan)
    types = {name: parameter.type for name, parameter in pass_parameters(config, plan, traced, gpu.ranks).items()}

    @ch.kernel(ch.Params(**types), name=KERNEL_NAME, max_threads=pass_plan.threads)
    def prompt_pass(**arguments: Any) -> None:
        launch = PassLaunch.of(arguments)
        Pass(sizes, start_pass(pass_plan, gpu, sizes.shared, launch.rank), launch).emit()

    return prompt_pass


class Pass(PassParts):
    """The program of a launch: the embedding, then layers of phases."""

    @ch.inline
    def emit(self) -> None:
        """Set up, then the phases."""
        machine = self.machine
        with ch.if_(machine.thread == 0):
            self.ring.initialise()
            if self.tiles is not None:
                self.tiles.initialise()
            prim.mbarrier_fence_init()
        prim.block_barrier()  # orders the barriers' initialisation before their first use by any role
        self.ring.start()
        self.barrier = PassBarrier(machine, self.sections("counter", ty.u64), self.launch.arrivals)
        self.load_scales()
        self.experts = None if self.tiles is None else PassExperts(self, self.tiles)
        with machine.consumer:
            ch.comment("embedding")
            self.timeline.stamp(ty.u32(0), "begin")
            self.embed()
            self.timeline.stamp(ty.u32(0), "done")
            self.barrier.end_phase()
        self._end_pushes(1)
        with ch.roles_for(machine.roles, self.shape.layers, name="layer") as layer:
            self._emit_layer(layer)
        with machine.consumer, ch.if_(self.launch.wanted_count != 0):
            self._emit_hidden_states()
        if machine.has_pushes:
            with machine.pushes, ch.if_(self.launch.wanted_count != 0):
                self.barrier.end_pushes()
        emit_pass(machine)

    def _emit_layer(self, layer: Any) -> None:
        page, roles = self.sizes.page, (self.machine.weights, self.machine.activations)
        own = [self.sizes.own_lines(of_delta) for of_delta in (True, False)]
        if page.delta:
            with ch.roles_if(roles, self.is_delta(layer)):
                for line in own[0]:
                    self._emit_copies(line, layer)
            with ch.roles_else(roles):
                for line in own[1]:
                    self._emit_copies(line, layer)
        for line in page.common:
            self._emit_copies(line, layer)
            self._emit_pushes(line, layer)
        with self.machine.consumer:
            self._emit_phases(layer)

    def _emit_copies(self, line: Line, layer: Any) -> None:
        """What the copying roles bring for a line of the page. Activations wait for the phase before, weights for
        nobody."""
        if isinstance(line, NormBehind):
            with self.machine.activations:
                self.barrier.skip_phase()
            return
        if isinstance(line, ChooseExperts):
            with self.machine.activations:
                for _ in self.sizes.phases_of(line):
                    self.barrier.skip_phase()
            return
        if isinstance(line, Remember):
            return self._emit_copies_of_tokens(layer)
        if not isinstance(line, Multiply):
            return self._emit_copies_of_keys(layer)
        machine, matrix = self.machine, self.matrices[line.product]
        first, *sums = self.sizes.phases_of(line)
        given = self._given(first, line.product, layer)
        with machine.weights:
            machine.renew()
            with self._following(line.product, machine.weights):
                self.product.copies.bring_weights(matrix, given)
        with machine.activations:
            machine.renew()
            self.barrier.begin_copies()
            with self._following(line.product, machine.activations):
                self.product.copies.bring_activations(matrix, given)
            for _ in sums:
                self.barrier.skip_phase()

    def _emit_pushes(self, line: Line, layer: Any) -> None:
        """What other GPUs get of a line of the page by the warps that push."""
        if not self.machine.has_pushes:
            return
        with self.machine.pushes:
            if not isinstance(line, Multiply | NormBehind | ChooseExperts):  # attention
                with ch.if_(self._ends_with_keys(layer)):
                    ch.break_()
            self.machine.renew()
            pushed = self._pushed(line)
            if pushed is not None and isinstance(line, Multiply) and self._is_pushed(type(line.then), self.product):
                Pushes(self.machine, self.product.token_tiles).push(pushed)
        self._end_pushes(len(self.sizes.phases_of(line)))

    def _end_pushes(self, phases: int) -> None:
        if self.machine.has_pushes:
            with self.machine.pushes:
                for _ in range(phases):
                    self.barrier.end_pushes()

    def _pushed(self, line: Line) -> Pushed | None:
        """Of a product whose tiles are columns side by side for the next one: whole K-tiles of them."""
        if not (self.machine.has_pushes and isinstance(line, Multiply) and self.launch.places is None):
            return None
        product, kind = line.product, type(line.then)
        is_whole = product.experts is None and len(self.sizes.phases_of(line)) == 1
        if kind not in (Gated, OntoResidual) or product.output is None or not is_whole:
            return None
        of_pairs = kind is Gated and self._activation != "relu2"
        of_k_tile = VECTOR_COLUMNS // (M_TILE_ROWS // 2 if of_pairs else M_TILE_ROWS)
        m_tiles = self.matrices[product].full_m_tiles
        if m_tiles % of_k_tile or self.machine.plan.tile_m_tiles % of_k_tile:
            return None
        groups = self.product.groups_at_once(kind is OntoResidual)
        if groups * GROUP_BYTES % (self.machine.pushing_threads * UNIT):
            return None
        return Pushed(self.sections(section_of(product.output)), m_tiles, of_k_tile, groups)

    def _is_pushed(self, kind: type, product: TileProduct) -> bool:
        """Whether all that becomes `kind` in the tiles of `product` is pushed."""
        lines = [line for line in self.sizes.page.layer if isinstance(line, Multiply) and type(line.then) is kind]
        return product is self.product and {self._pushed(line) is not None for line in lines} == {True}

    def _following(self, product: Product, role: ch.Role) -> AbstractContextManager[None]:
        return nullcontext() if self.experts is None else self.experts.following(product, role)

    def _emit_copies_of_keys(self, layer: Any) -> None:
        machine, attention = self.machine, self.attention(layer)
        for role in (machine.weights, machine.activations):
            with role, ch.if_(self._ends_with_keys(layer)):
                ch.break_()
        with machine.weights:
            attention.copy_nothing()
        with machine.activations:
            self.barrier.begin_copies()
            attention.copy_keys()

    def _emit_copies_of_tokens(self, layer: Any) -> None:
        """For the scan of Gated DeltaNet, behind what mixes and before norms."""
        machine, scan = self.machine, self.memory(Scan, layer)
        with machine.weights:
            machine.renew()
            scan.copy_nothing()
        with machine.activations:
            machine.renew()
            self.barrier.skip_phase()
            self.barrier.begin_copies()
            scan.copy_tokens()
        for role in (machine.weights, machine.activations):
            with role, ch.if_(self._ends_with_keys(layer)):
                ch.break_()
        with machine.activations:
            self.barrier.skip_phase()

    def _ends_with_keys(self, layer: Any) -> Any:
        """Whether keys and values are all that is wanted of a layer: of the last one, unless hidden states are."""
        return (layer + 1 == self.shape.layers) & (self.launch.wanted_count == 0)

    @ch.inline
    def _emit_hidden_states(self) -> None:
        """In the consumer role: the last phase."""
        index = ty.u32(self.sizes.phase_count - 1)
        self.machine.renew()
        self.timeline.stamp(index, "begin")
        self.barrier.begin_phase()
        self.timeline.stamp(index, "ready")
        self.store_hidden_states()
        self.timeline.stamp(index, "done")
        self.barrier.end_phase()

    @ch.inline
    def _emit_phases(self, layer: Any) -> None:
        """In the consumer role: a loop, so that all products share their code."""
        machine, sizes = self.machine, self.sizes
        count, of_keys = len(sizes.phases), sizes.key_phase_count
        of_layer, has_delta = ty.u32(count), bool(sizes.page.delta)
        own, of_delta = (len(sizes.own_phases(kind)) for kind in (False, True))
        if has_delta:
            is_delta = ch.const(ty.boolean, self.is_delta(layer), name="is_delta")
            of_layer = ch.select(is_delta, ty.u32(count - own), ty.u32(count - of_delta))
        phases = ch.select(self._ends_with_keys(layer), ty.u32(of_keys), of_layer)
        for number, one in enumerate(sizes.phases):
            ch.comment(f"phase {number}, {one.name}: reads {', '.join(one.waits)}; makes {', '.join(one.makes)}")
        with ch.for_(phases, unroll=1, name="in_layer" if has_delta else "phase") as phase:
            machine.renew()
            number = layer * count + phase + 1
            if has_delta:
                of_others = self.number(layer, of_delta=True) * own + self.number(layer, of_delta=False) * of_delta
                number = layer * count - of_others + phase + 1
                before = ch.select(is_delta, ty.u32(own), ch.select(phase < own, ty.u32(0), ty.u32(of_delta)))
                phase = ch.const(ty.u32, phase + before, name="phase")
            self.timeline.stamp(number, "begin")
            self.barrier.begin_phase()
            self.timeline.stamp(number, "ready")
            with ch.if_(phase == sizes.index_of(None)):
                self.attention(layer).attend()
            with ch.else_(), self._but_memory(layer, phase):
                if self.experts is not None:
                    self.experts.emit_choice(phase)
                with nullcontext() if self.experts is None else ch.else_():
                    with ch.if_(phase == 0):
                        cached = self.number(layer, of_delta=False)
                        heads, window = self.heads(machine, cached), self.window(layer)
                        bring_earlier_keys(heads, self.tokens, self.cache, cached, sizes.key_tile, window)
                    self._emit_products(layer, phase)
            self.timeline.stamp(number, "done")
            self.barrier.end_phase()

    @contextmanager
    def _but_memory(self, layer: Any, phase: Any) -> Iterator[None]:
        """What is emitted within is of other phases than those of Gated DeltaNet behind its product."""
        if not self.sizes.page.delta:
            yield
            return
        scan, mixing, norms = self.memory(Scan, layer), self.memory(Mixing, layer), self.memory(HeadNorms, layer)
        what = {"is_mixing": mixing.mix, "is_norm": norms.normalise}
        with ExitStack() as stack:
            for index, one in enumerate(self.sizes.phases):
                if isinstance(one.line, Remember):
                    do = next((what[name] for name in what if getattr(one, name)), scan.scan)
                    with ch.if_(phase == index):
                        do()
                    stack.enter_context(ch.else_())
            yield

    @property
    def _activation(self) -> Any:
        """Of the gate: see `LayerKind`."""
        lines = (line.then for line in self.sizes.page.layer if isinstance(line, Multiply))
        return next(then.activation for then in lines if isinstance(then, Gated))

    @ch.inline
    def _emit_products(self, layer: Any, phase: Any) -> None:
        """A product, or the sum of one's parts."""
        adds = [index for index, one in enumerate(self.sizes.phases) if one.adds]
        if not adds:
            return self.product.multiply(self._cases(layer, phase), phase)
        is_sum = phase == adds[0]
        for index in adds[1:]:
            is_sum = is_sum | (phase == index)
        with ch.if_(is_sum):
            parts, residual = self.section("parts", ty.f32), self.section("residual", ty.f32)
            AddParts(self.of_few, parts, residual).finish(self._cases(layer, phase, adds=True), phase)
        with ch.else_():
            self.product.multiply(self._cases(layer, phase), phase)

    def _cases(self, layer: Any, phase: Any, adds: bool = False) -> list[Case]:
        """Of the phases that multiply, or of those that add parts."""
        product = self.of_few if adds else self.product
        finishes = self._finishes(layer, phase, product)
        by_expert = None if self.experts is None else self.experts.store_by_expert()
        parts = self.section("parts", ty.f32)
        to_be_added, cases = StoreParts(self.machine, parts), []
        for index, one in enumerate(self.sizes.phases):
            if isinstance(line := one.line, Multiply | NormBehind) and one.adds == adds:
                kind = NormBehind if isinstance(line, NormBehind) else type(line.then)
                if kind is Gated:
                    finishes[Gated] = self._gated(line.product, layer, product)
                finish = finishes[kind] if kind is Kept or not one.is_stored else to_be_added
                if one.is_stored and line.product.experts is not None and by_expert is not None:
                    finish = by_expert
                if one.is_stored and one.is_joint and kind is Heads:
                    finish = self.store_squares(line.product, parts, finishes[Heads])
                given = self._given(one, line.product, layer)
                cases.append(Case(self.matrices[line.product], given, finish, index))
        return cases

    def _finishes(self, layer: Any, phase: Any, product: TileProduct) -> dict[type, Finish]:
        """What becomes of the sums of a line's product, in the tiles of `product`."""
        machine, scales, table = product.machine, self.scales[product], self.table
        layers = self.sizes.layers
        query_angles, number = by_layer(layers.query_rotations, layer), self.number(layer, of_delta=False)
        heads = StoreHeads(
            *(self.heads(machine, number), self.tokens, self.cache, scales),
            *(self.launch.rope, ch.named("MAX_CONTEXT", self.sizes.plan.max_context), number),
            query_angles=query_angles,
            key_angles=query_angles if layers.rotates_alike else by_layer(layers.key_rotations, layer),
            biases=self.launch.biases,
            norms=self.head_norms(machine),
            gates=self.section(table.attention.output.name) if self.shape.gated_heads else None,
        )
        # After o comes the layer's second norm, after down the next layer's first.
        o, *_, down = table.onto_residual
        behind_o = phase <= self.sizes.index_of(table.reader_of(table.norm_phase(o) or o))
        behind = ch.select(behind_o, *(ty.u32(table.norm_behind(one, 0)) for one in (o, down)))
        onto_residual = self.onto_residual(machine, layer * len(table.norms) + behind)
        if self._is_pushed(OntoResidual, product):
            onto_residual = replace(onto_residual, into=onto_residual.into[:1], is_pushed=True)
        if tapped := self.sizes.plan.tapped_layers:
            of_layer = place_of_layer(tapped, self.shape.layers, layer, ty.u32(0))
            place = ch.select(behind_o, ty.u32(NO_TAP), of_layer)
            memories = in_all_memories(self.launch, "taps")
            onto_residual = replace(onto_residual, tap=Tap(memories, len(tapped), self.hidden, place))
        if (biases := biases_of_layer(self.launch, o, layer)) is not None:
            onto_residual = replace(onto_residual, biases=biases, has_biases=behind_o)
        finishes: dict[type, Finish] = {Heads: heads, OntoResidual: onto_residual}
        if self.shape.delta is not None:
            width, into = ch.named("MIXED_ROWS", self.shape.delta.mixed_rows), self.section(MIXED[0], ty.u32)
            if table.beside is not None:
                numbers = phase >= self.sizes.index_of(table.beside)  # and before what is no product of such rows
                into = into + ch.select(numbers, ty.u32(self.shape.delta.b_row // 2), ty.u32(0))
            finishes[Mixed] = StoreMixed(machine, into, width, scales)
        if self.experts is not None:
            finishes[Routes] = self.experts.store_logits(machine, table.named(ROUTER), layer, scales)
        if self.token_weights is not None:
            finishes[Weighed] = AddWeighed(machine, self.section("residual", ty.f32), self.token_weights)
        if self.row_scales:
            number = layer * len(table.onto_residual) + ch.select(behind_o, ty.u32(0), ty.u32(1))
            finishes |= self.norms_behind(onto_residual, product, number)
        return finishes

    def _gated(self, pairs: Product, layer: Any, product: TileProduct) -> Finish:
        """What becomes of the rows of gate and up."""
        if self.experts is not None and pairs.experts is not None:
            return self.experts.store_weighed(pairs, layer, self._activation)
        assert pairs.output is not None
        is_pushed, m_tiles = self._is_pushed(Gated, product), self.matrices[pairs].full_m_tiles
        into, scales = self._into(section_of(pairs.output), is_pushed), self.scales[product]
        return StoreGated(product.machine, into, m_tiles, scales, activation=self._activation, is_pushed=is_pushed)

    def _into(self, section: str, is_pushed: bool) -> list[Any]:
        """Where what is made for others is stored by who makes it."""
        return self.sections(section)[: 1 if is_pushed else None]

    def _given(self, phase: PassPhase, product: Product, layer: Any) -> Given:
        """Where the operands of a phase lie."""
        adds = product.adds and not phase.is_joint and not phase.is_stored
        residual = self.section("residual", ty.f32) if adds else None
        parts, height, offset = self.sizes.parts(product), self.sizes.height(product), self.offset(product, layer)
        given = Given(self.launch.weights, offset, self.section(input_section(product)), residual, parts, height)
        if self.experts is None or product.experts is None:
            return given
        return self.experts.given(phase, product, layer, given)
