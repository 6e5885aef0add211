"""What a step is made of, as one table: the phases of a layer and the head, with the vectors that they exchange.

Everything that asks which matrices there are, what they are multiplied with, what becomes of their rows and who reads
that asks here: layouts, shared memory, exchanges, packing, the decode step, passes over prompts, reports. What tensors
of a checkpoint the sources are is the family's matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Any, Protocol

from cheetah.plan.delta import DeltaHeads
from cheetah.plan.errors import PlanError
from cheetah.plan.formats import BF16, M_TILE_ROWS, VECTOR_COLUMNS, TileFormat
from cheetah.plan.index import ceil_div, round_up

PAIR_ROWS = M_TILE_ROWS // 2
"""Rows of the first source of an M-tile in `RowOrder.PAIRS`; those of the second are its other half."""
NORMED_EXPONENT, OTHER_EXPONENT = 32, 60
STEP_EXCHANGES = ("candidates", "short_lists", "filters")
"""The vectors that blocks exchange once a step, to choose tokens; the last two where somebody filters them."""


ROUTER = "router"
"""The product whose rows are the logits of experts."""
SHARED_UP, SHARED_DOWN = "shared_gate_up", "shared_down"
"""The products of an expert that every token has."""
IN_PROJ, IN_PROJ_BA = "in_proj", "in_proj_ba"
"""The products of layers of Gated DeltaNet that others have none of: one, or beside weights that are not bf16 a second
one of the rows that always are."""
ROUTES = "routes"
"""The vector of those logits."""
EXPERT_LIST = "experts"
"""The region with the list of a step's experts."""


class RowOrder(StrEnum):
    """The order in which a matrix has the rows of its sources, for the sake of what becomes of them.

    PLAIN: those of its only source. HEADS: of queries, keys and values, heads one after the other; in a head that is
    rotated M-tile j has dims 8j .. 8j + 7, then D/2 + 8j .. D/2 + 8j + 7, so that a pair is local to a warp. PAIRS:
    an M-tile has 8 rows of the first source, then the same 8 of the second. GROUPS: those of one source after
    another, each filled up to groups of 8 rows, and all together to whole M-tiles."""

    PLAIN = "plain"
    GROUPS = "groups"
    HEADS = "heads"
    PAIRS = "pairs"


class Multiplied(Protocol):
    """What of a `Plan` says how the vectors of a step are multiplied."""

    @property
    def tokens(self) -> int:
        """Columns of a step."""

    @property
    def by_numbers(self) -> int:
        """Whether few columns are multiplied as many are."""


@dataclass(frozen=True)
class Experts:
    """`count` matrices of one size in the place of one, of which every column is multiplied by `chosen`, ascending.
    shared: the width of one more expert, which every column has, of matrices of its own; 0: there is none."""

    count: int
    chosen: int
    shared: int = 0

    @property
    def shared_logit(self) -> int:
        """Where among a column's logits the one is by which that is weighed: behind those of all others, which are
        filled up to a group."""
        return round_up(self.count, PAIR_ROWS)

    @property
    def logits(self) -> int:
        """Rows of the router's product, with those that fill groups."""
        return self.shared_logit + PAIR_ROWS if self.shared else self.count

    def most(self, tokens: int) -> int:
        """Experts that a step of so many columns takes at most."""
        return min(self.count, self.chosen * tokens)

    def expected(self, tokens: int) -> float:
        """Experts that it takes on average, if every choice is as likely as any other."""
        return self.count * (1 - (1 - self.chosen / self.count) ** tokens)


def logit_words(experts: Experts) -> int:
    """Words of a column's logits: of all experts, and of what fills the router's last M-tile."""
    return round_up(experts.logits, M_TILE_ROWS)


