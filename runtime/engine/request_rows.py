"""What sequences ask of their logits, on the device: masks, biases and counts of tokens, a row a slot.

A sequence keeps its slot from launch to launch, so that a row is uploaded when it changes and no more; the counts the
kernel keeps up itself. Knows nothing of launches but who takes part.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cheetah.plan.kv.tables import BIASED, FILTERED, MASKED, PENALISED, PROMPT_TOKEN
from cheetah.runtime.engine.launch_tables import Sampling
from cheetah.runtime.engine.watching import MASK_BITS, Mask

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer


def options_of(sampling: Sampling, mask: Mask | None = None) -> int:
    """The bits of what a sequence asks for. Greedy sampling is not filtered: the likeliest token is always kept."""
    is_filtered = sampling.temperature > 0 and not sampling.filters.keep_all
    return (
        (MASKED if mask is not None or _has_mask(sampling) else 0)
        | (BIASED if sampling.bias else 0)
        | (0 if sampling.penalties.change_nothing else PENALISED)
        | (FILTERED if is_filtered else 0)
    )


def _has_mask(sampling: Sampling) -> bool:
    return sampling.allowed is not None or bool(sampling.banned)


def mask_of(sampling: Sampling, vocab: int) -> Mask:
    """The tokens that may be sampled."""
    allowed = np.full(-(-vocab // MASK_BITS) * MASK_BITS, sampling.allowed is None)
    if sampling.allowed is not None:
        allowed[list(sampling.allowed)] = True
    allowed[[token for token in sampling.banned if token < vocab]] = False
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def bias_of(sampling: Sampling, vocab: int) -> npt.NDArray[np.float32]:
    """float32 [vocab]."""
    bias = np.zeros(vocab, np.float32)
    for token, value in sampling.bias:
        bias[token] = value
    return bias


def counts_of(prompt: Sequence[int], made: Sequence[int], vocab: int) -> npt.NDArray[np.uint32]:
    """uint32 [vocab]: PROMPT_TOKEN where the prompt has a token, plus how often it was made."""
    counts = np.bincount(np.asarray(made, np.int64), minlength=vocab).astype(np.uint32)
    counts[np.unique(np.asarray(prompt, np.int64))] |= np.uint32(PROMPT_TOKEN)
    return counts


@dataclass
class _Slot:
    """Whose a slot is, and what lies in its rows; None where that is not known."""

    owner: weakref.ref[Any] | None = None
    mask: tuple[Sampling, Mask | None] | None = None
    bias: object = None
    counted: tuple[list[int], int] | None = None  # the ids of prompt and completion, and how many are the prompt's
    history: list[int] | None = None  # of its first tokens, by position


class RequestRows:
    """The rows of `batch` slots in the buffers `masks`, `logit_bias`, `token_counts` and `history` of one launcher."""

    def __init__(self, buffers: Mapping[str, Buffer], vocab: int, batch: int) -> None:
        self._buffers, self._vocab = buffers, vocab
        self._slots = [_Slot() for _ in range(batch)]

    def place(self, owners: Sequence[object]) -> list[int]:
        """A slot for each of different sequences: the one that it has, or one that none of them has."""
        held = [next((i for i, slot in enumerate(self._slots) if _is(slot.owner, owner)), None) for owner in owners]
        free = iter([number for number in range(len(self._slots)) if number not in held])
        slots = [next(free) if slot is None else slot for slot in held]
        for number, owner in zip(slots, owners, strict=True):
            if not _is(self._slots[number].owner, owner):
                self._slots[number] = _Slot(weakref.ref(owner))
        return slots

    def fill(self, number: int, sampling: Sampling, ids: Sequence[int], prompt: int, mask: Mask | None = None) -> None:
        """Uploads what a slot does not hold yet. ids: of prompt and completion, the first `prompt` are the prompt's.
        mask: as in `Part`."""
        slot, options = self._slots[number], options_of(sampling, mask)
        if options & MASKED and not _is_same_mask(slot.mask, sampling, mask):
            slot.mask = None  # until the upload has ended it is not known what lies there
            self._upload("masks", number, self._masked(sampling, mask))
            slot.mask = (sampling, mask)
        if options & BIASED and slot.bias != sampling.bias:
            slot.bias = None
            self._upload("logit_bias", number, bias_of(sampling, self._vocab))
            slot.bias = sampling.bias
        if options & PENALISED and slot.counted != (list(ids), prompt):
            slot.counted = None
            self._upload("token_counts", number, counts_of(ids[:prompt], ids[prompt:], self._vocab))
            slot.counted = (list(ids), prompt)

    def fill_columns(self, first: int, sampling: Sampling, masks: Sequence[Mask | None]) -> None:
        """Uploads what the columns of a step from `first` on may choose, behind the rows of all slots."""
        rows = np.stack([self._masked(sampling, mask) for mask in masks])
        self._buffers["masks"].upload(rows, (len(self._slots) + first) * rows[0].nbytes)

    def fill_history(self, number: int, ids: Sequence[int]) -> None:
        """Uploads what a slot's row of `history` does not have of a sequence's ids."""
        slot = self._slots[number]
        held = 0 if slot.history is None else len(slot.history)
        if slot.history is None or slot.history != [*ids[:held]]:
            held = 0
        slot.history = None
        if held < len(ids):
            row_bytes = self._buffers["history"].nbytes // len(self._slots)
            self._buffers["history"].upload(np.array(ids[held:], np.uint32), number * row_bytes + held * 4)
        slot.history = [*ids]

    def note(self, owner: object, token_ids: Sequence[int]) -> None:
        """A launch has sampled these, and counted them if they count."""
        slot = next(slot for slot in self._slots if _is(slot.owner, owner))
        if slot.counted is not None:
            slot.counted[0].extend(token_ids)
        if slot.history is not None:
            slot.history.extend(token_ids)

    def forget(self, owner: object = None) -> None:
        """A launch has ended in the middle, for all or for one: what is counted is not known any more."""
        for slot in self._slots:
            if owner is None or _is(slot.owner, owner):
                slot.counted = slot.history = None

    def _masked(self, sampling: Sampling, mask: Mask | None) -> Mask:
        assert mask is None or len(mask) == -(-self._vocab // MASK_BITS), (len(mask), self._vocab)
        if mask is not None and not _has_mask(sampling):
            return mask
        allowed = mask_of(sampling, self._vocab)
        return allowed if mask is None else allowed & mask

    def _upload(self, name: str, number: int, row: npt.NDArray[Any]) -> None:
        self._buffers[name].upload(row, number * row.nbytes)


def _is_same_mask(held: tuple[Sampling, Mask | None] | None, sampling: Sampling, mask: Mask | None) -> bool:
    if held is None or held[1] is not mask:
        return False
    return (held[0].allowed, held[0].banned) == (sampling.allowed, sampling.banned)


def _is(reference: weakref.ref[Any] | None, owner: object) -> bool:
    return reference is not None and reference() is owner
