"""What heads that draft mean, EAGLE-3's and Qwen3.5's: float32 numpy, one sequence with its keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from cheetah.models import mtp
from cheetah.models.config import ModelConfig
from cheetah.models.dense.reference import Reference, attention, gated, matvec, rms_norm, rope
from cheetah.models.dense.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    POST_ATTENTION_NORM,
    STATE_BEFORE_FC,
    STATE_NORM,
)
from cheetah.models.drafter import LAYER, TOKEN_IDS, Drafter
from cheetah.models.eagle3 import tensors as names
from cheetah.models.family import ReadTensor
from cheetah.models.qwen3_5 import Qwen35Config, Qwen35MoeConfig
from cheetah.models.registry import family_of
from cheetah.models.rounding import F32, widen
from cheetah.models.sampling import sample


class HeadReference(ABC):
    """A head with its cache. tensor: by names, see `tensor_shapes` of its family, and `TOKEN_IDS`.

    length: tokens of the sequence. own: the state that goes on behind a token that was drafted."""

    def __init__(self, config: ModelConfig, tensor: ReadTensor) -> None:
        self.config = config
        self.weights = {name: widen(tensor(name)) for name in family_of(config).tensor_shapes(config)}
        knows_all = config.drafter is not None and config.drafter.joins_residual
        self.token_ids = np.arange(config.vocab_size) if knows_all else tensor(TOKEN_IDS)
        self.head = self.weights[HEAD]
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Forget the sequence."""

    @abstractmethod
    def step(self, token: int, features: F32 | None = None) -> F32:
        """Append a token, with what the tapped layers leave of the one before it [layers, hidden], or behind a token
        that was drafted, with its own state. The logits [vocabulary] of the token behind it."""

    @abstractmethod
    def kept(self) -> Any:
        """All that `restore` needs to forget what comes behind."""

    @abstractmethod
    def restore(self, kept: Any) -> None: ...

    def draft(self, count: int, logits: F32, temperature: float = 0.0, seed: int = 0) -> list[int]:
        """So many tokens behind the last one, whose logits are given; the sequence has them but for the last
        afterwards. It lacks the target's first token, so the noise of a token is that of the place behind `length`."""
        made = list[int]()
        while len(made) < count:
            spread = np.full(self.config.vocab_size, -np.inf, np.float32)
            spread[self.token_ids] = logits
            made.append(int(sample(spread, temperature, seed, self.length + 1)))
            if len(made) < count:
                logits = self.step(made[-1])
        return made

    def forward(self, ids: Sequence[int], features: F32) -> F32:
        """Logits [len(ids), vocabulary] of a new sequence whose tokens all have features [len(ids), layers, hidden]."""
        self.reset()
        return np.stack([self.step(token, row) for token, row in zip(ids, features, strict=True)])


class Eagle3Reference(HeadReference):
    """EAGLE-3's."""

    def reset(self) -> None:
        self.length = 0
        shape = (self.config.kv_heads, 0, self.config.head_dim)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.own = np.zeros(self.config.hidden_size, np.float32)

    def step(self, token: int, features: F32 | None = None) -> F32:
        state = self.own if features is None else self.joined(features)
        before = self._norm(names.HIDDEN_NORM, state)
        x = before if self._drafter.norm_before_residual else state
        embedded = self._norm(names.EMBEDDING_NORM, self.weights[EMBEDDING][token])
        x = x + self._attention(np.concatenate([embedded, before]))
        x = x + self._feed_forward(self._norm(POST_ATTENTION_NORM.format(layer=0), x))
        normed = self._norm(FINAL_NORM, x)
        self.own = normed if self._drafter.norm_output else x
        self.length += 1
        return matvec(self.head, normed)

    @property
    def _drafter(self) -> Drafter:
        assert self.config.drafter is not None
        return self.config.drafter

    def kept(self) -> Any:
        return self.own, self.keys, self.values, self.length

    def restore(self, kept: Any) -> None:
        self.own, self.keys, self.values, self.length = kept

    def joined(self, features: F32) -> F32:
        """The hidden state of what the tapped layers leave of a token [layers, hidden]."""
        if self._drafter.tap_norms == "each":
            rows = [self._norm(names.FC_NORM.format(number=number), row) for number, row in enumerate(features)]
            features = np.stack(rows)
        joined = features.reshape(-1)
        if self._drafter.tap_norms == "whole":
            joined = self._norm(names.INPUT_NORM, joined)
        return matvec(self.weights[names.FC], joined)

    def _norm(self, name: str, x: F32) -> F32:
        return rms_norm(x, self.weights[name], self.config.rms_norm_eps)

    def _attention(self, x: F32) -> F32:
        q, k, v = (matvec(self.weights[name], x).reshape(-1, self.config.head_dim) for name in names.HEADS)
        cos_sin = self.config.rope_table(self.length + 1)[-1]
        q, k = rope(q, cos_sin), rope(k, cos_sin)
        self.keys = np.concatenate([self.keys, k[:, None]], axis=1)
        self.values = np.concatenate([self.values, v[:, None]], axis=1)
        o = self.weights[LAYER + "self_attn.o_proj.weight"]
        return matvec(o, attention(q, self.keys, self.values).reshape(-1))

    def _feed_forward(self, x: F32) -> F32:
        gate, up, down = (self.weights[f"{LAYER}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return matvec(down, gated("silu", matvec(gate, x), matvec(up, x)))


class MtpReference(HeadReference):
    """Qwen3.5's. The layer is one of the model's with attention, so it means what that means: a model of this layer
    alone, whose only embedding is the residual that it begins with."""

    def reset(self) -> None:
        config = self.config
        sizes = (config.hidden_size, config.intermediate_size, 1, config.query_heads, config.kv_heads, config.head_dim)
        kind, experts = (Qwen35Config, {}) if config.routing is None else (Qwen35MoeConfig, {"routing": config.routing})
        alone = kind(
            *sizes,
            config.vocab_size,
            **experts,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope=config.rope,
        )
        self.layer = Reference(alone, self.weights)
        self.own = np.zeros(config.hidden_size, np.float32)

    @property
    def length(self) -> int:
        return self.layer.length

    def step(self, token: int, features: F32 | None = None) -> F32:
        self.layer.embedding = matvec(self.weights[mtp.FC], self.joined(token, features))[None]
        self.own = self.layer.hidden_state(0)
        return matvec(self.head, self.own)

    def joined(self, token: int, features: F32 | None = None) -> F32:
        """What `fc` multiplies, [2 * hidden]."""
        state = self.own if features is None else self._norm(STATE_NORM, features[0])
        embedded = self._norm(mtp.EMBEDDING_NORM, self.weights[EMBEDDING][token])
        return np.concatenate([embedded, self._norm(STATE_BEFORE_FC, state)])

    def kept(self) -> Any:
        return self.own, self.layer.length

    def restore(self, kept: Any) -> None:
        self.own, self.layer.length = kept

    def _norm(self, name: str, x: F32) -> F32:
        return rms_norm(x, 1 + self.weights[name], self.config.rms_norm_eps)
