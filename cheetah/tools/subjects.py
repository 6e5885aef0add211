"""What `cheetah check` looks at: small models of the named one's kind, each with what other sizes and weights hide.

The awkward one: nothing divides, so its sizes are padded in every matrix and vector; half of its tokens have embeddings
so small that the norm's epsilon decides; rows of its head are equal, so that every greedy choice is a tie within a
lane's tokens, within a block and between blocks, and neighbouring rows of its routers are; its kernel takes several
sequences, whose pages are few tokens that do not divide a stage. The one of many tokens has narrow M-tiles, vectors in
halves of L2 and as many columns as a prompt, and a window. The one behind the grid barrier has a cache in 8 bits, whose
scales all differ, and items of a fixed length, more of them than a block keeps and more states than a row keeps. Plans
leave alone what options name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.family import MatrixRows, QuantizedMatrix, Tensors
from cheetah.models.layer_kind import DeltaNet
from cheetah.models.registry import family_of
from cheetah.models.rounding import F32, as_bf16, widen
from cheetah.plan import Gpu, gpu_named
from cheetah.plan.delta import DIMS
from cheetah.plan.formats import BF16, KV_TILE_TOKENS, M_TILE_ROWS, VECTOR_COLUMNS
from cheetah.plan.index import round_up
from cheetah.plan.narrow import LEAST_COLUMNS_EMULATED
from cheetah.plan.plan import MOST_ROUTER_ROWS, STEP_TOKENS
from cheetah.plan.products import PAIR_ROWS
from cheetah.runtime.checkpoint.random_weights import RandomTensors, random_tensors
from cheetah.tools.rig import GivenWeights, weights_of

MOST_LAYERS, MOST_KV_HEADS, TAPPED_LAYERS = 2, 2, 3
MOST_EXPERTS, MOST_CHOSEN = 11, 3
AWKWARD = {"hidden_size": 72, "intermediate_size": 296, "vocab_size": 148}
MANY_TOKENS = {"hidden_size": 144, "intermediate_size": 320, "vocab_size": 100}
BEHIND_BARRIER = {"hidden_size": 136, "intermediate_size": 424, "vocab_size": 90}
ALIKE = 64
"""Rows of the head are equal at distances 1, 16 and this: M-tiles of 16 rows, dealt to 4 blocks."""
FAINTNESS = np.float32(2.0**-10)
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight")
WINDOW, LONG_CONTEXT = 70, 352
"""Tokens of a window, and of the context in which a row has more states of 16 keys than a merge keeps (20)."""


@dataclass(frozen=True)
class Subject:
    """A model to check, with fields of its kernels' plan. kind: what it is, in words. cuts_short: its machine has items
    of as few keys as can be. blocks: of its machine, if not those of the one that is named."""

    kind: str
    config: ModelConfig
    tensors: Tensors
    plan: Mapping[str, Any] = field(default_factory=dict)
    cuts_short: bool = False
    blocks: int | None = None

    @property
    def weights(self) -> GivenWeights:
        """With scales of a cache in 8 bits that differ for each layer, for keys and values, and for each head."""
        return weights_of(self.config, self.tensors, kv_scales_of(self.config))

    def machine(self, name: str) -> Gpu:
        """The machine of that name, as the subject wants it."""
        gpu = gpu_named(name)
        gpu = replace(gpu, blocks=self.blocks or gpu.blocks)
        return replace(gpu, kv_chunk_min=KV_TILE_TOKENS) if self.cuts_short else gpu


def kv_scales_of(config: ModelConfig) -> F32:
    """f32 [layers, 2, kv_heads]: small odd numbers times powers of two, no two alike."""
    count = config.layers * 2 * config.kv_heads
    odd = 2.0 * np.arange(count) + 17
    return (odd / 512).reshape(config.layers, 2, config.kv_heads).astype(np.float32)


def awkward_subject(config: ModelConfig, plan: Mapping[str, Any], layers: int = 1, ranks: int = 1) -> Subject:
    """The awkward small model of the same kind as `config`. Of one layer where it makes steps: its hidden vector is
    read by the head alone."""
    small = sized(
        config, _sizes_of(config, AWKWARD, ranks), max(ranks, min(config.kv_heads, MOST_KV_HEADS)), layers, ranks
    )
    fields = {"page_size": 5, "stages": 4, **_several(plan, 4), **plan}
    return Subject(_named("an awkward small model", small), small, awkward_tensors(small), fields, True)


def many_tokens_subject(
    config: ModelConfig, plan: Mapping[str, Any], sizes: Mapping[str, int] = MANY_TOKENS, ranks: int = 1
) -> Subject:
    """One whose steps take many tokens, with narrow M-tiles and a window."""
    kv_heads, sizes = ranks, _sizes_of(config, sizes, ranks)
    while config.group * kv_heads * config.head_dim < LEAST_COLUMNS_EMULATED or (
        config.group * kv_heads * config.head_dim % (2 * BF16.columns)
    ):
        kv_heads += ranks
    small = sized(config, sizes, kv_heads, ranks=ranks)
    small = small if len(small.kinds) > 1 else replace(small, sliding_window=WINDOW)
    several = {} if "batch" in plan else {"batch": 2, "tokens": 32}
    fields = {"page_size": 16, "kv_chunk": KV_TILE_TOKENS, **several, **plan}
    return Subject(_named("one of many tokens a step", small), small, random_tensors(small), fields, True)


def barrier_subject(config: ModelConfig, plan: Mapping[str, Any], ranks: int = 1) -> Subject:
    """One whose blocks meet at the grid barrier (those of several ranks do not), with a cache in 8 bits and more items
    than a block keeps."""
    kv_heads = max(ranks, min(config.kv_heads, MOST_KV_HEADS))
    small = sized(config, _sizes_of(config, BEHIND_BARRIER, ranks), kv_heads, ranks=ranks)
    fields: dict[str, Any] = {
        "sync": "barrier" if ranks == 1 else "flags",
        "kv_dtype": "bf16" if config.delta_layers else "e4m3",
        "page_size": 48,
        "kv_chunk": KV_TILE_TOKENS,
        **({} if config.routing and plan.get("tokens") == 1 else {"down_slices": 4}),
    }
    fields = {**fields, "in_flight": 3, "in_flight_waiting": 1, **_several(plan, 8), **plan}
    fields["max_context"] = max(LONG_CONTEXT, plan.get("max_context", 0))
    return Subject(
        _named("one behind the grid barrier" if ranks == 1 else "one with a cache in 8 bits", small),
        small,
        random_tensors(small),
        fields,
        True,
    )


def drafting_subject(config: ModelConfig, plan: Mapping[str, Any], ranks: int = 1) -> Subject:
    """One whose kernel verifies drafts, with items of a few tiles of keys."""
    kv_heads = max(ranks, min(config.kv_heads, MOST_KV_HEADS))
    small = sized(config, _sizes_of(config, MANY_TOKENS, ranks), kv_heads, ranks=ranks)
    tokens = next(size for size in STEP_TOKENS if size > plan["drafts"])
    fields = {"batch": min(2, tokens), "tokens": tokens, "kv_chunk": 2 * KV_TILE_TOKENS, "stages": 5, **plan}
    return Subject(_named("one that verifies drafts", small), small, random_tensors(small), fields, True)


def tapped_subject(config: ModelConfig, plan: Mapping[str, Any], ranks: int = 1) -> Subject:
    """One whose kernels keep what all layers but the last leave, with rows that are padded."""
    kv_heads = max(ranks, min(config.kv_heads, MOST_KV_HEADS))
    small = sized(config, dealt(AWKWARD, ranks), kv_heads, TAPPED_LAYERS, ranks)
    taps = ",".join(map(str, range(small.layers - 1)))
    fields = {"page_size": 5, "stages": 4, "batch": 2, "tokens": 4, **plan, "taps": taps}
    named = _named("one that keeps hidden states", small)
    return Subject(named, small, random_tensors(small), fields, True)


def fused_subject(config: ModelConfig, plan: Mapping[str, Any]) -> Subject:
    """One whose kernel has a fused router, of which blocks have rows of several experts, also two blocks."""
    small = sized(config, AWKWARD, min(config.kv_heads, MOST_KV_HEADS))
    if small.routing is not None:
        most = 2 * MOST_ROUTER_ROWS
        small = replace(small, routing=replace(small.routing, experts=min(small.routing.experts, most)))
    fields = {"page_size": 5, "stages": 5, **plan, "batch": 1, "tokens": 1, "fused_router": 1}
    named = _named("one with a fused router", small)
    return Subject(named, small, random_tensors(small), fields, True)


def sized(
    config: ModelConfig, sizes: Mapping[str, int], kv_heads: int, layers: int = MOST_LAYERS, ranks: int = 1
) -> ModelConfig:
    """A small model of the same kind: head_dim, query heads a KV head, RoPE and tied embeddings stay, and of each kind
    of layer there is one, and one more of the first. Windows are shorter than the contexts that are looked at."""
    firsts = sorted(config.kind_of_layer.index(kind) for kind in range(len(config.kinds)))
    chosen = [*firsts, *_behind(config, firsts, layers)]
    fields: dict[str, Any] = {"layers": len(chosen), **sizes}
    if config.layer_types:
        fields["layer_types"] = tuple(config.layer_types[layer] for layer in chosen)
    if config.unrotated_layers:
        fields["unrotated_layers"] = tuple(
            number for number, layer in enumerate(chosen) if layer in config.unrotated_layers
        )
    if config.routing is not None:
        few = replace(
            config.routing,
            experts=min(config.routing.experts, MOST_EXPERTS),
            chosen=min(config.routing.chosen, MOST_CHOSEN),
        )
        width = round_up(fields.get("intermediate_size", config.intermediate_size), VECTOR_COLUMNS)
        few = replace(few, shared=min(few.shared, width + VECTOR_COLUMNS))
        fields |= {"routing": few, "intermediate_size": width}
    if config.sliding_window is not None:
        fields["sliding_window"] = min(config.sliding_window, WINDOW)
    if config.delta is not None and config.delta_layers:
        return _sized_hybrid(config, config.delta, chosen, fields, ranks)
    return replace(config, kv_heads=kv_heads, query_heads=kv_heads * config.group, **fields)


def _sized_hybrid(
    config: ModelConfig, delta: DeltaNet, chosen: Sequence[int], fields: dict[str, Any], ranks: int
) -> ModelConfig:
    """With as many value heads on a key head, and as few of both as rows of attention's heads are: so many of these
    read one key, two or more; for each of so many ranks."""
    shared = delta.value_heads // delta.key_heads
    group = next(count for count in range(2, 9) if count * config.head_dim % (shared * DIMS) == 0)
    value_heads = ranks * group * config.head_dim // DIMS
    few = replace(delta, key_heads=value_heads // shared, value_heads=value_heads)
    delta_layers = tuple(number for number, layer in enumerate(chosen) if layer in config.delta_layers)
    heads: dict[str, Any] = {"kv_heads": ranks, "query_heads": ranks * group}
    return replace(config, **heads, delta=few, delta_layers=delta_layers, **fields)


def _sizes_of(config: ModelConfig, sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Sizes of a subject: a token's experts are together about as wide as other models are, as in the published ones.
    Steps of several tokens read nearly all experts."""
    found = dict(sizes)
    if config.routing is not None:
        chosen = min(config.routing.chosen, MOST_CHOSEN)
        found["intermediate_size"] = found["intermediate_size"] // chosen
    return dealt(found, ranks)


