"""The model as a page: what the layers of a dense decoder do, phase by phase, and what comes behind them.

The decode step (`program`) and passes over prompts (`prompt`) are both written from it, banners and reports say what it
says, and it can be printed before there is any kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from cheetah.models.config import ModelConfig
from cheetah.models.family import PhaseRow, layers_text, lines_of
from cheetah.models.layer_kind import AttentionKind, ClampedGate, LayerKind, Routing
from cheetah.plan.errors import PlanError
from cheetah.plan.phases import PhaseNames, PhaseText
from cheetah.plan.plan import DEFAULT_CONTEXT, Plan
from cheetah.plan.products import (
    IN_PROJ,
    ROUTER,
    ROUTES,
    SHARED_DOWN,
    SHARED_UP,
    STEP_EXCHANGES,
    AttentionPhase,
    ChoicePhase,
    DeltaPhase,
    NormPhase,
    Phase,
    Product,
    StepTable,
    Vector,
)


def layer_of(table: StepTable, kind: LayerKind, max_context: int, is_fused: bool = False) -> tuple[Line, ...]:
    """A layer of a kind: attention and feed-forward, perhaps of experts, each added to the residual. is_fused: the
    logits of experts are made beside o."""
    o, gate_up, down = table.named("o"), table.named("gate_up"), table.sliced
    onto_residual = OntoResidual(kind.residual_multiplier)

    def add(product: Product) -> tuple[Line, ...]:
        """A product that is added to the residual, with the norm behind it if there is one."""
        behind = table.norm_phase(product)
        if behind is None:
            return (Multiply(product, onto_residual),)
        return Multiply(product, Kept()), NormBehind(behind, product, onto_residual)

    return (
        *(Multiply(one, _becoming(table, one), one.input.is_normed) for one in table.taps),
        *_mixing(table, kind, max_context),
        *(_fused_choosing(table, kind, o) if is_fused else (*add(o), *_choosing(table, kind))),
        Multiply(gate_up, Gated(kind.clamped_gate or kind.activation), kind.norms.before),
        *([Multiply(table.named(SHARED_DOWN), Weighed())] if _is_shared(kind) else []),
        *add(down),
    )


def _becoming(table: StepTable, product: Product) -> Then:
    """What becomes of a product before the heads of a head that drafts."""
    if table.first is table.heads:
        return OfTaps()
    return Begun() if product.input.is_given else OntoResidual(1.0)


def _is_shared(kind: LayerKind) -> bool:
    """Whether there is an expert that every token has."""
    return kind.routing is not None and kind.routing.shared > 0


def _mixing(table: StepTable, kind: LayerKind, max_context: int) -> tuple[Line, Line]:
    """What looks at other tokens: attention, or what a layer has in its place."""
    if kind.delta is None:
        heads = Multiply(table.heads, Heads(kind.attention), kind.norms.before)
        return heads, Attend(table.attention, kind.attention, max_context)
    assert table.delta_phase is not None
    given = table.named(IN_PROJ), Mixed(), kind.norms.before
    product = Multiply(*given) if table.beside is None else MultiplyBoth(*given, beside=table.beside)
    return product, Remember(table.delta_phase)


def _choosing(table: StepTable, kind: LayerKind) -> tuple[Line, ...]:
    """What comes before experts."""
    if kind.routing is None:
        return ()
    choice = next(phase for phase in table.layer if isinstance(phase, ChoicePhase))
    router = Multiply(table.named(ROUTER), Routes(), kind.norms.before)
    if not _is_shared(kind):
        return router, ChooseExperts(choice, kind.routing)
    shared = MultiplyBeside(table.named(SHARED_UP), Gated(kind.activation), kind.norms.before)
    return router, shared, ChooseExperts(choice, kind.routing)


def _fused_choosing(table: StepTable, kind: LayerKind, o: Product) -> tuple[Line, ...]:
    """o, beside which logits are made, and the choice by them. PlanError where logits are no plain products."""
    routing = kind.routing
    if routing is None or routing.biases or not routing.normalised or not kind.norms.before:
        raise PlanError("Plan: fused_router is 1: it is for routers without biases, whose weights are of the chosen")
    if kind.residual_multiplier != 1.0 or kind.norms.plus_one or routing.shared:
        raise PlanError("Plan: fused_router is 1: it is for models whose o is added to the residual as it is")
    choice = next(phase for phase in table.layer if isinstance(phase, ChoicePhase))
    return MultiplyAndRoute(o, OntoResidual(1.0)), ChooseExperts(choice, routing)


def page_of(config: ModelConfig, max_context: int = DEFAULT_CONTEXT, is_fused: bool = False) -> Page:
    """A whole step with a context of so many tokens. is_fused: of a plan with `fused_router`."""
    require_common(config.kinds)
    table = config.shape.table
    kinds = tuple(layer_of(table, kind, max_context, is_fused) for kind in config.kinds)
    begin: Embed = Embed(table.heads.input)
    if config.drafter is not None:
        begin = TakeState(table.first.input) if config.drafter.joins_residual else GoOn(table.first.input)
    once = (Multiply(table.head, Logits(), has_norm=True), Choose())
    return Page(begin, kinds, config.kind_of_layer, once)


def page_of_plan(config: ModelConfig, plan: Plan) -> Page:
    """A whole step as a plan's kernel has it."""
    return page_of(config, plan.max_context, bool(plan.fused_router))


