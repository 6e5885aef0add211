"""Our choices: one frozen `Plan`, derived by rule from the machine and the model, every field overridable."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import lcm
from typing import Any

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.formats import BF16, M_TILE_ROWS, QuantizedTiles
from cheetah.plan.gpu import Gpu
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.layout import slice_columns
from cheetah.plan.shape import ModelShape
from cheetah.plan.shared_memory import BULK_ALIGNMENT, Region, SharedMap, ring_regions, stages_that_fit
from cheetah.printable import shown

SYNCS = ("flags", "barrier")
"""How blocks exchange vectors: flagged words (faster), or the atomic grid barrier (the reference)."""
KV_TILE_TOKENS = 16
"""Keys of one mma tile: a KV stage holds whole tiles."""
MAX_BATCH = 8
"""Sequences of a step at most."""
COLUMNS = 8
"""Tokens, or query rows, that ride in the n = 8 dimension of one mma."""
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64)
"""How many tokens a step may take together."""
KV_DTYPES = {"bf16": 2, "e4m3": 1}
"""How keys and values are cached: the name and the bytes of an element."""
BARRIER_TOKENS = 8
"""From so many tokens on, blocks exchange vectors by the grid barrier unless told otherwise."""
ATTENTION_SLICE_DIMS = 64
"""Dims of a head's output that the consumer warps fold at a time, or twice as many."""
KEPT_ITEMS, KEPT_ITEM_BYTES = 4, 64
"""Items of a block whose records stay in shared memory, and the bytes of one with its tile."""
KEPT_SOURCES, KEPT_MERGE_BYTES = 20, 128
"""Of a merge, the sources that stay there, and the bytes of its record with its tile and those."""
FILTER_WORDS = 16
"""Words that a block publishes of a filtered column in a round, and that it keeps of it."""
LIST_ROW_WORDS = 36
"""Room of a short list: of 8 tokens 4 words each, and two more."""
MERGE_WARPS, MOST_TEAMS = 4, 14
"""Warps that merge a row together, and how many teams of them have a barrier."""
KINDS: Mapping[object, str] = {int: "a whole number", str: "a word", bool: "True or False"}
"""What a field of a plan may be, in words."""
LARGEST_NUMBER = 2**31 - 1
"""Of a field: what the kernel computes with has 32 bits."""
MAX_WARPS = 32
"""Warps of a block at most."""
WARPGROUP = 4
"""Warps that change their share of the registers together."""
TRANSACTION_LIMIT_BYTES = 2**20
"""An mbarrier counts fewer pending bytes than this (PTX ISA, mbarrier tx-count)."""
SMALL_LAYER_BYTES = 1_200_000
"""Weights of a layer that each block reads: below this, waiting weighs more than reading."""
SHORT_LAYER_BYTES = 2_500_000
"""The same of quantised weights: below this, few requests while a block waits."""
DEFAULT_CONTEXT, DEFAULT_STEPS = 8192, 64
"""Tokens of a sequence, and steps of a launch, unless told otherwise."""
EMULATOR_STAGES = 8
"""Most ring stages on the emulator, so that the ring wraps round even for small models."""