def dealt(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Sizes of which so many ranks have as many M-tiles each, as little larger as can be."""
    found = dict(sizes)
    for name, rows in (("hidden_size", M_TILE_ROWS), ("intermediate_size", PAIR_ROWS)):
        while -(-found[name] // rows) % ranks:
            found[name] += rows
    return found


def _behind(config: ModelConfig, firsts: Sequence[int], layers: int) -> list[int]:
    """The layers behind the first of each kind: of one kind so many that there are `layers`; of several the next of
    the first one's kind, with which their pattern begins again."""
    others = [layer for layer in range(config.layers) if layer > firsts[-1]]
    if len(firsts) == 1:
        return others[: layers - 1]
    return [layer for layer in others if config.kind_of_layer[layer] == config.kind_of_layer[firsts[0]]][:1]


def _several(plan: Mapping[str, Any], batch: int) -> dict[str, int]:
    """Several sequences, unless the options say how many tokens a step takes, or of how many sequences."""
    return {"batch": min(batch, plan["tokens"])} if "tokens" in plan else {"batch": batch}


def _named(what: str, config: ModelConfig) -> str:
    sizes = f"hidden {config.hidden_size}, ffn {config.intermediate_size}, vocab {config.vocab_size}"
    return f"{what} of its kind ({sizes})"


@dataclass(frozen=True)
class AwkwardTensors:
    """The tensors of such a model by name: bf16 bits, or what quantised matrices stand for."""

    config: ModelConfig
    random: RandomTensors

    def rows(self, name: str) -> MatrixRows | QuantizedMatrix:
        """A matrix in parts; quantised ones as they are."""
        matrix = self.random.rows(name)
        return self(name) if isinstance(matrix[:1], np.ndarray) else matrix

    def __call__(self, name: str) -> NDArray[Any]:
        tensor = self.random(name)
        family = family_of(self.config)
        if name.endswith(ROUTERS):  # experts 0 and 1, 2 and 3, ... have equal logits
            return np.asarray(tensor[np.arange(len(tensor)) // 2])
        if name not in (family.embedding_tensor, family.head_tensor):
            return tensor
        tokens = np.arange(self.config.vocab_size)
        alike: NDArray[Any] = tensor[tokens % ALIKE // 32 * 8 + tokens % 16 // 2]
        if name != family.embedding_tensor:
            return alike
        values = widen(alike)
        values[tokens // 2 % 2 == 1] *= FAINTNESS
        return as_bf16(values)


def awkward_tensors(config: ModelConfig) -> AwkwardTensors:
    """Random weights with faint embeddings and equal rows of the head, for an awkward configuration."""
    return AwkwardTensors(config, random_tensors(config))
