"""Prompts are read: whose, by a pass or by steps, how much of them by one launch, and what follows their last tokens.

`prompt_reading` says how a token comes into the cache, so that its bits are as promised. This says who is read along
with whom, and lets those who decode have launches of theirs in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from cheetah.runtime.engine.completion import Group, part_ways, unread_last_token
from cheetah.runtime.engine.courses import Course, Courses, steps_with
from cheetah.runtime.engine.flights import LaunchResult
from cheetah.runtime.engine.heads import HeadLauncher
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.pace import LAUNCH_SECONDS, LaunchPace
from cheetah.runtime.engine.prompt_passes import PassLauncher
from cheetah.runtime.engine.requests import Event
from cheetah.runtime.engine.roster import Roster


class PromptReader:
    """Reads the prompts of those who have a place, a launch at a time.

    steps: launches of the kernel that reads few tokens; passes: of those that read many, with room for fewest first.
    launch_steps: most steps of a launch. chunk_tokens: most tokens of one while others decode; see `Engine`.
    decode_pace: of launches of those, which is guessed here until one was made.

    `others_are_due`: those who decode shall have a launch before more is read. `first_tokens_are_due`: of those whose
    prompt was read without choosing what follows.
    """

    def __init__(
        self,
        roster: Roster,
        courses: Courses,
        steps: Launcher,
        passes: Sequence[PassLauncher],
        launch_steps: int,
        chunk_tokens: int | None,
        decode_pace: LaunchPace,
    ):
        self._roster, self._courses = roster, courses
        self._steps, self._passes = steps, passes
        self._launch_steps, self._chunk_tokens = launch_steps, chunk_tokens
        self._decode_pace, self._step_pace = decode_pace, LaunchPace(launch_steps)
        self._pass_paces = [LaunchPace(one.tokens // one.tile_tokens) for one in passes]
        self.first_tokens_are_due = self.others_are_due = False
        self._others_waited_s = 0.0  # since their last launch

    def note_decoding(self, result: LaunchResult) -> None:
        """Those who decode have had a launch."""
        self._step_pace.guess(result.steps, result.seconds)

    def others_have_a_turn(self) -> None:
        """Those who decode have the next launch."""
        self.others_are_due, self._others_waited_s = False, 0.0

    def begin(self, events: list[Event]) -> None:
        """Takes who can begin now out of the line, first come first served: one request, and where there are passes
        more, as long as one has room for them."""
        roster = self._roster
        while roster.waiting and (not roster.reading or self._can_read_along()):
            if not (group := roster.next_group(events)):
                break
            roster.reading.append(group)
            self._end_what_is_read()  # if only the last token of the prompt is left

    def read(self, events: list[Event]) -> Course:
        """One launch of what is read."""
        others_wait, way = bool(self._roster.running), self._next_pass()
        first = self._roster.reading[0]
        yield from self._read_in_steps(first, events) if way is None else self._read_in_pass(*way, events)
        self._end_what_is_read()
        waited_enough = self._others_waited_s >= LAUNCH_SECONDS
        others_may = others_wait and self._chunk_tokens != 0
        self.others_are_due = others_may and (waited_enough or bool(self._roster.reading))

    # Who is read ------------------------------------------------------------------------------------------------------

    def _can_read_along(self) -> bool:
        """Whether the first in line takes a place in the pass that reads others. Not where it can wait for their pages
        and then has a tile of tokens less to read: a pass more costs no more than that."""
        if not self._passes:
            return False
        longest = self._passes[-1]
        if not longest.has_columns_for([*map(self.left, self._roster.reading), 1]):
            return False
        return not self._roster.shares_with_who_is_read(self._roster.waiting[0], longest.tile_tokens)

    def left(self, group: Group) -> int:
        """Tokens of one who is read that are left to be read as a prompt."""
        cache = group[0].cache
        assert cache is not None
        return self._roster.manner.left(self._known(group), cache.length)

    def _known(self, group: Group) -> int:
        """How many of its ids are read as a prompt."""
        return self._roster.manner.read_as_prompt(len(group[0].request.prompt_ids), len(group[0].ids))

    def _end_what_is_read(self) -> None:
        """Lets those decode whose prompt has been read."""
        for group in [group for group in self._roster.reading if not self.left(group)]:
            self.first_tokens_are_due |= not group[0].made
            self._roster.begin_to_decode(group)

    # By passes --------------------------------------------------------------------------------------------------------

    def _next_pass(self) -> tuple[PassLauncher, LaunchPace, list[tuple[Group, int]]] | None:
        """The pass that reads the next tokens of those who are read, in order: who launches, the pace that this keeps,
        and how many tokens of each. None where steps read the first one's."""
        if not self._passes:
            return None
        reading = self._roster.reading
        left = [self._left_in_pass(group) for group in reading]
        number = next((i for i, one in enumerate(self._passes) if one.has_columns_for(left)), -1)
        passes, pace = self._passes[number], self._pass_paces[number]
        starts = [group[0].cache.length for group in reading if group[0].cache is not None]
        counts = passes.fitting(starts, left, self._chunk(passes.tokens, passes.tile_tokens, pace))
        if not self._roster.manner.takes_pass(sum(counts)):
            return None
        return passes, pace, [*zip(reading, counts, strict=False)]

    def _left_in_pass(self, group: Group) -> int:
        """Tokens that are left to be read, or as many as can be judged by one launch, where others wait for it."""
        left = self.left(group)
        if not (group[0].reads_logprobs and self._roster.running and self._chunk_tokens != 0):
            return left
        head = self._passes[0].head
        return min(left, steps_with(self._courses.logits_for(True), self._launch_steps, head) * head.tokens)

    def _read_in_pass(
        self, passes: PassLauncher, pace: LaunchPace, counts: list[tuple[Group, int]], events: list[Event]
    ) -> Course:
        """Brings the next tokens of several prompts into the cache by one launch, and chooses what follows those that
        it has read to their ends."""
        roster = self._roster
        for group, tokens in counts:
            if group in roster.reading:
                roster.make_room(group[0], tokens, events)
        # Who had to give its pages back is not read; one of several has left its cache to the next.
        together = [(group, tokens) for group, tokens in counts if group in roster.reading]
        if not together:
            return
        groups = [group for group, _ in together]
        parts = [group[0].part_of_pass(tokens, passes.tile_tokens) for group, tokens in together]
        result = (yield from self._courses.fly(passes, parts, groups, events))[0]
        self._note(result, pace)
        rows = [*accumulate((part.wanted for part in parts), initial=0)]
        for group, part, first_row in zip(groups, parts, rows, strict=False):
            if group[0].reads_logprobs:
                yield from self._judge(passes.head, group, range(first_row, first_row + part.wanted), events)
        last_rows = [(group, end - 1) for group, part, end in zip(groups, parts, rows[1:], strict=True) if part.samples]
        if last_rows:
            yield from self._choose_first(passes.head, last_rows, events)

    def _judge(self, head: HeadLauncher, group: Group, rows: range, events: list[Event]) -> Course:
        """What the ids behind the tokens that a pass has just read were worth. rows: of their hidden states."""
        first, cache = group[0], group[0].cache
        assert cache is not None
        begin = cache.length - len(rows)
        del first.prompt_logprobs[begin:]  # those behind were known before it gave its pages back
        following = first.request.prompt_ids[begin + 1 : cache.length + 1]
        done = 0
        while done < len(following):
            logits = self._courses.logits_for(True)
            most = steps_with(logits, self._launch_steps, head) * head.tokens
            some = following[done : done + most]
            part = head.part_without_samples(cache, rows[done : done + len(some)])
            yield from self._courses.fly(head, [part], [group], events, logits, some)
            done += len(some)

    def _choose_first(self, head: HeadLauncher, last_rows: list[tuple[Group, int]], events: list[Event]) -> Course:
        """The tokens behind prompts that have been read. last_rows: where the hidden state of each one's last token
        is."""
        for group, _ in last_rows:
            part_ways(group)
        takers = [(one, row) for group, row in last_rows for one in group]
        parts = [one.part([row], 1) for one, row in takers]
        logits = self._courses.logits_for(any(one.request.logprobs is not None for one, _ in takers))
        try:
            result = (yield from self._courses.fly(head, parts, [[one] for one, _ in takers], events, logits))[0]
        except BaseException:
            for group, _ in last_rows:
                unread_last_token(group)
            raise
        self._others_waited_s += result.seconds

    # By steps ---------------------------------------------------------------------------------------------------------

    def _read_in_steps(self, group: Group, events: list[Event]) -> Course:
        """Brings tokens of a prompt into the cache by one launch of steps, the last of which may sample."""
        first, cache = group[0], group[0].cache
        assert cache is not None
        logits = self._courses.logits_for(first.reads_logprobs)
        del first.prompt_logprobs[cache.length :]  # those behind were known before it gave its pages back
        columns = self._steps.tokens
        steps = max(1, self._chunk(self._launch_steps * columns, columns, self._step_pace) // columns)
        samples = len(group) == 1 and not first.request.wants_logits
        left = self._roster.manner.end(self._known(group), samples) - cache.length
        tokens = min(left, steps_with(logits, steps, self._steps) * columns)
        if not self._roster.make_room(first, tokens, events):
            return
        part = first.next_part(tokens, self._roster.manner.columns_of_step(tokens))
        result = (yield from self._courses.fly(self._steps, [part], [group], events, logits))[0]
        self._note(result, self._step_pace)

    # How much of it ---------------------------------------------------------------------------------------------------

    def _chunk(self, most: int, per_step: int, pace: LaunchPace) -> int:
        """Tokens of a launch that reads a prompt, of at most `most`, `per_step` of them a step."""
        if not self._roster.running or self._chunk_tokens == 0:
            return most
        if self._chunk_tokens is None:
            return pace.steps(most // per_step) * per_step
        return min(most, self._chunk_tokens)

    def _note(self, result: LaunchResult, pace: LaunchPace) -> None:
        pace.note(result.steps, result.seconds)
        self._decode_pace.guess(result.steps, result.seconds)
        self._others_waited_s += result.seconds
