"""The two spellings of a config.json: that of transformers 4, and that of 5."""

from __future__ import annotations

from typing import Any


def spelled_for(version: int, values: dict[str, Any]) -> dict[str, Any]:
    """The same configuration as a version of transformers writes it, from either."""
    rope = {"rope_theta": values.get("rope_theta", 10000.0), **(values.get("rope_scaling") or {})}
    rope |= values.get("rope_parameters") or {}
    others = ("rope_theta", "rope_scaling", "rope_parameters", "torch_dtype", "dtype", "layer_types")
    plain = {name: value for name, value in values.items() if name not in others}
    kind = {"rope_type": "default", **{name: value for name, value in rope.items() if name != "rope_theta"}}
    if version < 5:
        scaling = None if kind == {"rope_type": "default"} else kind
        return {**plain, "torch_dtype": "bfloat16", "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    return {**plain, "dtype": "bfloat16", "rope_parameters": {"rope_theta": rope["rope_theta"], **kind}}
