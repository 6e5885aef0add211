"""Which families there are, and how a model's name or config.json leads to its configuration and its family.

The only place that lists families. Nothing here touches weights or the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cheetah.models import (
    arcee,
    block_drafter,
    cwm,
    eagle3,
    exaone4,
    gemma,
    gpt_oss,
    granite,
    llama,
    ministral3,
    mistral,
    mixtral,
    mtp,
    olmo,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    renamed,
    seed_oss,
    smollm3,
)
from cheetah.models.block import ARCHITECTURES as BLOCK_ARCHITECTURES
from cheetah.models.config import ModelConfig
from cheetah.models.config_json import ConfigError, load_source, place_of, stated
from cheetah.models.dense.family import DenseFamily
from cheetah.models.formats import is_sparse_name, without_list
from cheetah.models.formats.quantized import QuantizationError, is_scheme_name, scheme_of_name
from cheetah.models.quantization import Quantization, quantization_of_folder, read_quantization
from cheetah.models.text_part import text_modules

_FAMILIES = (
    *(llama.FAMILY, qwen3.FAMILY, qwen2.FAMILY, mistral.FAMILY, ministral3.FAMILY, smollm3.FAMILY, phi3.FAMILY),
    *(granite.FAMILY, granite.HYBRID_FAMILY, olmo.FAMILY, olmo.FAMILY_3, gemma.FAMILY_2, gemma.FAMILY_3),
    *(exaone4.FAMILY, cwm.FAMILY, seed_oss.FAMILY, arcee.FAMILY, *renamed.FAMILIES),
    *qwen3_5.FAMILIES,
    *(qwen3_moe.FAMILY, mixtral.FAMILY, olmoe.FAMILY, gpt_oss.FAMILY),
)
FAMILIES: dict[str, DenseFamily] = {family.name: family for family in _FAMILIES}
"""By model_type, as config.json has it."""

DRAFTERS: dict[str, DenseFamily] = {one.FAMILY.name: one.FAMILY for one in (eagle3, block_drafter, mtp)}
"""What drafts for another model, and is none itself."""

SEEING: dict[str, tuple[str, str]] = {
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral"),
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text"),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
}
"""Models that see, of whose files the text part is read: model_type -> (architecture, the model_type of the text part
where the file does not say)."""
PRESETS: dict[str, ModelConfig] = {name: one for family in FAMILIES.values() for name, one in family.presets.items()}
DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent / "demo" / "files"
PRESET_NAMES = (*PRESETS, DEMO)
ORDER = "-order"
"""Behind a weight format: act-order."""


def family_of(config: ModelConfig) -> DenseFamily:
    """The family of a configuration."""
    name = config.dialect.model_type
    return DRAFTERS.get(name) or FAMILIES[name]


def drafting_method(values: Mapping[str, Any]) -> str | None:
    """By which of vLLM's methods a checkpoint with this config.json drafts; None where it is a model like others."""
    if eagle3.is_eagle3(values):
        return "eagle3"
    if not block_drafter.is_block_drafter(values):
        return None
    return "dspark" if values.get("markov_rank") else "dflash"


def read_drafter(
    source: str | Path | Mapping[str, Any], target: ModelConfig, notes: list[str] | None = None
) -> ModelConfig:
    """Read the config.json of what drafts for `target`, whose tokens it knows and whose width it has. ConfigError names
    the file, and what was found and what would work."""
    values, place = load_source(source), place_of(source)
    config_type: type[ModelConfig]
    if eagle3.is_eagle3(values):
        config_type, plain = eagle3.Eagle3Config, eagle3.plain_values(values, place, target)
    elif block_drafter.is_block_drafter(values):
        config_type, plain = block_drafter.BlockDrafterConfig, block_drafter.plain_values(values, place, target)
    else:
        known = " or ".join((*eagle3.ARCHITECTURES, *BLOCK_ARCHITECTURES))
        found = stated(values.get("architectures"))
        raise ConfigError(f"{place}: architectures is {found}, supported of what drafts for a model: {known}")
    if plain.pop("quantization_config", None) is not None:
        raise ConfigError(f"{place}: the weights are quantised: what drafts is read in bf16 alone")
    return config_type.from_json(plain, notes, place)


