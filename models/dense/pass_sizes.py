"""What a pass over prompts has for a model and the decode kernel beside it: phases, tiles, sections of the workspace.

Numbers alone: the program is in `prompt`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cheetah.models.attention_layers import AttentionLayers
from cheetah.models.config import ModelConfig
from cheetah.models.dense.page import (
    Attend,
    ChooseExperts,
    Heads,
    Kept,
    Line,
    Multiply,
    MultiplyBoth,
    NormBehind,
    Page,
    Remember,
    Then,
    Weighed,
    page_of,
)
from cheetah.models.family import PhaseRow, layers_text
from cheetah.plan import Gpu, ModelShape, Plan, PlanError, SharedMap, StepMatrices, step_matrices
from cheetah.plan.delta_pass import DeltaPass
from cheetah.plan.expert_slots import ExpertSlots
from cheetah.plan.formats import BF16, M_TILE_ROWS, BlockRows, BlockTiles, QuantizedTiles, SparseTiles, TileFormat
from cheetah.plan.index import ceil_div
from cheetah.plan.pass_tables import SEGMENT_COLUMNS, PassRoom, pass_room
from cheetah.plan.products import ROUTES, SHARED_DOWN, Product, RowOrder, StepTable, Vector, logit_words
from cheetah.plan.prompt import LIST_SCRATCH_BYTES, STAGE_TILES, Cut, PassPlan, widest_format
from cheetah.plan.sections import Sections
from cheetah.plan.shared_memory import Region

SECTION_ALIGNMENT = 1024
MULTIPLIED = (QuantizedTiles, SparseTiles, BlockTiles, BlockRows)
"""Formats of weights beside bf16."""
HIDDEN = "hidden"
"""The section of all vectors that the residual is published as."""
RESIDUAL_SECTIONS = ("residual", HIDDEN, "squares")
HEAD_SECTIONS = ("queries", "keys", "values")
PARTS, JOINT, KEPT = ("parts",), ("head_squares",), ("row_squares",)
CHOICES = ("chosen", "experts", "expert_weights")
"""What tokens chose: a bit for each token and expert; every token's experts, and their weights."""
SLOTS = ("slots", "slot_factors")
"""Every token's slots with its experts, and by what the sums of a slot are multiplied."""
SORTED, EXPERT_ROWS = ("hidden_by_expert",), ("expert_rows",)
"""The tokens' vectors in their slots, and what experts make of them."""

MIXED, OF_DELTA = ("mixed",), ("delta_keys", "delta_values", "delta_numbers")
"""The rows of the product of Gated DeltaNet, and what lies between its other phases: see `cheetah.plan.delta_pass`."""


def section_of(vector: Vector) -> str:
    """The section of the workspace in which a vector lies."""
    return HIDDEN if vector.is_normed else vector.name


def input_section(product: Product) -> str:
    """That in which a product's input lies."""
    of_all = section_of(product.input)
    return SORTED[0] if product.experts is not None and of_all == HIDDEN else of_all


def sections_of_rows(then: Then, product: Product) -> tuple[str, ...]:
    """The sections into which the rows of a product go."""
    if isinstance(then, Heads):
        # Gates wait where that will lie which they are multiplied with.
        return HEAD_SECTIONS + ("attention",) * then.kind.gated
    if isinstance(then, Weighed):
        return RESIDUAL_SECTIONS[:1]
    assert product.output is not None, product
    return RESIDUAL_SECTIONS if product.adds else (section_of(product.output),)


def _of_one_product(lines: Sequence[Line]) -> list[Line]:
    """The same lines, but two in the place of one with two products."""
    found: list[Line] = []
    for line in lines:
        if isinstance(line, MultiplyBoth):
            found += [Multiply(product, line.then, line.has_norm) for product in (line.product, line.beside)]
        else:
            found.append(line)
    return found


