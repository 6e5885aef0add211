"""Drafts by looking up: what stood behind the same tokens earlier in the sequence, its prompt included, or in a text
that was given ahead of it, which is looked up first.

`history` has every sequence's tokens by position, behind that text. Block 0 appends what a step made, at its end; all
blocks search it at the ends of later steps, up to what the step before the one that ends has made: that was stored
before block 0 published its candidates of this step, with release, and they have read those, with acquire. What this
step has made they know by themselves. So nobody reads a word that is being written, and all find the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.advance import ByAcceptance
from cheetah.blocks.columns import NUMBER, SEQUENCE, STOPPED, Columns
from cheetah.lang import prim, ty
from cheetah.plan.index import round_up
from cheetah.plan.kv.tables import AHEAD_SHIFT
from cheetah.plan.plan import Plan
from cheetah.plan.regions import NGRAM_TOKENS

WINDOW = 32768
"""Most tokens that are searched, the newest: every block reads them all from L2."""
TOKENS_OF_LOAD = 4
LENGTH_SHIFT = 24
PREFERRED = 1 << 23
"""Matches are compared as words: how long they are, then whether they lie in the text ahead, then how late they are."""


def history_room(plan: Plan) -> int:
    """Words of a sequence's row of `history`: rows begin at whole loads. A text ahead may be as long as a context."""
    return round_up(2 * plan.max_context + 1, TOKENS_OF_LOAD)


@dataclass(frozen=True, eq=False)
class Search:
    """One sequence's, at the end of a step. ahead: tokens before its own. Positions, behind those: of its newest token,
    `end`, and of the last that its row of `history` is sure to have, `written`; those behind were chosen in this step,
    by its columns from `first` on, the first of them behind the token at position `last`. longest, shortest: n-grams
    that count."""

    row: Any
    ahead: Any
    end: Any
    written: Any
    first: Any
    last: Any
    longest: Any
    shortest: Any


