"""What the decode step stands on: the blocks of a launch put together, and the vectors that its phases exchange.

The model itself is in `program`. Here is what would hide it: how blocks are wired, where a step and a layer begin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.adjustments import Adjustments, mask_words
from cheetah.blocks.advance import advance_of
from cheetah.blocks.attention.cache import KvCache
from cheetah.blocks.attention.core import LSE_WORDS, Attention
from cheetah.blocks.attention.head_norms import HeadNorms, JointNorms
from cheetah.blocks.attention.schedule import Schedule
from cheetah.blocks.attention.shipped_variants import combined, learned_sink, soft_cap
from cheetah.blocks.attention.step_port import LayerSinks, NormalisedHeads, ProjectedHeads, Projection, StepPort
from cheetah.blocks.attention.variants import CAUSAL, Variant
from cheetah.blocks.by_layer import by_layer, chosen
from cheetah.blocks.columns import POSITION, Columns, vector_words
from cheetah.blocks.exchange import (
    BarrierExchange,
    Exchange,
    FlaggedExchange,
    Peers,
    Published,
    make_exchange,
)
from cheetah.blocks.experts.choice import Choice, PublishedLogits
from cheetah.blocks.experts.products import AllParts, ChosenRows, ExpertProducts
from cheetah.blocks.filters.filters import Filters
from cheetah.blocks.host_words import HostWords
from cheetah.blocks.linear.epilogue import AddResidual, GatedRows, NormWeights, PublishedRows
from cheetah.blocks.linear.formats.vectors import is_raised
from cheetah.blocks.linear.interface import Epilogue, Prologue, Rows
from cheetah.blocks.linear.matvec import Matvec
from cheetah.blocks.linear.norm_behind import KeepRows, finish_kept_rows
from cheetah.blocks.linear.prologue import Prefetching, Slices
from cheetah.blocks.linear.rms import InverseRms, PublishedSquares, squares_words
from cheetah.blocks.lookup import history_room
from cheetah.blocks.machine import Machine
from cheetah.blocks.made_list import MadeList
from cheetah.blocks.phase import Phases
from cheetah.blocks.ring import Ring
from cheetah.blocks.sampling import Sampler
from cheetah.blocks.timeline import Timeline
from cheetah.blocks.tokens import Tokens
from cheetah.blocks.verified_tokens import VerifiedTokens
from cheetah.lang import prim, ty
from cheetah.models.act_order import places_shape
from cheetah.models.attention_layers import EVERY_KEY
from cheetah.models.config import ModelConfig
from cheetah.models.dense.launch import Launch, peers_of
from cheetah.models.dense.page import (
    ChooseExperts,
    Gated,
    Heads,
    Kept,
    Line,
    Multiply,
    NormBehind,
    OntoResidual,
    Page,
    Routes,
    page_of,
)
from cheetah.plan import M_TILE_ROWS, Gpu, MatrixLayout, ModelShape, Plan, StepMatrices, step_matrices
from cheetah.plan.formats import BF16_VECTOR, KV_TILE_TOKENS
from cheetah.plan.index import round_up
from cheetah.plan.kv import KvPlanLayout, max_plans
from cheetah.plan.kv.tables import ROUND_WORDS, epochs_of_step
from cheetah.plan.narrow import residual_m_tiles
from cheetah.plan.products import STEP_EXCHANGES, AttentionPhase, Product, StepTable, Vector
from cheetah.plan.regions import FILTER_WORDS, listed_tokens
from cheetah.plan.world import world_of


def kv_layout(shape: ModelShape, gpu: Gpu, plan: Plan) -> KvPlanLayout:
    """How the KV plans of a launch are encoded: the same of all ranks, over the KV heads of each."""
    return KvPlanLayout.for_step(plan, shape.of_rank(gpu.ranks), gpu.blocks)


def exchange_sizes(shape: ModelShape, gpu: Gpu, plan: Plan) -> dict[str, int]:
    """Payload words of each exchanged vector; the inputs of products with the padding of their matrix."""
    table, sizes = shape.table, dict[str, int]()
    for phase in table.layer:
        if not phase.input.is_kept:
            own = shape.of_rank(gpu.ranks).table.attention.input if isinstance(phase, AttentionPhase) else phase.input
            sizes[phase.input.name] = _words_of(table, own, plan)
        if isinstance(phase, AttentionPhase):
            partial_rows = kv_layout(shape, gpu, plan).max_partial_rows
            sizes[phase.partials] = partial_rows * (shape.head_dim + LSE_WORDS)
    words = squares_words(residual_m_tiles(shape, gpu), plan.tokens)
    squares = {vector.squares: words for vector in table.normed}
    if (heads := table.attention.input).has_squares:
        squares[heads.squares] = squares_words(shape.rotated_rows // M_TILE_ROWS, plan.tokens)
    return {**sizes, **squares, **_sampling_sizes(gpu, plan)}


def _words_of(table: StepTable, vector: Vector, plan: Plan) -> int:
    if vector.is_words:
        return plan.tokens * round_up(vector.elements, M_TILE_ROWS)
    readers = table.inputs.get(vector)
    if readers is None:
        return plan.tokens * vector.elements // 2
    columns = max(product.format.columns for product in readers)
    return vector.parts * vector_words(round_up(vector.elements, columns), plan.tokens)


def own_vectors(table: StepTable) -> tuple[str, ...]:
    """Those that a rank makes for itself: attention is of its own heads."""
    attention = table.attention
    return *attention.input.names, attention.partials


def product_inputs(shape: ModelShape, gpu: Gpu, plan: Plan) -> dict[str, int]:
    """The vectors that products take whole and whose words may carry tags, with the exponents of their exchange.

    By a tag a block knows a word of those since the last one that it has read. The head takes a vector that a product
    of every layer takes too: a block without an M-tile of that one reads it once a step, and would take a word of three
    layers before for the last's. Where there is such a block words carry whole epochs. What is dealt among experts
    every block brings in every layer, whether it owns rows of the router or not."""
    matrices = step_matrices(shape, plan, gpu)

    def is_read_as_published(readers: Sequence[Product]) -> bool:
        if any(product.experts is not None for product in readers):
            return True
        first, *others = (matrices[product].owners for product in readers)
        return all(blocks <= first for blocks in others)

    inputs = shape.table.inputs.items()
    return {one.name: one.exponent for one, readers in inputs if is_read_as_published(readers)}


def published_kinds(config: ModelConfig, plan: Plan) -> dict[str, str]:
    """As what the inputs of products are published where the copy engine brings them: as the first matrix wants them,
    if that and what others want can be said of each pair by itself, and nobody orders them before."""
    kinds = {}
    for vector, readers in config.shape.table.inputs.items():
        if vector.parts > 1:
            continue  # threads read it, part by part
        wanted = [product.vector_kind(plan) for product in readers]
        is_ordered = any(product.is_placed and config.is_ordered(product.name) for product in readers)
        can_be_said = not is_ordered and all(kind == BF16_VECTOR or is_raised(kind) for kind in wanted)
        kinds[vector.name] = wanted[0] if can_be_said else BF16_VECTOR
    return kinds


def head_exchange_sizes(shape: ModelShape, gpu: Gpu, plan: Plan) -> dict[str, int]:
    """Those of the phases behind the layers alone, with the vector that they begin with."""
    sizes = exchange_sizes(shape, gpu, plan)
    return {name: sizes[name] for name in (*shape.table.head.input.names, *STEP_EXCHANGES)}


def _sampling_sizes(gpu: Gpu, plan: Plan) -> dict[str, int]:
    blocks = world_of(gpu).blocks
    sizes = (
        2 * 2 * max(plan.tokens, 2) * blocks,
        2 * 4 * listed_tokens(plan.tokens, gpu.ranks) * plan.tokens * blocks,
        2 * FILTER_WORDS * plan.tokens * blocks,
    )
    return dict(zip(STEP_EXCHANGES, sizes, strict=True))


def workspace_bytes(exchanged: dict[str, int], plan: Plan, inputs: Collection[str] = ()) -> int:
    """Bytes of the `exchange` buffer for so many payload words of each vector."""
    kind = {"flags": FlaggedExchange, "barrier": BarrierExchange}[plan.sync]
    return kind.size_bytes(exchanged, inputs)


def sizes(config: ModelConfig, gpu: Gpu, plan: Plan) -> dict[str, int]:
    """The sizes that the shapes of the kernel's parameters name: a rank's."""
    shape, rank = config.shape, config.shape.of_rank(gpu.ranks)
    layout, windows = kv_layout(shape, gpu, plan), shape.windows_in(plan.max_context)
    return {
        **rank.sizes,
        "qkv_rows": rank.qkv_rows,
        "rotated_rows": rank.rotated_rows,
        "weight_bytes": step_matrices(shape, plan, gpu).weight_bytes,
        "norms": shape.table.norm_count,
        "padded_hidden": shape.padded_hidden,
        "max_context": plan.max_context,
        "half_head_dim": shape.head_dim // 2,
        "kv_pages": plan.kv_pages,
        "page_size": plan.page_size,
        "batch": plan.batch,
        "pages_per_sequence": plan.pages_per_sequence,
        "plans": len(windows)
        * max_plans(*(plan.max_steps, KV_TILE_TOKENS, layout.tiles, plan.tokens), windows=windows != (None,)),
        "plan_words": layout.plan_words,
        "tiles": len(windows) * layout.tiles,
        "columns": plan.tokens,
        "mask_words": mask_words(shape.vocab),
        "exchange_bytes": workspace_bytes(exchange_sizes(shape, gpu, plan), plan, product_inputs(shape, gpu, plan)),
        "token_room": plan.launch_tokens + 1,
        "history_room": history_room(plan),
        "round_words": ROUND_WORDS + plan.tokens,
        "blocks": gpu.blocks,
        "phases": len(phase_names(config)),
        **dict(zip(("ordered_inputs", "longest_input"), places_shape(config), strict=True)),
    }


def phase_names(config: ModelConfig) -> tuple[str, ...]:
    """The phases of a step, as `progress` counts them."""
    return page_of(config).names.names


def with_names(matrices: StepMatrices) -> StepMatrices:
    """The matrices with their sizes under names in the text."""
    listed = [_with_names(layout) for layout in matrices]
    return replace(matrices, of_layer=tuple(listed[:-1]), head=listed[-1])


def _with_names(layout: MatrixLayout) -> MatrixLayout:
    name = layout.name.upper()
    rows, chunk_bytes = ch.named(f"{name}_ROWS", layout.rows), ch.named(f"{name}_CHUNK_BYTES", layout.stage_bytes)
    return replace(layout, rows=rows, stage_bytes=chunk_bytes)


class HeadParts:
    """The blocks of a launch that chooses tokens, and what its last two phases are written with. page: all its phases;
    rows: of the embedding, if they are not those of the token ids."""

    def __init__(
        self,
        config: ModelConfig,
        machine: Machine,
        launch: Launch,
        exchange: Exchange,
        page: Page,
        rows: int | None = None,
    ) -> None:
        self.config, self.machine, self.launch = config, machine, launch
        self.shape, self.table, self.exchange = machine.model, machine.stack, exchange
        self.matrices = with_names(step_matrices(self.shape, machine.plan, machine.gpu))
        self.residual = self.matrices[self.table.onto_residual[0]]
        """Its rows are those of the residual, and lie with the same blocks."""
        self.page = page
        self.timeline = Timeline(machine, launch.timeline, page.names.count)
        self.columns = Columns(machine, launch.column_count, launch.columns, launch.sequences, advance_of(machine))
        self.ring = Ring(machine)
        self.linear = Matvec(self.columns, self.ring, launch.weights, self.timeline)
        adjustments = Adjustments(self.columns, launch, self.matrices.head)
        host = HostWords(self.columns, launch)
        filters = Filters(self.exchange, adjustments, launch.weighed)
        self.sampler = Sampler(self.linear, self.exchange, self.shape.vocab, self.timeline, adjustments, filters, host)
        self.tokens = (
            VerifiedTokens(self.columns, launch, rows, adjustments)
            if machine.plan.drafts
            else Tokens(self.columns, launch, rows)
        )
        self.lists: tuple[MadeList, ...] = ()
        """Those that are made on the device in a step."""
        self.phase = Phases(machine, self.exchange, self.timeline, page.names, launch.progress)

    @ch.inline
    def set_up(self) -> None:
        """Barriers, cursors, and every column's first token."""
        machine = self.machine
        self.tokens.declare()
        for made in self.lists:
            made.declare()
        ch.comment("barriers, and every column's first token")
        with ch.if_(machine.thread == 0):
            self.ring.initialise()
            self.linear.initialise()
            self.tokens.initialise()
            self.exchange.initialise()
            for made in self.lists:
                made.initialise()
            prim.mbarrier_fence_init()
        self.tokens.take_first()
        prim.block_barrier()  # orders the barriers' initialisation before their first use by any role
        self.ring.start()
        with machine.consumer:
            self.exchange.start()

    def begin_epochs(self, step: Any) -> None:
        """The first of the step's exchange epochs, in the roles that wait for them and that publish."""
        first = self.launch.epoch + step * epochs_of_step(self.page.names.layers)
        self.step_epoch = self._epoch("step_epoch", first)

    def _epoch(self, name: str, value: ch.Expr) -> ch.Expr:
        return ch.roles_const((self.machine.consumer, self.machine.adder), ty.u32, value, name)

    def emit_head(self, step: Any, epoch: ch.Expr) -> None:
        """Logits of the hidden vector of an epoch, and the next token of every column; left out for tokens whose logits
        nobody wants."""
        head = self.table.head
        hidden = self.normalised(head.input, epoch, self.places(head))
        self.start_sampling()
        for line in self.page.once:
            with self.phase(line.text):
                if isinstance(line, Multiply):
                    assert line.waits == hidden.waits, line
                    matrix, wanted = self.matrices[line.product], self.needs_head(step)
                    self.linear(matrix, hidden, self.take_logits(step), when=wanted)
                else:
                    self.choose(step)

    def start_sampling(self) -> None:
        with self.machine.adder:
            self.sampler.start()

    def choose(self, step: Any) -> None:
        """Every column's next token, in the region `chosen`."""
        with self.machine.adding():
            self.sampler.lay_down()
        with self.machine.consumer:
            self.sampler.choose(self.step_epoch + (self.page.names.layers + 1), step)
            self.timeline.stamp_here("done")

    @ch.function
    def publish_embeddings(self, vector: Vector, norm: NormWeights, multiplier: float = 1.0) -> None:
        """In the consumer role: the embeddings of the step's tokens, times the multiplier, become the residual, and are
        published as every hidden vector is. A lane has a row of a column, of the block's M-tiles in turn; whole warps
        share M-tiles."""
        machine, matrix, tokens = self.machine, self.residual, self.columns.limit
        height = matrix.tile_rows
        count = matrix.waves * tokens * height
        begin = self.onto_residual(vector, norm, self.step_epoch, multiplier, is_first=True)
        with ch.for_(machine.thread, round_up(count, 32), machine.consumer_threads, unroll=1, name="place") as place:
            wave = place // (height * tokens)
            column = place // height % tokens
            row = place % height
            m_tile = matrix.m_tile(wave, matrix.position(machine.block))
            is_own = (place < count) & (m_tile < matrix.m_tiles) & (column < self.columns.count)
            there = matrix.of_all(ch.minimum(m_tile, matrix.m_tiles - 1), machine.rank)
            embedded = functools.partial(self._embedded, column, there * height + row, is_own)
            begin(Rows(there, wave, row, column, is_own, 0, embedded, height))

    @ch.inline
    def _embedded(self, column: Any, row: Any, when: Any) -> Any:
        """A row of the embedding of a column's token; those that there are not are zero in memory."""
        embedded = ch.var(ty.f32, 0.0)
        with ch.if_(when):
            embedded.set(prim.bf16_to_f32(self.tokens.embedding(column)[row]))
        return embedded

    def normalised(self, vector: Vector, epoch: ch.Expr, places: ch.Expr | None, is_normed: bool = True) -> Prologue:
        """RMSNorm of a vector that is published times its weights. places: of `places`. is_normed: else the vector
        itself; see `InverseRms`."""
        scale = replace(self.inverse_rms(vector, epoch), is_normed=is_normed)
        return Slices(self.columns, self.exchange.at(vector.name, epoch), vector.published, places, scale)

    def inverse_rms(self, vector: Vector, epoch: ch.Expr) -> InverseRms:
        """1/rms of a vector beside which squares are published."""
        return InverseRms(self.columns, self.squares_of(vector, epoch), vector.elements, self.config.rms_norm_eps)

    def squares_of(self, vector: Vector, epoch: ch.Expr) -> PublishedSquares:
        """The squares beside a vector."""
        return PublishedSquares(self.columns, self.exchange.at(vector.squares, epoch), self.residual.all_m_tiles)

    def onto_residual(
        self,
        vector: Vector | None,
        norm: NormWeights,
        epoch: ch.Expr,
        multiplier: float = 1.0,
        *,
        is_first: bool = False,
    ) -> PublishedRows:
        """Rows times the multiplier added to the residual, which is published as `vector`, times these weights."""
        assert vector is not None
        into, squares = self.exchange.at(vector.name, epoch), self.squares_of(vector, epoch)
        return AddResidual(self.machine, into, squares, norm, multiplier, is_first)

    def places(self, product: Product, layer: Any = None) -> Any:
        """Where a matrix has the elements of its input; None where they are in order."""
        if not (product.is_placed and self.config.is_ordered(product.name)):
            return None
        return self.launch.places + self.table.places_row(product, layer) * self._places_row

    @property
    def _places_row(self) -> int:
        return places_shape(self.config)[1]

    def needs_head(self, step: Any) -> Any:
        """Whether somebody wants the logits of a step, or what is sampled from them."""
        return (step >= self.launch.head_from) | (self.launch.logits != None)  # noqa: E711 (a device comparison)

    def take_logits(self, step: Any) -> Epilogue:
        """Logits to who wants them, and to the sampler."""

        @ch.inline
        def finish(rows: Rows) -> None:
            launch, vocab = self.launch, self.sampler.vocab
            logit = ch.const(ty.f32, self._logit(rows.sum()), name="logit")
            token = rows.m_tile * M_TILE_ROWS + rows.row
            with ch.if_(rows.is_own):
                with ch.if_((launch.logits != None) & (token < vocab)):  # noqa: E711
                    row = ty.u64(step * self.columns.limit + rows.column)
                    launch.logits[row * vocab + ty.u64(token)] = logit
                self.sampler.consider(rows, logit)

        return finish

    def _logit(self, row_sum: Any) -> Any:
        divisor, cap = self.config.logit_divisor, self.config.logit_soft_cap
        scaled = row_sum if divisor == 1 else row_sum * (1.0 / divisor)
        return scaled if cap is None else prim.tanh_f32(scaled * (1.0 / cap)) * cap

    def norm(self, index: Any) -> NormWeights:
        """The weights of a norm by its number."""
        return self._norm_weights(self.launch.norms, index)

    def _norm_weights(self, rows: Any, index: Any) -> NormWeights:
        return NormWeights(rows + index * self.machine.hidden, self.config.norms.plus_one)