@dataclass(frozen=True)
class PassPhase:
    """A phase of a layer: a line of the model's page. is_stored: it stores the sums of parts of the line's product, or
    what each of a token's experts made; adds: it adds them. is_sort: tokens go to the experts that the line chose.
    is_joint: there is one part, which is stored since norms go over more than a tile; rows that go
    through a norm before they are added to the residual are stored in one line's phase and added in another's.
    is_mixing, is_norm: what comes before and behind what Gated DeltaNet remembers."""

    line: Line
    is_stored: bool = False
    adds: bool = False
    is_joint: bool = False
    is_sort: bool = False
    is_mixing: bool = False
    is_norm: bool = False

    @property
    def name(self) -> str:
        if self.is_sort:
            return "sort"
        if self.is_mixing or self.is_norm:
            return f"{self.line.name}-{'mixing' if self.is_mixing else 'norms'}"
        return f"{self.line.name}-sums" if self.adds and not isinstance(self.line, NormBehind) else self.line.name

    @property
    def product(self) -> Product | None:
        """None of attention, and of what comes before experts."""
        return self.line.product if isinstance(self.line, Multiply | NormBehind) else None

    @property
    def waits(self) -> tuple[str, ...]:
        """The sections of the workspace that it reads."""
        if isinstance(self.line, NormBehind):
            return PARTS + KEPT + RESIDUAL_SECTIONS[:1]
        if isinstance(self.line, ChooseExperts):
            return CHOICES + RESIDUAL_SECTIONS[1:] if self.is_sort else self.line.waits
        if isinstance(self.line, Remember):
            return MIXED if self.is_mixing else MIXED + OF_DELTA[1:2] if self.is_norm else OF_DELTA + MIXED
        if not isinstance(self.line, Multiply):
            gates = isinstance(self.line, Attend) and self.line.kind.gated
            return HEAD_SECTIONS + self.line.makes[-1:] * gates
        product = self.line.product
        residual = RESIDUAL_SECTIONS[:1] if product.adds and not self.is_stored else ()
        of_input = (input_section(product),)
        if product.experts is not None:
            return (EXPERT_ROWS + SLOTS[:1] if self.adds else of_input + SLOTS[1:] * product.input.is_normed) + residual
        scales = self.is_joint if self.is_stored else not self.is_joint
        squares = RESIDUAL_SECTIONS[2:] if product.input.is_normed and scales else ()
        logits = (ROUTES,) if isinstance(self.line.then, Weighed) else ()
        return (self._parts if self.adds else of_input) + squares + logits + residual

    @property
    def _parts(self) -> tuple[str, ...]:
        if not self.is_joint:
            return PARTS
        is_kept = isinstance(self.line, Multiply) and isinstance(self.line.then, Kept)
        return PARTS + (KEPT if is_kept else JOINT)

    @property
    def makes(self) -> tuple[str, ...]:
        """Those that it writes."""
        if isinstance(self.line, NormBehind):
            return RESIDUAL_SECTIONS
        if isinstance(self.line, ChooseExperts):
            return SORTED + SLOTS if self.is_sort else CHOICES
        if isinstance(self.line, Remember) and not self.is_norm:
            return OF_DELTA if self.is_mixing else OF_DELTA[1:2]
        if isinstance(self.line, Remember):
            return (self.line.phase.output.name,)
        if not isinstance(self.line, Multiply):
            return self.line.makes[-1:]
        if self.is_stored and self.line.product.experts is not None:
            return EXPERT_ROWS
        return self._parts if self.is_stored else sections_of_rows(self.line.then, self.line.product)


