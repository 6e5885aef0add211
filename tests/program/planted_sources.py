"""What `cheetah check` says, by its defaults, of each bug of `source_bugs`.

A kernel with a bug is generated in a process that reads one module with the bug in it. Those of one subject stand in
one text, of which a variable says which runs (`joined`), so that one is compiled; each runs in a process of its own, up
to the first wrong verdict, and those that are not found go on to the next subject. What cannot stand in one text with
others, as its numbers differ, is checked alone. Run as a program it looks at a part of the list and prints what it
found, a line of JSON each: `python -m tests.program.planted_sources 0 1 [NAME]`.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.machinery import SourceFileLoader
from itertools import islice
from typing import Any

from cheetah.cli.check import subject_of
from cheetah.cli.configs import named_config
from cheetah.package import Generated
from cheetah.tools.check import Case, Subject, Verdict, explored, made_by, pieces, raced
from cheetah.tools.side_by_side import in_order
from tests.program.joined import VARIABLE, choose, joined
from tests.program.source_bugs import BUGS, SourceBug

ALONE = "plan/"
"""What is changed there changes numbers that the runtime has too."""
GPU = "emulator"
WHERE = {
    "passes over prompts": "passes",
    "an awkward small model": "awkward",
    "one of many tokens": "many tokens",
    "one behind the grid barrier": "barrier",
    "one that verifies drafts": "drafts",
}
HOW = {"Deadlock": "a deadlock", "Misuse": "misuse", "Race": "a race", "different output": "other bits"}


@dataclass(frozen=True)
class Finding:
    """Of a bug: at which subject it was found, and by what; both "" where it was not."""

    name: str
    where: str = ""
    how: str = ""
    said: str = ""

    @classmethod
    def of(cls, bug: SourceBug, subject: str, verdict: Verdict) -> Finding:
        where = next((short for kind, short in WHERE.items() if subject.startswith(kind)), "whole")
        said = "\n".join(verdict.findings)
        kind = re.search("Deadlock|Misuse|Race|different output", said)
        of_promise = "float32" if "from float32" in said else "a draw" if "was sampled at" in said else "its promises"
        return cls(bug.name, where, HOW[kind[0]] if kind else of_promise, said[:2000])


def read_with(bug: SourceBug) -> None:
    """From now on this process reads the bug's module with the bug in it, and all others anew."""
    wrong, right = bug.planted(), SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> Any:
        path = self.get_filename(name)
        if os.path.realpath(path) != str(bug.file):
            return right(self, name)
        linecache.cache[path] = len(wrong), None, wrong.splitlines(True), path  # for who looks at a function's source
        return compile(wrong, path, "exec")

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    for name in [name for name in sys.modules if name.partition(".")[0] == "cheetah"]:
        del sys.modules[name]


def options_of(bug: SourceBug) -> dict[str, Any]:
    """Of the plan."""
    return {"drafts": bug.drafts} if bug.drafts else {}


def checked_for(bug: SourceBug) -> Subject:
    """What is checked of its model by default. Its modules are read where they have been forgotten."""
    from cheetah.cli.check import subject_of as subject_of_now
    from cheetah.cli.configs import named_config as named_now

    return subject_of_now(named_now(bug.model), options_of(bug))


def wrongly_made(bug: SourceBug, place: int, say: Callable[[str], None]) -> tuple[Generated, ...]:
    """In a process of its own: the kernels of the piece of work with that number, as the bug has them."""
    read_with(bug)
    from cheetah.tools.check import made_by as made_now
    from cheetah.tools.check import pieces as pieces_now

    maker, _ = pieces_now(checked_for(bug), GPU)[place]
    return next(made_now(maker)).made


def alone(bug: SourceBug, say: Callable[[str], None]) -> Finding:
    """In a process of its own: what the whole check says."""
    read_with(bug)
    from cheetah.tools import check

    try:
        for maker, is_raced in sorted(check.pieces(checked_for(bug), GPU), key=lambda piece: piece[1]):
            for case in check.made_by(maker):
                launches = case.launches(**{"sanitize" if is_raced else "watched": True})
                looked = partial(check.raced, case) if is_raced else partial(check.explored, case, first=True)
                verdict: Any = looked(launches)
                if not verdict.ok:
                    return Finding.of(bug, case.subject.kind, verdict)
    except AssertionError as error:
        return Finding(bug.name, "when it is generated", "", repr(error))
    return Finding(bug.name)


def results(works: Iterable[Callable[[Callable[[str], None]], Any]]) -> Iterator[Any]:
    """Of each work in a process of its own, one after the other; an exception as such."""
    for work in works:
        try:
            yield next(in_order([(work, lambda line: None)], 1))
        except Exception as error:
            yield error


