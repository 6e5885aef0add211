"""gpt-fast's Llama, from a clone that the user names: its model file as it is, and a decode step compiled as its
documentation says, torch.compile(mode="reduce-overhead", fullgraph=True) with coordinate descent tuning.

    git clone https://github.com/meta-pytorch/gpt-fast
    python -m benchmarks.baselines gpt-fast random:llama-3.1-8b --gpt-fast gpt-fast
    python -m benchmarks.baselines gpt-fast random:llama-3.1-8b@int4-g128 --gpt-fast gpt-fast

Nothing of it is shipped. Batch 1, greedy, random weights of its own (the shapes are the preset's; RoPE is not scaled,
which changes no speed): bf16, or 4 bits by its quantize.py. That file quantises every matrix, so the head too, which
ours read in bf16; `step_bytes` counts what each reads.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cheetah.errors import CheetahError
from cheetah.plan.formats import BF16

if TYPE_CHECKING:
    from types import ModuleType

    from cheetah.models.config import ModelConfig

MODE = "reduce-overhead"
ROUND_CAPACITY = 128  # whole blocks of a mask, where the clone's model takes one
WARMUP_STEPS = 4  # the first compiles, the second runs outside of a graph, the third is recorded
SEED = 20
CODE_SPREAD = 4.61  # the standard deviation of 0 to 15


INT4 = re.compile(r"int4-g(32|64|128|256)")
INT4_PART = "WeightOnlyInt4QuantHandler"


class GptFastError(CheetahError):
    """A clone that is not there or is not as this recipe knows it, or weights that it has no format for."""


def model_file(clone: Path | None) -> Path:
    """The clone's model.py; GptFastError says how to get one."""
    if clone is not None and (clone / "model.py").is_file():
        return clone / "model.py"
    place = "no clone was named" if clone is None else f"{clone} has no model.py"
    raise GptFastError(
        f"gpt-fast: {place}. It is not shipped: git clone https://github.com/meta-pytorch/gpt-fast, "
        "and name the folder with --gpt-fast"
    )


def load_model_file(path: Path) -> ModuleType:
    """The clone's code, as a module of its own, by the name that its other files know."""
    return _load(path, "model", ("ModelArgs", "Transformer"))


def load_quantize_file(clone: Path) -> ModuleType:
    """The clone's quantize.py, which imports its neighbours by name: `load_model_file` comes first."""
    path = clone / "quantize.py"
    if not path.is_file():
        raise GptFastError(f"gpt-fast: {clone} has no quantize.py, which weights of 4 bits are made by: clone it whole")
    sys.path.insert(0, str(clone))
    try:
        return _load(path, "gpt_fast_quantize", (INT4_PART,))
    except ModuleNotFoundError as problem:
        raise GptFastError(f"{path}: {problem}: install what its requirements.txt names") from problem
    finally:
        sys.path.remove(str(clone))


def _load(path: Path, name: str, wanted: tuple[str, ...]) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # torch.compile imports by name what it traces
    spec.loader.exec_module(module)
    if missing := [one for one in wanted if not hasattr(module, one)]:
        raise GptFastError(f"{path}: {', '.join(missing)} not there: this is not gpt-fast's {path.name}")
    return module


def int4_group(config: ModelConfig) -> int | None:
    """Columns of a group of its 4-bit weights; None for bf16. GptFastError for what it has no format for."""
    format = config.formats_in_words
    if format == BF16.name:
        return None
    if found := INT4.fullmatch(format):
        return int(found[1])
    raise GptFastError(f"gpt-fast: weights {format}: it is measured with bf16 and with int4-g32, -g64, -g128 and -g256")


def model_arguments(config: ModelConfig, capacity: int) -> dict[str, Any]:
    """Fields of its ModelArgs for a configuration, with `capacity` positions."""
    return {
        "block_size": capacity,
        "vocab_size": config.vocab_size,
        "n_layer": config.layers,
        "n_head": config.query_heads,
        "n_local_heads": config.kv_heads,
        "dim": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "norm_eps": config.rms_norm_eps,
    }


