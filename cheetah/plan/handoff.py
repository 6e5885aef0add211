"""What the kernel between the launches of a round is told beside its buffers: see `cheetah.blocks.handoff`."""

from dataclasses import dataclass

NO_ROW = 2**32 - 1
"""Of a sequence for which nothing is drafted."""


@dataclass(frozen=True)
class Handoff:
    """count: sequences. is_verified: 0 behind the launch that drafts, 1 behind the one that verifies. number: of
    the round. drafts: most of a sequence. room, draft_room: tokens of a row of `tokens` and `draft_tokens`; told_room:
    of `told`. round_words: of a sequence in `rounds`. tile_count, draft_tile_count: tiles of the launches.
    pages_per_sequence: entries of a row of the page table of the kernel that drafts. draft_vocab: its tokens.
    """

    count: int
    is_verified: int
    number: int
    drafts: int
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
