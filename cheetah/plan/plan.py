"""Our choices: one frozen `Plan`, and what no plan may be. `defaults.py` derives one by rule."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.formats import BF16, KV_TILE_TOKENS, M_TILE_ROWS
from cheetah.plan.gpu import Gpu
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.shape import ModelShape
from cheetah.plan.shared_memory import BULK_ALIGNMENT
from cheetah.plan.shares import require_shared
from cheetah.printable import shown

SYNCS = ("flags", "barrier")
"""How blocks exchange vectors: flagged words (faster), or the atomic grid barrier (the reference)."""
MAX_BATCH = 8
"""Sequences of a step at most."""
COLUMNS = 8
"""Tokens, or query rows, that ride in the n = 8 dimension of one mma."""
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64)
"""How many tokens a step may take together."""
KV_DTYPES = {"bf16": 2, "e4m3": 1}
"""How keys and values are cached: the name and the bytes of an element."""
MERGE_WARPS, MOST_TEAMS = 4, 14
"""Warps that merge a row together, and how many teams of them have a barrier."""
KINDS: Mapping[object, str] = {int: "a whole number", str: "a word"}
"""What a field of a plan may be, in words."""
LARGEST_NUMBER = 2**31 - 1
"""Of a field: what the kernel computes with has 32 bits."""
VECTOR_PIECES = 8
"""Pieces in which a vector is copied to shared memory, where blocks meet at the grid barrier."""
MOST_ROUTER_ROWS = 4
"""Rows of a fused router that a block has at most: more would take registers."""
MAX_WARPS = 32
"""Warps of a block at most."""
WARPGROUP = 4
"""Warps that change their share of the registers together."""
TRANSACTION_LIMIT_BYTES = 2**20
"""An mbarrier counts fewer pending bytes than this (PTX ISA, mbarrier tx-count)."""
VERIFIED_TOKENS = 32
"""Tokens of a step at most where some of them are drafted: a warp judges them, a lane each."""
EMITTED_BITS = 22
"""Of a word in which a kernel that verifies drafts tells the host of a token, those that are the token's."""
MOST_SEARCHED = 2**21
"""Tokens of a context at most in which drafts are looked up."""
LAYERS_PATTERN = r"\d{1,4}(,\d{1,4})*"
"""How layers are named."""
DEFAULT_CONTEXT, DEFAULT_STEPS = 8192, 64
"""Tokens of a sequence, and steps of a launch, unless told otherwise."""


NOT_POSITIVE = frozenset({
    "sync", "kv_dtype", "in_flight_waiting", "adding_warps", "kv_chunk", "drafts", "by_numbers", "taps", "fused_router",
})  # fmt: skip
"""Fields that are no number, or may be 0; those that may not be just anything are checked by themselves."""
SELDOM = ("taps", "fused_router")
"""Fields that most plans say nothing of."""


def column_tiles(head_dim: int) -> int:
    """Groups of 8 query rows that a warp of attention may work on together: of two states of 256 dims some would be
    spilled."""
    return 2 if head_dim <= 128 else 1


