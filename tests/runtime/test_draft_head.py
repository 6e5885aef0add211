"""An EAGLE-3 head that drafts for the demo: the same answers with it, and just the drafts that it means."""

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
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from cheetah.errors import CheetahError
from cheetah.generate import generate_handoff
from cheetah.models.dense.reference import Reference
from cheetah.plan import Gpu
from cheetah.plan.kv.tables import TILE_WORDS, TileRecord, word
from cheetah.runtime import LLM
from cheetah.runtime.checkpoint.drafters import open_drafter
from cheetah.runtime.checkpoint.loading import Checkpoint, open_checkpoint
from cheetah.runtime.engine.completion import Completion
from tests.models.meaning_of_heads import Eagle3Reference, HeadReference
from tests.planted_text import planted
from tests.runtime.test_draft_model import asked, drafted_in, ids_of
from tests.runtime.test_speculation import ASKED, TEXT, opened
from tests.tiers import tiered

DRAFTS, KNOWN, ROUNDS = 4, 400, 3
TAPPED = (0, 1)
"""Layers of the demo whose outputs the head takes."""


def head_in(folder: Path) -> Path:
    """A head for the demo of random weights, but for the last matrix: that is fitted to the demo's answer to TEXT, so
    that most drafts of this are right and few of others."""
    model, draw = open_checkpoint("demo"), np.random.default_rng(3)
    hidden, ffn, rows = model.config.hidden_size, model.config.intermediate_size, model.config.query_rows
    shapes = {
        **{"self_attn.q_proj": (rows, 2 * hidden), "self_attn.o_proj": (hidden, rows)},
        **{f"self_attn.{part}_proj": (model.config.kv_rows, 2 * hidden) for part in "kv"},
        **{"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)},
        **{"fc": (hidden, len(TAPPED) * hidden), "lm_head": (KNOWN, hidden)},
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
    tensors = {name: draw.standard_normal(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    for part in "qkv":
        tensors[f"self_attn.{part}_proj"][:, :hidden] *= 0.05  # else the tokens say enough
    tensors |= {name: 1 + 0.1 * draw.standard_normal(hidden) for name in norms}
    whole = {name: name if name in ("fc", "lm_head", "norm") else f"midlayer.{name}" for name in tensors}
    stored = {f"{whole[name]}.weight": values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}
    config = {
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1},
        **{"hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": model.config.query_heads},
        **{"num_key_value_heads": model.config.kv_heads, "head_dim": model.config.head_dim, "vocab_size": 512},
        **{"draft_vocab_size": KNOWN, "rms_norm_eps": 1e-5},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [*TAPPED]},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    meaning = Reference(model.config, model.tensor)
    ids = Tokenizer.from_file(str(model.files["tokenizer.json"])).encode(TEXT).ids
    ids += meaning.generate(ids, 40)
    known = np.array(sorted([*dict.fromkeys([*ids, *range(511, 0, -1)])][:KNOWN]))
    for number in (0, 1):  # to be opened, the first time with any matrix
        save_file({**stored, "d2t": known - np.arange(KNOWN)}, folder / "model.safetensors")
        if not number:
            fitted = fitted_head(meaning_of(folder), ids, known)
            stored["lm_head.weight"] = np.ascontiguousarray(fitted.astype(ml_dtypes.bfloat16))
    return folder


def fitted_head(meaning: Meaning, ids: Sequence[int], known: NDArray[np.int64]) -> NDArray[np.float64]:
    """The matrix that finds the tokens behind these ids best, by least squares, from what the head makes behind each,
    by its features and behind up to DRAFTS - 1 tokens by its own states."""
    head, features = meaning.head, meaning.features(ids)
    head.head = np.eye(head.config.hidden_size, dtype=np.float32)
    states, wanted = list[Any](), list[int]()
    for place in range(1, len(ids) - 1):
        made = head.step(ids[place], features[place - 1])
        kept = head.kept()
        for following in range(place + 1, min(place + 1 + DRAFTS, len(ids))):
            states.append(made)
            wanted.append(int(np.searchsorted(known, ids[following])))
            made = head.step(ids[following])
        head.restore(kept)
    found, targets = np.stack(states).astype(np.float64), np.eye(len(known))[wanted]
    return 20 * np.linalg.solve(found.T @ found + 0.1 * np.eye(found.shape[1]), found.T @ targets).T


def meaning_of(folder: Path) -> Meaning:
    """The demo and its head."""
    model = open_checkpoint("demo")
    opened_head = open_drafter(str(folder), model)
    return Meaning(model, Eagle3Reference(opened_head.config, opened_head.tensor))


class Meaning:
    """A model and its head in float32."""

    def __init__(self, model: Checkpoint, head: HeadReference) -> None:
        self.model, self.head = Reference(model.config, model.tensor), head

    def features(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """What the tapped layers leave of each but the last, [ids, layers, hidden]."""
        self.model.reset()
        rows = []
        for token in ids[:-1]:
            self.model.step(token)
            assert self.head.config.drafter is not None
            rows.append(np.stack([self.model.left[layer] for layer in self.head.config.drafter.layers]))
        return np.stack(rows)

    def drafts(self, ids: Sequence[int], count: int) -> list[int]:
        """Greedy drafts behind these ids."""
        return self.head.draft(count, self.head.forward(ids[1:], self.features(ids))[-1])


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return head_in(tmp_path_factory.mktemp("heads") / "head")


@pytest.fixture(scope="module")
def meaning(head: Path) -> Meaning:
    return meaning_of(head)


@pytest.fixture(scope="module")
def llm(head: Path) -> Iterator[LLM]:
    with drafted_by(head) as made:
        yield made


def drafted_by(head: Path, **more: Any) -> LLM:
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS}
    made = opened(speculative_config=config, **more)
    scheduler = made.engine.engine._scheduler
    scheduler.round_time.steps = lambda wanted: min(ROUNDS, wanted)  # type: ignore[method-assign]
    # Which launch comes to be made without drafts, to be timed, must not decide which drafts are looked at.
    scheduler._pace.lacks_plain = lambda sequences: False  # type: ignore[method-assign]
    return made


def as_meant(found: Sequence[tuple[Sequence[int], Sequence[int]]], meaning: Meaning) -> float:
    """Which part of drafts, (ids before them, they), the head means too."""
    meant = [meaning.drafts(ids, len(drafts)) for ids, drafts in found]
    pairs = zip(found, meant, strict=True)
    same = [one == other for (_, drafts), wanted in pairs for one, other in zip(drafts, wanted, strict=False)]
    return sum(same) / len(same)


def drafts_of_rounds(
    llm: LLM, patch: pytest.MonkeyPatch, skipped: int = 1, prompt: Any = TEXT
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What is drafted for a prompt in rounds on the device, with the ids before it. skipped: ids that are never
    read."""
    places, launch = list[tuple[int, list[int]]](), llm.assembly.device.launch

    def noted(kernel: Any, arguments: Any) -> None:
        launch(kernel, arguments)
        if arguments.get("is_verified") == 0:
            length, _, given, total = arguments["draft_sequences"].download(np.int32, (4,)).tolist()
            tokens = arguments["draft_tokens"].download(np.int32, (total + 1,)).tolist()
            if "ahead" in arguments:  # all columns of a block see each other, and those of what became known
                assert arguments["draft_tiles"].download(np.int32, (TILE_WORDS,))[word(TileRecord, "new")] == total
            places.append((length + given + skipped, tokens[given + arguments.get("ahead", 0) :]))

    with patch.context() as patched:
        patched.setattr(llm.assembly.device, "launch", noted)
        (output,) = llm.generate([prompt], asked([{"temperature": 0.0}], True, 30), use_tqdm=False)
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    return [(tuple(ids[:known]), tuple(drafts)) for known, drafts in places]


@pytest.mark.slow
@pytest.mark.compiler
def test_it_drafts_what_it_means_of_the_models_hidden_states(
    llm: LLM, meaning: Meaning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind prompts read in steps, and behind rounds, some of whose drafts were right. Who wants logprobs has rounds
    that the host drives."""
    proposed, propose = list[tuple[Sequence[int], Sequence[int]]](), Completion.propose

    def noted(one: Completion, ids: Sequence[int]) -> None:
        proposed.append(([*one.ids], ids))
        propose(one, ids)

    monkeypatch.setattr(Completion, "propose", noted)
    (params,) = asked([{"temperature": 0.0, "logprobs": 1}], True, 20)
    drafted = drafted_in(llm, partial(llm.generate, [TEXT], params, use_tqdm=False))
    assert len(proposed) > 3 and drafted.accepted > 0.3 * drafted.tokens
    assert as_meant(proposed, meaning) > 0.9
    found = drafts_of_rounds(llm, monkeypatch)
    assert len(found) > 3 and as_meant(found, meaning) > 0.9


@pytest.mark.slow
@pytest.mark.compiler
def test_the_same_answers_in_company(llm: LLM) -> None:
    kinds = [kind for kind in ASKED if "structured_outputs" not in kind]
    prompts = [TEXT + " and" * (number % 3) for number in range(len(kinds))]
    plain = llm.generate(prompts, asked(kinds, False, 20), use_tqdm=False)
    found: list[Any] = []
    drafted = drafted_in(llm, lambda: found.extend(llm.generate(prompts, asked(kinds, True, 20), use_tqdm=False)))
    assert ids_of(found) == ids_of(plain)
    assert drafted.tokens > 20


@pytest.mark.slow
@pytest.mark.compiler
def test_pages_are_shared_copied_given_back_and_kept(llm: LLM, head: Path) -> None:
    """Of two answers to a prompt, of prompts that begin alike, and where pages run out: what was left of a token lies
    where its keys do."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.8, "seed": 3, "n": 2},
        {"temperature": 0.7, "seed": 5, "top_p": 0.9, "logprobs": 1},
        {"temperature": 0.0, "stop": ["the mat"]},
    ]
    prompts = [TEXT + " " * (number > 1) + " and" * (number > 2) for number in range(4)]
    wanted = ids_of(llm.generate(prompts, asked(kinds, False, 40), use_tqdm=False))
    with drafted_by(head, pool_pages=12, launch_steps=2, plan={"page_size": 16}) as few:
        assert ids_of(few.generate(prompts, asked(kinds, True, 40), use_tqdm=False)) == wanted
        load = few.engine.engine.load()
        assert load.preemptions > 0 and load.decoded.drafted.tokens > 40
        left = few.stream(prompts[0], asked([{"temperature": 1.0}], True, 60)[0])
        next(left)
        left.close()
        again = few.generate(prompts[1], asked(kinds, True, 40)[0])
        assert again.timings.cached_tokens > 0
        assert ids_of(llm.generate([prompts[1]], asked(kinds[:1], False, 40), use_tqdm=False)) == [
            [tuple(again.token_ids)]
        ]


def plant_between_launches(llm: LLM, monkeypatch: pytest.MonkeyPatch, drafter: str, right: str, wrong: str) -> None:
    """The kernel between two launches of a round gets a bug: its text has `wrong` in the place of `right`."""
    rounds = llm.engine.engine._scheduler._model.rounds  # type: ignore[union-attr]
    made = generate_handoff(Gpu(**llm.manifest.gpu), rounds.plan, drafter)  # type: ignore[arg-type,union-attr]
    changed = made.with_text(planted(made.text, right, wrong))
    monkeypatch.setattr(rounds, "_kernel", llm.assembly.device.load(changed.text, changed.manifest))


PLANTED = {
    "what the layers left of the token before": ("(own[4] + number_2)", "(own[4] + (number_2 ? number_2 - 1 : 0))"),
    "own states count as features": ("feature_steps[0] = steps;", "feature_steps[0] = 1;"),
}


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("bug", tiered(PLANTED, list(PLANTED)[1:]))
def test_bugs_between_two_launches_are_seen(
    llm: LLM, meaning: Meaning, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    plant_between_launches(llm, monkeypatch, "head", *PLANTED[bug])
    assert as_meant(drafts_of_rounds(llm, monkeypatch), meaning) < 0.8


def test_what_is_no_head_is_refused_by_name(head: Path) -> None:
    with pytest.raises(CheetahError, match="architectures is"):
        opened(speculative_config={"method": "eagle3", "model": "demo"})
    with pytest.raises(CheetahError, match="an EAGLE-3 head, which drafts for another model: name it in specul"):
        opened(speculative_config={"method": "draft_model", "model": str(head)})
    with pytest.raises(CheetahError, match="needs `model`"):
        opened(speculative_config={"method": "eagle3"})
