"""What a block keeps in shared memory beside the ring: every region with its bytes, and which lie over which."""

from collections.abc import Callable, Iterator, Sequence

from cheetah.plan.delta import COLUMNS as COLUMNS_OF_SHARE
from cheetah.plan.errors import PlanError
from cheetah.plan.formats import BY_WARPS, KV_TILE_TOKENS, M_TILE_ROWS
from cheetah.plan.gpu import Gpu
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.layout import slice_columns
from cheetah.plan.narrow import residual_split, residual_tile_rows
from cheetah.plan.plan import COLUMNS, VECTOR_PIECES, Plan
from cheetah.plan.products import EXPERT_LIST, ROUTER, Experts, Product
from cheetah.plan.shape import ModelShape
from cheetah.plan.shared_memory import BULK_ALIGNMENT, Region, SharedMap, ring_regions
from cheetah.plan.world import world_of

ATTENTION_SLICE_DIMS = 64
"""Dims of a head's output that the consumer warps fold at a time, or twice as many."""
KEPT_ITEMS, KEPT_ITEM_BYTES = 4, 64
"""Items of a block whose records stay in shared memory, and the bytes of one with its tile."""
KEPT_SOURCES, KEPT_MERGE_BYTES = 20, 128
"""Of a merge, the sources that stay there, and the bytes of its record with its tile and those."""
FILTER_WORDS = 16
"""Words that a block publishes of a filtered column in a round, and that it keeps of it."""
NGRAM_TOKENS = 32
"""Most tokens of an n-gram that drafts are looked up behind."""
LIST_ROW_WORDS = 36
"""Room of a short list: of 8 tokens 4 words each, and two more."""

Reserve = Callable[[ModelShape, Plan, Gpu], Sequence[Region]]
"""Gives the regions of shared memory that a kernel needs beside the ring."""


def kernel_regions(shape: ModelShape, plan: Plan, gpu: Gpu) -> tuple[Region, ...]:
    """What a block keeps in shared memory beside the ring.

    scratch: the input of a product (bf16), or what attention needs, or all blocks' candidates, or what filters need.
    reductions: buffers of the warps' row sums, with two mbarriers each, and two more. vector_sums: of the
    vectors, for zero points. Only products use these two, as the input, behind which they lie if there is room.
    vector_barriers: an mbarrier for each piece of a vector that is copied. residual: the block's rows (f32). made: rows
    that are to be added to it, behind a norm. rope: cos and sin of every token's position, by each table. head_scales:
    1/rms of every token's queries, and of its keys. warp_candidates: of every group of adding warps and column.
    dealt: the router's input as experts take it, where that differs from what the router has in the region vector.
    columns: what the step's tokens are. experts, with others: see `expert_regions`. chosen: what was sampled.
    step_done: two mbarriers. next_token: of every column, then whether the launch ends.
    Where drafts are verified, done: how far sequences are, in two copies, and how many tokens were drafted for each;
    lookup: what is looked up.
    """
    if not plan.adding_warps:
        raise PlanError("Plan: adding_warps is 0: nobody would finish the rows of products: give 1 or more")
    vector_bytes = longest_vector_bytes(shape, plan, gpu)
    attention = attention_regions(shape.of_rank(gpu.ranks), plan, vector_bytes)
    candidates = world_of(gpu).blocks * max(plan.tokens, 2) * 8
    filtering = filter_regions(plan, gpu, candidates)
    residual_rows = residual_split(shape, gpu).waves * residual_tile_rows(shape, gpu)
    filters = filtering[-1].skip + filtering[-1].nbytes
    scratch = max(vector_bytes, sum(region.nbytes for region in attention), filters)
    reductions = plan.reductions * plan.consumer_warps * plan.warp_sums * 4
    of_products = {"reductions": reductions, "vector_sums": vector_sums_bytes(shape, plan, gpu)}
    return (
        Region("scratch", scratch, BULK_ALIGNMENT),
        Region("vector", vector_bytes, BULK_ALIGNMENT, over="scratch"),
        *_dealt_region(shape, plan),
        Region("candidates", candidates, BULK_ALIGNMENT, over="scratch"),
        *filtering,
        *attention,
        *_delta_regions(shape),
        *_behind_vector(of_products, vector_bytes, scratch),
        Region("reduction_barriers", (2 * plan.reductions + 2) * 8),
        *([Region("vector_barriers", VECTOR_PIECES * 8)] if plan.sync == "barrier" else []),
        Region("residual", residual_rows * plan.tokens * 4),
        *([Region("made", residual_rows * plan.tokens * 4)] if shape.norms_behind else []),
        Region("rope", shape.rotations * plan.tokens * shape.head_dim * 4),
        *([Region("head_scales", 2 * plan.tokens * 4)] if shape.joint_norms else []),
        *attention_records(plan, len(shape.windows_in(plan.max_context))),
        Region("warp_candidates", plan.finishing_groups * plan.tokens * 8),
        Region("columns", plan.tokens * 9 * 4),
        Region("chosen", plan.tokens * 4),
        *expert_regions(shape.experts, plan.tokens),
        *_fused_router_regions(shape, plan, gpu),
        Region("step_done", 16),
        Region("next_token", (plan.tokens + 1) * 4),
        *([Region("done", (3 * plan.batch + 2) * 4), Region("lookup", lookup_words(plan) * 4)] if plan.drafts else []),
    )


