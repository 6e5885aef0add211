"""Several completions decoded together, on the device that runs the reference: everyone's tokens are those of running
alone, whoever joins, leaves, shares pages, waits for them, or is given up; and every page comes back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_kernel import FakeDevice, generate_kernel
from tiny_models import tiny_weights

from cheetah.errors import CheetahError
from cheetah.models.dense.reference import Reference
from cheetah.models.rounding import round_to_bf16
from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.device.interface import LaunchTimeout
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool, pages_for
from cheetah.runtime.engine.launch_tables import share_prefixes, stop_lists
from cheetah.runtime.engine.launcher import Part, Sampling
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.requests import Request
from cheetah.runtime.engine.step_time import StepTime
from tests.desk import Asked, Desk
from tests.meant import meant
from tests.program.rig import emulated_gpu
from tests.tiers import tiered

PROMPTS = [(5, 17, 250, 3, 99, 7, 7, 81, 200, 12, 45), (1,), (9, 8, 7), tuple(range(40, 73)), (2, 3) * 8, (299,) * 17]


def assembled(device: FakeDevice | None = None, batch: int = 4, kv_chunk_min: int = 64, **overrides: Any) -> Assembly:
    return assemble(
        tiny_weights(),
        device=device or FakeDevice(),
        gpu=emulated_gpu(4, kv_chunk_min),
        overrides={"batch": batch, **overrides},
        generate_kernel=generate_kernel,
        quiet=True,
    )


class Rig:
    """A decoder with what it stands on; `pages` replaces the pool by a smaller one."""

    def __init__(
        self, *, pages: int | None = None, cached: bool = False, launch_steps: int | None = None, **overrides: Any
    ):
        self.device = FakeDevice()
        self.assembly = assembled(self.device, **overrides)
        self.launcher = self.assembly.launcher
        if pages is not None:
            old = self.launcher.cache
            self.launcher.cache = CachedSequence(PagePool(pages), old.page_size, old.context)
        cache = self.launcher.cache
        self.pool = cache.pool
        self.prefixes = PrefixCache(cache.pool, cache.page_size) if cached else None
        self.desk = Desk(self.launcher, launch_steps, self.prefixes)

    def together(self, requests: list[Request]) -> list[tuple[int, ...]]:
        """Their tokens, all submitted at once and taken in turns."""
        completions = [one for request in requests for one in self.desk.complete_several(request)]
        self.desk.submit(completions)
        parts = {number: completion.parts() for number, completion in enumerate(completions)}
        found: list[list[int]] = [[] for _ in completions]
        while parts:
            for number, part in list(parts.items()):
                token_ids = next(part, None)
                if token_ids is None:
                    del parts[number]
                else:
                    found[number] += token_ids
        return [tuple(tokens) for tokens in found]

    def check_all_pages_are_back(self) -> None:
        assert self.pool.available_pages == self.pool.pages
        if self.prefixes is not None:
            self.prefixes.clear()
        assert self.pool.free_pages == self.pool.pages

    @property
    def sequences_of_launches(self) -> list[int]:
        return [len(launch["sequences"]) for launch in self.device.launches]


def alone(request: Request, index: int = 0) -> tuple[int, ...]:
    """The tokens of one completion by the reference."""
    reference = Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16)
    return tuple(meant(reference, request, index))


def tokens_of(completion: Asked) -> tuple[int, ...]:
    return tuple(token for part in completion for token in part)


@pytest.fixture
def uneven_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([3, 1, 9, 2, 5, 8, 1, 1] * 99)
    monkeypatch.setattr(StepTime, "steps", lambda time, wanted: min(wanted, time.max_steps, next(sizes)))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, {"batch": 8}, {"batch": 2, "tokens": 8}, {"kv_chunk": 64}], ids=str)
@pytest.mark.parametrize("temperature", tiered([0.0, 1.2], [0.0]))
def test_different_prompts_and_lengths_give_what_each_gives_alone(overrides: Any, temperature: float) -> None:
    rig = Rig(**overrides)
    # All prompts are read before anyone decodes, whatever the clock says.
    rig.desk.engine._scheduler.prefill._chunk_tokens = 0
    requests = [Request(prompt, 24 + 3 * i, Sampling(temperature, 2**40 + i)) for i, prompt in enumerate(PROMPTS)]
    assert rig.together(requests) == [alone(request) for request in requests]
    rig.check_all_pages_are_back()
    assert max(rig.sequences_of_launches) == min(len(PROMPTS), rig.launcher.batch)


def test_prompts_are_read_with_all_columns_and_only_the_last_step_has_a_head() -> None:
    rig = Rig(batch=2, tokens=8, max_steps=2)
    request = Request(tuple(range(37)), 1, Sampling())
    assert tokens_of(rig.desk.complete(request)) == alone(request)
    found = [(launch["sequences"][0], launch["steps"], launch["head_from"]) for launch in rig.device.launches]
    assert [(one.per_step, one.given, one.total, *rest) for one, *rest in found] == [
        *((8, 17, 16, 2, 2), (8, 17, 16, 2, 2), (5, 5, 5, 1, 0))
    ]


def test_who_ends_makes_room_for_who_waits(uneven_launches: None) -> None:
    rig = Rig(batch=2)
    requests = [Request((i, i + 1), 3 + 5 * (i % 3), Sampling()) for i in range(7)]
    assert rig.together(requests) == [alone(request) for request in requests]
    assert set(rig.sequences_of_launches) == {1, 2}
    rig.check_all_pages_are_back()


@pytest.mark.slow
def test_stop_ids_of_different_sequences_at_different_steps() -> None:
    plain = [alone(Request(prompt, 30, Sampling())) for prompt in PROMPTS[:4]]
    requests = [
        Request(prompt, 30, Sampling(stop_ids=(tokens[at], *range(290, 290 + i))), min_tokens=2 * i)
        for i, (prompt, tokens, at) in enumerate(zip(PROMPTS, plain, (20, 3, 9, 0), strict=False))
    ]
    for launch_steps in (1, 5, 64):
        rig = Rig(launch_steps=launch_steps)
        assert rig.together(requests) == [alone(request) for request in requests]
        rig.check_all_pages_are_back()


def test_a_sequence_that_stopped_keeps_no_tokens_beyond_its_stop() -> None:
    launcher = assembled().launcher
    plain = alone(Request((1, 2), 12, Sampling()))
    caches = [launcher.cache.fork() for _ in range(2)]
    parts = [Part(caches[0], (1, 2), 12, Sampling(stop_ids=(plain[3],))), Part(caches[1], (7,), 12)]
    first, second = launcher.launch_together(parts)
    assert first.token_ids == plain[: plain.index(plain[3]) + 1] and len(second.token_ids) == 12
    assert (first.steps, caches[0].length, caches[1].length) == (12, 2 + plain.index(plain[3]), 12)
    going_on = launcher.launch_together([Part(caches[0], first.token_ids[-1:], 3)])[0]
    assert going_on.token_ids == plain[len(first.token_ids) :][:3]


def test_a_launch_ends_when_all_have_stopped() -> None:
    device = FakeDevice()
    launcher = assembled(device).launcher
    ends = [alone(Request((prompt,), 9, Sampling())) for prompt in (1, 2)]
    parts = [
        Part(launcher.cache.fork(), (1,), 40, Sampling(stop_ids=ends[0][2:3])),
        Part(launcher.cache.fork(), (2,), 40, Sampling(stop_ids=ends[1][7:8])),
    ]
    last = max(ends[0].index(ends[0][2]), ends[1].index(ends[1][7])) + 1
    assert {result.steps for result in launcher.launch_together(parts)} == {last}


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "count"), tiered([(4, 3), (4, 4), (2, 5), (1, 3), (8, 8)], [(4, 4), (8, 8), (1, 3)]))
@pytest.mark.parametrize("cached", [False, True])
def test_several_completions_of_one_prompt(batch: int, count: int, cached: bool) -> None:
    rig = Rig(batch=batch, cached=cached)
    request = Request(PROMPTS[3], 20, Sampling(1.3, 5), count=count)
    found = rig.together([request])
    assert found == [alone(request, index) for index in range(count)]
    assert len(set(found)) == count
    rig.check_all_pages_are_back()


def test_the_prompt_of_several_completions_is_read_once() -> None:
    rig = Rig(batch=4)
    request = Request(PROMPTS[3], 20, Sampling(1.3, 5), count=4)
    rig.together([request])
    read = [(len(launch["sequences"]), launch["sequences"][0].total) for launch in rig.device.launches]
    prompt = len(request.prompt_ids)
    assert [total for count, total in read if count == 1] == [4 * ((prompt - 1) // 4), (prompt - 1) % 4] or (
        sum(total for count, total in read if count == 1) == prompt - 1
    )
    assert read[[count for count, _ in read].index(4)] == (4, 1), "the last token of the prompt samples, for each"


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [(7,), (1, 2), tuple(range(16)), tuple(range(17)), tuple(range(32))], ids=len)
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_forks_at_every_place_of_a_page(prompt: tuple[int, ...], page_size: int) -> None:
    rig = Rig(batch=4, page_size=page_size, cached=True)
    requests = [Request(prompt, 6, Sampling(1.1, 3), count=3), Request(prompt, 6, Sampling(0.7, 4), count=2)]
    expected = [alone(request, index) for request in requests for index in range(request.count)]
    assert rig.together(requests) == expected
    rig.check_all_pages_are_back()


def test_a_cached_prefix_is_not_read_again_and_changes_no_token() -> None:
    rig = Rig(cached=True)
    first = Request(PROMPTS[3], 30, Sampling())
    tokens = tokens_of(rig.desk.complete(first))
    longer = Request((*PROMPTS[3], *tokens, 5), 5, Sampling())
    completion = rig.desk.complete(longer)
    rig.device.launches.clear()
    assert tokens_of(completion) == alone(longer)
    timings = completion.timings
    known = (len(PROMPTS[3]) + len(tokens) - 1) // 16 * 16
    assert timings.cached_tokens == known and rig.device.launches[0]["sequences"][0].length == known
    assert timings.prefill_tokens_per_s == (timings.prompt_tokens - known) / timings.prefill_s
    rig.check_all_pages_are_back()


def test_who_comes_while_others_run_shares_their_prompts_pages() -> None:
    rig = Rig(cached=True, kv_chunk_min=16, launch_steps=4)
    requests = [Request((*PROMPTS[3], number), 12, Sampling()) for number in range(3)]
    assert rig.together(requests) == [alone(request) for request in requests]
    tiles = [[tile for tile in launch["tiles"] if not tile.new] for launch in rig.device.launches]
    read_together = {(one.columns, one.length) for of_launch in tiles for one in of_launch}
    assert (3, 32) in read_together <= {(2, 32), (3, 32)}  # two, if they had a launch before the third was read
    rig.check_all_pages_are_back()


def test_with_fixed_items_nothing_is_read_together() -> None:
    rig = Rig(cached=True, kv_chunk=16, kv_chunk_min=16)
    rig.together([Request((*PROMPTS[3], number), 5, Sampling()) for number in range(3)])
    assert all(tile.new for launch in rig.device.launches for tile in launch["tiles"])


@pytest.mark.slow
def test_with_fixed_items_a_prompt_takes_one_step_more_at_most() -> None:
    prompts = [tuple(range(length)) for length in (1, 2, 8, 9, 10, 16, 17, 40)]
    steps: dict[int, list[int]] = {0: [], 64: []}
    for chunk, found in steps.items():
        rig = Rig(batch=1, tokens=8, kv_chunk=chunk)
        for prompt in prompts:
            rig.device.launches.clear()
            assert tokens_of(rig.desk.complete(Request(prompt, 1, Sampling()))) == alone(Request(prompt, 1, Sampling()))
            found.append(sum(launch["steps"] for launch in rig.device.launches))
    more = [fixed - by_rule for by_rule, fixed in zip(steps[0], steps[64], strict=True)]
    assert more == [0 if len(prompt) % 8 == 1 else 1 for prompt in prompts]


@pytest.mark.parametrize("page_size", [5, 16])
@pytest.mark.slow
def test_with_fixed_items_a_step_of_a_prompt_begins_at_its_columns_and_has_them_all(page_size: int) -> None:
    rig = Rig(batch=2, tokens=8, kv_chunk=64, page_size=page_size, cached=True)
    requests = [Request(tuple(range(length)), 5, Sampling()) for length in (90, 87, 78, 41)]
    assert rig.together(requests) == [alone(request) for request in requests]
    known = {5: 40, 16: 64}[page_size]  # of the third: where both a page and a step begin
    reading = [launch["sequences"][0] for launch in rig.device.launches if launch["head_from"] == launch["steps"]]
    assert {(one.length % 8, one.per_step) for one in reading} == {(0, 8)} and known in {one.length for one in reading}
    rig.check_all_pages_are_back()


def test_streams_go_on_side_by_side() -> None:
    rig = Rig(batch=4, launch_steps=2)
    requests = [Request(prompt, 12, Sampling(0.9, i)) for i, prompt in enumerate(PROMPTS[:3])]
    streams: list[Iterator[tuple[int, ...]]] = [iter(rig.desk.complete(request)) for request in requests]
    found: list[tuple[int, ...]] = [() for _ in streams]
    for turn in [0, 0, 1, 0, 2, 1, 2, 2, 0]:
        found[turn] += next(streams[turn])
    for number, stream in enumerate(streams):
        for token_ids in stream:
            found[number] += token_ids
    assert found == [alone(request) for request in requests]
    assert 3 in rig.sequences_of_launches
    rig.check_all_pages_are_back()


def test_an_abandoned_stream_gives_its_pages_back() -> None:
    rig = Rig(batch=2, launch_steps=2)
    kept = iter(rig.desk.complete(Request((1, 2), 20, Sampling())))
    first = next(kept)
    left = iter(rig.desk.complete(Request(PROMPTS[3], 50, Sampling())))
    next(left)
    held = rig.pool.free_pages
    del left
    assert rig.pool.free_pages > held
    assert first + tuple(token for part in kept for token in part) == alone(Request((1, 2), 20, Sampling()))
    rig.check_all_pages_are_back()


def test_a_stream_that_is_collected_while_others_are_launched_is_taken_out_after() -> None:
    rig = Rig(batch=2, launch_steps=2)
    requests = [Request((1, 2), 9, Sampling(seed=i)) for i in range(2)]
    streams = [rig.desk.complete(request).parts() for request in requests]
    first = next(streams[0])
    next(streams[1])
    launch = rig.device.launch

    def dropping(kernel: Any, arguments: Any) -> None:
        rig.device.launch = launch  # type: ignore[method-assign]
        held = rig.pool.free_pages
        del streams[1]
        gc.collect()
        assert rig.pool.free_pages == held, "pages that a launch writes to were given back"
        launch(kernel, arguments)

    rig.device.launch = dropping  # type: ignore[method-assign]
    held = rig.pool.free_pages
    first += next(streams[0])
    assert rig.pool.free_pages == held + 1 and rig.sequences_of_launches[-1] == 2
    assert first + tuple(token for part in streams[0] for token in part) == alone(requests[0])
    rig.check_all_pages_are_back()


@pytest.mark.slow
def test_who_does_not_fit_waits_while_others_run() -> None:
    rig = Rig(batch=4, pages=6)  # of 16 tokens
    requests = [Request((number,), 60, Sampling()) for number in range(4)]  # 4 pages each
    assert rig.together(requests) == [alone(request) for request in requests]
    assert set(rig.sequences_of_launches) == {1}
    rig.check_all_pages_are_back()


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_completions_of_a_prompt_share_a_tight_pool(cached: bool) -> None:
    """2 pages of prompt shared, 1 or 2 of each one's own: 3 fit at a time."""
    rig = Rig(batch=8, pages=9, cached=cached)
    request = Request(PROMPTS[3], 20, Sampling(1.0, 1), count=8)
    assert rig.together([request]) == [alone(request, index) for index in range(8)]
    assert max(rig.sequences_of_launches) == 3
    rig.check_all_pages_are_back()


