"""Manifests of kernels that are written by hand."""

from __future__ import annotations

from typing import Any

from cheetah.manifest import Launch, Manifest, Parameter, sha256_of_text


def manifest_of(text: str, kernel: str, launch: Launch, *parameters: Parameter, **changes: Any) -> Manifest:
    """Of a model of nothing, for a grid of an H200."""
    fields: dict[str, Any] = {
        **{"kernel": kernel, "text_sha256": sha256_of_text(text), "generator": "0", "command": "cheetah generate demo"},
        **{"gpu": {"name": "h200", "arch": "sm_90a", "blocks": launch.blocks}, "config": {}, "plan": {}},
        **{"launch": launch, "parameters": parameters, "matrices": (), "layer_stride": 0, "weight_bytes": 0},
        **{"buffers": (), "phases": ("qkv", "attention", "lm_head"), "step_bytes": {}},
    }
    return Manifest(**{**fields, **changes})
