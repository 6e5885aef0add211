"""The layer that lies beside a model of Gated DeltaNet to draft for it: the same answers with it, and just the drafts
that it means."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from cheetah import LLM
from cheetah.errors import CheetahError
from cheetah.models.config import ModelConfig
from cheetah.models.dense.reference import Reference
from cheetah.models.layer_kind import Routing
from cheetah.models.qwen3_5 import Qwen35MoeConfig
from cheetah.models.registry import drafter_beside, family_of
from cheetah.runtime.checkpoint.drafters import open_mtp
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.step_time import StepTime
from tests.models.meaning_of_heads import MtpReference
from tests.program.test_hybrids import hybrid, weights
from tests.runtime.test_draft_head import Meaning, as_meant, drafts_of_rounds
from tests.runtime.test_draft_model import asked, drafted_in, ids_of
from tests.runtime.test_speculation import LEAST_RATIO

DRAFTS, ROUNDS, TOKENS = 3, 3, 20
PROMPT = [number * 7 % 50 for number in range(21)]
CONFIG = hybrid(1, 2, (0,), layers=2, heads=2, dims=128)
OF_EXPERTS = Qwen35MoeConfig(**{**vars(CONFIG), "intermediate_size": 64, "routing": Routing(6, 2, shared=48)})


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of the layer that drafts, by the names of files."""
    layer, of_model = drafter_beside(config)
    shapes = family_of(layer).tensor_shapes(layer).items()
    return {f"mtp.{name.removeprefix('model.')}": shape for name, shape in shapes if name not in of_model} | {
        "mtp.norm.weight": (config.hidden_size,)
    }


