"""What the phases of a pass stand on: where everything lies, what becomes of rows, the embedding, the hidden states."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from cheetah import lang as ch
from cheetah.blocks.attention.cache import KvCache
from cheetah.blocks.by_layer import by_layer, number_among, window_keys
from cheetah.blocks.delta.memory import DeltaParameters
from cheetah.blocks.linear.names import with_all_names
from cheetah.blocks.peer_stores import store_at
from cheetah.blocks.prompt.attention import PassAttention
from cheetah.blocks.prompt.cases import ACCUMULATORS, Finish, Sums
from cheetah.blocks.prompt.delta import PassMemory
from cheetah.blocks.prompt.expert_tiles import ExpertTiles
from cheetah.blocks.prompt.finish import (
    HALF,
    AddKept,
    Scales,
    SlotFactors,
    StoreKept,
    StoreResidual,
    TokenWeights,
    Unscaled,
)
from cheetah.blocks.prompt.joint_norms import JointHeadNorms, StoreSquares
from cheetah.blocks.prompt.keys import PassHeadNorms, PassHeads, PassTokens, StoreHeads
from cheetah.blocks.prompt.machine import ACCUMULATOR_BYTES, PassMachine
from cheetah.blocks.prompt.product import TileProduct
from cheetah.blocks.prompt.ring import TileRing
from cheetah.blocks.timeline import Timeline
from cheetah.lang import prim, ty
from cheetah.models.act_order import places_shape
from cheetah.models.dense.page import Kept, NormBehind
from cheetah.models.dense.pass_launch import PassLaunch, in_all_memories
from cheetah.models.dense.pass_sizes import (
    HEAD_SECTIONS,
    JOINT,
    KEPT,
    MIXED,
    OF_DELTA,
    PARTS,
    RESIDUAL_SECTIONS,
    SLOTS,
    PassSizes,
)
from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.index import ceil_div
from cheetah.plan.products import ROUTES, Product, logit_words
from cheetah.plan.prompt import GROUP_TOKENS

OfMemory = TypeVar("OfMemory", bound=PassMemory)


class PassParts:
    """Of a launch. tiles: of experts, if the model has some."""

    def __init__(self, sizes: PassSizes, machine: PassMachine, launch: PassLaunch) -> None:
        self.sizes, self.machine, self.launch = sizes, machine, launch
        self.shape, self.table = sizes.shape, sizes.table
        self.matrices = with_all_names(sizes.matrices, sizes.plan.stage_bytes)
        self.hidden = ch.named("HIDDEN", self.shape.padded_hidden)
        own_hidden = self.shape.hidden
        self.own_hidden = self.hidden if own_hidden == self.hidden else ch.named("UNPADDED_HIDDEN", own_hidden)
        self.hidden_m_tiles = ch.named("HIDDEN_M_TILES", sizes.hidden_m_tiles)
        self._declare()

    @ch.inline
    def _declare(self) -> None:
        sizes, launch, machine = self.sizes, self.launch, self.machine
        token_tiles = (launch.column_count + (machine.plan.tile_tokens - 1)) // machine.plan.tile_tokens
        self.tokens = PassTokens(launch.groups, launch.segments, launch.segment_count, launch.tiles, launch.tile_count)
        self.ring = TileRing(machine, sizes.format)
        self.product = TileProduct(machine, self.ring, token_tiles)
        few = replace(machine, plan=machine.plan.of_finish(), name="few_tokens")
        of_few = (launch.column_count + (few.plan.tile_tokens - 1)) // few.plan.tile_tokens
        self.of_few = TileProduct(few, self.ring, of_few)
        self.tiles = None if sizes.slots is None else ExpertTiles(machine, sizes.slots)
        self.cache = KvCache(sizes, launch.kv, launch.page_table, launch.kv_pages)
        self.timeline = Timeline(machine, launch.timeline, sizes.phase_count)

    def load_scales(self) -> None:
        """What tokens and slots are scaled by, in shared memory."""
        both = self.product, self.of_few
        self.scales = {product: self._scales(product.machine) for product in both}
        self.factors = None if self.tiles is None else SlotFactors(self.machine, self.section(SLOTS[1], ty.f32))
        self.row_scales = {product: self._row_scales(product.machine) for product in both if self.shape.norms_behind}
        self.token_weights = self._token_weights()

    def section(self, name: str, element: ty.Type | None = None) -> Any:
        """A pointer to a section of the workspace (u8 unless said)."""
        return self.sections(name, element)[0]

    def sections(self, name: str, element: ty.Type | None = None) -> list[Any]:
        """The same for every rank that makes the pass, this one first."""
        bases, at = in_all_memories(self.launch, "workspace"), self.sizes.sections.offsets[name]
        starts = [base + ty.u64(ch.named(f"{name.upper()}_AT", at)) for base in bases]
        return starts if element is None else [ch.reinterpret(ty.ptr_mut(element), start) for start in starts]

    def is_delta(self, layer: Any) -> Any:
        """Whether a layer is one of Gated DeltaNet."""
        deltas = self.sizes.page.delta_layers
        return by_layer([int(number in deltas) for number in range(self.shape.layers)], layer) == 1

    def number(self, layer: Any, of_delta: bool) -> Any:
        """The number of a layer among those of Gated DeltaNet, or among the others."""
        deltas = self.sizes.page.delta_layers
        if not deltas:
            return layer
        return number_among([(number in deltas) == of_delta for number in range(self.shape.layers)], layer)

    def memory(self, kind: type[OfMemory], layer: Any) -> OfMemory:
        """A phase of what a layer of Gated DeltaNet does behind its product."""
        launch, sizes, delta = self.launch, self.sizes, self.table.delta_phase
        assert sizes.delta is not None and delta is not None
        parameters = [launch.delta_taps, launch.delta_numbers, launch.states, launch.state_slots]
        keys, values, numbers = (self.section(name, ty.f32) for name in OF_DELTA)
        return kind(
            *(self.machine, self.ring, self.tokens, sizes.delta),
            DeltaParameters(*(one for one in parameters if one is not None)),
            *(self.number(layer, of_delta=True), self.section(MIXED[0], ty.u32), keys, values, numbers),
            *(self.section(delta.output.name), launch.column_count),
            *(ch.named("PAGES_PER_SEQUENCE", sizes.plan.pages_per_sequence), sizes.config.rms_norm_eps),
        )

    def heads(self, machine: PassMachine, layer: Any) -> PassHeads:
        scales = self.launch.kv_scales
        queries, keys, values = (self.section(name) for name in HEAD_SECTIONS)
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
        return kind(machine, self.section(squares, ty.f32), sizes.row_tiles, elements, epsilon)

    def _token_weights(self) -> TokenWeights | None:
        """By what tokens weigh the expert that all of them have, if there is one."""
        experts = self.shape.experts
        if experts is None or not experts.shared:
            return None
        logits, place = self.section(ROUTES, ty.f32), experts.shared_logit
        return TokenWeights(self.scales[self.product], logits, logit_words(experts), place)

    def head_norms(self, machine: PassMachine) -> PassHeadNorms | None:
        weights = self.launch.head_norms
        if weights is None:
            return None
        config = self.sizes.config
        norms, plus_one = (machine, self.shape, weights, config.rms_norm_eps), config.norms.plus_one
        if not self.sizes.has_joint_norms:
            return PassHeadNorms(*norms, plus_one=plus_one)
        squares = self.section(JOINT[0], ty.f32)
        return JointHeadNorms(*norms, squares, self.shape.joint_norms, plus_one=plus_one)

    def offset(self, product: Product, layer: Any) -> Any:
        """Where a layer's matrix begins in the packed weights (u64)."""
        layout, stride = self.matrices[product], ch.named("LAYER_BYTES", self.matrices.layer_stride)
        return ty.u64(layer) * stride + ch.named(f"{layout.name.upper()}_OFFSET", layout.offset)

    def window(self, layer: Any) -> Any:
        """How many keys a token sees in a layer, its own included; None where they are all in every layer."""
        layers = self.sizes.layers
        if layers.windows == (None,):
            return None
        keys = [window_keys(window, layers.windows) for window in layers.windows]
        return by_layer([keys[number] for number in layers.window_of_layer], layer)

    def attention(self, layer: Any) -> PassAttention:
        attention, window = self.table.attention, self.window(layer)
        number = self.number(layer, of_delta=False)
        into, heads, sizes = self.sections(attention.output.name), self.heads(self.machine, number), self.sizes
        places = self.places(self.table.places_row(self.table.reader_of(attention), layer))
        kind = sizes.layers.common
        return PassAttention(
            *(self.machine, self.ring, heads, self.tokens, into, sizes.key_tile, window, places),
            scale=kind.scale,
            soft_cap=kind.soft_cap,
            sinks=None if self.launch.sinks is None else self.launch.sinks + layer * self.shape.heads,
            gated=kind.gated,
        )

    def onto_residual(self, machine: PassMachine, norm: Any) -> StoreResidual:
        """norm: number of the one that follows."""
        weight, table = self.launch.norms + norm * self.hidden, self.table
        first, second = table.norms
        residual, hidden, squares = RESIDUAL_SECTIONS
        return StoreResidual(
            *(machine, self.section(residual, ty.f32), self.sections(hidden)),
            *(self.sections(squares, ty.f32), weight, self.hidden_m_tiles),
            places=self.places(table.places_row(first, norm // 2) + norm % 2 * table.places_row(second, 0)),
            plus_one=self.sizes.config.norms.plus_one,
            multiplier=self.sizes.config.residual_multiplier,
        )

    def norms_behind(self, onto: StoreResidual, product: TileProduct, number: Any) -> dict[type, Finish]:
        """What becomes of rows that go through norm `number` of those behind products: in their own phase, and in the
        next one."""
        shared = {one.name: getattr(onto, one.name) for one in fields(onto)}
        behind = self.launch.norms_behind + number * self.hidden
        kept = {"residual": self.section(PARTS[0], ty.f32), "squares": self.sections(KEPT[0], ty.f32)}
        scales = self.row_scales[product]
        return {Kept: StoreKept(**{**shared, **kept}), NormBehind: AddKept(**shared, scales=scales, behind=behind)}

    def store_squares(self, product: Product, parts: Any, heads: Finish) -> StoreSquares:
        """The rows of q, k and v, to be normalised in the next phase."""
        assert isinstance(heads, StoreHeads)
        span = self.sizes.pass_plan.span_m_tiles(self.shape.head_dim)
        m_tiles, squares = self.matrices[product].full_m_tiles, self.sections(JOINT[0], ty.f32)
        if not self.shape.joint_norms:
            squares = squares[:1]
        return StoreSquares(self.machine, parts, heads=heads, squares=squares, span=span, m_tiles=m_tiles)

    def places(self, row: Any) -> Any:
        """Row of `places`; None where columns are in order."""
        if self.launch.places is None:
            return None
        return self.launch.places + row * places_shape(self.sizes.config)[1]

    @ch.function
    def embed(self) -> None:
        """The tokens' embeddings as the first residual stream."""
        product, machine = self.of_few, self.of_few.machine
        plan, store = machine.plan, self.onto_residual(machine, ty.u32(0))
        with machine.tiles(ceil_div(self.hidden_m_tiles, plan.tile_m_tiles), product.token_tiles) as tile:
            row_tile = tile // product.token_tiles
            token_tile = tile % product.token_tiles
            m_tile = row_tile * plan.tile_m_tiles + machine.warp
            with ch.if_(m_tile < self.hidden_m_tiles):
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
            place = ty.u64(token_id) * self.hidden + ty.u64(ch.minimum(of_row, self.own_hidden - 1))
            value = ch.select(
                of_row < self.own_hidden,
                self._multiplied(prim.bf16_to_f32(launch.embedding[place])),
                ty.f32(0.0),
            )
            values.append(ch.const(ty.f32, value, name="value"))
        return tuple(values)

    @ch.function
    def store_hidden_states(self) -> None:
        """Of every wanted column the residual stream, rounded to bf16, in natural order; a thread an element."""
        machine, plan, launch = self.machine, self.machine.plan, self.launch
        residual, padded = self.section("residual", ty.f32), self.hidden
        first = machine.block * machine.consumer_threads + machine.thread
        threads = machine.gpu.blocks * machine.consumer_threads
        with ch.for_(first, launch.wanted_count * padded, threads, unroll=1, name="place") as place:
            row = ch.const(ty.u32, place % padded, name="row")
            column = ch.const(ty.u32, ty.u32(launch.wanted[place // padded]), name="column")
            in_bounds = ch.minimum(row, self.own_hidden - 1)
            lane = in_bounds % HALF * 4 + column % GROUP_TOKENS // 2
            member = in_bounds % M_TILE_ROWS // HALF * 2 + column % 2
            sums = ty.u64(self._number_here(in_bounds // M_TILE_ROWS)) * plan.groups + ty.u64(column // GROUP_TOKENS)
            with ch.if_(self._is_here(in_bounds // M_TILE_ROWS)):
                value = residual[sums * (ACCUMULATOR_BYTES // 4) + ty.u64(lane * ACCUMULATORS + member)]
                kept = ch.select(row < self.own_hidden, value, ty.f32(0.0))
                for states in in_all_memories(launch, "hidden_states"):
                    store_at(states, ty.u64(place), prim.f32_to_bf16(kept), states is not launch.hidden_states)

    def _number_here(self, m_tile: Any) -> Any:
        """The number on this rank of an M-tile of the residual stream; a large one where it is another's."""
        count = self.hidden_m_tiles
        return m_tile if self.machine.world.size == 1 else m_tile - self.machine.rank * count

    def _is_here(self, m_tile: Any) -> Any:
        """Whether this rank has an M-tile of the residual stream, whose rows it stores for all."""
        return self.machine.world.size == 1 or self._number_here(m_tile) < self.hidden_m_tiles
