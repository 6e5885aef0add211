"""transformers' Llama with its static cache, the step compiled as its documentation says.

torch.compile(mode="reduce-overhead", fullgraph=True): the compiler records and replays the CUDA graphs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.baselines.chain import FIRST_TOKEN
from benchmarks.baselines.weights import BF16_BYTES, RANDOM_BF16

if TYPE_CHECKING:
    from benchmarks.baselines.weights import Weights
    from cheetah.models.config import ModelConfig

MODE = "reduce-overhead"
ROUND_CAPACITY = 64
WARMUP_STEPS = 4  # the first compiles, the second runs outside of a graph, the third is recorded


def build(config: ModelConfig, weights: Weights) -> Any:
    """transformers' model that holds these very tensors."""
    library = importlib.import_module("transformers")
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    fields = {**config.to_dict(), "max_position_embeddings": config.max_position_embeddings}
    like = library.LlamaConfig(**fields)
    with torch.device("meta"):
        model = library.LlamaForCausalLM(like)
    model.load_state_dict(weights, strict=True, assign=True)
    with next(iter(weights.values())).device:  # buffers made on the meta device hold nothing
        model.model.rotary_emb = llama.LlamaRotaryEmbedding(like)
    model.requires_grad_(False)
    return model.eval()


def new_cache(model: Any, config: ModelConfig, capacity: int) -> Any:
    """A static cache of `capacity` tokens, initialised; keys and values are random numbers."""
    cache = importlib.import_module("transformers").StaticCache(config=model.config, max_cache_len=capacity)
    like = model.model.embed_tokens.weight
    cache.early_initialization(1, config.kv_heads, config.head_dim, like.dtype, like.device)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    return cache


def set_length(cache: Any, length: int) -> None:
    """Take `length` tokens as cached."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(length)


def following_token(model: Any, token: torch.Tensor, cache: Any) -> torch.Tensor:
    """The likeliest token after `token`, int64 [1, 1] both; the cache takes K and V, and counts."""
    logits = model(token, past_key_values=cache, use_cache=True, return_dict=False)[0]
    return logits[:, -1].argmax(-1, keepdim=True)


class TransformersSystem:
    """`compiled`: False runs the model as it stands, for tests."""

    name = "transformers static cache + torch.compile"
    weights, weight_bytes = RANDOM_BF16, BF16_BYTES

    def __init__(self, config: ModelConfig, weights: Weights, compiled: bool = True) -> None:
        self.model, self._config = build(config, weights), config
        self._function: Callable[[Any, torch.Tensor, Any], torch.Tensor] = following_token
        if compiled:
            self._function = torch.compile(following_token, mode=MODE, fullgraph=True, dynamic=False)

    def chain(self, context: int, steps: int) -> TransformersChain:
        capacity = -(-(context + steps + 1) // ROUND_CAPACITY) * ROUND_CAPACITY
        cache = new_cache(self.model, self._config, capacity)
        chain = TransformersChain(self.model, cache, context, capacity, self._function)
        chain.reset()
        for _ in range(min(WARMUP_STEPS, steps)):
            chain.step()
        chain.tokens()
        return chain


class TransformersChain:
    """A `Chain`: steps of one cache."""

    def __init__(self, model: Any, cache: Any, context: int, capacity: int, function: Callable[..., Any]) -> None:
        version = importlib.import_module("transformers").__version__
        self.settings: dict[str, object] = {"capacity": capacity, "mode": MODE, "transformers": version}
        self._model, self._cache, self._context, self._function = model, cache, context, function
        self._first = torch.full((1, 1), FIRST_TOKEN, device=model.model.embed_tokens.weight.device)
        self._made: list[torch.Tensor] = []

    def reset(self) -> None:
        set_length(self._cache, self._context)
        self._made = []

    def step(self) -> None:
        token = self._made[-1] if self._made else self._first
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            # A recorded graph writes its output to the same place in every step.
            self._made.append(self._function(self._model, token, self._cache).clone())

    def tokens(self) -> list[int]:
        return [int(token) for token in torch.cat(self._made).flatten().cpu()] if self._made else []
