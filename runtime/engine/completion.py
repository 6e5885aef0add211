"""One completion while an engine works on it: its ids, its place in the cache, its part of the next launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from operator import eq

from cheetah.errors import CheetahError
from cheetah.models.logprobs import TokenLogprobs
from cheetah.runtime.engine.drafting import NOTHING_DRAFTED, USUAL_RATIO, Drafted, Drafting, Worth
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launcher import NOT_A_NUMBER, Part
from cheetah.runtime.engine.requests import Event, Failed, Made, NothingAllowed, Request
from cheetah.runtime.engine.watching import allows_one_beside, mask_of_all
from cheetah.runtime.outputs import Timings
from cheetah.runtime.sampling import seed_of

NOTHING_ALLOWED = (
    "no token can be chosen for position {position}: none is left of those that may stand there (structured output) by "
    "allowed_token_ids, bad_words and logit_bias, or the logits are no numbers"
)


class Completion:
    """Number `index` of a request's completions, known as `id`. `cache` is None while it has no keys of its own.

    read: what those of a request have in common, the logprobs of the prompt's ids as far as they are known.
    """

    def __init__(self, id: int, request: Request, index: int, read: list[TokenLogprobs] | None = None):
        self.id, self.request = id, request
        self.sampling = replace(request.sampling, seed=seed_of(request.sampling.seed, index))
        self._watchers = [new() for new in request.watchers]
        self.cache: CachedSequence | None = None
        self.ids = list(request.prompt_ids)
        self.prompt_logprobs: list[TokenLogprobs] = [] if read is None else read
        self.cached_tokens = 0
        self.parting = 0  # behind how many tokens it parts from a prompt that was read before
        self.kept = 0  # of how many tokens a state is kept, for others too: the last one that it knows of
        self.keeps_at: int | None = None  # behind how many its state is kept, once a launch ends there
        self.has_ended = self.has_failed = False
        self.worth: Worth | None = None  # of drafts, once some could have been made
        self._proposed: tuple[int, tuple[int, ...]] | None = None  # behind how many ids, and which
        self.preemptions = 0
        self._drafted, self._drafted_now = NOTHING_DRAFTED, NOTHING_DRAFTED  # before the present launch, and in it
        self._prefill_s = self._decode_s = 0.0
        self._launches = 0
        self._is_prefill, self._passed_s = True, 0.0  # of the present launch

    @property
    def made(self) -> int:
        """Ids sampled so far."""
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def reads_logprobs(self) -> bool:
        """Whether its prompt must be read for what each of its ids was worth."""
        known = 1 + len(self.prompt_logprobs)
        return self.request.prompt_logprobs is not None and known < len(self.request.prompt_ids)

    def uncached_ids(self, most: int) -> list[int]:
        """Its first `most` ids that are not in the cache: the last one, or more if it had to give its pages back."""
        assert self.cache is not None
        return self.ids[self.cache.length : self.cache.length + most]

    @property
    def is_watched(self) -> bool:
        """Whether watchers hear each token before the next is sampled, unless that was drafted."""
        return bool(self._watchers)

    @property
    def may_speculate(self) -> bool:
        """Whether its tokens may be drafted. Masks are those of one step, which then begins with the last token, and
        none says yet that it may not end."""
        if not self.request.speculates or not self._watchers:
            return self.request.speculates
        return not self._to_read_again and self.made >= self.request.min_tokens

    def heard_drafts(self, most: int) -> Drafting | None:
        """Of who is watched: what may be drafted for one step, with the masks behind each: what watchers leave no
        choice of, then what is looked up, if that was worth it. None: nothing."""
        most = min(most, self.request.max_tokens - self.made - 1)
        tokens = next((found for one in self._watchers if (found := [*one.forced()])), [])[:most]
        if not tokens and self.proposed is not None:
            tokens += self.proposed[:most]
        elif self.worth is not None and self.worth.length > USUAL_RATIO:
            tokens += self.worth.proposed([*self.ids, *tokens], most - len(tokens))
        masks = [mask_of_all(found) for found in zip(*(one.ahead(tokens) for one in self._watchers), strict=False)]
        tokens = tokens[: len(masks)]
        is_bound = any(mask is not None for mask in (mask_of_all(one.mask for one in self._watchers), *masks))
        return Drafting(1, tokens, masks=masks if is_bound else ()) if tokens else None

    @property
    def proposed(self) -> tuple[int, ...] | None:
        """What another model has drafted behind its ids; None if it was not asked behind these."""
        known, tokens = self._proposed or (0, ())
        return tokens if known == len(self.ids) else None

    def propose(self, tokens: Sequence[int]) -> None:
        """Another model has drafted these."""
        self._proposed = len(self.ids), tuple(tokens)

    def take_verified(self) -> int | None:
        """How many ids before the last one that model has read rightly, once more is known than its drafts were made
        behind."""
        if self._proposed is None or self.proposed is not None:
            return None
        (known, tokens), self._proposed = self._proposed, None
        return known + sum(1 for _ in takewhile(bool, map(eq, tokens, self.ids[known:-1])))

    @property
    def reads_again(self) -> bool:
        """Whether it had to give its pages back, and ids before the last one are to be read."""
        return self._to_read_again > 0

    @property
    def is_forced(self) -> bool:
        """Whether its watchers leave no choice of what comes next."""
        return any(one.forced() for one in self._watchers)

    def most_drafts(self, width: int) -> int:
        """Of a step of `width` columns of it."""
        return min(self.most_tokens(width - 1), self.request.max_tokens - self.made, width) - 1

    @property
    def _to_read_again(self) -> int:
        """Ids before the last one that are not cached, since it had to give its pages back."""
        assert self.cache is not None
        return len(self.ids) - 1 - self.cache.length

    def most_tokens(self, heard: int = 0) -> int:
        """Tokens that the next decode launch takes in at most: stop ids are banned in all of it or in none, and
        watchers hear a token before the next is sampled, but for so many that they know of."""
        again = self._to_read_again
        unstoppable = self.request.min_tokens - self.made
        wanted = 1 + heard if self._watchers else self.request.max_tokens - self.made
        return again + (min(wanted, unstoppable) if unstoppable > 0 else wanted)

    def part(self, inputs: Sequence[int], total: int, per_step: int = 1, drafting: Drafting | None = None) -> Part:
        """Its part of a launch. Until there are `min_tokens`, stop ids are not sampled, unless its watchers allow
        nothing else."""
        assert self.cache is not None
        sampling, mask = self.sampling, mask_of_all(one.mask for one in self._watchers)
        if self.made < self.request.min_tokens and (mask is None or allows_one_beside(mask, sampling.stop_ids)):
            sampling = replace(sampling, banned=tuple(sorted({*sampling.banned, *sampling.stop_ids})))
        prompt, stepwise = len(self.request.prompt_ids), bool(self._watchers)
        known = self.ids, prompt, mask, stepwise
        return Part(self.cache, inputs, total, sampling, per_step, *known, drafting=drafting)

    def next_part(self, tokens: int, per_step: int) -> Part:
        """Its part of a launch that reads its next tokens, `per_step` a step."""
        assert self.cache is not None
        # One input more than tokens, where there is one: nothing is sampled, and the head need not run.
        return self.part(self.ids[self.cache.length :][: tokens + 1], tokens, per_step)

    def go_on_from_last(self) -> None:
        """Its last id is the input that comes next, also where a launch was ended before anything followed it."""
        if self.cache is not None:
            self.cache.length = min(self.cache.length, len(self.ids) - 1)

    def part_of_pass(self, tokens: int, per_step: int) -> Part:
        """Its part of a pass over its next tokens. The last one's hidden state is wanted where no id is behind it, and
        all where each id is to be judged."""
        part = self.next_part(tokens, per_step)
        return replace(part, wanted=tokens if self.reads_logprobs else int(part.samples))

    def launched(self) -> None:
        """A launch with a part of it begins."""
        self._launches += 1
        self._is_prefill, self._passed_s = not self.made, 0.0
        self._drafted, self._drafted_now = self._drafted + self._drafted_now, NOTHING_DRAFTED

    def wait(self, seconds: float) -> None:
        """A launch has made drafts for it, or read for that."""
        self._decode_s += seconds

    def take(
        self,
        part: Part,
        token_ids: tuple[int, ...],
        seconds: float,
        drafted: Drafted = NOTHING_DRAFTED,
        has_failed: bool = False,
    ) -> list[Event]:
        """Takes in what a launch of `part` has made since the last time, and says it. seconds, drafted: of the launch
        so far."""
        self._drafted_now = drafted
        passed, self._passed_s = seconds - self._passed_s, seconds
        if self._is_prefill:
            self._prefill_s += passed
        else:
            self._decode_s += passed
        of_prompt = None
        if not self.made and self.request.prompt_logprobs is not None:
            of_prompt = tuple(self.prompt_logprobs)
        self.ids += token_ids
        events: list[Event] = []
        if token_ids:
            reason = self._finish_reason(part)
            self.has_ended = reason is not None
            events.append(Made(self.id, token_ids, self._timings(), reason, prompt_logprobs=of_prompt))
        if has_failed:
            events.append(self._without_a_token(part))
        elif not self.has_ended:
            events += self._tell(token_ids)
        return events

    def _without_a_token(self, part: Part) -> Failed:
        """There was none to choose: where the request leaves all of them, the logits are to blame."""
        position, asked = len(self.ids), part.sampling
        if part.mask is None and asked.allowed is None and not (asked.banned or asked.bias):
            return self._failed(NOT_A_NUMBER.format(position=position))
        return self._failed(NOTHING_ALLOWED.format(position=position), NothingAllowed)

    def _tell(self, token_ids: Sequence[int]) -> list[Event]:
        """Tells its watchers, any of which may end it."""
        try:
            for token in token_ids:
                for watcher in self._watchers:
                    watcher.after(token)
        except CheetahError as problem:
            return [self._failed(str(problem), type(problem))]
        return []

    def _failed(self, message: str, kind: type[CheetahError] = CheetahError) -> Failed:
        self.has_ended = self.has_failed = True
        return Failed(self.id, message, kind)

    def _finish_reason(self, part: Part) -> str | None:
        if self.ids[-1] in part.sampling.stop_ids:
            return "stop"
        return "length" if self.made >= self.request.max_tokens else None

    def _timings(self) -> Timings:
        seconds = (self._prefill_s, self._decode_s)
        drafted = self._drafted + self._drafted_now
        return Timings(
            len(self.request.prompt_ids),
            self.made,
            *seconds,
            self._launches,
            self.cached_tokens,
            drafted.tokens,
            drafted.accepted,
        )


def part_ways(group: Sequence[Completion]) -> None:
    """Gives each of those who began together a cache: the first has that of all, the others forks of it."""
    first, cache = group[0], group[0].cache
    assert cache is not None
    for other in group[1:]:
        if other.cache is None:
            other.cache, other.cached_tokens = cache.fork(), first.cached_tokens


def unread_last_token(group: Sequence[Completion]) -> None:
    """A prompt that has been read to its end, with nothing chosen behind it, is as if its last token had not."""
    first, others = group[0], group[1:]
    assert first.cache is not None
    first.cache.go_back(len(first.ids) - 1)
    for other in others:
        if other.cache is not None:
            other.cache.clear()
            other.cache = None
