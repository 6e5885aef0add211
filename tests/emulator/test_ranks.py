"""Several GPUs in one machine: what one stores to another lands late, and nothing else may pass between them."""

from __future__ import annotations

import numpy as np
import pytest

from cheetah.emulator import SCHEDULERS, Deadlock, Misuse, Program, allocate
from cheetah.emulator.program import LaunchStats
from cheetah.errors import CheetahError
from tests.emulator.kernels import program

pytestmark = pytest.mark.compiler

SIGNATURE = (
    "uint64_t* exchange, uint64_t* peer_1_exchange, uint32_t* words, uint32_t* peer_1_words, uint32_t* all, "
    "uint32_t rank, uint32_t which"
)
# Each case is one thing that ranks do, on a line of its own.
BODY = """
  const uint32_t thread = threadIdx.x;
  uint64_t* barrier = (uint64_t*)shared_arena();
  if (which == 7 && thread == 0) mbarrier_init(barrier, 1);
  block_barrier();
  if (which == 0) {
    publish_flagged_sys(exchange + rank * 32 + thread, thread + 100 * rank, 1);
    publish_flagged_sys(peer_1_exchange + rank * 32 + thread, thread + 100 * rank, 1);
    if (thread < 16) all[(rank * 16 + thread) * 4] = wait_flagged4_sys(exchange + thread * 4, 1).x;
  }
  if (thread) return;
  switch (which) {
    case 1: if (rank) publish_flagged(peer_1_exchange, 1, 1); break;
    case 2: if (rank) publish_flagged_sys(peer_1_exchange, 1, 1); else wait_flagged4(exchange, 1); break;
    case 3: if (rank) wait_flagged4_sys(peer_1_exchange, 1); break;
    case 4: if (rank) store_relaxed_u32_sys(peer_1_words, 1); break;
    case 5: if (rank) load_relaxed_u32_sys(peer_1_words); break;
    case 6: if (rank) load_constant_u32(peer_1_words); break;
    case 7: if (rank) bulk_copy(shared_arena() + 64, peer_1_words, 16, barrier); break;
    case 8: if (rank == 0) wait_flagged4_sys(exchange, 1); break;
    case 9: if (rank) publish_flagged_sys(peer_1_exchange + 64, 1, 1); break;
    case 10:  // no order across words: the second may land before the first
      if (rank) for (uint32_t i = 0; i < 8; ++i) publish_flagged_sys(peer_1_exchange + i, i, 1);
      break;
    case 11:  // but a release lands behind what was stored before it
      if (rank) for (uint32_t i = 0; i < 4; ++i) publish_flagged_sys(peer_1_exchange + i, i, 1);
      if (rank) for (uint32_t i = 4; i < 8; ++i) publish_flagged_release_sys(peer_1_exchange + i, i, 1);
      break;
    case 12:  // and a word's own stores in their order
      if (rank) { for (uint32_t i = 1; i < 6; ++i) publish_tagged_sys(peer_1_words, 0, 32, i); }
      break;
    case 13:  // a counter is added to behind what was stored before it
      if (rank) for (uint32_t i = 0; i < 8; ++i) store_to_peer_u32(peer_1_words + i, i + 1);
      if (rank) add_release_u64_sys(peer_1_exchange, 1);
      break;
    case 14:  // as long as it is the stores' own block that adds
      if (rank) for (uint32_t i = 0; i < 8; ++i) store_to_peer_u32(peer_1_words + i, i + 1);
      break;
    case 15: if (rank) add_release_u64(peer_1_exchange, 1); break;
    case 16: if (rank) add_release_u64_sys(peer_1_exchange, 1); else wait_at_least_u64(exchange, 1); break;
    case 17: if (rank) store_to_peer_u32(words, 1); break;
  }
  if (which == 13 || which == 14) {
    if (rank) return;
    if (which == 13) wait_at_least_u64_sys(exchange, 1);
    all[0] = 1;
    for (uint32_t i = 0; i < 8; ++i) all[0] &= words[i] == i + 1;
  }
  if (which == 10 || which == 11) {
    if (rank) return;
    wait_flagged4_sys(exchange + 4, 1);
    all[0] = 1;
    for (uint32_t i = 0; i < 4; ++i) all[0] &= uint32_t(exchange[i] >> 32);
  }
"""
MISUSES = {
    1: "publish_flagged at kernel.cu:{}: buffer exchange is rank 0's: what is there is published to it",
    2: "buffer exchange is stored by another rank, and its own waits for it in the scope of one GPU",
    3: "rank 1, block 0, thread 0: wait_flagged4 at kernel.cu:{}: buffer exchange is rank 0's",
    4: "store_relaxed_u32 at kernel.cu:{}: buffer words is rank 0's",
    5: "load_relaxed_u32 at kernel.cu:{}: buffer words is rank 0's",
    6: "load_constant_u32 at kernel.cu:{}: buffer words is rank 0's",
    7: "bulk_copy at kernel.cu:{}: buffer words is rank 0's",
    9: "lies in no buffer of this launch",
    15: "add_release_u64 at kernel.cu:{}: buffer exchange is rank 0's",
    16: "buffer exchange is stored by another rank, and its own waits for it in the scope of one GPU",
    17: "is no other rank's memory",
}


