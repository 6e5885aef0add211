"""The decode step of a head that drafts for another model: what goes in, and what goes on from step to step.

A column's residual begins with what products make of the layers of the other model that are tapped, or, where it has
none of that, with what the last step has left. A token comes in as what it adds to queries, keys and values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.features import NO_ROW, AddFeatures, Features, FeatureScale
from cheetah.blocks.linear.epilogue import NormWeights, PublishedRows, place_of
from cheetah.blocks.linear.interface import Prologue, Rows
from cheetah.blocks.linear.norm_behind import finish_kept_rows
from cheetah.blocks.linear.prologue import Slices
from cheetah.blocks.machine import Machine
from cheetah.lang import ty
from cheetah.models.config import ModelConfig
from cheetah.models.dense.launch import Launch
from cheetah.models.dense.page import Heads, Line, Multiply, OfTaps
from cheetah.models.dense.step import StepParts
from cheetah.plan.products import Product, Vector


@dataclass(frozen=True, eq=False)
class KeepResidual:
    """Rows in the place of those of the residual."""

    machine: Machine

    @ch.inline
    def __call__(self, rows: Rows) -> None:
        place = place_of(self.machine, rows)
        value = ch.const(ty.f32, rows.sum(), name="value")
        with ch.if_(rows.is_own):
            self.machine.region("residual", ty.f32)[place] = value


def _as_it_is(value: ch.Expr) -> ch.Expr:
    return value


class DraftingParts(StepParts):
    """What a step of a head that drafts is made of, where it is no other model's."""

    def __init__(self, config: ModelConfig, machine: Machine, launch: Launch) -> None:
        assert config.drafter is not None
        super().__init__(config, machine, launch)
        self.drafter = config.drafter
        self.features = Features(self.columns, launch, len(self.drafter.layers))
        self.projection.of_token, self.sampler.token_ids = self.added_by_token, launch.token_ids

    def added_by_token(self, column: Any) -> Any:
        """What a column's token adds to the rows of q, k and v (bf16*); of columns that are not in use that of one that
        is."""
        used = ch.minimum(column, self.columns.count - 1)
        return self.launch.embedding + ty.u64(self.tokens.next_token[used]) * self.machine.projected_rows

    # -- stepping -------------------------------------------------------------------------------------------------

    @ch.function
    def publish_embeddings(self, vector: Vector, norm: NormWeights, multiplier: float = 1.0) -> None:
        """In the consumer role: every column's residual, as the last step has left it, is published where no column has
        features; else those of columns that have some begin with 0. All begin so in a launch."""
        residual = self.machine.region("residual", ty.f32)
        begin = self.onto_residual(vector, norm, self.step_epoch, is_first=True)
        for rows, _ in self.rows_of_residual():
            place = ch.const(ty.u32, place_of(self.machine, rows), name="place_of_row")
            value = ch.var(ty.f32, 0.0)
            with ch.if_(rows.is_own & (self.phase.step > 0)):
                with ch.if_(self.features.row(rows.column) == NO_ROW):
                    value.set(residual[place])
            with ch.if_(self.features.are_there(self.phase.step)):
                with ch.if_(rows.is_own):
                    residual[place] = value
            with ch.else_():
                begin(replace(rows, sum=functools.partial(_as_it_is, value)))

    @ch.inline
    def end_step(self, step: Any) -> None:
        """As always; what was fetched of the next step are the matrices before attention."""

        def use_up() -> None:
            *taps, heads = (self.matrices[one] for one in (*self.table.taps, self.table.heads))
            with ch.if_(self.features.are_there(step + 1)):
                for matrix in taps:
                    self.linear.skip(matrix)
            self.linear.skip(heads)

        with self.machine.consumer:
            self.tokens.end_step(step, use_up)
        with self.machine.adding():
            self.tokens.leave_after(step)

    def emit_head(self, step: Any, epoch: ch.Expr) -> None:
        if self.drafter.norm_output:
            hidden = self.table.head.input
            self._normalise_residual(hidden, epoch, self.norm(self.table.norm_row(self.table.head, None)))
        super().emit_head(step, epoch)

    # -- phases ---------------------------------------------------------------------------------------------------

    def emit_line(self, line: Line, step: Any, layer: Any) -> None:
        if not isinstance(line, Multiply):
            return super().emit_line(line, step, layer)
        if isinstance(line.then, OfTaps):
            with self.phase(line.text):
                prologue, epilogue = self._taken(line.product), self._made(line.product, layer)
                assert (line.waits, line.makes) == (prologue.waits, epilogue.makes), line
                self.linear(self.matrices[line.product], prologue, epilogue, when=self.features.are_there(step))
            return None
        super().emit_line(line, step, layer)
        if isinstance(line.then, Heads) and self.drafter.norm_before_residual:
            norm = self.norm(self.table.norm_row(line.product, layer))
            self._normalise_residual(line.product.input, self.layer_epoch - 1, norm)
        return None

    def _taken(self, product: Product) -> Prologue:
        """What a tapped layer has left, and by what norm its products are scaled."""
        number, norms, scale = self.table.taps.index(product), self.drafter.tap_norms, None
        if norms is not None:
            first, layers = (number, 1) if norms == "each" else (0, self.features.count)
            scale = FeatureScale(self.features, first, layers, self.shape.hidden, self.config.rms_norm_eps)
        return Slices(self.columns, self.features.units(number), product.input.published, None, scale)

    def _made(self, product: Product, layer: Any) -> PublishedRows:
        onto = None
        if product.output is not None:
            norm = self.norm(self.table.norm_behind(product, layer))
            onto = self.onto_residual(product.output, norm, self.layer_epoch - 1)
        return AddFeatures(self.features, self.machine, onto)

    def _normalise_residual(self, vector: Vector, epoch: ch.Expr, norm: NormWeights) -> None:
        """The residual that was published as this vector becomes what its norm makes of it."""
        with self.machine.consumer, ch.outline(f"normalise_{vector.name}"):
            scale = self.inverse_rms(vector, epoch)
            keep = KeepResidual(self.machine)
            finish_kept_rows(self.linear.adding, self.residual, scale, norm, keep, "residual")
            self.machine.meet()