def test_what_can_never_fit_is_refused_and_nothing_is_lost() -> None:
    rig = Rig(batch=2, pages=3)
    running = iter(rig.desk.complete(Request((1,), 20, Sampling())))
    first = next(running)
    with pytest.raises(CheetahError, match="need 4 pages of the KV cache, there are 3: use a smaller max_tokens"):
        rig.desk.complete(Request((1,), 60, Sampling()))
    assert first + tuple(token for part in running for token in part) == alone(Request((1,), 20, Sampling()))


def test_pages_that_somebody_else_holds_are_named() -> None:
    rig = Rig(batch=2, pages=3)
    rig.launcher.cache.reserve(17)
    with pytest.raises(CheetahError, match="2 pages of the KV cache are needed, there are 1"):
        tokens_of(rig.desk.complete(Request((1,), 20, Sampling())))


def test_scores_beside_running_streams() -> None:
    rig = Rig(batch=2, pages=4, launch_steps=4)
    running = iter(rig.desk.complete(Request((1,), 40, Sampling())))
    first = next(running)
    ids = list(range(30))
    wanted = Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16).forward(ids)
    np.testing.assert_array_equal(rig.desk.score(ids, rig.assembly.logits_buffer()), wanted)
    assert first + tuple(token for part in running for token in part) == alone(Request((1,), 40, Sampling()))
    rig.check_all_pages_are_back()


