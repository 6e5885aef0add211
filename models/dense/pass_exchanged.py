"""Where the vectors that the phases of a pass hand on lie in its workspace, element by element."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cheetah.models.dense.pass_sizes import HIDDEN, RESIDUAL_SECTIONS, PassSizes, section_of
from cheetah.models.exchanged import ExchangedVector
from cheetah.plan.formats import VECTOR_COLUMNS
from cheetah.plan.products import Phase, Vector, logit_words
from cheetah.plan.prompt import GROUP_BYTES, GROUP_TOKENS, PassPlan

WORD = 4


def vectors_of_passes(sizes: PassSizes) -> tuple[ExchangedVector, ...]:
    """Those of every layer, in the order of its phases, but queries, keys and values, and what lies in the slots of
    experts. None where several GPUs make a pass, columns are stored one by one, or layers have not the same phases."""
    if sizes.gpu.ranks > 1 or sizes.config.act_order or sizes.shape.delta is not None:
        return ()
    listing = _Listing(sizes)
    return tuple(vector for phase in sizes.table.layer for vector in listing.made_by(phase))


class _Listing:
    """All that says where vectors lie."""

    def __init__(self, sizes: PassSizes) -> None:
        self.sizes, self.sections = sizes, sizes.sections
        self.tokens = np.arange(sizes.pass_plan.tokens)[:, None]
        self.onto_residual = [
            phase for phase in sizes.table.layer if phase.output is not None and self._is_hidden(phase.output)
        ]

    @staticmethod
    def _is_hidden(vector: Vector) -> bool:
        return section_of(vector) == HIDDEN and not vector.is_kept

    def made_by(self, phase: Phase) -> Iterator[ExchangedVector]:
        vector, table = phase.output, self.sizes.table
        if vector is None or vector.is_kept or vector == table.attention.input:
            return
        if vector.is_words:
            yield self._routes(phase, vector)
        elif self._is_hidden(vector):
            yield self._onto_residual(phase, vector.name, self._columns(HIDDEN, vector.elements), powers=(0, 0))
            yield self._onto_residual(phase, vector.squares, self._squares(), is_sum=True)
        elif self.sizes.slots is None or vector == table.attention.output:
            places = self._columns(vector.name, vector.elements)
            yield ExchangedVector(vector.name, phase.name, places, False, False, (0, 0))

    def _routes(self, phase: Phase, vector: Vector) -> ExchangedVector:
        assert self.sizes.shape.experts is not None
        words = self.tokens * logit_words(self.sizes.shape.experts) + np.arange(vector.elements)
        return ExchangedVector(vector.name, phase.name, self._begin(vector.name) + words, False, False)

    def _onto_residual(self, phase: Phase, name: str, places: NDArray[np.int64], **kind: object) -> ExchangedVector:
        """The residual's vectors lie in one place, first the embedding's."""
        number, begins = self.onto_residual.index(phase), phase is self.onto_residual[-1]
        before = number + 1 - begins
        return ExchangedVector(
            name,
            phase.name,
            places,
            False,
            begins,
            stores=len(self.onto_residual),
            before=before,
            **kind,  # type: ignore[arg-type]
        )

    def _columns(self, section: str, elements: int) -> NDArray[np.int64]:
        """Of vectors of activations, a word a pair."""
        pairs, groups = np.arange(0, elements, 2), self.sizes.pass_plan.groups
        block = (pairs // VECTOR_COLUMNS * groups + self.tokens // GROUP_TOKENS) * GROUP_BYTES
        place = PassPlan.address_in_group(pairs % VECTOR_COLUMNS, self.tokens % GROUP_TOKENS)
        found: NDArray[np.int64] = self._begin(section) + (block + place) // WORD
        return found

    def _squares(self) -> NDArray[np.int64]:
        """Those of each tile of rows."""
        tiles = np.arange(self.sizes.row_tiles) * self.sizes.pass_plan.tokens
        return self._begin(RESIDUAL_SECTIONS[2]) + tiles + self.tokens

    def _begin(self, section: str) -> int:
        return self.sections.offsets[section] // WORD
