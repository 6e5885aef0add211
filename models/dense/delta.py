"""Gated DeltaNet, attention with a memory of one matrix a head: its tensors, and what it means in float32 numpy.

Shapes: h hidden, Hk key heads and Hv value heads of D elements, r = Hv / Hk, C = 2 Hk D + Hv D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.act_order import RowsInOrder
from cheetah.models.dense.activations import logistic, silu, softplus
from cheetah.models.layer_kind import DeltaNet
from cheetah.models.rounding import F32, Rounding, widen

_MODULE = "model.layers.{layer}.linear_attn."
IN_PROJ_PARTS = ("qkv", "z", "b", "a")
OUT_PROJ_TENSOR = f"{_MODULE}out_proj.weight"
TAPS_TENSOR = f"{_MODULE}conv1d.weight"
LENGTH_EPSILON = 1e-6
"""Added to the squares of a query or key before its length is taken, whatever the model's norms add."""
MEANING_OF_DELTA = {
    "in_proj_qkv": "[2 * linear_num_key_heads * linear_key_head_dim + values, hidden_size]",
    "in_proj_z": "[linear_num_value_heads * linear_value_head_dim, hidden_size]",
    "in_proj_qkvz": "[2 * linear_num_key_heads * linear_key_head_dim + 2 * values, hidden_size]",
    "in_proj_ba": "[2 * linear_num_value_heads, hidden_size]",
    "in_proj_b": "[linear_num_value_heads, hidden_size]",
    "in_proj_a": "[linear_num_value_heads, hidden_size]",
    "conv1d": "[rows of in_proj_qkv, 1, linear_conv_kernel_dim]",
    "out_proj": "[hidden_size, linear_num_value_heads * linear_value_head_dim]",
    "linear_attn": "[linear_num_value_heads], of norm [linear_value_head_dim]",
}
"""What of config.json makes a tensor's shape, by the part of its name before the last."""


def delta_shapes(hidden: int, delta: DeltaNet) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer, with `{layer}`, and their shapes."""
    rows = {"qkv": delta.channels, "z": delta.value_rows, "b": delta.value_heads, "a": delta.value_heads}
    if delta.by_key_heads:
        rows = {"qkvz": delta.channels + delta.value_rows, "ba": 2 * delta.value_heads}
    return {
        **{f"{_MODULE}in_proj_{name}.weight": (count, hidden) for name, count in rows.items()},
        f"{_MODULE}conv1d.weight": (delta.channels, 1, delta.taps),
        f"{_MODULE}A_log": (delta.value_heads,),
        f"{_MODULE}dt_bias": (delta.value_heads,),
        f"{_MODULE}norm.weight": (delta.value_dim,),
        f"{_MODULE}out_proj.weight": (hidden, delta.value_rows),
    }


def in_proj_tensor(source: str) -> str:
    """The tensor of a source of the products before Gated DeltaNet ("delta_qkv"), with `{layer}`."""
    return f"{_MODULE}in_proj_{source.removeprefix('delta_')}.weight"


def in_proj_modules(delta: DeltaNet) -> tuple[str, ...]:
    """The linear layers that make queries, keys, values and their gates, with `{layer}`."""
    names = ("qkvz",) if delta.by_key_heads else IN_PROJ_PARTS[:2]
    return tuple(f"{_MODULE}in_proj_{name}" for name in names)


def number_modules(delta: DeltaNet) -> tuple[str, ...]:
    """Those that make a number of each value head, with `{layer}`."""
    return tuple(f"{_MODULE}in_proj_{name}" for name in (("ba",) if delta.by_key_heads else IN_PROJ_PARTS[2:]))


def of_length_one(heads: F32) -> F32:
    """Each of heads [H, D] over its length."""
    return np.asarray(heads / np.sqrt((heads * heads).sum(-1, keepdims=True) + np.float32(LENGTH_EPSILON)))


def layer_numbers(layer: int, tensor: Callable[[str], NDArray[Any]]) -> F32:
    """What kernels have of a layer in f32: the rates of forgetting, their biases, the weights of the norm of heads."""
    rate, bias, norm = (
        widen(tensor(f"{_MODULE}{name}".format(layer=layer))) for name in ("A_log", "dt_bias", "norm.weight")
    )
    return np.concatenate([np.exp(rate), bias, norm])


@dataclass(frozen=True)
class DeltaWeights:
    """A layer's, float32: qkv [C, h], z [Hv D, h], b and a [Hv, h], taps [C, taps] (the last is of the token itself),
    rate [Hv] (of forgetting, above zero), rate_bias [Hv], norm [D], out [h, Hv D]."""

    kind: DeltaNet
    qkv: F32
    z: F32
    b: F32
    a: F32
    taps: F32
    rate: F32
    rate_bias: F32
    norm: F32
    out: F32

    @classmethod
    def of_layer(cls, kind: DeltaNet, layer: int, weight: Callable[[str], F32]) -> DeltaWeights:
        def of(name: str) -> F32:
            return weight(f"{_MODULE}{name}".format(layer=layer))

        if kind.by_key_heads:
            qkv, z, b, a = parted(kind, of("in_proj_qkvz.weight"), of("in_proj_ba.weight"))
        else:
            qkv, z, b, a = (of(f"in_proj_{name}.weight") for name in IN_PROJ_PARTS)
        taps, rate = of("conv1d.weight")[:, 0], np.exp(of("A_log"))
        return cls(kind, qkv, z, b, a, taps, rate, of("dt_bias"), of("norm.weight"), of("out_proj.weight"))


def parted(kind: DeltaNet, qkvz: NDArray[Any], ba: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """qkv, z, b and a of matrices that have the rows of one key head after another's."""
    share = kind.value_heads // kind.key_heads
    rows = [kind.key_dim, kind.key_dim, share * kind.value_dim]
    by_head = (one.reshape(kind.key_heads, -1, one.shape[1]) for one in (qkvz, ba))
    parts = [np.split(one, np.cumsum(ends), axis=1) for one, ends in zip(by_head, (rows, [share]), strict=True)]
    q, k, v, z, b, a = (part.reshape(-1, part.shape[2]) for part in (*parts[0], *parts[1]))
    return np.concatenate([q, k, v]), z, b, a