@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("launch_steps", [1, 3, 64])
def test_scores_with_several_columns_a_step(tokens: int, launch_steps: int) -> None:
    rig = Rig(batch=1, tokens=tokens, launch_steps=launch_steps)
    ids = [token % 300 for token in range(0, 23 * 31, 31)]
    wanted = Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16).forward(ids)
    np.testing.assert_array_equal(rig.desk.score(ids, rig.assembly.logits_buffer()), wanted)


def test_logits_of_a_batch_are_found_by_their_columns() -> None:
    assembly = assembled(batch=2, tokens=4)
    launcher, logits = assembly.launcher, assembly.logits_buffer()
    caches = [launcher.cache.fork() for _ in range(2)]
    parts = [Part(caches[0], (1, 2, 3), 3, per_step=2), Part(caches[1], (4, 5), 2)]
    launcher.launch_together(parts, logits)
    found = logits.download(np.float32, (2, 4, 300))
    reference = Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16)
    wanted = {0: reference.forward([1, 2, 3])}
    reference = Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16)
    wanted[1] = reference.forward([4, 5])
    for column, (part, number) in enumerate(launcher.columns):
        for step in range(2):
            k = step * parts[part].per_step + number
            if k < parts[part].total:
                np.testing.assert_array_equal(found[step, column], wanted[part][k])