def require_common(kinds: Sequence[LayerKind]) -> None:
    """PlanError where layers differ in more than kernels know of: in windows, rotary embeddings and scales by position,
    and in whether they have attention; all else of a layer is that of the first."""
    own = ("window", "rope", "position_scale")
    first = kinds[0].attention
    for kind in kinds[1:]:
        alike = replace(kind.attention, **{name: getattr(first, name) for name in own})
        as_first = replace(kind, attention=alike, delta=kinds[0].delta)
        pairs = {**_differing(kinds[0], as_first), **_differing(first, as_first.attention)}
        if found := ", ".join(f"{name} ({one!r} and {other!r})" for name, (one, other) in pairs.items()):
            raise PlanError(f"layers that differ in {found}: kernels know layers that differ in {', '.join(own)} alone")


def _differing(one: object, other: object) -> dict[str, tuple[object, object]]:
    """The fields of two values of a kind that differ; `attention` is looked at by itself."""
    names = (name for name in vars(one) if name != "attention")
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def page_of_head(config: ModelConfig) -> Page:
    """The head by itself, of hidden states in the place of embeddings."""
    head = config.shape.table.head
    return Page(Embed(head.input), (), (), (Multiply(head, Logits(), has_norm=True), Choose()))


# -- what becomes of the rows of a product --------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values: published, and keys and values appended to the cache."""

    kind: AttentionKind

    @property
    def about(self) -> str:
        kind = self.kind
        norms = {None: "", "each": "norms of heads", "width": "norms over all heads"}[kind.head_norms]
        done = {
            "biases": kind.biases,
            norms: norms,
            "rotary embedding": kind.rope,
            "queries scaled by position": kind.position_scale,
        }
        gates = ["gates behind them"] if kind.gated else []
        return "; ".join(
            [*(what for what, is_done in done.items() if is_done), *gates, "keys and values into the cache"]
        )


@dataclass(frozen=True)
class OntoResidual:
    """Added to the residual, times a multiplier; it is published as the norm of what follows wants it."""

    multiplier: float

    @property
    def about(self) -> str:
        times = "" if self.multiplier == 1.0 else f"times {self.multiplier:g}, "
        return f"{times}onto the residual"


@dataclass(frozen=True)
class OfTaps:
    """The residual is made of them."""

    about = "onto the residual of columns that have what layers of the other model leave"


@dataclass(frozen=True)
class Begun:
    """The residual begins with them."""

    about = "the residual"


@dataclass(frozen=True)
class Kept:
    """Kept by the blocks that own them, for the norm behind the product."""

    about = "rows kept for the norm behind them"


@dataclass(frozen=True)
class Gated:
    """The activation of the gate's rows times the other rows."""

    activation: str | ClampedGate

    @property
    def about(self) -> str:
        if self.activation == "relu2":
            return "max(up, 0)^2"
        return f"{self.activation}(gate) * up" if isinstance(self.activation, str) else str(self.activation)


@dataclass(frozen=True)
class Weighed:
    """Added to the residual, which nobody is told of so far."""

    about = "times the logistic function of a logit of their own, onto the residual"


@dataclass(frozen=True)
class Mixed:
    """Published as they are, for Gated DeltaNet."""

    about = "published as they are"


@dataclass(frozen=True)
class Routes:
    """The logits of experts, in f32."""

    about = "the experts' logits"


