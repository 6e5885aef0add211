"""Llama's decode step in plain PyTorch: one function over static tensors, compiled whole, replayed as a CUDA graph.

Batch 1, bf16, greedy. The cache is as long as the context and the tokens to come; what lies beyond the position is
masked. Q, K and V are one matrix, gate and up another. Norms, rotation and softmax are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.baselines.chain import FIRST_TOKEN
from benchmarks.baselines.weights import BF16_BYTES, EMBEDDING, HEAD, NORM, RANDOM_BF16

if TYPE_CHECKING:
    from benchmarks.baselines.weights import Weights
    from cheetah.models.config import ModelConfig

# Products of one row become reductions that the compiler writes and tunes itself: faster than the library's here.
COMPILER_OPTIONS = {"coordinate_descent_tuning": True}
ROUND_CAPACITY = 64


@dataclass(frozen=True)
class Layer:
    """Weights of one block, [rows, columns] each."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class PlainLlama:
    """embedding, head: [vocab, hidden]. rope: float32 [positions, head_dim/2, 2]."""

    config: ModelConfig
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor


@dataclass(frozen=True)
class State:
    """What a step changes, in place. keys, values: of each layer [1, kv_heads, capacity, head_dim]. rope: float32
    [capacity, head_dim/2, 2]. token, position: int64 [1]. history: int64 [capacity], the token made at each place."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    rope: torch.Tensor
    token: torch.Tensor
    position: torch.Tensor
    history: torch.Tensor


def decode(model: PlainLlama, state: State) -> None:
    """One step: the token's successor becomes the token, the position moves on."""
    following = logits(model, state).argmax(-1)
    state.history.index_copy_(0, state.position, following)
    state.token.copy_(following)
    state.position.add_(1)


def logits(model: PlainLlama, state: State) -> torch.Tensor:
    """[1, vocab]: after the token at the position; its K and V are in the cache then."""
    config, position = model.config, state.position
    x = F.embedding(state.token, model.embedding)
    turn = state.rope[position]
    seen = torch.arange(state.history.shape[0], device=x.device) <= position
    for layer, keys, values in zip(model.layers, state.keys, state.values, strict=True):
        h = rms_norm(x, layer.attention_norm, config.rms_norm_eps)
        x = x + F.linear(attention(config, layer, h, keys, values, position, turn, seen), layer.o)
        h = rms_norm(x, layer.ffn_norm, config.rms_norm_eps)
        gate, up = F.linear(h, layer.gate_up).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    return F.linear(rms_norm(x, model.norm, config.rms_norm_eps), model.head)


def attention(
    config: ModelConfig,
    layer: Layer,
    h: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    turn: torch.Tensor,
    seen: torch.Tensor,
) -> torch.Tensor:
    """[1, query_rows]: of the cache up to the position. turn: [1, head_dim/2, 2]. seen: bool [capacity]."""
    qkv = F.linear(h, layer.qkv).view(1, -1, 1, config.head_dim)
    q, k, v = qkv.split((config.query_heads, config.kv_heads, config.kv_heads), dim=1)
    keys.index_copy_(2, position, rotate(k, turn))
    values.index_copy_(2, position, v)
    mixed = F.scaled_dot_product_attention(rotate(q, turn), keys, values, attn_mask=seen[None], enable_gqa=True)
    return mixed.reshape(1, config.query_rows)


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Pairs (k, k + head_dim/2) of [..., head_dim] turned by the position's angles."""
    low, high = x.float().chunk(2, dim=-1)
    cosine, sine = turn.unbind(-1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square, times the weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def build(config: ModelConfig, weights: Weights) -> PlainLlama:
    """The model of a checkpoint's tensors."""

    def layer(index: int) -> Layer:
        def of(*names: str) -> torch.Tensor:
            parts = [weights[f"model.layers.{index}.{name}.weight"] for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return Layer(
            of("input_layernorm"),
            of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            of("self_attn.o_proj"),
            of("post_attention_layernorm"),
            of("mlp.gate_proj", "mlp.up_proj"),
            of("mlp.down_proj"),
        )

    layers = tuple(layer(index) for index in range(config.layers))
    return PlainLlama(config, weights[EMBEDDING], layers, weights[NORM], weights[HEAD])


def new_state(model: PlainLlama, capacity: int) -> State:
    """Room for `capacity` tokens; keys and values are random numbers."""
    config, like = model.config, model.embedding

    def cache() -> tuple[torch.Tensor, ...]:
        shape = (1, config.kv_heads, capacity, config.head_dim)
        return tuple(torch.randn(shape, dtype=like.dtype, device=like.device) for _ in range(config.layers))

    token, position = (torch.zeros(1, dtype=torch.int64, device=like.device) for _ in range(2))
    history = torch.zeros(capacity, dtype=torch.int64, device=like.device)
    rope = torch.from_numpy(config.rope_table(capacity)).to(like.device)
    return State(cache(), cache(), rope, token, position, history)


class PlainSystem:
    """`compiled`: False runs the function as it stands, for tests."""

    name = "plain PyTorch + CUDA graphs"
    weights, weight_bytes = RANDOM_BF16, BF16_BYTES

    def __init__(self, config: ModelConfig, weights: Weights, compiled: bool = True) -> None:
        self.model = build(config, weights)
        self._compiled = compiled

    def chain(self, context: int, steps: int) -> PlainChain:
        capacity = -(-(context + steps + 1) // ROUND_CAPACITY) * ROUND_CAPACITY
        state = new_state(self.model, capacity)
        step: Callable[[], None] = lambda: decode(self.model, state)  # noqa: E731
        if self._compiled:
            function = torch.compile(decode, fullgraph=True, dynamic=False, options=COMPILER_OPTIONS)
            step = lambda: function(self.model, state)  # noqa: E731
        if self.model.embedding.is_cuda:
            step = captured(step, lambda: begin(state, context))
        return PlainChain(state, context, step)


def begin(state: State, context: int) -> None:
    """The first token, after `context` others."""
    state.token.fill_(FIRST_TOKEN)
    state.position.fill_(context)


def captured(step: Callable[[], None], reset: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of one step, to be replayed. A few steps before it: compiling and tuning happen in the first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # The plain formula, which the compiler turns into kernels of its own: the libraries' expand grouped heads first.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), torch.cuda.stream(stream):
        reset()
        for _ in range(3):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
    torch.cuda.synchronize()
    replay: Callable[[], None] = graph.replay
    return replay


class PlainChain:
    """A `Chain`: steps of one state."""

    def __init__(self, state: State, context: int, step: Callable[[], None]) -> None:
        self._state, self._context, self._step = state, context, step
        self.settings: dict[str, object] = {"capacity": state.history.shape[0], **COMPILER_OPTIONS}

    def reset(self) -> None:
        begin(self._state, self._context)

    def step(self) -> None:
        with torch.no_grad():
            self._step()

    def tokens(self) -> list[int]:
        end = int(self._state.position)
        return [int(token) for token in self._state.history[self._context : end].cpu()]