def test_tables_that_did_not_change_are_not_written_again() -> None:
    rig = Rig(batch=2, launch_steps=2)
    written: list[str] = []
    for name in ("page_table", "columns", "stop_ids", "kv_plans"):
        buffer = rig.assembly.buffers[name]
        upload = buffer.upload
        buffer.upload = lambda *a, upload=upload, name=name: (written.append(name), upload(*a))  # type: ignore
    tokens_of(rig.desk.complete(Request((1,), 13, Sampling(stop_ids=(299,)))))
    assert sorted(written) == ["columns", "kv_plans", "page_table", "stop_ids"]


def test_the_plans_of_the_next_launch_are_made_while_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(batch=2, launch_steps=3)
    plans = rig.launcher._plans
    made: list[str] = []
    prepare, launch = plans.prepare, rig.device.launch
    monkeypatch.setattr(plans, "prepare", lambda *a: (made.append("plan"), prepare(*a)))
    monkeypatch.setattr(rig.device, "launch", lambda *a: (made.append("launch"), launch(*a)))
    rig.together([Request((1,), 10, Sampling()), Request((2,), 10, Sampling())])
    launches = [place for place, what in enumerate(made) if what == "launch"]
    assert made[launches[0] :] == ["launch", "plan"] * len(launches) and len(launches) >= 4, made


