"""What `assemble` is told beside the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from cheetah.runtime.assembly.texts import Generated
from cheetah.runtime.device import Say, say_to_stderr
from cheetah.stopwatch import Stopwatch

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Device

GenerateKernel = Callable[..., Generated]
"""(config, gpu name, **plan overrides) -> Generated; the project's own is `cheetah.generate.generate_kernel`."""


@dataclass(frozen=True)
class AssemblyOptions:
    """device, gpu, tensor_parallel_size, timeout_s, generate_kernel, quiet: as in `LoadOptions`. overrides: fields of
    the plan.

    prompt_tokens: tokens of a prompt that a step should take; if the plan's steps take fewer, another kernel over the
    same weights and caches does it. By default the first of PROMPT_TOKENS that fits on a GPU, and on the emulator no
    other kernel. solo: whether another kernel over the same shall decode a sequence that is by itself; by default on a
    GPU, with a fixed `kv_chunk` where both kernels have the same bits. prompt_passes: whether a kernel over the same
    shall read prompts in passes, and others few tokens where `kv_chunk` does not promise the same bits however much is
    cached; by default on a GPU, where there can be one. A number: tokens of a pass; by default as many as memory
    allows. pool_pages: of the cache, of all sequences together; by default for all at full context.
    pool_follows_memory: it has fewer by default where the device has no room for all, but as many as one sequence may
    need. prefix_states: how many states of sequences are kept for others that begin alike, of models that have them; by
    default what a tenth of the memory holds that the cache may take, up to 32. memory_share: most of the device's
    memory that may be taken.

    upload: brings the weights into the buffers, as `upload_weights` does, which it is by default. watch: takes the
    seconds of each stage.
    """

    _: KW_ONLY
    device: str | Device | None = None
    gpu: str | None = None
    tensor_parallel_size: int = 1
    overrides: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    generate_kernel: GenerateKernel | None = None
    quiet: bool = False
    prompt_tokens: int | None = None
    solo: bool | None = None
    prompt_passes: bool | int | None = None
    pool_pages: int | None = None
    pool_follows_memory: bool = False
    prefix_states: int | None = None
    memory_share: float = 1.0
    upload: Callable[..., None] | None = None
    watch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def say(self) -> Say:
        """Takes what is told on standard error."""
        return (lambda line: None) if self.quiet else say_to_stderr
