"""Cheetah: one persistent CUDA kernel for the whole decode step of a Llama model.

`cheetah.LLM` and `cheetah.SamplingParams` are those of `cheetah.runtime`, loaded when first asked for: the generator
alone needs none of the runtime.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cheetah.runtime import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("LLM", "SamplingParams"):
        from cheetah import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module 'cheetah' has no attribute {name!r}")
