"""Drafters of blocks: the same answers with them, drafts that are what float32 says, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from cheetah.errors import CheetahError
from cheetah.generate import generate_known_rows, generate_markov
from cheetah.models.registry import family_of
from cheetah.models.rounding import round_to_bf16, widen
from cheetah.plan import gpu_named
from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.assembly.blocks import step_tokens
from cheetah.runtime.checkpoint.drafters import RANDOM_BLOCKS, open_drafter
from cheetah.runtime.checkpoint.loading import RANDOM, open_checkpoint
from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.drafting import Speculation
from cheetah.runtime.outputs import RequestOutput
from tests.models.meaning_of_blocks import BlockReference
from tests.runtime.test_draft_head import drafts_of_rounds, plant_between_launches
from tests.runtime.test_draft_model import asked, drafted_in, ids_of
from tests.runtime.test_speculation import ASKED, TEXT, opened

MARKOV_ROWS = ("looked_up", "multiplied")

HIDDEN, HEADS, HEAD_DIM, FFN, VOCAB, COLUMNS, RANK, TAPS = 128, 2, 64, 96, 512, 3, 128, (0, 1)
CONFIG: dict[str, Any] = {
    **{"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": HIDDEN, "vocab_size": VOCAB},
    **{"intermediate_size": FFN, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": 1},
    **{"head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 10000.0},
    **{"block_size": COLUMNS, "mask_token_id": 2, "target_layer_ids": list(TAPS), "num_target_layers": 3},
    **{"markov_rank": RANK, "markov_head_type": "vanilla", "tie_word_embeddings": False},
}

DFLASH: dict[str, Any] = {
    **{name: value for name, value in CONFIG.items() if not name.startswith(("markov", "mask", "target", "tie"))},
    **{"architectures": ["DFlashDraftModel"], "block_size": COLUMNS + 1},
    "dflash_config": {"mask_token_id": 2, "target_layer_ids": list(TAPS)},
}
"""As z-lab writes it: masks draft what stands in their own places, embedding and head are the model's."""


