"""Prompts are read: whose, by a pass or by steps, how much of them by one launch, and what follows their last tokens.

`prefill_rules` says how a token comes into the cache, so that its bits are as promised. This decides who is read along
with whom, and how much of them while those who decode wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cheetah.runtime.engine.completion import Completion, part_ways, unread_last_token
from cheetah.runtime.engine.heads import HeadLauncher
from cheetah.runtime.engine.launch_order import LaunchOrder, LogitsBuffers, Purpose, steps_with
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.prompt_passes import PassLauncher
from cheetah.runtime.engine.queues import Queues
from cheetah.runtime.engine.step_time import StepTime


@dataclass(frozen=True)
class _Judged:
    """Ids of a prompt, `following` tokens whose hidden states lie in `rows`, that are still to be judged."""

    takers: tuple[Completion, ...]
    rows: range
    following: Sequence[int]


@dataclass
class _Behind:
    """What launches of the head are due behind a pass. begins: who it has read, and from which token on. ends: prompts
    that it has read to their ends, and the row of the last token's hidden state; chosen: those whose turn it was."""

    head: HeadLauncher | None = None
    begins: list[tuple[Completion, int]] = field(default_factory=list)
    judged: deque[_Judged] = field(default_factory=deque)
    ends: list[tuple[Sequence[Completion], int]] = field(default_factory=list)
    chosen: list[tuple[Sequence[Completion], int]] = field(default_factory=list)


