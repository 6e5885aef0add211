"""What the kernel between the launches of a round is told beside its buffers: see `cheetah.blocks.handoff`."""

from dataclasses import dataclass
from typing import Literal

Drafts = Literal["model", "head", "block"]
"""Who drafts: another model, a head that goes on from what the model's layers leave, a drafter of blocks."""
NO_ROW = 2**32 - 1
"""Of a sequence for which nothing is drafted."""


@dataclass(frozen=True)
class Handoff:
    """count: sequences. is_verified: 0 behind the launch that drafts, 1 behind the one that verifies. number: of
    the round. room, draft_room: tokens of a row of `tokens` and `draft_tokens`; told_room:
    of `told`. round_words: of a sequence in `rounds`. tile_count, draft_tile_count: tiles of the launches.
    pages_per_sequence: entries of a row of the page table of the kernel that drafts. draft_vocab: its tokens.
    """

    count: int
    is_verified: int
    number: int
    room: int
    draft_room: int
    told_room: int
    round_words: int
    tile_count: int
    draft_tile_count: int
    pages_per_sequence: int
    draft_vocab: int


@dataclass(frozen=True)
class HeadHandoff(Handoff):
    """The same where a head drafts, which takes what tapped layers leave of a token. row_units: 16 bytes each, of a
    token. page_size: tokens of a page."""

    row_units: int
    page_size: int


@dataclass(frozen=True)
class BlockHandoff(Handoff):
    """The same where blocks are drafted, whose step takes known tokens by the places of their rows. page_size: tokens
    of a page. ahead: columns of a block before the first that drafts a token."""

    page_size: int
    ahead: int
