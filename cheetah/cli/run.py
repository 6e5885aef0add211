"""`cheetah run`: text from a model, as it is made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cheetah.cli.answers import AnswerText
from cheetah.cli.options import Model, Seed, takes_load, takes_sampling
from cheetah.errors import CheetahError

if TYPE_CHECKING:
    from cheetah.models.config import ModelConfig
    from cheetah.package import Generated
    from cheetah.runtime import LLM, SamplingParams, StreamPiece
    from cheetah.runtime.assembly.options import GenerateKernel

EPILOG = 'Example: cheetah run demo "One morning," --device emulator --max-tokens 60'
DEFAULT_TOKENS = 128
STDIN = "-"
RANDOM = "random:"
MOST_TOGETHER = 8


@takes_load(
    "device tensor_parallel_size gpu batch max_context sync kv_dtype kv_chunk speculative_config prompt_tokens "
    "prompt_passes chat_template "
    "lora quantization sparse gpu_memory_utilization revision verbose"
)
@takes_sampling
def run(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from; - reads it from stdin.")] = None,
    ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="Token ids instead of text, as they are.", show_default=False)
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="PROMPT is a user's message, put in the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to make.")] = DEFAULT_TOKENS,
    seed: Seed = 0,
    completions: Annotated[
        int, typer.Option("--completions", "-n", min=1, help="How many to make, each with a seed of its own.")
    ] = 1,
    *,
    sampling: dict[str, Any],
    load: dict[str, Any],
) -> None:
    """Write the completion of a prompt to stdout as it is made; timings go to stderr."""
    from cheetah.runtime import LLM, SamplingParams

    text = _prompt_text(prompt, ids, chat)
    token_ids = None if ids is None else _parsed_ids(ids)
    params = SamplingParams(max_tokens=max_tokens, seed=seed, n=completions, **sampling)
    if token_ids is None:
        _refuse_text_without_tokenizer(model)
    options = {"batch": min(completions, MOST_TOGETHER), "generate_kernel": kernel_generator(model), **load}
    with LLM(model, **options) as llm:
        _write(llm, _one_after_another(_pieces(llm, text, token_ids, chat, params)), completions)
        if load.get("verbose"):
            typer.echo(_reading(llm), err=True)


def kernel_generator(model: str) -> GenerateKernel:
    """Makes the very text that `cheetah generate` writes, so that a kernel compiled for it is found in the cache."""
    return _NamedGenerator(model)


@dataclass(frozen=True)
class _NamedGenerator:
    """identity: the model, whose name is in the command that the text has in its header."""

    identity: str

    def __call__(self, config: ModelConfig, gpu: str, **plan: Any) -> Generated:
        from cheetah.cli.configs import canonical_name
        from cheetah.tools.regenerate import generate_named

        return generate_named(config, canonical_name(self.identity), gpu, plan)


def _prompt_text(prompt: str | None, ids: str | None, chat: bool) -> str:
    if ids is not None:
        if prompt is not None or chat:
            raise CheetahError("--ids takes the place of PROMPT and of --chat: give one of them")
        return ""
    if prompt is None:
        raise CheetahError('no prompt: write one, e.g. cheetah run demo "One morning,", or - for stdin, or --ids 1,2,3')
    text = sys.stdin.read() if prompt == STDIN else prompt
    return text.removesuffix("\n") if prompt == STDIN else text


def _parsed_ids(ids: str) -> list[int]:
    try:
        return [int(part) for part in ids.split(",")]
    except ValueError:
        raise CheetahError(f"--ids {ids}: expected token ids, e.g. --ids 1,2,3") from None


def _refuse_text_without_tokenizer(model: str) -> None:
    """For random weights this is known before minutes are spent on them."""
    from cheetah.runtime.checkpoint.loading import open_checkpoint

    if model.startswith(RANDOM) and "tokenizer.json" not in open_checkpoint(model).files:
        raise CheetahError(f"{model} has no tokenizer: give token ids, e.g. --ids 1,2,3")


def _pieces(llm: LLM, text: str, ids: list[int] | None, chat: bool, params: SamplingParams) -> Iterator[StreamPiece]:
    if ids is not None:
        return llm.stream(ids, params)
    if chat:
        return llm.stream_chat([{"role": "user", "content": text}], params)
    return llm.stream(text, params)


def _one_after_another(pieces: Iterator[StreamPiece]) -> Iterator[StreamPiece]:
    """The pieces of several completions sorted by completion: the first as it comes, the others held back meanwhile."""
    held: dict[int, list[StreamPiece]] = {}
    current = 0
    for piece in pieces:
        held.setdefault(piece.index, []).append(piece)
        while ready := held.pop(current, []):
            yield from ready
            current += ready[-1].finished


def _write(llm: LLM, pieces: Iterator[StreamPiece], completions: int) -> None:
    """Text as it comes, or ids where there is no tokenizer; a line end, then the timings on stderr. Of several, each
    has a heading."""
    is_new, answer = completions > 1, AnswerText()
    for piece in pieces:
        if is_new:
            sys.stdout.write(f"--- completion {piece.index + 1} of {completions}\n")
        is_new = completions > 1 and piece.finished
        answer.write(piece)
        if piece.finished:
            sys.stdout.write("\n")
            sys.stdout.flush()
            typer.echo(_timings(llm, piece, completions), err=True)


def _reading(llm: LLM) -> str:
    """What decoding has read of the device's memory, beside what can be read."""
    from cheetah.tools.kept_ceiling import read_ceiling

    decoded, ceiling = llm.engine.engine.load().decoded, read_ceiling(llm)
    read = f"decode read {decoded.bytes_per_step / 1e6:.1f} MB a step, in {decoded.steps} steps"
    if ceiling is None:
        return f"{read}; the emulator has no speed, and no read ceiling"
    share = f"{decoded.gb_per_s / ceiling:.1%} of the read ceiling, {ceiling:.0f} GB/s (measured once a machine)"
    return f"{read}: {decoded.gb_per_s:.0f} GB/s by the host's clock, {share}"


def _timings(llm: LLM, piece: StreamPiece, completions: int) -> str:
    timings = piece.timings
    assert timings is not None
    cached = f" ({timings.cached_tokens} of them cached)" if timings.cached_tokens else ""
    prompt = f"{timings.prompt_tokens} prompt tokens{cached} in {timings.prefill_s:.3f} s"
    made = f"{timings.completion_tokens} tokens ({piece.finish_reason})"
    if timings.completion_tokens < 2:
        return f"{prompt}; {made}"
    context = timings.prompt_tokens + timings.completion_tokens
    together = min(completions, int(llm.manifest.plan["batch"]))
    dtype = str(llm.manifest.plan["kv_dtype"])
    cache = "" if dtype == "bf16" else f", {dtype} cache"
    each = " each" if together > 1 else ""
    rate = f"decode {timings.decode_tokens_per_s:.1f} tokens/s{each}"
    rate += f" (batch {together}, context up to {context}, {llm.config.formats_in_words}{cache})"
    emulated = "; emulated: not a speed" if llm.manifest.gpu.get("emulated") else ""
    return f"{prompt}; {made} in {timings.decode_s:.3f} s, {rate}{emulated}"
