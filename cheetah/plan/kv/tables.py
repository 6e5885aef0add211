"""The tables that tell a launch which tokens it works on: words of int32 records, for the host and the kernel alike.

A step takes up to `plan.tokens` tokens through the model together: they are the *columns* of every product. A sequence
has `per_step` neighbouring columns in every step of a launch: one when it decodes, several when a prompt is read.
Column c of the sequence whose first column is f is its token number `step * per_step + c - f` of the launch, at
position `length` + that number. What a sequence does not have any more (numbers from `total` on, or after a stop id) is
computed like the rest, with nobody looking; its keys and values from `total` on are not cached.

In a kernel that verifies drafts (`Plan.drafts`) a sequence comes as far in a step as its tokens turn out right: its
column c has its token number `done + c - f`, where the kernel counts in `done` how many are behind it.

A *tile* of attention is a range of columns that read one range of keys: their own sequence's, or a prefix that several
sequences share. Key j of a tile has the absolute position `offset` + j and lies in page `page_table[table + j //
page_size]`; `length + step * stride` keys are cached, or, in a kernel that verifies drafts, `length` and the `done` of
sequence number `stride`. The `new` tokens of this step that follow them come from the exchange, of the columns from
`new_column` on; none do for a shared prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from cheetah.plan.index import round_up

SEQUENCE_WORDS = 24
COLUMN_WORDS = 4
TILE_WORDS = 8
MAX_STOP_IDS = 64
"""Stop ids that a launch can check on the device, of all its sequences; the host checks the rest."""
NO_TOKEN = 0xFFFFFFFF
"""What is sampled where no logit is a number above -infinity; -1 in the int32 buffer `tokens`."""
CANCELLED_TOKEN = 0xFFFFFFFE
"""What is chosen for a sequence that the host ends."""
NOT_YET = 0xFFFFFFFD
"""What the host writes to `emitted` before a launch; -3 in int32."""
MASKED, BIASED, PENALISED, FILTERED = 1, 2, 4, 8
"""Bits of a sequence's `options`: which of its row in `masks`, `logit_bias`, `token_counts` and which filters count."""
COLUMNS_MASKED = 16
"""Beside MASKED, in a kernel that verifies drafts: each column has a row of `masks`, behind those of all slots."""
AHEAD_SHIFT = 8
"""Bits of `ngram_min` that are one."""
EXCHANGE_TAGS = 3
"""Tags that tell one publication of a vector from those before: see `cheetah.blocks.exchange_kinds`."""
FILTER_ROUNDS = 63
"""Most exchanges in which a step's filtered tokens are found: three on average, twenty where nearly all logits are
equal."""
ROUND_WORDS = 3
"""Words of a sequence in `rounds`: its tokens that are behind it, steps in which something was drafted for it, tokens
that were drafted; then how often the first, the second, ... draft of a step was right."""
EMITTED_COUNT_BITS = 5
"""Behind the EMITTED_BITS of a token, a word of `emitted` of a kernel that verifies drafts has in so many bits how many
were drafted in its step, then behind which draft it was chosen, the first being 1 (0: behind none). NO_TOKEN and
CANCELLED_TOKEN stand as they are."""
PROMPT_TOKEN = 1 << 31
"""In `token_counts`: the prompt has the token. The other bits count how often it was sampled."""


@dataclass(frozen=True)
class SequenceRecord:
    """One sequence of a launch; the kernel's buffer `sequences` has one record a sequence, [batch, 24] int32.

    length: tokens cached before the launch. per_step: columns that it has. given: how many of its row of `tokens` are
    inputs; total: how many tokens it has in the launch, at most steps * per_step (given, if per_step is above 1).
    first_column: the first of its columns. temperature: float32 bits. seed_low, seed_high: halves of a 64-bit seed.
    stop_first, stop_count: its part of `stop_ids`. options: bits of MASKED to FILTERED; slot: its row of the buffers
    that these name. top_k: 0 for all; top_p, reach: float32 bits, a token is out from the distance `reach` on (see
    `cheetah.models.sampling`). repetition, presence, frequency: penalties, float32 bits.

    Of a kernel that verifies drafts. drafted: its numbers below this have an input or a draft in its row of `tokens`.
    ngram_min, ngram_max: drafts of the others are looked up behind n-grams of such lengths, if ngram_max is not 0. The
    bits of ngram_min from AHEAD_SHIFT on: so many tokens of another text stand before its own in its row of `history`,
    and are looked up first."""

    length: int
    per_step: int
    given: int
    total: int
    first_column: int
    temperature: int = 0
    seed_low: int = 0
    seed_high: int = 0
    stop_first: int = 0
    stop_count: int = 0
    options: int = 0
    slot: int = 0
    top_k: int = 0
    top_p: int = 0
    reach: int = 0
    repetition: int = 0
    presence: int = 0
    frequency: int = 0
    drafted: int = 0
    ngram_min: int = 0
    ngram_max: int = 0


@dataclass(frozen=True)
class ColumnRecord:
    """One column of a launch: its sequence, and its number among the sequence's columns; [tokens, 4] int32."""

    sequence: int
    number: int


@dataclass(frozen=True)
class TileRecord:
    """One tile of attention; see the module. [tiles, 8] int32."""

    first_column: int
    columns: int
    table: int
    offset: int
    length: int
    stride: int
    new: int
    new_column: int


Record = SequenceRecord | ColumnRecord | TileRecord
RECORD_WORDS: dict[type, int] = {
    SequenceRecord: SEQUENCE_WORDS,
    ColumnRecord: COLUMN_WORDS,
    TileRecord: TILE_WORDS,
}
_FIELDS = {kind: attrgetter(*[field.name for field in fields(kind)]) for kind in RECORD_WORDS}


def epochs_of_step(layers: int) -> int:
    """Epochs of the exchange that a step of a model with so many layers uses: one for the embeddings, one a layer, and
    those of the choice of tokens. The first follows the last layer's of the step before, modulo the tags."""
    others = 1 + FILTER_ROUNDS
    return 1 + layers + round_up(others, EXCHANGE_TAGS)


def word(kind: type[Record], name: str) -> int:
    """Which word of a record a field is."""
    return names_of(kind).index(name)


def names_of(kind: type[Record]) -> list[str]:
    """What each word of a record is called; those that fill it up are `unused`, and numbered."""
    names = [field.name for field in fields(kind)]
    return [*names, *(f"unused_{number}" for number in range(RECORD_WORDS[kind] - len(names)))]


def encode(records: Sequence[Record], kind: type[Record]) -> npt.NDArray[np.int32]:
    """int32 [len(records), words of the kind]; unused words are 0. Values may use all 32 bits, signed or not."""
    words = np.zeros((len(records), RECORD_WORDS[kind]), np.uint32)
    for number, record in enumerate(records):
        found = _FIELDS[kind](record)
        words[number, : len(found)] = [value & 0xFFFFFFFF for value in found]
    return words.view(np.int32)
