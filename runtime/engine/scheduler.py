"""Whose turn it is: the next launch is decided here, and its results are settled here, when it was made.

Who has a place and pages is known to `queues`; how prompts are read to `prefill`, with launches of those who decode in
between. Starts nothing, and tells nobody: `engine` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from cheetah.plan.kv.tables import FILTERED
from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.draft_model import DraftModel
from cheetah.runtime.engine.draft_rounds import RoundLauncher, RoundPart
from cheetah.runtime.engine.drafting import LEAST_STEPS, NOTHING_DRAFTED, Drafting, Pace, Speculation, first_steps
from cheetah.runtime.engine.launch_order import LaunchOrder, LogitsBuffers, Purpose, steps_with
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.launches import LaunchResult, Part
from cheetah.runtime.engine.prefill import Prefill
from cheetah.runtime.engine.queues import Queues
from cheetah.runtime.engine.request_rows import options_of
from cheetah.runtime.engine.requests import Decoded
from cheetah.runtime.engine.step_time import LAUNCH_SECONDS, StepTime

WORTH_ENDING_S = 0.02
FEWEST_STEPS = 4
"""A launch ends for somebody who comes only where its rest would take longer than the one, to end it costs a step and
a launch more, and after as many steps as the other, so that those who decode go on however many come."""


class Scheduler:
    """`next_launch` gives an order; who carries it out tells how that ended, by `settle` or `give_up`, before the next.

    launcher: launches all who decode; solo: one by itself. decode_time: of launches of those. speculation: how their
    tokens are drafted, if they are.
    """

    def __init__(
        self,
        queues: Queues,
        prefill: Prefill,
        launcher: Launcher,
        solo: Launcher,
        logits: LogitsBuffers,
        decode_time: StepTime,
        speculation: Speculation | None = None,
        draft_model: DraftModel | None = None,
    ):
        self.queues, self.prefill = queues, prefill
        self._launcher, self._solo, self._logits = launcher, solo, logits
        self._speculation, self._model = speculation, draft_model
        self._pace = Pace(LEAST_STEPS if draft_model is None else 1)
        self._for_drafts = Decoded()  # what the other model took since something was decoded
        self.decode_time, self.round_time = decode_time, StepTime(decode_time.max_steps)
        self.decoded = self.latest = Decoded()  # by all launches in which completions were decoded, by the last one
        # Those who decode shall have a launch: of one step, the first one of some; or before more is read.
        self._first_tokens_are_due = self._others_are_due = False
        self._others_wait, self._others_waited_s = False, 0.0  # for what is read; since their last launch

    @property
    def is_amid(self) -> bool:
        """Whether the next launch belongs to the one before: nothing may change between the two."""
        return self.prefill.is_amid

    def next_launch(self) -> LaunchOrder | None:
        """Of the next prompts, as far as there is room, or of all who run. None if there is nobody, or if whose turn it
        was had to give its pages back.

        Behind one that has read prompts to their ends all make a token, the first one of those."""
        queues = self.queues
        if self.is_amid:
            return self.prefill.next_behind()
        self._admit()
        if queues.running and (self._first_tokens_are_due or self._others_are_due or not queues.reading):
            most = 1 if self._first_tokens_are_due else min(one.most_tokens() for one in queues.running)
            # Whoever runs has this launch: one of first tokens is the turn of the others too. With one more for them,
            # half of the places stayed empty where a launch takes as long as they may wait.
            self._first_tokens_are_due = self._others_are_due = False
            self._others_waited_s = 0.0
            return self._decode(self.decode_time.steps(most))
        if not queues.reading:
            return None
        self._others_wait = bool(queues.running)
        if (order := self.prefill.next_launch()) is None:
            self._end_reading()
        return order

    def settle(self, order: LaunchOrder, results: Sequence[LaunchResult]) -> None:
        """It was made, and its tokens are taken."""
        steps, seconds = results[0].steps, results[0].seconds
        if order.logits is not None:
            self._logits.written()
        if order.timer is not None:
            order.timer.note(steps, seconds)
        if order.purpose is Purpose.DECODE:
            self._settle_decoding(order, results)
            return
        if order.purpose is Purpose.DRAFT:
            assert self._model is not None
            self._model.settle(order, results)
            self._for_drafts += Decoded(0, seconds, order.launcher.bytes_read(order.parts, steps))
            return
        if order.timer is not None:
            self.decode_time.guess(steps, seconds)
        self._others_waited_s += seconds
        self.prefill.settle(order)
        if not self.is_amid:
            self._end_reading()

    def give_up(self, order: LaunchOrder) -> None:
        """It was not made, or ended in the middle, which is the same: all are as they were before."""
        self.prefill.give_up(order)

    def shall_make_way(self, order: LaunchOrder, made: int) -> bool:
        """Whether a launch that has made so many tokens shall end for somebody who has come meanwhile, and can begin.
        While a prompt is read in parts it is the turn of those who decode."""
        queues = self.queues
        can_begin = queues.has_room and not (queues.waiting or queues.reading)
        is_worth_it = (order.steps - made) * self.decode_time.step_s > WORTH_ENDING_S
        return order.purpose is Purpose.DECODE and can_begin and made >= FEWEST_STEPS and is_worth_it

    def _admit(self) -> None:
        """Takes who can begin now out of the line, first come first served: one request, and where there are passes
        more, as long as one has room for them."""
        queues = self.queues
        while queues.waiting and (not queues.reading or self.prefill.can_read_along()):
            if not (group := queues.next_group()):
                break
            queues.reading.append(group)
            self._end_what_is_read()  # if only the last token of the prompt is left

    def _end_what_is_read(self) -> None:
        """Lets those decode whose prompt has been read."""
        for group in [group for group in self.queues.reading if not self.prefill.left(group)]:
            self._first_tokens_are_due |= not group[0].made
            self.queues.begin_to_decode(group)

    def _end_reading(self) -> None:
        """Prompts have had their turn."""
        self._end_what_is_read()
        others_may = self._others_wait and self.prefill.gives_turns
        waited_enough = self._others_waited_s >= LAUNCH_SECONDS
        self._others_are_due = others_may and (waited_enough or bool(self.queues.reading))

    def _decode(self, steps: int) -> LaunchOrder | None:
        """One launch of all who decode, from the ids of each that are not cached: the last, or more if it came back."""
        if self._model is not None and (order := self._by_model(self._model)) is not None:
            self._others_are_due = order.purpose is Purpose.DRAFT  # who wait for that
            return order
        completions = [*self.queues.running]
        logits = self._logits.next(any(one.request.logprobs is not None for one in completions))
        if self._speculation is not None:
            steps = first_steps(steps, (one.worth for one in completions if one.may_speculate))
        steps = steps_with(logits, steps, self._launcher, self._solo)
        shares = self._shares(completions, steps)
        if any(drafting is not None and drafting.rounds == 1 for _, drafting in shares):
            steps = 1
        wanted = [
            (one, width, drafting, min(one.most_tokens(width - 1), steps * width))
            for one, (width, drafting) in zip(completions, shares, strict=True)
        ]
        for one, *_, total in sorted(wanted, key=lambda want: want[0].id):
            self.queues.make_room(one, total)
        together = [want for want in wanted if want[0].cache is not None]
        if not together:
            return None
        parts = [
            one.part(one.uncached_ids(total + 1), total, width, drafting) for one, width, drafting, total in together
        ]
        return LaunchOrder(
            Purpose.DECODE,
            self._launcher_of(parts),
            parts,
            [(one,) for one, *_ in together],
            logits,
            timer=None if self._model is not None and steps == 1 else self.decode_time,
        )

    def _by_model(self, model: DraftModel) -> LaunchOrder | None:
        """Rounds of another model and this one; or what that is to do before; None where all is drafted, or nothing."""
        completions = sorted(self.queues.running, key=lambda one: one.id)
        widths = self._widths(completions)
        wanted = [
            (one, most)
            for one, width in zip(completions, widths, strict=True)
            if width > 1 and not (one.reads_again or one.is_forced) and (most := one.most_drafts(width)) > 0
            if self._pays(one, len(completions))
        ]
        for one, most in wanted:
            if one.cache is not None:
                self.queues.make_room(one, most + 1)
        drafts = {one: most for one, most in wanted if one.cache is not None}
        if not drafts:
            return None
        asked, counts = [*drafts], [*drafts.values()]
        if (order := model.reading(asked, counts)) is not None:
            return order
        completions = [one for one in completions if one.cache is not None]
        needs_host = any(one.is_watched or one.request.logprobs is not None for one in completions)
        needs_host = needs_host or min(one.most_tokens() for one in completions) < 2
        if model.rounds is None or needs_host or not model.has_rounds_for(asked, counts):
            return model.drafting(asked, min(counts))
        return self._rounds(model, model.rounds, completions, drafts)

    def _rounds(
        self,
        model: DraftModel,
        launcher: RoundLauncher,
        completions: Sequence[Completion],
        drafts: Mapping[Completion, int],
    ) -> LaunchOrder | None:
        """Many rounds of those who decode, for some of whom tokens are drafted, up to so many."""
        assert self._speculation is not None
        widths = self._speculation.widths([one in drafts for one in completions], self._launcher.tokens)
        rounds = self.round_time.steps(min(one.most_tokens() for one in completions))
        totals = [min(one.most_tokens(), rounds * width) for one, width in zip(completions, widths, strict=True)]
        if not all([self.queues.make_room(one, total) for one, total in zip(completions, totals, strict=True)]):
            return None
        first_parts = model.first_parts([*drafts], [*drafts.values()])
        drafted_for = dict(zip(drafts, first_parts, strict=True))
        parts = []
        for one, width, total in zip(completions, widths, totals, strict=True):
            by = drafted_for.get(one)
            drafting = None if by is None else Drafting(rounds)
            part = one.part(one.uncached_ids(1), total, width, drafting)
            parts.append(RoundPart(**{**vars(part), "by": by}))
        takers = [(one,) for one in completions]
        return LaunchOrder(Purpose.DECODE, launcher, parts, takers, timer=self.round_time)

    def _launcher_of(self, parts: Sequence[Part]) -> Launcher:
        """The one for a sequence by itself, if it is and nothing is drafted. With a fixed `kv_chunk` not if it is
        filtered: how many warps add up what top-p asks for follows from a kernel's columns."""
        is_alone = len(parts) == 1 and parts[0].drafting is None
        is_bound = bool(self._launcher.kv_chunk) and bool(options_of(parts[0].sampling) & FILTERED)
        return self._solo if is_alone and not is_bound else self._launcher

    def _shares(self, completions: Sequence[Completion], steps: int) -> list[tuple[int, Drafting | None]]:
        """Columns of each in a step, and what is drafted in those behind the first."""
        widths = self._widths(completions)
        return [self._share(one, width, steps) for one, width in zip(completions, widths, strict=True)]

    def _widths(self, completions: Sequence[Completion]) -> list[int]:
        """Columns of each in a step. Those whose drafts do not pay leave theirs to the others; while some read again
        what they had, several tokens a step, another model drafts for nobody."""
        speculation, count = self._speculation, len(completions)
        if speculation is None or self._pace.lacks_plain(count):
            return [1] * count
        if speculation.by_model and any(one.reads_again for one in completions):
            return speculation.widths([one.reads_again for one in completions], self._launcher.tokens)
        wanted = [
            self._worth(one) if one.may_speculate and (one.is_watched or self._pays(one, count)) else 0.0
            for one in completions
        ]
        return speculation.widths(wanted, self._launcher.tokens)

    @staticmethod
    def _worth(one: Completion) -> float:
        """Tokens that a step with drafts makes of it, as far as is known."""
        return inf if one.worth is None else one.worth.length

    def _pays(self, one: Completion, count: int) -> bool:
        """Whether its drafts, beside those of so many sequences, are worth what they cost, or not known yet."""
        return one.worth is None or one.worth.length > self._pace.break_even(count)

    def _share(self, one: Completion, width: int, steps: int) -> tuple[int, Drafting | None]:
        if width == 1:
            return 1, None
        assert self._speculation is not None
        if one.is_watched:
            heard = one.heard_drafts(width - 1)
            return (1, None) if heard is None else (1 + len(heard.drafts), heard)
        if self._speculation.by_model and not one.reads_again:
            drafts = (one.proposed or ())[: one.most_drafts(width)]
            return (1 + len(drafts), Drafting(1, drafts)) if drafts else (1, None)
        return width, Drafting(steps, ngrams=self._speculation.ngrams, ahead=one.request.prediction)

    def _note_worth(self, order: LaunchOrder, results: Sequence[LaunchResult]) -> None:
        """What drafts were worth, or would have been, and what they cost."""
        assert self._speculation is not None
        has_drafts = any(part.drafting is not None for part in order.parts)
        seconds = results[0].seconds + self._for_drafts.seconds
        self._pace.note(len(order.parts), has_drafts, results[0].steps, seconds)
        for part, (one, *_), result in zip(order.parts, order.takers, results, strict=True):
            if one.request.speculates:
                one.worth = one.worth or self._speculation.new_worth(one.request.prediction)
                # What watchers force is drafted anyway: of theirs it matters what looking up alone would be worth.
                is_forced = one.is_watched and self._model is None
                steps = None if part.drafting is None or is_forced else result.steps
                one.worth.note(one.ids, len(result.token_ids), steps)

    def _settle_decoding(self, order: LaunchOrder, results: Sequence[LaunchResult]) -> None:
        steps, seconds = results[0].steps, results[0].seconds
        drafted = sum((result.drafted for result in results), NOTHING_DRAFTED)
        completions = [one for takers in order.takers for one in takers]
        own = Decoded(steps, seconds, order.launcher.bytes_read(order.parts, steps), drafted)
        self.latest = own + self._for_drafts
        self.decoded += self.latest
        if self._speculation is not None:
            self._note_worth(order, results)
        self._for_drafts = Decoded()
        for one in completions:
            one.go_on_from_last()
        self.prefill.note_decoding(steps, seconds)
        self.queues.let_go(completions)
