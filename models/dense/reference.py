"""What a decode step means: float32 numpy, one function for each block of the kernel, with the same name.

Written to be read and to be believed, not to be fast. Every result of the kernel is compared with this. Weights are the
checkpoint's stored values, widened exactly; all arithmetic is float32. Shapes: h hidden, Hq and Hkv heads, D head_dim,
g = Hq / Hkv, n tokens in the cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.dense.activations import ACTIVATIONS, logistic, relu2, silu
from cheetah.models.dense.delta import DeltaState, delta_step
from cheetah.models.dense.layer_weights import AttentionWeights, Layer, LayerTensors, as_multiplied, norm_multiplier
from cheetah.models.dense.weights import (
    EMBEDDING,
    FINAL_NORM,
    head_tensor,
    tensor_shapes,
)
from cheetah.models.family import Tensors
from cheetah.models.layer_kind import AttentionKind, ClampedGate, PositionScale, Routing
from cheetah.models.rope import Rope, rope_table
from cheetah.models.rounding import F32, Rounding, exact, widen
from cheetah.models.sampling import sample


def embedding(table: F32, token: int) -> F32:
    """Row `token` of the table [vocab, h]: the first residual [h]."""
    row: F32 = table[token]
    return row


def rms_norm(x: F32, weight: F32, epsilon: float) -> F32:
    """x / sqrt(mean(x^2) + epsilon) * weight, over [h]."""
    mean_square = np.mean(x * x, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean_square + np.float32(epsilon)) * weight)


def head_norm(heads: F32, weight: F32, epsilon: float) -> F32:
    """`rms_norm` of each of heads [H, D] by itself, with one weight [D] for all."""
    return np.stack([rms_norm(head, weight, epsilon) for head in heads])


def matvec(weight: F32, x: F32) -> F32:
    """weight [rows, columns] @ x [columns]."""
    return np.asarray(weight @ x)


def rope(heads: F32, cos_sin: F32) -> F32:
    """Turn each pair (k, k + D/2) of heads [H, D] by its angle; cos_sin [D/2, 2] is one position of the table."""
    low, high = np.split(heads, 2, axis=-1)
    cos, sin = cos_sin[:, 0], cos_sin[:, 1]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


@dataclass(frozen=True)
class State:
    """Attention over some of the keys: output [..., D] and the natural-log log-sum-exp of the logits [...].

    The state of no keys is (0, -inf), the identity of `merge`. Section 2.2 of FlashInfer (MLSys 2025).
    """

    output: F32
    lse: F32


def attention_state(
    queries: F32, keys: F32, values: F32, scale: float | None = None, soft_cap: float | None = None
) -> State:
    """The state of queries [g, D] over keys and values [n, D] of one KV head; logits are q.k times the scale (None:
    1 / sqrt(D)), and capped where there is a cap."""
    if len(keys) == 0:
        return identity_state(queries.shape)
    logits = capped(queries @ keys.T * np.float32(scale or queries.shape[-1] ** -0.5), soft_cap)
    largest = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return State(weights @ values / total, (largest + np.log(total))[..., 0])


def with_sinks(state: State, sinks: F32) -> State:
    """The state of queries [H, D] that see one more key each, with these logits [H] and no value."""
    sink_states = State(np.zeros_like(state.output), sinks)
    return merge(state, sink_states)


def identity_state(shape: tuple[int, ...]) -> State:
    """The state of no keys, for queries of that shape [..., D]."""
    return State(np.zeros(shape, np.float32), np.full(shape[:-1], -np.inf, np.float32))


def merge(first: State, second: State) -> State:
    """The state over both sets of keys. A state merged with the identity comes back bit for bit."""
    largest = np.maximum(first.lse, second.lse)
    origin = np.where(np.isneginf(largest), np.float32(0), largest)  # -inf - -inf would be NaN
    first_weight, second_weight = np.exp(first.lse - origin), np.exp(second.lse - origin)
    total = first_weight + second_weight
    divisor = np.where(total == 0, np.float32(1), total)[..., None]
    output = first_weight[..., None] * first.output + second_weight[..., None] * second.output
    with np.errstate(divide="ignore"):  # the log of an empty sum is -inf, as it should be
        return State(np.asarray(output / divisor, np.float32), np.asarray(origin + np.log(total), np.float32))


def capped(logits: F32, soft_cap: float | None) -> F32:
    """soft_cap * tanh(logits / soft_cap); the logits themselves without a cap."""
    if soft_cap is None:
        return logits
    cap = np.float32(soft_cap)
    return np.asarray(cap * np.tanh(logits / cap))


def attention(
    queries: F32,
    keys: F32,
    values: F32,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: F32 | None = None,
) -> F32:
    """One token's attention: queries [Hq, D] over the cache, keys and values [Hkv, n, D]; gives [Hq, D]. scale,
    soft_cap: as of `attention_state`. sinks: logits [Hq] of keys without values (None: none)."""
    kv_heads, _, head_dim = keys.shape
    groups = queries.reshape(kv_heads, -1, head_dim)
    states = [attention_state(*head, scale, soft_cap) for head in zip(groups, keys, values, strict=True)]
    state = State(np.concatenate([one.output for one in states]), np.concatenate([one.lse for one in states]))
    return state.output if sinks is None else with_sinks(state, sinks).output


def gated(activation: str | ClampedGate, gate: F32, up: F32) -> F32:
    """What a feed-forward makes of its two products."""
    if isinstance(activation, str):
        return np.asarray(ACTIVATIONS[activation](gate) * up)
    limit, alpha = np.float32(activation.limit), np.float32(activation.alpha)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return np.asarray((up + 1) * silu(gate * alpha) / alpha)


def choice(logits: F32, routing: Routing) -> tuple[NDArray[np.int64], F32]:
    """The experts of a token by their logits [experts], ascending [chosen], and its weight of each [chosen]."""
    order = np.argsort(-logits, kind="stable")  # of equal ones the lowest comes first
    chosen = np.sort(order[: routing.chosen])
    weights = np.exp(logits - logits[order[0]])
    total = weights[chosen] if routing.normalised else weights
    return chosen, np.asarray(weights[chosen] / total.sum(dtype=np.float32), np.float32)


def nearness(logits: F32, chosen: NDArray[np.int64]) -> float:
    """How near another choice is: the least difference between the last logit chosen and one on the other side, or, if
    that is as high as the last, any other; in units of their standard deviation. Infinite where there is none."""
    last, left = logits[chosen].min(), np.delete(logits, chosen)
    others = logits[logits != last] if (left == last).any() else left
    spread = float(logits.std()) or 1.0
    return float(np.abs(others - last).min()) / spread if len(others) else math.inf


def position_factor(scale: PositionScale | None, position: int) -> np.float32:
    """What the queries of a position are multiplied by."""
    return np.float32(1.0 if scale is None else 1 + scale.beta * math.log1p(position // scale.context))


def residual(x: F32, y: F32) -> F32:
    """The residual stream after a sublayer."""
    return x + y


def head(weight: F32, x: F32) -> F32:
    """Logits [vocab] from the last norm's output."""
    return matvec(weight, x)


