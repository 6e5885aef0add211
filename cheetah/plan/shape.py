"""The numbers of a model that the plan needs; nothing of where they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from cheetah.plan.delta import DeltaHeads
from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.formats import BF16, M_TILE_ROWS, VECTOR_COLUMNS, QuantizedTiles, TileFormat, tile_format
from cheetah.plan.index import round_up
from cheetah.plan.products import (
    IN_PROJ,
    IN_PROJ_BA,
    ROUTER,
    ROUTES,
    SHARED_DOWN,
    SHARED_UP,
    AttentionPhase,
    ChoicePhase,
    DeltaPhase,
    Experts,
    NormPhase,
    Phase,
    Product,
    RowOrder,
    Source,
    StepTable,
    Vector,
)

AnyPhase = TypeVar("AnyPhase", bound=Phase)


@dataclass(frozen=True)
class DrafterShape:
    """Of a head that drafts: how many layers of another model its residual is made of, and the tokens that it knows.
    joins_residual: whether the residual of every step is made of a state and of the token."""

    taps: int
    vocabulary: int
    joins_residual: bool = False


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder, in elements: `heads` query heads share `kv_heads` KV heads of `head_dim`.

    formats: (matrix, weight format) of the matrices that are not bf16. windows: the distinct numbers of keys that a
    query sees in the layers (None: all before it), in the order of the first layers that have them. rotations: how many
    tables of angles the layers have. norms_behind: norms lie behind attention and feed-forward, before both are added
    to the residual. joint_norms: queries are normalised over all heads together, and so are keys. raw_heads: queries
    and keys are published as they are made, and finished by who reads them. experts: of the
    feed-forward, each of width `ffn`. is_gated: the feed-forward has a gate. drafter: of a head that drafts.
    gated_heads: what a query head makes is multiplied by a gate of its own. delta: of layers of Gated DeltaNet.
    """

    hidden: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    formats: tuple[tuple[str, str], ...] = ()
    windows: tuple[int | None, ...] = (None,)
    rotations: int = 1
    norms_behind: bool = False
    joint_norms: bool = False
    raw_heads: bool = False
    experts: Experts | None = None
    is_gated: bool = True
    drafter: DrafterShape | None = None
    gated_heads: bool = False
    delta: DeltaHeads | None = None

    def __post_init__(self) -> None:
        require_positive("ModelShape", **self.sizes)
        if self.experts is not None:
            self._check_experts(self.experts)
        if self.delta is not None:
            self._check_delta(self.delta)
        for matrix, _ in self.formats:
            self.format_of(matrix)
        if self.heads % self.kv_heads:
            raise PlanError(
                f"ModelShape: {self.heads} heads on {self.kv_heads} KV heads: heads must be a multiple of kv_heads"
            )
        if self.head_dim % M_TILE_ROWS:
            raise PlanError(
                f"ModelShape: head_dim is {self.head_dim}: give a multiple of {M_TILE_ROWS} (whole M-tiles a head)"
            )

    def _check_experts(self, experts: Experts) -> None:
        if not 0 < experts.chosen <= experts.count:
            raise PlanError(f"ModelShape: {experts.chosen} of {experts.count} experts: choose 1 to {experts.count}")
        if self.ffn % VECTOR_COLUMNS:
            raise PlanError(
                f"ModelShape: experts of width {self.ffn}: give a multiple of {VECTOR_COLUMNS} (whole K-tiles)"
            )
        for matrix in ("gate_up", "down"):
            one, beside = (self.format_of(name) for name in (matrix, f"shared_{matrix}"))
            if beside not in (BF16, one):
                raise PlanError(
                    f"ModelShape: experts in {one.name}, and the one that every token has in {beside.name}: supported "
                    f"are the same format or {BF16.name}"
                )
            if one != BF16 and not isinstance(one, QuantizedTiles) or one.list_units:
                raise PlanError(f"ModelShape: experts in {one.name}: give {BF16.name} or a quantised format")

    def _check_delta(self, delta: DeltaHeads) -> None:
        """Layers with and without attention make the same vector for the same product."""
        for matrix, name in self.formats:
            one = self.format_of(matrix)
            if one != BF16 and not isinstance(one, QuantizedTiles) or one.list_units:
                raise PlanError(
                    f"ModelShape: {matrix} in {name}: beside Gated DeltaNet give {BF16.name} or a quantised format"
                )
        if not delta.is_among(self.layers):
            raise PlanError(
                f"ModelShape: layers of Gated DeltaNet are {delta.layers} of {self.layers}: give some, not all"
            )
        if delta.value_rows != self.query_rows:
            raise PlanError(
                f"ModelShape: {delta.value_heads} value heads of Gated DeltaNet have {delta.value_rows} rows, and "
                f"{self.heads} query heads {self.query_rows}: supported where both are as many"
            )

    def format_of(self, matrix: str) -> TileFormat:
        """The weight format of a matrix."""
        return tile_format(dict(self.formats).get(matrix, BF16.name))

    @property
    def tile_formats(self) -> tuple[TileFormat, ...]:
        """The weight formats of the matrices, each once."""
        return tuple(dict.fromkeys(product.format for product in self.table))

    def of_rank(self, size: int) -> ModelShape:
        """What one of `size` GPUs has of the model: its KV heads, with their query heads and their cache. Of fewer KV
        heads than GPUs each is on several of these. PlanError where they do not share them evenly."""
        if self.heads % size or self.kv_heads % size and size % self.kv_heads:
            raise PlanError(f"{self.heads} heads with {self.kv_heads} KV heads cannot be dealt evenly to {size} GPUs")
        delta = None if self.delta is None else self.delta.of_rank(size)
        return replace(self, heads=self.heads // size, kv_heads=max(1, self.kv_heads // size), delta=delta)

    @property
    def table(self) -> StepTable:
        """What a step is made of."""
        return _table(self)

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers by name."""
        return {name: value for name, value in vars(self).items() if type(value) is int}

    def describe(self) -> dict[str, int | str]:
        """The sizes by name, and the formats of matrices that are not bf16; windows and tables where there are
        several."""
        several = {"windows": len(self.windows), "rotations": self.rotations}
        sizes = {name: value for name, value in self.sizes.items() if name not in several}
        more = {name: count for name, count in several.items() if count > 1}
        if self.experts is not None:
            more |= {"experts": self.experts.count, "experts of a token": self.experts.chosen}
        if self.drafter is not None:
            more |= {"taps": self.drafter.taps, "tokens of the head": self.drafter.vocabulary}
        if self.delta is not None:
            more |= {"layers of Gated DeltaNet": len(self.delta.layers)}
        return {**sizes, **more, **{f"{matrix} in": name for matrix, name in self.formats}}

    def windows_in(self, max_context: int) -> tuple[int | None, ...]:
        """The same where contexts have so many tokens: what is as long is no window."""
        return tuple(dict.fromkeys(one if one is not None and one < max_context else None for one in self.windows))

    @property
    def head_rows(self) -> int:
        """Rows of the matrix that makes logits."""
        return self.vocab if self.drafter is None else self.drafter.vocabulary

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def query_rows(self) -> int:
        """Width of the attention output: heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def rotated_rows(self) -> int:
        """Rows of the query and key projections."""
        return (self.heads + self.kv_heads) * self.head_dim

    @property
    def qkv_rows(self) -> int:
        """Rows of the joined query, key and value projection, and of gates behind those."""
        return ((1 + self.gated_heads) * self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_layers(self) -> int:
        """Layers with attention, and so with keys and values."""
        return self.layers - (0 if self.delta is None else len(self.delta.layers))

    @property
    def padded_hidden(self) -> int:
        """`hidden` rounded up to whole K-tiles: the row length of norms and embedding."""
        return round_up(self.hidden, VECTOR_COLUMNS)


@lru_cache(maxsize=64)
def _table(shape: ModelShape) -> StepTable:
    """A decoder: attention and feed-forward, each of a norm of the residual, and added to it, perhaps behind a norm of
    its own. A feed-forward of experts has a product before it, by whose rows they are chosen."""
    hidden, middle = (Vector(name, shape.hidden, is_normed=True) for name in ("hidden", "middle"))
    heads = Vector("qkv", shape.qkv_rows, has_squares=shape.joint_norms)
    attended = Vector("attention", shape.query_rows)
    experts = shape.experts
    gated = Vector("gated", shape.ffn, parts=1 if experts is None else experts.chosen)
    of_o, of_down = middle, hidden
    if shape.norms_behind:
        of_o, of_down = (Vector(f"{name}_rows", shape.hidden, is_normed=True, is_kept=True) for name in ("o", "down"))
    kv_rows, up = shape.kv_heads * shape.head_dim, Source("up", shape.ffn)
    of_ffn = (Source("gate", shape.ffn), up) if shape.is_gated else (up,)
    ffn_order = RowOrder.PAIRS if shape.is_gated else RowOrder.PLAIN
    gates = (Source("q_gate", shape.query_rows),) if shape.gated_heads else ()
    of_heads = Source("q", shape.query_rows), Source("k", kv_rows), Source("v", kv_rows), *gates
    layer: list[Phase] = [
        *_taps(shape, hidden),
        Product("qkv", hidden, heads, of_heads, RowOrder.HEADS, is_brief=True),
        AttentionPhase("attention", heads, attended, partials="partials"),
        Product("o", attended, of_o, (Source("o", shape.hidden),), adds=True, is_brief=True),
        *_choice(middle, experts),
        Product("gate_up", middle, gated, of_ffn, ffn_order, experts=experts),
        *_shared_down(experts, shape.hidden),
        Product(
            *("down", gated, of_down, (Source("down", shape.hidden),)),
            adds=True,
            is_placed=False,
            is_sliced=True,
            experts=experts,
        ),
    ]
    if shape.norms_behind:
        layer.insert(3, NormPhase("o_norm", of_o, middle))
        layer.append(NormPhase("down_norm", of_down, hidden))
    head = Product("lm_head", hidden, None, (Source("lm_head", shape.head_rows),), is_once=True)
    phases = tuple(_in_format(shape, phase) for phase in layer)
    table = StepTable(phases, _in_format(shape, head), shape.layers)
    return table if shape.delta is None else _with_delta(shape, shape.delta, table)


def _with_delta(shape: ModelShape, heads: DeltaHeads, table: StepTable) -> StepTable:
    """With what layers of Gated DeltaNet have in the place of q, k, v and attention. Rows of b and a, a number of each
    value head, are bf16 in all files: in a product with the others only where these are."""
    rows = {"qkv": heads.channels, "z": heads.value_rows, "b": heads.value_heads, "a": heads.value_heads}
    sources = tuple(Source(f"delta_{name}", count) for name, count in rows.items())
    hidden, mixed = table.heads.input, Vector("mixed", heads.mixed_rows)
    phase = DeltaPhase("delta", mixed, table.attention.output, "head_squares", heads)
    product = Product(IN_PROJ, hidden, mixed, sources, RowOrder.GROUPS, is_brief=True)
    if shape.format_of(IN_PROJ) == BF16:
        return replace(table, delta=(product, phase))
    of_format = _in_format(shape, replace(product, sources=sources[:2]))
    beside = replace(product, name=IN_PROJ_BA, sources=sources[2:])
    return replace(table, delta=(of_format, phase), beside=beside)


def _taps(shape: ModelShape, hidden: Vector) -> Iterator[Phase]:
    """What makes the residual that a head which drafts begins with."""
    count = 0 if shape.drafter is None else shape.drafter.taps
    if shape.drafter is not None and shape.drafter.joins_residual:
        token, state = Vector("token", shape.hidden, is_given=True), Vector("state", shape.hidden, is_normed=True)
        for given, made in ((token, None), (state, hidden)):
            yield Product(f"fc_{given.name}", given, made, (Source(f"fc_{given.name}", shape.hidden),), adds=True)
        return
    for number in range(count):
        given, source = Vector(f"tap_{number}", shape.hidden, is_given=True), Source(f"fc_{number}", shape.hidden)
        yield Product(source.name, given, hidden if number + 1 == count else None, (source,), adds=True)


def _choice(middle: Vector, experts: Experts | None) -> tuple[Phase, ...]:
    """What chooses among experts: their logits, and every block's choice."""
    if experts is None:
        return ()
    routes = Vector(ROUTES, experts.logits, is_words=True)
    own, choice = Source(ROUTER, experts.count), ChoicePhase("choice", routes, None, experts)
    if not experts.shared:
        return Product(ROUTER, middle, routes, (own,), is_brief=True), choice
    router = Product(ROUTER, middle, routes, (own, Source("shared_router", 1)), RowOrder.GROUPS, is_brief=True)
    gate_and_up = tuple(Source(f"shared_{name}", experts.shared) for name in ("gate", "up"))
    up = Product(SHARED_UP, middle, _shared(experts), gate_and_up, RowOrder.PAIRS)
    return router, up, choice


def _shared(experts: Experts) -> Vector:
    """What gate and up of the expert that every token has make."""
    return Vector("shared", experts.shared)


def _shared_down(experts: Experts | None, hidden: int) -> tuple[Phase, ...]:
    """What is added to the residual before what the chosen experts make is, and by the same blocks."""
    if experts is None or not experts.shared:
        return ()
    return (Product(SHARED_DOWN, _shared(experts), None, (Source(SHARED_DOWN, hidden),), adds=True, is_placed=False),)


def _in_format(shape: ModelShape, phase: AnyPhase) -> AnyPhase:
    return replace(phase, format=shape.format_of(phase.name)) if isinstance(phase, Product) else phase
