"""The command as a whole: help, version, start-up, errors."""

import subprocess
import sys

import pytest
from commands import cheetah, refused

from cheetah import __version__

COMMANDS = ("generate", "run", "bench", "trace", "inspect", "check")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str) -> None:
    result = cheetah(command, "--help")
    assert result.exit_code == 0
    assert f"Example: cheetah {command} " in " ".join(result.stdout.split())


def test_help_names_every_command() -> None:
    text = cheetah("--help").stdout
    assert all(f" {command} " in text for command in COMMANDS)


def test_version() -> None:
    assert cheetah("--version").stdout == f"cheetah {__version__}\n"


def test_help_loads_nothing_heavy() -> None:
    """What makes it quick; how quick depends on what else the machine does."""
    program = (
        "import sys\nsys.argv = ['cheetah', '--help']\nfrom cheetah.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = ('numpy', 'cheetah.runtime.llm', 'cheetah.lang', 'huggingface_hub', 'jinja2', 'tokenizers')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_an_unknown_option_is_a_usage_error() -> None:
    assert cheetah("inspect", "demo", "--nonsense").exit_code == 2


def test_errors_are_one_message() -> None:
    assert refused("inspect", "llama-9").startswith("error: llama-9: neither a preset (")


@pytest.mark.slow
def test_a_full_disk_behind_stdout_is_one_message() -> None:
    program = "import sys\nsys.argv = ['cheetah', 'inspect', 'demo']\nfrom cheetah.cli import main\nmain()"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: standard output: cannot be written: No space left on device\n"
