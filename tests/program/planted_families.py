"""Bugs planted in what a family does otherwise than Llama: norms of heads and behind products, multipliers, biases,
windows, layers of several kinds."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.head_norms import HeadNorms, JointNorms, RawHead, RawHeads, widened
from cheetah.blocks.attention.schedule import Schedule
from cheetah.blocks.attention.step_port import LayerSinks, Projection, StepPort
from cheetah.blocks.attention.variants import CAUSAL, Variant
from cheetah.blocks.by_layer import chosen
from cheetah.blocks.columns import UNIT
from cheetah.blocks.linear.epilogue import AddResidual
from cheetah.blocks.linear.norm_behind import finish_kept_rows
from cheetah.blocks.linear.rms import PublishedSquares
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.models.config_json import FULL, SLIDING
from cheetah.models.dense import head_parts, step
from cheetah.models.layer_kind import PositionScale
from cheetah.models.llama import LlamaConfig
from cheetah.models.mistral import MistralConfig
from cheetah.models.qwen2 import Qwen2Config
from cheetah.models.qwen3 import Qwen3Config
from cheetah.models.rope import Rope
from cheetah.plan import M_TILE_ROWS
from tests.program.kinds import JointlyNormed, WithSinks
from tests.program.layer_kinds import behind, sandwich
from tests.program.planted import BOTH, USUAL, Bug, Patch, payload, read_without_waiting

_SIZES: Any = (48, 40, 2, 4, 2, 64, 50)
NORMED = replace(USUAL, config=Qwen3Config(*_SIZES, max_position_embeddings=256, rms_norm_eps=0.1))
"""Two KV heads of two queries, and an epsilon that is felt."""
WINDOWED = replace(USUAL, config=MistralConfig(*_SIZES, max_position_embeddings=256, sliding_window=7))
KINDS = replace(
    USUAL,
    config=LlamaConfig(
        *_SIZES,
        max_position_embeddings=256,
        sliding_window=7,
        layer_types=(FULL, SLIDING),
        local_rope=Rope(100.0),
        position_scale=PositionScale(0.5, 4),
    ),
)
"""A layer that sees all keys, and one with a window and angles of its own."""
BEHIND = replace(USUAL, config=behind())
SANDWICHED = replace(USUAL, config=sandwich())
JOINT = replace(USUAL, config=JointlyNormed(*_SIZES, max_position_embeddings=256))
"""Norms over all queries of a token, and over all its keys."""
SUNK = replace(USUAL, config=WithSinks(*_SIZES, max_position_embeddings=256))
BIASED = replace(USUAL, config=Qwen2Config(*_SIZES, max_position_embeddings=256))


def weigh_keys_as_queries(patch: Patch) -> None:
    weights_of = HeadNorms.weights_of
    patch.setattr(
        HeadNorms, "weights_of", lambda self, layer, raw: weights_of(self, layer, replace(raw, head=ty.u32(0)))
    )


def weigh_after_rotation(patch: Patch) -> None:
    """RMSNorm of the rotated head: its sum of squares is the same, its weights meet other elements."""

    @ch.inline
    def apply(self: HeadNorms, words: Any, weights: Any, raw: RawHead) -> Any:
        values, factors = widened(words), widened(weights)
        scale = self._scale(values, raw)
        rotated = self._rotated(values, raw)
        is_value = raw.head >= self.machine.shape.heads + self.machine.shape.kv_heads
        for number in range(8):
            values[number] = ch.select(is_value, values[number], rotated[number] * scale * factors[number])
        return values

    patch.setattr(HeadNorms, "apply", apply)


def normalise_over_half_a_head(patch: Patch) -> None:
    """The last shuffle of the sum of squares is missing."""
    shuffle, scale_of = prim.shuffle_xor_f32, HeadNorms._scale

    def scale(self: HeadNorms, values: Any, raw: RawHead) -> Any:
        with Patch.context() as inner:
            inner.setattr(prim, "shuffle_xor_f32", lambda value, mask: shuffle(value, mask) if mask != 4 else value)
            return scale_of(self, values, raw)

    patch.setattr(HeadNorms, "_scale", scale)


def change_epsilon(patch: Patch) -> None:
    apply = HeadNorms.apply
    patch.setattr(HeadNorms, "apply", lambda self, *others: apply(replace(self, epsilon=0.0), *others))


def append_raw_keys(patch: Patch) -> None:
    """What is kept is what was published: the key before its norm."""
    append = RawHeads.append

    @ch.inline
    def append_published(self: RawHeads, words: Any, raw: RawHead) -> None:
        unit = raw.column * (self.shape.qkv_rows // UNIT) + raw.head * self.port.head_units + raw.unit
        published = payload(self.port.exchange, "qkv", unit)
        append(self, [getattr(published, member) for member in "xyzw"], raw)

    patch.setattr(RawHeads, "append", append_published)


def take_the_bias_of(row: Any) -> Any:
    """The bias of another row: `row(rows, shape)`, in the order of the matrix' rows."""

    def change(patch: Patch) -> None:
        def value(self: Projection, rows: Any, layer: Any) -> Any:
            place = layer * self.shape.qkv_rows + row(rows, self.shape)
            return rows.sum() + prim.bf16_to_f32(self.biases[place])  # type: ignore[index]

        patch.setattr(Projection, "_value", value)

    return change


