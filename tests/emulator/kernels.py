"""Kernel text around a few lines, in the form in which generated text stands."""

import functools

from cheetah.emulator import Program, compile_program

OPENING = """#ifdef CHEETAH_EMULATOR
#include "cheetah_emulator.h"
#endif
"""


@functools.cache
def program(body: str, signature: str, *, sanitize: bool = False, watched: bool = False) -> Program:
    """A program `kernel` with this body. The signature is as in C; the body's first line is line 5 of kernel.cu."""
    parameters = [split_parameter(part) for part in signature.split(",")] if signature else []
    text = (
        f'{OPENING}extern "C" __global__ void __launch_bounds__(1024, 1) kernel({signature}) {{\n{body.strip()}\n}}\n'
    )
    return compile_program(text, "kernel", parameters, sanitize=sanitize, watched=watched)


def split_parameter(part: str) -> tuple[str, str]:
    ctype, _, name = part.strip().rpartition(" ")
    return name, ctype
