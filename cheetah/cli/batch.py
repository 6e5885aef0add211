"""`cheetah batch`: a file of requests to a file of answers, to be gone on with whenever it was ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cheetah.cli.options import RequestSeed, takes_load
from cheetah.cli.run import kernel_generator
from cheetah.cli.serve import need_extra
from cheetah.errors import CheetahError, writing

if TYPE_CHECKING:
    from cheetah.runtime import LLM
    from cheetah.serve.batch import BatchLine

EPILOG = "Example: cheetah batch requests.jsonl answers.jsonl --model demo --device emulator"
ANY_NUMBER = 10**9


@takes_load(
    "device tensor_parallel_size gpu batch max_context kv_dtype kv_chunk speculative_config prompt_tokens "
    "prompt_passes prefix_cache "
    "max_num_batched_tokens chat_template lora quantization sparse gpu_memory_utilization revision verbose"
)
def batch(
    requests: Annotated[Path, typer.Argument(help="Requests in OpenAI's batch format, a line each.")],
    answers: Annotated[Path, typer.Argument(help="Where the answers go. What it has already is not asked again.")],
    model: Annotated[
        str | None,
        typer.Option(help="demo, a folder, a hub id; by default what the first request names.", show_default=False),
    ] = None,
    seed: RequestSeed = None,
    *,
    load: dict[str, Any],
) -> None:
    """Answer a file of requests. Ended at any point and started again, it loses and repeats nothing."""
    need_extra()
    from cheetah.runtime import LLM
    from cheetah.serve.batch import BatchFile, finished_ids

    file, finished = BatchFile.checked(requests), finished_ids(answers)
    left = [line.custom_id for line in file.lines() if line.custom_id not in finished]
    typer.echo(f"{len(left)} requests to answer, {len(finished)} answers are there", err=True)
    if not left:
        return
    name = model or next((str(line.body["model"]) for line in file.lines() if "model" in line.body), None)
    if name is None:
        raise CheetahError("no request names a model: give --model")
    with LLM(name, generate_kernel=kernel_generator(name), **load) as llm:
        names = {str(line.body["model"]) for line in file.lines() if "model" in line.body} if model else set[str]()
        wanted = (line for line in file.lines() if line.custom_id not in finished)
        asyncio.run(_answer_all(llm, (name, *names), seed, wanted, answers))


async def _answer_all(
    llm: LLM, names: tuple[str, ...], seed: int | None, wanted: Iterable[BatchLine], answers: Path
) -> None:
    """Writes an answer for each of the `wanted` lines. Each is on the disk before the next is written."""
    from cheetah.serve.batch import answers as answers_of
    from cheetah.serve.driver import EngineStopped
    from cheetah.serve.service import Options, Service

    service = Service(llm, Options(names, most_waiting=ANY_NUMBER, seed=seed))
    service.driver.start()
    try:
        with writing(answers):
            file = answers.open("ab", buffering=0)
        with file:
            async for line in answers_of(service, wanted, 2 * llm.engine.engine.launcher.batch):
                with writing(answers):
                    file.write(line)
                    os.fsync(file.fileno())
    except EngineStopped as problem:
        raise CheetahError(f"the engine failed: {problem}; the answers so far are in {answers}") from None
    finally:
        await service.driver.stop()