def test_a_failure_ends_all_with_the_reason() -> None:
    rig = Rig(batch=2, launch_steps=1)
    streams = [iter(rig.desk.complete(Request((i,), 9, Sampling()))) for i in range(2)]
    for stream in streams:
        next(stream)
    rig.device.hang = True
    with pytest.raises(LaunchTimeout):
        [next(streams[0]) for _ in range(3)]
    rig.device.hang = False
    with pytest.raises(CheetahError, match="an earlier launch failed"):
        [next(streams[1]) for _ in range(3)]


def test_an_interrupted_prompt_is_taken_out_and_others_go_on() -> None:
    rig = Rig(batch=2, launch_steps=1)
    kept = iter(rig.desk.complete(Request((1,), 6, Sampling())))
    first = next(kept)
    request = Request((2, 3, 4), 6, Sampling())
    launch = rig.device.launch

    def interrupted(kernel: Any, arguments: Any) -> None:
        raise KeyboardInterrupt

    rig.device.launch = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        tokens_of(rig.desk.complete(request))
    rig.device.launch = launch  # type: ignore[method-assign]
    assert first + tuple(token for part in kept for token in part) == alone(Request((1,), 6, Sampling()))
    assert tokens_of(rig.desk.complete(request)) == alone(request)
    rig.check_all_pages_are_back()


