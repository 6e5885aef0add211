"""Bugs planted one at a time in the sources of building blocks, each in one place, for `cheetah check` to find."""

from tests.program.source_bugs import attention, delta, families, passes, products, tokens
from tests.program.source_bugs.bug import SourceBug

BUGS: tuple[SourceBug, ...] = (
    *products.BUGS,
    *attention.BUGS,
    *tokens.BUGS,
    *passes.BUGS,
    *families.BUGS,
    *delta.BUGS,
)
