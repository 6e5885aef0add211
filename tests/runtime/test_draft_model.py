"""Another model that drafts: the same answers with it, how many of its drafts are right, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from cheetah.errors import CheetahError
from cheetah.generate import generate_handoff
from cheetah.plan import Gpu
from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.assembly.memory import MemoryShortage
from cheetah.runtime.checkpoint.loading import DEMO_FOLDER
from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.drafting import Drafted, SeenWorth, Speculation
from cheetah.runtime.outputs import RequestOutput
from tests.planted_text import planted
from tests.runtime.test_speculation import ASKED, TEXT, opened
from tests.tiers import tiered

DRAFTS, ROUNDS = 4, 3


def edited(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """The demo in a folder of its own, with another object in one of its files."""
    copytree(DEMO_FOLDER, folder)
    found = json.loads((folder / name).read_text())
    change(found)
    (folder / name).write_text(json.dumps(found))
    return folder


def first_layers(folder: Path, count: int) -> Path:
    """The demo's first layers alone, with its norm and head: a model that often makes the same token."""
    edited(folder, "config.json", lambda config: config.update(num_hidden_layers=count))
    file = folder / "model.safetensors"
    left = {name: own for name, own in load_file(file).items() if not name.startswith(f"model.layers.{count}.")}
    save_file(left, file)
    return folder


def drafted_by(model: str | Path, **more: Any) -> LLM:
    made = opened(speculative_config={"model": str(model), "num_speculative_tokens": DRAFTS}, **more)
    made.engine.engine._scheduler.round_time.steps = lambda wanted: min(ROUNDS, wanted)  # type: ignore[method-assign]
    return made


@pytest.fixture(scope="module")
def own() -> Iterator[LLM]:
    """The demo, which drafts for itself."""
    with drafted_by("demo") as made:
        yield made


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The demo with few pages, and two of its three layers as what drafts."""
    folder = first_layers(tmp_path_factory.mktemp("models") / "two", 2)
    with drafted_by(folder, pool_pages=12, launch_steps=2, plan={"page_size": 16}) as made:
        yield made


def asked(kinds: Sequence[dict[str, Any]], speculation: bool, tokens: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=tokens, speculation=speculation, **kind) for kind in kinds]


def ids_of(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[tuple(one.token_ids) for one in output.outputs] for output in outputs]


def drafted_in(llm: LLM, work: Callable[[], object]) -> Drafted:
    """What came of drafts meanwhile: steps, tokens, how many were right."""
    before = llm.engine.engine.load().decoded.drafted
    work()
    after = llm.engine.engine.load().decoded.drafted
    return Drafted(after.steps - before.steps, after.tokens - before.tokens, (after.accepted - before.accepted,))


@pytest.mark.slow
@pytest.mark.compiler
def test_the_same_answers_in_company_and_all_drafts_right_of_a_model_that_is_the_same(own: LLM) -> None:
    """Whoever needs no grammar. All that is asked is asked of the drafts too, with the same noise."""
    kinds = [kind for kind in ASKED if "structured_outputs" not in kind]
    prompts = [TEXT + " and" * (number % 3) for number in range(len(kinds))]
    plain = own.generate(prompts, asked(kinds, False, 20), use_tqdm=False)
    found: list[RequestOutput] = []
    drafted = drafted_in(own, lambda: found.extend(own.generate(prompts, asked(kinds, True, 20), use_tqdm=False)))
    assert ids_of(found) == ids_of(plain)
    assert drafted.tokens > 60 and drafted.accepted >= 0.97 * drafted.tokens
    assert all(one.timings.drafted_tokens for output in found for one in output.outputs)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("kind", [ASKED[1], ASKED[6], {"temperature": 0.9, "seed": 5, "logprobs": 2}])
def test_the_same_answer_alone(own: LLM, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]) -> None:
    proposed, propose = list[Sequence[int]](), Completion.propose
    monkeypatch.setattr(Completion, "propose", lambda one, ids: (proposed.append(ids), propose(one, ids))[1])
    (wanted,) = own.generate([TEXT], asked([kind], False, 21), use_tqdm=False)
    found: list[RequestOutput] = []
    drafted = drafted_in(own, lambda: found.extend(own.generate([TEXT], asked([kind], True, 21), use_tqdm=False)))
    assert ids_of(found) == ids_of([wanted])
    assert found[0].outputs[0].logprobs == wanted.outputs[0].logprobs
    assert drafted.accepted > 4 and (drafted.accepted == drafted.tokens or "structured_outputs" in kind)
    assert all(proposed), "what is read by a pass is no draft, of no token"


@pytest.mark.slow
@pytest.mark.compiler
def test_a_smaller_model_drafts_and_pages_run_out(own: LLM, few: LLM) -> None:
    """Some drafts are right. Who gives pages back reads again, and is read again."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.4},
        {"temperature": 0.7, "seed": 5, "top_p": 0.9},
        {"temperature": 0.0, "stop": ["the mat"]},
    ]
    prompts = [TEXT + " " * (number > 1) + " and" * (number > 2) for number in range(4)]
    wanted = ids_of(own.generate(prompts, asked(kinds, False, 44), use_tqdm=False))
    assert ids_of(few.generate(prompts, asked(kinds, True, 44), use_tqdm=False)) == wanted
    load = few.engine.engine.load()
    assert load.preemptions > 0
    assert 0.3 * load.decoded.drafted.tokens < load.decoded.drafted.accepted < 0.95 * load.decoded.drafted.tokens
    left = few.stream(prompts[0], SamplingParams(max_tokens=60, temperature=1.0))
    next(left)
    left.close()
    again = few.generate(prompts[1], asked(kinds, True, 44)[1])
    assert [tuple(again.token_ids)] == wanted[1] and again.timings.cached_tokens > 0


