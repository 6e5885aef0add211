"""Bugs planted in the choice of experts and in their products: of one token a step for the gauntlet, and of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
from cheetah.blocks.experts.choice import Choice
from cheetah.blocks.experts.fused import Routing as FusedRouting
from cheetah.blocks.experts.fused import RowsBeside
from cheetah.blocks.experts.products import AllParts, ChosenRows, PartsInTurn, RankedActivations
from cheetah.blocks.linear.fragments import Activations
from cheetah.blocks.made_list import MadeList
from cheetah.lang import prim, ty
from cheetah.models.dense.step import StepParts
from cheetah.models.layer_kind import Routing
from cheetah.models.qwen3_moe import Qwen3MoeConfig
from tests.program.planted import BOTH, USUAL, Bug, Patch, Setup, read_without_waiting
from tests.program.rig import RandomWeights, Rig, random_weights


@dataclass(frozen=True)
class Decided(Setup):
    """Weights with which no choice of the course is near another: see `tests.program.test_experts`."""

    @property
    def weights(self) -> RandomWeights:
        return random_weights(self.config, 6)


ROUTED = Decided(
    replace(Qwen3MoeConfig(48, 32, 2, 2, 1, 64, 50, routing=Routing(6, 2)), max_position_embeddings=256),
    **{name: value for name, value in vars(USUAL).items() if name != "config"},
)


@dataclass(frozen=True)
class Fused(Decided):
    """The same with a fused router: blocks have rows of two experts."""

    def rig(self, **options: Any) -> Rig:
        return super().rig(**{"fused_router": 1, **options})


FUSED = Fused(**vars(ROUTED))


def weigh_all_alike(patch: Patch) -> None:
    patch.setattr(Choice, "weight", lambda self, column, rank: ty.f32(1.0))


def weigh_by_the_softmax_of_all(patch: Patch) -> None:
    made = Choice.__init__
    patch.setattr(Choice, "__init__", lambda self, columns, experts, normalised, *more: made(
        self, columns, experts, not normalised, *more
    ))  # fmt: skip


def take_the_first_expert_for_all(patch: Patch) -> None:
    patch.setattr(MadeList, "entry", lambda self, index: ch.minimum(self.words[1], self.limit - 1))


def follow_without_waiting(patch: Patch) -> None:
    patch.setattr(MadeList, "begin_following", lambda self, role: None)


def tell_of_the_list_too_soon(patch: Patch) -> None:
    """The first lane does, when it has written its own part of it."""

    def tell(self: MadeList) -> None:
        with ch.if_(self.machine.lane == 0):
            prim.mbarrier_arrive(self.made)

    patch.setattr(MadeList, "tell", tell)


def weigh_before_that_is_known(patch: Patch) -> None:
    """Adding warps look for a weight before they wait for sums."""
    finish: Any = ChosenRows.__call__

    def early(self: ChosenRows, rows: Any) -> None:
        number = self.matrix.of_rank(rows.m_tile, self.machine.rank)
        rank = self.choice.rank(rows.column, self.choice.list.entry(number // self.matrix.m_tiles))
        weight = ch.const(ty.f32, self.choice.weight(rows.column, rank), name="early")
        with Patch.context() as inner:
            inner.setattr(Choice, "weight", lambda choice, column, rank: weight)
            finish(self, rows)

    patch.setattr(ChosenRows, "__call__", early)


def take_rows_of_the_first_layer(patch: Patch) -> None:
    routing = StepParts._routing
    patch.setattr(StepParts, "_routing", lambda self, product, prologue, layer: routing(
        self, product, prologue, ty.u32(0)
    ))  # fmt: skip


def weigh_unscaled(patch: Patch) -> None:
    weigh = Choice.weigh_kept
    patch.setattr(Choice, "weigh_kept", lambda self, scale: weigh(self, ty.f32(1.0)))


def publish_logits_first(patch: Patch) -> None:
    """Before attention's output is there, so those of the layer before."""

    def begin(self: FusedRouting, matrix: Any, arrival: Any) -> None:
        with ch.if_(self.machine.warp == self.machine.plan.consumer_warps - 1):
            self._publish()
        self.inner.begin(matrix, arrival)

    patch.setattr(FusedRouting, "begin", begin)