class Reference:
    """The whole model with its KV cache, one sequence.

    tensors: name -> array, as a mapping or a function (a checkpoint's `tensor`); float32 copies are kept.
    rounding: applied where a bf16 implementation must round, that is to the input of every matrix and to the queries,
    keys and values of attention. The default does not round: that is the meaning of the model.
    cached: applied to keys and values as they are made, in place of `rounding`: what the cache keeps of them,
    over kv_scales f32 [layers, 2, kv_heads].
    max_context: tokens that a sequence may have, by default those that the configuration says; chooses among factors of
    longrope.
    nearness: of every token since `reset`, how near another choice of experts was in some layer: see `nearness`.
    left: of the last token, what each layer leaves of the residual stream: taps keep that of some.
    exchanged: of the last token, as blocks exchange them and not rounded, the vectors that phases make, by their names
    in the table of products: first those of the embedding, then those of each layer. Of sums of squares the total.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        rounding: Rounding = exact,
        *,
        cached: Rounding | None = None,
        max_context: int | None = None,
        kv_scales: F32 | None = None,
    ):
        read = tensors.__getitem__ if isinstance(tensors, Mapping) else tensors
        shapes = tensor_shapes(config)

        def weight(name: str) -> F32:
            tensor = widen(read(name))
            if tensor.shape != shapes[name]:
                raise ValueError(f"{name}: shape {list(tensor.shape)}, expected {list(shapes[name])}")
            return tensor

        self.config = config
        self.rounding = rounding
        self.cached = cached or rounding
        self.max_context = max_context or config.max_position_embeddings
        self.kv_scales = np.ones((config.layers, 2, config.kv_heads), np.float32) if kv_scales is None else kv_scales
        self.embedding = weight(EMBEDDING)
        self.layers = [LayerTensors(config, layer, weight).read() for layer in range(config.layers)]
        self.norm = norm_multiplier(config, weight(FINAL_NORM))
        head_weight = self.embedding if config.tied_embeddings else weight(head_tensor(config))
        self.head = as_multiplied(config, config.table.head.name, head_weight)
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self.length, self.nearness, self.exchanged = 0, list[float](), [dict[str, F32]()]
        self.left = list[F32]()
        self.tables = self._new_tables(64)
        self.keys, self.values = self._new_cache(64), self._new_cache(64)
        kinds = enumerate(self.config.layer_kinds)
        self.states = {layer: DeltaState.empty(kind.delta) for layer, kind in kinds if kind.delta is not None}
        self._states_before = self.states

    def forget_last(self) -> None:
        """Forget the sequence's last token, once: states before that are not kept."""
        self.length, self.states = self.length - 1, self._states_before
        self.nearness.pop()

    def step(self, token: int) -> F32:
        """Append `token` to the sequence; the logits [vocab] for the token after it."""
        logits = head(self.head, self.hidden_state(token)) / np.float32(self.config.logit_divisor)
        return capped(logits, self.config.logit_soft_cap)

    def hidden_state(self, token: int) -> F32:
        """Append `token` to the sequence; the last norm's output [hidden], which the head multiplies."""
        if not 0 <= token < self.config.vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {self.config.vocab_size}")
        self._make_room()
        self.nearness.append(math.inf)
        x = embedding(self.embedding, token) * np.float32(self.config.embedding_multiplier)
        self.exchanged, self.left, self._states_before = [{}], [], self.states
        following = [*(layer.before[0] for layer in self.layers[1:]), self.norm]
        self._exchange("hidden", x, self.layers[0].before[0])
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            (before_attention, before_ffn), (behind_attention, behind_ffn) = layer.before, layer.behind
            part = np.float32(layer.kind.residual_multiplier)
            self.exchanged.append({})
            made = self._mixed(index, layer, self.rounding(self._normed(x, before_attention)))
            self._exchange("o_rows", made)
            x = residual(x, part * self._normed(made, behind_attention))
            self._exchange("middle", x, before_ffn)
            made = self._feed_forward(layer, self.rounding(self._normed(x, before_ffn)))
            self._exchange("down_rows", made)
            x = residual(x, part * self._normed(made, behind_ffn))
            self._exchange("hidden", x, next_norm)
            self.left.append(x)
        self.length += 1
        return self.rounding(self._normed(x, self.norm))

    def forward(self, ids: Sequence[int]) -> F32:
        """Logits [len(ids), vocab] of every position of a new sequence."""
        self.reset()
        return np.stack([self.step(token) for token in ids])

    def generate(
        self,
        ids: Sequence[int],
        max_tokens: int,
        stop_ids: Iterable[int] = (),
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[int]:
        """The tokens that follow `ids` in a new sequence: at most `max_tokens`, up to and including a stop id."""
        logits = self.forward(ids)[-1]
        stops, made = set(stop_ids), list[int]()
        while len(made) < max_tokens:
            made.append(sample(logits, temperature, seed, position=self.length))
            if made[-1] in stops:
                break
            if len(made) < max_tokens:
                logits = self.step(made[-1])
        return made

    def _exchange(self, name: str, x: F32, norm: F32 | None = None) -> None:
        """What is exchanged of rows before a norm: times its weights, and the sum of their squares."""
        self.exchanged[-1][name] = x if norm is None else x * norm
        self.exchanged[-1][f"{name}_squares"] = (x * x).sum(keepdims=True)

    def _mixed(self, index: int, layer: Layer, normed: F32) -> F32:
        """What a layer's attention makes, or what it has in its place."""
        if isinstance(layer.mixer, AttentionWeights):
            return self._attention(index, layer.kind.attention, layer.mixer, normed)
        made = delta_step(layer.mixer, self.states[index], normed, self.config.rms_norm_eps, self.rounding)
        output, self.states = made[0], self.states | {index: made[1]}
        self.exchanged[-1]["attention"] = output
        return matvec(layer.mixer.out, self.rounding(output))

    def _attention(self, index: int, kind: AttentionKind, weights: AttentionWeights, normed: F32) -> F32:
        stop = self.length + 1
        first = 0 if kind.window is None else max(0, stop - kind.window)
        queries, keys, values = self._heads(kind, weights, normed)
        key_scales, value_scales = self.kv_scales[index][..., None]
        keys, values = self.cached(keys / key_scales), self.cached(values / value_scales)
        self.keys[index, :, self.length], self.values[index, :, self.length] = keys * key_scales, values * value_scales
        self.exchanged[-1].setdefault("qkv", np.concatenate([part.ravel() for part in (queries, keys, values)]))
        seen = slice(first, stop)
        cache = self.keys[index, :, seen], self.values[index, :, seen]
        output = attention(self.rounding(queries), *cache, kind.scale, kind.soft_cap, weights.sinks).reshape(-1)
        if weights.gate is not None:
            gates = matvec(weights.gate, normed)
            self.exchanged[-1]["qkv"] = np.concatenate([self.exchanged[-1]["qkv"], gates])
            output = output * logistic(gates)
        self.exchanged[-1]["attention"] = output
        return np.asarray(matvec(weights.o, self.rounding(output)) + weights.o_bias, np.float32)

    def _heads(self, kind: AttentionKind, weights: AttentionWeights, normed: F32) -> tuple[F32, F32, F32]:
        """Queries, keys and values [heads, D] of one token: projected, with biases, normalised, rotated."""
        queries, keys, values = (
            (matvec(matrix, normed) + bias).astype(np.float32)
            for matrix, bias in zip((weights.q, weights.k, weights.v), weights.biases, strict=True)
        )
        query_norm, key_norm = weights.head_norms
        if query_norm is not None and key_norm is not None:  # who reads heads normalises them
            self._exchange_raw(queries, keys, values, (query_norm, key_norm))
        cos_sin = self.tables[kind.rope][self.length]
        return (
            rope(self._head_norm(queries, query_norm), cos_sin) * position_factor(kind.position_scale, self.length),
            rope(self._head_norm(keys, key_norm), cos_sin),
            values.reshape(-1, self.config.head_dim),
        )

    def _exchange_raw(self, queries: F32, keys: F32, values: F32, norms: tuple[F32, F32]) -> None:
        """Rows of heads before their norms; those of norms over all heads are exchanged as those of other norms are."""
        rows = [queries, keys, values]
        if self.config.head_norms == "width":
            self._exchange("qkv", np.concatenate(rows[:2]))
            rows[:2] = queries * norms[0], keys * norms[1]
        self.exchanged[-1]["qkv"] = np.concatenate(rows)

    def _head_norm(self, rows: F32, weight: F32 | None) -> F32:
        """RMSNorm of each head, or of all together where there is a weight for each row; without a weight the heads
        themselves, [H, D]."""
        heads = rows.reshape(-1, self.config.head_dim)
        if weight is None:
            return heads
        if self.config.head_norms == "width":
            return rms_norm(rows, weight, self.config.rms_norm_eps).reshape(heads.shape)
        return head_norm(heads, weight, self.config.rms_norm_eps)

    def _feed_forward(self, layer: Layer, normed: F32) -> F32:
        if layer.router is None or layer.kind.routing is None:
            return self._expert(layer, 0, 1.0, normed)
        logits = (layer.router * normed).sum(axis=1, dtype=np.float32) + layer.router_bias  # of equal rows, equal ones
        self.exchanged[-1]["routes"] = logits if not layer.shared else self._with_shared_logit(layer, logits, normed)
        chosen, weights = choice(logits, layer.kind.routing)
        self.nearness[-1] = min(self.nearness[-1], nearness(logits, chosen))
        made = [self._expert(layer, *pair, normed) for pair in zip(chosen, weights, strict=True)]
        return functools.reduce(residual, [*made, *self._shared_expert(layer, normed)])

    def _with_shared_logit(self, layer: Layer, logits: F32, normed: F32) -> F32:
        """As kernels have them, with that of the expert which every token has."""
        experts = self.config.table.experts
        assert experts is not None
        found = np.zeros(experts.logits, np.float32)
        found[: len(logits)] = logits
        found[experts.shared_logit] = matvec(layer.shared[-1], normed)[0]
        return found

    def _shared_expert(self, layer: Layer, normed: F32) -> Iterator[F32]:
        """What the expert that every token has makes, if there is one."""
        if layer.shared:
            gate, up, down, weight = layer.shared
            made = gated(layer.kind.activation, matvec(gate, normed), matvec(up, normed))
            self.exchanged[-1]["shared"] = made
            yield matvec(down, self.rounding(made)) * logistic(matvec(weight, normed))

    def _expert(self, layer: Layer, number: int, weight: float, normed: F32) -> F32:
        """What an expert makes, times a weight: of what it multiplies with `down`, before that is rounded."""
        *gates, up, down = layer.experts[number]
        of_gate, of_up, of_down = layer.expert_biases[number] if layer.expert_biases else (0.0,) * 3
        activation = layer.kind.clamped_gate or layer.kind.activation
        made = np.asarray(matvec(up, normed) + of_up)
        made = gated(activation, matvec(gates[0], normed) + of_gate, made) if gates else relu2(made)
        weighted = np.asarray(made * np.float32(weight), np.float32)
        before = self.exchanged[-1].get("gated", np.empty(0, np.float32))
        self.exchanged[-1]["gated"] = np.concatenate([before, weighted])
        return np.asarray(matvec(down, self.rounding(weighted)) + of_down * np.float32(weight), np.float32)

    def _normed(self, x: F32, weight: F32 | None) -> F32:
        return x if weight is None else rms_norm(x, weight, self.config.rms_norm_eps)

    def _new_tables(self, room: int) -> dict[Rope | None, F32]:
        ropes = dict.fromkeys(kind.attention.rope for kind in self.config.kinds)
        return {one: rope_table(one, self.config.head_dim, room, self.max_context) for one in ropes}

    def _new_cache(self, room: int) -> F32:
        config = self.config
        return np.zeros((config.layers, config.kv_heads, room, config.head_dim), np.float32)

    def _make_room(self) -> None:
        if any(len(table) <= self.length for table in self.tables.values()):
            self.tables = self._new_tables(2 * self.length)
        room = self.keys.shape[2]
        if self.length < room:
            return
        empty = self._new_cache(room)
        self.keys = np.concatenate([self.keys, empty], axis=2)
        self.values = np.concatenate([self.values, empty], axis=2)