@dataclass(frozen=True)
class PassSizes:
    """A pass for a decode kernel's buffers: plan is that kernel's."""

    config: ModelConfig
    gpu: Gpu
    plan: Plan
    pass_plan: PassPlan

    def __post_init__(self) -> None:
        self._check_model()
        plan, shape = self.pass_plan, self.shape
        if plan.tokens % SEGMENT_COLUMNS:
            raise PlanError(f"a pass of {plan.tokens} tokens: give a multiple of {SEGMENT_COLUMNS}")
        if 4 * self.key_tile * shape.head_dim > plan.stage_bytes(self.format):
            raise PlanError(f"a stage of {plan.stage_bytes(self.format)} bytes has no room for {self.key_tile} keys")

    def _check_model(self) -> None:
        if self.config.drafter is not None:
            raise PlanError("a pass begins with embeddings: a head that drafts reads prompts in steps")
        if self.shape.delta is not None and self.gpu.ranks > 1:
            raise PlanError("passes over layers of Gated DeltaNet are one GPU's: several read prompts in steps")
        if self.config.has_out_biases and (self.shape.norms_behind or self.config.residual_multiplier != 1):
            raise PlanError("a pass adds o's biases to the residual, and knows no norm or multiplier between")
        if self.shape.experts is not None:
            self._check_experts()
        for layout in self.matrices.of_layer:
            if not (layout.format == BF16 or isinstance(layout.format, MULTIPLIED)):
                raise PlanError(
                    f"a pass multiplies weights in bf16, quantised and sparse ones, and not those of {layout.name} in "
                    f"{layout.format.name}"
                )
            self.pass_plan.check(layout)
        self._check_ranks()
        if len({min(STAGE_TILES, PassPlan.vector_tiles(layout)) for layout in self.matrices.of_layer}) > 1:
            narrow = min(self.matrices.of_layer, key=PassPlan.vector_tiles)
            raise PlanError(f"products that share a main loop have two K-tiles or more each; {narrow.name} has one")

    def _check_ranks(self) -> None:
        """Squares are summed over a tile's rows first: in the order of one GPU where each has whole tiles."""
        ranks, tile_rows, rows = self.gpu.ranks, self.pass_plan.tile_m_tiles * M_TILE_ROWS, self.shape.hidden
        if ranks > 1 and self.plan.kv_chunk and rows % (ranks * tile_rows):
            raise PlanError(
                f"with a fixed kv_chunk a pass by {ranks} GPUs has the bits of one where the {rows} rows of the "
                f"residual are whole tiles of {tile_rows} on each: prompts are read in steps"
            )
        for product in self.table.products:
            layout, is_whole = self.matrices[product], product.output is not None and product.output.is_words
            if ranks > 1 and not is_whole and layout.rows % M_TILE_ROWS:  # of two narrow M-tiles a pass makes one
                raise PlanError(
                    f"a pass by {ranks} GPUs takes whole M-tiles, and {layout.name} has {layout.rows} rows on each"
                )

    def _check_experts(self) -> None:
        if self.shape.norms_behind:
            raise PlanError("a pass adds what experts make to the residual, and knows no norm behind them")
        formats = [product.format for product in self.table.products if product.experts is not None]
        if not all(format == BF16 or isinstance(format, QuantizedTiles) for format in formats):
            raise PlanError("a pass multiplies experts in bf16 or quantised ones: prompts of others are read in steps")

    @property
    def format(self) -> TileFormat:
        """Of the weights of a layer, that which takes most of a stage."""
        return widest_format(self.matrices.of_layer, self.pass_plan.whole_tiles)

    @property
    def shared(self) -> SharedMap:
        """The arena of a block."""
        others = () if self.slots is None else self.slots.regions
        if any(layout.format.list_units for layout in self.matrices.of_layer):
            others += (Region("list_operands", self.pass_plan.consumer_warps * LIST_SCRATCH_BYTES),)
        return self.pass_plan.shared(self.format, self.gpu.shared_bytes, others)

    @property
    def slots(self) -> ExpertSlots | None:
        """Those that tokens have with their experts, if there are any."""
        return None if self.shape.experts is None else ExpertSlots(self.pass_plan, self.shape.experts)

    @property
    def delta(self) -> DeltaPass | None:
        """What lies between the phases of Gated DeltaNet, if there are any."""
        heads, stage = self.shape.delta, self.pass_plan.stage_bytes(self.format)
        return None if heads is None else DeltaPass(heads, self.pass_plan.tokens, stage)

    @property
    def key_tile(self) -> int:
        """Keys of a stage in attention."""
        return self.pass_plan.key_tile

    @property
    def layers(self) -> AttentionLayers:
        """What attention does in each layer."""
        return self.config.attention_layers(self.plan.max_context)

    @property
    def shape(self) -> ModelShape:
        """What a rank has of the model: its heads and their cache."""
        return self.config.shape.of_rank(self.gpu.ranks)

    @property
    def table(self) -> StepTable:
        return self.config.shape.table

    @property
    def matrices(self) -> StepMatrices:
        return step_matrices(self.config.shape, self.plan, self.gpu)

    def parts(self, product: Product) -> int:
        """Parts of k that it is cut into."""
        return self._cut(product).parts

    def height(self, product: Product) -> int | None:
        """M-tiles of its tiles, if fewer than there is room for; else None."""
        height = self._cut(product).height
        return height if height < self.pass_plan.tile_m_tiles else None

    @property
    def has_joint_norms(self) -> bool:
        """Whether queries and keys go through norms over more rows than a tile has."""
        tile_rows = self.pass_plan.tile_m_tiles * M_TILE_ROWS
        return self.shape.joint_norms or (self.config.head_norms is not None and tile_rows < self.shape.head_dim)

    def is_joint(self, product: Product) -> bool:
        """Whether norms come behind a product that go over more rows than a tile has."""
        return self.is_kept(product) or (product.order is RowOrder.HEADS and self.has_joint_norms)

    def is_kept(self, product: Product) -> bool:
        """Whether its rows go through a norm before they are added to the residual."""
        return self.table.norm_phase(product) is not None

    def _cut(self, product: Product) -> Cut:
        """Behind products onto the residual come sums of squares over a tile's rows, in heads with norms their own.
        Where those go over more than a tile it is not cut: parts have none; nor where sums are weighed before they are
        added."""
        if self.is_joint(product) or product.experts is not None or product.name == SHARED_DOWN:
            return Cut(self.pass_plan.tile_m_tiles)
        sums_over_tile = product.adds or (product.order is RowOrder.HEADS and self.config.head_norms is not None)
        return self.pass_plan.cut(self.matrices[product], self.gpu.blocks, sums_over_tile)

    def phases_of(self, line: Line) -> list[PassPhase]:
        """A line's: two of a product that is cut, or behind which norms come that go over more than a tile; of experts
        two of their choice, and two of what is added up."""
        if isinstance(line, ChooseExperts):
            return [PassPhase(line), PassPhase(line, is_sort=True)]
        if isinstance(line, Remember):
            return [PassPhase(line, is_mixing=True), PassPhase(line), PassPhase(line, is_norm=True)]
        if isinstance(line, Multiply) and line.product.experts is not None and line.product.adds:
            return [PassPhase(line, is_stored=True), PassPhase(line, adds=True)]
        if isinstance(line, NormBehind):
            return [PassPhase(line, adds=True, is_joint=True)]
        if isinstance(line, Multiply) and self.is_kept(line.product):
            return [PassPhase(line, is_stored=True, is_joint=True)]
        if not isinstance(line, Multiply) or (self.parts(line.product) == 1 and not self.is_joint(line.product)):
            return [PassPhase(line)]
        is_joint = self.is_joint(line.product)
        return [PassPhase(line, is_stored=True, is_joint=is_joint), PassPhase(line, adds=True, is_joint=is_joint)]

    @property
    def page(self) -> Page:
        """The model's."""
        return page_of(self.config, self.plan.max_context)

    @property
    def phases(self) -> list[PassPhase]:
        """Phases of a layer, in order; where there are layers of Gated DeltaNet those of attention alone, then those of
        Gated DeltaNet alone, then those that all layers have."""
        return self.own_phases(False) + self.own_phases(True) + self._phases_of(self.page.common)

    def own_phases(self, of_delta: bool) -> list[PassPhase]:
        """Those that layers of Gated DeltaNet, or the others, have alone; none where all layers are of one kind."""
        return self._phases_of(self.own_lines(of_delta))

    def own_lines(self, of_delta: bool) -> list[Line]:
        """Theirs; of two products of one line each has its own."""
        lines = self.page.delta if of_delta else self.page.layer
        return _of_one_product([line for line in lines if line not in self.page.common])

    def _phases_of(self, lines: Sequence[Line]) -> list[PassPhase]:
        return [phase for line in lines for phase in self.phases_of(line)]

    def phases_of_layer(self, layer: int) -> list[PassPhase]:
        """Those of one layer."""
        return self._phases_of(_of_one_product(self.page.kinds[self.page.kind_of_layer[layer]]))

    @property
    def key_phase_count(self) -> int:
        """Phases of the last layer where keys and values, or what sequences remember, are all that is wanted of it:
        those before attention, or with what Gated DeltaNet does up to its norms."""
        last = self.phases_of_layer(self.config.layers - 1)
        return next(index for index, phase in enumerate(last) if isinstance(phase.line, Attend) or phase.is_norm)

    def index_of(self, product: Product | None) -> int:
        """The number of a product's first phase; None: that of attention."""
        return next(index for index, phase in enumerate(self.phases) if phase.product == product)

    @property
    def rows(self) -> tuple[PhaseRow, ...]:
        """The phases as people read them: `waits` and `makes` are sections of the workspace."""
        makes = ", ".join(RESIDUAL_SECTIONS)
        return (
            PhaseRow("once", "embedding", "", "", makes, "The tokens' embeddings."),
            *(self._row(phase, self._layers_of(phase)) for phase in self.phases),
            PhaseRow("once", "hidden states", RESIDUAL_SECTIONS[0], "", "", "Of the columns that are wanted."),
        )

    def _layers_of(self, phase: PassPhase) -> str:
        if phase.line in self.page.common:
            return layers_text(range(self.config.layers))
        deltas, of_delta = self.page.delta_layers, phase.line in self.own_lines(True)
        return layers_text([one for one in range(self.config.layers) if (one in deltas) == of_delta])

    def _row(self, phase: PassPhase, when: str) -> PhaseRow:
        about, matrix = phase.line.about, phase.line.matrix
        if phase.is_sort:
            about = "Every token's vector to the slots that it has with its experts, and the list of their tiles."
        elif isinstance(phase.line, ChooseExperts):
            pass
        elif isinstance(phase.line, Remember):
            heads = phase.line.phase.heads
            about = f"Gated DeltaNet of {heads.value_heads} value heads on {heads.key_heads} key heads, token by token."
            if phase.is_mixing:
                about = "Queries, keys and values of the rows of four tokens; how much is written and kept."
            elif phase.is_norm:
                about = "Norms of what heads make, times their gates."
        elif phase.product is None:
            about = "Attention over the keys of the cache, which are those of the pass too."
        elif phase.is_stored and phase.is_joint:
            about = "Stored, beside sums of their squares: norms go over more rows than a tile has."
        elif phase.is_stored and phase.product.experts is not None:
            about = "What each expert makes of its slots."
        elif phase.is_stored:
            about = f"Parts of k, {self.parts(phase.product)} of them."
        if phase.adds:
            what = "What was stored" if phase.is_joint else "The parts added up"
            if phase.product is not None and phase.product.experts is not None:
                what = "What a token's experts made, ascending, added up"
            about, matrix = f"{what}: {phase.line.about}", ""
        return PhaseRow(when, phase.name, ", ".join(phase.waits), matrix, ", ".join(phase.makes), about)

    @property
    def phase_count(self) -> int:
        """Meetings of a launch's blocks where hidden states are wanted."""
        return 1 + sum(len(self.phases_of_layer(layer)) for layer in range(self.config.layers)) + 1

    @property
    def phase_names(self) -> tuple[str, ...]:
        """The phases of such a launch, as its timeline counts them."""
        layers = range(self.config.layers)
        named = (f"layer {layer} {phase.name}" for layer in layers for phase in self.phases_of_layer(layer))
        return ("embedding", *named, "hidden states")

    @property
    def room(self) -> PassRoom:
        """What a launch has room for; gives a launch's tables."""
        return pass_room(self.plan, self.pass_plan, self.shape.head_dim)

    @property
    def hidden_m_tiles(self) -> int:
        """Of the residual stream, a rank's."""
        return ceil_div(ceil_div(self.shape.hidden, M_TILE_ROWS), self.gpu.ranks)

    @property
    def row_tiles(self) -> int:
        """Tiles of the residual stream's rows, each with sums of squares: all ranks'."""
        return self.gpu.ranks * ceil_div(self.hidden_m_tiles, self.pass_plan.tile_m_tiles)

    @property
    def sections(self) -> Sections[str]:
        """Of the workspace, in bytes. Columns that pad a K-tile stay zero: nobody writes them."""
        plan, shape, matrices = self.pass_plan, self.shape, self.matrices
        keys = shape.kv_heads * self.room.key_rows * shape.head_dim * 2
        # A tile of attention reads as many queries as it may have, also where a segment has fewer.
        columns: dict[str, int] = {}
        for product in self.table.products:
            for name in (section_of(product.input), input_section(product)):
                columns[name] = max(columns.get(name, 0), matrices[product].padded_columns)
        of_slots = {input_section(product) for product in self.table.products if product.experts is not None}
        query_columns = shape.heads * plan.tokens + self.room.tile_tokens
        sizes = {
            "counter": 8,
            "residual": 4 * plan.residual_floats(self.hidden_m_tiles),
            HIDDEN: plan.activation_bytes(columns.pop(HIDDEN)),
            "squares": 4 * plan.tokens * self.row_tiles,
            "queries": query_columns * shape.head_dim * 2,
            "keys": keys,
            "values": keys,
            **{
                name: (plan if self.slots is None or name not in of_slots else self.slots.of_slots).activation_bytes(
                    count
                )
                for name, count in columns.items()
            },
            "parts": 4 * plan.residual_floats(max(self._part_m_tiles())),
            **({KEPT[0]: 4 * plan.tokens * self.row_tiles} if shape.norms_behind else {}),
            **({JOINT[0]: 4 * plan.tokens * self._spans} if self.has_joint_norms else {}),
            **({} if self.slots is None else self._sections_of_experts(self.slots)),
            **({} if self.delta is None else self.delta.sections),
        }
        return Sections(sizes, SECTION_ALIGNMENT)

    def _sections_of_experts(self, slots: ExpertSlots) -> dict[str, int]:
        experts, tokens = slots.experts, self.pass_plan.tokens
        of_ranks = 4 * tokens * experts.chosen
        return {
            "routes": 4 * tokens * logit_words(experts),
            **dict(zip(CHOICES, (4 * experts.count * slots.words, of_ranks, of_ranks), strict=True)),
            **dict(zip(SLOTS, (of_ranks, 8 * slots.slots), strict=True)),
            EXPERT_ROWS[0]: 2 * slots.slots * self.expert_width,
        }

    @property
    def expert_width(self) -> int:
        """Rows that an expert makes, with those that fill its last M-tile."""
        return self.hidden_m_tiles * M_TILE_ROWS

    def _part_m_tiles(self) -> Iterator[int]:
        """M-tiles of all parts of each product that is stored."""
        for product in self.table.products:
            parts = self.parts(product)
            is_stored = parts > 1 or self.is_joint(product)  # what experts make has a section of its own
            yield parts * self.matrices[product].full_m_tiles if is_stored else 0

    @property
    def _spans(self) -> int:
        """Of whose rows there are sums of squares: those of q, k and v in a tile, or of a head of it; with norms over
        all heads those of all ranks' queries and keys, and behind them this one's values."""
        span, others = self.pass_plan.span_m_tiles(self.shape.head_dim), 0
        if self.shape.joint_norms:
            others = (self.gpu.ranks - 1) * self.shape.rotated_rows // (span * M_TILE_ROWS)
        return others + ceil_div(self.matrices[self.table.heads].full_m_tiles, span)