def of_key_heads(kind: DeltaNet, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """What gives the four tensors before Gated DeltaNet of files that have two in their place, and others as `read`."""
    rows = (np.arange(count)[:, None] for count in (kind.channels + kind.value_rows, 2 * kind.value_heads))
    orders = dict(zip(IN_PROJ_PARTS, (order[:, 0] for order in parted(kind, *rows)), strict=True))

    def parted_or_read(name: str) -> Any:
        layer, found, part = name.partition(".linear_attn.in_proj_")
        if not found:
            return read(name)
        part = part.removesuffix(".weight")
        fused = read(f"{layer}{found}{'ba' if part in 'ba' else 'qkvz'}.weight")
        return RowsInOrder(fused, orders[part])

    return parted_or_read


@dataclass(frozen=True)
class DeltaState:
    """What a sequence keeps in a layer: before [taps - 1, C], the channels of the tokens before, the last one last, not
    yet mixed; memory [Hv, Dk, Dv]. Both are zero before the first token."""

    before: F32
    memory: F32

    @classmethod
    def empty(cls, kind: DeltaNet) -> DeltaState:
        memory = np.zeros((kind.value_heads, kind.key_dim, kind.value_dim), np.float32)
        return cls(np.zeros((kind.taps - 1, kind.channels), np.float32), memory)


def delta_step(
    weights: DeltaWeights, state: DeltaState, x: F32, epsilon: float, rounding: Rounding
) -> tuple[F32, DeltaState]:
    """One token, x [h] behind its norm: what the layer's heads make, [Hv D], and the state behind it. epsilon: of the
    norm of heads. rounding: of the channels, as they are kept."""
    kind = weights.kind
    channels = np.concatenate([state.before, rounding(weights.qkv @ x)[None]])
    queries, keys, values = heads_of(kind, silu((channels.T * weights.taps).sum(1, dtype=np.float32)))
    kept = np.exp(-weights.rate * softplus(weights.a @ x + weights.rate_bias))
    written = logistic(weights.b @ x)
    output, memory = remember(state.memory, queries, keys, values, kept, written)
    gates = silu(rounding(weights.z @ x)).reshape(output.shape)
    mean_squares = np.mean(output * output, axis=-1, keepdims=True, dtype=np.float32)
    made = np.asarray(output / np.sqrt(mean_squares + np.float32(epsilon)) * weights.norm * gates, np.float32)
    return made.reshape(-1), DeltaState(channels[1:], memory)


def heads_of(kind: DeltaNet, mixed: F32) -> tuple[F32, F32, F32]:
    """Queries and keys [Hv, Dk] of length one, each for the r value heads that share it, the queries over the root of
    Dk; values [Hv, Dv]."""
    queries, keys, values = np.split(mixed, [kind.key_rows, 2 * kind.key_rows])
    share = kind.value_heads // kind.key_heads
    of_key_heads = (of_length_one(part.reshape(kind.key_heads, kind.key_dim)) for part in (queries, keys))
    queries, keys = (np.repeat(part, share, axis=0) for part in of_key_heads)
    return queries * np.float32(kind.key_dim**-0.5), keys, values.reshape(kind.value_heads, kind.value_dim)


def remember(memory: F32, queries: F32, keys: F32, values: F32, kept: F32, written: F32) -> tuple[F32, F32]:
    """The gated delta rule: of the memory [Hv, Dk, Dv] the part `kept` [Hv] stays; what it has under the key is moved
    towards the value by the part `written` [Hv]. Gives what it has under the query then, [Hv, Dv], and the memory."""
    memory = memory * kept[:, None, None]
    known = np.einsum("hkv,hk->hv", memory, keys)
    change = (values - known) * written[:, None]
    memory = memory + keys[:, :, None] * change[:, None, :]
    return np.einsum("hkv,hk->hv", memory, queries), memory
