"""Tests on a GPU run side by side; who needs it alone waits for the others, and they for it. (Needs none itself.)"""

from __future__ import annotations

import threading
from pathlib import Path

from tests.gpu_turns import gpu_turn, large_place

SOON = 0.05


def test_many_at_once_or_one_alone(tmp_path: Path) -> None:
    there, left = [threading.Event() for _ in range(4)], [threading.Event() for _ in range(4)]

    def stay(number: int, alone: bool) -> None:
        with gpu_turn(tmp_path, alone=alone):
            there[number].set()
            assert left[number].wait(10)

    threads = [threading.Thread(target=stay, args=(number, number == 2), daemon=True) for number in range(4)]
    for first in (0, 1):
        threads[first].start()
        assert there[first].wait(10), "two are there at once"
    for later in (2, 3):
        threads[later].start()
        assert not there[later].wait(SOON), "one wants to be alone, and one came behind it"
    left[0].set()
    assert not there[2].wait(SOON), "one of the two is still there"
    left[1].set()
    assert there[2].wait(10) and not there[3].wait(SOON)
    left[2].set()
    assert there[3].wait(10)
    left[3].set()
    for thread in threads:
        thread.join(10)


def test_as_many_with_large_models_as_there_are_places(tmp_path: Path) -> None:
    has_entered, may_leave = threading.Event(), threading.Event()

    def come() -> None:
        with large_place(tmp_path, 2):
            has_entered.set()
            assert may_leave.wait(10)

    thread = threading.Thread(target=come, daemon=True)
    with large_place(tmp_path, 2), large_place(tmp_path, 2):
        thread.start()
        assert not has_entered.wait(SOON), "both places are taken"
    assert has_entered.wait(10)
    with large_place(tmp_path, 2):
        may_leave.set()
    thread.join(10)
