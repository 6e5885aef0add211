"""The launches that a kernel of decode steps is judged by, and what float32 says of what they gave.

The device lays traps (see `JudgingDevice`): where a kernel may not look there is something that tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.emulator import EmulatorError
from cheetah.errors import CheetahError
from cheetah.manifest import NO_PAGE
from cheetah.models.family import ReferenceModel
from cheetah.models.rounding import F32, Rounding, exact, round_to_bf16, round_to_e4m3
from cheetah.models.sampling import gumbel_noise
from cheetah.plan.kv.tables import TILE_WORDS, TileRecord, word
from cheetah.runtime.device.emulator import EmulatorBuffer, EmulatorDevice
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launcher import LaunchFault, Part, Sampling
from cheetah.tools.rig import Rig, Session

LAUNCH_TIMEOUT_S = 120.0
MANY_CHUNKS = 2
"""Copies of a launch, for each block and chunk in flight, from which on they must come as far ahead as they may."""
PROMPT_TOKENS = 3
TOGETHER_STEPS = 3
TEACHER_TOKENS = 5
TEMPERATURE, SAMPLING_SEED = 0.8, 7 + (11 << 32)
"""The seed needs both of its halves."""
HOT = 16.0
"""The temperature of sequences that draw together: every row of the head has a chance, those of padding too."""
SAMPLING_MARGIN = 1e-3
"""How far below the best a drawn token's noisy logit may lie: logarithms differ in their last bits."""
TOLERANCE_FACTOR, LEAST_TOLERANCE = 3.0, 0.01
"""Allowed: so many times the error that rounding activations to bf16 makes in the reference itself."""


class KernelFault(EmulatorError):
    """A launch that ended, but not as the runtime is promised: a number of steps or a token that cannot be."""


@dataclass(frozen=True)
class Agreement:
    """The kernel's logits, or what else `compared` names, against float32. Errors are relative (L2, the worst of
    `count`); `problems` are sentences."""

    count: int
    error: float
    tolerance: float
    problems: tuple[str, ...]
    compared: str = "positions' logits"

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if not self.ok:
            return "\n".join(self.problems)
        return f"{self.count} {self.compared} within {self.error:.2e} of float32 (allowed {self.tolerance:.2e})"


@dataclass(frozen=True)
class Transcript:
    """What one run of the course gave. `ids` is the sequence from an empty cache: the prompt, then what was sampled.

    late_logits: f32 [TEACHER_TOKENS, vocab] after the cache that the reference filled. logits: f32 [len(ids), vocab].
    together: (ids, f32 [some last ids, vocab]) of sequences that shared steps, and of a prompt read several tokens a
    step; drawn_together: the token that each of the former then drew, with a seed of its own. launches: the ids that
    each launch sampled. pool, exchange: the KV pool and the exchanged vectors at the end: f32 states show what bf16 and
    the choice of a token hide.
    """

    ids: tuple[int, ...]
    launches: tuple[tuple[int, ...], ...]
    late_logits: F32
    logits: F32
    together: tuple[tuple[tuple[int, ...], F32], ...]
    drawn_together: tuple[int, ...]
    pool: NDArray[Any]
    exchange: NDArray[np.uint8]


