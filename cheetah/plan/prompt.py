"""How a pass over the tokens of prompts is laid out: tiles, stages, and where an activation lies. Plain numbers.

A pass multiplies the packed weights of decoding by the vectors of many tokens. A *tile* is `tile_m_tiles` M-tiles by
`tile_tokens` tokens; a *stage* holds two K-tiles of each of its M-tiles and the activations of the same 64 columns.

Activations lie in *token order*: for each 32 columns (a K-tile), for each group of 8 tokens, 512 bytes: four units of
8 tokens x 16 bytes. Unit u of a token holds columns 8 i + 2 u and the next, i = 0..3, since those are what lane i of a
packed fragment has at the same place of k. So a unit of 8 tokens is a core matrix of `wgmma`, two units are the 16 rows
of operand B of one product, and the activations of a tile are contiguous for each K-tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import lcm
from typing import Any

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.formats import (
    BF16,
    M_TILE_ROWS,
    VECTOR_COLUMNS,
    BlockRows,
    BlockTiles,
    QuantizedTiles,
    SparseQuantizedTiles,
    TileFormat,
)
from cheetah.plan.gpu import Gpu
from cheetah.plan.index import Index, ceil_div, round_up
from cheetah.plan.layout import MatrixLayout
from cheetah.plan.shape import ModelShape
from cheetah.plan.shared_memory import Region, SharedMap, ring_regions

GROUP_TOKENS = 8
"""Tokens of a group: those of a core matrix, and of four accumulators of a lane."""
GROUP_BYTES = GROUP_TOKENS * VECTOR_COLUMNS * 2
"""Of the 32 columns of a K-tile."""
UNIT_BYTES = GROUP_TOKENS * 16
STAGE_TILES = 2
"""K-tiles of 32 columns in a stage."""
SLOT_ALIGNMENT = 128
"""Of what a stage has of an M-tile, for the copies' sake."""
WARPGROUP_WARPS = 4
PASS_TOKENS = (2048, 1024, 512, 256)
"""Tokens that a pass may have room for, of which the runtime takes the most that fit."""
LONG_PASS_TOKENS = (8192, 4096)
"""The same of models of experts, which a pass reads whole whatever its length."""
WARPGROUP_TOKENS = 64
"""Rows of a product of a warpgroup: tokens of a sequence that it reads together in attention."""
WARPGROUP_DIMS = 128
"""Most dims of a head that it sums values of: with more, sums and queries would not leave registers for weights."""
EXPERTS_TILE = 160
"""Tokens of a tile where an expert has about 128: of tiles of 128 many experts would need two."""
SHARED_EXPERTS_TILE = 128
"""The fewest of a tile where experts have one beside them that every token has: these models have many narrow experts,
and most of what a pass multiplies is multiplied for all tokens. A stage takes as long with fewer."""
STAGES_OF = {64: 8, 128: 6, 160: 5, 256: 4}
"""By the tokens of a tile: as many as fill a block's shared memory with weights in bf16."""
LISTED_OPERANDS = 4
"""Of a stage's columns, 16 each: those among which numbers of lists are put."""
LIST_SCRATCH_BYTES = LISTED_OPERANDS * 32 * 16
"""Of a warp, for its operands of a stage."""
FINISH_TOKENS = 32
"""Of a tile where the parts of a product are added."""
ACCUMULATOR_BYTES = 512
"""f32 sums of an M-tile and a group of tokens, in the order of a warp's registers: what a residual is kept in."""


def stage_format(format: TileFormat, whole: bool = False) -> TileFormat:
    """What a stage has of an M-tile, as a format: two K-tiles of bf16, or one with two of four columns; of some of four
    blocks a whole K-tile, twice; of quantised weights half of a K-tile's codes, with all its scales and zero points
    behind them; or, where they come whole, a K-tile, and every second stage nothing."""
    if isinstance(format, SparseQuantizedTiles):
        return _sparse_stage(format)
    if isinstance(format, BlockRows):  # zeros in the place of what is not there
        return stage_format(BF16)
    if isinstance(format, BlockTiles) or (whole and isinstance(format, QuantizedTiles)):
        return replace(format, tile_bytes=round_up(format.tile_bytes, SLOT_ALIGNMENT))
    if not isinstance(format, QuantizedTiles):
        count = STAGE_TILES * VECTOR_COLUMNS // format.columns
        return replace(format, columns=count * format.columns, tile_bytes=count * format.tile_bytes)
    codes = format.scales_at * STAGE_TILES * VECTOR_COLUMNS // format.columns
    less = format.scales_at - codes
    return replace(
        format,
        tile_bytes=round_up(format.tile_bytes - less, SLOT_ALIGNMENT),
        scales_at=codes,
        zero_points_at=max(format.zero_points_at - less, 0),
    )


