"""Bugs planted in the real kernel, and the gauntlet that has to find each of them.

A bug is a change of a building block in Python, or of every place of the generated text that a pattern matches; either
way the text must differ. The gauntlet has three detectors, cheapest first: one run against the float32 reference, the
same launches under other schedules (an error, or other bits), and one run under the race detector.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from cheetah import lang as ch
from cheetah.blocks.attention.merge import Merger
from cheetah.blocks.attention.schedule import Schedule
from cheetah.blocks.attention.sharing import Sharing
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.exchange_kinds import BarrierExchange, FlaggedExchange
from cheetah.blocks.linear import prologue
from cheetah.blocks.linear.adding import Adding
from cheetah.blocks.linear.reductions import Reductions
from cheetah.blocks.tokens import Tokens
from cheetah.emulator import SCHEDULERS
from cheetah.errors import CheetahError
from cheetah.lang import prim, ty
from cheetah.models.config import ModelConfig
from cheetah.models.dense.step import StepParts
from cheetah.models.rounding import widen
from cheetah.package import Generated
from cheetah.plan import Gpu, ModelShape, Plan
from cheetah.runtime.engine.launcher import Sampling
from tests.program.joined import joined
from tests.program.rig import (
    F32,
    RandomWeights,
    Rig,
    Session,
    as_bf16,
    fill_cache,
    float32_logits,
    kept_kernel,
    model,
    plain_kernel,
    random_weights,
    relative_error,
    token_ids,
)
from tests.tolerances import LOGITS

Patch = pytest.MonkeyPatch
PROMPTED = 6


@dataclass(frozen=True)
class Setup:
    """A model and a machine in which bugs of a kind can show; `scored` tokens are scored in the course."""

    config: ModelConfig
    blocks: int
    scored: int = 40
    consumer_warps: int = 2
    stages: int = 4
    launch_steps: int = 64

    @property
    def weights(self) -> RandomWeights:
        return random_weights(self.config)

    def ids(self, count: int) -> list[int]:
        return token_ids(count, self.config.vocab_size)

    def rig(self, **options: Any) -> Rig:
        """The clean kernel, unless `options` say otherwise."""
        sizes = {"blocks": self.blocks, "consumer_warps": self.consumer_warps, "stages": self.stages}
        return Rig(self.weights, kv_chunk_min=16, max_context=128, **sizes, **{"generate": clean_kernel, **options})


USUAL = Setup(model(), blocks=3)
"""Three partial states of one head to merge, more chunks a matrix than stages, blocks of unequal shares."""
ROOMY = replace(USUAL, stages=40)
"""A ring that lets the producer lane run ahead as far as it is allowed to."""
IDLE = Setup(model(16, 16, 1, 1, 1, 64, 16), blocks=8)
"""More blocks than any vector has M-tiles: some have nothing to do in most phases."""
HEAD_ALONE = Setup(model(16, 16, 4, 1, 1, 64, 384), blocks=24, scored=4)
"""Blocks that read the hidden vector in the head alone, and wait for it while others are at the first layer."""


@dataclass(frozen=True)
class Cancelling(Setup):
    """Chunks of 16 keys whose values are v and -v in turn: their sum is what rounding leaves, so its order shows.

    Otherwise hardly ever: two float32 sums in another order mostly round to the same bf16.
    """

    @property
    def weights(self) -> RandomWeights:
        return cancelling_weights(self.config)

    def ids(self, count: int) -> list[int]:
        return [position // 16 % 2 for position in range(count)]


@cache
def cancelling_weights(config: ModelConfig) -> RandomWeights:
    """Token 1 is minus token 0, and keys hardly tell them apart."""
    weights = RandomWeights(config)
    for name, tensor in weights.tensors.items():
        values = widen(tensor)
        if "embed_tokens" in name:
            values[1] = -values[0]
        weights.tensors[name] = as_bf16(values * 1e-4 if "k_proj" in name else values)
    return weights


NARROW = Setup(model(48, 320, 1, 4, 1, 64, 50), blocks=2, scored=20)
"""o and down have M-tiles of 8 rows."""
MANY = Cancelling(model(16, 16, 1, 8, 1, 64, 16), blocks=8, scored=120, consumer_warps=8, launch_steps=8)
"""Up to eight partial states folded at once, of eight query heads."""


@dataclass(frozen=True)
class Bug:
    """edits: (pattern, replacement) of the kernel's body. found_by: the detectors of which each must find it.

    "reference": wrong or NaN logits in the first run; "schedules": an error or other bits under some schedule;
    "race": the race detector.
    """

    name: str
    found_by: tuple[str, ...]
    edits: tuple[tuple[str, str], ...] = ()
    change: Callable[[Patch], None] | None = None
    sync: str = "flags"
    setup: Setup = USUAL

    def kernel(self, *arguments: Any, **named: Any) -> Generated:
        """The kernel with the bug; AssertionError if the bug changed nothing."""
        clean = generated = clean_kernel(*arguments, **named)
        if self.change:
            with Patch.context() as patch:
                self.change(patch)
                generated = plain_kernel(*arguments, **named)
        generated = edited(generated, self.edits)
        assert generated.text != clean.text, f"{self.name}: the text is as it was"
        return generated


@cache
def joined_rig(bugs: tuple[Bug, ...], **mode: bool) -> Rig:
    """One kernel with all of the bugs, of one setup, see `joined`. Without any of them it is right."""

    def generate(*arguments: Any, **named: Any) -> Generated:
        return joined(clean_kernel(*arguments, **named), [bug.kernel(*arguments, **named) for bug in bugs])

    setup = bugs[0].setup
    rig = setup.rig(generate=generate, sync=bugs[0].sync, **mode)
    assert mode or not [*Gauntlet(rig, setup).reference()], "the joined kernel is wrong without a bug"
    return rig


@cache
def clean_kernel(*arguments: Any, **named: Any) -> Generated:
    """The kernel as it is, made once for all that is planted in it."""
    return kept_kernel(*arguments, **named)


def edited(generated: Generated, edits: tuple[tuple[str, str], ...]) -> Generated:
    """The kernel with every match of each pattern replaced, in its own functions only: the primitives stay."""
    head, start, body = generated.text.partition("#endif\n")
    for pattern, replacement in edits:
        body, count = re.subn(pattern, replacement, body)
        assert count, f"nothing in the kernel matches {pattern!r}"
    text = head + start + body
    return generated.with_text(text)


# -- the gauntlet -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What a detector said: "reference", "schedules" or "race", its report, and the schedule of the run."""

    detector: str
    report: str
    schedule: str = ""


