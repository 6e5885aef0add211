"""What sequences may ask of their sampling, in the whole kernel: every token is what numpy draws from the logits that
the kernel itself gives, for sequences of a batch that ask for different things."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from cheetah.generate import generate_kernel
from cheetah.models.sampling import Filters, Penalties
from cheetah.runtime.engine.launcher import Part, Sampling
from tests.meant import drawn
from tests.program.rig import Rig, Session, model, random_weights, token_ids
from tests.tiers import tiered

pytestmark = pytest.mark.compiler

CONFIG = model(16, 16, 1, 1, 1, 64, 300)
STEPS = 12
WARM = {"temperature": 1.5}
ASKED: dict[str, dict[str, Any]] = {
    "top_k": {**WARM, "filters": Filters(top_k=7)},
    "top_k 1": {**WARM, "filters": Filters(top_k=1)},
    "top_k of more than all": {**WARM, "filters": Filters(top_k=400)},
    "top_p": {**WARM, "filters": Filters(top_p=0.6)},
    "top_p nearly all": {**WARM, "filters": Filters(top_p=0.999)},
    "top_p nearly nothing": {**WARM, "filters": Filters(top_p=1e-6)},
    "min_p": {**WARM, "filters": Filters(min_p=0.3)},
    "top_k, top_p": {"temperature": 4.0, "filters": Filters(20, 0.8)},
    "all filters, hot": {"temperature": 100.0, "filters": Filters(50, 0.5, 0.001)},
    "all filters, cold": {"temperature": 0.1, "filters": Filters(20, 0.95, 0.05)},
    "top_k beyond the lists": {"temperature": 100.0, "filters": Filters(top_k=70)},
    "top_k behind a gap": {"temperature": 100.0, "filters": Filters(100), "bias": tuple((i, 300.0) for i in range(30))},
    "allowed": {"allowed": (3, 31, 32, 64, 299)},
    "banned": {"temperature": 0.2, "banned": tuple(range(0, 290))},
    "one allowed": {**WARM, "allowed": (298,), "filters": Filters(5, 0.9)},
    "bias": {"bias": ((7, 3.0), (299, 5.5), (0, -100.0))},
    "repetition": {"penalties": Penalties(repetition=1.7)},
    "presence": {"temperature": 0.5, "penalties": Penalties(presence=1.5)},
    "frequency": {"penalties": Penalties(frequency=0.4)},
    "everything": {
        **WARM,
        "bias": ((7, 3.0),),
        "banned": (1, 2),
        "penalties": Penalties(1.3, 0.5, 0.25),
        "filters": Filters(40, 0.9, 0.01),
    },
}


@cache
def rig(batch: int, sync: str = "flags") -> Rig:
    return Rig(random_weights(CONFIG), blocks=3, batch=batch, sync=sync, consumer_warps=4, generate=generate_kernel)


def launch(session: Session, asked: list[Sampling], prompts: list[list[int]], steps: int = STEPS) -> list[list[int]]:
    """One launch of all; every token is compared with numpy's."""
    caches = [session.sequence() for _ in asked]
    parts = [
        Part(cache, ids, len(ids) - 1 + steps, sampling, known=ids, prompt=len(ids))
        for cache, ids, sampling in zip(caches, prompts, asked, strict=True)
    ]
    results = session.launcher.launch_together(parts, session.logits)
    shape = (parts[0].total, session.rig.plan.tokens, CONFIG.vocab_size)
    logits = session.logits.download(np.float32, shape)
    order = [part for part, _ in session.launcher.columns]
    for number, (part, result) in enumerate(zip(parts, results, strict=True)):
        rows = logits[len(part.inputs) - 1 :, order.index(number)]
        assert list(result.token_ids) == drawn(rows, part.sampling, part.inputs), part.sampling
    for one in caches:
        one.clear()
    return [list(result.token_ids) for result in results]


@pytest.mark.slow
def test_every_token_is_numpy_s() -> None:
    session = rig(1, "flags").session("random", 3)
    for number, (name, fields) in enumerate(ASKED.items()):
        launch(session, [Sampling(seed=number, **fields)], [token_ids(3, 300, number)], 6 if "top" in name else STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("sync", tiered(["flags", "barrier"], ["barrier"]))
def test_sequences_of_a_batch_ask_for_different_things(sync: str) -> None:
    names = ("all filters, hot", "frequency", "everything", "top_k, top_p")
    asked = [Sampling(seed=number, **ASKED[name]) for number, name in enumerate(names)]
    prompts = [token_ids(3, 300, number) for number in range(len(asked))]
    together = launch(rig(4, sync).session("priority", 1), asked, prompts, 6)
    others = [launch(rig(4, sync).session(), [one], [prompt], 6)[0] for one, prompt in zip(asked, prompts, strict=True)]
    assert together == others


@pytest.mark.slow
def test_counts_go_on_from_launch_to_launch() -> None:
    asked = {"penalties": Penalties(1.2, 0.5, 0.5), "temperature": 0.7}
    whole = rig(1).session().generate([5, 6], 16, **asked)
    assert rig(1).session(launch_steps=3).generate([5, 6], 16, **asked) == whole
