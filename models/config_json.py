"""Reading a config.json: both spellings (transformers 4 and 5), every default, and everything that is refused.

The rule is "accept exactly, or refuse by name": a field that would change the result and is not implemented raises
`ConfigError` with the field, what was found and what would work. Lines worth printing go to a list of notes. How
weights are quantised is read elsewhere (`cheetah.models.quantization`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cheetah.errors import CheetahError
from cheetah.models.plausible import implausible
from cheetah.models.rope import FIELDS_OF_KIND, REQUIRED_OF_KIND, Rope, RopeError
from cheetah.printable import shown
from cheetah.untrusted import read_json

# field of ModelConfig -> field of config.json
JSON_NAMES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "query_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}

# What has to hold of a field of any family for this implementation to compute the same; absent and null always do.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, 1.0),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "no_rope_layers": ([],),
    "num_local_experts": (0,),
    "pruned_heads": ({}, []),
    "kv_cache_scheme": (),
}

READ_ELSEWHERE = {
    *JSON_NAMES.values(),
    *("model_type", "architectures", "rms_norm_eps", "tie_word_embeddings", "quantization_config"),
    *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
    *("sliding_window", "layer_types"),
    *("torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"),
}

# Fields that transformers does not read for the inference of any family.
IGNORED = {
    *("pretraining_tp", "use_cache", "initializer_range", "transformers_version", "attention_dropout", "_name_or_path"),
    *("auto_map", "id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict"),
    *("unsloth_version", "unsloth_fixed", "use_bfloat16", "chunk_size_feed_forward", "rope_interleaved"),
}


class ConfigError(CheetahError):
    """A configuration that is incomplete, contradictory, or asks for something that is not implemented."""


@dataclass(frozen=True)
class Dialect:
    """How a family's config.json reads.

    model_type, architecture: as the file names them. absent: what transformers takes for a field that the file leaves
    out, where that does not follow from other fields. neutral: further entries of NEUTRAL_VALUES, or others in their
    place. ignored: further fields that are not read for inference. reads_window: `sliding_window` alone says how many
    keys the queries of every layer see; otherwise it has to be null, or is ignored.
    """

    model_type: str
    architecture: str
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    reads_window: bool = False

    @property
    def title(self) -> str:
        """The family's name as people write it."""
        return self.architecture.removesuffix("ForCausalLM")


def read_fields(place: str, values: Mapping[str, Any], dialect: Dialect, notes: list[str]) -> dict[str, Any]:
    """The constructor arguments of `ModelConfig` from the object of a config.json; `place` names it in messages."""
    return _Reader(place, values, dialect, notes).fields()