class JudgedSteps:
    """The launches that every schedule goes through, over the pages of the pool in a shuffled order.

    1. A cache filled by the reference to just below the length at which a head's keys are split over blocks: some given
       tokens with logits, across that length, then some more that are sampled.
    2. An empty cache: a prompt and three sampled tokens in one launch. 3. A launch that goes on at a temperature; the
    same again from the same place with a stop id, which ends it early. 4. A launch that goes on from there. 5. The
    logits of that whole sequence in one launch from an empty cache. 6. If the kernel takes several sequences: as many
    as it takes, of different lengths, with logits, and then a token drawn for each. If it takes several tokens of a
       sequence: that whole sequence again, so many tokens a step.

    The first launch ends where the keys that are cached fill their last page: nothing behind them may be looked up.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig, self.config, self.plan, self.pace = rig, rig.config, rig.plan, Pace(rig.plan.in_flight)
        config, plan = rig.config, rig.plan
        self.reference, self.rounded = reference_of(rig), reference_of(rig, round_to_bf16)
        draw = np.random.default_rng(0)
        context = min(plan.max_context, config.max_position_embeddings)
        needed = PROMPT_TOKENS + 3 + 3 + 3 + 2
        if context < needed or plan.max_steps < needed:
            raise CheetahError(
                f"check needs max_context and max_steps of at least {needed}, not {context}, {plan.max_steps}"
            )
        filled = self._tokens_to_fill(context)
        self.prompt, self.filling, self.teacher = (
            tuple(int(token) for token in draw.integers(0, config.vocab_size, count))
            for count in (PROMPT_TOKENS, filled, TEACHER_TOKENS)
        )
        self.page_order = [int(page) for page in draw.permutation(plan.kv_pages)]
        self.late_reference, self.late_rounded = self._after_filling(self.reference), self._after_filling(self.rounded)
        keys, values = self.rounded.keys[:, :, :filled], self.rounded.values[:, :, :filled]
        self.filled_keys, self.filled_values = self._stored(keys), self._stored(values)

    def _tokens_to_fill(self, context: int) -> int:
        """Tokens that the reference caches: up to the length at which keys are split, and so that the last of the given
        tokens finds whole pages cached, if possible in a stage with room for more."""
        page, before_last = self.plan.page_size, TEACHER_TOKENS - 1
        most = min(self.plan.kv_chunk_min + before_last, context - 3)
        last = most // page * page
        if last % self.plan.kv_stage_tokens(self.config.head_dim) == 0:
            last -= page
        return max(0, last - before_last)

    def run(self, scheduler: str, seed: int) -> Transcript:
        """One run. EmulatorError where a launch fails or breaks its promises."""
        session = Session(self.rig, JudgingDevice(self.rig, scheduler, seed, self.pace), self.page_order)
        try:
            return self._launches(session)
        except LaunchFault as error:
            raise KernelFault(str(error)) from error

    def _launches(self, session: Session) -> Transcript:
        launcher, cache = session.launcher, session.launcher.cache
        self._fill_cache(session, cache)
        late_logits = session.score(self.teacher)
        late = launcher.launch(self.teacher[-1:], 2, Sampling()).token_ids
        launcher.restart()
        prompted = launcher.launch(self.prompt, PROMPT_TOKENS + 2, Sampling()).token_ids
        drawn = launcher.launch(prompted[-1:], 3, Sampling(TEMPERATURE, SAMPLING_SEED)).token_ids
        cache.length -= len(drawn)
        stopped = launcher.launch(prompted[-1:], 3, Sampling(TEMPERATURE, SAMPLING_SEED, (drawn[1],))).token_ids
        if stopped != drawn[: drawn.index(drawn[1]) + 1]:
            raise KernelFault(f"with stop id {drawn[1]} a launch sampled {stopped}; without it {drawn}")
        continued = launcher.launch(stopped[-1:], 2, Sampling()).token_ids
        launcher.restart()
        session.logits.fill(0xFF)
        ids = (*self.prompt, *prompted, *stopped, *continued)
        scores = session.score(ids)
        together = self._together(session, ids)
        drawn_together: tuple[int, ...] = ()
        if self.plan.batch > 1:
            shared, drawn_together = self._batched(session, ids)
            together += shared
        launches = (late, prompted, drawn, stopped, continued)
        states = session.cached(), session.exchanged()
        return Transcript(ids, launches, late_logits, scores, together, drawn_together, *states)

    def outputs(self, found: Transcript) -> list[NDArray[Any]]:
        """Everything that must not depend on the schedule."""
        sampled = [np.array(tokens, np.int64) for tokens in (*found.launches, found.drawn_together)]
        together = [logits for _, logits in found.together]
        return [*sampled, found.late_logits, found.logits, *together, found.pool, found.exchange]

    def pace_problem(self) -> str:
        """What is wrong with how far the copies ran ahead."""
        return self.pace.problem()

    def _together(self, session: Session, ids: Sequence[int]) -> tuple[tuple[tuple[int, ...], F32], ...]:
        """What several tokens of one sequence in a step give."""
        session.launcher.restart()
        return ((tuple(ids), session.score(ids, self.plan.tokens)),) if self.plan.tokens > 1 else ()

    def _batched(
        self, session: Session, ids: Sequence[int]
    ) -> tuple[tuple[tuple[tuple[int, ...], F32], ...], tuple[int, ...]]:
        """(what several sequences in a step give, what each draws then); the caches are empty again afterwards."""
        launcher = session.launcher
        launcher.restart()
        sequences = [tuple(ids[: number + TOGETHER_STEPS]) for number in range(self.plan.batch)]
        caches = [session.sequence() for _ in sequences]
        for sequence, own in zip(sequences, caches, strict=True):
            if begun := len(sequence) - TOGETHER_STEPS:
                launcher.launch_together([Part(own, sequence[: begun + 1], begun)])
        scores = session.score_together([sequence[-TOGETHER_STEPS:] for sequence in sequences], caches)
        for own in caches:
            own.length -= 1
        parts = [
            Part(own, sequence[-1:], 1, Sampling(HOT, SAMPLING_SEED + number))
            for number, (sequence, own) in enumerate(zip(sequences, caches, strict=True))
        ]
        drawn = tuple(token for result in launcher.launch_together(parts) for token in result.token_ids)
        if len(drawn) != len(parts):
            raise KernelFault(f"{len(parts)} sequences drew the tokens {drawn}, one each was asked for")
        for own in caches:
            own.clear()
        return tuple(zip(sequences, scores, strict=True)), drawn

    def agreement(self, transcript: Transcript) -> Agreement:
        """The transcript against the reference, and its sampled ids against its own logits."""
        found = np.concatenate([transcript.logits, transcript.late_logits, *(part for _, part in transcript.together)])
        wanted, rounded = (
            np.concatenate(
                [
                    *(reference.forward(transcript.ids), late),
                    *(reference.forward(ids)[-len(part) :] for ids, part in transcript.together),
                ]
            )
            for reference, late in ((self.reference, self.late_reference), (self.rounded, self.late_rounded))
        )
        errors = relative_errors(found, wanted)
        tolerance = max(LEAST_TOLERANCE, TOLERANCE_FACTOR * float(relative_errors(rounded, wanted).max()))
        problems = []
        if not np.all(errors <= tolerance):  # a NaN is no agreement
            worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
            problems.append(
                f"the logits of position {worst} are {errors[worst]:.2e} from float32, allowed is {tolerance:.2e}"
            )
        problems += self._sampling_problems(transcript)
        return Agreement(len(found), float(errors.max()), tolerance, tuple(problems))

    def _sampling_problems(self, transcript: Transcript) -> list[str]:
        """Tokens that the logits before them do not explain."""
        _, prompted, _, stopped, _ = transcript.launches
        drawn = range(PROMPT_TOKENS + len(prompted), PROMPT_TOKENS + len(prompted) + len(stopped))
        problems = [
            sampling_problem(
                transcript.ids[position],
                transcript.logits[position - 1],
                position,
                TEMPERATURE if position in drawn else 0.0,
            )
            for position in range(PROMPT_TOKENS, len(transcript.ids))
        ]
        batched = transcript.together[len(transcript.together) - len(transcript.drawn_together) :]
        problems += [
            sampling_problem(token, scores[-1], len(ids), HOT, SAMPLING_SEED + number)
            for number, (token, (ids, scores)) in enumerate(zip(transcript.drawn_together, batched, strict=True))
        ]
        return [problem for problem in problems if problem]

    def _after_filling(self, reference: ReferenceModel) -> F32:
        """The reference's logits of the given tokens after `filling`."""
        reference.reset()
        for token in self.filling:
            reference.step(token)
        return np.stack([reference.step(token) for token in self.teacher])

    def _stored(self, values: F32) -> NDArray[Any]:
        """Keys or values as the pool has them; they are exactly that already."""
        if self.plan.kv_dtype == "e4m3":
            return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)

    def _fill_cache(self, session: Session, cache: CachedSequence) -> None:
        """Writes `filling`'s keys and values to the cache's pages; all else in the pool stays poisoned."""
        cache.reserve(len(self.filling))
        table = cache.table(self.plan.pages_per_sequence)
        pool = session.cached()
        for position in range(len(self.filling)):
            page, slot = table[position // self.plan.page_size], position % self.plan.page_size
            pool[:, page, 0, :, slot] = self.filled_keys[:, :, position]
            pool[:, page, 1, :, slot] = self.filled_values[:, :, position]
        session.buffers["kv"].upload(pool)
        cache.length = len(self.filling)


def reference_of(rig: Rig, rounding: Rounding = exact) -> ReferenceModel:
    """What a rig's kernels mean, over a cache that keeps what theirs keeps."""
    cached = round_to_e4m3 if rig.plan.kv_dtype == "e4m3" else None
    return rig.family.reference(rig.config, rig.weights.tensor, rounding, cached=cached)


@dataclass
class Pace:
    """How many chunks a kernel's blocks had under way in the launches so far. in_flight: how many its plan wants."""

    in_flight: int
    most_chunks: int = 0
    has_enough: bool = False

    def note(self, stats: Any, blocks: int) -> None:
        """The counts of one launch."""
        self.most_chunks = max(self.most_chunks, stats.most_chunks)
        self.has_enough = self.has_enough or stats.copies > MANY_CHUNKS * blocks * self.in_flight

    def problem(self) -> str:
        """That the copies never came as far ahead as the plan lets them, where there was enough to copy."""
        if not self.has_enough or self.most_chunks >= self.in_flight:
            return ""
        return (
            f"a block never had more than {self.most_chunks} chunks under way, its plan lets it have {self.in_flight}: "
            "the producer lane waits for a chunk that it need not wait for yet"
        )


class JudgingDevice(EmulatorDevice):
    """An emulated device with a limit of time, which notes the pace of launches, on which attention's tiles look their
    pages up in tables of their own, in which nothing stands behind the keys that are cached when a launch ends: the
    emulator tells who looks there."""

    def __init__(self, rig: Rig, scheduler: str, seed: int, pace: Pace | None = None) -> None:
        super().__init__(scheduler=scheduler, seed=seed)
        self._schedule["timeout_s"] = LAUNCH_TIMEOUT_S
        self._plan, self._steps, self._pace = rig.plan, rig.family.program.KERNEL_NAME, pace

    def launch(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        trapped = {**arguments, **self._traps(arguments)} if kernel.manifest.kernel == self._steps else arguments
        super().launch(kernel, trapped)
        if self._pace is not None and self.stats is not None:
            self._pace.note(self.stats, kernel.manifest.launch.blocks)

    def _traps(self, arguments: Mapping[str, Any]) -> dict[str, EmulatorBuffer]:
        """The tables with what tells in them."""
        words = self._plan.batch * self._plan.pages_per_sequence
        tiles = arguments["tiles"].download(np.int32, (arguments["tiles"].nbytes // (4 * TILE_WORDS), TILE_WORDS))
        table = arguments["page_table"].download(np.int32, words)
        traps = {
            "page_table": np.concatenate([table, self._own_tables(table, tiles, arguments["steps"])]),
            "tiles": tiles + np.eye(TILE_WORDS, dtype=np.int32)[word(TileRecord, "table")] * words,
        }
        return {name: self._uploaded(array) for name, array in traps.items()}

    def _own_tables(self, table: NDArray[np.int32], tiles: NDArray[np.int32], steps: int) -> NDArray[np.int32]:
        """The tables up to the pages with keys that some tile finds cached; what earlier launches left in `tiles` at
        most keeps a trap from being laid."""
        own = np.full_like(table, NO_PAGE)
        first, length, stride = (tiles[:, word(TileRecord, name)] for name in ("table", "length", "stride"))
        for begin, keys in zip(first, length.astype(np.int64) + (steps - 1) * stride.astype(np.int64), strict=True):
            if 0 <= begin < len(table) and keys >= 0:
                end = begin + -(-int(keys) // self._plan.page_size)
                own[begin:end] = table[begin:end]
        return own

    def _uploaded(self, array: NDArray[np.int32]) -> EmulatorBuffer:
        buffer = self.allocate(array.nbytes)
        buffer.upload(array)
        return buffer


def sampling_problem(token: int, logits: F32, position: int, temperature: float, seed: int = SAMPLING_SEED) -> str:
    """Why a token cannot have been sampled from the logits before it, or ""."""
    scores, margin = logits, SAMPLING_MARGIN
    if temperature:
        scores = logits / np.float32(temperature) + gumbel_noise(np.arange(len(logits)), seed, position)
    best = int(scores.argmax())  # the lowest of equal ones
    is_right = scores[token] >= scores[best] - margin if temperature else token == best
    return "" if is_right else f"token {token} was sampled at position {position}, its logits give {best}"


def relative_errors(found: F32, wanted: F32) -> F32:
    """|found - wanted| / |wanted| (L2) of each row."""
    return np.asarray(np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1))
