"""The folder in which compiled kernels and their texts are kept from one run to the next."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$CHEETAH_CACHE, else $XDG_CACHE_HOME/cheetah, else ~/.cache/cheetah; absolute, for compilers run elsewhere."""
    if own := os.environ.get("CHEETAH_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "cheetah"
    return Path.home() / ".cache" / "cheetah"
