"""Rounds of two models: one drafts, then the other verifies what it drafted, many rounds a launch.

All launches of it lie on the device's stream, one behind the other, by tables that a small kernel between them brings
up to date (`cheetah.blocks.handoff`): so the host is out of the round. It starts the next one while one is under way,
and hears of tokens behind each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from cheetah.plan.handoff import NO_ROW, BlockHandoff, Handoff, HeadHandoff
from cheetah.plan.index import ceil_div
from cheetah.plan.kv.tables import NO_TOKEN, NOT_YET, ROUND_WORDS
from cheetah.plan.plan import MAX_BATCH
from cheetah.runtime import interrupts
from cheetah.runtime.background import Started
from cheetah.runtime.engine.block_launches import BlockLauncher, KnownRows
from cheetah.runtime.engine.drafting import NOTHING_DRAFTED, Drafting
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.launches import POLL_SECONDS, KernelLaunches, Launch, LaunchResult, LoadedKernel, Part
from cheetah.runtime.engine.step_launches import drafted_of_word, drafts_of_word, place_of_word, token_of_word, words_of

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Argument, Buffer

AHEAD = 2
"""Rounds that are started beyond those that have ended: what is started behind an answer's end is made for nobody."""


UNIT_BYTES = 16
"""What a thread copies at a time."""
TABLES = ("sequences", "tiles", "tokens", "stop_ids")
"""Buffers of both kernels."""


@dataclass(frozen=True)
class RoundPart(Part):
    """One sequence's part: `total` tokens are made behind its one input, in rounds of up to `per_step`. by: its part of
    the first launch that drafts, whose cache says what that model has read of it; None: nothing is drafted for it."""

    by: Part | None = None


class RoundLaunch(Launch):
    """Rounds under way. verified, drafting: the launches that each of them makes again."""

    def __init__(
        self,
        parts: Sequence[RoundPart],
        verified: Launch,
        drafting: Launch,
        rounds: int,
        arguments: dict[str, Argument],
    ) -> None:
        super().__init__([parts[number] for number in verified.order], verified.order, verified.geometry, arguments)
        self.verified, self.drafting = verified, drafting
        self.rounds, self.rounds_started = rounds, 0

    def end_early(self) -> None:
        """No round is started any more."""
        self.rounds = self.rounds_started


