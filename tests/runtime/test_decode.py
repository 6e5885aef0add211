"""The decode loop against the reference: same tokens however steps are grouped, stops, limits, epochs, failures."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
from fake_kernel import FakeDevice, generate_kernel
from tiny_models import tiny_weights

from cheetah.errors import CheetahError
from cheetah.models.dense.reference import Reference
from cheetah.models.rounding import round_to_bf16
from cheetah.models.sampling import Filters, Penalties
from cheetah.plan.kv.tables import MAX_STOP_IDS
from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.device.interface import LaunchTimeout
from cheetah.runtime.engine import step_launches
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.launcher import Epochs, Sampling
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.requests import Request
from cheetah.runtime.engine.step_time import StepTime
from tests.desk import Asked, Desk
from tests.meant import meant

PROMPT = (5, 17, 250, 3, 99, 7, 7, 81, 200, 12, 45)


def assembled(device: FakeDevice | None = None, **overrides: Any) -> Assembly:
    return assemble(
        tiny_weights(), device=device or FakeDevice(), overrides=overrides, generate_kernel=generate_kernel, quiet=True
    )


def desk(launch_steps: int | None = None, **overrides: Any) -> Desk:
    return Desk(assembled(**overrides).launcher, launch_steps)


def tokens_of(completion: Asked) -> list[int]:
    return [token for part in completion for token in part]


def expected(prompt: tuple[int, ...], count: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    reference = Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16)
    return reference.generate(prompt, count, temperature=temperature, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("launch_steps", [1, 2, 7, 11, 64])
def test_tokens_are_the_references_however_steps_are_grouped(launch_steps: int, temperature: float) -> None:
    request = Request(PROMPT, 30, Sampling(temperature, seed=2**63 + 5))
    assert tokens_of(desk(launch_steps).complete(request)) == expected(PROMPT, 30, temperature, 2**63 + 5)


def test_uneven_launches_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([3, 1, 9, 2, 5, 8, 1, 1] * 9)
    monkeypatch.setattr(StepTime, "steps", lambda time, wanted: min(wanted, next(sizes)))
    assert tokens_of(desk().complete(Request(PROMPT, 40, Sampling(0.9, 3)))) == expected(PROMPT, 40, 0.9, 3)


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_page_size_and_page_order_change_nothing(page_size: int) -> None:
    assembly = assembled(page_size=page_size)
    pages = int(assembly.manifest.buffer("kv").shape[1])
    order = np.random.default_rng(0).permutation(pages).tolist()
    assembly.launcher.cache = CachedSequence(PagePool(pages, order), page_size, 200)
    assert tokens_of(Desk(assembly.launcher).complete(Request(PROMPT, 30, Sampling()))) == expected(PROMPT, 30)


def test_a_second_request_starts_from_nothing() -> None:
    one = desk()
    first = tokens_of(one.complete(Request(PROMPT, 8, Sampling())))
    tokens_of(one.complete(Request((1, 2, 3), 20, Sampling())))
    assert tokens_of(one.complete(Request(PROMPT, 8, Sampling()))) == first


@pytest.mark.parametrize("launch_steps", [1, 4, 64])
def test_a_stop_id_ends_the_completion_and_is_its_last_id(launch_steps: int) -> None:
    plain = expected(PROMPT, 30)
    stop = plain[9]
    completion = desk(launch_steps).complete(Request(PROMPT, 30, Sampling(stop_ids=(stop,))))
    assert tokens_of(completion) == plain[: plain.index(stop) + 1] and completion.made[-1].token_ids[-1] == stop


def test_more_stop_ids_than_the_device_holds_still_stop() -> None:
    plain = expected(PROMPT, 30)
    others = tuple(token for token in range(300) if token not in plain)[:MAX_STOP_IDS]
    completion = desk().complete(Request(PROMPT, 30, Sampling(stop_ids=(*others, plain[5]))))
    assert tokens_of(completion) == plain[: plain.index(plain[5]) + 1]


@pytest.mark.parametrize("launch_steps", [1, 3, 64])
@pytest.mark.slow
def test_none_of_the_first_min_tokens_is_a_stop_id(launch_steps: int) -> None:
    stops = tuple(set(expected(PROMPT, 30)))
    for least in (0, 1, 2, 6):
        request = Request(PROMPT, 30, Sampling(stop_ids=stops), min_tokens=least)
        made = tokens_of(desk(launch_steps).complete(request))
        assert made == meant(Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16), request)
        assert len(made) > least and not {*made[:least]} & {*stops}


@pytest.mark.parametrize("launch_steps", [1, 5, 64])
def test_what_a_request_asks_of_its_sampling_is_meant_so(launch_steps: int) -> None:
    wanted = Sampling(
        *(0.8, 7, (4,), Filters(30, 0.9, 0.01), Penalties(1.2, 0.5, 0.3), ((17, 2.0),), None, (11, 12)),
    )
    request = Request(PROMPT, 20, wanted, min_tokens=4)
    made = tokens_of(desk(launch_steps).complete(request))
    assert made == meant(Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16), request)


def test_prompt_and_first_token_are_prefill_and_the_rest_decode() -> None:
    completion = desk(launch_steps=4).complete(Request(PROMPT, 9, Sampling()))
    parts = [len(part) for part in completion]
    timings = completion.timings
    assert parts[0] == 1 and sum(parts) == 9
    assert (timings.prompt_tokens, timings.completion_tokens) == (11, 9)
    assert timings.launches == 3 + len(parts) - 1 and timings.prefill_s > 0 and timings.decode_s > 0
    assert timings.decode_tokens_per_s == pytest.approx(8 / timings.decode_s)


def test_no_head_runs_inside_a_long_prompt() -> None:
    device = FakeDevice()
    one = Desk(assembled(device).launcher, 4)
    tokens_of(one.complete(Request(PROMPT, 1, Sampling())))
    found = [(launch["sequences"][0].given, launch["steps"], launch["head_from"]) for launch in device.launches]
    assert found == [(5, 4, 4), (5, 4, 4), (3, 3, 2)]


def test_the_context_is_refused_before_anything_runs_and_can_be_filled() -> None:
    device = FakeDevice()
    one = Desk(assembled(device, max_context=40).launcher)
    with pytest.raises(CheetahError, match=r"41 tokens do not fit the context of 40 \(max_context\)"):
        one.complete(Request(PROMPT, 31, Sampling()))
    assert device.launches == []
    assert tokens_of(one.complete(Request(PROMPT, 30, Sampling()))) == expected(PROMPT, 30)
    assert one.launcher.cache.pool.free_pages == one.launcher.cache.pool.pages


def test_the_models_own_limit_is_named() -> None:
    one = desk(max_context=512)
    with pytest.raises(CheetahError, match="max_position_embeddings of the model"):
        one.complete(Request(PROMPT, 200, Sampling()))


def test_an_overtaken_completion_says_so() -> None:
    one = desk(launch_steps=2)
    first = iter(one.complete(Request(PROMPT, 20, Sampling())))
    next(first)
    tokens_of(one.complete(Request(PROMPT, 3, Sampling())))
    with pytest.raises(CheetahError, match="another request began before this stream was finished"):
        next(first)


def test_scores_are_the_references_logits_in_any_grouping() -> None:
    ids = [token % 300 for token in range(0, 23 * 31, 31)]
    wanted = Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16).forward(ids)
    for launch_steps in (1, 5, 64):
        assembly = assembled()
        found = Desk(assembly.launcher, launch_steps).score(ids, assembly.logits_buffer())
        assert found.dtype == np.float32 and found.shape == (23, 300)
        np.testing.assert_array_equal(found, wanted)


def test_epochs_never_repeat_and_restart_before_32_bits_end() -> None:
    epochs = Epochs(per_step=3)
    assert [epochs.take(4), epochs.take(1)] == [(1, False), (13, False)]
    late = Epochs(per_step=3, first=2**32 - 1 - 12)
    assert late.take(4) == (2**32 - 13, False)
    assert late.take(1) == (1, True)
    assert Epochs(per_step=3, first=2**32 - 12).take(4) == (1, True)


def test_a_run_across_the_last_epoch_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_launches, "EPOCH_LIMIT", 60)  # the fake refuses an epoch that the exchange has seen
    device = FakeDevice()
    one = Desk(assembled(device).launcher, 5)
    assert tokens_of(one.complete(Request(PROMPT, 40, Sampling()))) == expected(PROMPT, 40)
    assert [launch["epoch"] for launch in device.launches].count(1) > 1


def test_a_launch_that_hangs_is_reported_and_nothing_runs_after_it() -> None:
    device = FakeDevice()
    one = Desk(assembled(device).launcher)
    device.hang = True
    with pytest.raises(LaunchTimeout, match="did not finish"):
        tokens_of(one.complete(Request(PROMPT, 3, Sampling())))
    device.hang = False
    with pytest.raises(CheetahError, match=r"an earlier launch failed.*open a new LLM \(the launch did not finish"):
        tokens_of(one.complete(Request(PROMPT, 3, Sampling())))


@pytest.mark.slow
def test_a_launch_is_waited_for_before_an_interrupt_is_raised_and_the_next_request_is_right() -> None:
    """Ctrl-C while the kernel runs: every launch in turn."""
    device = FakeDevice()
    one = Desk(assembled(device, batch=2).launcher, 3)
    wanted, synchronize = expected(PROMPT, 9), device.synchronize

    def interrupted(timeout_s: float | None = None, progress: object = None) -> None:
        device.synchronize = synchronize  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGINT)

    for launches in range(7):
        made, parts = list[int](), iter(one.complete(Request(PROMPT, 9, Sampling())))
        with pytest.raises(KeyboardInterrupt):
            while True:
                if len(made) >= launches:
                    device.synchronize = interrupted  # type: ignore[method-assign]
                made += next(parts)
        assert made == wanted[: len(made)]
        assert tokens_of(one.complete(Request(PROMPT, 9, Sampling()))) == wanted
    pool = one.launcher.cache.pool
    assert pool.free_pages == pool.pages


@pytest.mark.parametrize("what, message", [("steps", "reports 0 of 11 steps done"), ("token", "outside the vocab")])
def test_nonsense_from_the_kernel_is_noticed(what: str, message: str) -> None:
    class Broken(FakeDevice):
        def synchronize(self, timeout_s: float | None = None, progress: object = None) -> None:
            if what == "steps":
                arguments["status"].fill(0)
            else:
                arguments["tokens"].fill(0x7F)

    device = Broken()
    assembly = assembled(device)
    arguments = assembly.buffers
    with pytest.raises(CheetahError, match=message):
        tokens_of(Desk(assembly.launcher).complete(Request(PROMPT, 1, Sampling())))


class WithoutNumbers(FakeDevice):
    """Finds no number among the logits before position 14 of whoever is there."""

    buffers_by_name: dict[str, Any]

    def synchronize(self, timeout_s: float | None = None, progress: object = None) -> None:
        row_bytes = self.buffers_by_name["tokens"].nbytes // 2  # with a batch of 2
        for row, sequence in enumerate(self.launches[-1]["sequences"]):
            place = 14 - sequence.length
            if sequence.given <= place <= sequence.total:
                self.buffers_by_name["tokens"].upload(np.array([-1], np.int32), row * row_bytes + 4 * place)


def test_a_completion_without_a_number_in_its_logits_fails_alone_and_is_not_remembered() -> None:
    device = WithoutNumbers()
    assembly = assembled(device, batch=2, page_size=4)
    device.buffers_by_name = assembly.buffers
    cache = assembly.launcher.cache
    one = Desk(assembly.launcher, 4, PrefixCache(cache.pool, cache.page_size))
    failing, healthy = one.complete(Request(PROMPT, 9, Sampling())), one.complete(Request(PROMPT[:5], 9, Sampling()))
    one.submit([failing, healthy])
    made = []
    with pytest.raises(CheetahError, match="no token can be chosen for position 14: none of its logits is a number"):
        for part in failing:
            made += part
    assert made == expected(PROMPT, 3)
    assert tokens_of(healthy) == expected(PROMPT[:5], 9)
    assert one.prefixes.lookup(PROMPT)[1] == 8 and one.prefixes.lookup((*PROMPT, *made, 0))[1] == 8


def test_the_step_time_keeps_launches_near_their_target() -> None:
    timer = StepTime(max_steps=64, target_s=0.1)
    timer.note(10, 0.05)
    assert [timer.steps(100), timer.steps(7)] == [20, 7]
    timer.note(1, 3.0)
    assert timer.steps(100) == 1
    timer.note(64, 0.0)
    assert timer.steps(100) == 64