@dataclass(frozen=True, eq=False)
class Lookup:
    """Of the sequences of a launch. vocab: rows of the embedding."""

    columns: Columns
    advance: ByAcceptance
    history: ch.Expr
    vocab: int

    @ch.inline
    def append(self, sequence: ch.Expr, number: ch.Expr, token: ch.Expr) -> None:
        """In block 0: token `number` of the launch was made."""
        columns = self.columns
        place = self._ahead(sequence) + columns.sequence(sequence, "length") + number
        self._row(sequence)[place] = token

    @ch.inline
    def _row(self, sequence: ch.Expr) -> Any:
        row = self.history + self.columns.sequence(sequence, "slot") * history_room(self.columns.machine.plan)
        return row

    def _ahead(self, sequence: ch.Expr) -> Any:
        """Tokens of its row before its own."""
        return self.columns.sequence(sequence, "ngram_min") >> AHEAD_SHIFT

    @ch.inline
    def draft(self, following: Any, next_token: Any, drafted: Any) -> None:
        """In the consumer role, between two barriers of its warps: drafts of step `following`, of sequences that ask
        for them, into `next_token` where the launch gives none, and how many, into `drafted`."""
        columns = self.columns
        count = columns.state(columns.count - 1, SEQUENCE) + 1
        with ch.for_(count, unroll=1, name="sequence") as sequence:
            first = columns.sequence(sequence, "first_column")
            is_asked = columns.sequence(sequence, "ngram_max") != 0
            with ch.if_(is_asked & (columns.state(first, STOPPED) == 0)):
                self._draft_of(sequence, following, next_token, drafted)

    @ch.function
    def _draft_of(self, sequence: Any, following: Any, next_token: Any, drafted: Any) -> None:
        """Nothing where all columns have inputs. All threads agree on that."""
        machine, columns = self.columns.machine, self.columns
        done = ch.const(ty.u32, self.advance.done(sequence, following), name="done")
        given = ch.const(ty.u32, columns.sequence(sequence, "given"), name="given")
        known = ch.const(ty.u32, ch.maximum(given, done + 1), name="known")
        behind = ch.const(ty.u32, done + columns.sequence(sequence, "per_step"), name="behind")
        with ch.if_(known < behind):
            search = self._search_of(sequence, known, given)
            words = machine.region("lookup", ty.u32)
            with ch.if_(machine.thread < search.longest):
                words[machine.thread] = self._token(search, search.end - machine.thread)
            machine.meet()
            found = self._find(search, words)
            with ch.if_(machine.lane == 0):
                words[NGRAM_TOKENS + machine.warp] = found
            machine.meet()
            with ch.if_(machine.warp == 0):
                best = ch.var(ty.u32, 0)
                with ch.if_(machine.lane < machine.plan.consumer_warps):
                    best.set(words[NGRAM_TOKENS + machine.lane])
                best.set(prim.warp_maximum_u32(best))
                with ch.if_(best != 0):
                    self._take(search, sequence, known, done, best, next_token)
                    with ch.if_(machine.lane == 0):
                        drafted[sequence] = behind - known

    @ch.inline
    def _search_of(self, sequence: Any, known: Any, given: Any) -> Search:
        columns = self.columns
        ahead = ch.const(ty.u32, self._ahead(sequence), name="ahead")
        length = ch.const(ty.u32, ahead + columns.sequence(sequence, "length"), name="length")
        first = ch.const(ty.u32, columns.sequence(sequence, "first_column"), name="first")
        last = ch.const(ty.u32, length + columns.state(first, NUMBER), name="last")
        end = ch.const(ty.u32, length + known - 1, name="end")
        written = ch.const(ty.u32, ch.maximum(last, length + given - 1), name="written")
        longest = ch.const(ty.u32, ch.minimum(columns.sequence(sequence, "ngram_max"), end), name="longest")
        shortest = ch.const(ty.u32, columns.sequence(sequence, "ngram_min") & ((1 << AHEAD_SHIFT) - 1), name="shortest")
        return Search(self._row(sequence), ahead, end, written, first, last, longest, shortest)

    @ch.function
    def _token(self, search: Search, position: Any) -> ch.Expr:
        """The token at a position up to `end`."""
        token = ch.var(ty.u32)
        with ch.if_(position <= search.written):
            token.set(search.row[position])
        with ch.else_():
            token.set(self.columns.machine.chosen[search.first + (position - search.last - 1)])
        return token

    @ch.inline
    def _find(self, search: Search, ngram: Any) -> ch.Expr:
        """The longest match before the newest token, the latest of equal ones, but one in the text ahead before others:
        its length, whether it lies there, the position at which it ends and 1; 0 if none counts. On every lane of the
        warp, of what its lanes have read."""
        machine = self.columns.machine
        newest = ch.const(ty.u32, ngram[0], name="newest")
        whole = ch.const(ty.u32, ch.minimum(search.written + 1, search.end) // TOKENS_OF_LOAD, name="whole")
        most = WINDOW // TOKENS_OF_LOAD
        start = ch.const(ty.u32, ch.select(whole > most, whole - most, ty.u32(0)), name="start")
        units = ch.reinterpret(ty.ptr(ty.u32x4), search.row)
        best = ch.var(ty.u32, 0)
        with ch.for_(start + machine.thread, whole, machine.consumer_threads, unroll=4, name="unit") as unit:
            tokens = units[unit]
            for index, token in enumerate((tokens.x, tokens.y, tokens.z, tokens.w)):
                with ch.if_(token == newest):
                    self._extend(search, ngram, unit * TOKENS_OF_LOAD + index, best)
        # Behind the last whole load lies what block 0 may be writing by now; that is known otherwise.
        position = ch.const(ty.u32, whole * TOKENS_OF_LOAD + machine.thread, name="position")
        with ch.if_(position < search.end), ch.if_(self._token(search, position) == newest):
            self._extend(search, ngram, position, best)
        return prim.warp_maximum_u32(best)

    @ch.function
    def _extend(self, search: Search, ngram: Any, position: Any, best: Any) -> None:
        """The newest token stands at this position too: how many of those before it do as well."""
        length = ch.var(ty.u32, 1)
        most = ch.minimum(search.longest, position + 1)
        with ch.while_(length < most):
            with ch.if_(self._token(search, position - length) != ngram[length]):
                ch.break_()
            length += 1
        with ch.if_(length >= search.shortest):
            place = position + 1 + ch.select(position < search.ahead, ty.u32(PREFERRED), ty.u32(0))
            best.set(ch.maximum(best, (length << LENGTH_SHIFT) | place))

    @ch.inline
    def _take(self, search: Search, sequence: Any, known: Any, done: Any, best: Any, next_token: Any) -> None:
        """By the first warp, a column a lane: what follows the match; behind the newest token that repeats itself."""
        lane, columns = self.columns.machine.lane, self.columns
        number = done + lane
        is_open = number >= ch.maximum(known, columns.sequence(sequence, "drafted"))
        with ch.if_((lane < columns.sequence(sequence, "per_step")) & is_open):
            position = ch.const(ty.u32, best & (PREFERRED - 1), name="position")
            period = search.end + 1 - position
            token = self._token(search, position + (number - known) % period)
            next_token[search.first + lane] = ch.minimum(token, self.vocab - 1)