@pytest.fixture(scope="module")
def ranks() -> Program:
    return program(BODY, SIGNATURE)


Memory = list[np.ndarray]


def launched(ranks: Program, which: int, scheduler: str = "round_robin", seed: int = 0) -> tuple[Memory, LaunchStats]:
    """The exchanges of both ranks, and what all have."""
    exchanges, words = ([allocate(64, kind, 0) for _ in range(2)] for kind in (np.uint64, np.uint32))
    everybodys = allocate(128, np.uint32, 0)
    arguments = [
        [exchanges[rank], exchanges[1 - rank], words[rank], words[1 - rank], everybodys, rank, which]
        for rank in range(2)
    ]
    stats = ranks.launch_together(1, 32, 1024, arguments, scheduler=scheduler, seed=seed, switch_limit=1_000_000)
    return [*exchanges, *words, everybodys], stats


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_ranks_publish_reaches_all(ranks: Program, scheduler: str) -> None:
    for seed in range(3):
        (first, second, *_, everybodys), _ = launched(ranks, 0, scheduler, seed)
        wanted = np.concatenate([np.arange(32), np.arange(32) + 100]).astype(np.uint64) | np.uint64(1 << 32)
        assert np.array_equal(first, wanted) and np.array_equal(second, wanted)
        assert np.array_equal(everybodys.reshape(2, 16, 4)[:, :, 0], np.tile((wanted & 0xFFFF)[::4], (2, 1)))


@pytest.mark.parametrize("which", MISUSES)
def test_what_ranks_may_not_do_is_told_with_its_place(ranks: Program, which: int) -> None:
    line = next(n for n, text in enumerate(BODY.strip().split("\n"), 5) if f"case {which}:" in text)
    schedules = [(scheduler, seed) for scheduler in SCHEDULERS for seed in range(4)]
    found = []
    for scheduler, seed in schedules:
        try:
            launched(ranks, which, scheduler, seed)
        except Misuse as misuse:
            found.append(str(misuse))
    assert len(found) == len(schedules), "it was not told in each schedule"
    assert all(MISUSES[which].format(line) in one and f"kernel.cu:{line}" in one for one in found), found[0]


def test_a_word_that_no_rank_stores_is_waited_for_in_vain(ranks: Program) -> None:
    with pytest.raises(Deadlock, match=r"rank 0, block 0: wait_flagged4 .*\n(.*\n)*rank 1, block 0: exited"):
        launched(ranks, 8)


def test_stores_to_a_peer_land_in_any_order_but_behind_a_release_in_order(ranks: Program) -> None:
    seeds = [(scheduler, seed) for scheduler in ("random", "priority") for seed in range(12)]
    unordered = {int(launched(ranks, 10, *seed)[0][-1][0]) for seed in seeds}
    assert unordered == {0, 1}, "the first word landed first in all schedules, or in none"
    assert {int(launched(ranks, 11, *seed)[0][-1][0]) for seed in seeds} == {1}
    tags = {int(launched(ranks, 12, *seed)[0][2][0]) for seed in seeds}
    assert len(tags) == 1, "an older store of a word landed over a newer one"


def test_data_stored_to_a_peer_is_there_behind_its_counter(ranks: Program) -> None:
    seeds = [(scheduler, seed) for scheduler in ("random", "priority") for seed in range(12)]
    assert {int(launched(ranks, 13, *seed)[0][-1][0]) for seed in seeds} == {1}
    assert 0 in {int(launched(ranks, 14, *seed)[0][-1][0]) for seed in seeds}, "it never landed late"
    memory, _ = launched(ranks, 14)
    assert memory[2][:8].tolist() == [*range(1, 9)], "it has not landed when the launch ends"


def test_equal_seeds_give_equal_launches(ranks: Program) -> None:
    assert launched(ranks, 0, "random", 5)[1].switches == launched(ranks, 0, "random", 5)[1].switches


def test_each_rank_is_given_all_arguments(ranks: Program) -> None:
    with pytest.raises(CheetahError, match="takes 7 arguments"):
        ranks.launch_together(1, 32, 0, [[], []])
