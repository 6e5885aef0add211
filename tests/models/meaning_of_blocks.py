"""What a drafter of blocks means: float32 numpy, over the meaning of its layers (`models.dense.reference`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cheetah.models.block import FC, HIDDEN_NORM, MARKOV
from cheetah.models.config import ModelConfig
from cheetah.models.dense.reference import (
    AttentionWeights,
    Layer,
    Reference,
    attention,
    embedding,
    head,
    matvec,
    residual,
    rms_norm,
)
from cheetah.models.family import Tensors
from cheetah.models.rounding import F32, Rounding, exact, widen


class BlockReference:
    """The drafter with its keys and values, of one sequence. rounding: see `Reference`."""

    def __init__(self, config: ModelConfig, tensors: Tensors, rounding: Rounding = exact) -> None:
        read = tensors.__getitem__ if isinstance(tensors, Mapping) else tensors
        assert config.block is not None
        self.config, self.block, self.rounding = config, config.block, rounding
        self.model = Reference(config, tensors, rounding)
        self.fc, self.norm = (widen(read(name)) for name in (FC, HIDDEN_NORM))
        self.markov = tuple(widen(read(name)) for name in MARKOV) if self.block.markov_rank else ()

    @property
    def length(self) -> int:
        """Tokens that it knows keys and values of."""
        return self.model.length

    @length.setter
    def length(self, tokens: int) -> None:
        self.model.length = tokens

    def feature(self, left: F32) -> F32:
        """What the layers project of a token, by what the tapped layers leave of it [taps, hidden]."""
        joined = self.rounding(left.reshape(-1))
        return rms_norm(self.rounding(matvec(self.fc, joined)), self.norm, self.config.rms_norm_eps)

    def read(self, left: F32) -> None:
        """Keys and values of the tokens that follow, by what the tapped layers leave of them [tokens, taps, hidden]."""
        for one in left:
            feature = self.rounding(self.feature(one))
            self.model._make_room()
            for index, layer in enumerate(self.model.layers):
                self._heads(index, layer, feature)
            self.length += 1

    def logits(self, token: int, columns: int | None = None) -> F32:
        """Of every column of a block behind the tokens that are known, with that anchor, before the Markov head
        [columns, vocab]. columns: fewer than the block has."""
        model, begin = self.model, self.length
        count = columns or self.block.columns
        states = [embedding(model.embedding, one) for one in (token, *[self.block.mask] * (count - 1))]
        for index, layer in enumerate(model.layers):
            queries = []
            for number, x in enumerate(states):
                self.length = begin + number
                model._make_room()
                queries.append(self._heads(index, layer, self.rounding(rms_norm(x, _weight(layer, 0), self._epsilon))))
            seen = slice(0, begin + count)
            keys, values = model.keys[index, :, seen], model.values[index, :, seen]
            states = [
                self._behind(layer, x, attention(self.rounding(query), keys, values).reshape(-1))
                for x, query in zip(states, queries, strict=True)
            ]
        self.length = begin
        normed = (self.rounding(rms_norm(x, model.norm, self._epsilon)) for x in states)
        return np.stack([head(model.head, x) for x in normed])

    def drafts(self, token: int, logits: F32) -> list[int]:
        """The tokens that a block with that anchor drafts, greedily, by `logits`."""
        found, before = list[int](), token
        for of_column in logits if self.block.from_anchor else logits[1:]:
            before = int(np.argmax(of_column + self.bias(before)))
            found.append(before)
        return found

    def bias(self, before: int) -> F32 | float:
        """What the Markov head adds to logits behind a token [vocab]."""
        if not self.markov:
            return 0.0
        looked_up, matrix = self.markov
        return matvec(matrix, looked_up[before])

    @property
    def _epsilon(self) -> float:
        return self.config.rms_norm_eps

    def _heads(self, index: int, layer: Layer, normed: F32) -> F32:
        """The queries of what a layer projects for the token at `length`; its key and value are kept."""
        model, weights = self.model, layer.mixer
        assert isinstance(weights, AttentionWeights)
        queries, keys, values = model._heads(layer.kind.attention, weights, normed)
        model.keys[index, :, self.length] = model.cached(keys)
        model.values[index, :, self.length] = model.cached(values)
        return queries

    def _behind(self, layer: Layer, x: F32, output: F32) -> F32:
        """The residual stream behind a layer, by what attention made of it."""
        weights = layer.mixer
        assert isinstance(weights, AttentionWeights)
        self.model.exchanged = [{}]  # of which nobody asks
        x = residual(x, matvec(weights.o, self.rounding(output)))
        return residual(
            x, self.model._feed_forward(layer, self.rounding(rms_norm(x, _weight(layer, 1), self._epsilon)))
        )


def _weight(layer: Layer, number: int) -> F32:
    weight = layer.before[number]
    assert weight is not None
    return weight
