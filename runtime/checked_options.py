"""The options of an `LLM`: what is refused of them before anything is loaded, and what they tell who assembles it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cheetah.errors import CheetahError
from cheetah.manifest import WORLD_SIZES
from cheetah.plan.defaults import default_context
from cheetah.plan.plan import MAX_BATCH, STEP_TOKENS
from cheetah.printable import shown
from cheetah.runtime.engine.drafting import Speculation
from cheetah.runtime.options import LoadOptions
from cheetah.runtime.sampling import SamplingParams
from cheetah.runtime.speculation import speculation_of
from cheetah.stopwatch import Stopwatch

if TYPE_CHECKING:
    from cheetah.models.config import ModelConfig
    from cheetah.runtime.assembly.options import AssemblyOptions
    from cheetah.runtime.checkpoint.loading import Checkpoint

DEFAULT_BATCH = 8
SHORT_CONTEXT, SHORT_CHUNK, LONG_CHUNK = 4096, 256, 512
"""Keys of an item of attention where tokens are drafted, unless told otherwise: up to so many tokens of context, and
beyond (behind 1024 tokens items of 512 cost 2 % more than those of 256, behind 6144 2 % less)."""


def check_options(options: LoadOptions) -> None:
    """CheetahError for what can be refused before anything is loaded."""
    SamplingParams(seed=options.seed)
    _check_count("max_num_batched_tokens", options.max_num_batched_tokens)
    _check_count("max_context", options.max_context)
    _check_count("pool_pages", options.pool_pages)
    _check_count("prefix_states", options.prefix_states)
    if not isinstance(options.prompt_passes, bool):
        _check_count("prompt_passes", options.prompt_passes)
    if options.tensor_parallel_size not in WORLD_SIZES:
        sizes = ", ".join(map(str, WORLD_SIZES))
        raise CheetahError(f"tensor_parallel_size is {shown(options.tensor_parallel_size)}: give one of {sizes}")
    share = options.gpu_memory_utilization
    if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
        raise CheetahError(f"gpu_memory_utilization={shown(share)}: expected a share above 0, up to 1")
    batch = options.batch
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_BATCH):
        raise CheetahError(f"batch={batch!r}: expected an integer from 1 to {MAX_BATCH}, or None for {DEFAULT_BATCH}")


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise CheetahError(f"{name}={value!r}: expected an integer >= 1")


def speculation_in(options: LoadOptions) -> Speculation | None:
    """How tokens are drafted, if they are."""
    return None if options.speculative_config is None else speculation_of(options.speculative_config)


def assembly_options(
    options: LoadOptions, config: ModelConfig, watch: Stopwatch, drafting: Checkpoint | None = None
) -> AssemblyOptions:
    """What is told to who assembles a model of this configuration. drafting: what drafts for it. CheetahError for a
    context that the model has no positions for."""
    from cheetah.runtime.assembly.options import AssemblyOptions

    most = config.max_position_embeddings
    if options.max_context is not None and options.max_context > most:
        raise CheetahError(
            f"max_context={options.max_context} is more than the model's max_position_embeddings, {most}"
        )
    batch, speculation = options.batch or DEFAULT_BATCH, speculation_in(options)
    drafts = speculation.drafts if speculation is not None else 0
    context = options.max_context or default_context(most)
    chunk = SHORT_CHUNK if context <= SHORT_CONTEXT else LONG_CHUNK
    overrides = {
        "max_context": context,
        "sync": options.sync,
        "batch": batch if batch > 1 else None,
        "kv_dtype": options.kv_dtype,
        "kv_chunk": options.kv_chunk or (chunk if drafts else None),
        "drafts": drafts or None,
        "by_numbers": 1 if drafts else None,  # so that kernels of 1 to 8 columns have the same bits
        "tokens": next(size for size in STEP_TOKENS if size >= max(drafts + 1, batch)) if drafts else None,
        "taps": _taps_of(drafting),
        **(options.plan or {}),
    }
    return AssemblyOptions(
        device=options.device,
        gpu=options.gpu,
        tensor_parallel_size=options.tensor_parallel_size,
        overrides={name: value for name, value in overrides.items() if value is not None},
        timeout_s=options.timeout_s,
        generate_kernel=options.generate_kernel,
        quiet=options.quiet,
        prompt_tokens=options.prompt_tokens,
        prompt_passes=options.prompt_passes,
        pool_pages=options.pool_pages,
        prefix_states=options.prefix_states if options.prefix_cache else 0,
        pool_follows_memory=options.batch is None,
        memory_share=options.gpu_memory_utilization or 1.0,
        watch=watch,
    )


def _taps_of(drafting: Checkpoint | None) -> str | None:
    """The layers whose outputs what drafts takes, if it takes some."""
    taker = None if drafting is None else drafting.config.drafter or drafting.config.block
    return None if taker is None else ",".join(map(str, taker.layers))
