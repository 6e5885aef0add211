"""A script as it is run by its command, but in this process: to start Python and import numpy takes longer."""

from __future__ import annotations

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest


def run_script(path: Path, *options: str) -> str:
    """What a script prints. Raises what it raises: SystemExit with its words where it ends by an error."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(sys, "argv", [str(path), *options])
        patch.syspath_prepend(str(path.parent))
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    return printed.getvalue()