@dataclass
class Gauntlet:
    """Runs the launches on a rig and yields what is found. `expected` are the bits of the first run that ended."""

    rig: Rig
    setup: Setup
    expected: list[bytes] | None = field(default=None)

    def reference(self) -> Iterator[Finding]:
        """One run in turn order against float32."""
        try:
            outputs = self._run("round_robin", 0)
        except CheetahError as error:
            yield Finding("schedules", f"{type(error).__name__}: {error}", "round_robin 0")
            return
        self.expected = [np.asarray(output).tobytes() for output in outputs]
        error = relative_error(outputs[0], wanted_logits(self.setup))
        if not error < LOGITS:
            yield Finding("reference", f"the logits are {error:.2e} from float32", "round_robin 0")

    def schedules(self, seeds: int) -> Iterator[Finding]:
        """The same launches under every scheduler and seed."""
        for seed in range(seeds):
            for scheduler in SCHEDULERS:
                yield from self._schedule(scheduler, seed)

    def _schedule(self, scheduler: str, seed: int) -> Iterator[Finding]:
        schedule = f"{scheduler} {seed}"
        try:
            found = [np.asarray(output).tobytes() for output in self._run(scheduler, seed)]
        except CheetahError as error:  # the launcher's own checks are no EmulatorError
            yield Finding("schedules", f"{type(error).__name__}: {error}", schedule)
            return
        self.expected = self.expected or found
        if found != self.expected:
            yield Finding("schedules", "other bits", schedule)

    def _run(self, scheduler: str, seed: int) -> list[Any]:
        session = self.rig.session(scheduler, seed, launch_steps=self.setup.launch_steps)
        return course(session, self.setup.ids(self.setup.scored))


def course(session: Session, ids: list[int]) -> list[Any]:
    """Logits over a context that is split three ways; a prompt, a sampled text that a stop id ends, and more of it."""
    logits, exchanged = [], []
    for first in range(0, len(ids), session.launch_steps):
        logits.append(session.score(ids[first : first + session.launch_steps]))
        exchanged.append(session.exchanged())
    session.launcher.restart()
    prompt = ids[:PROMPTED]
    plain = session.generate(prompt, 6, temperature=1.0, seed=3)
    session.launcher.restart()
    stopped = session.generate(prompt, 6, temperature=1.0, seed=3, stop_ids=[plain[2]])
    if stopped != plain[: plain.index(plain[2]) + 1]:
        raise CheetahError(f"with stop id {plain[2]} the launch sampled {stopped}, without it {plain}")
    rest = session.generate(stopped[-1:], 3)
    return [np.concatenate(logits), plain, stopped, rest, session.cached(), *exchanged, session.exchanged()]


