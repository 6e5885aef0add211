"""What a Llama decode step means: float32 numpy, one function for each block of the kernel, with the same name.

Written to be read and to be believed, not to be fast. Every result of the kernel is compared with this. Weights are the
checkpoint's stored values, widened exactly; all arithmetic is float32. Shapes: h hidden, Hq and Hkv heads, D head_dim,
g = Hq / Hkv, n tokens in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cheetah.models.config import ModelConfig
from cheetah.models.dense.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD_NORMS,
    NORMS,
    bias_tensors,
    head_tensor,
    matrix_tensors,
    tensor_shapes,
)
from cheetah.models.family import Tensors
from cheetah.models.formats import WEIGHT_FORMATS
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


def attention_state(queries: F32, keys: F32, values: F32) -> State:
    """The state of queries [g, D] over keys and values [n, D] of one KV head; logits are q.k / sqrt(D)."""
    head_dim = queries.shape[-1]
    if len(keys) == 0:
        return identity_state(queries.shape)
    logits = queries @ keys.T * np.float32(head_dim**-0.5)
    largest = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return State(weights @ values / total, (largest + np.log(total))[..., 0])


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


def attention(queries: F32, keys: F32, values: F32) -> F32:
    """One token's attention: queries [Hq, D] over the cache, keys and values [Hkv, n, D]; gives [Hq, D]."""
    kv_heads, _, head_dim = keys.shape
    groups = queries.reshape(kv_heads, -1, head_dim)
    outputs = [attention_state(*head).output for head in zip(groups, keys, values, strict=True)]
    return np.concatenate(outputs)


def swiglu(gate: F32, up: F32) -> F32:
    """silu(gate) * up."""
    with np.errstate(over="ignore"):  # exp overflows to inf for a very negative gate, and silu is then -0
        return np.asarray(gate / (1 + np.exp(-gate)) * up)


def residual(x: F32, y: F32) -> F32:
    """The residual stream after a sublayer."""
    return x + y


def head(weight: F32, x: F32) -> F32:
    """Logits [vocab] from the last norm's output."""
    return matvec(weight, x)


@dataclass(frozen=True)
class Layer:
    """One layer's weights in float32. biases: of q, k and v (0: none). head_norms: of queries and keys (None: none)."""

    biases: tuple[F32 | float, ...]
    head_norms: tuple[F32 | None, ...]
    input_norm: F32
    q: F32
    k: F32
    v: F32
    o: F32
    post_attention_norm: F32
    gate: F32
    up: F32
    down: F32


class Reference:
    """The whole model with its KV cache, one sequence.

    tensors: name -> array, as a mapping or a function (a checkpoint's `tensor`); float32 copies are kept.
    rounding: applied where a bf16 implementation must round, that is to the input of every matrix and to the queries,
    keys and values of attention. The default does not round: that is the meaning of the model.
    cached: applied to keys and values as they are made, in place of `rounding`: what the cache keeps of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        rounding: Rounding = exact,
        *,
        cached: Rounding | None = None,
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
        self.embedding = weight(EMBEDDING)
        self.layers = [_layer(config, layer, weight) for layer in range(config.layers)]
        self.norm = weight(FINAL_NORM)
        head_weight = self.embedding if config.tied_embeddings else weight(head_tensor(config))
        self.head = as_multiplied(config, config.table.head.name, head_weight)
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self.length = 0
        self.table = self.config.rope_table(64)
        self.keys, self.values = self._new_cache(64), self._new_cache(64)

    def step(self, token: int) -> F32:
        """Append `token` to the sequence; the logits [vocab] for the token after it."""
        return head(self.head, self.hidden_state(token))

    def hidden_state(self, token: int) -> F32:
        """Append `token` to the sequence; the last norm's output [hidden], which the head multiplies."""
        if not 0 <= token < self.config.vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {self.config.vocab_size}")
        self._make_room()
        x = embedding(self.embedding, token)
        for index, layer in enumerate(self.layers):
            x = residual(x, self._attention(index, layer, x))
            x = residual(x, self._feed_forward(layer, x))
        self.length += 1
        return self._normed(x, self.norm)

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

    def _attention(self, index: int, layer: Layer, x: F32) -> F32:
        stop = self.length + 1
        first = 0 if self.config.sliding_window is None else max(0, stop - self.config.sliding_window)
        normed = self._normed(x, layer.input_norm)
        queries, keys, values = self._heads(layer, normed)
        self.keys[index, :, self.length] = self.cached(keys)
        self.values[index, :, self.length] = self.cached(values)
        seen = slice(first, stop)
        output = attention(self.rounding(queries), self.keys[index, :, seen], self.values[index, :, seen])
        return matvec(layer.o, self.rounding(output.reshape(-1)))

    def _heads(self, layer: Layer, normed: F32) -> tuple[F32, F32, F32]:
        """Queries, keys and values [heads, D] of one token: projected, with biases, normalised, rotated."""
        projected = (
            (matvec(matrix, normed) + bias).astype(np.float32).reshape(-1, self.config.head_dim)
            for matrix, bias in zip((layer.q, layer.k, layer.v), layer.biases, strict=True)
        )
        queries, keys, values = projected
        cos_sin, (query_norm, key_norm) = self.table[self.length], layer.head_norms
        return (
            rope(self._head_norm(queries, query_norm), cos_sin),
            rope(self._head_norm(keys, key_norm), cos_sin),
            values,
        )

    def _head_norm(self, heads: F32, weight: F32 | None) -> F32:
        """RMSNorm of each head [H, D]; without a weight the heads themselves."""
        return heads if weight is None else head_norm(heads, weight, self.config.rms_norm_eps)

    def _feed_forward(self, layer: Layer, x: F32) -> F32:
        normed = self._normed(x, layer.post_attention_norm)
        return matvec(layer.down, self.rounding(swiglu(matvec(layer.gate, normed), matvec(layer.up, normed))))

    def _normed(self, x: F32, weight: F32) -> F32:
        return self.rounding(rms_norm(x, weight, self.config.rms_norm_eps))

    def _new_cache(self, room: int) -> F32:
        config = self.config
        return np.zeros((config.layers, config.kv_heads, room, config.head_dim), np.float32)

    def _make_room(self) -> None:
        room = len(self.table)
        if self.length < room:
            return
        self.table = self.config.rope_table(2 * room)
        empty = self._new_cache(room)
        self.keys = np.concatenate([self.keys, empty], axis=2)
        self.values = np.concatenate([self.values, empty], axis=2)


def _layer(config: ModelConfig, layer: int, weight: Callable[[str], F32]) -> Layer:
    def of_layer(names: Iterable[str]) -> list[F32]:
        return [weight(name.format(layer=layer)) for name in names]

    table = config.table

    def of(matrix: str) -> list[F32]:
        return [as_multiplied(config, matrix, weight(name)) for name in matrix_tensors(config, matrix, layer)]

    input_norm, ffn_norm = of_layer(NORMS[product.name] for product in table.norms)
    (q, k, v), (o,), (gate, up), (down,) = (of(product.name) for product in table.products)
    biases = tuple(of_layer(bias_tensors(config))) if config.has_biases else (0.0,) * 3
    head_norms = tuple(of_layer(HEAD_NORMS)) if config.has_head_norms else (None,) * 2
    return Layer(biases, head_norms, input_norm, q, k, v, o, ffn_norm, gate, up, down)


def as_multiplied(config: ModelConfig, matrix: str, weight: F32) -> F32:
    """A tensor of a matrix as its weight format keeps it."""
    return WEIGHT_FORMATS[config.shape.format_of(matrix).name].meaning(weight)
