"""A pass over a prompt as one kernel: its tokens' keys and values into the cache, with the weights packed for decoding.

One persistent launch reads the weights once for all tokens of a pass. It ends with the keys and values of the last
layer, or, where hidden states are wanted, with those of the columns that are named: rows for a head (`head`). Numerics
as in the decode step: bf16 weights and activations, f32 accumulation, softmax and residual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.cache import KvCache
from cheetah.blocks.by_layer import by_layer
from cheetah.blocks.experts.choice import WarpChoice
from cheetah.blocks.prompt.attention import PassAttention
from cheetah.blocks.prompt.barrier import PassBarrier
from cheetah.blocks.prompt.choice import Choices, PassChoice
from cheetah.blocks.prompt.expert_tiles import ExpertTiles
from cheetah.blocks.prompt.finish import (
    HALF,
    AddKept,
    Scales,
    SlotFactors,
    StoreByToken,
    StoreGated,
    StoreKept,
    StoreResidual,
    StoreWeighed,
    Unscaled,
    store_at,
)
from cheetah.blocks.prompt.joint_norms import JointHeadNorms, StoreSquares
from cheetah.blocks.prompt.keys import PassHeadNorms, PassHeads, PassTokens, StoreHeads, bring_earlier_keys
from cheetah.blocks.prompt.machine import PassMachine, emit_pass, start_pass
from cheetah.blocks.prompt.parts import AddParts, StoreParts
from cheetah.blocks.prompt.product import ACCUMULATORS, Case, Finish, Given, Ranked, Sums, TileProduct
from cheetah.blocks.prompt.ring import TileRing
from cheetah.blocks.prompt.sorting import PassSort
from cheetah.blocks.timeline import EVENTS, Timeline
from cheetah.lang import Expr, prim, ty
from cheetah.models.act_order import places_shape
from cheetah.models.attention_layers import EVERY_KEY
from cheetah.models.config import ModelConfig
from cheetah.models.dense.launch import (
    BIASES,
    DOWN_BIASES,
    GATE_UP_BIASES,
    HEAD_NORMS,
    KV_SCALES,
    NORMS_BEHIND,
    O_BIASES,
    PLACES,
    RANK_NUMBER,
    ROUTER_BIASES,
    SINKS,
    ModelLaunch,
    buffer_field,
    hidden_states_parameter,
    number_field,
    optional_field,
    parameter_field,
    parameters_of,
    peers_field,
)
from cheetah.models.dense.page import (
    ChooseExperts,
    Gated,
    Heads,
    Kept,
    Line,
    Multiply,
    NormBehind,
    OntoResidual,
    Routes,
)
from cheetah.models.dense.pass_sizes import (
    CHOICES,
    EXPERT_ROWS,
    HEAD_SECTIONS,
    HIDDEN,
    JOINT,
    KEPT,
    PARTS,
    RESIDUAL_SECTIONS,
    SLOTS,
    SORTED,
    PassPhase,
    PassSizes,
    input_section,
)
from cheetah.models.dense.program import sizes as sizes_of_step
from cheetah.models.family import PhaseRow
from cheetah.package import KernelParameter
from cheetah.plan import Gpu, Plan, SharedMap
from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.pass_tables import SEGMENT_COLUMNS, TABLE_WORDS
from cheetah.plan.products import ROUTER, Product, logit_words
from cheetah.plan.prompt import GROUP_TOKENS, PassPlan

KERNEL_NAME = "prompt_pass"


@dataclass(frozen=True, eq=False)
class PassLaunch(ModelLaunch):
    """The kernel's parameters, in order. All but the workspace and the ids are those of the decode step."""

    ids: Expr = buffer_field(ty.ptr(ty.i32), "token ids of the pass: see cheetah.plan.pass_tables", "tokens")
    groups: Expr = buffer_field(ty.ptr(ty.i32), "of 8 columns each, also there", "token_groups", TABLE_WORDS)
    segments: Expr = buffer_field(ty.ptr(ty.i32), "parts of sequences, also there", "token_segments", TABLE_WORDS)
    tiles: Expr = buffer_field(
        ty.ptr(ty.i32), "what attention reads together, also there", "token_segments", TABLE_WORDS
    )
    workspace: Expr = buffer_field(
        ty.ptr_mut(ty.u8), "what phases hand on; zeroed once", "workspace_bytes", fill="zero"
    )
    wanted: Expr = buffer_field(ty.ptr(ty.i32), "columns whose last hidden states are wanted", "tokens")
    hidden_states: Expr = parameter_field(hidden_states_parameter(ty.ptr_mut(ty.bf16), given=True))
    column_count: Expr = number_field("columns of this launch in use")
    segment_count: Expr = number_field("segments of this launch")
    tile_count: Expr = number_field("rows of `tiles` of this launch")
    wanted_count: Expr = number_field(
        "columns in `wanted`; with none the launch ends before attention in the last layer"
    )
    arrivals: Expr = number_field("what the workspace's counter stands at: blocks x phases for each launch", ty.u64)
    kv_scales: Expr | None = optional_field(KV_SCALES)
    biases: Expr | None = optional_field(BIASES)
    o_biases: Expr | None = optional_field(O_BIASES)
    router_biases: Expr | None = optional_field(ROUTER_BIASES)
    gate_up_biases: Expr | None = optional_field(GATE_UP_BIASES)
    down_biases: Expr | None = optional_field(DOWN_BIASES)
    head_norms: Expr | None = optional_field(HEAD_NORMS)
    sinks: Expr | None = optional_field(SINKS)
    norms_behind: Expr | None = optional_field(NORMS_BEHIND)
    places: Expr | None = optional_field(PLACES)
    rank: Expr | None = optional_field(RANK_NUMBER)
    peers: Mapping[str, tuple[Expr, ...]] = peers_field("workspace", "hidden_states")
    timeline: Expr | None = optional_field(
        KernelParameter(
            *(ty.ptr_mut(ty.u64), "nanoseconds of the events of every phase: see cheetah.blocks.timeline"),
            *(("blocks", "phases", len(EVENTS)), "zero"),
        )
    )