class Prefill:
    """Reads the prompts of those who have a place, a launch at a time.

    steps: launches of the kernel that reads few tokens; passes: of those that read many, with room for fewest first.
    launch_steps: most steps of a launch. chunk_tokens: most tokens of one while others decode; see `Engine`.

    A `group` is of completions of one request that begin together: while their prompt is read, the first has the cache.
    """

    def __init__(
        self,
        queues: Queues,
        steps: Launcher,
        passes: Sequence[PassLauncher],
        logits: LogitsBuffers,
        launch_steps: int,
        chunk_tokens: int | None,
    ):
        self._queues, self._logits = queues, logits
        self._steps, self._passes = steps, passes
        self._launch_steps, self._chunk_tokens = launch_steps, chunk_tokens
        self._step_time = StepTime(launch_steps)
        self._pass_times = [StepTime(one.tokens // one.tile_tokens) for one in passes]
        self._behind = _Behind()

    @property
    def gives_turns(self) -> bool:
        """Whether those who decode have launches while a prompt is read."""
        return self._chunk_tokens != 0

    @property
    def is_amid(self) -> bool:
        """Whether a launch is due behind a pass that was made."""
        return bool(self._behind.judged or self._behind.ends)

    def next_launch(self) -> LaunchOrder | None:
        """The next tokens of who is read. None if they had to give their pages back."""
        way = self._next_pass()
        return self._of_steps(self._queues.reading[0]) if way is None else self._of_pass(*way)

    def next_behind(self) -> LaunchOrder:
        """What is due behind a pass: first what the ids that it has read were worth, then the first tokens."""
        return self._judging() if self._behind.judged else self._choosing_first()

    def settle(self, order: LaunchOrder) -> None:
        """A launch that was decided here was made."""
        if order.purpose is Purpose.PREFILL:
            for takers in order.takers:
                self._queues.keep_state(takers[0])
        if isinstance(order.launcher, PassLauncher):
            self._behind = self._due_behind(order, order.launcher.head)
        elif not self.is_amid:
            self._behind = _Behind()

    def give_up(self, order: LaunchOrder) -> None:
        """It was not made. Prompts that a pass has read are read again, by as much as is needed for what was due."""
        behind, self._behind = self._behind, _Behind()
        if order.purpose is Purpose.CHOOSE_FIRST:
            for group, _ in behind.chosen:
                unread_last_token(group)
        elif order.purpose is Purpose.JUDGE:
            for first, begin in behind.begins:
                assert first.cache is not None
                first.cache.go_back(begin)
                del first.prompt_logprobs[first.cache.length :]

    def note_decoding(self, steps: int, seconds: float) -> None:
        """Those who decode have had a launch."""
        self._step_time.guess(steps, seconds)

    # Who is read ------------------------------------------------------------------------------------------------------

    def can_read_along(self) -> bool:
        """Whether the first in line takes a place in the pass that reads others. Not where it can wait for their pages
        and then has a tile of tokens less to read: a pass more costs no more than that."""
        if not self._passes:
            return False
        longest = self._passes[-1]
        if not longest.has_columns_for([*map(self.left, self._queues.reading), 1]):
            return False
        return not self._queues.shares_with_who_is_read(self._queues.waiting[0], longest.tile_tokens)

    def left(self, group: Sequence[Completion]) -> int:
        """Tokens of one who is read that are left to be read as a prompt."""
        cache = group[0].cache
        assert cache is not None
        return self._queues.rule.left(self._known(group[0]), cache.length)

    def _known(self, completion: Completion) -> int:
        """How many of its ids are read as a prompt."""
        return self._queues.rule.read_as_prompt(len(completion.request.prompt_ids), len(completion.ids))

    # By passes --------------------------------------------------------------------------------------------------------

    def _next_pass(self) -> tuple[int, list[tuple[list[Completion], int]]] | None:
        """(number of the pass that reads the next tokens of those who are read, in order, how many of each). None where
        steps read the first one's."""
        if not self._passes:
            return None
        reading = self._queues.reading
        left = [self._left_in_pass(group) for group in reading]
        fitting = (number for number, one in enumerate(self._passes) if one.has_columns_for(left))
        number = next(fitting, len(self._passes) - 1)
        passes = self._passes[number]
        starts = [group[0].cache.length for group in reading if group[0].cache is not None]
        most = self._chunk(passes.tokens, passes.tile_tokens, self._pass_times[number])
        counts = passes.fitting(starts, left, most)
        return (number, [*zip(reading, counts, strict=False)]) if self._queues.rule.takes_pass(sum(counts)) else None

    def _left_in_pass(self, group: Sequence[Completion]) -> int:
        """Tokens that are left to be read, or as many as can be judged by one launch, where others wait for it."""
        cache, left = group[0].cache, self.left(group)
        assert cache is not None
        left = min(left, self._queues.next_end(group[0], self._known(group[0])) - cache.length)
        if not (group[0].reads_logprobs and self._queues.running and self.gives_turns):
            return left
        head = self._passes[0].head
        return min(left, steps_with(self._logits.next(True), self._launch_steps, head) * head.tokens)

    def _of_pass(self, number: int, counts: list[tuple[list[Completion], int]]) -> LaunchOrder | None:
        """Brings the next tokens of several prompts into the cache."""
        queues, passes = self._queues, self._passes[number]
        for group, tokens in counts:
            if group in queues.reading:
                queues.make_room(group[0], tokens)
        # Who had to give its pages back is not read; one of several has left its cache to the next.
        together = [(group, tokens) for group, tokens in counts if group in queues.reading]
        if not together:
            return None
        parts = [group[0].part_of_pass(tokens, passes.tile_tokens) for group, tokens in together]
        takers = [tuple(group) for group, _ in together]
        return LaunchOrder(Purpose.PREFILL, passes, parts, takers, timer=self._pass_times[number])

    def _due_behind(self, order: LaunchOrder, head: HeadLauncher) -> _Behind:
        """What a pass that was made makes due. Its hidden states lie in rows, part by part."""
        behind, first_row = _Behind(head), 0
        for part, takers in zip(order.parts, order.takers, strict=True):
            first, end = takers[0], part.cache.length
            behind.begins.append((first, end - part.total))
            if first.reads_logprobs:
                begin = end - part.wanted
                del first.prompt_logprobs[begin:]  # those behind were known before it gave its pages back
                following = first.request.prompt_ids[begin + 1 : end + 1]
                rows = range(first_row, first_row + len(following))
                behind.judged += [_Judged(takers, rows, following)] if following else []
            first_row += part.wanted
            if part.samples:
                behind.ends.append((takers, first_row - 1))
        return behind

    def _judging(self) -> LaunchOrder:
        """What some of the ids behind tokens that a pass has just read were worth."""
        head, due = self._behind.head, self._behind.judged.popleft()
        assert head is not None
        logits = self._logits.next(True)
        most = steps_with(logits, self._launch_steps, head) * head.tokens
        if due.following[most:]:
            self._behind.judged.appendleft(_Judged(due.takers, due.rows[most:], due.following[most:]))
        cache, following = due.takers[0].cache, due.following[:most]
        assert cache is not None
        part = head.part_without_samples(cache, due.rows[:most])
        return LaunchOrder(Purpose.JUDGE, head, [part], [due.takers], logits, following)

    def _choosing_first(self) -> LaunchOrder:
        """The tokens behind prompts that a pass has read to their ends."""
        behind = self._behind
        assert behind.head is not None
        behind.chosen, behind.ends = behind.ends, []
        for group, _ in behind.chosen:
            part_ways(group)
        takers = [(one, row) for group, row in behind.chosen for one in group]
        parts = [one.part([row], 1) for one, row in takers]
        logits = self._logits.next(any(one.request.logprobs is not None for one, _ in takers))
        return LaunchOrder(Purpose.CHOOSE_FIRST, behind.head, parts, [(one,) for one, _ in takers], logits)

    # By steps ---------------------------------------------------------------------------------------------------------

    def _of_steps(self, group: list[Completion]) -> LaunchOrder | None:
        """Brings tokens of a prompt into the cache by one launch of steps, the last of which may sample."""
        first, cache, rule = group[0], group[0].cache, self._queues.rule
        assert cache is not None
        logits = self._logits.next(first.reads_logprobs)
        del first.prompt_logprobs[cache.length :]  # those behind were known before it gave its pages back
        columns = self._steps.tokens
        steps = max(1, self._chunk(self._launch_steps * columns, columns, self._step_time) // columns)
        samples = len(group) == 1 and not first.request.wants_logits
        known = self._known(first)
        left = min(rule.end(known, samples), self._queues.next_end(first, known)) - cache.length
        tokens = min(left, steps_with(logits, steps, self._steps) * columns)
        if not self._queues.make_room(first, tokens):
            return None
        part = first.next_part(tokens, rule.columns_of_step(tokens))
        return LaunchOrder(Purpose.PREFILL, self._steps, [part], [tuple(group)], logits, timer=self._step_time)

    # How much of it ---------------------------------------------------------------------------------------------------

    def _chunk(self, most: int, per_step: int, timer: StepTime) -> int:
        """Tokens of a launch that reads a prompt, of at most `most`, `per_step` of them a step."""
        if not self._queues.running or not self.gives_turns:
            return most
        if self._chunk_tokens is None:
            return timer.steps(most // per_step) * per_step
        return min(most, self._chunk_tokens)
