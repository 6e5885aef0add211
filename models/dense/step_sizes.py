"""Numbers of a decode step: the sizes of the vectors that its phases exchange, and in which form they are published;
the lengths that the kernel's parameters have."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cheetah.blocks.adjustments import mask_words
from cheetah.blocks.attention.core import LSE_WORDS
from cheetah.blocks.columns import vector_words
from cheetah.blocks.exchange_kinds import exchange_kind
from cheetah.blocks.linear.formats.vectors import is_of_pairs
from cheetah.blocks.linear.rms import squares_words
from cheetah.blocks.lookup import history_room
from cheetah.models.act_order import places_shape
from cheetah.models.config import ModelConfig
from cheetah.models.dense.page import page_of_plan
from cheetah.plan import M_TILE_ROWS, Gpu, ModelShape, Plan, step_matrices
from cheetah.plan.delta import PARTS, TAPS, state_slots
from cheetah.plan.formats import BF16_VECTOR, KV_TILE_TOKENS, BlockRows
from cheetah.plan.index import round_up
from cheetah.plan.k_parts import k_parts, parts_vector, parts_words
from cheetah.plan.kv import KvPlanLayout, max_plans
from cheetah.plan.kv.tables import ROUND_WORDS
from cheetah.plan.narrow import residual_m_tiles
from cheetah.plan.products import STEP_EXCHANGES, AttentionPhase, DeltaPhase, Product, StepTable, Vector
from cheetah.plan.regions import FILTER_WORDS, listed_tokens
from cheetah.plan.world import world_of

_OF_HEADS = (AttentionPhase, DeltaPhase)
"""Phases that read what a rank's own heads make."""


def kv_layout(shape: ModelShape, gpu: Gpu, plan: Plan) -> KvPlanLayout:
    """How the KV plans of a launch are encoded: the same of all ranks, over the KV heads of each."""
    return KvPlanLayout.for_step(plan, shape.of_rank(gpu.ranks), gpu.blocks)


