"""How each weight format is read from a stage and multiplied, by name: see `cheetah.plan.formats`."""

from __future__ import annotations

from cheetah import lang as ch
from cheetah.blocks.linear.formats.bf16 import Bf16Fragments
from cheetah.blocks.linear.formats.block_tiles import BlockFragments, LotFragments
from cheetah.blocks.linear.formats.digits import DigitFragments
from cheetah.blocks.linear.formats.e4m3 import E4m3Fragments, HalfFragments
from cheetah.blocks.linear.formats.integers import Int4Fragments, Int8Fragments
from cheetah.blocks.linear.formats.mxfp4 import Mxfp4Fragments, Nvfp4Fragments
from cheetah.blocks.linear.formats.two_of_four import SparseFragments
from cheetah.blocks.linear.formats.two_of_four_codes import SparseDigits, SparseE4m3, SparseInt4
from cheetah.blocks.linear.fragments import Fragments, groups_of
from cheetah.blocks.ring import Stage
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import (
    BLOCK_FORMATS,
    DIGITS,
    DIGITS_AND_NUMBERS,
    HALVES,
    PLAIN_DIGITS,
    QUANTIZED_FORMATS,
    SPARSE_QUANTIZED_FORMATS,
    BlockRows,
)

_OF_KIND: dict[str, type[Fragments]] = {
    **{"int4": Int4Fragments, "int8": Int8Fragments},
    **{"fp8": E4m3Fragments, "mxfp4": Mxfp4Fragments, "nvfp4": Nvfp4Fragments},
}
_OF_SPARSE_KIND: dict[str, type[Fragments]] = {"int4": SparseInt4, "fp8": SparseE4m3}
FRAGMENTS: dict[str, type[Fragments]] = {
    "bf16": Bf16Fragments,
    "2of4": SparseFragments,
    **dict.fromkeys(BLOCK_FORMATS, BlockFragments),
    **{name: _OF_KIND[one.kind] for name, one in QUANTIZED_FORMATS.items()},
    **{name: _OF_SPARSE_KIND[one.kind] for name, one in SPARSE_QUANTIZED_FORMATS.items()},
}


def fragments_of(layout: MatrixLayout, tokens: int, stage: Stage, lane: ch.Expr) -> Fragments:
    """The tiles of a matrix in a stage, for the vectors of so many tokens."""
    return fragments_class(layout, tokens)(stage, lane, layout.format)


def fragments_class(layout: MatrixLayout, tokens: int) -> type[Fragments]:
    """How the tiles of a matrix are multiplied by the vectors of so many tokens."""
    of_kind: dict[str, type[Fragments]] = {
        **dict.fromkeys((DIGITS, DIGITS_AND_NUMBERS), DigitFragments),
        **{PLAIN_DIGITS: SparseDigits, HALVES: HalfFragments},
    }
    if isinstance(layout.format, BlockRows):
        return LotFragments
    return of_kind.get(layout.vector_kind(tokens), FRAGMENTS[layout.format.parts[0]])


def accumulators_of(layout: MatrixLayout, tokens: int) -> int:
    """Accumulators of 16 rows and 8 columns that the sums of an M-tile take."""
    groups = groups_of(tokens, layout.halves)
    return groups * fragments_class(layout, tokens).chains(layout.format, groups)
