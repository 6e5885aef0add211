"""How each weight format is read from a stage and multiplied, by name: see `cheetah.plan.formats`."""

from __future__ import annotations

from cheetah import lang as ch
from cheetah.blocks.linear.formats.bf16 import Bf16Fragments
from cheetah.blocks.linear.fragments import Fragments
from cheetah.blocks.ring import Stage

FRAGMENTS: dict[str, type[Fragments]] = {"bf16": Bf16Fragments}


def fragments_of(format_name: str, stage: Stage, lane: ch.Expr) -> Fragments:
    """The tiles of a format in a stage."""
    return FRAGMENTS[format_name](stage, lane)