def exchange_sizes(shape: ModelShape, gpu: Gpu, plan: Plan) -> dict[str, int]:
    """Payload words of each exchanged vector; the inputs of products with the padding of their matrix."""
    table, of_rank, sizes = shape.table, shape.of_rank(gpu.ranks).table, dict[str, int]()
    of_heads = (phase.input for phase in (*of_rank.delta, *of_rank.layer) if isinstance(phase, _OF_HEADS))
    own = {vector.name: vector for vector in of_heads}
    for phase in (*table.delta, *table.layer):
        if not (phase.input.is_kept or phase.input.is_given):
            sizes[phase.input.name] = _words_of(table, own.get(phase.input.name, phase.input), plan)
        if isinstance(phase, AttentionPhase):
            partial_rows = kv_layout(shape, gpu, plan).max_partial_rows
            sizes[phase.partials] = partial_rows * (shape.head_dim + LSE_WORDS)
        if isinstance(phase, DeltaPhase):
            sizes[phase.squares] = plan.tokens * phase.heads.value_heads * PARTS
    words = squares_words(residual_m_tiles(shape, gpu), plan.tokens)
    squares = {vector.squares: words for vector in table.normed}
    if (heads := table.attention.input).has_squares:
        squares[heads.squares] = squares_words(shape.rotated_rows // M_TILE_ROWS, plan.tokens)
    matrices = step_matrices(shape, plan, gpu)
    shared = {product: k_parts(product, matrices[product], plan, gpu) for product in table.onto_residual}
    parts = {parts_vector(one): parts_words(matrices[one], count) for one, count in shared.items() if count > 1}
    return {**sizes, **squares, **parts, **_sampling_sizes(gpu, plan)}


def _words_of(table: StepTable, vector: Vector, plan: Plan) -> int:
    if vector.is_words:
        return plan.tokens * round_up(vector.elements, M_TILE_ROWS)
    readers = table.inputs.get(vector)
    if readers is None:
        return plan.tokens * vector.elements // 2
    columns = max(product.format.columns for product in readers)
    return vector.parts * vector_words(round_up(vector.elements, columns), plan.tokens)


def own_vectors(table: StepTable) -> tuple[str, ...]:
    """Those that a rank makes for itself, as those of its own heads; the squares of these are of all ranks' heads."""
    made = (product.output for product in table.products if product.is_own and product.output is not None)
    parts = map(parts_vector, table.onto_residual)
    return *(vector.name for vector in made), table.attention.partials, *parts


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
        first, *others = (matrices[product] for product in readers)
        return all(one.owners <= first.owners if one.is_once else one.owners == first.owners for one in others)

    inputs = shape.table.inputs.items()
    return {one.name: one.exponent for one, readers in inputs if is_read_as_published(readers)}


def published_kinds(config: ModelConfig, plan: Plan) -> dict[str, str]:
    """As what the inputs of products are published where the copy engine brings them: as the first matrix wants them,
    if that and what others want can be said of each pair by itself, and nobody orders them before."""
    kinds, table = {}, config.shape.table
    normed_by_readers = None if table.delta_phase is None else table.delta_phase.output
    for vector, readers in table.inputs.items():
        if vector.parts > 1 or vector == normed_by_readers:
            continue  # threads read it
        wanted = [product.vector_kind(plan) for product in readers]
        is_ordered = any(product.is_placed and config.is_ordered(product.name) for product in readers)
        can_be_said = not is_ordered and all(map(is_of_pairs, wanted))
        if len(set(wanted)) > 1 and any(isinstance(product.format, BlockRows) for product in readers):
            can_be_said = False  # all warps multiply all of it, so none can convert it
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
    return exchange_kind(plan.sync).size_bytes(exchanged, inputs)


def sizes(config: ModelConfig, gpu: Gpu, plan: Plan) -> dict[str, int]:
    """The sizes that the shapes of the kernel's parameters name: a rank's."""
    shape, rank = config.shape, config.shape.of_rank(gpu.ranks)
    layout, windows = kv_layout(shape, gpu, plan), shape.windows_in(plan.max_context)
    return {
        **rank.sizes,
        "qkv_rows": rank.qkv_rows,
        "rotated_rows": shape.rotated_rows,
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
        "mask_rows": plan.batch + plan.tokens,
        "exchange_bytes": workspace_bytes(exchange_sizes(shape, gpu, plan), plan, product_inputs(shape, gpu, plan)),
        "token_room": plan.launch_tokens + 1,
        "history_room": history_room(plan),
        "round_words": ROUND_WORDS + plan.tokens,
        "tap_rows": plan.launch_tokens,
        "taps": len(plan.tapped_layers),
        "tapped": 0 if shape.drafter is None else shape.drafter.taps,
        "head_rows": round_up(shape.head_rows, M_TILE_ROWS * gpu.ranks),
        "blocks": gpu.blocks,
        "phases": len(phase_names(config, plan)),
        "router_row": router_row_elements(shape),
        **_bias_rows(shape),
        **_delta_sizes(rank, plan),
        **dict(zip(("ordered_inputs", "longest_input"), places_shape(config), strict=True)),
    }


def _delta_sizes(shape: ModelShape, plan: Plan) -> dict[str, int]:
    """Of layers of Gated DeltaNet; and how many layers have attention, where not all do."""
    heads = shape.delta
    if heads is None:
        return {}
    return {
        "attention_layers": shape.attention_layers,
        "delta_layers": len(heads.layers),
        "channels": heads.channels,
        "mixed_tokens": TAPS,
        "delta_numbers": heads.numbers,
        "state_slots": state_slots(plan.batch),
        "shares": heads.shares,
        "share_words": heads.share_words,
        "record_words": heads.record_words,
    }


def phase_names(config: ModelConfig, plan: Plan) -> tuple[str, ...]:
    """The phases of a step, as `progress` counts them."""
    return page_of_plan(config, plan).names.names


def router_row_elements(shape: ModelShape) -> int:
    """Elements of an expert's row of a fused router: for the residual, then for what attention makes, each padded. 0 of
    models without experts."""
    heads, o = shape.table.heads, shape.table.onto_residual[0]
    return 0 if shape.experts is None else heads.input.padded + o.input.padded


def _bias_rows(shape: ModelShape) -> dict[str, int]:
    """Rows of matrices, with those that fill the last M-tile."""
    rows = {"o_rows": round_up(shape.hidden, M_TILE_ROWS)}
    if shape.experts is None:
        return rows
    count = shape.experts.count
    of_experts = {"router_rows": round_up(count, M_TILE_ROWS), "gate_up_rows": shape.table.named("gate_up").rows}
    return {**rows, "experts": count, **of_experts}
