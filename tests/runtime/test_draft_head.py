"""An EAGLE-3 head that drafts for the demo: the same answers with it, and just the drafts that it means."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from cheetah.errors import CheetahError
from cheetah.models.dense.reference import Reference
from cheetah.models.eagle3.reference import Eagle3Reference
from cheetah.runtime import LLM
from cheetah.runtime.checkpoint.drafters import open_drafter
from cheetah.runtime.checkpoint.loading import Checkpoint, open_checkpoint
from cheetah.runtime.engine.completion import Completion
from tests.runtime.test_draft_model import asked, drafted_in, ids_of
from tests.runtime.test_speculation import ASKED, TEXT, opened

DRAFTS, KNOWN = 4, 400
TAPPED = (0, 1)
"""Layers of the demo whose outputs the head takes."""


def head_in(folder: Path) -> Path:
    """A head of random weights: the hidden state that it makes is near the demo's own at the second tap, which its own
    head multiplies, so that some drafts are right."""
    model, draw = open_checkpoint("demo"), np.random.default_rng(3)
    hidden, ffn, rows = model.config.hidden_size, model.config.intermediate_size, model.config.query_rows
    shapes = {
        **{"self_attn.q_proj": (rows, 2 * hidden), "self_attn.o_proj": (hidden, rows)},
        **{f"self_attn.{part}_proj": (model.config.kv_rows, 2 * hidden) for part in "kv"},
        **{"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)},
    }
    tensors = {f"midlayer.{name}.weight": draw.standard_normal(shape) * 0.03 for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": 1 + 0.1 * draw.standard_normal(hidden) for name in norms}
    known = np.sort(draw.permutation(model.config.vocab_size)[:KNOWN])
    rows_of_head = model.tensor("model.embed_tokens.weight").view(ml_dtypes.bfloat16)[known].astype(np.float32)
    tensors |= {"fc.weight": np.concatenate([0.1 * np.eye(hidden), np.eye(hidden)], 1), "lm_head.weight": rows_of_head}
    stored = {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}
    folder.mkdir()
    save_file({**stored, "d2t": known - np.arange(KNOWN)}, folder / "model.safetensors")
    config = {
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1},
        **{"hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": model.config.query_heads},
        **{"num_key_value_heads": model.config.kv_heads, "head_dim": model.config.head_dim, "vocab_size": 512},
        **{"draft_vocab_size": KNOWN, "rms_norm_eps": 1e-5},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [*TAPPED]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return head_in(tmp_path_factory.mktemp("heads") / "head")


@pytest.fixture(scope="module")
def llm(head: Path) -> Iterator[LLM]:
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS}
    with opened(speculative_config=config) as made:
        yield made


class Meaning:
    """The demo and its head in float32."""

    def __init__(self, folder: Path) -> None:
        model: Checkpoint = open_checkpoint("demo")
        opened_head = open_drafter(str(folder), model)
        self.model = Reference(model.config, model.tensor)
        self.head = Eagle3Reference(opened_head.config, opened_head.tensor)

    def drafts(self, ids: Sequence[int], count: int) -> list[int]:
        """Greedy drafts behind these ids."""
        self.model.reset()
        features = []
        for token in ids[:-1]:
            self.model.step(token)
            features.append(np.stack([self.model.left[layer] for layer in TAPPED]))
        return self.head.draft(count, self.head.forward(ids[1:], np.stack(features))[-1])


@pytest.mark.slow
@pytest.mark.compiler
def test_it_drafts_what_it_means_of_the_models_hidden_states(
    llm: LLM, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind prompts read in steps, and behind rounds, some of whose drafts were right."""
    proposed, propose = list[tuple[list[int], list[int]]](), Completion.propose

    def noted(one: Completion, ids: Sequence[int]) -> None:
        proposed.append(([*one.ids], [*ids]))
        propose(one, ids)

    monkeypatch.setattr(Completion, "propose", noted)
    (params,) = asked([{"temperature": 0.0}], True, 16)
    llm.generate([TEXT], params, use_tqdm=False)
    meaning = Meaning(head)
    assert len(proposed) > 3
    wanted = [meaning.drafts(ids, len(found)) for ids, found in proposed]
    alike = sum(one == other for (_, one), other in zip(proposed, wanted, strict=True))
    assert alike >= 0.75 * len(proposed), list(zip(proposed, wanted, strict=True))


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
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.8, "seed": 3, "n": 2},
        {"temperature": 0.7, "seed": 5, "top_p": 0.9, "logprobs": 1},
        {"temperature": 0.0, "stop": ["the mat"]},
    ]
    prompts = [TEXT + " " * (number > 1) + " and" * (number > 2) for number in range(4)]
    wanted = ids_of(llm.generate(prompts, asked(kinds, False, 40), use_tqdm=False))
    with opened(speculative_config=config, pool_pages=12, launch_steps=2, plan={"page_size": 16}) as few:
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


def test_what_is_no_head_is_refused_by_name(head: Path) -> None:
    with pytest.raises(CheetahError, match="architectures is"):
        opened(speculative_config={"method": "eagle3", "model": "demo"})
    with pytest.raises(CheetahError, match="an EAGLE-3 head, which drafts for another model: name it in specul"):
        opened(speculative_config={"method": "draft_model", "model": str(head)})
    with pytest.raises(CheetahError, match="needs `model`"):
        opened(speculative_config={"method": "eagle3"})
