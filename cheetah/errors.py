"""The base of every error that a user can cause and mend."""

from cheetah.printable import printable


class CheetahError(Exception):
    """A mistake in what was asked, with the place, the value and the fix in its message.

    The command line prints the message alone and exits with code 2; anything else that escapes is our own bug.
    A message may quote what a file holds: it is made `printable` here, for all.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*(printable(part) if isinstance(part, str) else part for part in parts))
