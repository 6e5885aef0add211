"""What is refused."""

from __future__ import annotations

from cheetah.errors import CheetahError


class AttentionError(CheetahError):
    """Arguments of `plan` or `run` that do not fit; the message says what does."""
