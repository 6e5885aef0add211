"""The launches that a kernel of decode steps goes through to be judged (`judged_steps`), and what they gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.config import ModelConfig
from cheetah.models.rounding import F32, as_bf16
from cheetah.models.sampling import Filters, Penalties
from cheetah.plan import Plan
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launcher import Part, Sampling
from cheetah.tools.judging_device import KernelFault
from cheetah.tools.published import Filled, Launched
from cheetah.tools.rig import Rig, Session

PROMPT_TOKENS = 5
"""Four steps without a head follow one another."""
TOGETHER_STEPS, TEACHER_TOKENS, LONG_PROMPT = 3, 5, 41
TEMPERATURE, SAMPLING_SEED = 0.8, 7 + (11 << 32)
"""The seed needs both of its halves."""
HIGHEST = 4.0
"""About the highest logit that there is."""
HOT = 16.0
"""The temperature of sequences that draw together: every row of the head has a chance, those of padding too."""
TOO_LARGE = 2.0**34
"""An element that no embedding has."""
LARGE = 2.0**32.5
"""One that might be, but not of so many."""
LARGE_TOKENS = (1, 2, 3, 4, 5)
"""Tokens that get such embeddings."""


@dataclass(frozen=True)
class Scored:
    """Logits of a launch: after each of `ids`, which follow the first `cached` tokens of the filling. `found` f32
    [len(ids), vocab]; `place` says which launch that was; `pages`: the bits of keys and values that it cached [layers,
    2, kv_heads, len(ids), head_dim]; `state`: the words of what its sequence remembers then, where it does."""

    place: str
    cached: int
    ids: tuple[int, ...]
    found: F32
    pages: NDArray[Any]
    state: NDArray[np.uint32] | None = None


@dataclass(frozen=True)
class Drawn:
    """What a sequence drew, a token from each row of the logits f32 [len(tokens), vocab]. prompt: what its penalties
    know of; position: of the first token."""

    place: str
    tokens: tuple[int, ...]
    logits: F32
    sampling: Sampling
    position: int
    prompt: tuple[int, ...] = ()


def judged_context(config: ModelConfig, plan: Plan) -> int:
    """How many tokens a sequence of the launches may have. CheetahError where they need more, in steps or in tokens."""
    context = min(plan.max_context, config.max_position_embeddings)
    needed = PROMPT_TOKENS + 3 + 3 + 3 + 2
    if context < needed or plan.max_steps < needed:
        raise CheetahError(
            f"check needs max_context and max_steps of at least {needed}, not {context}, {plan.max_steps}"
        )
    return context


class Course:
    """What the launches are given. Of a text, the filling, the reference writes the beginnings to caches.

    is_of_several: see `CourseRun`. filled: the filling's keys and values [layers, 2, kv_heads, context, head_dim], of
    layers with attention. remembered: what a state holds behind so many of the filling's tokens and some others, where
    sequences have states: these cannot go back. instead: what is given in the place of some tokens, behind so many of
    the filling's.
    """

    def __init__(self, rig: Rig, is_of_several: bool = False) -> None:
        self.rig, self.config, self.plan = rig, rig.config, rig.plan
        self.is_of_several = is_of_several and rig.plan.batch > 1
        self.context = judged_context(rig.config, rig.plan)
        draw = np.random.default_rng(0)
        self.prompt, self.filling, self.teacher, self.long = (
            tuple(int(token) for token in draw.integers(0, rig.config.vocab_size, count))
            for count in (PROMPT_TOKENS, self.context, TEACHER_TOKENS, min(LONG_PROMPT, self.context - 1))
        )
        self.page_order = [int(page) for page in draw.permutation(rig.plan.kv_pages)]
        self.filled: F32 = np.zeros(0, np.float32)
        self.remembered: Callable[[int, Sequence[int]], NDArray[np.uint32]] | None = None
        self.instead: Callable[[int, tuple[int, ...]], tuple[int, ...]] = lambda filled, ids: ids

    @property
    def filled_lengths(self) -> set[int]:
        """How much of the filling caches are given."""
        shared = self.context - 2 * (self.plan.tokens - self.plan.batch)
        lengths = [max(0, length - given) for length in self.lengths for given in range(3)]
        return {self.split, self.context - len(self.long), *lengths, *(min(one, shared) for one in lengths)}

    @property
    def split(self) -> int:
        """Tokens that are cached up to the length at which keys are split, so that the last of the given tokens finds
        whole pages cached, if possible in a stage with room for more."""
        page, before_last = self.plan.page_size, TEACHER_TOKENS - 1
        most = min(self.rig.gpu.kv_chunk_min + before_last, self.context - 3)
        last = most // page * page
        if last % self.plan.kv_stage_tokens(self.config.head_dim) == 0:
            last -= page
        return max(0, last - before_last)

    @property
    def lengths(self) -> list[int]:
        """Tokens that the sequences of a step have cached: none, up to the context's end, several items, a few."""
        several = min(5 * self.rig.gpu.kv_chunk_min + 1, self.context - 2 * TOGETHER_STEPS)
        lengths = [0, self.context - 2 * TOGETHER_STEPS + 1, several, self.split, 33, 1, 64, 17]
        return [min(length, self.context - 2 * TOGETHER_STEPS + 1) for length in lengths[: self.plan.batch]]


