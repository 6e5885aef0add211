"""What a drafter of blocks has beside its layers: a value of its configuration, and the names of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ARCHITECTURES: Final = ("Qwen3DSparkModel", "DFlashDraftModel")
"""What config.json calls it: DeepSpec's, of DSpark and DFlash, and z-lab's."""
DSPARK: Final = ARCHITECTURES[0]
FC: Final = "fc.weight"
HIDDEN_NORM: Final = "hidden_norm.weight"
MARKOV: Final = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
"""What the Markov head looks up of the token before, and what that is multiplied with."""
MEANING: Final = {
    FC: "[hidden_size, layers that are tapped * hidden_size]",
    HIDDEN_NORM: "[hidden_size]",
    **dict.fromkeys(MARKOV, "[vocab_size, markov_rank]"),
}


@dataclass(frozen=True)
class Block:
    """What a drafter of blocks has beside its layers.

    layers: of the other model, what they leave is taken, ascending. columns: of a block. mask: the token that stands
    where nothing is known. from_anchor: each column drafts the token behind it; else each mask the one in its place.
    markov_rank: of the Markov head; 0: there is none.
    """

    layers: tuple[int, ...]
    columns: int
    mask: int
    from_anchor: bool = True
    markov_rank: int = 0

    @property
    def ahead(self) -> int:
        """Columns before the first that drafts a token."""
        return 0 if self.from_anchor else 1

    @property
    def drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.columns - self.ahead


def own_shapes(hidden: int, vocab: int, taps: int, rank: int) -> dict[str, tuple[int, ...]]:
    """Of what Qwen3 has not."""
    shapes: dict[str, tuple[int, ...]] = {FC: (hidden, taps * hidden), HIDDEN_NORM: (hidden,)}
    return shapes | (dict.fromkeys(MARKOV, (vocab, rank)) if rank else {})
