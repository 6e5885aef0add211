"""The command `cheetah`: generate, run, chat, serve, batch, bench, trace, quantize, sparsify, calibrate, inspect and
check.

Each command is the function of its module's name, which loads what it needs when it runs, so that `cheetah --help` is
quick. An error that is the user's to mend ends a command with one message on stderr and exit code 2.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cheetah.cli import batch, bench, calibrate, chat, check, generate, inspect, quantize, run, serve, sparsify, trace
from cheetah.errors import NO_ROOM, CheetahError

USER_ERROR = 2
INTERRUPTED = 130


class Commands(TyperGroup):
    """Turns what went wrong into a message and an exit code, for every command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CheetahError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader of a pipe has gone: nobody wants the rest
            _write_no_more()
            raise typer.Exit(1) from None
        except OSError as problem:
            if problem.errno not in NO_ROOM:
                raise
            _write_no_more()
            place = problem.filename or "standard output"
            typer.echo(f"error: {place}: cannot be written: {problem.strerror}", err=True)
            raise typer.Exit(USER_ERROR) from None


def _write_no_more() -> None:
    """Python flushes what it has for stdout at its end, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from cheetah.version import __version__

        typer.echo(f"cheetah {__version__}")
        raise typer.Exit


@app.callback()
def cheetah(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One CUDA kernel for the whole decode step of a model: generate it, run it, measure it, check it."""


for module in (generate, run, chat, serve, batch, bench, trace, quantize, sparsify, calibrate, inspect, check):
    app.command(epilog=module.EPILOG)(getattr(module, module.__name__.rpartition(".")[2]))


def main() -> None:
    """The entry point of the command `cheetah`."""
    app()
