"""What a drafter of blocks knows of tokens: rows that are made of another model's hidden states."""

from __future__ import annotations

KNOWN = 1 << 30
"""From here on an id of a launch that drafts a block is that of such a row, not of a token."""
MOST_KNOWN = 4096
"""Rows that a launch makes at most."""
