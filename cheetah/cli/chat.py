"""`cheetah chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cheetah.cli.answers import AnswerText
from cheetah.cli.options import Seed, takes_load, takes_sampling
from cheetah.cli.run import kernel_generator
from cheetah.errors import CheetahError
from cheetah.printable import printable

if TYPE_CHECKING:
    from cheetah.runtime import LLM, SamplingParams
    from cheetah.runtime.outputs import Timings

EPILOG = "Example: cheetah chat demo --device emulator"
HELP = """/reset         forget the conversation
/system TEXT   begin anew with this system message; without TEXT with none
/help          this list
/exit          the end, as Ctrl-D
Ctrl-C ends an answer; what it has so far stays in the conversation."""
PROMPT = "> "
RESET = "/reset begins anew"


@takes_load(
    "device tensor_parallel_size "
    "gpu max_context kv_dtype speculative_config prompt_passes chat_template lora quantization sparse "
    "gpu_memory_utilization revision verbose"
)
@takes_sampling
def chat(
    model: Annotated[str, typer.Argument(help="demo, a folder, or a hub id.", show_default=False)],
    system: Annotated[str | None, typer.Option(help="The system message to begin with.", show_default=False)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer; by default all there is room for.")
    ] = None,
    seed: Seed = 0,
    *,
    sampling: dict[str, Any],
    load: dict[str, Any],
) -> None:
    """Talk with a model. /help lists the commands; speeds go to stderr."""
    from cheetah.runtime import LLM, SamplingParams

    _edit_lines()
    params = SamplingParams(max_tokens=max_tokens, seed=seed, **sampling)
    with LLM(model, batch=1, generate_kernel=kernel_generator(model), **load) as llm:
        conversation = Conversation(llm, params, system)
        while (line := _next_line()) is not None:
            if not conversation.take(line):
                return


class Conversation:
    """What was said so far, and what a line of the user does with it."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None):
        self._llm, self._params = llm, params
        self.messages: list[dict[str, str]] = []
        self._begin(system)

    def take(self, line: str) -> bool:
        """Does what a line says; False if it ends the program."""
        command, _, rest = line.strip().partition(" ")
        if command in ("/exit", "/quit"):
            return False
        if command == "/reset":
            self._begin(self._system)
        elif command == "/system":
            self._begin(rest.strip() or None)
        elif command.startswith("/"):
            typer.echo(HELP if command == "/help" else f"no command {printable(command)}: /help lists them", err=True)
        elif line.strip():
            self._answer(line)
        return True

    def _begin(self, system: str | None) -> None:
        self._system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def _answer(self, line: str) -> None:
        """Writes the model's answer as it comes. Where there can be none, the line was not said."""
        self.messages.append({"role": "user", "content": line})
        said, answer = "", AnswerText()
        timings = None
        try:
            for piece in self._llm.stream_chat(self.messages, self._params):
                said += answer.write(piece)
                timings = piece.timings
        except CheetahError as problem:
            answer.end_thought()
            self.messages.pop()
            hint = f"/system alone takes the system message back, {RESET}" if self._system else RESET
            typer.echo(f"{problem}\n{hint}", err=True)
            return
        except KeyboardInterrupt:
            answer.end_thought()
        sys.stdout.write("\n")
        if timings or said:
            self.messages.append({"role": "assistant", "content": said})
        else:
            self.messages.pop()  # nobody answered
        typer.echo(_speed(timings) if timings else "stopped", err=True)


def _speed(timings: Timings) -> str:
    prompt = f"{timings.prompt_tokens} tokens read in {timings.prefill_s:.3f} s"
    cached = f" ({timings.cached_tokens} of them cached)" if timings.cached_tokens else ""
    made = f"{timings.completion_tokens} made"
    rate = f" at {timings.decode_tokens_per_s:.1f} tokens/s" if timings.completion_tokens > 1 else ""
    return f"[{prompt}{cached}, {made}{rate}]"


def _next_line() -> str | None:
    """What the user types; None at the end of input. Ctrl-C begins the line again."""
    while True:
        try:
            return input(PROMPT)
        except EOFError:
            return None
        except KeyboardInterrupt:
            typer.echo("\n/exit or Ctrl-D ends the program", err=True)


def _edit_lines() -> None:
    """Lets the terminal's user go back in a line and to earlier ones, where Python can."""
    try:
        import readline  # noqa: F401
    except ImportError:
        pass