def race_in(sanitized: Rig) -> Finding | None:
    """What the race detector says of a few steps behind a cache that is filled, or else of many from an empty one, or
    else of either in another order: of the reads of a word it keeps a few, and another may be the one that races."""
    for seed, steps, cached in ((1, 2, 35), (1, 37, 0), (2, 2, 35), (2, 37, 0)):
        try:
            short_course(sanitized.session("random", seed), steps, cached)
        except CheetahError as error:  # a wild address ends the process that runs it
            return Finding("race", f"{type(error).__name__}: {error}", f"random {seed}")
    return None


def short_course(session: Session, steps: int, cached: int) -> None:
    """As much as shows every kind of access: keys split so that a block has several items, in a cache of earlier steps,
    logits, and sampling. steps: of the first launch, behind `cached` tokens."""
    ids = token_ids(steps + 3, session.config.vocab_size)
    if cached:
        fill_cache(session, cached)
    session.launcher.launch(ids[: steps + 1], steps, Sampling())
    session.score(ids[steps : steps + 2])
    session.generate(ids[steps + 2 :], 2)


@cache
def wanted_logits(setup: Setup) -> F32:
    return float32_logits(setup.weights, setup.ids(setup.scored))


# -- changes of building blocks ---------------------------------------------------------------------------------------


