"""Words that a completion shall not have: as ids of one token in the mask, as sequences of several by a watcher."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from engine_rig import Rig, alone, made_by
from fake_kernel import FakeDevice, generate_kernel
from tiny_models import tiny_weights, write_checkpoint
from tiny_tokenizers import byte_level

from cheetah.models.dense.reference import Reference
from cheetah.models.rounding import round_to_bf16
from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.engine.banned_sequences import BannedSequences
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.requests import Request
from tests.meant import next_token

PROMPT = (5, 17, 250)
VOCAB = tiny_weights().config.vocab_size


def allowed_after(token_ids: tuple[int, ...], sequences: list[tuple[int, ...]]) -> set[int]:
    watcher = BannedSequences(sequences, VOCAB)
    for token in token_ids:
        watcher.after(token)
    if watcher.mask is None:
        return set(range(VOCAB))
    return set(np.flatnonzero(np.unpackbits(watcher.mask.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def test_the_last_id_is_forbidden_where_the_others_were_made() -> None:
    sequences, every = [(1, 2, 3), (2, 4), (2, 31), (9, 9, 9, 299)], set(range(VOCAB))
    for made, banned in (
        ((), set()),
        ((1,), set()),
        ((1, 2), {3, 4, 31}),
        ((2,), {4, 31}),
        ((1, 2, 3), set()),
        ((9, 9), set()),
        ((5, 9, 9, 9), {299}),
        ((9, 9, 9, 9), {299}),
    ):
        assert allowed_after(made, sequences) == every - banned, made


def test_completions_are_what_the_reference_makes_without_the_sequences() -> None:
    """Each completion of a request for itself: what the others made, or the prompt ends with, bans nothing."""
    plain = Request(PROMPT, 12, Sampling())
    first = alone(plain)
    sequences = [first[2:4], first[5:8], (PROMPT[-1], first[0])]

    model = Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16)
    for token in PROMPT:
        row = model.step(token)
    made: list[int] = []
    while len(made) < plain.max_tokens:
        banned = [ids[-1] for ids in sequences if made and tuple(made[-len(ids) + 1 :]) == ids[:-1]]
        made.append(next_token(row, plain.sampling, PROMPT, made, banned))
        row = model.step(made[-1])
    assert tuple(made[:3]) == first[:3] and made[3] != first[3]

    rig = Rig(batch=2)
    watched = Request(PROMPT, 12, Sampling(), watchers=(lambda: BannedSequences(sequences, VOCAB),))
    (id,), (other,) = rig.engine.add(watched), rig.engine.add(plain)
    found = made_by(rig.run())
    assert (found[id], found[other]) == (tuple(made), first)


def test_words_of_one_token_and_of_several(tmp_path: Path) -> None:
    files = {"tokenizer.json": byte_level(), "tokenizer_config.json": {"bos_token": "<|begin|>"}}
    folder = write_checkpoint(tmp_path, tiny_weights(), files)
    with LLM(folder, device=FakeDevice(), generate_kernel=generate_kernel, quiet=True) as llm:
        tokenizer, ids = llm.get_tokenizer(), llm.generate([3, 4], SamplingParams(max_tokens=30)).token_ids
        words = [tokenizer.decode(ids[at : at + 2]) for at in range(len(ids) - 1)]
        written = [(word, tuple(tokenizer.encode(word, False))) for word in words]
        word, banned = next((word, own) for at, (word, own) in enumerate(written) if own == ids[at : at + 2])
        params = SamplingParams(max_tokens=30, bad_words=[word, tokenizer.decode(ids[:1])])
        found = llm.generate([3, 4], params).token_ids
        assert ids[0] not in found and banned not in [found[at : at + 2] for at in range(len(found))]
        assert llm.prompts.ids_of_words(["he", "lex"]) == [
            tuple(tokenizer.encode(text, False)) for text in ("he", " he", "lex", " lex")
        ]
