"""The launches that a kernel is judged by, on any program of it, and what float32 says of what they gave.

The launches are prepared by the runtime itself, so what is judged is what is run; but the device lays traps (see
`TrapDevice`): where a kernel may not look there is something that tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.emulator import EmulatorError
from cheetah.errors import CheetahError
from cheetah.manifest import NO_PAGE, Manifest
from cheetah.models.config import ModelConfig
from cheetah.models.family import ReadRows, ReadTensor, ReferenceModel
from cheetah.models.registry import family_of
from cheetah.models.rounding import F32, round_to_bf16, round_to_e4m3
from cheetah.models.sampling import gumbel_noise
from cheetah.plan import Plan
from cheetah.plan.kv.tables import TILE_WORDS, TileRecord, word
from cheetah.runtime.assembly.buffers import allocate_buffers, upload_weights
from cheetah.runtime.device.emulator import EmulatorBuffer, EmulatorDevice, EmulatorKernel
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.launcher import Launcher, LaunchFault, Part, Sampling

Bits = NDArray[np.uint16]
Tensors = Mapping[str, Bits] | Callable[[str], Bits]

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


class Launchable(Protocol):
    """A compiled kernel under one schedule."""

    def launch(self, blocks: int, threads: int, shared_bytes: int, values: Sequence[Any], **options: Any) -> Any: ...


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

    @property
    def outputs(self) -> list[NDArray[Any]]:
        """Everything that must not depend on the schedule."""
        sampled = [np.array(tokens, np.int64) for tokens in (*self.launches, self.drawn_together)]
        together = [logits for _, logits in self.together]
        return [*sampled, self.late_logits, self.logits, *together, self.pool, self.exchange]


class Course:
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

    def __init__(self, manifest: Manifest, config: ModelConfig, tensors: Tensors) -> None:
        read = tensors.__getitem__ if isinstance(tensors, Mapping) else tensors
        self.manifest, self.config = manifest, config
        self.plan = Plan.from_dict(manifest.plan)
        self.reference, self.rounded = self._references(read)
        draw = np.random.default_rng(0)
        context = min(self.plan.max_context, config.max_position_embeddings)
        needed = PROMPT_TOKENS + 3 + 3 + 3 + 2
        if context < needed or self.plan.max_steps < needed:
            raise CheetahError(
                f"check needs max_context and max_steps of at least {needed}, not {context}, {self.plan.max_steps}"
            )
        filled = self._tokens_to_fill(context)
        self.prompt = tuple(int(token) for token in draw.integers(0, config.vocab_size, PROMPT_TOKENS))
        self.filling = tuple(int(token) for token in draw.integers(0, config.vocab_size, filled))
        self.teacher = tuple(int(token) for token in draw.integers(0, config.vocab_size, TEACHER_TOKENS))
        self.context = context
        self.page_order = [int(page) for page in draw.permutation(self.plan.kv_pages)]
        self.late_reference, self.late_rounded = self._after_filling(self.reference), self._after_filling(self.rounded)
        keys, values = self.rounded.keys[:, :, :filled], self.rounded.values[:, :, :filled]
        self.filled_keys, self.filled_values = self._stored(keys), self._stored(values)
        self._fixed = fixed_buffers(manifest, config, tensors)

    def _references(self, read: ReadTensor) -> tuple[ReferenceModel, ReferenceModel]:
        """The meaning, and the same with activations rounded to bf16; both cache keys and values as the plan says."""
        family, cached = family_of(self.config), round_to_e4m3 if self.has_codes else None
        return (
            family.reference(self.config, read, cached=cached),
            family.reference(self.config, read, round_to_bf16, cached=cached),
        )

    @property
    def has_codes(self) -> bool:
        """Keys and values are cached as e4m3 codes."""
        return self.plan.kv_dtype == "e4m3"

    def _tokens_to_fill(self, context: int) -> int:
        """Tokens that the reference caches: up to the length at which keys are split, and so that the last of the given
        tokens finds whole pages cached, if possible in a stage with room for more."""
        page, before_last = self.plan.page_size, TEACHER_TOKENS - 1
        most = min(self.plan.kv_chunk_min + before_last, context - 3)
        last = most // page * page
        if last % self.plan.kv_stage_tokens(self.config.head_dim) == 0:
            last -= page
        return max(0, last - before_last)

    def run(self, program: Launchable) -> Transcript:
        """One run. EmulatorError where a launch fails or breaks its promises."""
        device = TrapDevice(self.plan)
        buffers: dict[str, Any] = {}
        allocate_buffers(device, self.manifest, buffers)
        buffers.update(self._fixed)
        cache = CachedSequence(PagePool(self.plan.kv_pages, self.page_order), self.plan.page_size, self.context)
        kernel = EmulatorKernel(self.manifest, program)
        launcher = Launcher(device, kernel, self.manifest, self.config, buffers, cache)
        logits = device.allocate(self.plan.max_steps * self.plan.tokens * self.config.vocab_size * 4)
        try:
            return self._launches(launcher, buffers, logits)
        except LaunchFault as error:
            raise KernelFault(str(error)) from error

    def _launches(self, launcher: Launcher, buffers: Mapping[str, Any], logits: Any) -> Transcript:
        cache = launcher.cache
        self._fill_cache(cache, buffers)
        late_logits = launcher.score(self.teacher, logits, 1)
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
        logits.fill(0xFF)
        ids = (*self.prompt, *prompted, *stopped, *continued)
        scores = launcher.score(ids, logits, 1)
        together = self._together(launcher, ids, logits)
        drawn_together: tuple[int, ...] = ()
        if self.plan.batch > 1:
            shared, drawn_together = self._batched(launcher, ids, logits)
            together += shared
        pool = buffers["kv"].download(self._stored_dtype, self.manifest.buffer("kv").shape)
        exchange = buffers["exchange"].download(np.uint8, self.manifest.buffer("exchange").bytes)
        launches = (late, prompted, drawn, stopped, continued)
        return Transcript(ids, launches, late_logits, scores, together, drawn_together, pool, exchange)

    def _together(self, launcher: Launcher, ids: Sequence[int], logits: Any) -> tuple[tuple[tuple[int, ...], F32], ...]:
        """What several tokens of one sequence in a step give."""
        launcher.restart()
        return ((tuple(ids), launcher.score(ids, logits)),) if self.plan.tokens > 1 else ()

    def _batched(
        self, launcher: Launcher, ids: Sequence[int], logits: Any
    ) -> tuple[tuple[tuple[tuple[int, ...], F32], ...], tuple[int, ...]]:
        """(what several sequences in a step give, what each draws then); the caches are empty again afterwards."""
        launcher.restart()
        cache = launcher.cache
        sequences = [tuple(ids[: number + TOGETHER_STEPS]) for number in range(self.plan.batch)]
        caches = [CachedSequence(cache.pool, cache.page_size, self.context) for _ in sequences]
        for sequence, own in zip(sequences, caches, strict=True):
            if begun := len(sequence) - TOGETHER_STEPS:
                launcher.launch_together([Part(own, sequence[: begun + 1], begun)])
        pairs = list(zip(sequences, caches, strict=True))
        launcher.launch_together([Part(own, ids_[-TOGETHER_STEPS:], TOGETHER_STEPS) for ids_, own in pairs], logits)
        scores = logits.download(np.float32, (TOGETHER_STEPS, self.plan.tokens, self.config.vocab_size))
        order = [part for part, _ in launcher.columns]
        found = tuple((ids_, scores[:, order.index(number)].copy()) for number, ids_ in enumerate(sequences))
        for own in caches:
            own.length -= 1
        parts = [
            Part(own, ids_[-1:], 1, Sampling(HOT, SAMPLING_SEED + number)) for number, (ids_, own) in enumerate(pairs)
        ]
        drawn = tuple(token for result in launcher.launch_together(parts) for token in result.token_ids)
        if len(drawn) != len(parts):
            raise KernelFault(f"{len(parts)} sequences drew the tokens {drawn}, one each was asked for")
        for own in caches:
            own.clear()
        return found, drawn

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

    @property
    def _stored_dtype(self) -> type[np.uint8] | type[np.uint16]:
        return np.uint8 if self.has_codes else np.uint16

    def _stored(self, values: F32) -> NDArray[Any]:
        """Keys or values as the pool has them; they are exactly that already."""
        if self.has_codes:
            return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)

    def _fill_cache(self, cache: CachedSequence, buffers: Mapping[str, Any]) -> None:
        """Writes `filling`'s keys and values to the cache's pages; all else in the pool stays poisoned."""
        cache.reserve(len(self.filling))
        table = cache.table(self.plan.pages_per_sequence)
        shape = self.manifest.buffer("kv").shape
        pool = buffers["kv"].download(self._stored_dtype, shape)
        for position in range(len(self.filling)):
            page, slot = table[position // self.plan.page_size], position % self.plan.page_size
            pool[:, page, 0, :, slot] = self.filled_keys[:, :, position]
            pool[:, page, 1, :, slot] = self.filled_values[:, :, position]
        buffers["kv"].upload(pool)
        cache.length = len(self.filling)


def fixed_buffers(manifest: Manifest, config: ModelConfig, tensors: Tensors) -> dict[str, EmulatorBuffer]:
    """The buffers that no launch of a decode kernel writes, filled once for all runs."""
    read = tensors.__getitem__ if isinstance(tensors, Mapping) else tensors
    device, scales = EmulatorDevice(), [buffer.name for buffer in manifest.buffers if buffer.name == "kv_scales"]
    names = [*family_of(config).model_buffers(config), *scales]
    fixed = {name: device.allocate(manifest.buffer(name).bytes) for name in names}
    weights = _Weights(config, read, getattr(tensors, "rows", None))
    upload_weights(weights, manifest, fixed, lambda written: None)
    return fixed


@dataclass(frozen=True)
class _Weights:
    """A model's tensors as the runtime's packing wants them."""

    config: ModelConfig
    tensor: ReadTensor
    rows: ReadRows | None


class TrapDevice(EmulatorDevice):
    """An emulated device on which attention's tiles look their pages up in tables of their own, in which nothing stands
    behind the keys that are cached when a launch ends: the emulator tells who looks there."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def launch(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        words = self._plan.batch * self._plan.pages_per_sequence
        tiles = arguments["tiles"].download(np.int32, (arguments["tiles"].nbytes // (4 * TILE_WORDS), TILE_WORDS))
        table = arguments["page_table"].download(np.int32, words)
        traps = {
            "page_table": np.concatenate([table, self._own_tables(table, tiles, arguments["steps"])]),
            "tiles": tiles + np.eye(TILE_WORDS, dtype=np.int32)[word(TileRecord, "table")] * words,
        }
        super().launch(kernel, {**arguments, **{name: self._uploaded(array) for name, array in traps.items()}})

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