PLANTED = {
    "tiles grow by a token a round": ("record[4] = record[4] + reached;", "record[4] = record[4] + 1;"),
    "the last draft counts as read": ("uint32_t right = min(drafted, reached);", "uint32_t right = reached;"),
}


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("bug", tiered(PLANTED, list(PLANTED)[1:]))
def test_bugs_between_two_launches_are_seen(own: LLM, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """In the answers, or in how many drafts are right."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7, "seed": 2}]
    texts = [TEXT + " sat on the hat", "a dog ran to the house and the cat sat on the mat"]

    def worth() -> tuple[float, list[list[tuple[int, ...]]]]:
        found: list[RequestOutput] = []
        drafted = drafted_in(own, lambda: found.extend(own.generate(texts, params, use_tqdm=False)))
        return drafted.accepted / drafted.tokens, ids_of(found)

    own.generate(texts[1], asked(kinds, True, 40)[1])  # its pages have other keys by now
    params = asked(kinds, True, 24)
    rounds = own.engine.engine._scheduler._model.rounds
    right = generate_handoff(Gpu(**own.manifest.gpu), rounds.plan)
    wrong = right.with_text(planted(right.text, *PLANTED[bug]))
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "_kernel", own.assembly.device.load(wrong.text, wrong.manifest))
        found, made = worth()
    known, wanted = worth()
    assert made != wanted or found < 0.95 * known


def test_what_was_seen_of_drafts_says_whether_they_pay() -> None:
    worth = Speculation(4).new_worth(())
    assert isinstance(worth, SeenWorth) and worth.length == 3.0
    for _ in range(40):
        worth.note([1, 2], 1, 1)
    assert worth.length < 1.02
    for _ in range(15):
        worth.note([1, 2], 30, None)
    assert worth.length < 1.02
    worth.note([1, 2], 30, None)
    assert worth.length == 3.0, "they are tried again"


def test_what_cannot_draft_is_refused_by_name(tmp_path: Path) -> None:
    def other(config: dict[str, Any]) -> None:
        vocab = config["model"]["vocab"]
        one, two = list(vocab)[70], list(vocab)[90]
        vocab[one], vocab[two] = vocab[two], vocab[one]

    swapped = edited(tmp_path / "swapped", "tokenizer.json", other)
    with pytest.raises(CheetahError, match="has another tokenizer than demo: token 70 is "):
        drafted_by(swapped)
    short = edited(tmp_path / "short", "config.json", lambda config: config.update(max_position_embeddings=64))
    with pytest.raises(CheetahError, match="has room for 64 tokens, demo for 192: give max_context=64"):
        drafted_by(short)
    with pytest.raises(CheetahError, match=r"remembers all tokens in states \(Gated DeltaNet\)"):
        drafted_by("random:qwen3.5-0.8b")
    with pytest.raises(CheetahError, match="draft_tensor_parallel_size is 2: what drafts is shared out"):
        opened(speculative_config={"model": "demo", "draft_tensor_parallel_size": 2})
    with pytest.raises(MemoryShortage, match="draft model"):
        drafted_by("demo", gpu_memory_utilization=1e-5, prompt_passes=False)
