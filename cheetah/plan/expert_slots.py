"""Where a pass over prompts has what tokens give to their experts, and what these make: in *slots*, one for each token
and expert of it. Plain numbers.

An expert's slots are its tokens, ascending, side by side; they begin at a whole group of 8, and experts follow one
another. So a tile of a product is some groups of one expert's slots, and activations lie in the slots as those of
tokens do (`cheetah.plan.prompt`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.products import EXPERT_LIST, Experts
from cheetah.plan.prompt import GROUP_TOKENS, PassPlan
from cheetah.plan.shared_memory import Region

WORD_TOKENS = 32
"""Tokens of a word, which has a bit for each."""
LOADED_WORDS = 4
"""Of which a lane loads so many together."""
LANES = 32
SUMMED_TOKENS = 16
"""Of which the sums of what experts made lie in shared memory, a row of f32 each, with SUMS_PADDING behind it, so that
lanes that read the same place of neighbouring tokens find it in other banks."""
SUMS_PADDING = 4


@dataclass(frozen=True)
class ExpertSlots:
    """Those of a pass by `plan`, whose tokens choose among `experts`."""

    plan: PassPlan
    experts: Experts

    @property
    def groups(self) -> int:
        """Groups of slots at most: an expert that has tokens leaves up to 7 slots of its last group empty."""
        slots = self.plan.tokens * self.experts.chosen
        filled = slots + min(slots, self.experts.count) * (GROUP_TOKENS - 1)
        return min(filled // GROUP_TOKENS, self.experts.count * self.plan.groups)

    @property
    def of_slots(self) -> PassPlan:
        """The pass' plan with slots in the place of tokens, and room for a whole tile behind the first group of any."""
        tile = self.plan.tile_tokens
        return replace(self.plan, tokens=round_up(self.groups * GROUP_TOKENS, tile) + tile)

    @property
    def slots(self) -> int:
        """That there is room for."""
        return self.of_slots.tokens

    @property
    def tiles(self) -> int:
        """Tiles at most: an expert that has tokens leaves some groups of its last tile to others."""
        slots, tile_groups = self.plan.tokens * self.experts.chosen, self.plan.tile_groups
        whole = self.groups + min(slots, self.experts.count) * (tile_groups - 1)
        return min(whole // tile_groups, self.experts.count * ceil_div(self.plan.groups, tile_groups))

    @property
    def words(self) -> int:
        """Of an expert, with a bit for each token."""
        return int(self.words_of(self.plan.tokens))

    @staticmethod
    def words_of(tokens: Any) -> Any:
        """Of so many tokens, as many as are loaded together; also for device expressions."""
        together = WORD_TOKENS * LOADED_WORDS
        return (tokens + (together - 1)) // together * LOADED_WORDS

    @property
    def regions(self) -> tuple[Region, ...]:
        """Of a block's shared memory: the list of tiles, where each expert's slots and tiles begin, what a warp's lanes
        chose for each token of a word, the factors of a tile's slots, two of them in turn, and sums of rows. Choices
        and sums are of other phases; models with an expert that every token has choose among so many that 8192 tokens
        leave room for one of the two."""
        chosen = Region("chosen", 4 * WORD_TOKENS * LANES)
        sums = Region("expert_sums", 4 * SUMMED_TOKENS * (self.plan.tile_m_tiles * M_TILE_ROWS + SUMS_PADDING))
        if self.experts.shared:
            chosen = replace(chosen, over=sums.name)
        return (
            Region(EXPERT_LIST, 4 * (1 + self.tiles)),
            Region(f"{EXPERT_LIST}_barriers", 2 * 8),
            Region("expert_places", 3 * 4 * self.experts.count),
            *([sums, chosen] if chosen.over else [chosen]),
            Region("slot_factors", 2 * 8 * self.plan.tile_tokens),
            *([] if chosen.over else [sums]),
        )
