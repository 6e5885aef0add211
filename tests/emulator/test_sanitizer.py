"""The race detector orders by real synchronisation only, and names lines, threads and places."""

import numpy as np
import pytest

from cheetah.emulator import SCHEDULERS, Deadlock, Misuse, Race, allocate
from cheetah.errors import CheetahError
from tests.emulator.kernels import program

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

HAND_OVER = """
  uint32_t* data = (uint32_t*)shared_arena();
  if (threadIdx.x == 0) data[0] = 5;
  ORDER
  if (threadIdx.x == 1) x[0] = data[0];
"""


def hand_over(order: str) -> np.ndarray:
    x = np.zeros(1, np.uint32)
    program(HAND_OVER.replace("ORDER", order), "uint32_t* x", sanitize=True).launch(1, 64, 1024, [x])
    return x


@pytest.mark.parametrize(
    "order", ["warp_barrier();", "block_barrier();", "if (threadIdx.x < 32) named_barrier(1, 32);"]
)
def test_barriers_order_memory(order: str) -> None:
    assert hand_over(order)[0] == 5


@pytest.mark.parametrize("order", ["warp_sum_f32(1.0f);", "shuffle_u32(1, 0);", ""])
def test_shuffles_order_nothing(order: str) -> None:
    with pytest.raises(Race) as caught:
        hand_over(order)
    read, write = (
        "read of 4 bytes at kernel.cu:8 by block 0 thread 1",
        "write of 4 bytes at kernel.cu:6 by block 0 thread 0",
    )
    place = "on shared memory of block 0+0"
    assert str(caught.value) in (
        f"race: {read}, {place} with {write}, {place}",
        f"race: {write}, {place} with {read}, {place}",
    )


ACROSS_BLOCKS = """
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    x[0] = 7;
    PUBLISH
  }
  if (blockIdx.x == 1) {
    WAIT
    y[threadIdx.x] = x[0];
  }
"""
PUBLISH = "for (uint32_t i = 0; i < 4; i++) {}(words + i, 1, 1);"


def across_blocks(publish: str, wait: str) -> None:
    body = ACROSS_BLOCKS.replace("PUBLISH", publish).replace("WAIT", wait)
    x, y, words = allocate(1, np.uint32), allocate(32, np.uint32), allocate(8, np.uint64, fill=0)
    kernel = program(body, "uint32_t* x, uint32_t* y, uint64_t* words", sanitize=True)
    kernel.launch(2, 32, 0, [x, y, words], scheduler="random")
    np.testing.assert_array_equal(y, np.full(32, 7))


def test_release_and_acquire_order_memory_across_blocks() -> None:
    across_blocks("add_release_u64(words, 1);", "wait_at_least_u64(words, 1);")
    across_blocks(PUBLISH.replace("{}", "publish_flagged_release"), "wait_flagged4_acquire(words, 1);")


@pytest.mark.parametrize("publish, wait", [
    ("publish_flagged", "wait_flagged4_acquire"), ("publish_flagged_release", "wait_flagged4"),
])  # fmt: skip
def test_relaxed_words_order_nothing_but_themselves(publish: str, wait: str) -> None:
    with pytest.raises(Race, match=r"kernel\.cu:11 .* on x\+0"):
        across_blocks(PUBLISH.replace("{}", publish), f"{wait}(words, 1);")


def test_a_plain_read_of_a_published_word_is_a_race() -> None:
    with pytest.raises(Race, match=r"atomic write of 8 bytes at kernel\.cu:7 .* on words\+0"):
        across_blocks("publish_flagged(words, 1, 1);", "y[1] = words[0];")


COPY = """
  uint64_t* barrier = (uint64_t*)shared_arena();
  uint32_t* to = (uint32_t*)(shared_arena() + 64);
  if (threadIdx.x == 0) mbarrier_init(barrier, 1);
  if (threadIdx.x == 1) EARLY;
  block_barrier();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, 64);
    bulk_copy(to, x, 64, barrier);
  }
  if (threadIdx.x == 2) DURING;
  if (threadIdx.x < 16) mbarrier_wait(barrier, 0);
  if (threadIdx.x < 16) y[threadIdx.x] = to[threadIdx.x];
"""


def copy(early: str, during: str) -> None:
    kernel = program(COPY.replace("EARLY", early).replace("DURING", during), "uint32_t* x, uint32_t* y", sanitize=True)
    x, y = allocate(16, np.uint32), allocate(16, np.uint32)
    x[:] = np.arange(16)
    kernel.launch(1, 32, 128, [x, y])
    np.testing.assert_array_equal(y, x)


def test_a_copy_comes_after_its_issue_and_before_the_wait() -> None:
    copy("to[0] = x[1] = 1", "(void)0")


@pytest.mark.parametrize("during, place", [
    ("y[2] = to[3]", r"shared memory of block 0\+7[26]"),
    ("to[3] = 1", r"shared memory of block 0\+7[26]"),
    ("x[2] = 1", r"x\+8"),
])  # fmt: skip
def test_touching_what_a_copy_reads_or_writes_is_a_race(during: str, place: str) -> None:
    with pytest.raises(
        Race, match=rf"kernel\.cu:12 by copy of block 0 thread 0, on {place}|{place} with .*kernel\.cu:12 by"
    ):
        copy("(void)0", during)


def test_deadlock_and_misuse_are_reported_as_without_the_sanitizer() -> None:
    body = "if (threadIdx.x < which) block_barrier(); else if (which == 2) named_barrier(16, 32);"
    kernel = program(body, "uint32_t which", sanitize=True)
    with pytest.raises(
        Deadlock, match=r"block 1: block_barrier at kernel\.cu:5 \[arrived 1/32; 31 threads have exited\]"
    ):
        kernel.launch(2, 32, 0, [1])
    with pytest.raises(Misuse, match="barrier id 16"):
        kernel.launch(2, 32, 0, [2])


def test_arguments_of_every_kind_reach_the_sanitized_program() -> None:
    body = "if (threadIdx.x == 0) out[0] = a == -3 && b == (7ull << 40) && c == 0.1f && d == 0 && !e[1];"
    kernel = program(
        body, "int32_t* out, int32_t a, uint64_t b, float c, const uint8_t* d, const int64_t* e", sanitize=True
    )
    out, empty = np.zeros((1, 1), np.int32), np.zeros(2, np.int64)
    for scheduler in SCHEDULERS:
        out[0] = 0
        stats = kernel.launch(1, 32, 0, [out, -3, 7 << 40, 0.1, None, empty], scheduler=scheduler)
        assert out[0, 0] == 1
        assert stats.switches > 0


def test_more_threads_than_the_detector_has_room_for_are_refused() -> None:
    with pytest.raises(CheetahError, match="8192 threads; the race detector has room for 8000: use fewer blocks"):
        program("", "", sanitize=True).launch(8, 1024, 0, [])