def pass_parameters(
    config: ModelConfig, plan: Plan, traced: bool = False, ranks: int = 1
) -> dict[str, KernelParameter]:
    """The parameters of a kernel by name, in the order of its signature. plan: of decoding; traced: with a timeline;
    ranks: GPUs that make its passes together."""
    return parameters_of(PassLaunch, config, plan, traced, ranks)


def sizes(config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> dict[str, int]:
    """The sizes that the shapes of the kernel's parameters name."""
    return {
        **sizes_of_step(config, gpu, plan),
        "tokens": pass_plan.tokens,
        "hidden_rows": pass_plan.tokens,
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


class Pass:
    """The program of a launch: the embedding, then layers of phases."""

    def __init__(self, sizes: PassSizes, machine: PassMachine, launch: PassLaunch) -> None:
        self.sizes, self.machine, self.launch = sizes, machine, launch
        self.shape, self.table, self.matrices = sizes.shape, sizes.table, sizes.matrices
        self._declare()

    @ch.inline
    def _declare(self) -> None:
        sizes, launch, machine = self.sizes, self.launch, self.machine
        token_tiles = (launch.column_count + (machine.plan.tile_tokens - 1)) // machine.plan.tile_tokens
        self.tokens = PassTokens(launch.groups, launch.segments, launch.segment_count, launch.tiles, launch.tile_count)
        self.ring = TileRing(machine, sizes.format)
        self.product = TileProduct(machine, self.ring, token_tiles)
        few = replace(machine, plan=machine.plan.of_finish())
        of_few = (launch.column_count + (few.plan.tile_tokens - 1)) // few.plan.tile_tokens
        self.of_few = TileProduct(few, self.ring, of_few)
        self.tiles = None if sizes.slots is None else ExpertTiles(machine, sizes.slots)
        self.cache = KvCache(sizes, launch.kv, launch.page_table, launch.kv_pages)
        self.timeline = Timeline(machine, launch.timeline, sizes.phase_count)

    def _section(self, name: str, element: ty.Type | None = None) -> Any:
        """A pointer to a section of the workspace (u8 unless said)."""
        return self._sections(name, element)[0]

    def _sections(self, name: str, element: ty.Type | None = None) -> list[Any]:
        """The same for every rank that makes the pass, this one first."""
        bases = (self.launch.workspace, *self.launch.peers.get("workspace", ()))
        starts = [base + ty.u64(self.sizes.sections.offsets[name]) for base in bases]
        return starts if element is None else [ch.reinterpret(ty.ptr_mut(element), start) for start in starts]

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
        self.barrier = PassBarrier(machine, self._sections("counter", ty.u64), self.launch.arrivals)
        both = self.product, self.of_few
        self.scales = {product: self._scales(product.machine) for product in both}
        self.factors = None if self.tiles is None else SlotFactors(machine, self._section(SLOTS[1], ty.f32))
        self.row_scales = {product: self._row_scales(product.machine) for product in both if self.shape.norms_behind}
        with machine.consumer:
            ch.comment("embedding")
            self.timeline.stamp(ty.u32(0), "begin")
            self._embed()
            self.timeline.stamp(ty.u32(0), "done")
            self.barrier.end_phase()
        with ch.roles_for(machine.roles, self.shape.layers, name="layer") as layer:
            self._emit_layer(layer)
        with machine.consumer, ch.if_(self.launch.wanted_count != 0):
            self._emit_hidden_states()
        emit_pass(machine)

    def _emit_layer(self, layer: Any) -> None:
        for line in self.sizes.page.layer:
            self._emit_copies(line, layer)
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
        if not isinstance(line, Multiply):
            return self._emit_copies_of_keys(layer)
        machine, matrix = self.machine, self.matrices[line.product]
        first, *sums = self.sizes.phases_of(line)
        given = self._given(first, line.product, layer)
        with machine.weights:
            machine.renew()
            with self._following(line.product, machine.weights):
                self.product.copy_weights(matrix, given)
        with machine.activations:
            machine.renew()
            self.barrier.begin_copies()
            with self._following(line.product, machine.activations):
                self.product.copy_activations(matrix, given)
            for _ in sums:
                self.barrier.skip_phase()

    @contextmanager
    def _following(self, product: Product, role: ch.Role) -> Iterator[None]:
        """While a role copies for a product: of experts it follows the list of their tiles, from the first of them to
        the last."""
        of_experts = [other for other in self.table.products if other.experts is not None]
        if self.tiles is not None and product is of_experts[0]:
            self.tiles.begin_following(role)
        yield
        if self.tiles is not None and product is of_experts[-1]:
            self.tiles.finish_following(role)

    def _emit_copies_of_keys(self, layer: Any) -> None:
        machine, attention = self.machine, self._attention(layer)
        for role in (machine.weights, machine.activations):
            with role, ch.if_(self._ends_with_keys(layer)):
                ch.break_()
        with machine.weights:
            attention.copy_nothing()
        with machine.activations:
            self.barrier.begin_copies()
            attention.copy_keys()

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
        self._store_hidden_states()
        self.timeline.stamp(index, "done")
        self.barrier.end_phase()

    @ch.function
    def _store_hidden_states(self) -> None:
        """Of every wanted column the residual stream, rounded to bf16, in natural order; a thread an element."""
        machine, plan, launch = self.machine, self.machine.plan, self.launch
        residual, padded = self._section("residual", ty.f32), self.shape.padded_hidden
        first = machine.block * plan.consumer_threads + machine.thread
        threads = machine.gpu.blocks * plan.consumer_threads
        with ch.for_(first, launch.wanted_count * padded, threads, unroll=1, name="place") as place:
            row = ch.const(ty.u32, place % padded, name="row")
            column = ch.const(ty.u32, ty.u32(launch.wanted[place // padded]), name="column")
            in_bounds = ch.minimum(row, self.shape.hidden - 1)
            lane = in_bounds % HALF * 4 + column % GROUP_TOKENS // 2
            member = in_bounds % M_TILE_ROWS // HALF * 2 + column % 2
            sums = ty.u64(self._number_here(in_bounds // M_TILE_ROWS)) * plan.groups + ty.u64(column // GROUP_TOKENS)
            with ch.if_(self._is_here(in_bounds // M_TILE_ROWS)):
                value = residual[sums * (ACCUMULATORS * 32) + ty.u64(lane * ACCUMULATORS + member)]
                kept = ch.select(row < self.shape.hidden, value, ty.f32(0.0))
                for states in (launch.hidden_states, *launch.peers.get("hidden_states", ())):
                    store_at(states, ty.u64(place), prim.f32_to_bf16(kept), states is not launch.hidden_states)

    def _number_here(self, m_tile: Any) -> Any:
        """The number on this rank of an M-tile of the residual stream; a large one where it is another's."""
        count = self.sizes.hidden_m_tiles
        return m_tile if self.machine.world.size == 1 else m_tile - self.machine.rank * count

    def _is_here(self, m_tile: Any) -> Any:
        """Whether this rank has an M-tile of the residual stream, whose rows it stores for all."""
        return self.machine.world.size == 1 or self._number_here(m_tile) < self.sizes.hidden_m_tiles

    @ch.inline
    def _emit_phases(self, layer: Any) -> None:
        """In the consumer role: a loop, so that all products share their code."""
        machine, sizes = self.machine, self.sizes
        count, of_keys = len(sizes.phases), sizes.key_phase_count
        phases = ch.select(self._ends_with_keys(layer), ty.u32(of_keys), ty.u32(count))
        for number, one in enumerate(sizes.phases):
            ch.comment(f"phase {number}, {one.name}: reads {', '.join(one.waits)}; makes {', '.join(one.makes)}")
        with ch.for_(phases, unroll=1, name="phase") as phase:
            machine.renew()
            number = layer * count + phase + 1
            self.timeline.stamp(number, "begin")
            self.barrier.begin_phase()
            self.timeline.stamp(number, "ready")
            with ch.if_(phase == sizes.index_of(None)):
                self._attention(layer).attend()
            with ch.else_():
                self._emit_choice(phase)
                with self._else_products(phase):
                    with ch.if_(phase == 0):
                        heads = self._heads(machine, layer)
                        bring_earlier_keys(heads, self.tokens, self.cache, layer, sizes.key_tile, self._window(layer))
                    self._emit_products(layer, phase)
            self.timeline.stamp(number, "done")
            self.barrier.end_phase()

    @property
    def _choosing(self) -> list[int]:
        """The numbers of the phases that choose experts, and sort tokens by them; none without."""
        return [index for index, one in enumerate(self.sizes.phases) if isinstance(one.line, ChooseExperts)]

    def _else_products(self, phase: Any) -> Any:
        """In the other phases."""
        return ch.else_() if self._choosing else nullcontext()

    @ch.inline
    def _emit_choice(self, phase: Any) -> None:
        """What comes before experts."""
        if self.tiles is None or self.factors is None:
            return
        choose, sort = self._choosing
        line, room = self.sizes.phases[choose].line, self.tiles.slots
        assert isinstance(line, ChooseExperts)
        choices = self._choices
        with ch.if_((phase == choose) | (phase == sort)):
            with ch.if_(phase == choose):
                of_warp = WarpChoice(self.machine, room.experts, line.routing.normalised)
                logits = self._section("routes", ty.f32)
                columns = self.launch.column_count
                PassChoice(self.machine, room, self.tokens, columns, logits, choices, of_warp).choose()
            with ch.else_():
                self._sort(choices)

    @property
    def _choices(self) -> Choices:
        chosen, experts, weights = CHOICES
        return Choices(self._section(chosen, ty.u32), self._section(experts, ty.u32), self._section(weights, ty.f32))

    @property
    def _activation(self) -> Any:
        """Of the gate: see `LayerKind`."""
        lines = (line.then for line in self.sizes.page.layer if isinstance(line, Multiply))
        return next(then.activation for then in lines if isinstance(then, Gated))

    def _sort(self, choices: Choices) -> None:
        assert self.tiles is not None
        first = next(product for product in self.table.products if product.experts is not None)
        PassSort(
            *(self.machine, self.tokens, self.launch.column_count, choices, self.tiles, self.scales[self.product]),
            *(self._section(HIDDEN), self._section(SORTED[0])),
            *(self._section(SLOTS[0], ty.u32), self._section(SLOTS[1], ty.f32)),
            PassPlan.vector_tiles(self.matrices[first]),
        ).sort()

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
            parts, residual = self._section("parts", ty.f32), self._section("residual", ty.f32)
            AddParts(self.of_few, parts, residual).finish(self._cases(layer, phase, adds=True), phase)
        with ch.else_():
            self.product.multiply(self._cases(layer, phase), phase)

    def _cases(self, layer: Any, phase: Any, adds: bool = False) -> list[Case]:
        """Of the phases that multiply, or of those that add parts."""
        finishes = self._finishes(layer, phase, self.of_few if adds else self.product)
        by_expert = None if self.tiles is None else self._store_by_expert()
        parts = self._section("parts", ty.f32)
        to_be_added, cases = StoreParts(self.machine, parts), []
        for index, one in enumerate(self.sizes.phases):
            if isinstance(line := one.line, Multiply | NormBehind) and one.adds == adds:
                kind = NormBehind if isinstance(line, NormBehind) else type(line.then)
                finish = finishes[kind] if kind is Kept or not one.is_stored else to_be_added
                if one.is_stored and line.product.experts is not None and by_expert is not None:
                    finish = by_expert
                if one.is_stored and one.is_joint and kind is Heads:
                    finish = self._store_squares(line.product, parts, finishes[Heads])
                given = self._given(one, line.product, layer)
                cases.append(Case(self.matrices[line.product], given, finish, index))
        return cases

    def _store_by_expert(self) -> StoreByToken:
        """What experts make of their slots, to be added in the next phase."""
        return StoreByToken(self._of_slots(), self._section(EXPERT_ROWS[0], ty.f32), self.sizes.expert_width)

    def _of_slots(self) -> PassMachine:
        """The machine with slots in the place of tokens."""
        assert self.tiles is not None
        return replace(self.machine, plan=self.tiles.plan)

    def _store_squares(self, product: Product, parts: Any, heads: Finish) -> StoreSquares:
        """The rows of q, k and v, to be normalised in the next phase."""
        assert isinstance(heads, StoreHeads)
        span = self.sizes.pass_plan.span_m_tiles(self.shape.head_dim)
        m_tiles, squares = self.matrices[product].full_m_tiles, self._section(JOINT[0], ty.f32)
        return StoreSquares(self.machine, parts, heads=heads, squares=squares, span=span, m_tiles=m_tiles)

    def _finishes(self, layer: Any, phase: Any, product: TileProduct) -> dict[type, Finish]:
        """What becomes of the sums of a line's product, in the tiles of `product`."""
        machine, scales, table = product.machine, self.scales[product], self.table
        layers = self.sizes.layers
        query_angles = by_layer(layers.query_rotations, layer)
        heads = StoreHeads(
            *(self._heads(machine, layer), self.tokens, self.cache, scales),
            *(self.launch.rope, self.sizes.plan.max_context, layer),
            query_angles=query_angles,
            key_angles=query_angles if layers.rotates_alike else by_layer(layers.key_rotations, layer),
            biases=self.launch.biases,
            norms=self._head_norms(machine),
        )
        pairs = table.named("gate_up")
        gated: Finish = StoreGated(
            *(machine, self._sections("gated"), self.matrices[pairs].full_m_tiles, scales),
            activation=self._activation,
        )
        if self.factors is not None:
            of_slots = self._of_slots(), self._section("gated"), self.factors, self._activation
            gated = StoreWeighed(*of_slots, self._biases_of(pairs, layer), self._bias_rows(pairs))
        # After o comes the layer's second norm, after down the next layer's first.
        o, down = table.onto_residual
        behind_o = phase <= self.sizes.index_of(table.reader_of(table.norm_phase(o) or o))
        behind = ch.select(behind_o, *(ty.u32(table.norm_behind(one, 0)) for one in (o, down)))
        onto_residual = self._onto_residual(machine, layer * len(table.norms) + behind)
        if (biases := self._biases_of(o, layer)) is not None:
            onto_residual = replace(onto_residual, biases=biases, has_biases=behind_o)
        finishes: dict[type, Finish] = {Heads: heads, OntoResidual: onto_residual, Gated: gated}
        if self.sizes.slots is not None:
            width = logit_words(self.sizes.slots.experts)
            biases = self._biases_of(table.named(ROUTER), layer)
            finishes[Routes] = StoreByToken(machine, self._section("routes", ty.f32), width, scales, biases)
        if self.row_scales:
            number = layer * len(table.onto_residual) + ch.select(behind_o, ty.u32(0), ty.u32(1))
            finishes |= self._norms_behind(onto_residual, product, number)
        return finishes

    def _norms_behind(self, onto: StoreResidual, product: TileProduct, number: Any) -> dict[type, Finish]:
        """What becomes of rows that go through norm `number` of those behind products: in their own phase, and in the
        next one."""
        shared = {one.name: getattr(onto, one.name) for one in fields(onto)}
        behind = self.launch.norms_behind + number * self.shape.padded_hidden
        kept = {"residual": self._section(PARTS[0], ty.f32), "squares": self._sections(KEPT[0], ty.f32)}
        scales = self.row_scales[product]
        return {Kept: StoreKept(**{**shared, **kept}), NormBehind: AddKept(**shared, scales=scales, behind=behind)}

    def _heads(self, machine: PassMachine, layer: Any) -> PassHeads:
        scales = self.launch.kv_scales
        queries, keys, values = (self._section(name) for name in HEAD_SECTIONS)
        return PassHeads(
            *(machine, self.shape, queries, keys, values, self.sizes.room.key_rows),
            None if scales is None else scales + layer * (2 * self.shape.kv_heads),
        )

    @ch.inline
    def _scales(self, machine: PassMachine) -> Scales:
        kind = Scales if self.sizes.config.norms.before else Unscaled
        return self._scales_of(kind, machine, "squares")

    @ch.inline
    def _row_scales(self, machine: PassMachine) -> Scales:
        """Of rows that go through a norm before they are added to the residual."""
        return self._scales_of(Scales, machine, KEPT[0])

    def _scales_of(self, kind: type[Scales], machine: PassMachine, squares: str) -> Scales:
        sizes = self.sizes
        elements, epsilon = self.shape.hidden, sizes.config.rms_norm_eps
        return kind(machine, self._section(squares, ty.f32), sizes.row_tiles, elements, epsilon)

    def _head_norms(self, machine: PassMachine) -> PassHeadNorms | None:
        weights = self.launch.head_norms
        if weights is None:
            return None
        config = self.sizes.config
        norms, plus_one = (machine, self.shape, weights, config.rms_norm_eps), config.norms.plus_one
        if not self.sizes.has_joint_norms:
            return PassHeadNorms(*norms, plus_one=plus_one)
        squares = self._section(JOINT[0], ty.f32)
        return JointHeadNorms(*norms, squares, self.shape.joint_norms, plus_one=plus_one)

    def _weights(self, product: Product, layer: Any) -> Any:
        return self.launch.weights + (ty.u64(layer) * self.matrices.layer_stride + self.matrices[product].offset)

    def _given(self, phase: PassPhase, product: Product, layer: Any) -> Given:
        """Where the operands of a phase lie."""
        adds = product.adds and not phase.is_joint and not phase.is_stored
        residual = self._section("residual", ty.f32) if adds else None
        parts, height, weights = self.sizes.parts(product), self.sizes.height(product), self._weights(product, layer)
        given = Given(weights, self._section(input_section(product)), residual, parts, height)
        if product.experts is None:
            return given
        if not phase.adds:
            return replace(given, tiles=self.tiles)
        slots, rows = self._section(SLOTS[0], ty.u32), self._section(EXPERT_ROWS[0], ty.f32)
        ranked = Ranked(slots, rows, self.sizes.expert_width, product.experts.chosen)
        if (biases := self._biases_of(product, layer)) is not None:
            assert self._bias_rows(product) == ranked.width, product
            ranked = replace(ranked, experts=self._choices.experts, weights=self._choices.weights, biases=biases)
        return replace(given, ranked=ranked)

    def _biases_of(self, product: Product, layer: Any) -> Any:
        """Where those of a layer begin, [row] or of each expert; None without."""
        biases = getattr(self.launch, f"{product.name}_biases", None)
        if biases is None:
            return None
        count = 1 if product.experts is None else product.experts.count
        return biases + layer * (count * self._bias_rows(product))

    @staticmethod
    def _bias_rows(product: Product) -> int:
        return round_up(product.rows, M_TILE_ROWS)

    def _attention(self, layer: Any) -> PassAttention:
        attention, window = self.table.attention, self._window(layer)
        into, heads, sizes = self._sections(attention.output.name), self._heads(self.machine, layer), self.sizes
        places = self._places(self.table.places_row(self.table.reader_of(attention), layer))
        kind = sizes.layers.common
        return PassAttention(
            *(self.machine, self.ring, heads, self.tokens, into, sizes.key_tile, window, places),
            scale=kind.scale,
            soft_cap=kind.soft_cap,
            sinks=None if self.launch.sinks is None else self.launch.sinks + layer * self.shape.heads,
        )

    def _window(self, layer: Any) -> Any:
        """How many keys a token sees in a layer, its own included; None where they are all in every layer."""
        layers = self.sizes.layers
        if layers.windows == (None,):
            return None
        keys = [window or EVERY_KEY for window in layers.windows]
        return by_layer([keys[number] for number in layers.window_of_layer], layer)

    def _onto_residual(self, machine: PassMachine, norm: Any) -> StoreResidual:
        """norm: number of the one that follows."""
        weight, table = self.launch.norms + norm * self.shape.padded_hidden, self.table
        first, second = table.norms
        residual, hidden, squares = RESIDUAL_SECTIONS
        return StoreResidual(
            *(machine, self._section(residual, ty.f32), self._sections(hidden)),
            *(self._sections(squares, ty.f32), weight, self.sizes.hidden_m_tiles),
            places=self._places(table.places_row(first, norm // 2) + norm % 2 * table.places_row(second, 0)),
            plus_one=self.sizes.config.norms.plus_one,
            multiplier=self.sizes.config.residual_multiplier,
        )

    def _places(self, row: Any) -> Any:
        """Row of `places`; None where columns are in order."""
        if self.launch.places is None:
            return None
        return self.launch.places + row * places_shape(self.sizes.config)[1]

    @ch.function
    def _embed(self) -> None:
        """The tokens' embeddings as the first residual stream."""
        product, machine = self.of_few, self.of_few.machine
        plan, store = machine.plan, self._onto_residual(machine, ty.u32(0))
        with product.tiles(ceil_div(self.sizes.hidden_m_tiles, plan.tile_m_tiles)) as tile:
            row_tile = tile // product.token_tiles
            token_tile = tile % product.token_tiles
            m_tile = row_tile * plan.tile_m_tiles + machine.warp
            with ch.if_(m_tile < self.sizes.hidden_m_tiles):
                weights = store.load_rows(m_tile)
                with ch.for_(plan.tile_groups, unroll=True, name="group") as in_tile:
                    group = token_tile * plan.tile_groups + in_tile
                    values = self._embedded(store.row(m_tile), group)
                    store.finish(Sums(m_tile, group, in_tile, values, weights))
            store.end(row_tile, token_tile)

    def _multiplied(self, element: Any) -> Any:
        """An element of the embedding as the residual begins with it."""
        multiplier = self.sizes.config.embedding_multiplier
        return element if multiplier == 1 else element * multiplier

    @ch.inline
    def _embedded(self, row: Any, group: Any) -> Any:
        """Rows `row` and `row` + 8 of the two tokens of this lane; rows that there are not are zero."""
        launch, values = self.launch, []
        for index in range(ACCUMULATORS):
            token = group * GROUP_TOKENS + self.machine.lane % 4 * 2 + index % 2
            token_id = prim.load_constant_u32(launch.ids + token)
            of_row = row + index // 2 * (M_TILE_ROWS // 2)
            place = ty.u64(token_id) * self.shape.padded_hidden + ty.u64(ch.minimum(of_row, self.shape.hidden - 1))
            value = ch.select(
                of_row < self.shape.hidden,
                self._multiplied(prim.bf16_to_f32(launch.embedding[place])),
                ty.f32(0.0),
            )
            values.append(ch.const(ty.f32, value, name="value"))
        return tuple(values)
