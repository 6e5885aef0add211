"""What no schedule shows and the watched loads and stores, or a count, do: each rule kept, and broken in one way."""

from __future__ import annotations

import numpy as np
import pytest

from cheetah.emulator import SCHEDULERS, LaunchStats, Misuse, allocate
from tests.emulator.kernels import program

pytestmark = pytest.mark.compiler

# Warp 1's first lane brings four chunks into two stages; warp 0 adds them up, stores the sum of three to `stored` and
# lets the copying lane read it back: every rule is needed once, and rule `broken` is left out.
BODY = """
  uint64_t* full = (uint64_t*)shared_arena();
  uint64_t *empty = full + 2, *done = full + 4;
  uint32_t *stages = (uint32_t*)(shared_arena() + 128), *note = (uint32_t*)(shared_arena() + 64);
  const uint32_t lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < 2; stage++) { mbarrier_init(full + stage, 1); mbarrier_init(empty + stage, 1); }
    mbarrier_init(done, 1);
    mbarrier_fence_init();
  }
  block_barrier();
  if (threadIdx.x >= 32) {
    if (lane) return;
    for (uint32_t chunk = 0; chunk < 4; chunk++) {
      const uint32_t stage = chunk % 2;
      if (chunk == 3 && broken == 4) fence_proxy_async();
      if (chunk == 3) mbarrier_wait(done, 0);
      if (chunk == 3 && broken != 3 && broken != 4) fence_proxy_async();
      mbarrier_wait(empty + stage, chunk / 2 % 2 ^ 1);
      if (chunk && broken != 7) mbarrier_wait(full + (stage ^ 1), (chunk - 1) / 2 % 2);
      mbarrier_arrive_expect_tx(full + stage, 128);
      bulk_copy(stages + stage * 32, chunk < 3 ? source + chunk * 32 : stored, 128, full + stage);
    }
    return;
  }
  uint32_t sum = 0;
  for (uint32_t chunk = 0; chunk < 4; chunk++) {
    const uint32_t stage = chunk % 2;
    mbarrier_wait(full + stage, chunk / 2 % 2);
    const uint32_t word = stages[stage * 32 + lane];
    sum += word;
    if (broken != 1) wait_for_u32(word);
    warp_barrier();
    if (lane == 0) mbarrier_arrive(empty + stage);
    if (chunk == 2) {
      stored[broken == 6 ? lane + 1 : lane] = sum;
      if (broken != 2) fence_proxy_async();
      if (lane < 2) note[lane] = sum;
      shuffle_xor_u32(sum, 1);
      if (broken != 5) warp_barrier();
      if (lane == 0) mbarrier_arrive(done);
    }
  }
  stored[lane] = sum;
"""
SIGNATURE = "const uint32_t* source, uint32_t* stored, uint32_t broken"
STORED = (
    r"bulk_copy at kernel.cu:\d+: reads bytes of buffer stored \(from \d+ on\) that block 0, thread \d+ stored in .*"
)

RULES = {
    "a stage is given back once its loads have read": (
        1,
        r"bulk_copy at kernel.cu:\d+: overwrites bytes of shared memory \(from \d+ on\) which thread \d+ has loaded",
    ),
    "the writer fences": (2, f"{STORED}; that thread has made no fence_proxy_async since"),
    "the copying lane fences": (3, f"{STORED}; the thread that issues this copy has made no fence_proxy_async since"),
    "the copying lane fences after it has waited": (4, f"{STORED}; the thread that issues this copy has made no"),
    "a lane meets the others before it speaks for them": (
        5,
        r"mbarrier_arrive at kernel.cu:\d+: thread 1 of this warp has stored to shared memory \(byte 68\) before the",
    ),
    "a store goes to memory that there is": (
        6,
        "a store to bytes 128 to 132 of buffer stored, which has 128|to 0x[0-9a-f]+, which is no memory of this launch",
    ),
    "so many chunks are under way": (
        7,
        "1 chunks of this block are under way, and 1 is what its plan allows: wait for the chunk 1 places earlier",
    ),
}