class Looking:
    """For bugs in one model's kernels, which verify as many drafts."""

    def __init__(self, bugs: Sequence[SourceBug]) -> None:
        self.pieces = pieces(subject_of(named_config(bugs[0].model), options_of(bugs[0])), GPU)
        self.alone = [bug for bug in bugs if bug.path.startswith(ALONE)]
        self.left = [bug for bug in bugs if bug not in self.alone]
        self.planted = set[str]()

    def findings(self) -> Iterator[Finding]:
        """As they come."""
        for place, (maker, is_raced) in sorted(enumerate(self.pieces), key=lambda piece: piece[1][1]):  # races last
            for case in made_by(maker) if self.left else ():
                for finding in self._at(place, case, is_raced):
                    self.left = [bug for bug in self.left if bug.name != finding.name]
                    yield finding
        for bug, found in zip(self.alone, results(partial(alone, bug) for bug in self.alone), strict=True):
            yield found if isinstance(found, Finding) else Finding(bug.name, said=repr(found))
        yield from (Finding(bug.name, "" if bug.name in self.planted else "in no kernel") for bug in self.left)

    def _at(self, place: int, case: Case, is_raced: bool) -> Iterator[Finding]:
        texts = list[tuple[SourceBug, tuple[Generated, ...]]]()
        for bug, made in zip(self.left, results(partial(wrongly_made, bug, place) for bug in self.left), strict=True):
            if isinstance(made, AssertionError):
                yield Finding(bug.name, "when it is generated", "", repr(made))
            elif isinstance(made, Exception):  # of a text that is none, or of sources that change meanwhile
                yield Finding(bug.name, "", "an error", repr(made))
            elif [one.text for one in made] != [one.text for one in case.made]:
                self.planted.add(bug.name)
                texts += [(bug, made)] if self._may_stand_beside(bug, made, case) else []
        if texts:
            together = tuple(
                joined(clean, [made[number] for _, made in texts]) for number, clean in enumerate(case.made)
            )
            yield from self._of(replace(case, made=together), [bug for bug, _ in texts], is_raced)

    def _may_stand_beside(self, bug: SourceBug, made: Sequence[Generated], case: Case) -> bool:
        """Whether it may stand in one text with others; else it is looked at alone."""
        try:
            for own, clean in zip(made, case.made, strict=True):
                assert replace(own.manifest, text_sha256="") == replace(clean.manifest, text_sha256="")
                joined(clean, [own])
        except AssertionError:
            self.alone.append(bug)
            self.left = [one for one in self.left if one is not bug]
            return False
        return True

    def _of(self, case: Case, bugs: Sequence[SourceBug], is_raced: bool) -> Iterator[Finding]:
        launches = case.launches(**{"sanitize" if is_raced else "watched": True})

        def look(number: int, say: Callable[[str], None]) -> Verdict:
            os.environ[VARIABLE] = str(number)  # for programs that are processes
            choose(launches.rig, number)
            return raced(case, launches) if is_raced else explored(case, launches, first=True)

        def look_without(say: Callable[[str], None]) -> Verdict:
            return explored(case, launches, schedulers=("random",))

        clean = Verdict() if is_raced else next(results([look_without]))
        assert isinstance(clean, Verdict) and clean.ok, f"without a bug: {clean}"
        for bug, verdict in zip(
            bugs, results(partial(look, number) for number in range(1, len(bugs) + 1)), strict=True
        ):
            if isinstance(verdict, Exception):
                yield Finding(bug.name, "", "an error", repr(verdict))
            elif not verdict.ok:
                yield Finding.of(bug, case.subject.kind, verdict)


def found_of(bugs: Sequence[SourceBug]) -> Iterator[Finding]:
    """What is found of each."""
    for model, drafts in dict.fromkeys((bug.model, bug.drafts) for bug in bugs):
        try:
            yield from Looking([bug for bug in bugs if (bug.model, bug.drafts) == (model, drafts)]).findings()
        except Exception:
            traceback.print_exc()


def part_of(number: int, parts: int) -> list[SourceBug]:
    """One of so many parts of the list, with bugs of each kind."""
    return [*islice(BUGS, number, None, parts)]


if __name__ == "__main__":
    number, parts = map(int, sys.argv[1:3])
    wanted = [bug for bug in part_of(number, parts) if not sys.argv[3:] or bug.name in sys.argv[3:]]
    for finding in found_of(wanted):
        print(json.dumps(asdict(finding)), flush=True)
