"""What a pass does with experts: the phases that choose them and sort tokens by them, and what is different in their
products, whose tokens are slots (`cheetah.plan.expert_slots`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.experts.choice import WarpChoice
from cheetah.blocks.prompt.cases import Given, Ranked
from cheetah.blocks.prompt.choice import Choices, PassChoice
from cheetah.blocks.prompt.expert_tiles import ExpertTiles
from cheetah.blocks.prompt.finish import Scales, StoreBySlot, StoreByToken, StoreWeighed
from cheetah.blocks.prompt.machine import PassMachine
from cheetah.blocks.prompt.sorting import PassSort
from cheetah.lang import ty
from cheetah.models.dense.launch import bias_rows, biases_of_layer
from cheetah.models.dense.page import ChooseExperts
from cheetah.models.dense.pass_parts import PassParts
from cheetah.models.dense.pass_sizes import CHOICES, EXPERT_ROWS, HIDDEN, SLOTS, SORTED, PassPhase
from cheetah.plan.products import Product, logit_words
from cheetah.plan.prompt import PassPlan


class PassExperts:
    """Of a launch."""

    def __init__(self, parts: PassParts, tiles: ExpertTiles) -> None:
        self.parts, self.tiles, self.machine = parts, tiles, parts.machine
        assert parts.factors is not None
        self.factors = parts.factors
        phases = enumerate(parts.sizes.phases)
        self.choose, self.sort = (index for index, one in phases if isinstance(one.line, ChooseExperts))
        self.products = [product for product in parts.table.products if product.experts is not None]

    @contextmanager
    def following(self, product: Product, role: ch.Role) -> Iterator[None]:
        """While a role copies for a product: of experts it follows the list of their tiles, from the first of them to
        the last."""
        if product is self.products[0]:
            self.tiles.begin_following(role)
        yield
        if product is self.products[-1]:
            self.tiles.finish_following(role)

    @ch.inline
    def emit_choice(self, phase: Any) -> None:
        """In the consumer role, in the phases before experts."""
        line, room = self.parts.sizes.phases[self.choose].line, self.tiles.slots
        assert isinstance(line, ChooseExperts)
        choices = self._choices
        with ch.if_((phase == self.choose) | (phase == self.sort)):
            with ch.if_(phase == self.choose):
                of_warp = WarpChoice(self.machine, room.experts, line.routing.normalised)
                logits = self.parts.section("routes", ty.f32)
                columns = self.parts.launch.column_count
                PassChoice(self.machine, room, self.parts.tokens, columns, logits, choices, of_warp).choose()
            with ch.else_():
                self._sort(choices)

    @property
    def _choices(self) -> Choices:
        chosen, experts, weights = CHOICES
        section = self.parts.section
        return Choices(section(chosen, ty.u32), section(experts, ty.u32), section(weights, ty.f32))

    def _sort(self, choices: Choices) -> None:
        parts, section = self.parts, self.parts.section
        PassSort(
            *(self.machine, parts.tokens, parts.launch.column_count, choices, self.tiles, parts.scales[parts.product]),
            *(section(HIDDEN), section(SORTED[0]), section(SLOTS[0], ty.u32), section(SLOTS[1], ty.f32)),
            PassPlan.vector_tiles(parts.matrices[self.products[0]]),
        ).sort()

    @property
    def _of_slots(self) -> PassMachine:
        """The machine with slots in the place of tokens."""
        return replace(self.machine, plan=self.tiles.plan)

    def store_by_expert(self) -> StoreBySlot:
        """What experts make of their slots, to be added in the next phase."""
        return StoreBySlot(self._of_slots, self.parts.section(EXPERT_ROWS[0], ty.u32), self.parts.sizes.expert_width)

    def store_weighed(self, product: Product, layer: Any, activation: Any) -> StoreWeighed:
        """What becomes of the rows of gate and up."""
        biases = biases_of_layer(self.parts.launch, product, layer)
        into, m_tiles = self.parts.sections("gated"), self.parts.matrices[product].full_m_tiles
        return StoreWeighed(self._of_slots, into, m_tiles, self.factors, activation, biases, bias_rows(product))

    def store_logits(self, machine: PassMachine, router: Product, layer: Any, scales: Scales) -> StoreByToken:
        """What becomes of the rows of the router."""
        biases, width = biases_of_layer(self.parts.launch, router, layer), logit_words(self.tiles.slots.experts)
        return StoreByToken(machine, self.parts.section("routes", ty.f32), width, scales, biases)

    def given(self, phase: PassPhase, product: Product, layer: Any, given: Given) -> Given:
        """Where the operands of a phase of experts lie."""
        assert product.experts is not None
        if not phase.adds:
            return replace(given, tiles=self.tiles)
        slots, rows = self.parts.section(SLOTS[0], ty.u32), self.parts.section(EXPERT_ROWS[0], ty.u32)
        ranked = Ranked(slots, rows, self.parts.sizes.expert_width, product.experts.chosen)
        if (biases := biases_of_layer(self.parts.launch, product, layer)) is not None:
            choices, first = self._choices, self.machine.of_all(0, ranked.width)
            ranked = replace(ranked, experts=choices.experts, weights=choices.weights, biases=biases + first)
            ranked = replace(ranked, bias_width=bias_rows(product))
        return replace(given, ranked=ranked)