@dataclass(frozen=True)
class Logits:
    """Logits to who wants them, and each lane's best candidates."""

    about = "logits, where they are wanted; each lane's best candidates, in registers"


Then = Heads | OntoResidual | OfTaps | Begun | Kept | Gated | Weighed | Mixed | Routes | Logits


# -- lines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line(ABC):
    """A phase of the page. waits, makes: vectors that all blocks make and all need."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def about(self) -> str: ...

    @property
    @abstractmethod
    def waits(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def makes(self) -> tuple[str, ...]: ...

    fetched: ClassVar[str] = ""
    """What the producer role does meanwhile, if not the same."""

    @property
    def meets(self) -> bool:
        """Whether what it makes is read behind it."""
        return True

    @property
    def text(self) -> PhaseText:
        """What the kernel's text says of it."""
        return PhaseText(self.name, self.about, self.waits, self.makes, self.fetched, self.meets)

    @property
    def matrix(self) -> str:
        """The matrix whose product it is, as people read it; nothing of other phases."""
        return ""


@dataclass(frozen=True)
class OfPhase(Line):
    """What a phase of the table does."""

    phase: Phase

    @property
    def name(self) -> str:
        return self.phase.name

    @property
    def waits(self) -> tuple[str, ...]:
        return self.phase.input.names

    @property
    def makes(self) -> tuple[str, ...]:
        return () if self.phase.output is None else self.phase.output.names


@dataclass(frozen=True)
class Embed(Line):
    """The embeddings of the step's tokens, published as every hidden vector is: no phase of its own in reports."""

    vector: Vector
    name = "embedding"
    about = "The tokens' embeddings, with which the residual begins."
    waits = ()

    @property
    def makes(self) -> tuple[str, ...]:
        return self.vector.names


@dataclass(frozen=True)
class GoOn(Embed):
    """What a head that drafts begins a step with, where nothing is given that the other model's layers left."""

    name = "own state"
    about = "The residual that the last step left, where no column has what the other model's layers leave."


@dataclass(frozen=True)
class TakeState(Embed):
    """What a head that drafts begins a step with whose residual is made of a state."""

    name = "state"
    about = "What the other model's last layer left, times the weights of its norm, or the state of the last step."


@dataclass(frozen=True)
class Multiply(OfPhase):
    """A product, and what becomes of its rows. has_norm: its input goes through one."""

    phase: Product
    then: Then
    has_norm: bool = False

    @property
    def product(self) -> Product:
        return self.phase

    @property
    def about(self) -> str:
        sources = ", ".join(source.name for source in self.product.sources)
        of_experts = "" if self.product.experts is None else " of the chosen experts"
        return f"{'Norm; ' if self.has_norm else ''}{sources}{of_experts}; {self.then.about}."

    @property
    def meets(self) -> bool:
        return self.product.output is not None

    @property
    def matrix(self) -> str:
        product = self.product
        each = f"{product.rows} x {product.columns} {product.format.name}"
        return each if product.experts is None else f"{product.experts.count} of {each}"


@dataclass(frozen=True)
class MultiplyBeside(Multiply):
    """The product of the same input as the one before, while what that has made is on its way. Who reads the rows waits
    behind a later meeting."""

    meets = False


@dataclass(frozen=True)
class MultiplyBoth(Multiply):
    """The same of two products: beside the one that the line is of, another of the same input, whose rows are others of
    the same vector."""

    beside: Product = field(kw_only=True)

    @property
    def matrix(self) -> str:
        other = self.beside
        return f"{super().matrix}; {other.rows} x {other.columns} {other.format.name}"


@dataclass(frozen=True)
class MultiplyAndRoute(Multiply):
    """The product of what attention makes, and, of its input, the logits of experts before a norm."""

    @property
    def about(self) -> str:
        return f"{super().about[:-1]}; the experts' logits, of its input and the residual before it."

    @property
    def makes(self) -> tuple[str, ...]:
        return *super().makes, ROUTES


@dataclass(frozen=True)
class ChooseExperts(OfPhase):
    """Every column's experts, and the list of all that some column chose, which the other roles follow."""

    phase: ChoicePhase
    routing: Routing
    fetched = "nothing"
    meets = False

    @property
    def about(self) -> str:
        routing = self.routing
        of = "those" if routing.normalised else "all"
        return f"The {routing.chosen} of {routing.experts} experts of every token; weights by the softmax of {of}."