@dataclass(frozen=True)
class Plan:
    """The static choices of one kernel. Bytes are bytes; tokens, warps, stages and steps are counts.

    `in_flight` chunks are requested at most at a time (48 to 64 KB an SM measured best; more delays the exchanges), and
    `in_flight_waiting` while the block waits for a vector, or soon will (0: as many).
    Behind the consumer warps comes one of which one lane copies, then `adding_warps` that add up the M-tiles' sums and
    finish their rows (0 in a kernel without products). Whole warpgroups of these leave registers to the consumer warps.
    `batch` sequences share a step at most, and `tokens` tokens, which are the columns of every product (a prompt has
    several). `down_slices`: the input of the down projection is brought to shared memory in so many parts.
    `kv_chunk` is F of the load-balanced KV scheduler (FlashInfer, Algorithm 1): items of that many keys, so that bits
    do not depend on the other sequences (0: by rule).
    `kv_dtype` is how keys and values are cached.
    `by_numbers`, 0 or 1: 4-bit and e4m3 weights are multiplied by the vectors of few tokens as by those of many, as
    bf16 numbers and not by digits or halves, which is faster. Kernels of 1 to 8 tokens then have one arithmetic.
    `drafts` is how many tokens at most are drafted for a sequence in a step, and verified in it (0: none, and nothing
    of that is in the kernel).
    `taps` names layers, "1,9,17": what they leave of the residual stream is kept of every column of a step and every
    token of a pass, for a model that drafts by it ("": none, and nothing of that is in the kernels).
    """

    consumer_warps: int
    stage_bytes: int
    stages: int
    in_flight: int = 3
    in_flight_waiting: int = 0
    adding_warps: int = 1
    sync: str = "flags"
    page_size: int = 16
    max_context: int = DEFAULT_CONTEXT
    batch: int = 1
    tokens: int = 1
    down_slices: int = 1
    max_steps: int = DEFAULT_STEPS
    kv_chunk: int = 0
    kv_dtype: str = "bf16"
    drafts: int = 0
    by_numbers: int = 0
    taps: str = ""
    fused_router: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        require_positive("Plan", **{name: value for name, value in vars(self).items() if name not in NOT_POSITIVE})
        self._check_choices()
        self._check_ring()

    def _check_types(self) -> None:
        """A plan may come from a manifest or a cache that somebody edited."""
        for field in fields(self):
            value, wanted = getattr(self, field.name), field.type
            if not isinstance(value, wanted) or isinstance(value, bool):  # type: ignore
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
        if self.kv_chunk < 0 or self.kv_chunk % KV_TILE_TOKENS:
            raise PlanError(f"Plan: kv_chunk {self.kv_chunk} is no multiple of {KV_TILE_TOKENS}, nor 0")
        if self.by_numbers not in (0, 1):
            raise PlanError(f"Plan: by_numbers is {self.by_numbers}: give 0 or 1")
        self._check_drafts()
        self._check_taps()
        if self.threads > MAX_WARPS * 32:
            raise PlanError(
                f"Plan: consumer_warps is {self.consumer_warps} and adding_warps {self.adding_warps}, and one copies: "
                f"a block has {MAX_WARPS} warps"
            )
        if (
            max(self.tokens, self.consumer_warps) % min(self.tokens, self.consumer_warps)
            or self.consumer_warps * 8 % self.tokens
        ):
            raise PlanError(
                f"Plan: tokens is {self.tokens} with {self.consumer_warps} consumer warps: the warps share the tokens "
                f"evenly, at most 8 a warp: use a number of warps that divides or is divided by it"
            )
        if self.adding_warps < 0:
            raise PlanError(f"Plan: adding_warps is {self.adding_warps}: give a number of warps, 0 without products")
        if self.column_pairs % self.finishers:
            raise PlanError(
                f"Plan: adding_warps is {self.adding_warps} with {self.tokens} tokens: they share {self.column_pairs} "
                f"pairs of columns evenly: use a number that divides it"
            )
        if self.consumer_warps % 2:
            raise PlanError(
                f"Plan: consumer_warps is {self.consumer_warps}: two halves add up an M-tile: use an even number"
            )
        if self.consumer_warps // self.merge_warps > MOST_TEAMS:
            raise PlanError(
                f"Plan: consumer_warps is {self.consumer_warps}: use a multiple of 4: a block has 16 barriers"
            )

    def _check_drafts(self) -> None:
        """What was drafted shall change no bit: so items of attention may not follow from how far a sequence has
        come."""
        if not self.drafts:
            return
        if not 0 < self.drafts < self.tokens <= VERIFIED_TOKENS:
            raise PlanError(
                f"Plan: drafts is {self.drafts} with {self.tokens} tokens: a step verifies drafts behind a token, at "
                f"most {VERIFIED_TOKENS} tokens together: give fewer drafts than tokens"
            )
        if self.max_context > MOST_SEARCHED:
            raise PlanError(
                f"Plan: drafts is {self.drafts} with max_context {self.max_context}: at most {MOST_SEARCHED} tokens"
            )
        if not self.kv_chunk:
            raise PlanError(
                f"Plan: drafts is {self.drafts} and kv_chunk 0: give a kv_chunk, so that bits stay the same"
            )

    def _check_taps(self) -> None:
        if self.taps and not re.fullmatch(LAYERS_PATTERN, self.taps):
            raise PlanError(f"Plan: taps is {shown(self.taps)}: give numbers of layers with commas between, as 1,9,17")
        layers = self.tapped_layers
        if list(layers) != sorted(set(layers)):
            raise PlanError(f"Plan: taps is {shown(self.taps)}: give each layer once, ascending")

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
    def tapped_layers(self) -> tuple[int, ...]:
        """The layers that `taps` names."""
        return tuple(map(int, self.taps.split(","))) if self.taps else ()

    @property
    def threads(self) -> int:
        """Threads of a block: the consumer warps, the producer warp, the adding warps, and what a warpgroup lacks."""
        return (round_up(self._warps, WARPGROUP) if self.moves_registers else self._warps) * 32

    @property
    def _warps(self) -> int:
        return self.consumer_warps + 1 + self.adding_warps

    @property
    def merge_warps(self) -> int:
        """Warps of a team that merges a row of attention."""
        return min(MERGE_WARPS, self.consumer_warps & -self.consumer_warps)

    @property
    def finishers(self) -> int:
        """Adding warps that finish an M-tile together, each some of its columns; of few columns one warp all."""
        return 1 if self.column_pairs == 1 else max(self.adding_warps, 1)

    @property
    def finishing_groups(self) -> int:
        """Groups of adding warps that take M-tiles in turn."""
        return self.adding_warps // self.finishers

    @property
    def reductions(self) -> int:
        """Buffers of the warps' sums of an M-tile: one for each group that finishes M-tiles, two for a single one."""
        return max(2, self.finishing_groups)

    @property
    def column_pairs(self) -> int:
        """Pairs of columns: an adding warp has 16 rows of two columns at a time."""
        return ceil_div(self.tokens, 2)

    @property
    def pair_sums(self) -> int:
        """Floats from a warp's sums of two columns of an M-tile, of which the second follows the first, to those of the
        next two. If it were 32, the lanes that lay them down would meet in few banks."""
        return 2 * M_TILE_ROWS + 8

    @property
    def warp_sums(self) -> int:
        """Floats from a warp's sums of an M-tile to those of the next warp. Those of a single column are added up by
        the two halves of a warp, which read 4 warps apart (of 8), and not in the same banks."""
        return M_TILE_ROWS + 4 if self.tokens == 1 else self.column_pairs * self.pair_sums

    @property
    def moves_registers(self) -> bool:
        """Whether the producer and adding warps give registers to the consumer warps, which are two warpgroups. Equal
        shares would be 168 a thread."""
        return self.consumer_warps == 8 and self.adding_warps < 2 * WARPGROUP

    @property
    def pages_per_sequence(self) -> int:
        """Pages that hold `max_context` tokens."""
        return ceil_div(self.max_context, self.page_size)

    @property
    def kv_pages(self) -> int:
        """Pages of the cache by rule: for every sequence of the batch at full context. A launch may be told another
        number."""
        return self.batch * self.pages_per_sequence

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

    @property
    def waits_most(self) -> bool:
        """Whether waiting is most of a step, so that requests are to delay no wait: a single one is under way while a
        block waits, by rule where layers are tiny."""
        return self.in_flight_waiting == 1 < self.in_flight

    def in_flight_of(self, is_once: bool) -> int:
        """Chunks of a matrix that are requested at most at a time: of the head (`is_once`), which waits for one vector
        alone, twice as many where few are requested because waiting is most of a step."""
        return min(2 * self.in_flight, self.stages - 1) if self.waits_most and is_once else self.in_flight

    def tile_columns(self, shape: ModelShape) -> int:
        """Most tokens of a tile of attention in a step, each with a group of query rows; at least 1. So few that a warp
        takes all rows: of more, warps would share rows out and have other keys, and a token's sums another order than
        by itself."""
        rows = min(COLUMNS * column_tiles(shape.head_dim), self.tile_rows)
        return max(1, min(self.tokens, rows // shape.group))

    @property
    def launch_tokens(self) -> int:
        """Most tokens of one sequence in a launch."""
        return self.max_steps * self.tokens

    def check(self, shape: ModelShape, gpu: Gpu) -> None:
        """PlanError unless this plan can serve that model on that machine."""
        require_shared(shape, gpu)
        if self.sync == "barrier" and gpu.ranks > 1:
            raise PlanError(f"Plan: sync is 'barrier' with {gpu.ranks} GPUs, and blocks of one meet: use 'flags'")
        if self.drafts and shape.vocab > 1 << EMITTED_BITS:
            raise PlanError(f"Plan: drafts is {self.drafts} with {shape.vocab} tokens: at most {1 << EMITTED_BITS}")
        self._check_tapped(shape, gpu)
        if shape.formats:
            self._check_stage_of_formats(shape)
        else:
            self._check_whole_stage(shape)
        if shape.experts is not None:
            self._check_experts(shape, gpu)
        if shape.delta is not None:
            self._check_delta()
        if self.fused_router:
            self._check_fused_router(shape, gpu)

    def _check_delta(self) -> None:
        """Layers have numbers of their own in the cache."""
        if self.kv_dtype != "bf16":
            raise PlanError(f"Plan: kv_dtype is {self.kv_dtype!r}: beside Gated DeltaNet supported is 'bf16'")

    def _check_tapped(self, shape: ModelShape, gpu: Gpu) -> None:
        if self.tapped_layers and self.tapped_layers[-1] >= shape.layers:
            raise PlanError(f"Plan: taps is {self.taps!r}: give layers below {shape.layers}, which the model has")

    def _check_experts(self, shape: ModelShape, gpu: Gpu) -> None:
        """Every block makes a part of `gated`, behind its reads of the logits: so nobody replaces them under it."""
        gate_up = shape.table.named("gate_up")
        m_tiles = ceil_div(gate_up.rows, M_TILE_ROWS) * shape.table.chosen
        if m_tiles < gpu.blocks:
            raise PlanError(
                f"Plan: the {shape.table.chosen} experts of a token have {m_tiles} M-tiles of {gate_up.name} together, "
                f"and {gpu.name} has {gpu.blocks} blocks: each has to have one"
            )
        if self.down_slices != 1 and self.tokens == 1:
            raise PlanError(
                f"Plan: down_slices is {self.down_slices}: what experts make of a token comes whole: give 1"
            )

    def _check_fused_router(self, shape: ModelShape, gpu: Gpu) -> None:
        """A block has a row of the router, and multiplies it with what it brings for its M-tiles of other matrices."""
        if self.fused_router != 1:
            raise PlanError(f"Plan: fused_router is {self.fused_router}: give 0 or 1")
        if shape.experts is None:
            raise PlanError("Plan: fused_router is 1, and the model has no experts: leave it out")
        if self.tokens > 1 or self.sync != "flags" or gpu.ranks > 1 or self.kv_chunk:
            raise PlanError(
                "Plan: fused_router is 1: it is for steps of one token on one GPU, by flags, whose bits no other "
                "kernel promises (kv_chunk): give 0"
            )
        if shape.norms_behind or shape.delta is not None or shape.table.taps:
            raise PlanError(
                "Plan: fused_router is 1: it is for layers of attention alone, without norms behind products: give 0"
            )
        owners, of_heads = ceil_div(shape.hidden, M_TILE_ROWS), ceil_div(shape.table.heads.rows, M_TILE_ROWS)
        if shape.experts.count > MOST_ROUTER_ROWS * min(gpu.blocks, owners) or of_heads < gpu.blocks:
            raise PlanError(
                f"Plan: fused_router is 1 with {shape.experts.count} experts and {gpu.blocks} blocks, of which each "
                f"has rows of {MOST_ROUTER_ROWS} at most beside M-tiles of o ({owners}) and of q, k and v "
                f"({of_heads}): give 0"
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
        """Field names and values, ready for JSON; those of SELDOM where they say something."""
        return {name: value for name, value in asdict(self).items() if name not in SELDOM or value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Plan":
        """The plan that `to_dict` wrote; PlanError names unknown and missing fields."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise PlanError(f"Plan: unknown field {', '.join(unknown)}: the fields are {', '.join(sorted(known))}")
        if missing := sorted({"consumer_warps", "stage_bytes", "stages"} - set(values)):
            raise PlanError(f"Plan: missing field {', '.join(missing)}")
        return cls(**values)
