"""Runs generated kernels: devices, loading, KV cache, engine, sampling, tokenizer, and the `LLM` class.

`from cheetah.runtime import LLM, SamplingParams`. Importing this package loads nothing else; each name is loaded when
it is first asked for, and no CUDA library before a device is opened.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cheetah.runtime.llm import LLM as LLM
    from cheetah.runtime.outputs import CompletionOutput as CompletionOutput
    from cheetah.runtime.outputs import Logprob as Logprob
    from cheetah.runtime.outputs import RequestOutput as RequestOutput
    from cheetah.runtime.outputs import StreamPiece as StreamPiece
    from cheetah.runtime.sampling import SamplingParams as SamplingParams
    from cheetah.runtime.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

_HOMES = {
    "CompletionOutput": "cheetah.runtime.outputs",
    "LLM": "cheetah.runtime.llm",
    "Logprob": "cheetah.runtime.outputs",
    "RequestOutput": "cheetah.runtime.outputs",
    "SamplingParams": "cheetah.runtime.sampling",
    "StreamPiece": "cheetah.runtime.outputs",
    "StructuredOutputsParams": "cheetah.runtime.structured_outputs",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StreamPiece",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
