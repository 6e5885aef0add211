"""How a model is opened: every option of `LLM`, and so of the commands that open one, with what it does.

`cheetah.cli.options` makes the commands' options of these. Imports nothing that takes long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cheetah.options import option

if TYPE_CHECKING:
    from cheetah.runtime.assembly.options import GenerateKernel
    from cheetah.runtime.device.interface import Device


@dataclass(frozen=True)
class LoadOptions:
    """What `LLM` is called with. model: a folder, a hub id, "demo", or "random:PRESET"."""

    model: str | Path
    _: KW_ONLY
    device: str | Device | None = option(
        None,
        str,
        "cuda, cuda:1, cuda:0,1, pycuda or emulator; by default what is there.",
        "Or an open `Device`.",
    )
    tensor_parallel_size: int = option(
        1,
        int,
        "GPUs of this host that make each step together, 1, 2, 4 or 8: each has a part of every matrix.",
        "The first ones that there are, or those that `device` names. Their kernels store into one another's memory, "
        "for which NVLink or one PCIe switch joins them. With `kv_chunk` answers are those of one GPU, to the bit, if "
        "both read prompts alike: models of experts in passes or both in steps (`prompt_passes`).",
    )
    max_context: int | None = option(
        None,
        int,
        "Most tokens of prompt and completion together; by default the model's, at most 8192.",
        aliases=("max_model_len",),
    )
    sync: str | None = option(
        None, str, "How blocks exchange vectors: flags or barrier; by default the faster way for the tokens of a step."
    )
    seed: int = option(0, None, "Of requests that have none of their own.")
    revision: str | None = option(None, str, "Of a hub id: branch, tag or commit.")
    local_files_only: bool | None = option(None, None, "Of a hub id: nothing is fetched.")
    tokenizer: bool = option(True, None, "False to work on token ids alone.")
    chat_template: str | None = option(
        None, str, "Jinja text, a file of it, or the name of one of the checkpoint's, whose default is used by default."
    )
    messages_have_special_tokens: bool = option(
        False,
        bool,
        "Text in a chat's message that reads like a special token is one; else it stays text.",
        "As one it may end a turn or begin another's; as text it is what the writer of a message expects.",
    )
    tie_word_embeddings: bool | None = option(None, None, "Overrides config.json.")
    plan: Mapping[str, Any] | None = option(None, None, 'Other fields of the plan, e.g. {"page_size": 64}.')
    gpu: str | None = option(
        None, str, "The machine to generate for; by default the device's.", 'For example "emulator-8".'
    )
    batch: int | None = option(
        None,
        int,
        "How many completions are decoded together, 1 to 8; by default 8.",
        "The weights are read once for all of them. By default the cache has room for 8 of `max_context` tokens, or "
        "for as many tokens as the device has memory for. On a GPU another kernel decodes a single completion. "
        "The other completions change the last bits of attention's sums, unless `kv_chunk` is given.",
        aliases=("max_num_seqs",),
    )
    prompt_tokens: int | None = option(
        None,
        int,
        "Tokens of a prompt that a step reads, a power of two up to 64; by default 16 or 8.",
        "On the emulator by default what a step decodes. If that is more than the batch, a second kernel reads "
        "prompts. Bits depend on it.",
    )
    prompt_passes: bool | int | None = option(
        None,
        bool,
        "Read prompts in passes of many tokens; by default on a GPU.",
        "Of up to 2048 tokens, on the tensor cores, by further kernels over the same weights, those of fewer tokens "
        "for short prompts. False: prompt_tokens a step. A number: tokens of a pass; by default as many as memory "
        "allows. Bits depend on it, but with `kv_chunk` only on whether there are passes.",
    )
    prefix_cache: bool = option(
        True,
        bool,
        "Keep the pages of prompts for later ones that begin alike.",
        "Keys and values of prompts and completions stay in free pages, for requests that begin with "
        "the same tokens: these are not read again. What was computed in steps of other sizes agrees closely, but not "
        "to the bit, unless `kv_chunk` is given. None where the context is larger than the model's window.",
        aliases=("enable_prefix_caching",),
    )
    kv_dtype: str | None = option(
        None,
        str,
        "How keys and values are cached: bf16 (the default) or e4m3 (8 bits, with scales).",
        "Of vLLM's words auto, bfloat16, fp8 and fp8_e4m3 mean these too.",
        aliases=("kv_cache_dtype",),
    )
    kv_chunk: int | None = option(
        None,
        int,
        "Cut every head's keys every N keys, so that no answer's bits depend on other requests.",
        "Keys of one work item of attention, by default by rule. With it the same request gives the same bits, "
        "whatever runs beside it and whatever the prefix cache holds, which then keeps prompts only; a completion may "
        "take one step more.",
    )
    speculative_config: Mapping[str, Any] | str | None = option(
        None,
        str,
        'Draft tokens, and verify them in the step that takes them in, e.g. \'{"method": "ngram"}\'.',
        "A dict, or JSON, with vLLM's keys: `num_speculative_tokens` (by default 7), `prompt_lookup_min` and "
        "`prompt_lookup_max` (2 and 5). Drafts are what stood behind the same tokens earlier in the text; with "
        "`model`, a checkpoint with the same tokenizer, 4 tokens that this one makes; by `method` mtp 3 of the layer "
        "that the model brings for that. The tokens are those that are made without drafts. With it `kv_chunk` is 512 "
        "unless given, with up to 4096 tokens of context 256.",
    )
    pool_pages: int | None = option(
        None,
        None,
        "Pages of the KV cache, of all completions together, enough for one of `max_context` tokens; by default for as "
        "many as `batch` says.",
    )
    prefix_states: int | None = option(
        None,
        int,
        "Of Qwen3.5, how many states are kept for prompts that begin alike; by default by memory, up to 32.",
        "Of all models whose sequences have states beside their pages: those that `prefix_cache` keeps. By default as "
        "many as a tenth of the memory holds that the cache may take.",
    )
    enable_chunked_prefill: bool = option(
        True,
        None,
        "While others decode, a prompt is read in parts, between which they make tokens; else they wait until it is "
        "read.",
    )
    max_num_batched_tokens: int | None = option(
        None,
        int,
        "Tokens of a prompt between two tokens of others; by default what takes about 0.1 s.",
        least=1,
    )
    gpu_memory_utilization: float | None = option(
        None,
        float,
        "Most of the device's memory that may be taken, a share up to 1; by default what is free.",
        "Where `batch` is not given the cache has fewer pages, if need be.",
        least=0.01,
        most=1.0,
    )
    quantization: str | None = option(
        None,
        str,
        "How the checkpoint must be quantised, or it is refused: fp8, gptq, awq, compressed-tensors.",
        "A checkpoint says itself how it is quantised: the option is not needed.",
    )
    sparse: str | None = option(
        None,
        str,
        "Keep two of every four weights where the others are zero: auto, 2:4 (all matrices) or off.",
        "By default as the checkpoint says; a note tells where it could. No number changes, fewer bytes are read.",
    )
    lora: str | Path | Sequence[str | Path] | None = option(
        None,
        list[str],  # so that a second one is refused, and does not take the first one's place
        "Folder of a LoRA adapter (PEFT's), merged into 16-bit weights as they are loaded.",
        "For all requests; several at a time are not supported.",
    )
    launch_steps: int | None = option(
        None, None, "Most steps of one launch; by default the plan's max_steps. Changes no token."
    )
    timeout_s: float | None = option(
        None, None, "After so many seconds a launch is reported as hanging; by default 60 on a GPU, else never."
    )
    quiet: bool = option(False, None, "Neither notes nor progress on standard error.")
    generate_kernel: GenerateKernel | None = option(
        None, None, "Makes the kernel; by default the project's own generator."
    )
    verbose: bool = option(False, bool, "Tell the seconds of each stage of the start.")
