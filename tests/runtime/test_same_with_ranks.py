"""The same answers, to the bit, from one emulated GPU and from several: whatever requests ask for, and whatever
schedule the ranks follow."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import TinyWeights, write_checkpoint

from cheetah.errors import CheetahError
from cheetah.generate import generate_kernel
from cheetah.models.config import ModelConfig
from cheetah.models.gemma import Gemma2Config
from cheetah.models.gpt_oss import GptOssConfig
from cheetah.models.layer_kind import ClampedGate, DeltaNet, Routing
from cheetah.models.llama import LlamaConfig
from cheetah.models.olmo import Olmo3Config
from cheetah.models.qwen2 import Qwen2Config
from cheetah.models.qwen3 import Qwen3Config
from cheetah.models.qwen3_5 import Qwen35Config, Qwen35MoeConfig
from cheetah.models.qwen3_moe import Qwen3MoeConfig
from cheetah.models.rope import Rope
from cheetah.package import Generated
from cheetah.plan import PlanError
from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.assembly.options import GenerateKernel
from cheetah.runtime.device.emulator import EmulatorDevice
from cheetah.runtime.device.group import EmulatorGroup, GroupBuffer
from cheetah.runtime.engine.launches import Drafting, Part
from cheetah.runtime.sampling import Sampling
from tests.tiers import tiered

pytestmark = [pytest.mark.slow, pytest.mark.compiler]

SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 64, "layers": 2, "query_heads": 8, "kv_heads": 4, "head_dim": 64},
    **{"vocab_size": 300, "max_position_embeddings": 200},
}
"""Of o four M-tiles: with four ranks of two blocks half of all blocks have none. Of the head 19: the last rank has
fewer."""
STEPS = 8


@cache
def weights_of(config: ModelConfig) -> TinyWeights:
    return TinyWeights(config)  # type: ignore[arg-type]


def assembled(
    config: ModelConfig,
    ranks: int,
    scheduler: str = "round_robin",
    seed: int = 0,
    generate_kernel: GenerateKernel | None = None,
    gpu: str = "emulator-2",
    **plan: Any,
) -> Assembly:
    devices = [EmulatorDevice(scheduler=scheduler, seed=seed) for _ in range(ranks)]
    overrides = {"max_context": 80, "kv_chunk": 64, "max_steps": STEPS, **plan}
    return assemble(
        weights_of(config),
        device=devices[0] if ranks == 1 else EmulatorGroup(devices),
        gpu=gpu,
        tensor_parallel_size=ranks,
        quiet=True,
        overrides=overrides,
        generate_kernel=generate_kernel,
    )


Found = tuple[tuple[int, ...], NDArray[Any], NDArray[Any]]


def found_by(config: ModelConfig, ranks: int, *schedule: Any, **plan: Any) -> Found:
    """The tokens of two launches, the logits of the second where a step has one, and the cache of all KV heads."""
    with_device = assembled(config, ranks, *schedule, **plan)
    launcher, logits = with_device.launcher, with_device.logits_buffer()
    tokens: list[int] = []
    for inputs in ((5, 17, 250), None):
        given = inputs or (tokens[-1],)
        (result,) = launcher.launch_together(
            [Part(launcher.cache, given, STEPS, Sampling(temperature=0.7, seed=3))],
            logits=logits if launcher.tokens == 1 else None,
        )
        tokens += result.token_ids
    rows = logits.download(np.uint32, (STEPS, config.vocab_size))
    pool, shape = with_device.buffers["kv"], with_device.manifest.buffer("kv").shape
    kind = np.uint8 if launcher._plan.kv_dtype == "e4m3" else np.uint16
    parts = [one.download(kind, shape) for one in (pool.ranks if isinstance(pool, GroupBuffer) else [pool])]
    return tuple(tokens), rows, np.concatenate(parts, axis=3)


def require_equal(found: Found, wanted: Found) -> None:
    assert found[0] == wanted[0], "other tokens"
    assert np.array_equal(found[1], wanted[1]), "other logits"
    pages = slice(0, min(found[2].shape[1], wanted[2].shape[1]))
    assert np.array_equal(found[2][:, pages], wanted[2][:, pages]), "other keys or values"


SCHEDULES = [("round_robin", 0), *((name, seed) for name in ("random", "priority") for seed in range(8))]
ALWAYS = [(4, "random", 1), (4, "priority", 2)]
CASES = [(ranks, *schedule) for ranks in (2, 4) for schedule in SCHEDULES]


@cache
def by_one_gpu() -> Found:
    return found_by(LlamaConfig(**SIZES), 1)


@pytest.mark.parametrize(("ranks", "scheduler", "seed"), tiered(CASES, [case for case in CASES if case not in ALWAYS]))
def test_steps_of_several_ranks_are_those_of_one(ranks: int, scheduler: str, seed: int) -> None:
    require_equal(found_by(LlamaConfig(**SIZES), ranks, scheduler, seed), by_one_gpu())


@dataclass(frozen=True)
class Bug:
    """A change of all places of the text that match a pattern. told: what the emulator says of it. family: the one of
    FAMILIES that it is planted in, if not Llama."""

    name: str
    pattern: str
    instead: str
    told: str
    family: str = ""


BUGS = [
    Bug("waits in the scope of one GPU", r"wait_tagged_units_sys\(", "wait_tagged_units(", "in the scope of one GPU"),
    Bug("stores in the scope of one GPU", r"publish_tagged_sys\((?=.*peer)", "publish_tagged(", "is published to it"),
    Bug("peers do not hear of gated", r"publish_tagged_sys\(.*peer_1.*, pair, 60, .*;", ";", "deadlock"),
    Bug("candidates of the rank's own blocks", r"publish_flagged_release_sys\(.*peer_1.*;", ";", "deadlock"),
    Bug("every rank takes itself for the first", r"\brank \* ", "0 * ", "deadlock"),
    *(
        Bug(name, pattern, r"\1", "deadlock", "Gated DeltaNet, experts, one of which all tokens have")
        for name, pattern in (
            ("heads that remember lie over the first rank's", r"(value_head = .*) \+ rank\b[^;]*"),
            ("so do their squares", r"(place = .*head) \+ rank\b[^)]*(?=\) \* 8)"),
        )
    ),
]
TINY_BUG = "waits in the scope of one GPU"


@pytest.mark.parametrize("bug", tiered(BUGS, [bug for bug in BUGS if bug.name != TINY_BUG]), ids=lambda bug: bug.name)
def test_bugs_planted_in_the_step_of_two_ranks_are_found(bug: Bug) -> None:
    def generate(*arguments: Any, **plan: Any) -> Generated:
        made = generate_kernel(*arguments, **plan)
        text = re.sub(bug.pattern, bug.instead, made.text)
        assert text != made.text, "nothing was changed"
        return made.with_text(text)

    config, plan = FAMILIES.get(bug.family, (LlamaConfig(**SIZES), {}))
    with pytest.raises(CheetahError, match=bug.told):
        found_by(config, 2, generate_kernel=generate, **plan)


SHARED = {"two blocks": ("emulator", 512), "four blocks for down": ("emulator-8", 2048)}
"""Machines of four of which a rank has fewer M-tiles than blocks, with the rows of gate."""
NEAR = 0.01
"""Logits are up to 8: a part more or less changes them by tenths."""


def shared_found_by(name: str, ranks: int, *schedule: Any, **options: Any) -> Found:
    gpu, rows = SHARED[name]
    return found_by(
        LlamaConfig(**{**SIZES, "intermediate_size": rows}), ranks, *schedule, kv_chunk=0, gpu=gpu, **options
    )


def furthest(found: Found, wanted: Found) -> float:
    return float(np.abs(found[1].view(np.float32) - wanted[1].view(np.float32)).max())


@pytest.mark.parametrize("name", tiered(SHARED, ["four blocks for down"]))
def test_blocks_that_share_m_tiles_change_the_order_of_sums_alone(name: str) -> None:
    found, wanted = shared_found_by(name, 4, "random", 1), shared_found_by(name, 1)
    assert found[0] == wanted[0] and furthest(found, wanted) < NEAR


@pytest.mark.exhaustive
def test_a_part_that_nobody_adds_is_seen() -> None:
    def generate(*arguments: Any, **plan: Any) -> Generated:
        made = generate_kernel(*arguments, **plan)
        text = re.sub(r"total(_\d)? \+= bits_float\(.*\);", ";", made.text)
        assert text != made.text, "nothing was changed"
        return made.with_text(text)

    wanted = shared_found_by("two blocks", 1)
    assert furthest(shared_found_by("two blocks", 4, generate_kernel=generate), wanted) > 10 * NEAR


def family(name: str, **more: Any) -> ModelConfig:
    families: dict[str, type[ModelConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    return families[name](**{**SIZES, **more})


def hybrid(kind: type[ModelConfig], heads: DeltaNet, **more: Any) -> ModelConfig:
    """Two layers, of which the first remembers."""
    sizes = {**SIZES, "query_heads": 2 * heads.value_heads, "kv_heads": 2, **more}
    return kind(**sizes, rope=Rope(partial_rotary_factor=0.25), delta=heads, delta_layers=(0,))


FAMILIES = {
    "biases": (family("qwen2"), {}),
    "norms of heads, a cache in 8 bits": (family("qwen3"), {"kv_dtype": "e4m3"}),
    "norms behind, two windows, caps": (Gemma2Config(**SIZES, sliding_window=32), {}),
    "norms behind and over all heads, two windows": (
        Olmo3Config(**SIZES, sliding_window=32, layer_types=("sliding_attention", "full_attention")),
        {"tokens": 4, "batch": 2},
    ),
    "several columns": (family("llama"), {"tokens": 8, "batch": 2}),
    "narrow M-tiles": (family("llama", hidden_size=192, query_heads=8), {}),
    "Gated DeltaNet, three value heads a key head": (hybrid(Qwen35Config, DeltaNet(2, 6)), {}),
    "Gated DeltaNet, experts, one of which all tokens have": (
        hybrid(Qwen35MoeConfig, DeltaNet(2, 2), routing=Routing(5, 2, shared=64)),
        {"tokens": 2, "batch": 2, "consumer_warps": 2},
    ),
    "experts": (Qwen3MoeConfig(**SIZES, routing=Routing(9, 3)), {"tokens": 4, "batch": 2}),
    "experts with biases, sinks": (
        GptOssConfig(
            **SIZES,
            sliding_window=32,
            layer_types=("sliding_attention", "full_attention"),
            routing=Routing(9, 3, biases=True),
            clamped_gate=ClampedGate(1.702, 1.25),
        ),
        {"tokens": 4, "batch": 2},
    ),
}
ALWAYS_TRIED = (
    *("norms behind and over all heads, two windows", "experts with biases, sinks"),
    "Gated DeltaNet, experts, one of which all tokens have",
)


@pytest.mark.parametrize("name", tiered(FAMILIES, [name for name in FAMILIES if name not in ALWAYS_TRIED]))
def test_so_are_those_of_families_and_plans(name: str) -> None:
    config, plan = FAMILIES[name]
    require_equal(found_by(config, 2, "random", 1, **plan), found_by(config, 1, **plan))


def drafted_by(ranks: int) -> tuple[Any, ...]:
    """A launch whose drafts are half of them right, then looked up, and what came of them."""
    made = assembled(LlamaConfig(**SIZES), ranks, "random", 1, batch=1, tokens=4, drafts=3, max_steps=16)
    launcher, prompt = made.launcher, (5, 17, 250, 5, 17)
    plain = launcher.launch_together([Part(launcher.cache, prompt, 12)])[0].token_ids
    launcher.cache.clear()
    drafts = [token if number % 2 else 7 for number, token in enumerate(plain)]
    drafting = Drafting(16, drafts[:4], (1, 2))
    part = Part(launcher.cache, prompt, 20, Sampling(), 4, known=prompt, prompt=len(prompt), drafting=drafting)
    (result,) = launcher.launch_together([part])
    return plain, result.token_ids, result.steps, result.drafted


@pytest.mark.exhaustive
def test_so_are_tokens_that_were_drafted() -> None:
    found = drafted_by(2)
    assert found == drafted_by(1) and found[2] < len(found[1])


ASKED = [
    SamplingParams(max_tokens=6, temperature=0.0, logprobs=3),
    SamplingParams(max_tokens=6, temperature=1.1, top_k=40, top_p=0.9, min_p=0.01, seed=5),
    SamplingParams(
        max_tokens=6,
        temperature=3.0,
        top_p=0.95,
        seed=6,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        allowed_token_ids=list(range(140, 180)),
    ),
    SamplingParams(max_tokens=6, temperature=0.0, logit_bias={299: 50.0}, stop_token_ids=[299]),
]
PROMPTS = [[5, 17, 250, *range(30 + number, 50)] for number in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ranks"), weights_of(LlamaConfig(**SIZES)))


def answers(folder: Path, ranks: int) -> list[Any]:
    """What is asked of an `LLM`: requests side by side, again with what is cached of them, and scores."""
    options: dict[str, Any] = {"max_context": 80, "kv_chunk": 64, "batch": 2, "tokenizer": False, "quiet": True}
    with LLM(folder, device="emulator", gpu="emulator-2", tensor_parallel_size=ranks, **options) as llm:
        found: list[Any] = []
        for _ in range(2):
            for asked in ASKED:
                outputs = [one.outputs[0] for one in llm.generate(PROMPTS, asked)]
                found += [(one.token_ids, one.finish_reason, one.logprobs) for one in outputs]
        return [*found, llm.score(PROMPTS[0]).tobytes()]


def test_so_are_the_answers_of_an_llm_whatever_is_asked(folder: Path) -> None:
    assert answers(folder, 2) == answers(folder, 1)


def drafted_answer(folder: Path, ranks: int) -> tuple[Any, ...]:
    """Of an `LLM` that drafts, in launches of one step: else how many there are follows from the clock, and with them
    where drafts are cut and whether they are worth their time."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    options: dict[str, Any] = {"max_context": 80, "kv_chunk": 64, "batch": 2, "tokenizer": False, "launch_steps": 1}
    asked = SamplingParams(max_tokens=20, temperature=30.0, allowed_token_ids=[5, 9, 17, 250], seed=3)
    with LLM(
        folder,
        device="emulator",
        gpu="emulator-2",
        tensor_parallel_size=ranks,
        speculative_config=config,
        quiet=True,
        **options,
    ) as llm:
        found = llm.generate([5, 17, 250, 5, 17, 250, 5], asked)
        return found.token_ids, llm.engine.engine.load().decoded.drafted