def _delta_regions(shape: ModelShape) -> tuple[Region, ...]:
    """Of Gated DeltaNet, over the region `scratch`: a column's numbers of a share (f32), query, key and values, gates,
    how much of each head is written and kept; then what comes of them, and its squares."""
    heads = shape.delta
    if heads is None:
        return ()
    mixed = (heads.share_channels + heads.shared * (COLUMNS_OF_SHARE + 2)) * 4
    skip = round_up(mixed, BULK_ALIGNMENT)
    return (
        Region("delta_mixed", mixed, BULK_ALIGNMENT, over="scratch"),
        Region("delta_made", 2 * heads.shared * COLUMNS_OF_SHARE * 4, BULK_ALIGNMENT, over="scratch", skip=skip),
    )


def expert_regions(experts: Experts | None, tokens: int) -> tuple[Region, ...]:
    """The experts that some column chose, with two mbarriers; of every column the rank of each expert, and its weights;
    see `cheetah.blocks.experts.choice`."""
    if experts is None:
        return ()
    return (
        Region(EXPERT_LIST, (1 + experts.most(tokens)) * 4),
        Region(f"{EXPERT_LIST}_barriers", 16),
        Region("expert_ranks", experts.count * tokens),
        Region("expert_weights", (experts.chosen + (experts.shared > 0)) * tokens * 4),
    )


def _fused_router_regions(shape: ModelShape, plan: Plan, gpu: Gpu) -> tuple[Region, ...]:
    """routed: of every consumer thread, what it has of the block's logits before attention (f32); routed_sums: of every
    warp, what its threads have in the end."""
    if not plan.fused_router or shape.experts is None:
        return ()
    nbytes = ceil_div(shape.experts.count, residual_split(shape, gpu).width(0)) * plan.consumer_warps * 4
    return Region("routed", 32 * nbytes), Region("routed_sums", nbytes)


def lookup_words(plan: Plan) -> int:
    """The n-gram that is looked up, and where each consumer warp found it."""
    return NGRAM_TOKENS + plan.consumer_warps


def _behind_vector(sizes: dict[str, int], first: int, scratch: int) -> Iterator[Region]:
    """Regions of the region `scratch`, from byte `first` on, as long as they fit there; the others beside it."""
    for name, nbytes in sizes.items():
        skip = round_up(first, 16)
        if nbytes and skip + nbytes <= scratch:
            yield Region(name, nbytes, over="scratch", skip=skip)
            first = skip + nbytes
        elif nbytes:
            yield Region(name, nbytes)


def listed_tokens(tokens: int, ranks: int) -> int:
    """Tokens of a block's short list, where a step has so many. With 8 in each of 132 lists the 300 highest of all are
    mostly listed, with 4 the 60 highest. Several ranks have as many lists more."""
    return 8 if tokens == 1 and ranks == 1 else 4


def filter_regions(plan: Plan, gpu: Gpu, candidates: int) -> tuple[Region, ...]:
    """What filters need, over the region `scratch`.

    listed: of all blocks' listed tokens two numbers (f32), of a column that a warp works on; over the candidates, that
    are used no more then. list_rows: a list of every warp. filters: what is known of every column; filter_sums: its
    warps' sums, of this block and of all."""
    sizes = {
        "listed": min(plan.tokens, plan.consumer_warps)
        * world_of(gpu).blocks
        * listed_tokens(plan.tokens, gpu.ranks)
        * 8,
        "list_rows": plan.consumer_warps * LIST_ROW_WORDS * 4,
        "filters": plan.tokens * FILTER_WORDS * 4,
        "filter_sums": 2 * max(plan.tokens, plan.consumer_warps) * FILTER_WORDS * 4,
    }
    regions, skip = [], 0
    for name, nbytes in sizes.items():
        regions.append(Region(name, nbytes, BULK_ALIGNMENT, over="scratch", skip=skip))
        skip += round_up(max(nbytes, candidates) if name == "listed" else nbytes, BULK_ALIGNMENT)
    return tuple(regions)


