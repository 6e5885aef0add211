"""What every model is: its numbers, checked at construction, and how they are read from a config.json.

A family's configuration is a subclass that states what the family does differently. A shape that no kernel can be
generated for is refused here, with the field's name. How the fields are read from JSON, and which are refused, stands
in `config_json`. Nothing here touches weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from cheetah.models.attention_layers import AttentionLayers, rotations
from cheetah.models.block import Block
from cheetah.models.config_json import (
    FULL,
    JSON_NAMES,
    SLIDING,
    ConfigError,
    ConfigFile,
    Dialect,
    load_source,
    place_of,
)
from cheetah.models.drafter import Drafter
from cheetah.models.layer_kind import AttentionKind, ClampedGate, DeltaNet, LayerKind, Norms, PositionScale, Routing
from cheetah.models.plausible import implausible
from cheetah.models.rope import GROUP_ELEMENTS, Rope, rope_table, rotary_order
from cheetah.models.routing import fields_of_experts, written_experts
from cheetah.plan import ModelShape, PlanError
from cheetah.plan.delta import DIMS, TAPS, DeltaHeads
from cheetah.plan.formats import BF16
from cheetah.plan.products import IN_PROJ_BA, ROUTER, Experts, Product, StepTable
from cheetah.plan.shape import DrafterShape

HEAD_DIMS = (64, 96, 128, 256)
HEAD_DIMS_IN_WORDS = f"{', '.join(map(str, HEAD_DIMS[:-1]))} and {HEAD_DIMS[-1]}"
MAX_GROUP = 16
ATTENTION, DELTA = "{layer}.self_attn.", "{layer}.linear_attn."
"""In the names of what layers with attention have, and those of Gated DeltaNet."""
Shape = tuple[int, int, int, int, int, int, int]
"""hidden_size, intermediate_size, layers, query_heads, kv_heads, head_dim, vocab_size"""
COLUMN_ALIGN = 32  # columns of a packed matrix, and vectors that feed one, are padded to whole tile pairs


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape and constants. Field names are short; errors name the field of config.json.

    A family's subclass says how its config.json reads (`dialect`, `read`), and what its layers do otherwise than
    Llama's: `layer`, what is the same in all of them whatever the file says.

    rope: of layers that rotate queries and keys, all but `unrotated_layers`. sliding_window: so many keys a query sees,
    its own included, in layers whose type in `layer_types` is SLIDING; without types in all. local_rope: in the place
    of `rope` in layers of that type. attention_scale, attention_soft_cap, position_scale: of `AttentionKind`.
    residual_multiplier: of `LayerKind`. embedding_multiplier: of the rows of the embedding. logit_divisor: of the
    head's logits. logit_soft_cap: logits l become logit_soft_cap * tanh(l / logit_soft_cap). routing: of every layer's
    feed-forward, whose experts have the width `intermediate_size`. clamped_gate: of `LayerKind`. attention_biases: q,
    k, v and o have biases, whatever `layer` says. delta: of `LayerKind`, in the `delta_layers`. drafter: of a head that
    drafts for another model, whose tokens `vocab_size` counts; block: of layers that draft blocks for another model.
    """

    dialect: ClassVar[Dialect]
    layer: ClassVar[LayerKind] = LayerKind()
    fused: ClassVar[tuple[str, ...]] = ()
    """Matrices of several sources that are one tensor of the checkpoint, its rows those of one source after another."""
    interleaved: ClassVar[tuple[str, ...]] = ()
    """Those of them whose rows are of the sources in turn."""
    modules: ClassVar[Mapping[str, str]] = {}
    """The linear layers, below a layer, of sources or fused matrices that have other names than Llama's."""

    hidden_size: int
    intermediate_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    tied_embeddings: bool = False
    rope: Rope = field(default_factory=Rope)
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    local_rope: Rope | None = None
    unrotated_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    position_scale: PositionScale | None = None
    residual_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    logit_divisor: float = 1.0
    logit_soft_cap: float | None = None
    drafter: Drafter | None = None
    block: Block | None = None
    routing: Routing | None = None
    clamped_gate: ClampedGate | None = None
    attention_biases: bool = False
    delta: DeltaNet | None = None
    delta_layers: tuple[int, ...] = ()
    weight_formats: tuple[tuple[str, str], ...] = ()
    """(matrix, format) of the matrices that are not bf16."""
    act_order: bool = False
    """Whether the columns of quantised matrices lie in the order of their groups, which is not the vectors' order."""

    def __post_init__(self) -> None:
        for name, json_name in JSON_NAMES.items():
            if problem := implausible(json_name, getattr(self, name)):
                raise ConfigError(problem)
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(f"head_dim = {self.head_dim}: kernels exist for head_dim {HEAD_DIMS_IN_WORDS} only")
        if self.head_norms is not None and self.head_dim % 64:
            raise ConfigError(f"head_dim = {self.head_dim}: not supported with norms of queries and keys")
        if self.query_heads % self.kv_heads:
            raise ConfigError(
                f"num_attention_heads = {self.query_heads} is not a multiple of num_key_value_heads = {self.kv_heads}"
            )
        if self.group > MAX_GROUP:
            raise ConfigError(
                f"num_attention_heads / num_key_value_heads = {self.query_heads} / {self.kv_heads} = {self.group}: "
                f"at most {MAX_GROUP} query heads may share a key/value head"
            )
        if self.sliding_window is not None and (problem := implausible("sliding_window", self.sliding_window)):
            raise ConfigError(problem)
        if problem := implausible("rms_norm_eps", self.rms_norm_eps):
            raise ConfigError(problem)
        self._check_rotated()
        if self.routing is not None:
            self._check_routing(self.routing)

    def _check_routing(self, routing: Routing) -> None:
        """A token has as many experts as it is given to, and their parts of a vector are whole K-tiles."""
        for name, count in (("num_experts", routing.experts), ("num_experts_per_tok", routing.chosen)):
            if problem := implausible(name, count):
                raise ConfigError(problem)
        if routing.chosen > routing.experts:
            raise ConfigError(f"num_experts_per_tok = {routing.chosen}: there are num_experts = {routing.experts}")
        if ROUTER in (formats := dict(self.weight_formats)):
            raise ConfigError(f"the {ROUTER} of experts is in {formats[ROUTER]}: supported is {BF16.name}")
        if self.act_order:
            raise ConfigError("columns in the order of their groups (act-order) are not supported with experts")
        if self.intermediate_size % COLUMN_ALIGN:
            raise ConfigError(
                f"the width of an expert is {self.intermediate_size}: supported are multiples of {COLUMN_ALIGN}"
            )

    def _check_rotated(self) -> None:
        """Elements of a head that are rotated can be moved to the places that kernels have for them."""
        rotated = self.rope.rotated(self.head_dim)
        if rotated != self.head_dim and rotated % (2 * GROUP_ELEMENTS):
            raise ConfigError(
                f"partial_rotary_factor = {self.rope.partial_rotary_factor} of head_dim = {self.head_dim}: {rotated} "
                f"elements are rotated, supported: multiples of {2 * GROUP_ELEMENTS}"
            )

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """What each layer does, in order."""
        common = replace(
            self.layer,
            residual_multiplier=self.residual_multiplier,
            clamped_gate=self.clamped_gate,
            routing=self.routing,
        )
        deltas = {layer: self.delta for layer in self.delta_layers}
        return tuple(
            replace(common, attention=self.attention_of(layer), delta=deltas.get(layer)) for layer in range(self.layers)
        )

    def attention_of(self, layer: int) -> AttentionKind:
        """What attention does in a layer."""
        is_near = self.sliding_window is not None and (not self.layer_types or self.layer_types[layer] == SLIDING)
        rope = self.local_rope if is_near and self.local_rope is not None else self.rope
        return replace(
            self.layer.attention,
            window=self.sliding_window if is_near else None,
            rope=None if layer in self.unrotated_layers else rope,
            scale=self.attention_scale,
            soft_cap=self.attention_soft_cap,
            position_scale=self.position_scale,
            biases=self.has_biases,
            out_biases=self.has_out_biases,
        )

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The layers' distinct kinds, in the order of their first layers."""
        return tuple(dict.fromkeys(self.layer_kinds))

    @property
    def kind_of_layer(self) -> tuple[int, ...]:
        """Which of `kinds` each layer is."""
        kinds = self.kinds
        return tuple(kinds.index(kind) for kind in self.layer_kinds)

    @property
    def norms(self) -> Norms:
        """Those of every layer, which have the same."""
        return self.layer.norms

    @property
    def head_norms(self) -> str | None:
        """How queries and keys are normalised, in every layer: see `AttentionKind`."""
        return self.layer.attention.head_norms

    @property
    def has_biases(self) -> bool:
        """Whether q, k and v have biases, in every layer."""
        return self.layer.attention.biases or self.attention_biases

    @property
    def has_out_biases(self) -> bool:
        """Whether o has biases, in every layer."""
        return self.layer.attention.out_biases or self.attention_biases

    @property
    def has_expert_biases(self) -> bool:
        """Whether routers and experts have biases, in every layer."""
        return self.routing is not None and self.routing.biases

    @property
    def has_sinks(self) -> bool:
        """Whether attention has sinks, in every layer."""
        return self.layer.attention.sinks

    def attention_layers(self, max_context: int) -> AttentionLayers:
        """What attention does in each layer, in a context of so many tokens."""
        return AttentionLayers([kind.attention for kind in self.layer_kinds], max_context)

    @cached_property
    def shape(self) -> ModelShape:
        """The numbers that the plan works with. PlanError for a weight format or a kind of layer that no kernel has."""
        return replace(self._shape_in_bf16, formats=self.weight_formats, delta=self._delta_heads)

    @property
    def _delta_heads(self) -> DeltaHeads | None:
        """Those of layers of Gated DeltaNet. PlanError for heads that no kernel has."""
        delta = self.delta
        if delta is None or not self.delta_layers:
            return None
        if (delta.key_dim, delta.value_dim, delta.taps) != (DIMS, DIMS, TAPS):
            raise PlanError(
                f"{self.dialect.title}: Gated DeltaNet with keys of {delta.key_dim} and values of {delta.value_dim} "
                f"elements, of {delta.taps} tokens: kernels exist for {DIMS}, {DIMS} and {TAPS} only"
            )
        if self.act_order:
            raise PlanError(f"{self.dialect.title}: act-order beside Gated DeltaNet is not supported")
        return DeltaHeads(delta.key_heads, delta.value_heads, self.delta_layers)

    @property
    def table(self) -> StepTable:
        """What a step is made of, whatever the weights' formats are: here all products are in bf16."""
        return self._shape_in_bf16.table

    @cached_property
    def _shape_in_bf16(self) -> ModelShape:
        return ModelShape(
            hidden=self.hidden_size,
            ffn=self.intermediate_size,
            vocab=self.vocab_size,
            heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            layers=self.layers,
            windows=tuple(dict.fromkeys(kind.attention.window for kind in self.kinds)),
            rotations=len(rotations(kind.attention for kind in self.kinds)),
            norms_behind=self.norms.after,
            joint_norms=self.head_norms == "width",
            raw_heads=self.head_norms == "each",
            experts=self._experts,
            is_gated=self.layer.is_gated,
            drafter=self._drafter_shape,
            gated_heads=self.layer.attention.gated,
        )

    @property
    def _drafter_shape(self) -> DrafterShape | None:
        one = self.drafter
        return None if one is None else DrafterShape(len(one.layers), one.vocabulary, one.joins_residual)

    @property
    def _experts(self) -> Experts | None:
        one = self.routing
        return None if one is None else Experts(one.experts, one.chosen, one.shared)

    @property
    def formats_in_words(self) -> str:
        """The weight formats of a layer's matrices: "bf16", "int4-g128", "fp8 and bf16"."""
        formats = dict(self.weight_formats)
        names = dict.fromkeys(formats.get(product.name, BF16.name) for product in self.table.products)
        return " and ".join(names) + (", act-order" if self.act_order else "")

    @property
    def quantisable(self) -> tuple[Product, ...]:
        """The products of a layer whose matrices need not be bf16: all but the router of experts, and the numbers of
        Gated DeltaNet."""
        products = self.shape.table.products if self.delta_layers else self.table.products
        return tuple(product for product in products if product.name not in (ROUTER, IN_PROJ_BA))

    def names_of(self, name: str, layers: Iterable[int] | None = None) -> Iterator[str]:
        """What a name with `{layer}` or `{expert}` in it stands for: one of every layer (by default of all that have
        such a thing), and of every expert."""
        experts = 1 if self.routing is None or "{expert}" not in name else self.routing.experts
        for layer in (self._layers_with(name) if layers is None else layers) if "{layer}" in name else (0,):
            yield from (name.format(layer=layer, expert=expert) for expert in range(experts))

    def _layers_with(self, name: str) -> Iterator[int]:
        return (layer for layer in range(self.layers) if self.has_module(name, layer))

    def has_module(self, name: str, layer: int) -> bool:
        """Whether a layer has something of a name with `{layer}` in it."""
        of_other = ATTENTION if layer in self.delta_layers else DELTA
        return of_other not in name

    def is_ordered(self, matrix: str) -> bool:
        """Whether the columns of a matrix lie in an order of their own."""
        return self.act_order and matrix in dict(self.weight_formats)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.query_heads // self.kv_heads

    @property
    def query_rows(self) -> int:
        """Rows of q_proj: query_heads * head_dim; also the columns of o_proj."""
        return self.query_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of k_proj, and of v_proj: kv_heads * head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused q, k and v projection."""
        return self.query_rows + 2 * self.kv_rows

    @property
    def padded_hidden(self) -> int:
        """hidden_size rounded up to whole tile pairs (32 columns)."""
        return round_up(self.hidden_size, COLUMN_ALIGN)

    def embedding_columns(self, ranks: int = 1) -> int:
        """Elements of a row of the buffer `embedding`: of a head that drafts what a token adds to q, k and v, of which
        each of so many GPUs has its heads'."""
        joins = self.drafter is None or self.drafter.joins_residual
        return self.padded_hidden if joins else self.shape.of_rank(ranks).qkv_rows

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of bf16 keys and values that one token keeps in the cache, over all layers."""
        return (self.layers - len(self.delta_layers)) * 2 * self.kv_rows * 2

    @property
    def parameter_count(self) -> int:
        """Weights of the model; a tied head is counted once."""
        h, f = self.hidden_size, self.intermediate_size
        layer = (2 + self.layer.is_gated) * h * f if self.routing is None else self.routing.experts * (3 * h * f + h)
        if self.routing is not None and self.routing.biases:
            layer += self.routing.experts * (2 * f + h + 1)
        if self.routing is not None and self.routing.shared:
            layer += 3 * h * self.routing.shared + h
        layer += 2 * h * (self.norms.before + self.norms.after)
        heads = 1 if self.tied_embeddings else 2
        mixers = sum(
            self._attention_parameters if kind.delta is None else self._delta_parameters(kind.delta)
            for kind in self.layer_kinds
        )
        return self.layers * layer + mixers + heads * self.vocab_size * h + h

    @property
    def _attention_parameters(self) -> int:
        h, kind = self.hidden_size, self.layer.attention
        count = self.qkv_rows * h + h * self.query_rows + (self.query_rows * h if kind.gated else 0)
        count += h if self.has_out_biases else 0
        count += self.qkv_rows if self.has_biases else 0
        count += self.query_heads if self.has_sinks else 0
        return count + {None: 0, "each": 2 * self.head_dim, "width": self.query_rows + self.kv_rows}[self.head_norms]

    def _delta_parameters(self, delta: DeltaNet) -> int:
        rows = delta.channels + 2 * delta.value_rows + 2 * delta.value_heads
        return rows * self.hidden_size + delta.taps * delta.channels + 2 * delta.value_heads + delta.value_dim

    def window(self, max_context: int) -> int | None:
        """How many keys a query sees in the layers where it sees most, its own included; None where it sees all that a
        context of so many tokens has."""
        windows = [kind.attention.window_of(max_context) for kind in self.kinds]
        return None if None in windows else max(window for window in windows if window is not None)

    def rope_table(self, positions: int) -> NDArray[np.float32]:
        """Cosine and sine of every position's angles: float32 [positions, head_dim/2, 2]."""
        return rope_table(self.rope, self.head_dim, positions)

    @property
    def rotary_order(self) -> NDArray[np.int64]:
        """Which element of a checkpoint's head is each one of the kernel's, in queries and keys: int64 [head_dim]."""
        return rotary_order(self.rope, self.head_dim)

    def to_dict(self) -> dict[str, Any]:
        """The config.json object (transformers 5 spelling) from which `from_json` reads this value back."""
        shape = {json_name: getattr(self, name) for name, json_name in JSON_NAMES.items()}
        return {
            "architectures": [self.dialect.architecture],
            "model_type": self.dialect.model_type,
            **shape,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tied_embeddings,
            "hidden_act": "silu",
            **self.written(),
        }

    def written(self) -> dict[str, Any]:
        """What the family has beside the fields of all, as config.json says it: a family that overrides `read` says
        here what it reads."""
        numbers = {name: getattr(self, field) for name, field in self.dialect.numbers.items()}
        if "sliding_window" in self.dialect.reads:
            numbers["sliding_window"] = self.sliding_window
        if self.dialect.layer_types is not None:
            numbers["layer_types"] = list(self.layer_types or self._one_type)
        if self.attention_biases:
            numbers["attention_bias"] = True
        if self.dialect.experts is not None and self.routing is not None:
            numbers |= written_experts(self.dialect.experts, self.routing, self.intermediate_size)
        return {"rope_parameters": self.rope.to_dict(), **numbers}

    @property
    def _one_type(self) -> tuple[str, ...]:
        return (FULL if self.sliding_window is None else SLIDING,) * self.layers

    @classmethod
    def from_json(
        cls, source: str | Path | Mapping[str, Any], notes: list[str] | None = None, place: str | None = None
    ) -> Self:
        """Read a config.json (its path, or the object itself). Lines worth printing are appended to `notes`. place: how
        messages name it."""
        place, lines = place or place_of(source), list[str]() if notes is None else notes
        file = ConfigFile(place, load_source(source), cls.dialect, lines)
        fields = cls.read(file)
        file.note_unknown()
        try:
            config = cls(**fields)
        except ConfigError as problem:
            raise ConfigError(f"{place}: {problem}") from problem
        lines += [f"{place}: {line}" for line in config.suspicions()]
        return config

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        """The constructor's arguments. A family that has more than the fields of all overrides this."""
        experts = cls.dialect.experts
        return file.fields() | ({} if experts is None else fields_of_experts(file, experts))

    def notes_of_context(self, max_context: int) -> list[str]:
        """What a context of so many tokens decides, in words: which factors longrope takes."""
        if self.rope.rope_type != "longrope":
            return []
        original = self.rope.original_max_position_embeddings
        which, where = ("long", "beyond") if max_context > original else ("short", "within")
        context = f"a context of {max_context} tokens is {where} the original {original}"
        return [f"longrope takes its {which} factors: {context}"]

    def suspicions(self) -> list[str]:
        """What looks like a file that lost something, in words."""
        return []


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