def _sparse_stage(format: SparseQuantizedTiles) -> TileFormat:
    """Of 64 columns: a whole K-tile, or all codes and scales of one, with half of the places."""
    halves = format.columns // (STAGE_TILES * VECTOR_COLUMNS)
    places = (format.tile_bytes - format.places_at) // halves
    return replace(format, tile_bytes=round_up(format.places_at + places, SLOT_ALIGNMENT))


def widest_format(layouts: Iterable[MatrixLayout], whole: bool = False) -> TileFormat:
    """Of these matrices' formats the one whose weights take most of a stage: the stages are of one size, so it says
    which."""
    return max((layout.format for layout in layouts), key=lambda format: stage_format(format, whole).tile_bytes)


@dataclass(frozen=True)
class Cut:
    """Of a product. height: M-tiles of a tile, where they are fewer than there is room for, so that all blocks have as
    many tiles. parts: of k, each with tiles of its own, whose sums are added in order: they change bits."""

    height: int
    parts: int = 1


@dataclass(frozen=True)
class PassPlan:
    """The choices of a pass.

    tokens: that it has room for, a multiple of tile_tokens. warpgroups: that multiply, each four M-tiles of a tile.
    cut_tokens: products that have fewer tiles than there are blocks with so many tokens, whole tiles, are cut, see
    `Cut`; 0: none is. key_tile: keys of a stage in attention. weights_warps: that bring weights, 1 or 3."""

    tokens: int
    tile_tokens: int = 256
    warpgroups: int = 2
    stages: int = 4
    cut_tokens: int = 0
    key_tile: int = 64
    weights_warps: int = 1

    def __post_init__(self) -> None:
        require_positive("PassPlan", **{name: value for name, value in vars(self).items() if name != "cut_tokens"})
        if self.tile_tokens % GROUP_TOKENS or self.tokens % self.tile_tokens or self.cut_tokens % self.tile_tokens:
            raise PlanError(
                f"PassPlan: {self.tokens} tokens, cut for {self.cut_tokens}, in tiles of {self.tile_tokens}: give "
                f"whole tiles, of a multiple of {GROUP_TOKENS} tokens"
            )
        if self.tile_tokens > self.consumer_threads:
            raise PlanError(f"PassPlan: tiles of {self.tile_tokens} tokens with {self.consumer_threads} threads")
        if self.weights_warps not in (1, WARPGROUP_WARPS - 1):  # activations take one of the warpgroup that copies
            raise PlanError(f"PassPlan: {self.weights_warps} warps bring weights: give 1 or {WARPGROUP_WARPS - 1}")

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for manifests."""
        return asdict(self)

    def stated(self) -> dict[str, Any]:
        """The same for people: without what is as in most passes."""
        return {name: value for name, value in self.to_dict().items() if name != "weights_warps" or value != 1}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PassPlan:
        """The plan that `to_dict` gave; what else is among the values is not looked at."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})

    @property
    def whole_tiles(self) -> bool:
        """Whether K-tiles of quantised weights come whole, by one copy each: where copies are small and many."""
        return self.weights_warps > 1

    @property
    def consumer_warps(self) -> int:
        return self.warpgroups * WARPGROUP_WARPS

    @property
    def consumer_threads(self) -> int:
        return self.consumer_warps * 32

    @property
    def threads(self) -> int:
        """With the warpgroup that copies."""
        return self.consumer_threads + WARPGROUP_WARPS * 32

    def value_parts(self, head_dim: int) -> int:
        """Parts of a head's dims, each of which a warpgroup of its own sums values of. PlanError if they are not dealt
        out evenly."""
        parts = ceil_div(head_dim, WARPGROUP_DIMS)
        if self.warpgroups % parts:
            raise PlanError(
                f"PassPlan: {self.warpgroups} warpgroups and heads of {head_dim} dims: a warpgroup sums values of "
                f"{WARPGROUP_DIMS} dims: give a multiple of {parts} warpgroups"
            )
        return parts

    def attention_tokens(self, head_dim: int) -> int:
        """Tokens of a sequence that attention reads together."""
        return self.warpgroups // self.value_parts(head_dim) * WARPGROUP_TOKENS

    @property
    def tile_m_tiles(self) -> int:
        return self.consumer_warps

    def span_m_tiles(self, head_dim: int) -> int:
        """M-tiles of a head that lie in one tile."""
        return min(self.tile_m_tiles, head_dim // M_TILE_ROWS)

    @property
    def tile_groups(self) -> int:
        return self.tile_tokens // GROUP_TOKENS

    @property
    def groups(self) -> int:
        """Of tokens that there is room for."""
        return self.tokens // GROUP_TOKENS

    def weights_bytes(self, format: TileFormat) -> int:
        """Weights of a stage."""
        return self.tile_m_tiles * stage_format(format, self.whole_tiles).tile_bytes

    @property
    def activation_tile_bytes(self) -> int:
        """Activations of a tile's tokens and one K-tile."""
        return self.tile_groups * GROUP_BYTES

    def stage_bytes(self, format: TileFormat) -> int:
        return self.weights_bytes(format) + STAGE_TILES * self.activation_tile_bytes

    def residual_groups(self, format: TileFormat) -> int:
        """Groups of tokens whose residual, of a tile's M-tiles, fits into a stage."""
        groups = self.tile_groups
        while groups > 1 and (
            groups % 2 == 0 and groups * self.tile_m_tiles * ACCUMULATOR_BYTES > self.stage_bytes(format)
        ):
            groups //= 2
        fits = groups * self.tile_m_tiles * ACCUMULATOR_BYTES <= self.stage_bytes(format)
        return groups if fits else 1  # an odd number of groups, too many for a stage

    def row_tiles(self, layout: MatrixLayout, height: int | None = None) -> int:
        """Tiles that cover the M-tiles of a matrix, `height` of them each, or as many as there is room for."""
        return ceil_div(layout.full_m_tiles, height or self.tile_m_tiles)

    def cut(self, layout: MatrixLayout, blocks: int, sums_over_tile: bool) -> Cut:
        """How the product of a matrix is cut: so that the block with most work reads least. sums_over_tile: what
        becomes of a tile's rows goes over all of them (a norm's sums of squares), so that they are as many as there is
        room for; not where parts are stored first."""
        whole = Cut(self.tile_m_tiles)
        if not self.cut_tokens:
            return whole
        # Where a pass has several tiles of tokens to cut for, products take the time, and those of half a tile as much.
        least = 1 if self.cut_tokens == self.tile_tokens else self.tile_m_tiles
        cuts = (Cut(height, self._parts(layout, blocks, height)) for height in range(self.tile_m_tiles, least - 1, -1))
        allowed = [cut for cut in cuts if cut.height == whole.height or cut.parts > 1 or not sums_over_tile]
        return min(allowed, key=lambda cut: self._bytes_read(layout, blocks, cut))

    def _parts(self, layout: MatrixLayout, blocks: int, height: int) -> int:
        """The most parts of as many whole pieces each, an item a block at most."""
        has_rest = isinstance(layout.format, BlockRows) and layout.columns % layout.format.columns
        if layout.k_tiles % layout.piece_tiles or has_rest:
            return 1
        items = self.row_tiles(layout, height) * (self.cut_tokens // self.tile_tokens)
        return max((count for count in range(1, blocks // items + 1) if layout.pieces % count == 0), default=1)

    def _bytes_read(self, layout: MatrixLayout, blocks: int, cut: Cut) -> float:
        """By the block with most items, of a stage's part of k; its activations too, which come from L2."""
        items = self.row_tiles(layout, cut.height) * cut.parts * (self.cut_tokens // self.tile_tokens)
        a_stage = (
            cut.height * stage_format(layout.format, self.whole_tiles).tile_bytes
            + STAGE_TILES * self.activation_tile_bytes
        )
        return ceil_div(items, blocks) * a_stage / cut.parts

    def of_finish(self) -> PassPlan:
        """The same with as few tokens a tile as make work for more blocks where parts are added."""
        return replace(self, tile_tokens=min(self.tile_tokens, FINISH_TOKENS))

    def check(self, layout: MatrixLayout) -> None:
        """PlanError where a stage's K-tiles of a matrix would not lie side by side in the weights."""
        several = layout.chunks > 1 or layout.is_narrow
        if layout.format == BF16 and layout.tiles_per_chunk % STAGE_TILES and several:
            raise PlanError(
                f"a pass takes {STAGE_TILES} K-tiles a stage, and the chunks of {layout.name} have "
                f"{layout.tiles_per_chunk}: give decoding stages of a multiple of "
                f"{STAGE_TILES * layout.format.tile_bytes} bytes"
            )

    @staticmethod
    def vector_tiles(layout: MatrixLayout) -> int:
        """K-tiles of 32 columns that a matrix is multiplied in: of windows of blocks whole stages of those that the
        columns have."""
        if isinstance(layout.format, BlockRows):
            return round_up(ceil_div(layout.columns, VECTOR_COLUMNS), STAGE_TILES)
        return layout.padded_columns // VECTOR_COLUMNS

    def activation_bytes(self, columns: int) -> int:
        """Of a buffer of so many columns of every token."""
        return ceil_div(columns, VECTOR_COLUMNS) * self.groups * GROUP_BYTES

    def residual_floats(self, m_tiles: int) -> int:
        """Of a residual stream of so many M-tiles: [M-tile][group of tokens][lane][4]."""
        return m_tiles * self.groups * (ACCUMULATOR_BYTES // 4)

    def shared(self, format: TileFormat, budget_bytes: int | None = None, others: tuple[Region, ...] = ()) -> SharedMap:
        """The arena of a block, for weights of that format, or of others that take no more of a stage, with what else
        the model wants."""
        return SharedMap(
            (
                *ring_regions(self.stages, self.stage_bytes(format)),
                Region("scales", 2 * 4 * self.tile_tokens),
                Region("squares", 4 * self.consumer_warps * self.tile_tokens),
                *others,
            ),
            budget_bytes,
        )

    @staticmethod
    def address_in_group(column: Index, token: Index) -> Any:
        """Of one of 32 columns and 8 tokens; also for device expressions."""
        unit = column % 8 // 2
        return unit * UNIT_BYTES + token * 16 + column // 8 * 4 + column % 2 * 2


def pass_tokens(shape: ModelShape, gpu: Gpu, is_one_length: bool = False) -> tuple[int, ...]:
    """Tokens that the longest passes of a model may have room for, most first. is_one_length: they are read by one
    kernel, however few they are. Several GPUs read as many more: then each has as many tiles as one by itself, and
    brings others the first ones while it multiplies the last."""
    if shape.experts is None or is_one_length:
        return *(tokens for tokens in LONG_PASS_TOKENS if tokens <= gpu.ranks * PASS_TOKENS[0]), *PASS_TOKENS
    return *LONG_PASS_TOKENS, *PASS_TOKENS


def short_pass_plans(gpu: Gpu, shape: ModelShape) -> tuple[PassPlan, ...]:
    """The choices of passes over few tokens, fewest first, whose products are cut so that all blocks have work; of
    experts, whose tiles follow from how many tokens there are, also of those that are read whole. Where keys share a
    stage with little room for activations, stages of 8- and 4-bit weights have room for fewer of them."""
    if gpu.emulated:
        return (PassPlan(64, cut_tokens=16, **_small(shape.head_dim)),)
    medium = () if shape.experts is None else (_uncut(PASS_TOKENS[0], shape),)
    return (
        PassPlan(256, cut_tokens=128, **{**_tiles(shape, 128, 128), "key_tile": 32}),
        PassPlan(512, cut_tokens=512, **_tiles(shape, 512)),
        *medium,
    )


def default_pass_plan(gpu: Gpu, tokens: int, shape: ModelShape) -> PassPlan:
    """The choices of a pass that has room for `tokens` tokens, or a few more. Small on the emulator, which is slow."""
    if gpu.emulated:
        return PassPlan(round_up(tokens, 64), **_small(shape.head_dim))
    return _uncut(tokens, shape)


def _uncut(tokens: int, shape: ModelShape) -> PassPlan:
    """Room for so many tokens, or for a few more, so that there are whole tiles of either kind."""
    tiles = _tiles(shape, tokens, usual=128 if shape.experts is None else EXPERTS_TILE)
    return PassPlan(round_up(round_up(tokens, 256), lcm(tiles["tile_tokens"], FINISH_TOKENS)), **tiles)


def _tiles(shape: ModelShape, tokens: int, most: int = 256, usual: int = 128) -> dict[str, int]:
    """Tiles of `most` tokens; of experts no larger than holds what one has of `tokens` tokens on average. The fewer
    tokens a tile has, the more stages have room, and the fewer keys a stage."""
    each = tokens if shape.experts is None else tokens * shape.experts.chosen // shape.experts.count
    tile_tokens = next(size for size in (64, usual, most) if size >= min(each, most))
    if shape.experts is not None and shape.experts.shared:
        tile_tokens = max(tile_tokens, SHARED_EXPERTS_TILE)
    key_tile = 64 if tile_tokens > 64 and shape.head_dim <= WARPGROUP_DIMS else 32
    sizes = {"tile_tokens": tile_tokens, "stages": STAGES_OF[tile_tokens], "key_tile": key_tile}
    # Few tokens leave one warp too little time for the copies of a stage, and narrow M-tiles are twice as many.
    return sizes if shape.experts is None else {**sizes, "weights_warps": WARPGROUP_WARPS - 1}


def _small(head_dim: int) -> dict[str, Any]:
    warpgroups = ceil_div(head_dim, WARPGROUP_DIMS)
    return {"tile_tokens": 16, "warpgroups": warpgroups, "stages": 3, "key_tile": 16}


def pass_plan_for(gpu: Gpu, tokens: int, shape: ModelShape, cuts: bool = True) -> PassPlan:
    """The choices of the kernel by which so many tokens are read, where there are no more. cuts: whether products may
    be cut, which changes bits."""
    shorter = short_pass_plans(gpu, shape) if cuts else ()
    return next((plan for plan in shorter if tokens <= plan.tokens), default_pass_plan(gpu, tokens, shape))
