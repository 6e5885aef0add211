"""The decode step of a head that drafts for another model: what goes in, and what goes on from step to step.

Of most heads a column's residual begins with what products make of the layers of the other model that are tapped, or,
where it has none of that, with what the last step has left, and a token comes in as what it adds to queries, keys and
values. Of others it is, in every step, the sum of products of the token's embedding and of a state, which is what the
other model's last norm makes, or the own one's of the last step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.features import NO_ROW, AddFeatures, Features, FeatureScale
from cheetah.blocks.linear.epilogue import NormWeights, PublishedRows, place_of
from cheetah.blocks.linear.interface import Prologue, Rows
from cheetah.blocks.linear.norm_behind import finish_kept_rows
from cheetah.blocks.linear.prologue import Slices, Units, addresses_of_units
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.models.config import ModelConfig
from cheetah.models.dense.launch import Launch
from cheetah.models.dense.page import Heads, Line, Multiply, OfTaps
from cheetah.models.dense.step import StepParts
from cheetah.plan import MatrixLayout
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
        self.sampler.ahead, self.sampler.token_ids = 2, launch.token_ids

    @ch.inline
    def end_step(self, step: Any) -> None:
        """As always; what was fetched of the next step are the matrices before attention."""

        def use_up() -> None:
            *taps, heads = (self.matrices[one] for one in (*self.table.taps, self.table.heads))
            self._skip(taps, step + 1)
            self.linear.skip(heads)

        with self.machine.consumer:
            self.tokens.end_step(step, use_up)
        with self.machine.adding():
            self.tokens.leave_after(step)

    def _skip(self, taps: Sequence[MatrixLayout], step: Any) -> None:
        """Uses up what was fetched of the matrices before the heads."""
        for matrix in taps:
            self.linear.skip(matrix)

    def emit_head(self, step: Any, epoch: ch.Expr) -> None:
        if self.drafter.norm_output:
            hidden = self.table.head.input
            self._normalise_residual(hidden, epoch, self.norm(self.table.norm_row(self.table.head, None)))
        super().emit_head(step, epoch)

    def _normalise_residual(self, vector: Vector, epoch: ch.Expr, norm: NormWeights) -> None:
        """The residual that was published as this vector becomes what its norm makes of it."""
        with self.machine.consumer, ch.outline(f"normalise_{vector.name}"):
            scale = self.inverse_rms(vector, epoch)
            keep = KeepResidual(self.machine)
            finish_kept_rows(self.linear.adding, self.residual, scale, norm, keep, "residual")
            self.machine.meet()


class TappedParts(DraftingParts):
    """Of one whose residual begins with what tapped layers leave, and goes on from step to step."""

    def __init__(self, config: ModelConfig, machine: Machine, launch: Launch) -> None:
        super().__init__(config, machine, launch)
        self.projection.of_token = self.added_by_token

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

    def _skip(self, taps: Sequence[MatrixLayout], step: Any) -> None:
        with ch.if_(self.features.are_there(step)):
            super()._skip(taps, step)

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


class JoinedParts(DraftingParts):
    """Of one whose residual is made, in every step, of the token and of a state."""

    @ch.function
    def publish_embeddings(self, vector: Vector, norm: NormWeights, multiplier: float = 1.0) -> None:
        """In the consumer role: every column's state is published as hidden vectors are: that of the other model, times
        the weights of its last norm, where the column has features, else what the norm of the last step has made. By
        how much it is too long the norm divides it."""
        residual = self.machine.region("residual", ty.f32)
        own_norm = NormWeights(self.launch.state_norm, self.config.norms.plus_one)
        begin = self.onto_residual(vector, norm, self.step_epoch, is_first=True)
        for rows, number in self.rows_of_residual():
            place = ch.const(ty.u32, place_of(self.machine, rows), name="place_of_row")
            value = ch.var(ty.f32, 0.0)
            with ch.if_(rows.is_own):
                row = ch.const(ty.u32, self.features.row(rows.column), name="feature_row")
                with ch.if_(row == NO_ROW):
                    value.set(residual[place])
                with ch.else_():
                    value.set(prim.bf16_to_f32(self.features.place(row)[number]) * own_norm.of(rows))
            begin(replace(rows, sum=functools.partial(_as_it_is, value)))

    def needs_head(self, step: Any) -> Any:
        """Also in rounds, where no launch says from which step on somebody wants it: its head is the model's."""
        samples = ch.roles_const(self.machine.roles, ty.boolean, lambda: self._samples(step), "samples")
        wanted = (step >= self.launch.head_from) & samples
        return wanted | (self.launch.logits != None)  # noqa: E711 (a device comparison)

    @ch.function
    def _samples(self, step: ch.Expr) -> ch.Expr:
        """Whether some column is behind the last input of its sequence, or at it: the same in all blocks and roles."""
        found, columns = ch.var(ty.boolean, False), self.columns
        with ch.for_(columns.count, unroll=1, name="column") as column:
            sequence = ch.const(ty.u32, columns.record(column, "sequence"), name="sequence")
            behind = (step + 1) * columns.sequence(sequence, "per_step")
            with ch.if_(behind >= columns.sequence(sequence, "given")):
                found.set(True)
        return found

    def emit_line(self, line: Line, step: Any, layer: Any) -> None:
        if not (isinstance(line, Multiply) and line.product in self.table.taps):
            return super().emit_line(line, step, layer)
        product = line.product
        with self.phase(line.text):
            if product.input.is_given:
                embeddings = Slices(self.columns, self._embeddings(), product.input.published)
                return self.linear(self.matrices[product], embeddings, KeepResidual(self.machine))
            norm = self.norm(self.table.norm_behind(product, layer))
            prologue = self.input_of(product, layer)
            epilogue = self.onto_residual(product.output, norm, self.layer_epoch - 1)
            assert (line.waits, line.makes) == (prologue.waits, epilogue.makes), line
            return self.linear(self.matrices[product], prologue, epilogue)

    def _embeddings(self) -> Units:
        """The input of the product of the token: what lies in the place of its embedding."""

        def read(data: Any, unit: ch.Expr, count: int) -> None:
            own = ch.const(ty.ptr(ty.bf16), self.tokens.embedding(self.columns.of_thread()), name="own")
            address = addresses_of_units(self.columns, own)
            with ch.for_(count, unroll=True, name="index") as index:
                words = ch.reinterpret(ty.ptr(ty.u32x4), address(unit + index * self.machine.consumer_threads))
                data[index] = words[0]

        return Units(read)


def drafting_parts(config: ModelConfig) -> type[StepParts]:
    """What the step of a model, or of a head that drafts, is made of."""
    if config.drafter is None:
        return StepParts
    return JoinedParts if config.drafter.joins_residual else TappedParts