@pytest.mark.slow
@pytest.mark.parametrize("seed", tiered(range(4), [0, 1, 2]))
def test_soak_of_joins_and_leaves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests of a few common beginnings come, go on, stop, fork, are given up, in a pool that is too small."""
    draw, draw_steps = np.random.default_rng(seed), np.random.default_rng(seed)
    monkeypatch.setattr(
        StepTime, "steps", lambda time, wanted: min(wanted, time.max_steps, int(draw_steps.integers(1, 9)))
    )
    batch = [3, 8, 2, 4][seed]
    rig = Rig(
        batch=batch,
        cached=seed != 2,
        pages=[7, 24, 9, 12][seed],
        page_size=[16, 5, 16, 7][seed],
        kv_chunk_min=16,
        **({"tokens": 8} if seed == 3 else {}),
    )
    beginnings = [tuple(draw.integers(0, 300, count).tolist()) for count in (18, 35, 3)]
    streams: list[tuple[Asked, Iterator[tuple[int, ...]], list[int]]] = []
    finished = given_up = short_of_pages = turns = 0
    # Where launches are cut decides who is how far after how many turns, so it goes on until enough have ended.
    while turns < 99 or finished < 10 or given_up < 2:
        turns += 1
        assert turns < 999, f"{finished} have finished, {given_up} were given up"
        if len(streams) < 2 * batch and draw.random() < 0.6:
            beginning = beginnings[draw.integers(0, 3)]
            prompt = (*beginning[: draw.integers(1, len(beginning) + 1)], *draw.integers(0, 300, 2).tolist())
            stops = tuple(draw.integers(0, 300, draw.integers(0, 30)).tolist())
            sampling = Sampling(float(draw.choice([0.0, 1.5])), int(draw.integers(0, 2**62)), stops)
            several, most = int(draw.choice([1, 1, 1, 3])), int(draw.integers(1, 30))
            request = Request(prompt, most, sampling, int(draw.integers(0, most)), several)
            completions = rig.desk.complete_several(request)
            rig.desk.submit(completions)
            streams += [(one, one.parts(), []) for one in completions]
        load = rig.desk.engine.load()
        short_of_pages += load.waiting > 0 and load.running < batch
        if not streams:
            continue
        place = int(draw.integers(0, len(streams)))
        completion, parts, found = streams[place]
        token_ids = next(parts, None)
        found += token_ids or ()
        if token_ids is None:
            assert tuple(found) == alone(completion.request, completion.index)
            finished += 1
        gives_up = token_ids is not None and draw.random() < 0.05
        if token_ids is None or gives_up:
            parts.close()  # type: ignore[attr-defined]
            del streams[place]
            given_up += gives_up
    for completion, parts, found in streams:
        found += [token for token_ids in parts for token in token_ids]
        assert tuple(found) == alone(completion.request, completion.index)
    assert short_of_pages and (rig.desk.engine.load().tokens_found > 0) == (seed != 2)
    rig.check_all_pages_are_back()


# What a launch shares ------------------------------------------------------------------------------------------------


def sequences_with(tables: list[list[int]], lengths: list[int], page_size: int = 16) -> list[CachedSequence]:
    pool = PagePool(99)
    found = []
    for pages, length in zip(tables, lengths, strict=True):
        assert pages_for(length, page_size) <= len(pages)
        found.append(CachedSequence(pool, page_size, 9999))
        found[-1].pages, found[-1].length = pages, length
    return found


@pytest.mark.parametrize(
    "tables, lengths, expected",
    [
        ([[3, 4], [1, 2]], [32, 32], ([0, 1], ())),
        ([[5, 6, 7], [1, 2], [5, 6, 8]], [40, 20, 33], ([1, 0, 2], ((1, 2, 32),))),
        ([[5, 6, 7], [1, 2], [5, 6, 8]], [40, 20, 31], ([1, 0, 2], ((1, 2, 16),))),
        ([[1, 2, 3, 4], [1, 2, 3, 5], [1, 9], [1, 8]], [64, 64, 32, 32], ([0, 1, 3, 2], ((0, 2, 48), (2, 2, 16)))),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 3, 6]], [48, 48, 48, 64], ([0, 3, 1, 2], ((0, 4, 32),))),
        ([[1], [1]], [15, 16], ([0, 1], ())),
    ],
)
def test_neighbours_share_what_saves_most(tables: Any, lengths: Any, expected: Any) -> None:
    assert share_prefixes(sequences_with(tables, lengths), 16, 16) == expected


def test_short_prefixes_are_not_worth_sharing() -> None:
    sequences = sequences_with([[1, 2, 3], [1, 2, 4]], [48, 48])
    assert share_prefixes(sequences, 16, 48) == ([0, 1], ())
    assert share_prefixes(sequences, 32, 0)[1] == ((0, 2, 32),)
    assert share_prefixes(sequences, 64, 0)[1] == ()


def test_stop_lists_are_stored_once_and_cut_alike_where_they_are_too_many() -> None:
    assert stop_lists([(1, 2), (), (1, 2), (3,)], 64) == ([1, 2, 3], [(0, 2), (2, 0), (0, 2), (2, 1)])
    ids, places = stop_lists([tuple(range(60)), tuple(range(100, 105))], 64)
    assert len(ids) == 37 and places == [(0, 32), (32, 5)]
