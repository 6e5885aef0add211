"""What a drafter of blocks knows of tokens: rows that are made of another model's hidden states."""

from __future__ import annotations

KNOWN = 1 << 30
"""From here on an id of a launch that drafts a block is that of such a row, not of a token."""
MOST_KNOWN = 4096
"""Rows that a launch makes at most."""
ROWS_BEGIN, SLOTS_BEGIN = 1, 1 + MOST_KNOWN
KNOWN_WORDS = 1 + 2 * MOST_KNOWN
"""Words of the table that says which: how many; of each token its row of `taps`; the place of what is made of it."""
