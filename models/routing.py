"""How a family's config.json says which experts a token is given to."""

from __future__ import annotations

from typing import Any

from cheetah.models.config_json import ConfigFile, ExpertFields
from cheetah.models.layer_kind import Routing


def fields_of_experts(file: ConfigFile, experts: ExpertFields) -> dict[str, Any]:
    """What a configuration is constructed with, beside the fields of all."""
    counts = {name: file.count(name) for name in experts.names if name in file.values}
    if len(set(counts.values())) > 1:
        raise file.error(f"{' and '.join(f'{name} = {count}' for name, count in counts.items())} contradict each other")
    count = next(iter(counts.values()), None) or file.count(experts.names[0])
    chosen = file.count("num_experts_per_tok")
    if chosen > count:
        raise file.error(f"num_experts_per_tok = {chosen}: there are {next(iter(counts), experts.names[0])} = {count}")
    normalised = file.flag("norm_topk_prob") if experts.normalised is None else experts.normalised
    shared = 0 if experts.shared is None else file.count(experts.shared)
    width = {} if experts.width is None else {"intermediate_size": file.count(experts.width)}
    return {"routing": Routing(count, chosen, normalised, experts.biases, shared), **width}


def written_experts(experts: ExpertFields, routing: Routing, width: int) -> dict[str, Any]:
    """The fields from which `fields_of_experts` reads it back. width: of an expert."""
    written = {experts.names[0]: routing.experts, "num_experts_per_tok": routing.chosen}
    flags = {"norm_topk_prob": routing.normalised} if experts.normalised is None else {}
    widths = {experts.width: width, experts.shared: routing.shared}
    return {**written, **flags, **{name: rows for name, rows in widths.items() if name is not None}}