def attention_regions(
    shape: ModelShape, plan: Plan, room: int, tile_columns: int | None = None, newest: bool = True
) -> tuple[Region, ...]:
    """What attention needs while it works on an item, one after the other, over the region `scratch`.

    attention: of every consumer warp as many dims of its output (f32) as fit in `room` bytes beside the others, 64 at
    least [warps, columns, dims]. queries: of a tile (bf16), rows rounded up to 8. newest: the newest keys of a KV head,
    rounded up to 16, then as many values (bf16). tile_columns: tokens of a tile, if fewer than the plan's."""
    rows = (tile_columns or plan.tile_columns(shape)) * shape.group
    slice_bytes = plan.consumer_warps * min(rows, COLUMNS) * ATTENTION_SLICE_DIMS * 4
    queries = round_up(rows, COLUMNS) * shape.head_dim * 2
    newest_bytes = 2 * round_up(plan.tokens, KV_TILE_TOKENS) * shape.head_dim * 2 if newest else 0
    room = max(room - queries - newest_bytes, plan.consumer_warps * COLUMNS * ATTENTION_SLICE_DIMS * 4)
    slices = min(ceil_div(shape.head_dim, ATTENTION_SLICE_DIMS), room // slice_bytes)
    sizes = {"attention": slices * slice_bytes, "queries": queries, "newest": newest_bytes}
    regions, skip = [], 0
    for name, nbytes in sizes.items():
        if nbytes:
            regions.append(Region(name, nbytes, BULK_ALIGNMENT, over="scratch", skip=skip))
        skip += nbytes
    return tuple(regions)


def attention_records(plan: Plan, kinds: int = 1) -> tuple[Region, ...]:
    """What attention keeps beside that. statistics: (highest, weight sum) of each warp's state and query column.
    records: of as many KV plans as a step has."""
    return Region("statistics", plan.consumer_warps * COLUMNS * 8), Region("records", kinds * kept_plan_bytes(plan))


def kept_plan_bytes(plan: Plan) -> int:
    """What is kept of a KV plan: four numbers, the block's first items with their tiles, one more item, every team's
    first merge."""
    return 16 + (KEPT_ITEMS + 1) * KEPT_ITEM_BYTES + plan.consumer_warps // plan.merge_warps * KEPT_MERGE_BYTES


def _dealt_region(shape: ModelShape, plan: Plan) -> Iterator[Region]:
    """Numbers keep their size and place, and are converted where they lie; what warps make of them lies behind."""
    dealt = shape.table.dealt
    if dealt is not None and shape.table.converts_dealt:
        nbytes, router = dealt.tiles * dealt.vector_bytes(plan), _router_bytes(shape, plan)
        behind = router if dealt.vector_kind(plan) in BY_WARPS else 0
        yield Region("dealt", nbytes, BULK_ALIGNMENT, over="scratch", skip=behind)


def _router_bytes(shape: ModelShape, plan: Plan) -> int:
    """Of the router's input, with the padding of narrow K-tiles."""
    router = shape.table.named(ROUTER)
    return round_up(router.tiles, 2) * router.vector_bytes(plan)


def longest_vector_bytes(shape: ModelShape, plan: Plan, gpu: Gpu) -> int:
    """The most of the vectors that is in shared memory at once, as the format of its matrix has it."""
    dealt = sum(region.skip + region.nbytes for region in _dealt_region(shape, plan))
    return max(longest_input_bytes(shape, plan), dealt, sliced_bytes(shape, plan, gpu))


def sliced_bytes(shape: ModelShape, plan: Plan, gpu: Gpu) -> int:
    """Of the input that comes in parts, what is there at once."""
    sliced = shape.table.sliced
    return _tiles_at_once(shape, plan, gpu, sliced) * sliced.vector_bytes(plan)


def vector_sums_bytes(shape: ModelShape, plan: Plan, gpu: Gpu) -> int:
    """The same of what is kept of the vectors for zero points; of parts that are multiplied in turn, of one."""

    def tiles(product: Product) -> int:
        kept, _ = product.in_turn(plan.down_slices if product.is_sliced else 1)
        return _tiles_at_once(shape, plan, gpu, product) // kept

    return max(tiles(one) * one.sums_bytes(plan) for one in shape.table)


def longest_input_bytes(shape: ModelShape, plan: Plan) -> int:
    """Of the vectors that come whole."""
    return max(product.tiles * product.vector_bytes(plan) for product in shape.table.whole)


def _tiles_at_once(shape: ModelShape, plan: Plan, gpu: Gpu, product: Product) -> int:
    """K-tiles of the input of a product that are in shared memory at once."""
    if not product.is_sliced:
        return product.tiles * product.input.parts
    format, (kept, slices) = product.format, product.in_turn(plan.down_slices)
    if slices == 1:
        return product.tiles * kept
    chunk_bytes = format.chunk_bytes(plan.stage_bytes, plan.consumer_warps)
    halves = M_TILE_ROWS // (residual_tile_rows(shape, gpu) if product.adds else M_TILE_ROWS)
    part = slice_columns(product.tiles * format.columns, chunk_bytes, slices, format, halves)
    parts = 2 if product.input.parts == 1 and comes_ahead(shape, plan) else 1
    return parts * ceil_div(part, format.columns)


def comes_ahead(shape: ModelShape, plan: Plan) -> bool:
    """Whether the parts of an input, if there are several, are copied while the one before is multiplied: where blocks
    meet at the grid barrier, and parts are converted where they lie."""
    return plan.sync == "barrier" and shape.table.sliced.vector_kind(plan) not in BY_WARPS


def shared_map(shape: ModelShape, plan: Plan, gpu: Gpu, reserve: Reserve = kernel_regions) -> SharedMap:
    """The whole arena: ring, its barriers, and what `reserve` asks for. PlanError with the table if it does not fit."""
    regions = (*ring_regions(plan.stages, plan.stage_bytes), *reserve(shape, plan, gpu))
    return SharedMap(regions, gpu.shared_bytes)
