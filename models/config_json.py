"""Reading a config.json: both spellings (transformers 4 and 5), every default, and everything that is refused.

The rule is "accept exactly, or refuse by name": a field that would change the result and is not implemented raises
`ConfigError` with the field, what was found and what would work. Lines worth printing go to a list of notes. How
weights are quantised is read elsewhere (`cheetah.models.quantization`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cheetah.errors import CheetahError
from cheetah.models.plausible import implausible
from cheetah.models.rope import FIELDS_OF_KIND, OF_ORIGINAL_CONTEXT, REQUIRED_OF_KIND, Rope, RopeError
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
FULL, SLIDING = "full_attention", "sliding_attention"
"""In `layer_types`: a query sees all keys before it, or so many as `sliding_window` says."""

# Fields that transformers does not read for the inference of any family.
IGNORED = {
    *("pretraining_tp", "use_cache", "initializer_range", "transformers_version", "attention_dropout", "_name_or_path"),
    *("auto_map", "id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict"),
    *("unsloth_version", "unsloth_fixed", "use_bfloat16", "chunk_size_feed_forward", "rope_interleaved"),
}


class ConfigError(CheetahError):
    """A configuration that is incomplete, contradictory, or asks for something that is not implemented."""


@dataclass(frozen=True)
class ExpertFields:
    """Which fields say which experts a token is given to: `num_experts_per_tok` of as many as one of `names` says.

    normalised, biases: see `Routing`; None where `norm_topk_prob` says it. width: the field that has the width of an
    expert, where it is not `intermediate_size`; shared: that of the one that every token has, if there is one.
    """

    names: tuple[str, ...] = ("num_experts", "num_local_experts")
    normalised: bool | None = True
    biases: bool = False
    width: str | None = None
    shared: str | None = None

    @property
    def known(self) -> frozenset[str]:
        """All of them, and those that training alone reads."""
        own = (*self.names, "num_experts_per_tok", "norm_topk_prob" if self.normalised is None else None)
        return frozenset(filter(None, (*own, self.width, self.shared))) | NOT_FOR_INFERENCE


NOT_FOR_INFERENCE = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})


@dataclass(frozen=True)
class Dialect:
    """How a family's config.json reads.

    model_type, architecture: as the file names them. absent: what transformers takes for a field that the file leaves
    out, where that does not follow from other fields. neutral: further entries of NEUTRAL_VALUES, or others in their
    place. ignored: further fields that are not read for inference. reads: fields that the family reads itself
    (`ModelConfig.read`); `sliding_window` among them says how many keys queries see, in layers that `layer_types` does
    not exempt; otherwise it has to be null, or is ignored. numbers: fields that are a number of `ModelConfig`, by
    its name. ropes: kinds of rotary embedding that the family has under other names. layer_types: which type a layer
    is of, `FULL` or `SLIDING`, where the file does not say; None: the family's layers are all of one type. experts:
    of a family whose layers have experts.
    """

    model_type: str
    architecture: str
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ropes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer_types: Callable[[ConfigFile, int], str] | None = None
    experts: ExpertFields | None = None

    @property
    def known(self) -> frozenset[str]:
        """Fields that the family reads beside those of all, or knows to mean nothing here."""
        of_experts = frozenset[str]() if self.experts is None else self.experts.known
        return self.ignored | self.reads | self.numbers.keys() | of_experts

    @property
    def title(self) -> str:
        """The family's name as people write it."""
        return self.architecture.removesuffix("ForCausalLM")


