"""What a launch's tables say: the order of its sequences, what of their caches they share, whose columns are whose.

The records and their words are `plan.tables`'. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from cheetah.models.sampling import Filters, Penalties
from cheetah.plan.kv.tables import AHEAD_SHIFT, ColumnRecord, SequenceRecord
from cheetah.runtime.engine.kv_cache import CachedSequence, shared_prefix

Shared = tuple[int, int, int]
"""(first sequence, how many, tokens of the prefix that they share), by the order of a launch."""


@dataclass(frozen=True)
class Sampling:
    """What one launch needs to know to sample: temperature 0 is greedy. Meaning of the rest: `cheetah.models.sampling`.

    bias: (token, what is added to its logit). allowed: all tokens that may be sampled, if not any; banned: those that
    may not.
    """

    temperature: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    filters: Filters = Filters()
    penalties: Penalties = Penalties()
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    banned: tuple[int, ...] = ()


@dataclass(frozen=True)
class Geometry:
    """Which keys a launch reads: (cached tokens, columns) of each sequence in order, and the prefixes that they share.

    Launches of equal geometry have equal attention schedules.
    """

    sequences: tuple[tuple[int, int], ...]
    shared: tuple[Shared, ...] = ()

    @property
    def column_count(self) -> int:
        return sum(per_step for _, per_step in self.sequences)

    def placed(self) -> list[tuple[int, int, int]]:
        """(cached tokens, columns, first column) of each sequence."""
        firsts = accumulate((per_step for _, per_step in self.sequences), initial=0)
        return [(*sequence, first) for sequence, first in zip(self.sequences, firsts, strict=False)]


def share_prefixes(
    sequences: Sequence[CachedSequence], unit: int, minimum: int
) -> tuple[list[int], tuple[Shared, ...]]:
    """An order of sequences in which those that share their first pages are neighbours, and what is worth sharing.

    A shared prefix is a multiple of `unit` tokens and at least `minimum`; of all ways to part the order into
    neighbours, the one that saves most reads is taken. Without any the order is as given.
    """
    order = sorted(range(len(sequences)), key=lambda number: sequences[number].pages)
    # What several neighbours share is the least that two of them do.
    alike = [0, *(shared_prefix([sequences[one], sequences[other]]) for one, other in pairwise(order))]
    if max(alike) < max(minimum, 1):
        return list(range(len(sequences))), ()
    best: list[tuple[int, tuple[Shared, ...]]] = [(0, ())]
    for end in range(1, len(order) + 1):
        choices = [best[end - 1]]
        for first in range(end - 1):
            tokens = min(alike[first + 1 : end]) // unit * unit
            if tokens >= max(minimum, 1):
                saved, shared = best[first]
                count = end - first
                choices.append((saved + (count - 1) * tokens, (*shared, (first, count, tokens))))
        best.append(max(choices, key=lambda choice: choice[0]))
    shared = best[-1][1]
    return (order if shared else list(range(len(sequences)))), shared


def sequence_record(
    placed: tuple[int, int, int],
    given: int,
    total: int,
    sampling: Sampling,
    stops: tuple[int, int],
    asked: tuple[int, int] = (0, 0),
    drafts: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> SequenceRecord:
    """The record of a sequence that has `placed` (see `Geometry`), its `stops`, (first, count) of the stop ids, what it
    has `asked`, (options, slot), and its `drafts`, (how many, shortest and longest n-grams, tokens of the text
    ahead)."""
    length, per_step, first_column = placed
    return SequenceRecord(
        length=length,
        per_step=per_step,
        given=given,
        total=total,
        first_column=first_column,
        temperature=_bits(sampling.temperature),
        seed_low=sampling.seed & 0xFFFFFFFF,
        seed_high=sampling.seed >> 32,
        stop_first=stops[0],
        stop_count=stops[1],
        options=asked[0],
        slot=asked[1],
        top_k=sampling.filters.top_k,
        top_p=_bits(sampling.filters.top_p),
        reach=_bits(sampling.filters.reach),
        repetition=_bits(sampling.penalties.repetition),
        presence=_bits(sampling.penalties.presence),
        frequency=_bits(sampling.penalties.frequency),
        drafted=given + drafts[0],
        ngram_min=drafts[1] | drafts[3] << AHEAD_SHIFT,
        ngram_max=drafts[2],
    )


@lru_cache(maxsize=1024)
def _bits(number: float | np.float32) -> int:
    """float32 bits."""
    return int(np.float32(number).view(np.uint32))


def column_records(geometry: Geometry) -> list[ColumnRecord]:
    """The records of the columns, in order."""
    counts = [per_step for _, per_step in geometry.sequences]
    return [ColumnRecord(sequence, number) for sequence, count in enumerate(counts) for number in range(count)]


def stop_lists(wanted: Sequence[tuple[int, ...]], room: int) -> tuple[list[int], list[tuple[int, int]]]:
    """All stop ids one after the other, equal lists once, and (first, count) of each sequence's.

    At most `room` in all: where that is too few, every list is cut alike, and the host must look for the others.
    """
    distinct = list(dict.fromkeys(wanted))
    most = room if sum(map(len, distinct)) <= room else room // len(distinct)
    ids: list[int] = []
    places: dict[tuple[int, ...], tuple[int, int]] = {}
    for stops in distinct:
        places[stops] = (len(ids), min(len(stops), most))
        ids += stops[:most]
    return ids, [places[stops] for stops in wanted]