def run(scheduler: str, seed: int, broken: int = 0) -> tuple[LaunchStats, np.ndarray]:
    source, stored = allocate((3, 32), np.uint32), allocate(32, np.uint32)
    source[:] = np.arange(96).reshape(3, 32)
    kernel = program(BODY, SIGNATURE, watched=True)
    stats = kernel.launch(1, 64, 512, [source, stored, broken], scheduler=scheduler, seed=seed, chunk_limit=1)
    return stats, stored


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.slow
def test_nothing_is_found_where_the_rules_are_kept(scheduler: str) -> None:
    for seed in range(5):
        stats, stored = run(scheduler, seed)
        np.testing.assert_array_equal(stored, 2 * np.arange(96).reshape(3, 32).sum(axis=0))
        assert (stats.copies, stats.most_chunks) == (4, 1)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_a_misuse(rule: str) -> None:
    broken, words = RULES[rule]
    with pytest.raises(Misuse, match=words):
        for seed in range(20):
            run("random", seed, broken)


@pytest.mark.slow
def test_the_chunks_under_way_are_counted_also_where_they_have_no_bound() -> None:
    arguments = [allocate((3, 32), np.uint32, fill=0), allocate(32, np.uint32), 7]
    assert program(BODY, SIGNATURE, watched=True).launch(1, 64, 512, arguments).most_chunks == 2


LEADER = """
  if (threadIdx.x == 0) wait_flagged4(words, 1);
  warp_barrier();
  const uint4 read = wait_flagged4(words + threadIdx.x * 4, 1);
  sums[threadIdx.x] = read.x + read.y + read.z + read.w;
"""


def lead(body: str, scheduler: str) -> None:
    words = allocate(128, np.uint64)
    words[:] = 1 << 32
    program(body, "const uint64_t* words, uint32_t* sums").launch(
        1, 32, 0, [words, allocate(32, np.uint32)], scheduler=scheduler
    )


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_lanes_that_do_not_meet_the_one_that_waits_for_them_are_told(scheduler: str) -> None:
    lead(LEADER, scheduler)
    with pytest.raises(Misuse, match="lane 0 of this warp alone has waited for words before, as if for all"):
        lead(LEADER.replace("warp_barrier();", ""), scheduler)


def test_a_word_that_the_host_left_empty_is_read_by_nobody() -> None:
    table, signature = np.array([3, 1, -1, -1], np.int32), "const int32_t* table, uint32_t* words, uint32_t place"
    kernel = program("words[0] = load_constant_u32(table + place);", signature)
    kernel.launch(1, 1, 0, [table, allocate(1, np.uint32), 1], poisoned={"table": -1})
    with pytest.raises(Misuse, match="load_constant_u32 at kernel.cu:5: byte 8 of buffer table holds nothing"):
        kernel.launch(1, 1, 0, [table, allocate(1, np.uint32), 2], poisoned={"table": -1})
    with pytest.raises(Misuse, match="load_constant_u32 at kernel.cu:5: 0x[0-9a-f]+ lies in no buffer"):
        kernel.launch(1, 1, 0, [table, allocate(1, np.uint32), 4])


TAGGED = """
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < 4; i++) publish_tagged(words + i, i, 32, published);
    wait_tagged4(words, 32, wanted);
  }
"""


@pytest.mark.parametrize(("published", "is_taken"), [(7, True), (4, False), (10, False)])
def test_a_word_of_another_epoch_is_not_taken_for_one_whose_tag_is_the_same(published: int, is_taken: bool) -> None:
    kernel = program(TAGGED, "uint32_t* words, uint32_t published, uint32_t wanted", watched=True)
    arguments = [allocate(4, np.uint32, 0), published, 7]
    if is_taken:
        kernel.launch(1, 32, 64, arguments)
        return
    with pytest.raises(Misuse, match=f"takes a word of epoch {published} for one of epoch 7: the tag of both is the"):
        kernel.launch(1, 32, 64, arguments)