def load_source(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """The object of a config.json, from its path or as it is."""
    return source if isinstance(source, Mapping) else read_json(Path(source), error=ConfigError)


def place_of(source: str | Path | Mapping[str, Any]) -> str:
    """How messages name the source: its path, or "config"."""
    return "config" if isinstance(source, Mapping) else str(source)


class _Reader:
    """One pass over one config object; every message starts with the place it was read from."""

    def __init__(self, place: str, values: Mapping[str, Any], dialect: Dialect, notes: list[str]):
        self.place, self.dialect = place, dialect
        read = {*dialect.ignored, *(["sliding_window"] if dialect.reads_window else [])}
        self.neutral = {name: ok for name, ok in {**NEUTRAL_VALUES, **dialect.neutral}.items() if name not in read}
        self.nulls = {name for name, value in values.items() if value is None}
        self.values = {name: value for name, value in values.items() if value is not None}
        self.notes = notes

    def fields(self) -> dict[str, Any]:
        self._check_model()
        self._check_neutral()
        heads = self._count("num_attention_heads")
        fields = {
            "hidden_size": self._count("hidden_size"),
            "intermediate_size": self._count("intermediate_size"),
            "layers": self._count("num_hidden_layers"),
            "query_heads": heads,
            "kv_heads": self._count("num_key_value_heads", self._absent("num_key_value_heads", heads)),
            "head_dim": self._head_dim(),
            "vocab_size": self._count("vocab_size"),
            "rms_norm_eps": self._epsilon(),
            "max_position_embeddings": self._max_positions(),
            "tied_embeddings": self._flag("tie_word_embeddings"),
            "rope": self._rope(),
            "sliding_window": self._window(),
        }
        self._note_unknown()
        return fields

    def _check_model(self) -> None:
        expected = {"model_type": self.dialect.model_type, "architectures": [self.dialect.architecture]}
        for name, supported in expected.items():
            if (found := self.values.get(name)) != supported:
                raise self._error(f"{name} is {stated(found)}, supported is {supported!r}")

    def _check_neutral(self) -> None:
        for name, neutral in self.neutral.items():
            if name in self.values and self.values[name] not in neutral:
                wanted = " or ".join([*map(repr, neutral[:1]), "absent"])
                raise self._error(f"{name} = {shown(self.values[name])} is not supported; supported: {wanted}")

    def _count(self, name: str, default: int | None = None) -> int:
        if name not in self.values:
            if default is None:
                raise self._error(f"{name} is missing: it has no safe default, write it into the file")
            return default
        value = self.values[name]
        if type(value) is not int or value < 1:
            raise self._error(f"{name} = {shown(value)}: must be a positive integer")
        if problem := implausible(name, value):
            raise self._error(problem)
        return value

    def _absent(self, name: str, otherwise: Any) -> Any:
        """What a field that is left out stands for: the family's value, or what follows from other fields."""
        return self.dialect.absent.get(name, otherwise)

    def _max_positions(self) -> int:
        return self._count("max_position_embeddings", self._absent("max_position_embeddings", 2048))

    def _number(self, values: Mapping[str, Any], name: str, where: str = "") -> float:
        value = values[name]
        if type(value) not in (int, float):
            raise self._error(f"{where}{name} = {shown(value)}: must be a number")
        if problem := implausible(name, value):  # before it becomes a float: an integer may be too large for one
            raise self._error(f"{where}{problem}")
        return float(value)

    def _flag(self, name: str) -> bool:
        value = self.values.get(name, False)
        if type(value) is not bool:
            raise self._error(f"{name} = {shown(value)}: must be true or false")
        return value

    def _head_dim(self) -> int:
        hidden, heads = self._count("hidden_size"), self._count("num_attention_heads")
        usual = self._absent("head_dim", None)
        if "head_dim" not in self.values and usual is None and hidden % heads:
            raise self._error(
                f"head_dim is missing and hidden_size / num_attention_heads = {hidden} / {heads} is no integer"
            )
        return self._count("head_dim", default=usual or hidden // heads)

    def _window(self) -> int | None:
        window = None
        if self.dialect.reads_window and "sliding_window" not in self.nulls:
            window = self._count("sliding_window", self._absent("sliding_window", None))
        self._check_layer_types(window)
        return window

    def _check_layer_types(self, window: int | None) -> None:
        """All layers see the same keys, those that sliding_window says."""
        types = self.values.get("layer_types")
        wanted = "full_attention" if window is None else "sliding_attention"
        if types is not None and (not isinstance(types, list) or any(type_ != wanted for type_ in types)):
            raise self._error(f"layer_types = {types!r} is not supported; supported: every layer {wanted!r}, or absent")

    def _epsilon(self) -> float:
        if "rms_norm_eps" in self.values:
            return self._number(self.values, "rms_norm_eps")
        self.notes.append(f"{self.place}: rms_norm_eps is absent, taken as 1e-6 (Llama 2 and 3 use 1e-5)")
        return 1e-6

    def _rope(self) -> Rope:
        values = self._rope_values()
        kind = values.get("rope_type", values.get("type", "default"))
        if not isinstance(kind, str):
            raise self._error(f"rope_type = {shown(kind)}: must be a string")
        numbers: dict[str, Any] = {
            name: self._number(values, name, "rope ") for name in self._rope_fields(kind, values)
        }
        if kind in ("llama3", "yarn"):
            numbers["original_max_position_embeddings"] = self._original_context(values)
        if kind == "yarn" and type(values.get("truncate", True)) is not bool:
            raise self._error(f"rope truncate = {shown(values['truncate'])}: must be true or false")
        numbers["truncate"] = values.get("truncate", True) if kind == "yarn" else True
        theta = values if "rope_theta" in values else {"rope_theta": self.values.get("rope_theta", 10000.0)}
        try:
            return Rope(rope_theta=self._number(theta, "rope_theta"), rope_type=kind, **numbers)
        except RopeError as problem:
            raise self._error(str(problem)) from problem

    def _rope_values(self) -> dict[str, Any]:
        """A non-empty rope_scaling (transformers 4) replaces rope_parameters (transformers 5)."""
        for name in ("rope_scaling", "rope_parameters"):
            values = self.values.get(name)
            if not values:
                continue
            if not isinstance(values, dict):
                raise self._error(f"{name} = {shown(values)}: must be an object")
            if any(isinstance(value, dict) for value in values.values()):
                raise self._error(f"{name} differs from layer to layer ({', '.join(values)}): not supported")
            partial = values.get("partial_rotary_factor")
            if partial not in (None, 1):
                raise self._error(f"{name}.partial_rotary_factor = {shown(partial)}: only 1 is supported")
            return {key: value for key, value in values.items() if value is not None}
        return {}

    def _rope_fields(self, kind: str, values: Mapping[str, Any]) -> list[str]:
        """The numeric fields of this kind that are given; a required one that is not given is an error."""
        for name in REQUIRED_OF_KIND.get(kind, ()):
            if name not in values:
                raise self._error(f"rope type {kind!r} needs {name}")
        used = FIELDS_OF_KIND.get(kind, ())
        known = {*used, "rope_theta", "rope_type", "type", "partial_rotary_factor"}
        unused = sorted(set(values) - known)
        if unused and kind in FIELDS_OF_KIND:
            self.notes.append(f"{self.place}: rope type {kind!r} does not use {', '.join(unused)}")
        return [name for name in used if name in values and name not in NOT_PLAIN_NUMBERS]

    def _original_context(self, values: Mapping[str, Any]) -> int:
        name = "original_max_position_embeddings"
        inner = values.get(name, self._max_positions())
        value = self.values.get(name, inner)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or value < 1:
            raise self._error(f"{name} = {shown(value)}: must be a positive integer")
        return value

    def _note_unknown(self) -> None:
        unknown = sorted(set(self.values) - READ_ELSEWHERE - IGNORED - self.dialect.ignored - set(self.neutral))
        if unknown:
            self.notes.append(f"{self.place}: ignored, not part of {self.dialect.architecture}: {', '.join(unknown)}")

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.place}: {message}")


NOT_PLAIN_NUMBERS = ("original_max_position_embeddings", "truncate")


def stated(value: object) -> str:
    """A value of config.json for a message."""
    return "missing" if value is None else shown(value)
