"""`cheetah serve`: a model behind OpenAI's protocol."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cheetah.cli.options import Model, RequestSeed, takes_load
from cheetah.cli.run import kernel_generator
from cheetah.errors import CheetahError
from cheetah.extras import installing

if TYPE_CHECKING:
    from cheetah.runtime import LLM
    from cheetah.serve.service import Options

EPILOG = "Example: cheetah serve demo --device emulator"
KEY_VARIABLE = "CHEETAH_API_KEY"
ANY_HOST = "*"
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


@takes_load(
    "device tensor_parallel_size gpu batch max_context kv_dtype kv_chunk speculative_config prompt_tokens "
    "prompt_passes max_num_batched_tokens prefix_cache prefix_states "
    "chat_template messages_have_special_tokens lora quantization sparse gpu_memory_utilization "
    "revision verbose"
)
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"A key that requests need; repeatable, or in {KEY_VARIABLE}.", show_default=False),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="A name by which requests may call the server, * for any; repeatable. By default those of this "
            "machine where it listens there, else any.",
            show_default=False,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What clients call the model; repeatable. By default MODEL.", show_default=False),
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=0, help="Completions that may wait; further ones get 429.")] = 256,
    max_connections: Annotated[int, typer.Option(min=1, help="Connections held at a time.")] = 1024,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Most megabytes of a request.")] = 8.0,
    stuck_after: Annotated[float, typer.Option(min=0.1, help="Seconds of a step after which /health fails.")] = 60.0,
    drain: Annotated[int, typer.Option(min=0, help="Seconds that requests have to end after SIGTERM.")] = 120,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="hermes, llama3_json or openai; by default what the template shows.", show_default=False),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(help="qwen3, deepseek_r1, openai_gptoss: thoughts come beside the answer.", show_default=False),
    ] = None,
    seed: RequestSeed = None,
    log_level: Annotated[str, typer.Option(help="critical, error, warning, info or debug.")] = "info",
    *,
    load: dict[str, Any],
) -> None:
    """Serve a model over HTTP to clients that speak OpenAI's protocol."""
    need_extra()
    if load.get("device") == "pycuda":
        raise CheetahError("device pycuda works in the thread that opened it alone: use cuda")
    if log_level not in LOG_LEVELS:
        raise CheetahError(f"--log-level {log_level}: choose one of {', '.join(LOG_LEVELS)}")
    from cheetah.runtime import LLM
    from cheetah.serve.listening import enough_descriptors, is_loopback, listening
    from cheetah.serve.service import Options
    from cheetah.tools.kept_ceiling import read_ceiling

    keys = tuple(api_key or filter(None, [os.environ.get(KEY_VARIABLE)]))
    options = Options(
        names=tuple(served_model_name or [model]),
        api_keys=keys,
        hosts=_allowed(host, allowed_hosts or []),
        most_waiting=max_waiting,
        body_bytes=int(max_body_mb * 1e6),
        stuck_after_s=stuck_after,
        tool_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        seed=seed,
    )
    if not is_loopback(host) and not keys:
        typer.echo(f"every client that reaches {host}:{port} may use this server: set {KEY_VARIABLE}", err=True)
    at, connections = listening(host, port), enough_descriptors(max_connections)
    if connections < max_connections:
        typer.echo(f"{connections} connections instead of {max_connections}: raise the limit (ulimit -n)", err=True)
    with LLM(model, generate_kernel=kernel_generator(model), **load) as llm:
        options = replace(options, read_ceiling=read_ceiling(llm))
        if not _served_to_the_end(llm, options, at, connections, drain, log_level):
            raise CheetahError("the engine failed, see above; nothing more could be answered")


def _allowed(host: str, more: list[str]) -> tuple[str, ...]:
    """The names by which requests may call the server; none for any."""
    from cheetah.serve.listening import LOOPBACK, is_loopback

    if ANY_HOST in more or not (more or is_loopback(host)):
        return ()
    own = f"[{host}]" if ":" in host else host
    return (*LOOPBACK, own, *more)


def _served_to_the_end(llm: LLM, options: Options, at: socket, connections: int, drain: int, log_level: str) -> bool:
    """Serves until a signal asks for the end, then finishes what is under way; False if the engine failed before."""
    from cheetah.serve.app import asgi
    from cheetah.serve.listening import Bounds, Server

    failed = False

    def stop_for_fault() -> None:
        nonlocal failed
        failed = server.should_exit = True

    app = asgi(llm, options, stop_for_fault)
    server = Server(app, Bounds(connections), app.state.service.driver.hurry, drain, log_level=log_level)
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)  # uvicorn raises it again behind a clean end
    try:
        server.run([at])
    finally:
        signal.signal(signal.SIGTERM, previous)
    return not failed and server.started


def need_extra() -> None:
    """CheetahError unless what the extra `serve` installs is there."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as missing:
        raise CheetahError(f"{missing.name} is not installed: {installing('serve')}") from None
