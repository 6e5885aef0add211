"""DFlash (Chen and others, 2026) and DSpark (DeepSeek, 2026): few layers of Qwen3 that draft a block of tokens at once.

A block is the last token that is known, its anchor, and mask tokens behind it. Its columns see each other, and the
tokens before by keys and values that the drafter makes of what some layers of the other model leave of them: `fc` takes
those side by side, a norm follows, and each layer projects that as it projects what the norm before its attention
makes. So a token that is known costs no layer. DSpark's Markov head adds to a column's logits what a product of two
narrow matrices makes of the token before, which is drafted by then.

Checkpoints come as DeepSpec writes them (`Qwen3DSparkModel`, DFlash among them), whose columns each draft the token
behind them, the anchor's too; and as z-lab does (`DFlashDraftModel`), whose masks draft what stands in their own place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cheetah.models.block import ARCHITECTURES, DSPARK, MEANING, Block, own_shapes
from cheetah.models.config import ModelConfig
from cheetah.models.config_json import ConfigError, ConfigFile, Dialect, stated
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import AttentionKind, LayerKind

MODEL_TYPE, ARCHITECTURE = "block_drafter", "BlockDrafter"
NESTED = "dflash_config"
MOST_TAPS = 16
LEFT_OUT = (
    *("num_target_layers", "num_anchors", "enable_confidence_head", "confidence_head_with_markov"),
    *("sliding_window", "max_window_layers", "use_sliding_window"),
)
"""Fields that say how it was trained, or of what is not read here."""
MARKOV_KINDS = ("vanilla",)


class BlockDrafterConfig(ModelConfig):
    """Layers of Qwen3 that see a whole block. `block` is always there."""

    dialect = Dialect(
        MODEL_TYPE,
        ARCHITECTURE,
        absent={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        reads=frozenset({"block_size", "mask_token_id", "target_layer_ids", "markov_rank", "sample_from_anchor"}),
        ignored=frozenset(LEFT_OUT),
    )
    layer = LayerKind(attention=AttentionKind(head_norms="each", causal=False))

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        fields = file.fields()
        columns, mask = file.count("block_size"), file.values.get("mask_token_id")
        if type(mask) is not int or not 0 <= mask < fields["vocab_size"]:
            raise file.error(f"mask_token_id = {stated(mask)}: must be one of {fields['vocab_size']} tokens")
        rank = file.values.get("markov_rank", 0)
        if type(rank) is not int or not 0 <= rank <= fields["hidden_size"]:
            raise file.error(f"markov_rank = {stated(rank)}: must be 0 to hidden_size = {fields['hidden_size']}")
        block = Block(_layers(file), columns, mask, file.flag("sample_from_anchor"), rank)
        if block.drafts < 1:
            raise file.error(f"block_size = {columns}: a block of an anchor alone drafts nothing")
        return {**fields, "block": block}

    def written(self) -> dict[str, Any]:
        block = self.block
        assert block is not None
        return {
            **super().written(),
            "block_size": block.columns,
            "mask_token_id": block.mask,
            "target_layer_ids": list(block.layers),
            "sample_from_anchor": block.from_anchor,
            "markov_rank": block.markov_rank,
        }

    @property
    def parameter_count(self) -> int:
        """Weights of the layers, of what is before them and of the Markov head."""
        hidden, block = self.hidden_size, self.block
        assert block is not None
        before = len(block.layers) * hidden * hidden + hidden
        return super().parameter_count + before + 2 * self.vocab_size * block.markov_rank


def _layers(file: ConfigFile) -> tuple[int, ...]:
    """The layers whose outputs are taken, by their numbers."""
    found = file.values.get("target_layer_ids")
    named = found if isinstance(found, list) and all(type(one) is int for one in found) else []
    if not 1 <= len(named) <= MOST_TAPS or named[0] < 0 or sorted(set(named)) != named:
        raise file.error(
            f"target_layer_ids = {stated(found)}: must be 1 to {MOST_TAPS} numbers of layers, ascending from 0 on"
        )
    return tuple(named)


def is_block_drafter(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a drafter of blocks."""
    return values.get("architectures") in [[one] for one in ARCHITECTURES]


def plain_values(values: Mapping[str, Any], place: str, target: ModelConfig) -> dict[str, Any]:
    """A config.json of either kind as `BlockDrafterConfig` reads it. target: the model that it drafts for; without a
    head of its own, z-lab's has the target's, tied if that is. ConfigError names what is not supported."""
    own = {name: value for name, value in values.items() if value is not None}
    if own.get("model_type") != "qwen3":
        raise ConfigError(f"{place}: model_type is {stated(own.get('model_type'))}, supported is 'qwen3'")
    nested = own.pop(NESTED, {})
    if not isinstance(nested, Mapping):
        raise ConfigError(f"{place}: {NESTED} is {stated(nested)}: must be an object")
    known = {"mask_token_id", "target_layer_ids", "block_size"}
    if unknown := sorted(name for name in nested if name not in known and nested[name]):
        raise ConfigError(f"{place}: {NESTED}.{unknown[0]} = {stated(nested[unknown[0]])} is not supported")
    if own.get("markov_rank") and own.get("markov_head_type") not in MARKOV_KINDS:
        found = stated(own.get("markov_head_type"))
        raise ConfigError(f"{place}: markov_head_type is {found}, supported: {', '.join(MARKOV_KINDS)}")
    own.pop("markov_head_type", None)
    for name in known & {*nested}:
        own.setdefault(name, nested[name])
    is_dspark = own["architectures"] == [DSPARK]
    if not is_dspark:
        own["tie_word_embeddings"] = target.tied_embeddings
    fixed = {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], "sample_from_anchor": is_dspark}
    return {**own, **fixed}


@dataclass(frozen=True)
class BlockDrafterFamily(DenseFamily):
    """Those of Qwen3, with what is before the layers and behind the head."""

    def tensor_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        block = config.block
        assert block is not None
        return super().tensor_shapes(config) | own_shapes(
            config.hidden_size, config.vocab_size, len(block.layers), block.markov_rank
        )

    def shape_meaning(self, tensor: str) -> str:
        return MEANING.get(tensor) or super().shape_meaning(tensor)


FAMILY = BlockDrafterFamily(BlockDrafterConfig, {})
