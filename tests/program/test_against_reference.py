"""The whole step in the emulator against the float32 reference: shapes, plans, contexts, and trained models."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from cheetah.emulator import SCHEDULERS
from cheetah.models.dense.reference import Reference
from cheetah.models.registry import DEMO_FOLDER
from cheetah.models.rope import Rope
from cheetah.runtime.checkpoint.loading import Checkpoint, open_checkpoint
from tests.program.rig import Rig, float32_logits, model, random_weights, relative_error, token_ids
from tests.tiers import tiered
from tests.tolerances import LOGITS, SMALL_MARGIN

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

# name: (sizes of the model, how it is run, tokens). Defaults: 2 layers, hidden 48, feed-forward 40, vocabulary 50,
# 2 query heads and one KV head of 64; 2 blocks of 2 consumer warps, pages of 16, flags.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "defaults": ({}, {}, 40),
    "head of 128": ({"head_dim": 128}, {"kv_chunk_min": 16}, 40),
    "head of 256": ({"head_dim": 256}, {"kv_chunk_min": 16}, 40),
    "head of 256, barrier, keys split": (
        {"head_dim": 256, "heads": 6, "kv_heads": 2},
        {"kv_chunk_min": 16, "sync": "barrier", "blocks": 7, "consumer_warps": 4, "page_size": 5},
        70,
    ),
    "one head": ({"heads": 1}, {"blocks": 4}, 20),
    "group of 3": ({"heads": 3}, {"kv_chunk_min": 16, "blocks": 4}, 40),
    "group of 8, head of 128": ({"heads": 8, "head_dim": 128}, {"kv_chunk_min": 16, "blocks": 3}, 40),
    "groups of 5": ({"heads": 10, "kv_heads": 2}, {"blocks": 4, "sync": "barrier"}, 20),
    "no groups": ({"heads": 4, "kv_heads": 4}, {"blocks": 8}, 40),
    "more KV heads than blocks": ({"heads": 6, "kv_heads": 6}, {"kv_chunk_min": 16}, 40),
    "one element": ({"hidden": 1, "ffn": 1, "vocab": 2}, {}, 10),
    "one over an M-tile": ({"hidden": 17, "ffn": 9, "vocab": 17}, {"blocks": 3}, 20),
    "one under an M-tile": ({"hidden": 31, "ffn": 15, "vocab": 63}, {"blocks": 4}, 20),
    "wide": ({"hidden": 600, "ffn": 2100, "layers": 1}, {"stage_bytes": 8192}, 6),
    "much wider than deep": ({"hidden": 1700, "ffn": 40, "layers": 1, "vocab": 600}, {"blocks": 3}, 6),
    "tied": ({"tied_embeddings": True, "vocab": 300}, {"blocks": 4}, 20),
    "idle blocks": ({"hidden": 16, "ffn": 16, "vocab": 16}, {"blocks": 13}, 20),
    "one block": ({}, {"blocks": 1}, 40),
    "eight blocks, barrier": ({}, {"blocks": 8, "sync": "barrier"}, 40),
    "head of 128, barrier": ({"head_dim": 128, "heads": 4, "kv_heads": 2}, {"kv_chunk_min": 16, "sync": "barrier"}, 40),
    "page of 1": ({}, {"page_size": 1, "kv_chunk_min": 16}, 40),
    "page of 5": ({}, {"page_size": 5, "kv_chunk_min": 16}, 40),
    "page of 64, five blocks": ({}, {"page_size": 64, "kv_chunk_min": 16, "blocks": 5}, 100),
    "split six ways": ({"layers": 1, "heads": 4}, {"kv_chunk_min": 16, "blocks": 6}, 110),
    "several stages a chunk": ({"layers": 1}, {"kv_chunk_min": 64, "blocks": 2, "consumer_warps": 4}, 150),
    "eight warps": ({}, {"consumer_warps": 8, "kv_chunk_min": 16}, 40),
    "two stages": ({}, {"stages": 2, "in_flight": 1}, 30),
    "waiting is most of a step": (
        {"hidden": 96, "ffn": 320},
        {"stages": 10, "in_flight": 2, "in_flight_waiting": 1, "kv_chunk_min": 16},
        40,
    ),
    "llama3 rope": ({"rope": Rope(10000.0, "llama3", 8.0, 1.0, 4.0, 32)}, {"blocks": 3}, 60),
    "large epsilon": ({"rms_norm_eps": 0.1}, {}, 20),
    "narrow M-tiles": ({"hidden": 48, "heads": 4, "ffn": 320}, {"down_slices": 2}, 20),
}


EXHAUSTIVE = (
    *("group of 3", "no groups", "one under an M-tile", "head of 128, barrier", "page of 1", "page of 5"),
    *("head of 128", "head of 256", "one block", "two stages", "large epsilon", "page of 64, five blocks", "one head"),
    *("one over an M-tile", "tied", "split six ways"),
    *("groups of 5", "more KV heads than blocks", "eight warps", "wide", "several stages a chunk", "llama3 rope"),
)


@pytest.mark.parametrize("case", tiered(CASES, EXHAUSTIVE))
def test_logits_of_every_position(case: str) -> None:
    sizes, plan, count = CASES[case]
    weights = random_weights(model(**sizes))
    ids = token_ids(count, weights.config.vocab_size)
    found = Rig(weights, **plan).session("priority", 1).score(ids)
    assert relative_error(found, wanted(weights, tuple(ids))) < LOGITS


@cache
def wanted(weights: Any, ids: tuple[int, ...]) -> Any:
    return float32_logits(weights, ids)


def test_the_reference_is_a_sharp_measure() -> None:
    """One key less, or one position off, is far outside the tolerance."""
    weights = random_weights(model())
    ids = token_ids(20, 50)
    plain = wanted(weights, tuple(ids))[1:]
    assert relative_error(Reference(weights.config, weights.tensor).forward(ids[1:]), plain) > 2 * LOGITS


# -- trained models ---------------------------------------------------------------------------------------------------


FOLLOWED = [("flags", "There was", 24), ("flags", "There was", 64), ("barrier", "Once upon a time", 64)]


@pytest.mark.parametrize(("sync", "text", "steps"), tiered(FOLLOWED, FOLLOWED[1:]))
def test_demo_model_teacher_forced_and_greedy(sync: str, text: str, steps: int) -> None:
    prompt = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")).encode(text).ids
    follow(open_checkpoint(DEMO_FOLDER), prompt, steps, {"blocks": 4, "sync": sync, "consumer_warps": 4})


@pytest.mark.exhaustive
def test_demo_model_on_as_many_blocks_as_an_h200_has() -> None:
    """Most of them have nothing to do in most phases."""
    demo = open_checkpoint(DEMO_FOLDER)
    rig = Rig(demo, blocks=132)
    ids = token_ids(6, demo.config.vocab_size)
    for scheduler in SCHEDULERS:
        session = rig.session(scheduler, 1)
        assert relative_error(session.score(ids), float32_logits(demo, ids)) < LOGITS
        session.launcher.restart()
        session.generate(ids[:4], 2)  # the first three steps leave the head out


GOLDEN = [(0, 24), (0, 64), (3, 64)]
"""Case, and how many tokens of it are made."""


@pytest.mark.parametrize(("number", "steps"), tiered(GOLDEN, GOLDEN[1:]))
def test_trained_checkpoint_teacher_forced_and_golden_greedy_ids(
    trained_checkpoint: Path, number: int, steps: int
) -> None:
    golden = json.loads((trained_checkpoint / "golden.json").read_text())["cases"][number]
    stored = golden["stored_weights_fp32"]
    plan = {"blocks": 4, "consumer_warps": 4}
    greedy = follow(open_checkpoint(trained_checkpoint), golden["prompt_ids"], steps, plan)
    sure = first_small(stored["margins"])
    assert greedy[:sure] == stored["greedy_ids"][: len(greedy)][:sure]


def follow(checkpoint: Checkpoint, prompt: list[int], steps: int, plan: dict[str, Any]) -> list[int]:
    """The kernel's greedy ids up to the first small margin, after its logits were held to float32 along 64 tokens."""
    text = Reference(checkpoint.config, checkpoint.tensor).generate(prompt, steps)
    session = Rig(checkpoint, **plan).session()
    ids = [*prompt, *text][:64]
    logits = float32_logits(checkpoint, ids)
    found = session.score(ids)
    assert relative_error(found, logits) < LOGITS
    ordered = np.sort(logits, axis=1)
    margins = ordered[:, -1] - ordered[:, -2]
    clear = margins >= SMALL_MARGIN
    assert clear.sum() > 16, "hardly a test"
    np.testing.assert_array_equal(found.argmax(axis=1)[clear], logits.argmax(axis=1)[clear])
    session.launcher.restart()
    made = session.generate(prompt, steps)
    sure = first_small(margins[len(prompt) - 1 :])
    assert made[:sure] == text[:sure]
    return made[:sure]


def first_small(margins: Any) -> int:
    """How many steps come before the first whose two highest logits are near each other."""
    small = np.flatnonzero(np.asarray(margins) < SMALL_MARGIN)
    return int(small[0]) if small.size else len(margins)


@pytest.fixture
def trained_checkpoint() -> Path:
    """The folder of stories260K-hd64-bf16; the test is skipped where there is none."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "models"
    folder = Path(os.environ.get("CHEETAH_TEST_MODELS", beside)) / "stories260K-hd64-bf16"
    if not folder.is_dir():
        pytest.skip(f"no {folder.name} (set CHEETAH_TEST_MODELS to the folder that holds it)")
    return folder
