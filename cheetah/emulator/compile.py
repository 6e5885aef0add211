"""From kernel text to a program that can be launched: in this process, or in one of its own under the race detector."""

from collections.abc import Sequence
from pathlib import Path

from cheetah.emulator.build import PLAIN, SANITIZED, WATCHED, WATCHED_OFTEN, build_program
from cheetah.emulator.program import LoadedProgram, Program
from cheetah.emulator.sanitize import SanitizedProgram


def compile_program(
    text: str,
    kernel: str,
    parameters: Sequence[tuple[str, str]],
    *,
    sanitize: bool = False,
    watched: bool = False,
    often: bool = False,
    cache_dir: Path | None = None,
) -> Program:
    """Compiles kernel text, which includes "cheetah_emulator.h" under CHEETAH_EMULATOR, with g++ (cached).

    `kernel` is the function's name, `parameters` its (name, C type) in order. With `sanitize` each launch runs as a
    process of its own under ThreadSanitizer and reports races by line: some twenty times slower, for few blocks. With
    `watched` every load and store of the text is held to the rules of `runtime/watch.h`, at some twice the time; such a
    text is optimised if it is launched `often`.
    Raises CheetahError when g++ is missing or refuses the text (the message carries what it said).
    """
    of_watched = WATCHED_OFTEN if often else WATCHED
    mode = SANITIZED if sanitize else of_watched if watched else PLAIN
    path = build_program(text, kernel, parameters, mode, cache_dir)
    return SanitizedProgram(kernel, parameters, path) if sanitize else LoadedProgram(kernel, parameters, path)
