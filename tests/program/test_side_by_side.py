"""Pieces of work side by side: results in order, lines as they come, errors in their turn, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cheetah.errors import CheetahError
from cheetah.tools.side_by_side import in_order


def finished(number: int, say: Callable[[str], None]) -> int:
    say(f"piece {number}")
    return number


def failing(say: Callable[[str], None]) -> int:
    raise CheetahError("it is wrong")


def dying(say: Callable[[str], None]) -> int:
    os._exit(3)


def endless(path: Path, say: Callable[[str], None]) -> int:
    path.write_text(str(os.getpid()))
    time.sleep(600)
    return 0


def test_results_come_in_order_and_lines_to_who_hears_them() -> None:
    lines: list[str] = []
    works = ((partial(finished, number), lambda line: lines.append(line)) for number in range(5))
    assert [*in_order(works, 2)] == [0, 1, 2, 3, 4]
    assert sorted(lines) == [f"piece {number}" for number in range(5)]


@pytest.mark.parametrize(("wrong", "message"), [(failing, "it is wrong"), (dying, "ended by itself")])
def test_what_goes_wrong_is_raised_in_its_turn(wrong: Callable[..., int], message: str) -> None:
    results = in_order([(partial(finished, 0), print), (wrong, print), (partial(finished, 2), print)], 3)
    assert next(results) == 0
    with pytest.raises(CheetahError, match=message):
        next(results)


def test_who_stops_listening_ends_what_still_runs(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    results = in_order([(partial(finished, 0), print), (partial(endless, path), print)], 2)
    assert next(results) == 0
    results.close()
    assert not multiprocessing.active_children()
    if path.exists() and (pid := path.read_text()):
        assert not Path("/proc", pid).exists()