def commit_of(path: Path) -> str:
    """The clone's commit, or "unknown"."""
    command = ["git", "-C", str(path.parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def fill_int4(matrix: Any) -> None:
    """Random codes, and scales that give their numbers the spread which bf16 weights have; zero points of 0, where its
    kernel takes code 8. matrix: its WeightOnlyInt4Linear, as it converted it."""
    matrix.weight.random_(-(2**31), 2**31)  # eight codes a word
    matrix.scales_and_zeros[..., 0] = matrix.in_features**-0.5 / CODE_SPREAD
    matrix.scales_and_zeros[..., 1] = 0


def next_token(model: Any, token: Any, position: Any, block_mask: Any) -> Any:
    """The likeliest token after `token`, int32 [1, 1] both. position: int32 [1]. block_mask: None where the model makes
    its own mask."""
    if block_mask is None:
        logits = model(token, position)
    else:
        mask = block_mask[:, :, position // block_mask.BLOCK_SIZE[0]]
        mask.mask_mod = block_mask.mask_mod
        mask.seq_lengths = (1, model.max_seq_length)
        logits = model(mask, token, position)
    return logits[:, -1].argmax(-1, keepdim=True).int()


class GptFastSystem:
    """`compiled`: False runs the step as it stands. Its weights live as long as a chain of it, as its caches do."""

    name = "gpt-fast"

    def __init__(self, config: ModelConfig, clone: Path | None, device: str, compiled: bool = True) -> None:
        path = model_file(clone)
        self._config, self._device, self._compiled = config, device, compiled
        self._group = int4_group(config)
        self._module, self.commit = load_model_file(path), commit_of(path)
        self._quantize = None if self._group is None else load_quantize_file(path.parent)
        self.weights = "bf16 random" if self._group is None else f"int4-g{self._group} random, the head too"
        # Four bits a weight, and a scale and a zero point in bf16 for each group.
        self.weight_bytes = 2.0 if self._group is None else 0.5 + 4 / self._group

    def chain(self, context: int, steps: int) -> GptFastChain:
        """A model anew for each context, whose caches are as long as it needs; its weights are random numbers."""
        import torch

        capacity = -(-(context + steps + 1) // ROUND_CAPACITY) * ROUND_CAPACITY
        torch.manual_seed(SEED)
        with torch.device(self._device), torch.no_grad():
            model = self._model(capacity)
            model.setup_caches(max_batch_size=1, max_seq_length=capacity)
            block_mask = self._block_mask(model)
        chain = GptFastChain(model, block_mask, context, self._function(), self._device)
        chain.settings |= {"capacity": capacity, "mode": MODE, "gpt_fast": self.commit}
        chain.reset()
        for _ in range(min(WARMUP_STEPS, steps)):
            chain.step()
        chain.tokens()
        return chain

    def _model(self, capacity: int) -> Any:
        """Its Transformer with random weights."""
        import torch

        arguments = self._module.ModelArgs(**model_arguments(self._config, capacity))
        model = self._module.Transformer(arguments).to(torch.bfloat16).requires_grad_(False).eval()
        if self._quantize is not None:
            handler = getattr(self._quantize, INT4_PART)(model, groupsize=self._group, padding=False)
            model = handler.convert_for_runtime()
        for part in model.modules():
            if hasattr(part, "scales_and_zeros"):
                fill_int4(part)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
        return model

    def _function(self) -> Any:
        if not self._compiled:
            return next_token
        import torch
        import torch._inductor.config as inductor

        inductor.coordinate_descent_tuning = True
        return torch.compile(next_token, mode=MODE, fullgraph=True, dynamic=False)

    @staticmethod
    def _block_mask(model: Any) -> Any:
        """The mask that newer versions take as their first argument, of all positions; None for older ones."""
        if "mask" not in inspect.signature(model.forward).parameters:
            return None
        attention = importlib.import_module("torch.nn.attention.flex_attention")
        length = model.max_seq_length

        def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return query >= key

        return attention.create_block_mask(causal, 1, 1, length, length, device=model.output.weight.device)


class GptFastChain:
    """A `Chain`: steps of one model and its caches."""

    def __init__(self, model: Any, block_mask: Any, context: int, function: Any, device: str) -> None:
        import torch

        from benchmarks.baselines.chain import FIRST_TOKEN

        self.settings: dict[str, object] = {}
        self._model, self._block_mask, self._context, self._function = model, block_mask, context, function
        self._first = torch.full((1, 1), FIRST_TOKEN, dtype=torch.int32, device=device)
        self._position = torch.zeros(1, dtype=torch.int32, device=device)
        self._made: list[Any] = []

    def reset(self) -> None:
        self._position.fill_(self._context)
        self._made = []

    def step(self) -> None:
        import torch

        token = self._made[-1] if self._made else self._first
        # The plain formula, which the compiler turns into kernels of its own.
        math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad(), math:
            # A recorded graph writes its output to the same place in every step.
            self._made.append(self._function(self._model, token, self._position, self._block_mask).clone())
        self._position += 1

    def tokens(self) -> list[int]:
        import torch

        return [int(token) for token in torch.cat(self._made).flatten().cpu()] if self._made else []
