"""The base of every error that a user can cause and mend."""


class CheetahError(Exception):
    """A mistake in what was asked, with the place, the value and the fix in its message.

    The command line prints the message alone and exits with code 2; anything else that escapes is our own bug.
    """