class RoundLauncher(KernelLaunches):
    """Launches of rounds. verifier: of the kernel that verifies; alone, together: of those that draft, of one sequence
    and of several, of a model or of a head, or of a drafter of blocks, whose rows `known_rows` makes."""

    def __init__(
        self,
        loaded: LoadedKernel,
        verifier: Launcher,
        alone: Launcher,
        together: Launcher,
        known_rows: KnownRows | None = None,
    ) -> None:
        super().__init__(loaded, verifier.plan)
        self._verifier, self._alone, self._together, self._known_rows = verifier, alone, together, known_rows
        self._is_head = "features" in self._parameters
        self._told = words_of(self._buffers["told"]).reshape(verifier.batch, -1)
        self._done = words_of(self._buffers["done"])

    def prepare(self, parts: Sequence[Part], logits: Buffer | None = None) -> RoundLaunch:
        """Rounds of `RoundPart`s, for one of which something is drafted at least: as many as its `drafting` says."""
        self._be_ready()
        assert logits is None, "each round would write the same logits"
        own = [part for part in parts if isinstance(part, RoundPart)]
        rounds = next(part.drafting.rounds for part in own if part.drafting is not None)
        drafts = max(part.per_step for part in own) - 1
        verified = self._verifier.prepare([_verified(part, rounds) for part in own])
        drafter = self._drafter(own)
        behind = rounds * (drafts + 1)
        drafted_for = [part.by for part in own if part.by is not None]
        drafting = drafter.prepare([replace(by, followed=ceil_div(behind, by.per_step)) for by in drafted_for])
        self._upload_state(own, verified, drafting)
        numbers = Handoff(
            count=len(own),
            is_verified=0,
            number=0,
            room=self._verifier.launch_tokens + 1,
            draft_room=drafter.launch_tokens + 1,
            told_room=self._told.shape[1],
            round_words=ROUND_WORDS + self._verifier.tokens,
            tile_count=self._verifier.tile_count,
            draft_tile_count=drafter.tile_count,
            pages_per_sequence=drafter.plan.pages_per_sequence,
            draft_vocab=drafter.vocab_size,
        )
        known = {name: verified.arguments[name] for name in (*TABLES, "rounds")}
        known |= {f"draft_{name}": drafting.arguments[name] for name in TABLES}
        known["draft_counts"] = drafting.arguments["token_counts"]
        most, page_size = drafts + 1, self._plan.page_size  # steps that a round may need
        if self._is_head:
            known |= {name: verified.arguments[name] for name in ("taps", "page_table")}
            known |= {name: drafting.arguments[name] for name in ("features", "feature_steps")}
            row_units = self._verifier.tap_bytes // UNIT_BYTES
            numbers = HeadHandoff(**asdict(numbers), row_units=row_units, page_size=page_size)
            most = max(2 * drafts, *(by.total for by in drafted_for))
        if self._known_rows is not None:
            assert isinstance(drafter, BlockLauncher)
            known |= {"page_table": verified.arguments["page_table"], "known": self._known_rows.buffers["known"]}
            numbers = BlockHandoff(**asdict(numbers), page_size=page_size, ahead=drafter.block.ahead)
            most = 1
        drafting.arguments |= {"steps": most, "head_from": 0}
        return RoundLaunch(own, verified, drafting, rounds, self._arguments({**known, **asdict(numbers)}))

    def _drafter(self, parts: Sequence[Part]) -> Launcher:
        count = sum(1 for part in parts if isinstance(part, RoundPart) and part.by is not None)
        return self._alone if count == 1 else self._together

    def _upload_state(self, parts: Sequence[RoundPart], verified: Launch, drafting: Launch) -> None:
        """Who is drafted for in which row, and how much is to be made of each."""
        drafted = [number for number, part in enumerate(parts) if part.by is not None]
        rows, left = np.full(MAX_BATCH, NO_ROW, np.uint32), np.zeros(MAX_BATCH, np.uint32)
        for row, number in enumerate(verified.order):
            left[row] = parts[number].total
            if number in drafted:
                rows[row] = drafting.order.index(drafted.index(number))
        self._buffers["rows"].upload(rows)
        self._buffers["left"].upload(left)
        self._buffers["made"].fill(0)
        self._told[: len(parts)] = NOT_YET
        self._done[:] = [0, *left]

    def start(self, launch: Launch) -> None:
        """Starts the first rounds; returns at once on a GPU."""
        self._feed(launch)

    def _feed(self, launch: Launch) -> None:
        """Starts rounds, as long as few are under way, somebody is left, and nothing waits to be told."""
        assert isinstance(launch, RoundLaunch)
        while launch.rounds_started - int(self._done[0]) < AHEAD and not self._has_fresh(launch):
            if launch.rounds_started >= launch.rounds or not self._done[1:].any():
                break
            self._start_round(launch)
        if not self._done[1:].any():
            launch.end_early()

    def _start_round(self, launch: RoundLaunch) -> None:
        self._drafter(launch.placed).again(launch.drafting)
        self._hand_over(launch, is_verified=0)
        self._verifier.again(launch.verified)
        self._hand_over(launch, is_verified=1)
        if self._known_rows is not None and (taps := self._verifier.taps) is not None:
            with self._noting_failures():
                self._known_rows.make_listed(taps)
        launch.rounds_started += 1

    def _hand_over(self, launch: RoundLaunch, is_verified: int) -> None:
        assert not isinstance(self._kernel, Started), "a launch is prepared before it is started"
        numbers: dict[str, Argument] = {"is_verified": is_verified, "number": launch.rounds_started}
        with self._noting_failures():
            self._device.launch(self._kernel, {**launch.arguments, **numbers})

    def wait(self, launch: Launch) -> bool:
        """See `KernelLaunches`."""
        assert isinstance(launch, RoundLaunch)
        while True:
            self._feed(launch)
            if launch.rounds_started >= launch.rounds and super().wait(launch):
                return True
            if interrupts.is_pending() or self._has_fresh(launch):
                return False
            if self._timeout_s is not None and launch.seconds > self._timeout_s:
                return True
            time.sleep(POLL_SECONDS)

    def fresh(self, launch: Launch) -> list[tuple[int, ...]]:
        """What each part has made since this was asked last, in the order of the parts."""
        found: list[tuple[int, ...]] = [()] * len(launch.placed)
        for row, number in enumerate(launch.order):
            words = self._words(launch, row)[launch.given[row] :]
            launch.drafted[row] = sum(map(drafted_of_word, words), launch.drafted[row])
            launch.given[row] += len(words)
            found[number] = tuple(map(token_of_word, words))
        return found

    def cancel(self, launch: Launch, number: int) -> None:
        """Ends all rounds behind those that were started: by any thread."""
        assert isinstance(launch, RoundLaunch)
        launch.end_early()

    def finish(self, launch: Launch) -> list[LaunchResult]:
        """Waits for its end; what it did, in the order of the parts."""
        assert isinstance(launch, RoundLaunch)
        self._await_end(launch)
        results = {}
        for row, (number, part) in enumerate(zip(launch.order, launch.placed, strict=True)):
            assert isinstance(part, RoundPart)
            words = self._words(launch, row)
            has_failed = int(self._told[row, len(words)]) == NO_TOKEN
            drafts = [drafted_of_word(word) for word in words]
            steps = sum(1 for word in words if not place_of_word(word))
            self._settle(launch, part, words, is_counted=steps == launch.rounds_started and not has_failed)
            made, drafted = tuple(map(token_of_word, words)), sum(drafts, NOTHING_DRAFTED)
            results[number] = LaunchResult(made, steps, launch.seconds, has_failed, drafted)
        most = max(result.steps for result in results.values())
        return [replace(results[number], steps=max(1, most)) for number in range(len(results))]

    def bytes_read(self, parts: Sequence[Part], steps: int) -> int:
        drafts = max(part.per_step for part in parts) - 1
        drafted_for = [part for part in parts if part.per_step > 1]
        return self._verifier.bytes_read(parts, steps) + self._drafter(parts).bytes_read(drafted_for, steps * drafts)

    def _has_fresh(self, launch: Launch) -> bool:
        return any(
            not ended and self._told[row, given] < NOT_YET
            for row, (given, ended) in enumerate(zip(launch.given, launch.has_ended, strict=True))
        )

    def _begin_again(self) -> None:
        """Nothing: its kernel counts nothing from one launch to the next."""

    def _words(self, launch: Launch, row: int) -> list[int]:
        """What was told of a row so far, up to a stop id: the device looks for the first of many alone."""
        words, stop_ids = list[int](), launch.placed[row].sampling.stop_ids
        for word in takewhile(lambda word: word < NOT_YET, map(int, self._told[row])):
            words.append(word)
            if token_of_word(word) in stop_ids:
                launch.has_ended[row] = True
                break
        return words

    def _settle(self, launch: RoundLaunch, part: RoundPart, words: Sequence[int], is_counted: bool) -> None:
        """How far the rounds have brought a sequence. is_counted: what its tokens count for penalties is right; rounds
        behind its end count them again."""
        part.cache.length += len(words)
        made = [*map(token_of_word, words)] if is_counted else None
        self._verifier.note(part.cache, made)
        if part.by is not None and words:
            read, place = part.by.cache, place_of_word(words[-1])
            is_model = not self._is_head and self._known_rows is None
            unread = int(place == drafts_of_word(words[-1])) if is_model else 1 + place
            read.length = part.cache.length - unread
            self._drafter(launch.placed).note(read, made)


def _verified(part: RoundPart, rounds: int) -> Part:
    """A sequence's part of the first launch that verifies; the drafts are not known yet."""
    total = min(part.per_step, part.total)
    drafting = None if part.drafting is None else Drafting(1, (0,) * (total - 1))
    return replace(part, total=total, drafting=drafting, followed=rounds - 1)