def forget_the_residual(patch: Patch) -> None:
    """Rows of attention's output alone."""
    add = RowsBeside.add
    patch.setattr(RowsBeside, "add", lambda self, *given: add(self, *given) if self.ends else None)


FUSED_BUGS = (
    Bug("rows of the first layer's router", ("reference",), change=take_rows_of_the_first_layer, setup=FUSED),
    Bug("weights of logits that nobody scaled", ("reference",), change=weigh_unscaled, setup=FUSED),
    Bug("logits of the layer before", ("schedules",), change=publish_logits_first, setup=FUSED),
    Bug("logits without the residual", ("reference",), change=forget_the_residual, setup=FUSED),
)
EXPERT_BUGS = (
    Bug("experts all weigh alike", ("reference",), change=weigh_all_alike, setup=ROUTED),
    Bug("weights of the softmax of all", ("reference",), change=weigh_by_the_softmax_of_all, setup=ROUTED),
    Bug("the first expert for all", ("schedules",), change=take_the_first_expert_for_all, setup=ROUTED),
    Bug("experts followed before they are chosen", BOTH, change=follow_without_waiting, setup=ROUTED),
    Bug("a list that is told of too soon", BOTH, change=tell_of_the_list_too_soon, setup=ROUTED),
    Bug("weights that nobody knows yet", BOTH, change=weigh_before_that_is_known, setup=ROUTED),
    Bug("no wait for the experts' logits", BOTH, change=read_without_waiting("routes"), setup=ROUTED),
    *FUSED_BUGS,
)


# -- of several tokens a step -----------------------------------------------------------------------------------------


def list_the_first_token_s(patch: Patch) -> None:
    """The union is of the first column's experts alone."""
    whole: Any = Choice._list_union

    def of_one(self: Choice) -> None:
        with Patch.context() as inner:
            inner.setattr(Columns, "limit", property(lambda columns: 1))
            whole(self)

    patch.setattr(Choice, "_list_union", of_one)


def take_the_first_token_s_ranks(patch: Patch) -> None:
    rank = Choice.rank
    patch.setattr(Choice, "rank", lambda self, column, expert: rank(self, 0, expert))


def add_what_was_not_chosen(patch: Patch) -> None:
    patch.setattr(
        RankedActivations,
        "operand",
        lambda self, units, group, part=0: Activations.operand(self, units + self.offsets[group], group, part),
    )


def take_places_of_the_list_for_ranks(patch: Patch) -> None:
    """Where a column's parts lie follows from the list, which others are on."""
    ranked: Any = AllParts._ranked

    def by_slot(self: AllParts, matrix: Any, slot: Any) -> Any:
        offsets, is_chosen = ranked(self, matrix, slot)
        place = ch.minimum(slot, self.choice.experts.chosen - 1)
        units = matrix.k_tiles * matrix.vector_units(self.choice.columns.limit)
        return tuple(place * units for _ in offsets), is_chosen

    patch.setattr(AllParts, "_ranked", by_slot)


def bring_no_other_ranks(patch: Patch) -> None:
    patch.setattr(PartsInTurn, "_lacks", lambda self, ranks, is_chosen, there: ch.argument(0) != 0)


OF_SEVERAL: dict[str, Callable[[Patch], None]] = {
    "an expert is not on the list": list_the_first_token_s,
    "ranks of another token": take_the_first_token_s_ranks,
    "an expert that was not chosen is added": add_what_was_not_chosen,
    "parts by the list, not by rank": take_places_of_the_list_for_ranks,
    "parts in turn, of which the first stay": bring_no_other_ranks,
}