def load_source(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """The object of a config.json, from its path or as it is. Numbers may be infinite where nobody reads them:
    transformers writes a `time_step_limit` of [0, Infinity] also for Granite 4 without state space layers."""
    return source if isinstance(source, Mapping) else read_json(Path(source), error=ConfigError, finite=False)


def place_of(source: str | Path | Mapping[str, Any]) -> str:
    """How messages name the source: its path, or "config"."""
    return "config" if isinstance(source, Mapping) else str(source)


class ConfigFile:
    """The object of a config.json as a family reads it; every message starts with `place`, where it was read from."""

    def __init__(self, place: str, values: Mapping[str, Any], dialect: Dialect, notes: list[str]):
        self.place, self.dialect = place, dialect
        values_of_all = {**NEUTRAL_VALUES, **dialect.neutral}
        self.neutral = {name: ok for name, ok in values_of_all.items() if name not in dialect.known}
        self.nulls = {name for name, value in values.items() if value is None}
        self.values = {name: value for name, value in values.items() if value is not None}
        self.notes = notes

    def fields(self) -> dict[str, Any]:
        """What all families have: the constructor arguments of `ModelConfig`."""
        self._check_model()
        self._check_neutral()
        heads = self.count("num_attention_heads")
        return {
            "hidden_size": self.count("hidden_size"),
            "intermediate_size": self.count("intermediate_size"),
            "layers": self.count("num_hidden_layers"),
            "query_heads": heads,
            "kv_heads": self.count("num_key_value_heads", heads),
            "head_dim": self._head_dim(),
            "vocab_size": self.count("vocab_size"),
            "rms_norm_eps": self._epsilon(),
            "max_position_embeddings": self._max_positions(),
            "tied_embeddings": self.flag("tie_word_embeddings"),
            "rope": self.rope(self.rope_values(None if self.dialect.layer_types is None else FULL)),
            **{field: self.number(name) for name, field in self.dialect.numbers.items() if self.is_given(name)},
            **({"attention_biases": self.flag("attention_bias")} if "attention_bias" in self.dialect.reads else {}),
            **self._windows(),
        }

    def is_given(self, name: str) -> bool:
        """Whether a field has a value, in the file or as the family's if the file leaves it out."""
        return name in self.values or (name not in self.nulls and name in self.dialect.absent)

    def _check_model(self) -> None:
        expected = {"model_type": self.dialect.model_type, "architectures": [self.dialect.architecture]}
        for name, supported in expected.items():
            if (found := self.values.get(name)) != supported:
                raise self.error(f"{name} is {stated(found)}, supported is {supported!r}")

    def _check_neutral(self) -> None:
        for name, neutral in self.neutral.items():
            if name in self.values and self.values[name] not in neutral:
                wanted = " or ".join([*map(repr, neutral[:1]), "absent"])
                raise self.error(f"{name} = {shown(self.values[name])} is not supported; supported: {wanted}")

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer. default: what follows from other fields where neither the file nor the family says."""
        if name not in self.values:
            default = self.dialect.absent.get(name, default)
            if default is None:
                raise self.error(f"{name} is missing: it has no safe default, write it into the file")
            return default
        value = self.values[name]
        if type(value) is not int or value < 1:
            raise self.error(f"{name} = {shown(value)}: must be a positive integer")
        if problem := implausible(name, value):
            raise self.error(problem)
        return value

    def _max_positions(self) -> int:
        return self.count("max_position_embeddings", 2048)

    def number(self, name: str) -> float:
        """A number of the file, or the family's where it is left out."""
        return self._number(self.values if name in self.values else self.dialect.absent, name)

    def number_of(self, values: Mapping[str, Any], name: str) -> float:
        """A number of the file's rope."""
        return self._number(values, name, "rope ")

    def _number(self, values: Mapping[str, Any], name: str, where: str = "") -> float:
        value = values[name]
        if type(value) not in (int, float):
            raise self.error(f"{where}{name} = {shown(value)}: must be a number")
        if problem := implausible(name, value):  # before it becomes a float: an integer may be too large for one
            raise self.error(f"{where}{problem}")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; false where neither the file nor the family says."""
        value = self.values.get(name, self.dialect.absent.get(name, False))
        if type(value) is not bool:
            raise self.error(f"{name} = {shown(value)}: must be true or false")
        return value

    def integers(self, name: str, count: int) -> list[int] | None:
        """At least so many integers, of which those are given; None where they are left out."""
        values = self.values.get(name)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) < count or any(type(one) is not int for one in values):
            raise self.error(f"{name} = {shown(values)}: must be a list of {count} integers, one a layer")
        return values[:count]

    def _head_dim(self) -> int:
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        is_said = "head_dim" in self.values or "head_dim" in self.dialect.absent
        if not is_said and hidden % heads:
            raise self.error(
                f"head_dim is missing and hidden_size / num_attention_heads = {hidden} / {heads} is no integer"
            )
        return self.count("head_dim", default=hidden // heads)

    def _windows(self) -> dict[str, Any]:
        """`sliding_window`, and `layer_types` where it is not that of all layers."""
        window = None
        if "sliding_window" in self.dialect.reads and self.is_given("sliding_window"):
            window = self.count("sliding_window")
        if self.dialect.layer_types is not None:
            types = self._layer_types(self.dialect.layer_types)
            if window is None or SLIDING not in types:
                return {"sliding_window": None}
            return {"sliding_window": window, "layer_types": types if FULL in types else ()}
        if "layer_types" not in self.dialect.reads:
            self._check_layer_types(window)
        return {"sliding_window": window}

    def _layer_types(self, usual: Callable[[ConfigFile, int], str]) -> tuple[str, ...]:
        """Of every layer, as the file says or as the family has them."""
        layers, types = self.count("num_hidden_layers"), self.values.get("layer_types")
        if types is None:
            return tuple(usual(self, layer) for layer in range(layers))
        if not isinstance(types, list) or len(types) != layers or any(one not in (FULL, SLIDING) for one in types):
            raise self.error(
                f"layer_types = {shown(types)} is not supported; supported: {FULL!r} or {SLIDING!r} for each of "
                f"{layers} layers"
            )
        return tuple(types)

    def _check_layer_types(self, window: int | None) -> None:
        """All layers see the same keys, those that sliding_window says."""
        types = self.values.get("layer_types")
        wanted = FULL if window is None else SLIDING
        if types is not None and (not isinstance(types, list) or any(type_ != wanted for type_ in types)):
            raise self.error(f"layer_types = {types!r} is not supported; supported: every layer {wanted!r}, or absent")

    def _epsilon(self) -> float:
        if self.is_given("rms_norm_eps"):
            return self.number("rms_norm_eps")
        self.notes.append(f"{self.place}: rms_norm_eps is absent, taken as 1e-6 (Llama 2 and 3 use 1e-5)")
        return 1e-6

    def rope(self, values: Mapping[str, Any], theta: str = "rope_theta") -> Rope:
        """The rotary embedding of `rope_values`. theta: the file's field with its base, where they have none."""
        kind = values.get("rope_type", values.get("type", "default"))
        if not isinstance(kind, str):
            raise self.error(f"rope_type = {shown(kind)}: must be a string")
        kind = self.dialect.ropes.get(kind, kind)
        numbers: dict[str, Any] = {
            name: self._numbers(values, name) if name in OF_EACH_PAIR else self._number(values, name, "rope ")
            for name in self._rope_fields(kind, values)
        }
        if kind in OF_ORIGINAL_CONTEXT:
            numbers["original_max_position_embeddings"] = self.original_context(values)
        if kind == "longrope" and "factor" not in numbers:
            numbers["factor"] = max(1.0, self._max_positions() / numbers["original_max_position_embeddings"])
        if kind == "yarn" and type(values.get("truncate", True)) is not bool:
            raise self.error(f"rope truncate = {shown(values['truncate'])}: must be true or false")
        numbers["truncate"] = values.get("truncate", True) if kind == "yarn" else True
        numbers["partial_rotary_factor"] = self._part_rotated(values)
        base = values if "rope_theta" in values else self.values if theta in self.values else self.dialect.absent
        name = "rope_theta" if base is values else theta
        numbers["rope_theta"] = self._number({"rope_theta": base.get(name, Rope.rope_theta)}, "rope_theta")
        try:
            return Rope(rope_type=kind, **numbers)
        except RopeError as problem:
            raise self.error(str(problem)) from problem

    def rope_values(self, layer_type: str | None = None) -> dict[str, Any]:
        """A non-empty rope_scaling (transformers 4) replaces rope_parameters (transformers 5). layer_type: of layers of
        that type alone, where rope_parameters tells them apart."""
        for name in ("rope_scaling", "rope_parameters"):
            values = self.values.get(name)
            if not values:
                continue
            if not isinstance(values, dict):
                raise self.error(f"{name} = {shown(values)}: must be an object")
            if layer_type is not None and isinstance(values.get(layer_type), dict):
                values = values[layer_type]
            if any(isinstance(value, dict) for value in values.values()):
                raise self.error(f"{name} differs from layer to layer ({', '.join(values)}): not supported")
            return {key: value for key, value in values.items() if value is not None}
        return {}

    @property
    def has_ropes_by_type(self) -> bool:
        """Whether rope_parameters tells layers of different types apart."""
        values = self.values.get("rope_parameters")
        return isinstance(values, dict) and isinstance(values.get(SLIDING), dict)

    def _part_rotated(self, values: Mapping[str, Any]) -> float:
        name = "partial_rotary_factor"
        if name not in self.dialect.reads:
            if values.get(name) not in (None, 1):
                raise self.error(f"rope {name} = {shown(values[name])}: only 1 is supported")
            return 1.0
        given = self.values.get(name, self.dialect.absent.get(name, 1.0))
        return self._number(values if name in values else {name: given}, name)

    def _numbers(self, values: Mapping[str, Any], name: str) -> tuple[float, ...]:
        found = values[name]
        if not isinstance(found, list):
            raise self.error(f"rope {name} = {shown(found)}: must be a list of numbers")
        return tuple(self._number({name: one}, name, "rope ") for one in found)

    def _rope_fields(self, kind: str, values: Mapping[str, Any]) -> list[str]:
        """The numeric fields of this kind that are given; a required one that is not given is an error."""
        for name in REQUIRED_OF_KIND.get(kind, ()):
            if name not in values:
                raise self.error(f"rope type {kind!r} needs {name}")
        used = FIELDS_OF_KIND.get(kind, ())
        known = {*used, "rope_theta", "rope_type", "type", "partial_rotary_factor", *self.dialect.reads}
        unused = sorted(set(values) - known)
        if unused and kind in FIELDS_OF_KIND:
            self.notes.append(f"{self.place}: rope type {kind!r} does not use {', '.join(unused)}")
        return [name for name in used if name in values and name not in NOT_PLAIN_NUMBERS]

    def original_context(self, values: Mapping[str, Any]) -> int:
        """Tokens of the context of pretraining, that `values` of a rope or the file name."""
        name = "original_max_position_embeddings"
        inner = values.get(name, self._max_positions())
        value = self.values.get(name, inner)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or value < 1:
            raise self.error(f"{name} = {shown(value)}: must be a positive integer")
        return value

    def note_unknown(self) -> None:
        """A line for fields that nobody has read."""
        read = READ_ELSEWHERE | IGNORED | self.dialect.known
        unknown = sorted(set(self.values) - read - set(self.neutral))
        if unknown:
            self.notes.append(f"{self.place}: ignored, not part of {self.dialect.architecture}: {', '.join(unknown)}")

    def error(self, message: str) -> ConfigError:
        """What is wrong with the file, to be raised."""
        return ConfigError(f"{self.place}: {message}")


NOT_PLAIN_NUMBERS = ("original_max_position_embeddings", "truncate")
OF_EACH_PAIR = ("short_factor", "long_factor")


def stated(value: object) -> str:
    """A value of config.json for a message."""
    return "missing" if value is None else shown(value)
