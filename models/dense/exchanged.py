"""Where the vectors that the phases of a step exchange lie in its exchange, element by element."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cheetah.blocks.columns import fragment_word
from cheetah.blocks.exchange_kinds import exchange_kind
from cheetah.blocks.linear.formats.vectors import powers_of, word_place
from cheetah.blocks.linear.rms import squares_words
from cheetah.models.config import ModelConfig
from cheetah.models.dense.step_sizes import exchange_sizes, own_vectors, product_inputs, published_kinds
from cheetah.models.exchanged import ExchangedVector
from cheetah.plan import M_TILE_ROWS, Gpu, Plan
from cheetah.plan.formats import BF16_VECTOR
from cheetah.plan.narrow import residual_m_tiles
from cheetah.plan.products import ROUTER, Phase, Vector, logit_words


def exchanged_vectors(config: ModelConfig, gpu: Gpu, plan: Plan) -> tuple[ExchangedVector, ...]:
    """Those of every layer, in the order of its phases. Partial states of attention are left out: which rows have some
    is the KV plans' matter; and logits of a fused router, which are times another factor in every token."""
    listing = _Listing(config, gpu, plan)
    phases = (one for one in config.shape.table.layer if not (plan.fused_router and one.name == ROUTER))
    return tuple(vector for phase in phases for vector in listing.made_by(phase))


class _Listing:
    """All that says where vectors lie, and as what they are published."""

    def __init__(self, config: ModelConfig, gpu: Gpu, plan: Plan) -> None:
        self.shape, self.gpu, self.plan = config.shape, gpu, plan
        self.inputs = product_inputs(self.shape, gpu, plan)
        self.is_tagged, self.kinds = plan.sync == "flags", published_kinds(config, plan)
        sizes = exchange_sizes(self.shape, gpu, plan)
        self.vectors = exchange_kind(plan.sync).lay_out(sizes, self.inputs)
        self.own = own_vectors(self.shape.table) if gpu.ranks > 1 else ()

    def made_by(self, phase: Phase) -> Iterator[ExchangedVector]:
        vector = phase.output
        for name in () if vector is None else vector.names:
            assert vector is not None
            yield self._squares(phase, vector) if name == vector.squares else self._rows(phase, vector)

    def _squares(self, phase: Phase, vector: Vector) -> ExchangedVector:
        heads = self.shape.rotated_rows // M_TILE_ROWS
        m_tiles = heads if vector.has_squares else residual_m_tiles(self.shape, self.gpu)
        payload = self._columns(squares_words(m_tiles, 1)) + np.arange(m_tiles)
        return ExchangedVector(*self._placed(phase, vector.squares, payload), is_sum=True)

    def _rows(self, phase: Phase, vector: Vector) -> ExchangedVector:
        if vector.is_words:
            assert self.shape.experts is not None
            payload = self._columns(logit_words(self.shape.experts)) + np.arange(vector.elements)
            return ExchangedVector(*self._placed(phase, vector.name, payload))
        if vector == self.shape.table.attention.input:
            words = self.shape.of_rank(self.gpu.ranks).qkv_rows // 2
            payload = self._columns(words) + np.arange(words)
            return ExchangedVector(*self._placed(phase, vector.name, payload), powers=(0, 0))
        pairs = np.arange(0, vector.parts * vector.elements, 2)
        kind = BF16_VECTOR if self.is_tagged else self.kinds.get(vector.name, BF16_VECTOR)
        payload = word_place(fragment_word(pairs, self._columns(1), self.plan.tokens), kind)
        placed = self._placed(phase, vector.name, payload)
        if self.is_tagged:
            exponent = -self.inputs.get(vector.name, 0)
            return ExchangedVector(*placed, powers=(exponent, exponent), is_tagged=vector.name in self.inputs)
        return ExchangedVector(*placed, powers=powers_of(kind))

    def _columns(self, words: int) -> NDArray[np.int64]:
        """The first payload words [columns, 1] of columns with so many each."""
        return np.arange(self.plan.tokens)[:, None] * words

    def _placed(
        self, phase: Phase, name: str, payload: NDArray[np.int64]
    ) -> tuple[str, str, NDArray[np.int64], bool, bool]:
        place = self.vectors[name]
        numbers: NDArray[np.int64] = np.asarray(place.number(payload)) * (place.word.bytes // 4)
        return name, phase.name, numbers, name in self.own, name in self.shape.table.heads.input.names
