"""Cheetah: one persistent CUDA kernel for the whole decode step of a Llama model, and the language it is written in.

`import cheetah as ch` gives the language (`ch.kernel`, `ch.if_`, `ch.render`; `cheetah.lang` by its short name) and the
runtime's `ch.LLM`, `ch.SamplingParams` and `ch.StructuredOutputsParams`. Each is loaded when first asked for: importing
`cheetah` loads neither.
"""

from typing import TYPE_CHECKING, Any

from cheetah.version import __version__

if TYPE_CHECKING:
    from cheetah.lang import *  # noqa: F403
    from cheetah.runtime import LLM, SamplingParams, StructuredOutputsParams

__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams", "__version__"]

_RUNTIME = ("LLM", "SamplingParams", "StructuredOutputsParams")
_LANGUAGE = (
    "AsmError", "ConstStoreError", "ControlError", "CopySizeError", "DeviceBoolError", "Expr", "Kernel", "LangError",
    "MissingWithError", "Name", "NoKernelError", "NoMemberError", "Params", "Primitive", "RangeError", "Role",
    "RoleError", "ScopeError", "SignatureError", "Streams", "TypeMixError", "UnusedStageError", "Value", "address_of",
    "argument", "array", "asm", "bits", "block_dim_x", "block_idx_x", "break_", "cast", "comment", "const", "constexpr",
    "continue_", "else_", "for_", "function", "grid_dim_x", "if_", "inline", "kernel", "maximum", "minimum", "named",
    "out", "outline", "pointee", "prim", "raw_stmt", "record", "reinterpret", "render", "render_file", "return_",
    "roles_const", "roles_else", "roles_for", "roles_if", "select", "thread_idx_x", "ty", "var", "while_", "whole",
)  # fmt: skip

_ELSEWHERE = {
    **dict.fromkeys(
        ("AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "LLMEngine"),
        "`cheetah serve` answers many clients; in Python, threads may share an LLM, and LLM.stream gives pieces",
    ),
    "EngineArgs": "write LLM(model, max_context=..., batch=...)",
    "BeamSearchParams": "write SamplingParams(n=4, temperature=1, logprobs=0), and choose by cumulative_logprob",
    "GuidedDecodingParams": "write StructuredOutputsParams(json=...)",
    "LoRARequest": "one adapter is merged when the model is opened: write LLM(model, lora=folder)",
    "PoolingParams": "write LLM.embed(prompts, pooling=...)",
    "AutoModelForCausalLM": "write LLM(model)",
    "pipeline": "write LLM(model).generate(...)",
}
"""Names that other libraries have, and what to write."""


def __getattr__(name: str) -> Any:
    if name in _RUNTIME:
        from cheetah import runtime

        return getattr(runtime, name)
    if name in _LANGUAGE:
        from cheetah import lang

        return getattr(lang, name)
    if name in _ELSEWHERE:
        from cheetah.errors import CheetahError

        raise CheetahError(f"cheetah has no {name}: {_ELSEWHERE[name]}")
    raise AttributeError(f"module 'cheetah' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LANGUAGE, *_RUNTIME})