class StepParts(HeadParts):
    """The blocks of a decode step, and what its phases are written with."""

    def __init__(self, config: ModelConfig, machine: Machine, launch: Launch, exchange: Exchange | None = None) -> None:
        made = exchange or make_exchange(
            machine,
            launch.exchange,
            exchange_sizes(machine.model, machine.gpu, machine.plan),
            inputs=product_inputs(machine.model, machine.gpu, machine.plan),
            copied=published_kinds(config, machine.plan),
            peers=Peers(peers_of(launch), own_vectors(machine.stack)),
        )
        super().__init__(config, machine, launch, made, page_of(config, machine.plan.max_context))
        self.layers = config.attention_layers(machine.plan.max_context)
        self.cache = KvCache(machine, launch.kv, launch.page_table, launch.kv_pages)
        self.schedule = Schedule(
            machine,
            kv_layout(self.shape, machine.gpu, machine.plan),
            *(launch.kv_plans, launch.plan_count, launch.tiles),
            kinds=len(self.layers.windows),
            steps=self.columns.advance,
        )
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

    def _experts(self) -> ExpertProducts | None:
        """The products of experts, where layers have some."""
        experts, routing = self.table.experts, self.config.routing
        if experts is None or routing is None:
            return None
        choice = Choice(self.columns, experts, routing.normalised, self.timeline)
        assert self.table.dealt is not None
        return ExpertProducts(self.linear, choice, self.matrices[self.table.dealt])

    def _normalise_heads(self, weights: ch.Expr) -> None:
        """Queries and keys are finished by who reads them."""
        what = self.machine, weights, self.config.rms_norm_eps, self.port.angles
        norms = HeadNorms(*what, plus_one=self.config.norms.plus_one)
        if self.shape.joint_norms:
            vector, m_tiles = self.table.attention.input.squares, self.shape.rotated_rows // M_TILE_ROWS

            def squares(epoch: ch.Expr, part: range) -> PublishedSquares:
                return PublishedSquares(self.columns, self.exchange.at(vector, epoch), m_tiles, part)

            norms = joint = JointNorms(*what, squares=squares, plus_one=self.config.norms.plus_one)
            self.projection.norms = joint
        self.port.heads = NormalisedHeads(self.port, self.cache, norms)

    def _variant(self) -> Variant:
        """What attention computes in a layer."""
        kind, windows, variants = self.layers.common, self.layers.windows, [CAUSAL]
        before = [ty.u32((window or EVERY_KEY) - 1) for window in windows]
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
        first, multiplier = self.table.products[0], self.config.embedding_multiplier
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

    def end_layers(self) -> None:
        """What follows belongs to no layer; its input is the last one's output."""
        self.linear.end_layers()
        self.layer_epoch = self.step_epoch + self.shape.layers

    @ch.inline
    def end_step(self, step: Any) -> None:
        """The next tokens are taken; if the launch ends, what was fetched of the next step is used up."""
        with self.machine.consumer:
            self.tokens.end_step(step, lambda: self.linear.skip(self.matrices.of_layer[0]))
        with self.machine.adding():
            self.tokens.leave_after(step)

    # -- phases ---------------------------------------------------------------------------------------------------

    def emit_line(self, line: Line, step: Any, layer: Any) -> None:
        """A phase of a layer."""
        with self.phase(line.text):
            if isinstance(line, NormBehind):
                return self.finish_kept_rows(line, layer)
            if isinstance(line, ChooseExperts):
                return self.choose_experts(line)
            if not isinstance(line, Multiply):
                return self.attend(step, layer)
            prologue, epilogue = self.input_of(line.product, layer), self.epilogue_of(line, layer)
            assert (line.waits, line.makes) == (prologue.waits, epilogue.makes), line
            self._multiply(line)(self.matrices[line.product], prologue, epilogue)

    def _multiply(self, line: Multiply) -> Callable[[MatrixLayout, Prologue, Epilogue], None]:
        """How a line's product is multiplied."""
        product = line.product
        if self.experts is None or not (product.experts or isinstance(line.then, Routes)):
            return self.linear
        if isinstance(line.then, Routes):
            return self.experts.route
        return self.experts.add if product.adds else self.experts.deal

    def choose_experts(self, line: ChooseExperts) -> None:
        """Every block's choice, of the logits that all have made."""
        assert self.experts is not None
        with self.machine.consumer:
            self.experts.choice.make(self.vector(line.phase.input))
            self.timeline.stamp_here("done")

    def attend(self, step: Any, layer: Any) -> None:
        """The block's items of the KV plan, then its merges of heads that were split."""
        machine, attention = self.machine, self.attention
        with machine.producer:
            with ch.if_((layer == 0) & (step > 0)), ch.if_(self.tokens.launch_is_over(step)):
                ch.return_()
            if self.schedule.steps.is_counted:  # which is known behind that
                with ch.if_(layer == 0):
                    self.schedule.advance(machine.producer, step)
            attention.copy(layer, step)
        with machine.consumer:
            self.port.layer = layer
            attention.attend(step, self.layer_epoch)
            self.timeline.stamp_here("attended")
            ch.comment("merge of partial states")
            attention.merge(self.layer_epoch)
            self.timeline.stamp_here("done")

    # -- vectors, prologues and epilogues -------------------------------------------------------------------------

    def vector(self, vector: Vector | None) -> Published:
        """A vector of the present layer."""
        assert vector is not None
        return self.exchange.at(vector.name, self.layer_epoch)

    def input_of(self, product: Product, layer: Any) -> Prologue:
        """What brings the input of a product of a layer; meanwhile it has what is needed behind it brought into L2."""
        places, is_first = self.places(product, layer), product is self.table.products[0]
        if is_first:
            prologue = self._input(product.input, self.layer_epoch - 1, places)
        else:
            prologue = self.made_before(product, places)
        needed = self._needed_by_heads(layer) if product is self.table.heads else []
        if product.adds:
            norms = [self.norm(self.table.norm_behind(product, layer))]
            if self.table.norm_phase(product) is not None:
                norms.append(self._norm_behind(product, layer))
            needed += [(norm.weights, self.shape.padded_hidden * 2) for norm in norms]
        return Prefetching(prologue, self.machine, needed) if needed else prologue

    def made_before(self, product: Product, places: Any) -> Prologue:
        """What a phase of the same layer made, slice by slice. Where waiting is most of a step all lanes poll the
        output of attention, since they come to it long before (qwen3-0.6b: 1.8 %); 1B loses 6 % so."""
        vector = product.input
        if vector.is_normed:
            return self._input(vector, self.layer_epoch, places)
        if vector.parts > 1:
            assert self.experts is not None
            return AllParts(self.experts.choice, self.vector(vector), vector.elements)
        polled_by_all = self.table.is_attended(vector) and self.machine.plan.waits_most
        published = replace(self.vector(vector), one_waits=not polled_by_all)
        return Slices(self.columns, published, vector.published, places)

    def epilogue_of(self, line: Multiply, layer: Any) -> PublishedRows:
        """What becomes of the rows of a line's product."""
        product = line.product
        if isinstance(line.then, Heads):
            return ProjectedHeads(self.projection, layer, self.layer_epoch)
        if isinstance(line.then, Kept):
            assert product.output is not None
            return KeepRows(self.machine, self.squares_of(product.output, self.layer_epoch))
        if isinstance(line.then, OntoResidual):
            norm = self.norm(self.table.norm_behind(product, layer))
            return self.onto_residual(product.output, norm, self.layer_epoch, line.then.multiplier)
        if isinstance(line.then, Routes):
            assert self.table.experts is not None
            return PublishedLogits(self.vector(product.output), self.table.experts)
        assert isinstance(line.then, Gated), line
        gated = self.machine, self.vector(product.output), line.then.activation
        if product.experts is None:
            return GatedRows(*gated)
        assert self.experts is not None
        return ChosenRows(*gated, self.experts.choice, self.matrices[product])

    def finish_kept_rows(self, line: NormBehind, layer: Any) -> None:
        """The norm behind a product: its rows added to the residual."""
        product = line.product
        scale = self.inverse_rms(line.phase.input, self.layer_epoch)
        norm = self.norm(self.table.norm_behind(product, layer))
        onto = self.onto_residual(line.phase.output, norm, self.layer_epoch, line.then.multiplier)
        with self.machine.consumer:
            finish_kept_rows(self.linear, self.residual, scale, self._norm_behind(product, layer), onto)
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
        return self.shape.rotated_rows if self.shape.joint_norms else 2 * self.shape.head_dim

    def _needed_by_heads(self, layer: Any) -> list[tuple[ch.Expr, int]]:
        """(address, bytes) of what the layer's projection and attention need beside its matrices."""
        vectors = {self.launch.biases: self.machine.shape.qkv_rows, self.launch.head_norms: self._head_norm_row}
        found = [(vector + layer * size, size * 2) for vector, size in vectors.items() if vector is not None]
        if self.launch.places is not None:  # of the products behind, and of the next layer's first or the head
            behind = self.table.places_row(self.table.placed[0], layer) + 1
            row = self._places_row
            found.append((self.launch.places + behind * row, len(self.table.placed) * row * 2))
        return found
