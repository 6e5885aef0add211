"""Running the command line in this process."""

from __future__ import annotations

from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from cheetah.cli import app


def cheetah(*arguments: str | Path, stdin: str | None = None) -> Result:
    """`cheetah ARGUMENTS`; whatever is no clean end is raised here."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*arguments: str | Path, stdin: str | None = None) -> str:
    """The one message of a command that the user has to write otherwise: exit code 2, stderr only."""
    result = cheetah(*arguments, stdin=stdin)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    return result.stderr
