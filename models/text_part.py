"""The text part of a model that sees: its names as they are in a model of text alone.

Two names are in use, by when a file was written: "language_model.model.layers.0 ..." and
"model.language_model.layers.0 ...". The same holds of modules in a quantization_config. What belongs to the part that
sees is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""What names of the text part begin with, and what that is in a model of text alone."""
SEEING = ("vision_tower.", "multi_modal_projector.", "vision_encoder.", "patch_merger.", "visual.")
"""What names of the other part begin with, perhaps behind "model."."""


def text_name(name: str) -> str:
    """The name of a tensor or a module of the text part in a model of text alone; others stay as they are."""
    for prefix, instead in PREFIXES.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


def is_seeing(name: str) -> bool:
    """Whether a tensor belongs to the part that sees."""
    return name.removeprefix("model.").startswith(SEEING)


def text_modules(stated: Any) -> Any:
    """A quantization_config with the names of modules as in a model of text alone."""
    if isinstance(stated, str):
        return text_name(stated)
    if isinstance(stated, list):
        return [text_modules(one) for one in stated if not (isinstance(one, str) and is_seeing(one))]
    if isinstance(stated, Mapping):
        return {name: text_modules(value) for name, value in stated.items()}
    return stated