class CourseRun:
    """One run of the launches, over the pages of the pool in a shuffled order, and what they gave so far.

    1. Some given tokens with logits, across the length at which a head's keys are split over blocks, the cached ones
    filling their last page: nothing behind them may be looked up; then some that are sampled. 2. An empty cache: a
    prompt and sampled tokens in one launch. 3. A launch that goes on at a temperature; the same again from the same
    place with a stop id, which ends it early. 4. A launch that goes on from there. 5. The logits of that whole sequence
    in one launch from an empty cache. 6. If a step takes several tokens: a prompt longer than an item, so many tokens a
    step, that ends where the context does and leaves columns of its last step empty; where sequences have states, fewer
    tokens than a step takes; where items have a fixed length, the same with a token less a step, to the bit. 7. If it
    takes several sequences: as many as it takes, from an empty cache to one that they fill, with logits; then tokens of
    each, which asks for what the others do not (masks, biases, penalties, filters), with logits again; the same where
    one of them ends, by itself, in another order, or by the host's word; and if it takes more tokens than sequences,
    shares of the columns that differ. 8. Embeddings with a number that is too large, with which nothing can be drawn.

    Of a course of several, without 1 to 5, where a step takes several sequences; they are the dearest.
    """

    def __init__(self, course: Course, session: Session, published: list[Launched | Filled] | None) -> None:
        self.course, self.session, self.plan, self.published = course, session, course.plan, published
        self.scored: list[Scored] = []
        self.drawn: list[Drawn] = []

    def whole(self) -> None:
        if not self.course.is_of_several:
            self._across_a_split()
            self._one_sequence()
        if self.plan.tokens > 1:
            self._long_prompt()
        self._together()

    def short(self) -> None:
        """For the race detector, which is slow: a prompt and a token, then steps of several sequences that ask for
        different things, and that end by the host's word."""
        self.session.launcher.launch(self.course.prompt[:2], 2, Sampling())
        caches = self._several()
        ids = self.course.filling[:TOGETHER_STEPS]
        parts = [self._asking(number, cache, ids, HIGHEST) for number, cache in enumerate(caches)]
        begins = [(part.cache.length, ()) for part in parts]
        self._again(parts, begins)
        self._drawn(parts)
        self._again(parts, begins)
        self._all_end(parts)

    def _across_a_split(self) -> None:
        course, launcher = self.course, self.session.launcher
        cached = self._fill(launcher.cache, course.split)
        given = course.instead(cached, course.teacher)
        self._note("given tokens behind a filled cache", cached, given, self.session.score(given))
        launcher.launch(given[-1:], 2, Sampling())
        launcher.restart()

    def _one_sequence(self) -> None:
        course, launcher = self.course, self.session.launcher
        hot = Sampling(TEMPERATURE, SAMPLING_SEED)
        prompt = course.instead(0, course.prompt)
        prompted = launcher.launch(prompt, PROMPT_TOKENS + 2, Sampling()).token_ids
        remembered = self._state(launcher.cache)
        drawn = launcher.launch(prompted[-1:], 3, hot).token_ids
        launcher.cache.length -= len(drawn)
        self._go_back(launcher.cache, remembered)
        ended = launcher.launch(prompted[-1:], 3, replace(hot, stop_ids=(course.config.vocab_size, drawn[1])))
        stopped, steps = ended.token_ids, drawn.index(drawn[1]) + 1
        if stopped != drawn[:steps] or ended.steps != steps:
            raise KernelFault(
                f"with stop id {drawn[1]} a launch sampled {stopped} in {ended.steps} steps; without it {drawn}"
            )
        continued = launcher.launch(stopped[-1:], 2, Sampling()).token_ids
        launcher.restart()
        ids = (*prompt, *prompted, *stopped, *continued)
        logits = self.session.score(ids)
        self._note("one sequence, a token a step", 0, ids, logits)
        position = PROMPT_TOKENS
        places = ("a prompt's end", "a launch that goes on", "a launch behind a stop id")
        for place, tokens, how in zip(
            places, (prompted, stopped, continued), (Sampling(), hot, Sampling()), strict=True
        ):
            rows = logits[position - 1 : position - 1 + len(tokens)]
            self.drawn.append(Drawn(place, tokens, rows, how, position))
            position += len(tokens)
        launcher.restart()

    def _long_prompt(self) -> None:
        course, launcher = self.course, self.session.launcher
        cached = self._fill(launcher.cache, course.context - len(course.long))
        long = course.instead(cached, course.long)
        launcher.make_room(launcher.cache, len(long))
        before = self.session.cached()
        logits = self.session.score(long, self.plan.tokens)
        self._require_unchanged(before, range(cached, course.context))
        self._note("a prompt, several tokens a step, to the context's end", cached, long, logits)
        launcher.restart()
        if course.remembered is not None:
            self._fill(launcher.cache, cached)
            few = long[: self.plan.tokens - 1]
            logits_of_few = self.session.score(few, self.plan.tokens)
            self._note("fewer tokens than a step has room for", cached, few, logits_of_few)
            launcher.restart()
        if self.plan.kv_chunk and self.plan.tokens > 2:
            self._fill(launcher.cache, cached)
            self._require_same(logits, self.session.score(long, self.plan.tokens - 1))
            launcher.restart()

    def _require_same(self, logits: F32, others: F32) -> None:
        """KernelFault where steps with fewer tokens, which begin at other places of a tile of keys, gave other bits."""
        differ = np.flatnonzero((logits.view(np.uint32) != others.view(np.uint32)).any(axis=1))
        if differ.size:
            few = self.plan.tokens - 1
            raise KernelFault(
                f"token {differ[0]} of a prompt has other logits, in their bits, with {few} tokens a step than with "
                f"{few + 1}, though items of attention end where `kv_chunk` says"
            )

    def _require_unchanged(self, before: NDArray[Any], but: range) -> None:
        """KernelFault where a launch has cached more than these tokens of its only sequence."""
        after, size, pages = self.session.cached(), self.plan.page_size, self.session.launcher.cache.pages
        for token in but:
            before[:, pages[token // size], :, :, token % size] = after[:, pages[token // size], :, :, token % size]
        if before.tobytes() != after.tobytes():
            raise KernelFault("a launch has written keys or values of tokens that it did not have")

    def _together(self) -> None:
        """What sequences that share steps have, and what each then draws."""
        course, session = self.course, self.session
        if self.plan.tokens > self.plan.batch > 1:
            self._shares_of_columns()
        caches = self._several()
        ids = [
            course.instead(length, course.filling[: TOGETHER_STEPS + number][-TOGETHER_STEPS:])
            for number, length in enumerate(course.lengths)
        ]
        for number, logits in enumerate(session.score_together(ids, caches)):
            place = f"sequence {number} of {len(caches)} in a step"
            self._note(place, course.lengths[number], ids[number], logits, caches[number])
        parts = []
        for number, cache in enumerate(caches):
            logits = self.scored[number - len(caches)].found[-1]
            known = int(logits.argmax()), *ids[number]
            parts.append(self._asking(number, cache, known, float(logits.max())))
        begins = [(part.cache.length, ids[number]) for number, part in enumerate(parts)]
        self._again(parts, begins)
        drawn = self._drawn(parts)
        for is_stopped in (True, False) if len(parts) > 1 else ():
            self._again(parts, begins)
            self._first_one_ends(parts, drawn, is_stopped)
        self._again(parts, begins)
        self._all_end(parts)
        for cache in caches:
            cache.clear()

    def _several(self) -> list[CachedSequence]:
        """Sequences that have so many of the filling's tokens cached as the course says."""
        caches = [self.session.sequence() for _ in self.course.lengths]
        for cache, length in zip(caches, self.course.lengths, strict=True):
            self._fill(cache, length)
        return caches

    def _asking(self, number: int, cache: CachedSequence, known: tuple[int, ...], highest: float) -> Part:
        """A sequence that goes on behind its known tokens; see `asked`."""
        given = 1 + number % 2  # of two nothing is sampled, and counted, behind the first
        cache.length = max(0, cache.length - given)
        sampling = asked(number, self.course.config.vocab_size, known, highest)
        return Part(cache, known[-given:], TOGETHER_STEPS, sampling, known=known, prompt=len(known))

    def _again(self, parts: Sequence[Part], begins: Sequence[tuple[int, Sequence[int]]]) -> None:
        """They are to go on from there once more. begins: of each its length, and the ids that may be the last of it,
        behind what it has of the filling."""
        for number, (part, (length, ids)) in enumerate(zip(parts, begins, strict=True)):
            part.cache.length = length
            filled = min(length, self.course.lengths[number])
            self._remember(part.cache, filled, ids[: length - filled])

    def _drawn(self, parts: Sequence[Part]) -> list[tuple[int, ...]]:
        """What each of the sequences draws."""
        results = self.session.launcher.launch_together(parts, self.session.logits)
        rows = self.session.logits_of_parts(TOGETHER_STEPS, len(parts))
        for number, (part, result, logits) in enumerate(zip(parts, results, rows, strict=True)):
            given = len(part.inputs)
            if len(result.token_ids) != TOGETHER_STEPS + 1 - given:
                raise KernelFault(f"sequence {number} drew {result.token_ids} in {TOGETHER_STEPS} steps")
            place = f"sequence {number} of {len(parts)} that ask for different things"
            position = self.course.lengths[number] + TOGETHER_STEPS
            how = part.sampling, position, tuple(part.known)
            self.drawn.append(Drawn(place, result.token_ids, logits[given - 1 :], *how))
        return [result.token_ids for result in results]

    def _all_end(self, parts: Sequence[Part]) -> None:
        """All sequences end by the host's word: so does the launch, which looks in a step and says so in the next."""
        launcher = self.session.launcher
        launch = launcher.prepare(parts)
        for number in range(len(parts)):
            launcher.cancel(launch, number)
        launcher.start(launch)
        if (steps := launcher.finish(launch)[0].steps) != 2:
            raise KernelFault(f"a launch whose sequences the host ended in the first step made {steps} steps, not 2")

    def _first_one_ends(self, parts: Sequence[Part], drawn: Sequence[tuple[int, ...]], is_stopped: bool) -> None:
        """The same again, but that the first sequence ends: with its first token, in the opposite order, so that it has
        the last column, or by the host from the first step on. The others go on as they did."""
        launcher = self.session.launcher
        alone = self._behind_inputs(parts[0])
        ending = replace(parts[0], sampling=replace(parts[0].sampling, stop_ids=drawn[0][:1] if is_stopped else ()))
        order = -1 if is_stopped else 1
        launch = launcher.prepare([ending, *parts[1:]][::order])
        if not is_stopped:
            launcher.cancel(launch, 0)
        launcher.start(launch)
        found = [result.token_ids for result in launcher.finish(launch)][::order]
        ended = drawn[0][:1]  # who looks for the host's word in a step says so in the next
        if found != [ended, *drawn[1:]]:
            how = "with its first token" if is_stopped else "by the host's word"
            raise KernelFault(f"sequences drew {found} where the first was to end {how}, else {[*drawn]}")
        state = self._state(parts[0].cache)
        if is_stopped and state is not None and alone is not None and not np.array_equal(state, alone):
            raise KernelFault("a sequence that stopped, beside others that go on, remembers more than its tokens")

    def _behind_inputs(self, part: Part) -> NDArray[np.uint32] | None:
        """What a sequence remembers behind what it is given, by a launch of its own; then it is as before."""
        before, length = self._state(part.cache), part.cache.length
        if before is None:
            return None
        self.session.launcher.launch_together([replace(part, total=len(part.inputs))])
        behind = self._state(part.cache)
        part.cache.length = length
        self._go_back(part.cache, before)
        return behind

    def _shares_of_columns(self) -> None:
        """Sequences that have more and fewer of a step's columns."""
        course, session = self.course, self.session
        shares = [self.plan.tokens - self.plan.batch, *[1] * (self.plan.batch - 1)]
        caches, steps = [session.sequence() for _ in shares], 2
        for cache, length in zip(caches, reversed(course.lengths), strict=True):
            self._fill(cache, min(length, course.context - steps * shares[0]))
        lengths = [cache.length for cache in caches]
        ids = [
            course.instead(length, course.filling[7 : 7 + steps * share])
            for length, share in zip(lengths, shares, strict=True)
        ]
        parts = [
            Part(cache, tokens, len(tokens), per_step=share)
            for cache, tokens, share in zip(caches, ids, shares, strict=True)
        ]
        session.launcher.launch_together(parts, session.logits)
        found = session.logits.download(np.float32, (steps, self.plan.tokens, course.config.vocab_size))
        columns = [number for number, _ in session.launcher.columns]
        for number, cache in enumerate(caches):
            own = [column for column, part in enumerate(columns) if part == number]
            logits = found[:, own].reshape(-1, course.config.vocab_size)
            place = f"sequence {number} with {shares[number]} tokens a step"
            self._note(place, lengths[number], ids[number], logits, cache)
            cache.clear()

    def too_large(self) -> None:
        """An embedding with a number that none has, of either sign: all logits behind it are NaN, no other's are."""
        hidden, width = self.course.config.hidden_size, self.course.config.padded_hidden
        embeddings, norms = (self.session.words_of(name) for name in ("embedding", "norms"))
        before = embeddings[0].copy(), norms[0].copy()
        for embedding in embeddings:
            for token, value in ((1, TOO_LARGE), (2, -TOO_LARGE), (4, LARGE / 4), (5, -LARGE / 4)):
                embedding[token * width + hidden // 2] = as_bf16(value)
            embedding[3 * width :][:hidden] = as_bf16(LARGE)
        alone = self.plan.batch == 1
        try:
            self._with_large_ones([[1], [2], [3]] if alone else [[1, 0], [0, 2], [3, 0]])
            self._drawing_without_numbers([1] if alone else [1, 0])
            for weights in norms:
                weights[hidden // 2 :: width] = as_bf16(16.0)  # what is published of an element is too large then
            self._with_large_ones([[4], [5]] if alone else [[4, 0], [0, 5]])
        finally:
            for embedding, weights in zip(embeddings, norms, strict=True):
                embedding[:], weights[:] = before

    def _with_large_ones(self, launches: list[list[int]]) -> None:
        for tokens in launches:
            caches = [self.session.sequence() for _ in tokens]
            found = self.session.score_together([(token,) for token in tokens], caches)
            for token, logits, cache in zip(tokens, found, caches, strict=True):
                if bool(np.isnan(logits).all()) != bool(token) or np.isnan(logits).any() != bool(token):
                    was = "not all of its logits are NaN" if token else "NaN stands among its logits"
                    beside = (
                        "has an embedding with a number of 2^34, or all of 2^32.5"
                        if token
                        else "shares a step with such a sequence"
                    )
                    raise KernelFault(f"a sequence that {beside}: {was}")
                cache.clear()

    def _drawing_without_numbers(self, tokens: list[int]) -> None:
        """Such a sequence has no token to go on with, and the launch goes on for the other."""
        caches = [self.session.sequence() for _ in tokens]
        sampling = Sampling(banned=LARGE_TOKENS)  # or the other might go on with one of these
        parts = [Part(cache, (token,), 2, sampling) for token, cache in zip(tokens, caches, strict=True)]
        for token, result in zip(tokens, self.session.launcher.launch_together(parts), strict=True):
            if result.has_failed != bool(token):
                what = "none of whose logits is a number" if token else "beside one without logits that are numbers"
                raise KernelFault(f"a sequence {what}: has failed is {result.has_failed}, with {result.token_ids}")
        for cache in caches:
            cache.clear()

    def _fill(self, cache: CachedSequence, length: int) -> int:
        """Writes the filling's first keys and values to the cache's pages; all else in the pool stays poisoned."""
        cache.reserve(length)
        pool, size = self.session.cached(), self.plan.page_size
        stored = self.session.stored(self.course.filled[:, :, :, :length])
        for number, page in enumerate(cache.pages[: -(-length // size)]):
            slots = stored[:, :, :, number * size : (number + 1) * size]
            pool[:, page, :, :, : slots.shape[3]] = slots
        self.session.cache(pool)
        cache.length = length
        self._remember(cache, length, ())
        if length and self.published is not None:
            self.published.append(Filled(tuple(cache.pages), length))
        return length

    def _remember(self, cache: CachedSequence, filled: int, ids: Sequence[int]) -> None:
        """What a sequence remembers of so many tokens of the filling and those ids, where it has a state."""
        if self.course.remembered is not None and cache.state is not None and cache.length:
            self.session.remember(cache.state, self.course.remembered(filled, ids))

    def _note(
        self, place: str, cached: int, ids: Sequence[int], found: F32, cache: CachedSequence | None = None
    ) -> None:
        cache = cache or self.session.launcher.cache
        pages = self.session.cached_of(cache)[:, :, :, cached : cached + len(ids)]
        self.scored.append(Scored(place, cached, tuple(ids), found, pages, self._state(cache)))

    def _go_back(self, cache: CachedSequence, remembered: NDArray[np.uint32] | None) -> None:
        """A sequence remembers what it did, where it has a state."""
        if remembered is not None and cache.state is not None:
            self.session.remember(cache.state, remembered)

    def _state(self, cache: CachedSequence) -> NDArray[np.uint32] | None:
        """What a sequence remembers, where it has a state."""
        return None if self.course.remembered is None else self.session.remembered_by(cache)


def asked(number: int, vocab: int, known: Sequence[int], highest: float) -> Sampling:
    """What sequence `number` of those that share a step asks for: each something else. known: its tokens so far;
    highest: its highest logit, by which these are biased: so much that it matters what comes first, bias or penalty.

    Filters are decided by the lists of the nearest tokens, or in rounds."""
    odd = tuple(range(number % 3, vocab, 3))
    biased = tuple((token, highest) for token in dict.fromkeys(known))
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": HOT, "filters": Filters(2, 0.95, 0.001)},
        {"allowed": odd, "temperature": HOT, "filters": Filters(vocab // 6), "penalties": Penalties(frequency=0.4)},
        {
            "temperature": 1.5,
            "bias": ((odd[-1], 3.0), *biased),
            "penalties": Penalties(1.3, 0.5, 0.25),
            "filters": Filters(top_p=0.6),
        },
        {"banned": odd, "penalties": Penalties(repetition=1.9, presence=2.0), "bias": biased},
    )
    return Sampling(seed=SAMPLING_SEED + number, **kinds[number % len(kinds)])
