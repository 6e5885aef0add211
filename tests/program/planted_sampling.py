"""Bugs planted in what sequences ask of their sampling, and in the words between host and kernel.

All of them stand in one kernel, so that one is compiled: where a bug changes the text it says both what is right and
what is wrong, and the variable of `joined` says which bug there is. Two detectors: every token against numpy's, for
sequences that ask for different things, and what the host reads and orders while launches run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cheetah.generate import generate_kernel
from cheetah.models.sampling import Filters, Penalties
from cheetah.package import Generated
from cheetah.runtime.engine.launcher import Part, Sampling
from tests.meant import drawn
from tests.program.joined import SELECTOR
from tests.program.rig import Rig, Session, model, random_weights


@dataclass(frozen=True)
class SamplingBug:
    """right: a pattern of an expression of the kernel's text, wrong: what stands there instead; without it, `right` is
    of a statement that is left out. found_by: which of `DETECTORS`."""

    name: str
    right: str
    wrong: str = ""
    found_by: str = "tokens"

    def planted(self, text: str, number: int) -> str:
        """The text with both; AssertionError where nothing is as `right` has it."""
        text, count = re.subn(self.right, lambda match: self._both(match, number), text)
        assert count, f"{self.name}: nothing matches {self.right!r}"
        return text

    def _both(self, match: re.Match[str], number: int) -> str:
        if not self.wrong:
            return f"if (cheetah_planted != {number}) {{ {match[0]} }}"
        return f"(cheetah_planted == {number} ? ({match.expand(self.wrong)}) : ({match[0]}))"


MEET = r"named_barrier\(1, 128\);"
BUGS = (
    # -- what is asked of logits
    SamplingBug("the mask of the token before", r"token % 32(?=\) & 1\))", "(token + 31) % 32"),
    SamplingBug(
        "everybody has the first slot's biases", r"(?<=logit_bias \+ )\(load_[^;]* \* VOCAB \+ token\)", "token"
    ),
    SamplingBug("negative logits are divided too", r"adjusted > 0.0f(?= \? quotient)", "true"),
    SamplingBug("a token of the prompt counts as made", r"found & \(PROMPT_TOKEN - 1\)(?=;)", "found != 0"),
    SamplingBug("frequency is taken off once", r"\(float\)\(count\)(?=;)", "1.0f"),
    SamplingBug("presence is taken off from the second time on", r"(?<=if \()count != 0", "count > 1"),
    SamplingBug("counted by every block", r"token / 16 % BLOCKS == \(block \+ LM_HEAD_START\) % BLOCKS", "true"),
    # -- short lists
    SamplingBug("noise is not written down", r"(?<=weighed\[place \+ 1\] = )noisy", "scaled"),
    SamplingBug("a list that left nothing out", r"(?<=words\[7\] = float_bits\()left_out", "-infinity()"),
    SamplingBug("a list weighs what one lane does", r"warp_sum_f32\(part\)(?=;\n +best_of_warp)", "part"),
    SamplingBug(
        "a lane's second was not left out",
        r"nearest.left_out < nearest.first \? nearest.first : nearest.left_out",
        "nearest.left_out",
    ),
    SamplingBug("the candidate of another block", r"m_tile % BLOCKS(?=;\n)", "(m_tile + 1) % BLOCKS"),
    SamplingBug("everything listed is all there is", r"highest - left_out(?= :)", "infinity()"),
    SamplingBug("one token more than top_k", r"(?<=else if \()count < most", "count <= most"),
    SamplingBug("top_p of all, not of the top_k", r"(?<=    least = )top(?=;)", "whole"),
    SamplingBug("min_p beyond the lists", r"known < reach(?= &&)", "false"),
    SamplingBug("the same candidate again", r"highest - \(\(float2\*\)[^;]*\[following\]\.x", "limit"),
    # -- rounds
    SamplingBug(
        "a pivot counts itself", r"distance < tested\[index\](?=\))", "distance <= tested[index] + (index == 2) * 0.5f"
    ),
    SamplingBug("the bracket's end is not brought nearer", r"holds_all(?= \? \(above)", "false"),
    SamplingBug("a candidate beyond the limit", r"candidate >= limit(?=\))", "false"),
    SamplingBug("top_p of the least that it may be", r"(?<=top_p \* )most(?=\);\n +limit)", "least"),
    # -- words of the host
    SamplingBug("a token for the step before", r"(?<=emitted \+ )place(?=, sampled)", "place - 1", "host"),
    SamplingBug("tokens are not given as they are made", r"store_relaxed_u32_sys\(emitted[^;]*;", "", "host"),
    SamplingBug("an order of any launch", r"answer == epoch", "answer != 0", "host"),
    SamplingBug("the order of the sequence beside", r"(?<=cancelled \+ )sequence", "(sequence + 1) % 3", "host"),
    SamplingBug("an order is not passed on", r"(?<=bool is_cancelled = )block == 0", "false", "host"),
    SamplingBug("a sequence goes on that was to end", r"sampled == CANCELLED_TOKEN(?=\))", "false", "host"),
)


# -- the kernel and its detectors --------------------------------------------------------------------------------------

VOCAB = 300
CONFIG = model(16, 16, 1, 1, 1, 64, VOCAB)
STEPS = 16
PROMPT = (3, 31)
FEW = {"allowed": (3, 31, 32, 64, 299)}
LOW = {"bias": tuple((token, -20.0) for token in FEW["allowed"])}
WARM = {"temperature": 1.5}
HOT = {"temperature": 8.0}
ASKED: tuple[tuple[dict[str, Any], ...], ...] = (
    (
        {"temperature": 100.0, "filters": Filters(50, 0.5, 0.001)},
        {**FEW, "penalties": Penalties(frequency=0.4)},
        {**WARM, "bias": ((7, 3.0),), "penalties": Penalties(1.3, 0.5, 0.25), "filters": Filters(40, 0.9, 0.01)},
        {**HOT, "filters": Filters(6, 0.3)},
    ),
    (
        {**WARM, "filters": Filters(top_p=0.3)},
        {**FEW, **LOW, "penalties": Penalties(repetition=1.7)},
        {"bias": ((7, 3.0), (299, 5.5), (0, -100.0))},
        {**FEW, "temperature": 0.3, "penalties": Penalties(presence=2.0)},
    ),
    (
        {**HOT, "filters": Filters(top_k=1)},
        {**WARM, "filters": Filters(min_p=0.3)},
        {**HOT, **FEW},
        {"temperature": 0.2, "banned": tuple(range(0, 290))},
    ),
)
"""What the sequences of each launch ask for."""


@cache
def planted_rig() -> Rig:
    """A kernel with all bugs in it, none of them on."""

    def generate(*arguments: Any, **named: Any) -> Generated:
        generated = generate_kernel(*arguments, **named)
        head, end, body = generated.text.partition("#endif\n")
        for number, bug in enumerate(BUGS, 1):
            body = bug.planted(body, number)
        text = head + end + SELECTOR + body
        return generated.with_text(text)

    return Rig(random_weights(CONFIG), blocks=3, batch=4, consumer_warps=4, generate=generate)


def other_tokens(session: Session) -> Iterator[str]:
    """A sequence whose tokens are not those that numpy draws from the kernel's own logits."""
    for asked in ASKED:
        samplings = [Sampling(seed=number, **fields) for number, fields in enumerate(asked)]
        caches = [session.sequence() for _ in asked]
        parts = [
            Part(cache, PROMPT, len(PROMPT) - 1 + STEPS, sampling, known=PROMPT, prompt=len(PROMPT))
            for cache, sampling in zip(caches, samplings, strict=True)
        ]
        results = session.launcher.launch_together(parts, session.logits)
        logits = session.logits.download(np.float32, (parts[0].total, session.rig.plan.tokens, VOCAB))
        order = [part for part, _ in session.launcher.columns]
        for number, (part, result) in enumerate(zip(parts, results, strict=True)):
            rows = logits[len(part.inputs) - 1 :, order.index(number)]
            if list(result.token_ids) != drawn(rows, part.sampling, part.inputs):
                yield str(part.sampling)
        for cache_ in caches:
            cache_.clear()


def other_words(session: Session) -> Iterator[str]:
    """What the host reads while a launch runs is not what the launch made, or an order to end does not end one."""
    parts = [Part(session.sequence(), (3, 4), STEPS, Sampling(1.0, seed)) for seed in range(3)]
    launcher = session.launcher
    for ended in ((), (1,), (2,), (0, 1, 2), ()):
        launch = launcher.prepare(parts)
        for number in ended:
            launcher.cancel(launch, number)
        launcher.start(launch)
        launcher.wait(launch)
        fresh = launcher.fresh(launch)
        results = launcher.finish(launch)
        made = [result.token_ids for result in results]
        if fresh != made:
            yield f"the host read {fresh}, the launch made {made}"
        for number, tokens in enumerate(made):
            if bool(tokens) == (number in ended):
                yield f"sequence {number} made {tokens}, {ended} were to end"
        if len(ended) == len(parts) and results[0].steps != 2:
            yield f"the launch made {results[0].steps} steps for sequences that were to end"
        for part in parts:
            part.cache.clear()


DETECTORS: dict[str, Callable[[Session], Iterator[str]]] = {"tokens": other_tokens, "host": other_words}