@dataclass(frozen=True)
class Plan:
    """The static choices of one kernel. Bytes are bytes; tokens, warps, stages and steps are counts.

    `in_flight` chunks are requested at most at a time (48 to 64 KB an SM measured best; more delays the exchanges), and
    `in_flight_waiting` while the block waits for a vector, or soon will (0: as many).
    One lane of the first producer warp copies; a whole warpgroup of them leaves its registers to the consumer warps.
    The starts rotate who owns a matrix's first M-tile; o and down share one, so a residual row stays with its block.
    `trace` adds time stamps of every block and phase to the kernel (buffer `timeline`); off, none of it is there.
    `batch` sequences share a step at most, and `tokens` tokens, which are the columns of every product (a prompt has
    several). `down_slices`: the input of the down projection is brought to shared memory in so many parts.
    `kv_align` and `kv_chunk_min` are A and M of the load-balanced KV scheduler (FlashInfer, Algorithm 1); `kv_chunk` is
    its F: items of that many keys, so that bits do not depend on the other sequences (0: by rule). `kv_item_cost`: what
    an item costs a block beside its keys, in keys.
    `kv_dtype` is how keys and values are cached. `pool_pages`: pages of the cache, of all sequences together (0: as
    many as the batch has at full context).
    """

    consumer_warps: int
    stage_bytes: int
    stages: int
    in_flight: int = 3
    in_flight_waiting: int = 0
    producer_warps: int = 1
    sync: str = "flags"
    page_size: int = 16
    max_context: int = DEFAULT_CONTEXT
    batch: int = 1
    tokens: int = 1
    down_slices: int = 1
    max_steps: int = DEFAULT_STEPS
    kv_align: int = 16
    kv_chunk_min: int = 64
    kv_chunk: int = 0
    kv_item_cost: int = 0
    kv_dtype: str = "bf16"
    pool_pages: int = 0
    start_qkv: int = 0
    start_residual: int = 0
    start_gate_up: int = 0
    start_head: int = 0
    trace: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        starts = (
            *(
                "sync",
                "trace",
                "in_flight_waiting",
                "kv_chunk",
                "kv_item_cost",
                "kv_dtype",
                "pool_pages",
                "start_qkv",
                "start_residual",
                "start_gate_up",
                "start_head",
            ),
        )
        require_positive("Plan", **{name: value for name, value in vars(self).items() if name not in starts})
        self._check_choices()
        self._check_ring()

    def _check_types(self) -> None:
        """A plan may come from a manifest or a cache that somebody edited."""
        for field in fields(self):
            value, wanted = getattr(self, field.name), field.type
            if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):  # type: ignore
                raise PlanError(f"Plan: {field.name} is {shown(value)}: give {KINDS[wanted]}")
            if isinstance(value, int) and value > LARGEST_NUMBER:
                raise PlanError(f"Plan: {field.name} is {shown(value)}: give at most {LARGEST_NUMBER}")

    def _check_choices(self) -> None:
        if self.sync not in SYNCS:
            raise PlanError(f"Plan: sync is {self.sync!r}: choose one of {', '.join(SYNCS)}")
        if self.batch > MAX_BATCH:
            raise PlanError(f"Plan: batch is {self.batch}: at most {MAX_BATCH} sequences share one step")
        if self.tokens not in STEP_TOKENS:
            raise PlanError(f"Plan: tokens is {self.tokens}: a step takes {', '.join(map(str, STEP_TOKENS))} together")
        if self.tokens < self.batch:
            raise PlanError(f"Plan: tokens is {self.tokens} with batch {self.batch}: each sequence has one at least")
        if self.kv_dtype not in KV_DTYPES:
            raise PlanError(f"Plan: kv_dtype is {self.kv_dtype!r}: choose one of {', '.join(KV_DTYPES)}")
        if self.kv_item_cost < 0:
            raise PlanError(f"Plan: kv_item_cost is {self.kv_item_cost}: give a number of keys, 0 or more")
        if self.kv_chunk < 0 or self.kv_chunk % self.kv_align:
            raise PlanError(f"Plan: kv_chunk {self.kv_chunk} is no multiple of kv_align {self.kv_align}, nor 0")
        if self.pool_pages and self.pool_pages < self.pages_per_sequence:
            raise PlanError(
                f"Plan: pool_pages is {self.pool_pages}: {self.max_context} tokens of one sequence need "
                f"{self.pages_per_sequence}: give as many, or a smaller max_context"
            )
        if self.consumer_warps + self.producer_warps > MAX_WARPS:
            raise PlanError(
                f"Plan: consumer_warps is {self.consumer_warps} and producer_warps {self.producer_warps}: a block has "
                f"{MAX_WARPS} warps"
            )
        if (
            max(self.tokens, self.consumer_warps) % min(self.tokens, self.consumer_warps)
            or self.consumer_warps * 8 % self.tokens
        ):
            raise PlanError(
                f"Plan: tokens is {self.tokens} with {self.consumer_warps} consumer warps: the warps share the tokens "
                f"evenly, at most 8 a warp: use a number of warps that divides or is divided by it"
            )
        if self.consumer_warps % 2:
            raise PlanError(
                f"Plan: consumer_warps is {self.consumer_warps}: two halves add up an M-tile: use an even number"
            )
        if self.consumer_warps // self.merge_warps > MOST_TEAMS:
            raise PlanError(
                f"Plan: consumer_warps is {self.consumer_warps}: use a multiple of 4: a block has 16 barriers"
            )
        if self.kv_chunk_min % self.kv_align:
            raise PlanError(f"Plan: kv_chunk_min {self.kv_chunk_min} is no multiple of kv_align {self.kv_align}")
        for name in ("start_qkv", "start_residual", "start_gate_up", "start_head"):
            if getattr(self, name) < 0:
                raise PlanError(f"Plan: {name} is {getattr(self, name)}: give 0 to blocks - 1")

    def _check_ring(self) -> None:
        if self.stage_bytes >= TRANSACTION_LIMIT_BYTES:
            raise PlanError(
                f"Plan: stage_bytes is {self.stage_bytes}: an mbarrier counts below {TRANSACTION_LIMIT_BYTES}"
            )
        if self.stages < 2:
            raise PlanError(f"Plan: stages is {self.stages}: a ring needs at least 2, one filling while one is used")
        if self.in_flight >= self.stages:
            raise PlanError(f"Plan: in_flight {self.in_flight} of {self.stages} stages: give at most {self.stages - 1}")
        if not 0 <= self.in_flight_waiting <= self.in_flight:
            raise PlanError(
                f"Plan: in_flight_waiting is {self.in_flight_waiting} with in_flight {self.in_flight}: give at most as "
                f"many, or 0 for as many"
            )

    @property
    def threads(self) -> int:
        """Threads of a block: the consumer warps, then the producer warps."""
        return (self.consumer_warps + self.producer_warps) * 32

    @property
    def merge_warps(self) -> int:
        """Warps of a team that merges a row of attention."""
        return min(MERGE_WARPS, self.consumer_warps & -self.consumer_warps)

    @property
    def finishers(self) -> int:
        """Warps that finish an M-tile together: one a column, if there are so many."""
        return min(self.tokens, self.consumer_warps)

    @property
    def reductions(self) -> int:
        """Buffers of the warps' sums of an M-tile: one more than there are groups of finishing warps, see `Matvec`."""
        return self.consumer_warps // self.finishers + 1

    @property
    def column_sums(self) -> int:
        """Floats from a warp's sums of one column of an M-tile to those of the next. Of several columns, lanes would
        meet in few banks if it were a power of two."""
        return M_TILE_ROWS if self.tokens <= 2 else M_TILE_ROWS + 4

    @property
    def warp_sums(self) -> int:
        """Floats from a warp's sums of an M-tile to those of the next warp."""
        return self.tokens * self.column_sums + (0 if self.tokens <= 2 else 4)

    @property
    def moves_registers(self) -> bool:
        """Whether the producer warps give registers to the consumer warps: two warpgroups of 232 and one of 40 a
        thread. Equal shares would be 168."""
        return self.consumer_warps == 8 and self.producer_warps == WARPGROUP

    @property
    def pages_per_sequence(self) -> int:
        """Pages that hold `max_context` tokens."""
        return ceil_div(self.max_context, self.page_size)

    @property
    def kv_pages(self) -> int:
        """Pages of the pool; by rule for every sequence of the batch at full context."""
        return self.pool_pages or self.batch * self.pages_per_sequence

    @property
    def kv_element_bytes(self) -> int:
        return KV_DTYPES[self.kv_dtype]

    def kv_stage_tokens(self, head_dim: int) -> int:
        """Tokens of one KV head in a stage, whole tiles of them: first their keys, then their values."""
        tile_bytes = self._kv_tile_bytes(head_dim)
        return self.stage_bytes // tile_bytes * KV_TILE_TOKENS

    def kv_values_at(self, head_dim: int) -> int:
        """The byte of a stage of keys at which their values begin."""
        return self.kv_stage_tokens(head_dim) * self.kv_element_bytes * head_dim

    def _kv_tile_bytes(self, head_dim: int) -> int:
        """Bytes of the keys and values of a tile of attention."""
        return KV_TILE_TOKENS * 2 * self.kv_element_bytes * head_dim

    @property
    def tile_rows(self) -> int:
        """Most query rows of a tile of attention: every consumer warp takes 8 columns of the products."""
        return COLUMNS * self.consumer_warps

    def tile_columns(self, group: int) -> int:
        """Most tokens of a tile of attention, each with `group` query rows; at least 1."""
        return max(1, min(self.tokens, self.tile_rows // group))

    @property
    def launch_tokens(self) -> int:
        """Most tokens of one sequence in a launch."""
        return self.max_steps * self.tokens

    def check(self, shape: ModelShape, gpu: Gpu) -> None:
        """PlanError unless this plan can serve that model on that machine."""
        if shape.formats:
            self._check_stage_of_formats(shape)
        else:
            self._check_whole_stage(shape)
        for name in ("start_qkv", "start_residual", "start_gate_up", "start_head"):
            if getattr(self, name) >= gpu.blocks:
                raise PlanError(
                    f"Plan: {name} is {getattr(self, name)} on {gpu.blocks} blocks: give 0 to {gpu.blocks - 1}"
                )

    def _check_whole_stage(self, shape: ModelShape) -> None:
        """With one format nothing of a stage is left over."""
        unit = self.consumer_warps * BF16.tile_bytes
        if self.stage_bytes % unit:
            raise PlanError(
                f"Plan: stage_bytes is {self.stage_bytes} with {self.consumer_warps} consumer warps: each takes whole "
                f"{BF16.tile_bytes}-byte K-tiles of a chunk: use a multiple of {unit}"
            )
        unit = self._kv_tile_bytes(shape.head_dim)
        if self.stage_bytes % unit:
            raise PlanError(
                f"Plan: stage_bytes is {self.stage_bytes} with head_dim {shape.head_dim}: K and V of {KV_TILE_TOKENS} "
                f"tokens are {unit} bytes and a stage holds whole such tiles: use a multiple of {unit}"
            )

    def _check_stage_of_formats(self, shape: ModelShape) -> None:
        """Chunks of several formats, and keys and values, use as much of a stage as their tiles fill."""
        if self.stage_bytes % BULK_ALIGNMENT:
            raise PlanError(f"Plan: stage_bytes is {self.stage_bytes}: use a multiple of {BULK_ALIGNMENT}")
        least = {
            f"K-tiles of {one.name} for {self.consumer_warps} warps": one.stage_bytes(1, self.consumer_warps)
            for one in shape.tile_formats
        }
        least[f"K and V of {KV_TILE_TOKENS} tokens"] = self._kv_tile_bytes(shape.head_dim)
        what, needed = max(least.items(), key=lambda item: item[1])
        if self.stage_bytes < needed:
            raise PlanError(f"Plan: stage_bytes is {self.stage_bytes}: {what} are {needed} bytes: use {needed} or more")

    def to_dict(self) -> dict[str, int | str]:
        """Field names and values, ready for JSON; `pool_pages` where it is not by rule."""
        return {name: value for name, value in asdict(self).items() if name != "pool_pages" or value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Plan":
        """The plan that `to_dict` wrote; PlanError names unknown and missing fields."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise PlanError(f"Plan: unknown field {', '.join(unknown)}: the fields are {', '.join(sorted(known))}")
        if missing := sorted({"consumer_warps", "stage_bytes", "stages"} - set(values)):
            raise PlanError(f"Plan: missing field {', '.join(missing)}")
        return cls(**values)


Reserve = Callable[[ModelShape, Plan, Gpu], Sequence[Region]]
"""Gives the regions of shared memory that a kernel needs beside the ring."""


def kernel_regions(shape: ModelShape, plan: Plan, gpu: Gpu) -> tuple[Region, ...]:
    """What a block keeps in shared memory beside the ring.

    scratch: the input of a product (bf16), or what attention needs, or all blocks' candidates, or what filters need.
    reductions: buffers of the warps' row sums, with an mbarrier each; only products use them, as the input, behind
    which they lie if there is room. residual: the block's rows (f32). partial_sums: of squares; scales: 1/rms of every
    token. rope: cos and sin of every token's position. warp_candidates: of every warp and column. columns: what the
    step's tokens are. chosen: what was sampled. step_done: two mbarriers. next_token: of every column, then whether the
    launch ends.
    """
    vector_bytes = longest_vector_bytes(shape, plan)
    attention = attention_regions(shape, plan, vector_bytes)
    candidates = gpu.blocks * max(plan.tokens, 2) * 8
    filtering = filter_regions(plan, gpu, candidates)
    residual_rows = ceil_div(ceil_div(shape.hidden, M_TILE_ROWS), gpu.blocks) * M_TILE_ROWS
    filters = filtering[-1].skip + filtering[-1].nbytes
    scratch = max(vector_bytes, sum(region.nbytes for region in attention), filters)
    reductions = plan.reductions * plan.consumer_warps * plan.warp_sums * 4
    is_room_behind_vector = vector_bytes + reductions <= scratch
    return (
        Region("scratch", scratch, BULK_ALIGNMENT),
        Region("vector", vector_bytes, BULK_ALIGNMENT, over="scratch"),
        Region("candidates", candidates, BULK_ALIGNMENT, over="scratch"),
        *filtering,
        *attention,
        Region(
            *("reductions", reductions),
            over="scratch" if is_room_behind_vector else None,
            skip=vector_bytes if is_room_behind_vector else 0,
        ),
        Region("reduction_barriers", plan.reductions * 8),
        Region("residual", residual_rows * plan.tokens * 4),
        Region("partial_sums", plan.consumer_warps * COLUMNS * 4),
        Region("scales", plan.tokens * 4),
        Region("rope", plan.tokens * shape.head_dim * 4),
        *attention_records(plan),
        Region("warp_candidates", max(plan.consumer_warps, plan.tokens) * 8),
        Region("columns", plan.tokens * 9 * 4),
        Region("chosen", plan.tokens * 4),
        Region("step_done", 16),
        Region("next_token", (plan.tokens + 1) * 4),
    )


def listed_tokens(tokens: int) -> int:
    """Tokens of a block's short list, where a step has so many. With 8 in each of 132 lists the 300 highest of all are
    mostly listed, with 4 the 60 highest."""
    return 8 if tokens == 1 else 4


def filter_regions(plan: Plan, gpu: Gpu, candidates: int) -> tuple[Region, ...]:
    """What filters need, over the region `scratch`.

    listed: of all blocks' listed tokens two numbers (f32), of a column that a warp works on; over the candidates, that
    are used no more then. list_rows: a list of every warp. filters: what is known of every column; filter_sums: its
    warps' sums, of this block and of all."""
    sizes = {
        "listed": min(plan.tokens, plan.consumer_warps) * gpu.blocks * listed_tokens(plan.tokens) * 8,
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
    rows = (tile_columns or plan.tile_columns(shape.group)) * shape.group
    slice_bytes = plan.consumer_warps * min(rows, COLUMNS) * ATTENTION_SLICE_DIMS * 4
    queries = round_up(rows, COLUMNS) * shape.head_dim * 2
    newest_bytes = 2 * round_up(plan.tokens, KV_TILE_TOKENS) * shape.head_dim * 2 if newest else 0
    room = max(room - queries - newest_bytes, plan.consumer_warps * COLUMNS * ATTENTION_SLICE_DIMS * 4)
    slices = min(shape.head_dim // ATTENTION_SLICE_DIMS, room // slice_bytes)
    sizes = {"attention": slices * slice_bytes, "queries": queries, "newest": newest_bytes}
    regions, skip = [], 0
    for name, nbytes in sizes.items():
        if nbytes:
            regions.append(Region(name, nbytes, BULK_ALIGNMENT, over="scratch", skip=skip))
        skip += nbytes
    return tuple(regions)


def attention_records(plan: Plan) -> tuple[Region, ...]:
    """What attention keeps beside that. statistics: (highest, weight sum) of each warp's state and query column.
    records: four numbers, the block's first items with their tiles, one more item, every team's first merge."""
    kept = 16 + (KEPT_ITEMS + 1) * KEPT_ITEM_BYTES + plan.consumer_warps // plan.merge_warps * KEPT_MERGE_BYTES
    return Region("statistics", plan.consumer_warps * COLUMNS * 8), Region("records", kept)


def longest_vector_bytes(shape: ModelShape, plan: Plan) -> int:
    """The longest part of the vectors that is in shared memory at once, as the format of its matrix has it."""
    down = shape.format_of("down")
    chunk_bytes = down.chunk_bytes(plan.stage_bytes, plan.consumer_warps)
    parts = {name: shape.hidden for name in ("qkv", "gate_up", "lm_head")} | {"o": shape.query_rows}
    longest = [_vector_bytes(shape, plan, name, columns, columns) for name, columns in parts.items()]
    part = slice_columns(round_up(shape.ffn, down.columns), chunk_bytes, plan.down_slices, down)
    return max(*longest, _vector_bytes(shape, plan, "down", shape.ffn, part))


def _vector_bytes(shape: ModelShape, plan: Plan, matrix: str, columns: int, part: int) -> int:
    """Of `part` of the columns of a matrix."""
    format = shape.format_of(matrix)
    return ceil_div(part, format.columns) * format.vector_units(columns, plan.tokens) * 16


def default_down_slices(shape: ModelShape, tokens: int, gpu: Gpu) -> int:
    """Each part costs quantised weights more than it hides, but so does a ring that is too short. Beside 4 bits the
    vectors come in parts of two fifths of the memory, a single one of a quarter (8B: 1 part 1.337, 2 1.354 ms a step;
    two tokens 1 1.538, 4 1.689; 8 tokens 2 2.188, 3 2.139, 4 2.230; 70B, a token: 1 9.79, 2 9.23); beside 8 bits in two
    parts of half of it at most (fp8, 8 tokens: 2 2.647, 4 2.890). bf16, a single token: two, so that the first half is
    multiplied before the second one exists (8B 0.4 %, 1B 0.8 %); several: as many as let the vectors fit where the
    others do."""
    down = shape.format_of("down")
    if isinstance(down, QuantizedTiles):
        vectors = ceil_div(shape.ffn, down.columns) * down.vector_units(shape.ffn, tokens) * 16
        if down.bits == 4:
            return ceil_div(vectors, gpu.shared_bytes // 4 if tokens == 1 else gpu.shared_bytes * 2 // 5)
        return max(1 if gpu.emulated else 2, ceil_div(vectors, gpu.shared_bytes // 2))
    if tokens > 1:
        return ceil_div(shape.padded_ffn, max(shape.padded_hidden, shape.padded_query_rows))
    return 1 if gpu.emulated else 2


def default_sync(shape: ModelShape, tokens: int, gpu: Gpu) -> str:
    """Flagged words double what every block reads: with 8 tokens that costs more than the grid barrier's longer trips
    (8B, batch 8: 4.09 against 3.89 ms a step), beside quantised weights with 4 (int4 2.271 against 1.950, fp8 2.803
    against 2.589)."""
    from_tokens = BARRIER_TOKENS // 2 if shape.formats else BARRIER_TOKENS
    return "barrier" if tokens >= from_tokens and not gpu.emulated else "flags"


def shared_map(shape: ModelShape, plan: Plan, gpu: Gpu, reserve: Reserve = kernel_regions) -> SharedMap:
    """The whole arena: ring, its barriers, and what `reserve` asks for. PlanError with the table if it does not fit."""
    regions = (*ring_regions(plan.stages, plan.stage_bytes), *reserve(shape, plan, gpu))
    return SharedMap(regions, gpu.shared_bytes)


def default_context(positions: int) -> int:
    """`max_context` by rule for a model with so many positions."""
    return min(positions, DEFAULT_CONTEXT)


def default_plan(gpu: Gpu, shape: ModelShape, *, reserve: Reserve = kernel_regions, **overrides: Any) -> Plan:
    """The plan by rule for a model on `gpu`; `overrides` are fields of `Plan`, None means by rule.

    `reserve` gives the shared memory beside the ring; the stages are what then fits. PlanError where it fails.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    chosen: dict[str, Any] = {**_machine_defaults(gpu), **default_starts(shape, gpu), **given}
    used_here = ("consumer_warps", "batch", "tokens", "stages")
    require_positive("Plan", **{name: chosen[name] for name in used_here if name in chosen})
    chosen.setdefault("tokens", next((size for size in STEP_TOKENS if size >= chosen.get("batch", 1)), MAX_BATCH))
    chosen.setdefault("down_slices", default_down_slices(shape, chosen["tokens"], gpu))
    chosen.setdefault("sync", default_sync(shape, chosen["tokens"], gpu))
    chosen.setdefault("stage_bytes", _default_stage_bytes(shape, gpu, chosen["consumer_warps"]))
    draft = Plan.from_dict({**chosen, "stages": 2, "in_flight": 1, "in_flight_waiting": 0})
    draft.check(shape, gpu)
    stages = chosen["stages"] if "stages" in chosen else _default_stages(shape, draft, gpu, reserve)
    in_flight = chosen.get("in_flight", max(1, min(_default_in_flight(shape, gpu, draft), stages - 1)))
    waiting = chosen.get("in_flight_waiting", _default_waiting(shape, gpu, in_flight))
    plan = replace(draft, stages=stages, in_flight=in_flight, in_flight_waiting=waiting)
    shared_map(shape, plan, gpu, reserve)
    return plan


def _machine_defaults(gpu: Gpu) -> dict[str, Any]:
    """Eight consumer warps: 16 have too few registers and spill. 256 keys an item: so a context of up to 256 keys needs
    no merge of states, which is worth 1 to 2 % there; at 512 keys it costs as much, beyond that little either way
    (H200, benchmarks/LOG.md). The emulator is small, so that little work is split too."""
    if gpu.emulated:
        return {"consumer_warps": 4, "kv_chunk_min": 64}
    return {"consumer_warps": 8, "producer_warps": WARPGROUP, "kv_chunk_min": 256, "kv_item_cost": 128}


def default_starts(shape: ModelShape, gpu: Gpu) -> dict[str, int]:
    """Starts that give the first M-tiles of the others to the blocks which the last round of o and down leaves out."""
    left_out = ceil_div(shape.hidden, M_TILE_ROWS) % gpu.blocks
    start = -left_out % gpu.blocks
    return {"start_qkv": start, "start_residual": 0, "start_gate_up": start, "start_head": start}


def _default_stage_bytes(shape: ModelShape, gpu: Gpu, consumer_warps: int) -> int:
    """About 16 KB, or 4 on the emulator: whole K-tiles for each warp, whole tiles of keys; where formats differ, room
    for the largest."""
    least = 4096 if gpu.emulated else 16384
    whole = round_up(least, lcm(consumer_warps * BF16.tile_bytes, KV_TILE_TOKENS * 2 * 2 * shape.head_dim))
    others = (one.stage_bytes(least, consumer_warps) for one in shape.tile_formats if one is not BF16)
    return round_up(max(whole, *others, 0), BULK_ALIGNMENT)


def _default_stages(shape: ModelShape, draft: Plan, gpu: Gpu, reserve: Reserve) -> int:
    fit = stages_that_fit(gpu.shared_bytes, draft.stage_bytes, reserve(shape, draft, gpu))
    return min(fit, EMULATOR_STAGES) if gpu.emulated else fit


def _default_in_flight(shape: ModelShape, gpu: Gpu, draft: Plan) -> int:
    """64 KB: 4 chunks of 16 KB or 2 of 32 KB measured best on an H200. A small model waits more than it reads, and its
    exchanges are faster beside 48 KB (Llama 3.2 1B: 0.629 against 0.636 ms a step); so are those of several tokens (8B,
    batch 4: 3.66 against 3.70 ms). On the emulator, 3 small chunks."""
    if gpu.emulated:
        return 3
    kilobytes = 48 if draft.tokens > 1 or _layer_bytes(shape, gpu) < SMALL_LAYER_BYTES else 64
    return max(2, round(kilobytes * 1024 / draft.stage_bytes))


def _default_waiting(shape: ModelShape, gpu: Gpu, in_flight: int) -> int:
    """One chunk fewer while the block waits, if that leaves two: worth 0.7 % on 8B, 1 % on 3B, 2 % on 1B, and 0.5 %
    with 4 and 8 tokens. Two where quantised layers are read faster than vectors come (8B, int4: 1.337 to 1.311 ms a
    step, fp8 1.929 to 1.883); on 70B that costs 1 %."""
    layer_bytes = (
        _layer_bytes(shape, gpu)
        * shape.format_of("gate_up").tile_bytes
        // (M_TILE_ROWS * 2 * shape.format_of("gate_up").columns)
    )
    is_short = bool(shape.formats) and layer_bytes < SHORT_LAYER_BYTES
    return min(in_flight, 2 if is_short else max(2, in_flight - 1))


def _layer_bytes(shape: ModelShape, gpu: Gpu) -> int:
    """Weights of a layer that each block reads, if they are bf16."""
    return 2 * shape.hidden * (shape.qkv_rows + shape.query_rows + 3 * shape.ffn) // gpu.blocks