@dataclass(frozen=True)
class Vector:
    """What all blocks make together and all need: `elements` numbers of every column.

    parts: so many times as many, part by part, of which each is padded by itself: one of each expert that the column
    chose, in their order. is_words: numbers in f32, a word each, not pairs of bf16.
    is_normed: a norm lies behind it, so it is published times its weights, and beside it the sums of its squares.
    is_kept: its rows stay with the blocks that made them, which publish the sums of squares alone. has_squares: the
    squares of some of its M-tiles are published beside it, for a norm of these. is_given: it lies in memory when a step
    begins, and nobody exchanges it.
    """

    name: str
    elements: int
    is_normed: bool = False
    is_kept: bool = False
    has_squares: bool = False
    parts: int = 1
    is_words: bool = False
    is_given: bool = False

    @property
    def padded(self) -> int:
        """Its elements rounded up to whole K-tiles of bf16."""
        return round_up(self.elements, VECTOR_COLUMNS)

    @property
    def published(self) -> int:
        """Elements that its makers publish, with those that fill the last M-tile, or the half of one."""
        return round_up(self.elements, M_TILE_ROWS if self.is_normed else M_TILE_ROWS // 2)

    @property
    def squares(self) -> str:
        """The vector of sums of squares beside it."""
        return f"{self.name}_squares"

    @property
    def names(self) -> tuple[str, ...]:
        """All that is exchanged of it."""
        if self.is_given:
            return ()
        has_squares = self.is_normed or self.has_squares
        return (*([] if self.is_kept else [self.name]), *([self.squares] if has_squares else []))

    @property
    def exponent(self) -> int:
        """Of the power of two that elements of a product's input are below twice of, in tagged words. An element that
        is larger is told of by the squares: its own, or those of the residual that it adds so much to."""
        return NORMED_EXPONENT if self.is_normed else OTHER_EXPONENT


@dataclass(frozen=True)
class Source:
    """Rows of a product that are a matrix of the model by themselves: ("k", 1024)."""

    name: str
    rows: int


@dataclass(frozen=True)
class Phase:
    """What all blocks do between two exchanges: of the vector `input` they make the vector `output`, if any."""

    name: str
    input: Vector
    output: Vector | None


@dataclass(frozen=True)
class AttentionPhase(Phase):
    """Attention over the cache. partials: the vector of the states of rows whose keys were split."""

    output: Vector
    partials: str


@dataclass(frozen=True)
class DeltaPhase(Phase):
    """Gated DeltaNet: what heads make of their memory, not yet normalised. squares: the vector of the sums of squares
    by which who reads `output` does that."""

    output: Vector
    squares: str
    heads: DeltaHeads


@dataclass(frozen=True)
class NormPhase(Phase):
    """The norm behind a product that is added to the residual: of the product's rows, `input`, every block adds its own
    to the residual, which `output` is."""

    output: Vector


@dataclass(frozen=True)
class ChoicePhase(Phase):
    """Every column's experts, which all blocks choose alike of the logits `input`."""

    experts: Experts


@dataclass(frozen=True)
class Product(Phase):
    """A matrix times the phase's input.

    sources: what its rows are of, in `order`. adds: whether its rows are added to the residual, which `output` then is,
    or that of the norm phase behind it.
    is_placed: whether who brings its input puts elements to the places that the matrix has for them, where its columns
    lie in an order of their own; else the rows that make the input are packed in that order. is_sliced: whether its
    input may come in parts (`Plan.down_slices`). is_brief: whether it is multiplied in little more time than two
    vectors take to become digits. is_once: once a step, not once a layer. experts: the matrix is one of each, and a
    column is multiplied by those that it chose."""

    sources: tuple[Source, ...] = ()
    order: RowOrder = RowOrder.PLAIN
    format: TileFormat = BF16
    adds: bool = False
    is_placed: bool = True
    is_sliced: bool = False
    is_brief: bool = False
    is_once: bool = False
    experts: Experts | None = None

    @property
    def columns(self) -> int:
        return self.input.elements

    @property
    def is_own(self) -> bool:
        """Whether each of several GPUs makes what it needs of the output by itself: heads are its own, also those of
        Gated DeltaNet, and the logits of experts are all, since bringing them from others takes longer than reading so
        few rows."""
        is_of_heads = self.order is RowOrder.HEADS or self.name in (IN_PROJ, IN_PROJ_BA)
        return is_of_heads or (self.output is not None and self.output.is_words)

    def in_turn(self, parts: int) -> tuple[int, int]:
        """Where the input comes in so many parts: of those that its vector has how many are in shared memory at once,
        and in how many slices one of them is cut. None is cut as long as two would be there."""
        return ceil_div(self.input.parts, parts), ceil_div(parts, self.input.parts)

    @property
    def rows(self) -> int:
        """Of the matrix: of pairs, whole M-tiles."""
        if self.order is RowOrder.PAIRS:
            return ceil_div(self.sources[0].rows, PAIR_ROWS) * M_TILE_ROWS
        if self.order is RowOrder.GROUPS:
            return round_up(sum(round_up(source.rows, PAIR_ROWS) for source in self.sources), M_TILE_ROWS)
        return sum(source.rows for source in self.sources)

    @property
    def sources_rows(self) -> int:
        """Rows of all sources together."""
        return sum(source.rows for source in self.sources)

    @property
    def tiles(self) -> int:
        """K-tiles of a row, of the format's columns."""
        return ceil_div(self.columns, self.format.columns)

    def vector_kind(self, plan: Multiplied) -> str:
        """As what the inputs of a step's tokens are multiplied; see `TileFormat.vector_kind`."""
        return self.format.vector_kind(*self._multiplied(plan))

    def vector_bytes(self, plan: Multiplied) -> int:
        """Bytes of shared memory that they take beside a K-tile."""
        return self.format.vector_units(*self._multiplied(plan)) * 16

    def sums_bytes(self, plan: Multiplied) -> int:
        """Bytes of what is kept of them for zero points, beside a K-tile."""
        return self.format.sums_bytes(*self._multiplied(plan))

    def by_numbers(self, plan: Multiplied) -> bool:
        """See `Plan`; also where a column has parts of its own, and neighbouring columns other ones."""
        return bool(plan.by_numbers) or self.input.parts > 1 and plan.tokens > 1

    def _multiplied(self, plan: Multiplied) -> tuple[int, int, bool, bool]:
        return self.columns, plan.tokens, self.is_brief, self.by_numbers(plan)


@dataclass(frozen=True)
class StepTable:
    """The phases of a layer in order, how many layers there are, and the product behind them. delta: the phases of
    layers of Gated DeltaNet, if there are any, in the place of the first two. beside: a product of the first of those,
    beside that one's own, which makes other rows of the same vector."""

    layer: tuple[Phase, ...]
    head: Product
    layers: int
    delta: tuple[Phase, ...] = ()
    beside: Product | None = None

    @property
    def kinds(self) -> tuple[tuple[Phase, ...], ...]:
        """The phases of layers with attention, and of those of Gated DeltaNet, if there are any."""
        return (self.layer, (*self.delta, *self.layer[len(self.delta) :])) if self.delta else (self.layer,)

    @property
    def products(self) -> tuple[Product, ...]:
        """Those of layers, each once."""
        of_delta = [phase for phase in self.delta if isinstance(phase, Product)]
        beside = [] if self.beside is None else [self.beside]
        return (*of_delta, *beside, *(phase for phase in self.layer if isinstance(phase, Product)))

    @property
    def delta_phase(self) -> DeltaPhase | None:
        """What layers of Gated DeltaNet have in the place of attention."""
        return next((phase for phase in self.delta if isinstance(phase, DeltaPhase)), None)

    def __iter__(self) -> Iterator[Product]:
        """The products of a layer, then the head."""
        return iter((*self.products, self.head))

    def named(self, name: str) -> Product:
        """The product of that name; PlanError lists the names there are."""
        for product in self:
            if product.name == name:
                return product
        raise PlanError(f"there is no matrix {name!r}: there are {', '.join(product.name for product in self)}")

    @property
    def attention(self) -> AttentionPhase:
        """The phase that is no product."""
        return next(phase for phase in self.layer if isinstance(phase, AttentionPhase))

    @property
    def experts(self) -> Experts | None:
        """Those of a layer's products, if it has any."""
        return next((product.experts for product in self.products if product.experts is not None), None)

    @property
    def dealt(self) -> Product | None:
        """The product of experts by whose input these are chosen, too, if there is one."""
        return next((one for one in self.products if one.experts is not None and not one.adds), None)

    @property
    def converts_dealt(self) -> bool:
        """Whether its matrices take that input otherwise than the router does, or with more padding."""
        return self.dealt is not None and self.dealt.format != BF16

    @property
    def chosen(self) -> int:
        """Matrices of a product that a column is multiplied by: of experts several."""
        return 1 if self.experts is None else self.experts.chosen

    @property
    def heads(self) -> Product:
        """The product that makes queries, keys and values."""
        return next(product for product in self.products if product.order is RowOrder.HEADS)

    @property
    def taps(self) -> tuple[Product, ...]:
        """Of a head that drafts: those before the heads, that make the residual of what layers of another model leave,
        a product for each of these, of which the last one hands on what all of them have made, or one of a state."""
        before = takewhile(lambda phase: phase != self.heads, self.layer)
        return tuple(phase for phase in before if isinstance(phase, Product))

    @property
    def first(self) -> Product:
        """The first product of a layer with attention that takes a vector which is exchanged."""
        return next(one for one in (*self.taps, self.heads) if not one.input.is_given)

    @property
    def onto_residual(self) -> tuple[Product, ...]:
        """Those whose rows are added to the residual: all have the same rows, and the same owners of them."""
        return tuple(product for product in self.products if product.adds)

    @property
    def sliced(self) -> Product:
        """The product whose input may come in parts."""
        return next(product for product in self.products if product.is_sliced)

    @property
    def whole(self) -> tuple[Product, ...]:
        """Those whose input comes whole."""
        return tuple(product for product in self if not product.is_sliced)

    # -- vectors ----------------------------------------------------------------------------------------------------

    @property
    def inputs(self) -> dict[Vector, tuple[Product, ...]]:
        """The inputs of products that are exchanged, each with those that read it."""
        inputs = (one.input for one in self.products if not one.input.is_given)
        return {one: tuple(other for other in self if other.input == one) for one in inputs}

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """Those that the phases of a layer hand on."""
        return tuple(phase.input for phase in self.layer)

    def norm_phase(self, product: Product) -> NormPhase | None:
        """The phase of the norm behind a product, where there is one."""
        found = (phase for phase in self.layer if isinstance(phase, NormPhase) and phase.input == product.output)
        return next(found, None)

    @property
    def normed(self) -> tuple[Vector, ...]:
        """Those beside which squares are published."""
        return tuple(vector for vector in self.vectors if vector.is_normed)

    @property
    def exchanges(self) -> tuple[str, ...]:
        """All vectors that are exchanged in a layer with attention, in the order in which they come."""
        return self.exchanges_of(self.layer)

    def exchanges_of(self, phases: tuple[Phase, ...]) -> tuple[str, ...]:
        """Those of a layer of these phases."""
        return tuple(name for phase in phases for name in self._exchanged_by(phase))

    def _exchanged_by(self, phase: Phase) -> Iterator[str]:
        if isinstance(phase, AttentionPhase):
            yield phase.partials
        if isinstance(phase, DeltaPhase):
            yield phase.squares
        if phase.output is not None:
            yield from phase.output.names

    def is_attended(self, vector: Vector) -> bool:
        """Whether attention makes a vector."""
        return vector == self.attention.output

    def reader_of(self, phase: Phase) -> Product:
        """The product that multiplies what a phase of a layer makes, of the same layer or the next one; the first phase
        makes what attention takes."""
        return next(other for other in self.products if other.input == phase.output)

    def packed_for(self, name: str) -> tuple[Product, ...]:
        """The product in the order of whose columns the rows of this one are packed, if any."""
        made = self.named(name).output
        return tuple(other for other in self.products if other.input == made and not other.is_placed)

    # -- tables with rows for products ------------------------------------------------------------------------------

    @property
    def norms(self) -> tuple[Product, ...]:
        """The products of a layer before which norms lie, of those that have one before them in common the last. Their
        weights are in this order, layer by layer, then the head's."""
        last = {product.input: product for product in self.products if product.input.is_normed}
        return tuple(last.values())

    @property
    def norm_count(self) -> int:
        """Norms of all layers, and the head's."""
        return self.layers * len(self.norms) + 1

    def norm_row(self, product: Product, layer: Any) -> Any:
        """The number of the norm before a product; also for device expressions. `layer` does not count for the head."""
        return self._row(tuple(one.input for one in self.norms), product, product.input, layer)

    def norm_behind(self, product: Product, layer: Any) -> Any:
        """The number of the norm that the residual goes through behind a product that is added to it; also for device
        expressions."""
        before = self.products[: self.products.index(product) + 1]
        return layer * len(self.norms) + len({one.input for one in before if one.input.is_normed})

    @property
    def placed(self) -> tuple[Product, ...]:
        """The products of a layer whose inputs have rows of the table of places, in this order; behind those of all
        layers comes the head's."""
        return tuple(product for product in self.products if product.is_placed)

    @property
    def places_count(self) -> int:
        return self.layers * len(self.placed) + 1

    def places_row(self, product: Product, layer: Any) -> Any:
        """The number of a product's row in the table of places; as `norm_row`."""
        return self._row(self.placed, product, product, layer)

    def _row(self, rows: tuple[object, ...], product: Product, entry: object, layer: Any) -> Any:
        if product.is_once:
            return self.layers * len(rows)
        return layer * len(rows) + rows.index(entry)
