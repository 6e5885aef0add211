"""EAGLE-3 (Li, Wei, Zhang and Zhang, 2025) and 3.1: one layer that drafts from the target's own hidden states.

Its attention takes two vectors side by side, the embedding of a token and a hidden state: of the token before, made of
what three layers of the target leave, or, behind tokens that it drafts, its own. So it is Llama's layer but for what
goes in, and for a head over few of the target's tokens. Heads come in two layouts, that of SafeAILab and that of
speculators, which differ in names alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import ConfigError, ConfigFile, Dialect, stated
from cheetah.models.dense.family import DrafterFamily
from cheetah.models.drafter import Drafter
from cheetah.models.eagle3 import tensors
from cheetah.models.family import Packing
from cheetah.plan import StepMatrices

MODEL_TYPE, ARCHITECTURE = "eagle3", "LlamaForCausalLMEagle3"
ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
"""What config.json calls it: SafeAILab and SGLang, vLLM, and speculators before and now."""
LAYERS = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config"
MOST_TAPS, UNIT = 8, 8
LEAST_LAYERS = 7
"""From which on the layers that heads tap by rule, 2, the middle and the third but last, are three in order."""
ALWAYS = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
"""Fields of `eagle_config` with the one value that there is here."""
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OF_TRAINING = (
    *(
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "embed_requires_grad",
        "base_model_ep_plan",
    ),
    *("has_no_defaults_at_init", "target_layer_count", "modules_to_not_convert", "length", "target_model_type"),
)


@dataclass(frozen=True)
class Eagle3Config(ModelConfig):
    """An EAGLE-3 head: `drafter` is always there. `vocab_size` and the embedding are the target's."""

    dialect = Dialect(
        MODEL_TYPE,
        ARCHITECTURE,
        neutral={
            **{"num_hidden_layers": (1,), "parallel_drafting": (False,), "qkv_bias": (False,)},
            "tie_word_embeddings": (False,),
        },
        reads=frozenset({"draft_vocab_size", "target_hidden_size", LAYERS, *FLAGS}),
        ignored=frozenset(_OF_TRAINING),
    )
    modules = {f"fc_{number}": f"fc_{number}" for number in range(MOST_TAPS)}  # noqa: RUF012 (a ClassVar of ModelConfig)

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        fields = file.fields()
        if file.count("target_hidden_size", fields["hidden_size"]) != fields["hidden_size"]:
            found = file.values["target_hidden_size"]
            raise file.error(
                f"target_hidden_size = {found} is not hidden_size = {fields['hidden_size']}: not supported"
            )
        if fields["hidden_size"] % UNIT:
            raise file.error(f"hidden_size = {fields['hidden_size']}: supported of a head are multiples of {UNIT}")
        vocabulary = file.count("draft_vocab_size", fields["vocab_size"])
        if vocabulary > fields["vocab_size"]:
            raise file.error(f"draft_vocab_size = {vocabulary} is more than vocab_size = {fields['vocab_size']}")
        each, whole = file.flag("fc_norm"), file.flag("norm_before_fc")
        if each and whole:
            raise file.error("fc_norm and norm_before_fc are both true: one norm before fc is supported")
        drafter = Drafter(
            _layers(file),
            vocabulary,
            "each" if each else "whole" if whole else None,
            file.flag("norm_before_residual"),
            file.flag("norm_output"),
        )
        return {**fields, "drafter": drafter}

    def written(self) -> dict[str, Any]:
        assert self.drafter is not None
        norms = self.drafter.tap_norms
        return {
            **super().written(),
            "draft_vocab_size": self.drafter.vocabulary,
            LAYERS: [layer + 1 for layer in self.drafter.layers],
            "fc_norm": norms == "each",
            "norm_before_fc": norms == "whole",
            "norm_before_residual": self.drafter.norm_before_residual,
            "norm_output": self.drafter.norm_output,
        }


def _layers(file: ConfigFile) -> tuple[int, ...]:
    """The layers whose outputs are taken; the file names those whose inputs they are."""
    found = file.values.get(LAYERS)
    named = found if isinstance(found, list) and all(type(one) is int for one in found) else []
    if not 1 <= len(named) <= MOST_TAPS or named[0] < 1 or sorted(set(named)) != named:
        raise file.error(f"{LAYERS} = {stated(found)}: must be 1 to {MOST_TAPS} numbers of layers, ascending from 1 on")
    return tuple(layer - 1 for layer in named)


def is_eagle3(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head."""
    architectures = values.get("architectures")
    return isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in ARCHITECTURES


def plain_values(values: Mapping[str, Any], place: str, target: ModelConfig) -> dict[str, Any]:
    """A config.json of either layout as `Eagle3Config` reads it. target: the model that it drafts for, whose layers are
    tapped by a rule where the file names none. Heads are trained on short texts, and draft in its whole context.
    ConfigError names what is not supported."""
    own = {name: value for name, value in values.items() if value is not None}
    nested = _object(own.pop(NESTED, {}), NESTED, place)
    layer = _object(own.pop("transformer_layer_config", {}), "transformer_layer_config", place)
    for name, wanted in ALWAYS.items():
        if nested.get(name, wanted) != wanted:
            raise ConfigError(f"{place}: {NESTED}.{name} = {stated(nested[name])} is not supported, {wanted!r} is")
    of_layer = {name: value for name, value in layer.items() if value is not None}
    of_nested = {name: nested[name] for name in FLAGS if name in nested}
    usual = {LAYERS: _named_otherwise(nested.get(LAYERS)) or [2, target.layers // 2, target.layers - 3]}
    if target.layers < LEAST_LAYERS and LAYERS not in {**of_layer, **own} and not nested.get(LAYERS):
        raise ConfigError(
            f"{place}: names no {LAYERS}, and the model which it drafts for has {target.layers} layers: by rule three "
            f"are taken of {LEAST_LAYERS} or more"
        )
    fixed = {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE]}
    return {**usual, **of_layer, **of_nested, **own, **fixed, "max_position_embeddings": target.max_position_embeddings}


def _named_otherwise(found: Any) -> Any:
    """Layers as `eagle_config` names them, by their outputs."""
    is_numbers = isinstance(found, list) and all(type(one) is int for one in found)
    return [one + 1 for one in found] if is_numbers else found


def _object(found: Any, name: str, place: str) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{place}: {name} = {stated(found)}: must be an object")
    return found


@dataclass(frozen=True)
class Eagle3Family(DrafterFamily):
    """What a head is made of, as tensors of a file and as buffers of a kernel."""

    def tensor_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        return tensors.tensor_shapes(config)

    def shape_meaning(self, tensor: str) -> str:
        return tensors.shape_meaning(tensor)

    def pack_weights(self, config: ModelConfig, matrices: StepMatrices, packing: Packing) -> None:
        super().pack_weights(config, matrices, tensors.as_packed(config, matrices, packing))


FAMILY = Eagle3Family(Eagle3Config, {})
