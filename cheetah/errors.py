"""The base of every error that a user can cause and mend."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from cheetah.printable import printable

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Why the system does not take what is written, through no fault of ours."""


class CheetahError(Exception):
    """A mistake in what was asked, with the place, the value and the fix in its message.

    The command line prints the message alone and exits with code 2; anything else that escapes is our own bug.
    A message may quote what a file holds: it is made `printable` here, for all.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*(printable(part) if isinstance(part, str) else part for part in parts))


@contextmanager
def writing(place: object) -> Iterator[None]:
    """Makes one message of what the system refuses in here: what cannot be written, and why."""
    try:
        yield
    except OSError as problem:
        raise CheetahError(f"{place}: cannot be written: {problem.strerror or problem}") from problem
