"""How a family's config.json says which experts a token is given to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cheetah.models.config_json import ConfigFile
from cheetah.models.layer_kind import Routing

NOT_FOR_INFERENCE = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
"""Fields that training alone reads."""


def routing_of(file: ConfigFile, names: Sequence[str], normalised: bool, biases: bool = False) -> Routing:
    """The routing that a file describes. names: the fields of which one says how many experts there are."""
    counts = {name: file.count(name) for name in names if name in file.values}
    if len(set(counts.values())) > 1:
        raise file.error(f"{' and '.join(f'{name} = {count}' for name, count in counts.items())} contradict each other")
    experts = next(iter(counts.values()), None) or file.count(names[0])
    chosen = file.count("num_experts_per_tok")
    if chosen > experts:
        raise file.error(f"num_experts_per_tok = {chosen}: there are {next(iter(counts), names[0])} = {experts}")
    return Routing(experts, chosen, normalised, biases)


def written_routing(routing: Routing | None, name: str) -> dict[str, Any]:
    """The fields from which `routing_of` reads it back. name: of the experts' count."""
    assert routing is not None
    return {name: routing.experts, "num_experts_per_tok": routing.chosen, "norm_topk_prob": routing.normalised}