def drafter_beside(target: ModelConfig) -> tuple[ModelConfig, dict[str, str]]:
    """The layer that lies beside a model to draft for it, and what it has of that: tensors by their names there.
    ConfigError where none is known."""
    return mtp.drafter_of(target), mtp.tensors_of_model(target)


def drafter_quantised(drafter: ModelConfig, quantization: Quantization | None, target: ModelConfig) -> ModelConfig:
    """Such a layer in the formats that a file says, where that says one of each matrix; without a file in those of its
    model that publishers take for both, fp8."""
    if quantization is None:
        return mtp.quantised_as(drafter, (one for one in target.weight_formats if one[1].startswith("fp8")))
    try:
        modules = mtp.FAMILY.matrix_modules(drafter)
        return mtp.quantised_as(drafter, quantization.matrix_formats(modules, drafter.names_of))
    except ConfigError:
        return drafter


def read_config(source: str | Path | Mapping[str, Any], notes: list[str] | None = None) -> ModelConfig:
    """Read a config.json (its path, or the object itself) of any family. Lines worth printing are appended to `notes`.

    ConfigError names the file, and what was found and what would work.
    """
    values = load_source(source)
    if eagle3.is_eagle3(values) or block_drafter.is_block_drafter(values):
        is_head = eagle3.is_eagle3(values)
        kind, method = ("an EAGLE-3 head", "eagle3") if is_head else ("a drafter of blocks", "dspark or dflash")
        raise ConfigError(
            f"{place_of(source)}: is {kind}, which drafts for another model: name it in speculative_config, with "
            f"method {method}"
        )
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in SEEING:
        return _read_text_part(source, values, notes)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(map(repr, (*FAMILIES, *SEEING)))
        raise ConfigError(f"{place_of(source)}: model_type is {stated(model_type)}, supported: {supported}")
    return _quantized(FAMILIES[model_type], source, values, notes)