def read_without_waiting(vector: str) -> Callable[[Patch], None]:
    """One vector's flagged words are read as they are."""

    def change(patch: Patch) -> None:
        one, several, anywhere = FlaggedExchange.read4, FlaggedExchange.read_units, FlaggedExchange.read_places
        settle = FlaggedExchange.settle4

        def read4(self: Any, name: str, unit: Any, epoch: Any) -> Any:
            return payload(self, name, unit) if name == vector else one(self, name, unit, epoch)

        def read_units(self: Any, name: str, data: Any, unit: Any, stride: int, count: int, epoch: Any) -> None:
            if name != vector:
                several(self, name, data, unit, stride, count, epoch)
                return
            for number in range(count):
                data[number] = payload(self, name, unit + number * stride)

        def read_places(self: Any, name: str, data: Any, places: Any, count: int, epoch: Any) -> None:
            if name != vector:
                anywhere(self, name, data, places, count, epoch)
                return
            for number in range(count):
                data[number] = payload(self, name, places[number] // 4)

        def settle4(self: Any, asked: Any, name: str, unit: Any, epoch: Any) -> Any:
            return payload(self, name, unit) if name == vector else settle(self, asked, name, unit, epoch)

        patch.setattr(FlaggedExchange, "read4", read4)
        patch.setattr(FlaggedExchange, "settle4", settle4)
        patch.setattr(FlaggedExchange, "read_places", read_places)
        patch.setattr(FlaggedExchange, "read_units", read_units)

    return change


def tags_for_all_inputs(patch: Patch) -> None:
    """Of all vectors that products take, whoever reads them."""

    def every(shape: ModelShape, gpu: Gpu, plan: Plan) -> dict[str, int]:
        return {vector.name: vector.exponent for vector in shape.table.inputs}

    patch.setattr("cheetah.models.dense.step.product_inputs", every)


def leave_out_half_of_the_columns(patch: Patch) -> None:
    """Of a narrow M-tile, its rows by the second half."""
    patch.setattr(Adding, "_fold", lambda _, row_sum: row_sum)


def swap_halves_of_the_columns(patch: Patch) -> None:
    """The sums by one half are taken for those by the other."""
    half_and_place = Reductions._half_and_place

    def swapped(self: Any, group: int, index: int) -> tuple[Any, Any]:
        half, place = half_and_place(self, group, index)
        return 1 - half, place

    patch.setattr(Reductions, "_half_and_place", swapped)


def payload(exchange: FlaggedExchange, name: str, unit: Any) -> Any:
    """The payload of a unit as it stands in memory."""
    words = exchange.place(name, ch.cast(ty.u32, unit) * 4)
    return prim.make_u32x4(*(ty.u32(words[number]) for number in range(4)))


def share_memory(first: str, second: str) -> Callable[[Patch], None]:
    """Two vectors lie in the same words."""

    def change(patch: Patch) -> None:
        lay_out = Exchange.lay_out.__func__  # type: ignore[attr-defined]

        def shared(cls: Any, sizes: dict[str, int], inputs: Any, *place: Any) -> Any:
            vectors = lay_out(cls, sizes, inputs, *place)
            vectors[first] = replace(vectors[first], offset=vectors[second].offset)
            return vectors

        patch.setattr(Exchange, "lay_out", classmethod(shared))
        patch.setattr("cheetah.blocks.exchange_kinds.apart", lambda vectors: vectors)  # which would refuse it

    return change


def fold_in_the_order_of_arrival(patch: Patch) -> None:
    """A warp begins with the partial state that a ticket says (from a counter in the workspace)."""
    sources, fold_sources = Schedule.sources, Merger._fold_sources
    counters: list[Any] = []

    def fold(self: Any, *arguments: Any) -> None:
        counters.append(self.exchange.words[ty.u64])
        fold_sources(self, *arguments)

    @ch.inline
    def turned(self: Any, merge: Any, first: Any, every: Any, count: Any) -> Any:
        ticket = ch.var(ty.u32, 0)
        with ch.if_(self.machine.lane == 0):
            ticket.set(ty.u32(prim.fetch_add_release_u64(counters[-1], 1)))
        arrived = prim.shuffle_u32(ticket, 0)
        in_order = sources(self, merge, first, every, count)
        found = prim.shuffle_u32(in_order, (self.machine.lane + arrived) % count)
        return found

    patch.setattr(Merger, "_fold_sources", fold)
    patch.setattr(Schedule, "sources", turned)


def give_back_for_one(patch: Patch) -> None:
    """A warp that works on a stage of keys gives it back for itself, and nobody does for those that have no keys in
    it."""

    def arrivals(self: Sharing, share: Any, first_tile: Any, last_tile: Any) -> Any:
        assert self.shares_stages, "each warp gives back every stage for itself anyway"
        return ty.u32(1)

    patch.setattr(Sharing, "arrivals", arrivals)


def merge_the_first_state_twice(patch: Patch) -> None:
    source = Schedule._source
    patch.setattr(Schedule, "_source", lambda self, index: source(self, index - index % 2))


def load_without_meeting(patch: Patch) -> None:
    """The input of o and down is multiplied without waiting for the other warps' share of it."""
    load_vector = prologue.load_vector

    def load(columns: Any, *arguments: Any) -> None:
        with Patch.context() as inner:
            inner.setattr(type(columns.machine), "meet", lambda self: None)
            load_vector(columns, *arguments)

    patch.setattr(prologue, "load_vector", load)


def wait_for_the_step_too_late(patch: Patch) -> None:
    """The producer lane fetches the first layer's keys and values, and then waits for the end of the last step."""
    wait, attend = Tokens.launch_is_over, StepParts.attend

    def attend_and_wait(self: Any, step: Any, layer: Any) -> None:
        attend(self, step, layer)
        with self.machine.producer:
            with ch.if_((layer == 0) & (step > 0)), ch.if_(wait(self.tokens, step)):
                ch.return_()

    patch.setattr(Tokens, "launch_is_over", lambda self, step: False)
    patch.setattr(StepParts, "attend", attend_and_wait)


def leave_out_meeting(number: int) -> Callable[[Patch], None]:
    """The grid barrier that is emitted as number `number` is missing."""

    def change(patch: Patch) -> None:
        meet, emitted = BarrierExchange.meet, iter(range(1000))

        def left_out(self: BarrierExchange, *when: Any) -> None:
            if next(emitted) != number:
                meet(self, *when)

        patch.setattr(BarrierExchange, "meet", left_out)

    return change


# -- the bugs ---------------------------------------------------------------------------------------------------------

RELAXED_ADD = "__atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); cheetah_emulator::words_written(counter);"
MEET = r"named_barrier\(1, CONSUMERS\);"
LOADED = r"mbarrier_wait\(loaded, loaded_parity\);"
TAKEN = r"mbarrier_wait\(taken \+ turn, turn_parity \^ 1\);"
BOTH = ("schedules", "race")


def without(pattern: str, before: str = "", after: str = "") -> tuple[tuple[str, str], ...]:
    """The edit that takes away what matches `pattern` between `before` and `after`."""
    return ((f"({before}){pattern}({after})", r"\1;\2"),)


BUGS = (
    # -- the ring
    Bug("ring wait of the wrong parity", BOTH, ((r"use_parity = 0;", "use_parity = 1;"),)),
    Bug("consumer warps do not wait for full", BOTH, without(r"mbarrier_wait\(full \+ use_stage, use_parity\);")),
    Bug("producer warp ignores empty", BOTH, without(r"mbarrier_wait\(empty \+ fill_stage, fill_parity\);")),
    Bug(
        "stage given back before all lanes have read",
        BOTH,
        without(r"warp_barrier\(\);", after=r"\s*if \(lane == 0\) \{?\s*mbarrier_arrive\(empty"),
    ),
    Bug("one arrival frees a stage", BOTH, ((r"(mbarrier_init\(empty \+ stage), 2\)", r"\1, 1)"),)),
    Bug("no barrier after the mbarriers are made", BOTH, without(r"block_barrier\(\);")),
    Bug("weights fetched ahead are not used up", ("schedules",), ((r"if \(step \+ 1 < steps\)", "if (false)"),)),
    # -- shared memory of a block
    Bug("no barrier between loading and multiplying", BOTH, change=load_without_meeting),
    # -- 1/rms of the tokens
    Bug("no wait for the sums of squares", BOTH, change=read_without_waiting("hidden_squares")),
    Bug(
        "the sums of squares of the norm before",
        ("schedules",),
        change=share_memory("hidden_squares", "middle_squares"),
    ),
    Bug("half the rows squared", ("reference",), ((r"(total\w* = told \* told);", r"\1 * (row < 8);"),)),
    Bug("sums of squares read before blocks have met", BOTH, without(LOADED), sync="barrier"),
    Bug(
        "a warp comes to the next input before its lanes have left the last",
        ("schedules",),
        without(r"warp_barrier\(\);", after=r"\s*if \(lane == 0\) \{?\s*mbarrier_arrive\(loaded"),
    ),
    Bug(
        "an input is there once an adding warp has come to it",
        BOTH,
        ((r"(mbarrier_init\(loaded), 3\)", r"\1, 2)"),),
        sync="barrier",
    ),
    # -- from the consumer warps to the adding warps and back
    Bug(
        "one reduction buffer",
        BOTH,
        ((r"(float\* reduction = [^;]*) \+ (?:turn|adding) \* \(WARP_SUMS \* 2\);", r"\1;"),),
    ),
    Bug("rows finished before all warps have summed", BOTH, without(r"mbarrier_wait\(summed \+ adding, \w+\);")),
    Bug("the parity of the sums", BOTH, ((r"(summed \+ adding, adding_parity)\);", r"\1 ^ 1);"),)),
    Bug("one warp's sums are enough", BOTH, ((r"(mbarrier_init\(summed \+ reduction), 2\)", r"\1, 1)"),)),
    Bug(
        "the sums of the next M-tile",
        BOTH,
        ((r"(float\* reduction = [^;]*) \+ adding \* \(WARP_SUMS \* 2\);", r"\1 + (adding ^ 1) * (WARP_SUMS * 2);"),),
    ),
    Bug("sums laid over others that nobody has added", BOTH, without(TAKEN, after=r"\s*float\* reduction")),
    Bug("the parity of what was taken", BOTH, ((r"(taken \+ turn, turn_parity) \^ 1\);", r"\1);"),)),
    Bug(
        "a product ends before its rows are finished",
        BOTH,
        without(TAKEN, before=r"for \(uint32_t i = 0; i < 2; \+\+i\) \{\s*"),
    ),
    Bug(
        "a reduction given back before all lanes have read",
        ("race",),
        without(r"warp_barrier\(\);", after=r"\s*if \(lane == 0\) \{?\s*mbarrier_arrive\(taken"),
    ),
    Bug("candidates taken before they are laid down", BOTH, without(r"mbarrier_wait\(step_added, step % 2\);")),
    Bug("one adding warp's candidates are enough", BOTH, ((r"(mbarrier_init\(step_added), 2\)", r"\1, 1)"),)),
    Bug("adding warps go on before the step ends", BOTH, without(r"mbarrier_wait\(step_done, step % 2\);")),
    Bug("token read before it is chosen", BOTH, without(MEET, before=r"mbarrier_arrive\(step_done\);[\s}]*")),
    # -- narrow M-tiles
    Bug("rows by half of their columns", ("reference",), change=leave_out_half_of_the_columns, setup=NARROW),
    Bug("halves of columns swapped", ("reference",), change=swap_halves_of_the_columns, setup=NARROW),
    # -- exchanges
    Bug("no wait for gated", BOTH, change=read_without_waiting("gated")),
    Bug("no wait for the partial states", BOTH, change=read_without_waiting("partials")),
    Bug("hidden lies over middle", ("schedules",), change=share_memory("hidden", "middle")),
    Bug("middle lies over attention, one phase early", ("schedules",), change=share_memory("middle", "attention")),
    Bug(
        "epoch not advanced between layers",
        ("schedules",),
        ((r"layer_epoch = step_epoch \+ layer \+ 1;", "layer_epoch = step_epoch + 1;"),),
    ),
    Bug(
        "embeddings with the tag of the last layer before",
        ("schedules",),
        ((r"step_epoch = epoch \+ step \* (STEP_EPOCHS);", r"step_epoch = epoch + step * (\1 + 2);"),),
    ),
    Bug("half of the embedding", ("reference",), ((r"float value = embedded;", "float value = embedded * 0.5f;"),)),
    Bug("no grid barrier behind the embeddings", BOTH, change=leave_out_meeting(0), sync="barrier"),
    Bug(
        "epoch not advanced between steps",
        BOTH,
        ((r"step_epoch = epoch \+ step \* STEP_EPOCHS;", "step_epoch = epoch;"),),
    ),
    Bug("barrier without release", ("race",), ((r"\badd_release_u64\(counter, 1\);", RELAXED_ADD),), sync="barrier"),
    Bug("no grid barrier before the merge", BOTH, change=leave_out_meeting(2), sync="barrier"),
    Bug("no grid barrier after gate_up", BOTH, change=leave_out_meeting(5), sync="barrier"),
    Bug("middle over attention, with barriers", BOTH, change=share_memory("middle", "attention"), sync="barrier"),
    # -- keys and values, attention
    Bug("cache read before the step is done", BOTH, change=wait_for_the_step_too_late, setup=ROOMY),
    Bug(
        "newest key taken from the cache",
        BOTH,
        (
            (r"(uint32_t end = min\(\S+->item\.end, \S+ \+ \S+ \* step)\);", r"\1 + 1);"),
            (r"newest = newest_begin < newest_end \? newest_end - newest_begin : 0;", "newest = 0;"),
        ),
    ),
    Bug("step ended without release", ("race",), ((r"publish_flagged_release\(", "publish_flagged("),)),
    Bug("step ended without acquire", ("race",), ((r"wait_flagged4_acquire\(", "wait_flagged4("),)),
    Bug("queries used before they are there", BOTH, without(MEET, before=r"\[thread\] = \w+;[\s}]*")),
    Bug(
        "newest keys read before their warp has stored them",
        BOTH,
        without(r"warp_barrier\(\);", before=r"place\w*\[0\] = words;[\s}]*"),
    ),
    Bug(
        "states folded before they are there",
        BOTH,
        without(MEET, after=r"\s*fold_slices\("),
    ),
    Bug("states overwritten while folded", BOTH, without(MEET, before=r"\sfold_slices\([^;{]*;\s*")),
    Bug(
        "a team's states folded before they are there",
        ("reference",),
        without(r"named_barrier\(warp / 4 \+ 2, TEAM_THREADS\);", before=r"\slay_down_folded\([^;{]*;\s*"),
        setup=MANY,
    ),
    Bug(
        "the next vector over a team's states",
        ("schedules",),
        without(r"named_barrier\(1, CONSUMERS\);", before=r"if \(jobs > 0\) \{?\s*"),
        setup=MANY,
    ),
    Bug("keys given back for one warp", BOTH, change=give_back_for_one, setup=ROOMY),
    Bug("partial states folded as they come", ("schedules",), change=fold_in_the_order_of_arrival, setup=MANY),
    Bug("one partial state merged twice", ("reference",), change=merge_the_first_state_twice),
    Bug(
        "stale values multiplied by zero",
        ("schedules",),
        ((r"(tile_key(?:_\d+)? = )min\(([^;]*), valid - 1\);", r"\1\2;"),),
    ),
    # -- blocks that have little to do
    Bug(
        "one vector of candidates",
        ("schedules",),
        ((r"first_word = step % 2 \* [^;]+;", "first_word = 0;"),),
        setup=IDLE,
    ),
    Bug(
        "tags for who reads a vector in the head alone",
        ("reference",),
        change=tags_for_all_inputs,
        setup=HEAD_ALONE,
    ),
    Bug("producer lane overtaken by two steps", BOTH, without(r"mbarrier_wait\(step_done \+ 1, [^;]*;"), setup=IDLE),
)
"""Not to be seen here: a missing `fence_proxy_async`, for the emulator has one proxy."""