@pytest.mark.exhaustive
def test_so_are_those_of_an_llm_that_drafts(folder: Path) -> None:
    tokens, drafted = drafted_answer(folder, 2)
    assert (tokens, drafted) == drafted_answer(folder, 1) and drafted.accepted > 3


def test_what_cannot_be_shared_is_refused_before_anything_is_loaded(folder: Path) -> None:
    with pytest.raises(PlanError, match="norms over all heads add up each key head once, and 4 are on 8 GPUs"):
        assembled(Olmo3Config(**SIZES), 8)
    with pytest.raises(
        PlanError, match="2 key heads of Gated DeltaNet cannot be dealt evenly to 4 GPUs: use one of 1, 2"
    ):
        assembled(hybrid(Qwen35Config, DeltaNet(2, 6)), 4)
    with pytest.raises(PlanError, match="4 M-tiles of o cannot be dealt evenly to 8 GPUs: use one of 1, 2, 4"):
        assembled(LlamaConfig(**SIZES), 8)
    with pytest.raises(PlanError, match="sync is 'barrier' with 2 GPUs"):
        assembled(LlamaConfig(**SIZES), 2, sync="barrier")
    with pytest.raises(CheetahError, match="'emulator-2x2' is several GPUs: say how many by tensor_parallel_size"):
        LLM(folder, device="emulator", gpu="emulator-2x2", quiet=True, tokenizer=False)
    with pytest.raises(CheetahError, match="tensor_parallel_size is 3: give one of 1, 2, 4, 8"):
        LLM(folder, device="emulator", tensor_parallel_size=3)