def text_part(source: str | Path | Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The object of the text part of a model that sees, as a config.json of its own; None for a model of text alone."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in SEEING:
        return None
    part = values.get("text_config")
    if not isinstance(part, Mapping):
        raise ConfigError(f"{place_of(source)}: text_config is {stated(part)}: must be an object")
    architecture, usual = SEEING[model_type]
    if values.get("architectures") != [architecture]:
        found = stated(values.get("architectures"))
        raise ConfigError(f"{place_of(source)}: architectures is {found}, supported is {[architecture]!r}")
    own = {name: value for name, value in part.items() if value is not None or name == "sliding_window"}
    family = FAMILIES.get(str(own.setdefault("model_type", usual)))
    if family is None:
        found = stated(own["model_type"])
        raise ConfigError(f"{place_of(source)}: text_config.model_type is {found}, supported: {', '.join(FAMILIES)}")
    own["architectures"] = [family.config_type.dialect.architecture]
    outer = {
        name: values[name] for name in ("tie_word_embeddings", "quantization_config") if values.get(name) is not None
    }
    whole = {**outer, **own}
    return {**whole, "quantization_config": text_modules(whole.get("quantization_config"))}


def _read_text_part(source: Any, values: Mapping[str, Any], notes: list[str] | None) -> ModelConfig:
    part = text_part(source, values)
    assert part is not None
    if notes is not None:
        notes.append(f"{place_of(source)}: the text part of {values['architectures'][0]}: images are not read")
    return _quantized(FAMILIES[part["model_type"]], source, part, notes)


def _quantized(family: DenseFamily, source: Any, values: Mapping[str, Any], notes: list[str] | None) -> ModelConfig:
    """The configuration of a family's values, with the formats of its weights."""
    config = family.config_type.from_json(values, notes, place_of(source))
    quantization = stated_quantization(source, values, config)
    if quantization is None:
        return config
    formats = quantization.matrix_formats(family.matrix_modules(config), config.names_of)
    if quantization.method == "mxfp4" and not formats:
        raise ConfigError(
            f"{place_of(source)}: the weights are quantised by mxfp4, which is supported of experts alone"
        )
    try:
        return replace(config, weight_formats=formats, act_order=quantization.act_order)
    except ConfigError as problem:
        raise ConfigError(f"{place_of(source)}: {quantization.method}: {problem}") from problem


def stated_quantization(
    source: str | Path | Mapping[str, Any], values: Mapping[str, Any], config: ModelConfig
) -> Quantization | None:
    """How the weights of a config.json's model are quantised, by the file and those beside it; None if they are not.
    Routers of experts never are, nor the numbers of heads of Gated DeltaNet: tools leave them out, and few say so."""
    if isinstance(source, Mapping):
        stated = values.get("quantization_config")
        found = None if stated is None else read_quantization(stated, place_of(source))
    else:
        found = quantization_of_folder(Path(source).parent, values)
    return None if found is None else found.leaving(family_of(config).never_quantised(config))


def split_format(name: str) -> tuple[str, str | None]:
    """A model's name without the weight format behind its last "@", and that format: "demo@int4-g64"; with "-order"
    behind it the columns are in an order of their own, with "+list5" a list of so many units lies beside each chunk."""
    source, _, format = name.rpartition("@")
    return (source, format) if source and _is_format(format) else (name, None)


def _is_format(name: str) -> bool:
    tiles = without_list(name)
    return is_sparse_name(tiles) or is_scheme_name(tiles.removesuffix(ORDER))


def in_format(config: ModelConfig, format: str | None) -> ModelConfig:
    """The model with all matrices of its layers but routers in a weight format, in mxfp4 those of experts alone, if it
    has some; as it is for None."""
    if format is None:
        return config
    experts = [product for product in config.quantisable if product.experts is not None]
    products = experts if experts and format == "mxfp4" else config.quantisable
    formats = tuple((product.name, format.removesuffix(ORDER)) for product in products)
    return replace(config, weight_formats=formats, act_order=format.endswith(ORDER))


def is_preset(name: str) -> bool:
    """Whether a name is a preset's, with a weight format or without."""
    return split_format(name)[0] in PRESET_NAMES


def preset(name: str) -> ModelConfig:
    """The configuration of that name; "demo" is read from the demo model that the package carries."""
    if name == DEMO:
        return read_config(DEMO_FOLDER / "config.json")
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; presets: {', '.join(PRESET_NAMES)}")
    return PRESETS[name]


def resolve_config(name_or_path: str | Path, notes: list[str] | None = None) -> ModelConfig:
    """A preset's name, a model folder, or the path of a config.json, perhaps with "@" and a weight format behind it.
    Never touches the network."""
    source, format = split_format(str(name_or_path))
    return in_format(_resolved(source, notes), format)


def _resolved(source: str, notes: list[str] | None) -> ModelConfig:
    if source in PRESET_NAMES:
        return preset(source)
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        _refuse_format(source)
        raise ConfigError(
            f"{source}: neither a preset ({', '.join(PRESET_NAMES)}) nor a folder with a config.json "
            "nor the path of a config.json"
        )
    return read_config(path, notes)


def _refuse_format(source: str) -> None:
    """ConfigError where a preset is named with what is no weight format behind it."""
    name, _, format = source.rpartition("@")
    if name in PRESET_NAMES:
        try:  # it says what there is
            scheme_of_name(format.removesuffix(ORDER))
        except QuantizationError as problem:
            raise ConfigError(f"{source}: {problem}") from problem