def random_layer(config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """It adds little to what it begins with, so that `fc` decides what is drafted."""
    draw = np.random.default_rng(3)
    drawn = {}
    for name, shape in shapes_of(config).items():
        size = 0.3 if len(shape) == 1 else (0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
        drawn[name] = (draw.standard_normal(shape) * size * (1 if len(shape) == 1 else shape[1] ** -0.5)).astype(
            np.float32
        )
    return drawn


def written(folder: Path, config: ModelConfig, layer: dict[str, NDArray[Any]]) -> None:
    """The model's file, with such a layer."""
    stored = {
        name: one.view(ml_dtypes.bfloat16) if one.dtype == np.uint16 else one
        for name, one in weights(config).tensors.items()
    }
    in_bf16 = {name: np.ascontiguousarray(one.astype(ml_dtypes.bfloat16)) for name, one in layer.items()}
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    save_file({**stored, **in_bf16}, folder / "model.safetensors")


def meaning_of(folder: Path) -> Meaning:
    model = open_checkpoint(folder)
    drafter = open_mtp(model)
    return Meaning(model, MtpReference(drafter.config, drafter.tensor))


def folder_in(folder: Path, config: ModelConfig = CONFIG) -> Path:
    """A model, and a layer whose `fc` is fitted to the model's answer to PROMPT."""
    layer = random_layer(config)
    written(folder, config, layer)
    meaning = meaning_of(folder)
    ids = [*PROMPT, *Reference(config, weights(config).tensor).generate(PROMPT, 40)]
    layer["mtp.fc.weight"] = fitted(meaning, ids)
    written(folder, config, layer)
    return folder


def fitted(meaning: Meaning, ids: Sequence[int]) -> NDArray[np.float32]:
    """The matrix by which the residual begins with the head's row of the token to be drafted, by least squares; what
    the state says counts less than what the token says, since it is another one behind a token that was drafted."""
    head, features = meaning.head, meaning.features(ids)
    assert isinstance(head, MtpReference)
    inputs = np.stack([head.joined(token, row) for token, row in zip(ids[1:], features, strict=True)])[:-1]
    wanted = head.head[list(ids[2:])] / (1 + head.weights["model.norm.weight"])
    size = inputs.shape[1] // 2
    penalty = np.diag(np.repeat([0.1, 3.0], size))
    found = np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ wanted).T
    return np.asarray(3 * found, np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_in(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with opened(folder) as made:
        yield made


def opened(folder: Path | str, **more: Any) -> LLM:
    config = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    options: dict[str, Any] = {"batch": 3, "max_context": 128, "kv_chunk": 32, "prompt_passes": 64, "launch_steps": 8}
    options |= {"gpu": "emulator-2", "plan": {"consumer_warps": 2}, "speculative_config": config, **more}
    made = LLM(folder, device="emulator", quiet=True, **options)
    scheduler = made.engine.engine._scheduler
    scheduler._pace.break_even = lambda sequences: LEAST_RATIO  # type: ignore[method-assign]
    scheduler._pace.lacks_plain = lambda sequences: False  # type: ignore[method-assign]
    scheduler.round_time.steps = lambda wanted: min(ROUNDS, wanted)  # type: ignore[method-assign]
    return made


@pytest.mark.slow
@pytest.mark.compiler
def test_it_drafts_what_it_means_of_the_models_states(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind prompts read in passes, whose last layer is of all tokens, and behind rounds, some of whose drafts were
    right. Who wants logprobs has rounds that the host drives."""
    proposed, propose, meaning = list[tuple[Sequence[int], Sequence[int]]](), Completion.propose, meaning_of(folder)

    def noted(one: Completion, ids: Sequence[int]) -> None:
        proposed.append(([*one.ids], ids))
        propose(one, ids)

    monkeypatch.setattr(Completion, "propose", noted)
    prompt: Any = {"prompt_token_ids": PROMPT}
    (params,) = asked([{"temperature": 0.0, "logprobs": 1, "ignore_eos": True}], True, 20)
    drafted = drafted_in(llm, partial(llm.generate, [prompt], params, use_tqdm=False))
    assert len(proposed) > 3 and drafted.accepted > 0.3 * drafted.tokens
    assert as_meant(proposed, meaning) > 0.9
    found = drafts_of_rounds(llm, monkeypatch, prompt=prompt)
    assert len(found) > 3 and as_meant(found, meaning) > 0.9


@pytest.mark.exhaustive
@pytest.mark.compiler
@pytest.mark.parametrize("passes", [False, 64])
def test_it_drafts_what_it_means_where_experts_are(
    passes: bool | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt: Any = {"prompt_token_ids": PROMPT}
    with opened(folder_in(tmp_path, OF_EXPERTS), prompt_passes=passes) as llm:
        found = drafts_of_rounds(llm, monkeypatch, prompt=prompt)
        assert len(found) > 3 and as_meant(found, meaning_of(tmp_path)) > 0.9
        plain, drafted = (asked([{"temperature": 0.0, "ignore_eos": True}], is_on, TOKENS) for is_on in (False, True))
        assert ids_of(llm.generate([prompt], plain)) == ids_of(llm.generate([prompt], drafted))


@pytest.mark.slow
@pytest.mark.compiler
def test_the_same_answers_in_company_and_where_pages_run_out(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches are of as many steps, whatever they took: on a busy host prompts were read in parts so short that pages
    were enough."""
    monkeypatch.setattr("cheetah.runtime.engine.scheduler.LAUNCH_SECONDS", 1e9)
    monkeypatch.setattr(StepTime, "step_s", 0.05)
    monkeypatch.setattr(StepTime, "steps", lambda time, wanted: min(wanted, time.max_steps))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 0.8, "seed": 3, "n": 2, "ignore_eos": True},
        {"temperature": 0.7, "seed": 5, "top_p": 0.9, "logprobs": 1},
    ]
    prompts: Any = [{"prompt_token_ids": ids} for ids in (PROMPT, PROMPT[:17], [8, 1, 4])]
    wanted = ids_of(llm.generate(prompts, asked(kinds, False, TOKENS), use_tqdm=False))
    with opened(folder, pool_pages=4, max_context=64, launch_steps=2) as few:
        for _ in range(2):  # the second time behind what the prefix cache has kept
            assert ids_of(few.generate(prompts, asked(kinds, True, TOKENS), use_tqdm=False)) == wanted
        load = few.engine.engine.load()
        assert load.preemptions > 0 and load.decoded.drafted.accepted > 5


def test_what_has_no_such_layer_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheetahError, match="has no layer that drafts which is read here: those of Qwen3"):
        LLM("demo", device="emulator", quiet=True, speculative_config={"method": "mtp"})
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(
        {name: one for name, one in tensors.items() if not name.startswith("mtp.")}, tmp_path / "model.safetensors"
    )
    bare = open_checkpoint(tmp_path)
    with pytest.raises(CheetahError, match="has no tensors mtp.*, the layer that drafts: .* draft by method ngram"):
        open_mtp(bare)
    assert open_mtp(bare, str(folder)).config.drafter is not None
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, ::2].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheetahError, match=r"fc.weight is \[48, 48\], expected \[48, 96\] = \[hidden_size, 2 \* hid"):
        open_mtp(open_checkpoint(tmp_path))