def _next_head(rows: Any, shape: Any) -> Any:
    return (rows.m_tile * M_TILE_ROWS + rows.row + shape.head_dim) % shape.qkv_rows


def _natural_order(rows: Any, shape: Any) -> Any:
    """As if rows 8 apart were neighbours in the checkpoint's order: the halves of a pair take each other's bias."""
    return rows.m_tile * M_TILE_ROWS + (rows.row + M_TILE_ROWS // 2) % M_TILE_ROWS


def forget_the_scale_behind(patch: Patch) -> None:
    """Rows are multiplied by the weights of the norm behind them, and not divided by their root mean square."""

    @ch.inline
    def of(self: Any, column: Any, arguments: Any) -> Any:
        return ty.f32(1.0)

    def finish(adding: Any, layout: Any, scale: Any, norm: Any, epilogue: Any) -> None:
        with Patch.context() as inner:
            inner.setattr(type(scale), "of", of)
            finish_kept_rows(adding, layout, scale, norm, epilogue)

    patch.setattr(step, "finish_kept_rows", finish)


def forget_the_multiplier(patch: Patch) -> None:
    def made(*arguments: Any, **named: Any) -> AddResidual:
        return replace(AddResidual(*arguments, **named), multiplier=1.0)

    patch.setattr(head_parts, "AddResidual", made)


def weigh_by_the_other_norm(patch: Patch) -> None:
    """The norm behind attention with the weights of that behind feed-forward, and the other way round."""
    weights = step.StepParts._norm_weights

    def other(self: Any, rows: Any, index: Any) -> Any:
        if rows is self.launch.norms_behind:
            index = index + 1 - 2 * (index % 2)
        return weights(self, rows, index)

    patch.setattr(step.StepParts, "_norm_weights", other)


def see_one_key_more(patch: Patch) -> None:
    windowed = Variant.windowed
    patch.setattr(Variant, "windowed", lambda window: windowed(lambda: window() + 1))


def see_what_the_plan_reads(patch: Patch) -> None:
    patch.setattr(Variant, "windowed", lambda window: CAUSAL)


def forget_the_layer(patch: Patch) -> None:
    weights_of = HeadNorms.weights_of
    patch.setattr(HeadNorms, "weights_of", lambda self, layer, raw: weights_of(self, ty.u32(0), raw))


def rotate_by_another_table(number: Any) -> Any:
    """Queries and keys rotated by table `number(port, head, right)`."""

    def change(patch: Patch) -> None:
        table = StepPort._table
        patch.setattr(StepPort, "_table", lambda self, head: number(self, head, table(self, head)))

    return change


def swap_the_scales_of_queries_and_keys(patch: Patch) -> None:
    scale = JointNorms._scale
    heads = JOINT.config.query_heads

    def other(self: JointNorms, values: Any, raw: RawHead) -> Any:
        return scale(self, values, replace(raw, head=ch.select(raw.head < heads, ty.u32(heads), ty.u32(0))))

    patch.setattr(JointNorms, "_scale", other)


def square_what_was_weighted(patch: Patch) -> None:
    publish = JointNorms.publish_squares
    patch.setattr(
        JointNorms,
        "publish_squares",
        lambda self, value, weighted, *place: publish(self, weighted, weighted, *place),
    )


def leave_out_squares(patch: Patch) -> None:
    """Those of the last unit of M-tiles of either norm."""
    part = PublishedSquares.sum_of_lane

    def sum_of_lane(self: PublishedSquares, *lane: Any) -> Any:
        known = self if self.part is None else replace(self, part=self.part[:-4])
        return part(known, *lane)

    patch.setattr(PublishedSquares, "sum_of_lane", sum_of_lane)


def read_scales_before_they_are_there(patch: Patch) -> None:
    work_out = JointNorms.work_out

    def without_meeting(self: JointNorms, epoch: Any) -> None:
        with Patch.context() as inner:
            inner.setattr(Machine, "meet", lambda self: None)
            work_out(self, epoch)

    patch.setattr(JointNorms, "work_out", without_meeting)


def take_the_sinks_of_the_first_layer(patch: Patch) -> None:
    patch.setattr(LayerSinks, "__getitem__", lambda self, head: prim.bf16_to_f32(self.sinks[head]))


def follow_the_plan_of_the_other_kind(patch: Patch) -> None:
    patch.setattr(Schedule, "_index", lambda self, role: chosen(self.index[role.name], 1 - self.kind))


def keep_one_record_for_all_kinds(patch: Patch) -> None:
    kept: Any = Schedule._kept
    patch.setattr(Schedule, "_kept", property(lambda self: kept.fget(_of_kind(self, 0))))


def _of_kind(schedule: Schedule, kind: int) -> Schedule:
    other = copy(schedule)
    other.kind = kind
    return other


FAMILY_BUGS = (
    Bug("keys normalised by the queries' weights", ("reference",), change=weigh_keys_as_queries, setup=NORMED),
    Bug("heads normalised by the first layer's weights", ("reference",), change=forget_the_layer, setup=NORMED),
    Bug("norm of a head after its rotation", ("reference",), change=weigh_after_rotation, setup=NORMED),
    Bug("norm over half a head", ("reference",), change=normalise_over_half_a_head, setup=NORMED),
    Bug("no epsilon in the norm of a head", ("reference",), change=change_epsilon, setup=NORMED),
    Bug("keys kept as they were published", ("reference",), change=append_raw_keys, setup=NORMED),
    Bug(
        "values normalised like keys",
        ("reference",),
        ((r"(values\[\d\] = )is_value_\d+ \? values\[\d\] : (rotated\[\d\];)", r"\1\2"),),
        setup=NORMED,
    ),
    Bug(
        "new keys kept by nobody",
        ("schedules",),
        ((r"newest_column - (\S+first_column) < \S+columns\b", r"newest_column < \1"),),
        setup=NORMED,
    ),
    Bug("raw heads read before they are there", BOTH, change=read_without_waiting("qkv"), setup=NORMED),
    Bug("a window of one key more", ("reference",), change=see_one_key_more, setup=WINDOWED),
    Bug("no window in the mask, only in the plan", ("reference",), change=see_what_the_plan_reads, setup=WINDOWED),
    Bug("a window of one key more in some layers", ("reference",), change=see_one_key_more, setup=KINDS),
    Bug(
        "angles of the next table",
        ("reference",),
        change=rotate_by_another_table(lambda port, head, table: (table + 1) % port.shape.rotations),
        setup=KINDS,
    ),
    Bug(
        "keys rotated by the queries' table",
        ("reference",),
        change=rotate_by_another_table(lambda port, head, table: port.query_angles),
        setup=KINDS,
    ),
    Bug("queries by the keys' 1/rms", ("reference",), change=swap_the_scales_of_queries_and_keys, setup=JOINT),
    Bug("squares of weighted rows", ("reference",), change=square_what_was_weighted, setup=JOINT),
    Bug("a head's squares left out", ("reference",), change=leave_out_squares, setup=JOINT),
    Bug("squares read before they are there", BOTH, change=read_without_waiting("qkv_squares"), setup=JOINT),
    Bug("scales read before they are there", ("schedules",), change=read_scales_before_they_are_there, setup=JOINT),
    Bug("sinks of the first layer", ("reference",), change=take_the_sinks_of_the_first_layer, setup=SUNK),
    Bug("the KV plan of another window", ("reference",), change=follow_the_plan_of_the_other_kind, setup=KINDS),
    Bug("records of the plan of another window", ("schedules",), change=keep_one_record_for_all_kinds, setup=KINDS),
    Bug("rows not normalised behind a product", ("reference",), change=forget_the_scale_behind, setup=SANDWICHED),
    Bug("no residual multiplier", ("reference",), change=forget_the_multiplier, setup=SANDWICHED),
    Bug("weights of the other norm behind", ("reference",), change=weigh_by_the_other_norm, setup=BEHIND),
    Bug("no wait for the squares of rows", BOTH, change=read_without_waiting("o_rows_squares"), setup=SANDWICHED),
    Bug("bias of the next head", ("reference",), change=take_the_bias_of(_next_head), setup=BIASED),
    Bug("bias of the other half of a pair", ("reference",), change=take_the_bias_of(_natural_order), setup=BIASED),
)
