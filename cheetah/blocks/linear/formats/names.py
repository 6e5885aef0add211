"""The sizes of weight formats, under names in a kernel's text."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from cheetah import lang as ch
from cheetah.plan.formats import SPARSE, TileFormat

_SIZES_OF_FORMAT = ("tile_bytes", "factor_bytes", "scales_at", "zero_points_at", "places_at")


def format_with_names(format: TileFormat, what: str = "") -> TileFormat:
    """The format with its sizes under names in the text. what: is said behind the format's name, of another than the
    weights' own."""
    prefix = re.sub(r"\W+", "_", format.name.replace(SPARSE, "two_of_four") + what).upper()
    sizes = {name: getattr(format, name, 0) for name in _SIZES_OF_FORMAT}
    named: dict[str, Any] = {name: ch.named(f"{prefix}_{name.upper()}", size) for name, size in sizes.items() if size}
    return replace(format, **named)