@dataclass(frozen=True)
class NormBehind(OfPhase):
    """The norm behind a product, and what becomes of its rows then."""

    phase: NormPhase
    product: Product
    then: OntoResidual
    fetched = "nothing"

    @property
    def about(self) -> str:
        return f"Norm of the rows of {self.product.name}; {self.then.about}."


@dataclass(frozen=True)
class Attend(OfPhase):
    """Attention over the cache, and over what is not there yet, with a context of so many tokens."""

    phase: AttentionPhase
    kind: AttentionKind
    max_context: int
    fetched = "keys and values of earlier tokens"

    @property
    def about(self) -> str:
        window, kind = self.kind.window_of(self.max_context), self.kind
        done = {
            f"of the last {window} keys": window,
            f"scaled by {kind.scale}": kind.scale,
            f"logits capped at {kind.soft_cap}": kind.soft_cap,
            "with sinks": kind.sinks,
            "times gates": kind.gated,
        }
        what = ", ".join(["Attention over the cache", *(what for what, is_done in done.items() if is_done)])
        return f"{what}; then the merge of rows whose keys were split."

    @property
    def waits(self) -> tuple[str, ...]:
        return *self.phase.input.names, self.phase.partials

    @property
    def makes(self) -> tuple[str, ...]:
        return self.phase.partials, self.phase.output.name


@dataclass(frozen=True)
class Remember(OfPhase):
    """Gated DeltaNet: every share of a sequence's memory read, changed and written by the block that keeps it."""

    phase: DeltaPhase
    fetched = "nothing"

    @property
    def about(self) -> str:
        heads = self.phase.heads
        return (
            f"Gated DeltaNet of {heads.value_heads} value heads on {heads.key_heads} key heads; "
            "norms of heads by who reads them."
        )

    @property
    def makes(self) -> tuple[str, ...]:
        return *self.phase.output.names, self.phase.squares


@dataclass(frozen=True)
class Choose(Line):
    """Every column's next token."""

    name = "sampling"
    about = "The grid's choice of every column's token; the meeting of all blocks that ends a step."
    waits = makes = STEP_EXCHANGES
    meets = False


# -- the page -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Page:
    """A step: what it begins with, the layers, each of one of some kinds, and the phases behind them. The kinds have
    the same phases, whose lines may say other things, but for those of Gated DeltaNet: two others in the place of the
    first two."""

    begin: Embed
    kinds: tuple[tuple[Line, ...], ...]
    kind_of_layer: tuple[int, ...]
    once: tuple[Line, ...]

    @property
    def layer(self) -> tuple[Line, ...]:
        """The phases of a layer with attention, as the first one has them."""
        return next((lines for lines in self.kinds if not is_delta(lines)), ())

    @property
    def delta(self) -> tuple[Line, ...]:
        """Those of a layer of Gated DeltaNet, if there are any."""
        return next(filter(is_delta, self.kinds), ())

    @property
    def common(self) -> tuple[Line, ...]:
        """Those that all layers have."""
        return tuple(line for line in self.layer if not self.delta or line in self.delta)

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """The layers of Gated DeltaNet."""
        return tuple(layer for layer, kind in enumerate(self.kind_of_layer) if is_delta(self.kinds[kind]))

    @property
    def names(self) -> PhaseNames:
        """How reports count the phases."""
        of_layer, once, delta = (tuple(line.name for line in lines) for lines in (self.layer, self.once, self.delta))
        return PhaseNames(of_layer, once, len(self.kind_of_layer), delta, self.delta_layers)

    @property
    def rows(self) -> tuple[PhaseRow, ...]:
        """The page as people read it."""
        of_layers = (row(line, self._layers(kind)) for kind, lines in enumerate(self.kinds) for line in lines)
        return (row(self.begin, "once"), *of_layers, *(row(line, "once") for line in self.once))

    def _layers(self, kind: int) -> str:
        its = [layer for layer, other in enumerate(self.kind_of_layer) if other == kind]
        return layers_text(its)

    def __str__(self) -> str:
        return "\n".join(lines_of(self.rows))


def is_delta(lines: Sequence[Line]) -> bool:
    """Whether a layer's phases are those of Gated DeltaNet."""
    return any(isinstance(line, Remember) for line in lines)


def row(line: Line, when: str) -> PhaseRow:
    """A line as people read it."""
    return PhaseRow(when, line.name, ", ".join(line.waits), line.matrix, ", ".join(line.makes), line.about)
