"""Many tokens with drafts and without: whether all are the same, whatever is asked and whoever runs beside it.

    python -m benchmarks.identical random:llama-3.2-1b random:llama-3.2-1b@int4-g128 --tokens 100000

Every answer is made first without drafts, eight together, then with drafts, 1 to 8 together. What is drafted is right
now and then: a request's `prediction` is the first answer with a wrong token in every so many, and some requests may
have few tokens alone, so that what is looked up comes true. With `--draft-model` another model drafts instead, a head
(`random:eagle3`), the layer that the model brings (`mtp`) or a drafter of blocks (`random:dspark`), whether it pays or
not: it draws with the requests' own noise, which decides most where it is warm. Weights may be random ones: nothing
here is a speed. A line a model and batch; ends with 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.engine.drafting import Drafted
from cheetah.runtime.speculation import drafting_by

BATCHES = range(1, 9)
PROMPT_TOKENS = (5, 40, 150, 17, 90)
WRONG_EVERY = (2, 5, 11, 29, 1000)
"""One of the predicted tokens is wrong in every so many."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 1.5, "few": 3},
    {"temperature": 0.0, "few": 9, "repetition_penalty": 1.05},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.7, "logit_bias": {7: 3.0, 8: 3.0}, "bans": True},
    {"temperature": 2.0, "few": 5, "stops": True},
    {"temperature": 6.0},
    {"temperature": 20.0, "top_p": 0.95, "frequency_penalty": 0.2},
)


@dataclass(frozen=True)
class Asked:
    """A request, and the answer that it has without drafts."""

    prompt: list[int]
    params: SamplingParams
    answer: tuple[int, ...] = ()
    logprobs: Any = None

    def predicted(self, vocab: int, every: int) -> SamplingParams:
        """The same with its answer as what it is thought to be, a token wrong in every so many."""
        wrong = [(token + 1) % vocab if place % every == 0 else token for place, token in enumerate(self.answer)]
        return replace(self.params, prediction=wrong)


@dataclass(frozen=True)
class Compared:
    """Answers of a batch: tokens of all, decode steps, what came of drafts, and how many answers are others."""

    model: str
    batch: int
    tokens: int
    steps: int
    drafted: Drafted
    differing: int


def requests(vocab: int, tokens: int, seed: int) -> Iterator[Asked]:
    """Without end: prompts and options in turn, each with a seed of its own."""
    random = np.random.default_rng(seed)
    for number in count():
        options, length = dict(OPTIONS[number % len(OPTIONS)]), PROMPT_TOKENS[number // 3 % len(PROMPT_TOKENS)]
        prompt = random.integers(0, vocab, length).tolist()
        few = random.integers(0, vocab, options.pop("few", 0)).tolist()
        stops = few[: 1 if options.pop("stops", False) else 0]
        bans = random.integers(0, vocab, 20).tolist() if options.pop("bans", False) else []
        biases = {**options.pop("logit_bias", {}), **{token: -float("inf") for token in bans}}
        chosen = {"logit_bias": biases or None, "allowed_token_ids": few or None, "stop_token_ids": stops}
        # The first prompt of each kind begins like the one before, so that the prefix cache has some of it.
        yield Asked(
            [*range(1, 33), *prompt] if number % 2 else prompt,
            SamplingParams(
                max_tokens=tokens,
                min_tokens=tokens // 3 if stops else 0,
                seed=seed << 32 | number,
                ignore_eos=True,
                **chosen,
                **options,
            ),
        )


def answered(llm: LLM, asked: Sequence[Asked], params: Sequence[SamplingParams], together: int) -> list[Any]:
    """The outputs, so many prompts at a time."""
    found = []
    for first in range(0, len(asked), together):
        batch = slice(first, first + together)
        prompts = [one.prompt for one in asked[batch]]
        found += llm.generate(prompts, list(params[batch]), use_tqdm=False)
    return found


def compared(llm: LLM, name: str, tokens: int, answer_tokens: int, seed: int) -> Iterator[Compared]:
    """Of each batch, with its share of the tokens: as much as it has sequences."""
    vocab = llm.config.vocab_size
    source = requests(vocab, answer_tokens, seed)
    for batch in BATCHES:
        asked_for = max(1, round(tokens * batch / sum(BATCHES) / answer_tokens))
        # Those that want logprobs together: beside one of them nobody has rounds on the device.
        asked = sorted(islice(source, asked_for), key=lambda one: one.params.logprobs is not None)
        plain = answered(llm, asked, [replace(one.params, speculation=False) for one in asked], BATCHES[-1])
        known = [
            replace(one, answer=output.token_ids, logprobs=output.outputs[0].logprobs)
            for one, output in zip(asked, plain, strict=True)
        ]
        before = llm.engine.engine.load().decoded
        every = [WRONG_EVERY[number % len(WRONG_EVERY)] for number in range(asked_for)]
        params = [one.predicted(vocab, wrong) for one, wrong in zip(known, every, strict=True)]
        found = answered(llm, known, params, batch)
        after = llm.engine.engine.load().decoded
        differing = sum(
            (output.token_ids, output.outputs[0].logprobs) != (one.answer, one.logprobs)
            for one, output in zip(known, found, strict=True)
        )
        drafted = Drafted(
            after.drafted.steps - before.drafted.steps,
            after.drafted.tokens - before.drafted.tokens,
            (after.drafted.accepted - before.drafted.accepted,),
        )
        made = sum(len(output.token_ids) for output in found)
        yield Compared(name, batch, made, after.steps - before.steps, drafted, differing)


def line_of(one: Compared) -> str:
    share = f"{one.drafted.accepted} of {one.drafted.tokens} drafts right"
    verdict = "identical: yes" if not one.differing else f"identical: NO, {one.differing} answers differ"
    return f"{one.model}, {one.batch} together: {one.tokens} tokens, {one.steps} steps, {share}; {verdict}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare each model, print a line a batch; 1 where an answer differs."""
    options = parser().parse_args(arguments)
    differing = 0
    for model in options.models:
        config = drafting_by(options.draft_model)
        if options.draft_model is None:
            config["prompt_lookup_min"] = 1
        with LLM(
            model,
            device=options.device,
            speculative_config=config,
            max_context=options.max_context,
            tokenizer=False,
            quiet=True,
        ) as llm:
            if options.draft_model is not None:
                pace = llm.engine.engine._scheduler._pace
                pace.break_even = lambda sequences: 0.0  # type: ignore[method-assign]
                pace.lacks_plain = lambda sequences: False  # type: ignore[method-assign]
            for one in compared(llm, model, options.tokens, options.answer_tokens, options.seed):
                differing += one.differing
                print(line_of(one), flush=True)
                if options.json is not None:
                    record = {**vars(one), "drafted": one.drafted.tokens, "accepted": one.drafted.accepted}
                    with options.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(record) + "\n")
    return int(differing > 0)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.identical", description=(__doc__ or "").splitlines()[0])
    made.add_argument("models", nargs="+", help="random:PRESET, a folder or demo, one after the other")
    made.add_argument("--draft-model", help="drafts are this model's; nothing is looked up then")
    made.add_argument("--tokens", type=int, default=100_000, help="of all answers of a model")
    made.add_argument("--answer-tokens", type=int, default=256, help="of an answer, at most")
    made.add_argument("--seed", type=int, default=0, help="of prompts and of what they ask for")
    made.add_argument("--max-context", type=int, default=1024, help="tokens of a sequence")
    made.add_argument("--json", type=Path, help="append the records here")
    made.add_argument("--device", default="cuda", help="cuda, or emulator to try it")
    return made


if __name__ == "__main__":
    sys.exit(main())