def drafter(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """One of random weights, with the tensors that such files have."""
    draw = np.random.default_rng(11)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return (draw.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    tensors = {"fc.weight": matrix(HIDDEN, len(TAPS) * HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    tensors |= {name: np.ones(HIDDEN, np.float32) for name in ("hidden_norm.weight", "norm.weight")}
    tensors["embed_tokens.weight"] = matrix(VOCAB, HIDDEN) * 4
    for layer in range(2):
        shapes = {
            **{"self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM)},
            **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (HEAD_DIM, HIDDEN)),
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (FFN, HIDDEN)),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        own = {name: matrix(*shape) for name, shape in shapes.items()}
        own |= {name: np.ones(HIDDEN, np.float32) for name in ("input_layernorm", "post_attention_layernorm")}
        own |= {f"self_attn.{name}_norm": np.full(HEAD_DIM, 1.5, np.float32) for name in "qk"}
        tensors |= {f"layers.{layer}.{name}.weight": one for name, one in own.items()}
    names = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    tensors |= {name: matrix(VOCAB, RANK) * 4 for name in names}
    if config is DFLASH:
        tensors = {name: one for name, one in tensors.items() if not name.startswith(("markov", "lm_head", "embed"))}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: one.astype(ml_dtypes.bfloat16) for name, one in tensors.items()}, folder / "model.safetensors")
    return folder


def drafted_by(folder: Path, method: str = "dspark", **more: Any) -> LLM:
    config = {"method": method, "model": str(folder), "num_speculative_tokens": COLUMNS}
    return opened(speculative_config=config, **{"plan": {"tokens": 8, "page_size": 16}, **more})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with drafted_by(folder) as made:
        yield made


Proposed = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""Ids, and what was drafted behind them."""


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> Proposed:
    found, propose = Proposed(), Completion.propose
    monkeypatch.setattr(
        Completion, "propose", lambda one, ids: (found.append((tuple(one.ids), tuple(ids))), propose(one, ids))[1]
    )
    return found


def markov_of(llm: LLM) -> tuple[NDArray[np.float32], ...]:
    """What its Markov head has on the device."""
    buffers = llm.assembly.drafts.buffers  # type: ignore[union-attr]
    return tuple(widen(buffers[f"markov.{name}"].download(np.uint16, (VOCAB, RANK))) for name in MARKOV_ROWS)


def share_of_float32s(proposed: Proposed, folder: Path, markov: tuple[NDArray[np.float32], ...] | None = None) -> float:
    """Of all tokens that were drafted, how many float32 drafts too, by that Markov head."""
    model = open_checkpoint("demo")
    found = open_drafter(str(folder), model)
    target = family_of(model.config).reference(model.config, model.tensor, round_to_bf16)
    block = BlockReference(found.config, found.tensor, round_to_bf16)
    block.markov = block.markov if markov is None else markov
    right = count = 0
    known: tuple[int, ...] = ()
    for ids, drafts in sorted(proposed):  # what begins alike follows one another
        if len(ids) <= block.length or ids[: block.length] != known[: block.length]:
            target.reset()
            block.length = 0
        for token in ids[block.length : -1]:
            target.step(token)
            block.read(np.stack([target.left[layer] for layer in TAPS])[None])
        known = ids
        columns = len(drafts) + (not block.block.from_anchor)
        wanted = block.drafts(ids[-1], block.logits(ids[-1], columns))
        right += sum(one == other for one, other in zip(drafts, wanted, strict=True))
        count += len(drafts)
    return right / count


@pytest.mark.slow
@pytest.mark.compiler
def test_what_is_drafted_is_what_float32_drafts(
    llm: LLM, folder: Path, proposed: Proposed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind prompts that passes have read, and each token that was made since; and behind a prefix that was cached; in
    rounds that the host drives, and on the device."""
    for text in (TEXT, TEXT + " and the dog"):  # who wants logprobs has rounds that the host drives
        llm.generate(text, SamplingParams(max_tokens=12, temperature=0.0, logprobs=1))
    assert llm.engine.engine.prefixes is not None
    assert len(proposed) > 12 and all(drafts for _, drafts in proposed)
    assert share_of_float32s(proposed, folder) > 0.9
    found = drafts_of_rounds(llm, monkeypatch, skipped=0)
    assert len(found) > 12 and share_of_float32s(found, folder) > 0.9


@contextmanager
def knows(llm: LLM, scale: float) -> Iterator[LLM]:
    """One whose Markov head says what mostly follows in the demo's own answer, by so much above other tokens: most
    drafts are right, or many, and what else is known decides the others."""
    (answer,) = llm.generate([TEXT], SamplingParams(max_tokens=40, temperature=0.0, speculation=False), use_tqdm=False)
    draw = np.random.default_rng(5)
    looked_up, multiplied = np.sign(draw.standard_normal((VOCAB, RANK))), np.zeros((VOCAB, RANK))
    ids = answer.outputs[0].token_ids
    for before, token in dict(zip(ids, ids[1:], strict=False)).items():
        multiplied[token] += looked_up[before] * scale / RANK
    known = markov_of(llm)
    for rows in ((looked_up, multiplied), known):
        for name, values in zip(MARKOV_ROWS, rows, strict=True):
            bits = values.astype(ml_dtypes.bfloat16).view(np.uint16)
            llm.assembly.drafts.buffers[f"markov.{name}"].upload(bits)  # type: ignore[union-attr]
        if rows is not known:
            yield llm


@pytest.fixture
def knowing(llm: LLM) -> Iterator[LLM]:
    with knows(llm, RANK):
        yield llm


@pytest.fixture
def guessing(llm: LLM) -> Iterator[LLM]:
    with knows(llm, 4.0):
        llm.reset_prefix_cache()
        llm.assembly.drafts.buffers["known_rows"].fill(0)  # type: ignore[union-attr]
        yield llm


@pytest.mark.slow
@pytest.mark.compiler
def test_the_same_answers_in_company(knowing: LLM) -> None:
    kinds = [ASKED[0], ASKED[2], ASKED[3], ASKED[5]]
    prompts = [TEXT + " and" * (number % 3) for number in range(len(kinds))]
    plain = knowing.generate(prompts, asked(kinds, False, 14), use_tqdm=False)
    found: list[RequestOutput] = []
    params = asked(kinds, True, 14)
    drafted = drafted_in(knowing, lambda: found.extend(knowing.generate(prompts, params, use_tqdm=False)))
    assert ids_of(found) == ids_of(plain)
    assert drafted.tokens > 20 and drafted.accepted > 4


@pytest.mark.slow
@pytest.mark.compiler
def test_rounds_on_the_device_draft_what_float32_drafts(
    guessing: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a round on the device makes known what several columns left."""
    found: Proposed = []
    drafted = drafted_in(guessing, lambda: found.extend(drafts_of_rounds(guessing, monkeypatch, skipped=0)))
    assert drafted.accepted > 0.2 * drafted.tokens > 4 and len(found) > 8
    assert share_of_float32s(found, folder, markov_of(guessing)) > 0.95


@pytest.mark.slow
@pytest.mark.compiler
def test_most_drafts_of_one_that_knows_are_right(knowing: LLM) -> None:
    drafted = drafted_in(
        knowing, lambda: knowing.generate([TEXT], SamplingParams(max_tokens=40, temperature=0.0), use_tqdm=False)
    )
    assert drafted.accepted > 0.5 * drafted.tokens > 10


@pytest.mark.slow
@pytest.mark.compiler
def test_rounds_of_two_on_the_device(knowing: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of this drafter has room for two blocks of one token: who knows most drafts the same beside another."""
    scheduler = knowing.engine.engine._scheduler
    monkeypatch.setattr(scheduler, "_speculation", Speculation(1))
    rounds, asked_for = scheduler._model.rounds, list[int]()  # type: ignore[union-attr]
    prepare = rounds.prepare  # type: ignore[union-attr]
    monkeypatch.setattr(rounds, "prepare", lambda parts, logits: (asked_for.append(len(parts)), prepare(parts))[1])
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.0, "seed": 3, "stop": ["zzz"]}]
    plain = ids_of(knowing.generate([TEXT] * 2, asked(kinds, False, 24), use_tqdm=False))
    found: list[RequestOutput] = []
    params = asked(kinds, True, 24)
    drafted = drafted_in(knowing, lambda: found.extend(knowing.generate([TEXT] * 2, params, use_tqdm=False)))
    assert ids_of(found) == plain and 2 in asked_for
    assert drafted.accepted > 0.2 * drafted.tokens > 4


PLANTED = {
    "no rows are made of the last sequence's tokens": ("known[0] = first + kept;", "known[0] = first;"),
    "a block sees no token before it": ("record[4] = read;", "record[4] = 0;"),
}


@pytest.mark.exhaustive
@pytest.mark.compiler
@pytest.mark.parametrize("bug", PLANTED)
def test_bugs_between_two_launches_are_seen(
    guessing: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    plant_between_launches(guessing, monkeypatch, "block", *PLANTED[bug])
    share = share_of_float32s(drafts_of_rounds(guessing, monkeypatch, 0), folder, markov_of(guessing))
    assert share < 0.9


@pytest.mark.exhaustive
@pytest.mark.compiler
def test_masks_that_draft_what_stands_in_their_own_places(tmp_path: Path, llm: LLM, proposed: Proposed) -> None:
    kinds = ASKED[:2]
    plain = ids_of(llm.generate([TEXT] * 2, asked(kinds, False, 14), use_tqdm=False))
    proposed.clear()
    with drafted_by(drafter(tmp_path / "dflash", DFLASH), "dflash") as made:
        assert ids_of(made.generate([TEXT] * 2, asked(kinds, True, 14), use_tqdm=False)) == plain
    assert len(proposed) > 8 and share_of_float32s(proposed, tmp_path / "dflash") > 0.9


@pytest.mark.exhaustive
@pytest.mark.compiler
def test_who_gives_pages_back_is_known_again_when_it_reads_again(llm: LLM, folder: Path, proposed: Proposed) -> None:
    kinds = [{"temperature": 0.0, "repetition_penalty": 1 + number / 4} for number in range(4)]
    prompts = [TEXT, TEXT + " and", TEXT + "  and the", TEXT + " a"]
    wanted = ids_of(llm.generate(prompts, asked(kinds, False, 44), use_tqdm=False))
    with drafted_by(folder, pool_pages=12, launch_steps=2) as few:
        proposed.clear()
        assert ids_of(few.generate(prompts, asked(kinds, True, 44), use_tqdm=False)) == wanted
        assert few.engine.engine.load().preemptions > 0
    drafted = [(ids, tokens) for ids, tokens in proposed if tokens]
    assert len(drafted) > 20 and share_of_float32s(drafted, folder) > 0.9


@pytest.mark.slow
@pytest.mark.compiler
def test_rows_of_known_tokens_have_the_same_bits_however_many_there_are(llm: LLM) -> None:
    made, count = llm.assembly, 70
    rows, taps = made.known_rows, made.launcher.taps  # type: ignore[union-attr]
    assert rows is not None and taps is not None
    fc = widen(rows.buffers["fc"].download(np.uint16, (HIDDEN, len(TAPS) * HIDDEN)))
    left = np.random.default_rng(2).standard_normal((taps.nbytes // (2 * fc.shape[1]), fc.shape[1]))
    taps.upload(left.astype(ml_dtypes.bfloat16).view(np.uint16))
    places = [number * 7 % len(left) for number in range(count)]
    rows.make(taps, places, range(count - 1, -1, -1))
    together = rows._known_rows.download(np.uint16, (count, HIDDEN))
    wanted = left.astype(ml_dtypes.bfloat16).astype(np.float32)[places[::-1]] @ fc.T
    assert np.abs(widen(together) - wanted).max() < 2e-2
    for first in (0, 3):
        rows.make(taps, places[first : first + 11 - first], range(count, count + 11 - first))
        alone = rows._known_rows.download(np.uint16, (count + 11 - first, HIDDEN))[count:]
        assert (alone == together[::-1][first:11]).all()


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-8b"])
def test_what_is_launched_beside_a_drafters_steps_is_resident_at_once(model: str) -> None:
    gpu, opened = gpu_named("h200"), open_drafter(RANDOM_BLOCKS, open_checkpoint(RANDOM + model))
    for made in (generate_known_rows(opened.config, gpu, 64), generate_markov(opened.config, gpu)):
        assert made.manifest.launch.blocks <= gpu.blocks


@pytest.mark.parametrize(("drafts", "tokens"), [(3, 8), (7, 16), (15, 16)])
def test_a_step_has_room_for_blocks_of_16_beside_what_becomes_known_or_for_those_alone(
    drafts: int, tokens: int
) -> None:
    """z-lab's for Qwen3-8B: 32 columns of 4096 elements would have no place."""
    config = open_drafter(RANDOM_BLOCKS, open_checkpoint(RANDOM + "qwen3-8b")).config
    assert config.block is not None
    config = replace(config, block=replace(config.block, columns=16, from_anchor=False))
    assert step_tokens(config, gpu_named("h200"), drafts, max_context=4096, batch=8) == tokens


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"method": "dflash"}, "has a Markov head: its method is dspark"),
        ({"method": "eagle3"}, "has a Markov head: its method is dspark"),
        ({"method": "draft_model"}, "name it in speculative_config, with method dspark or dflash"),
        ({"num_speculative_tokens": 4}, "drafts blocks of 3: give at most as many"),
        ({"num_speculative_tokens": 4, "method": None}, "drafts blocks of 3: give at most as many"),
        ({"quantization": "fp8"}, "drafts in bf16"),
        ({"prompt_lookup_max": 3}, "looks nothing up"),
        ({"model": None}, "method dspark needs `model`"),
        ({"draft_sample_method": "greedy"}, "draft_sample_method"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder: Path, config: dict[str, Any], said: str) -> None:
    given = {"method": "dspark", "model": str(folder), "num_speculative_tokens": COLUMNS, **config}
    with pytest.raises(CheetahError, match=said):
        LLM("demo", device="emulator", quiet=True, speculative_config=given)
