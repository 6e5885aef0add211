"""What goes wrong in a launch is told: who, where in the text, in which state; and the process lives on."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cheetah.emulator import Deadlock, Misuse, Program, SwitchLimit, TimeLimit, allocate, compile_program
from cheetah.errors import CheetahError
from tests.emulator.kernels import OPENING, program
from tests.tiers import tiered

pytestmark = pytest.mark.compiler

# Each case is one misuse, on a line of its own; the others never run.
MISUSES = """
  uint64_t* barrier = (uint64_t*)shared_arena();
  const uint32_t thread = threadIdx.x, lane = thread % 32;
  if (thread == 0 && which % 24 < 20) { mbarrier_init(barrier, 1); mbarrier_init(barrier + 2, 64); }
  block_barrier();
  switch (which) {
    case 1: if (thread == 5) mbarrier_arrive(barrier + 1); break;
    case 2: if (thread == 5) { mbarrier_arrive_expect_tx(barrier, 16); mbarrier_arrive(barrier); } break;
    case 3: named_barrier(1, thread < 32 ? 64 : 32); break;
    case 4: named_barrier(1, 40); break;
    case 5: named_barrier(16, 64); break;
    case 6: if (lane < 16) warp_sum_f32(1.0f); else
      shuffle_xor_f32(1.0f, 1); break;
    case 7: if (thread == 0) bulk_copy(shared_arena() + 64, bytes, 24, barrier); break;
    case 8: if (thread == 0) bulk_copy(shared_arena() + 1016, bytes, 16, barrier); break;
    case 9: if (thread == 0) bulk_copy(shared_arena() + 72, bytes, 16, barrier); break;
    case 10: if (thread == 0) bulk_copy(shared_arena() + 64, bytes + 248, 16, barrier); break;
    case 11: if (thread == 0) bulk_copy(shared_arena() + 64, bytes + 8, 16, barrier); break;
    case 12: if (thread == 0) bulk_copy(shared_arena() + 64, shared_arena(), 16, barrier); break;
    case 13: if (thread == 0) bulk_copy(shared_arena() + 64, bytes, 16, barrier); break;
    case 24: for (int i = 0; i < 2 && !thread; i++) bulk_copy(shared_arena() + 64 + 16 * i, bytes, 32, barrier); break;
    case 14: if (thread == 5) mbarrier_init(barrier, 1); break;
    case 15: if (thread == 5) { barrier[0] = 0; mbarrier_wait(barrier, 1); } break;
    case 16: if (thread == 5) wait_flagged4((const uint64_t*)bytes + 1, 3); break;
    case 17: if (thread == 5) publish_flagged((uint64_t*)bytes + 32, 1, 3); break;
    case 18: if (thread == 5) mbarrier_wait(barrier, 2); break;
    case 19: if (thread == 5) mbarrier_init((uint64_t*)(shared_arena() + 12), 1); break;
    case 20: if (thread == 5) mbarrier_init(barrier, 0); break;
    case 21: if (thread == 5) mbarrier_arrive((uint64_t*)bytes); break;
    case 22: if (thread == 5) *(volatile uint32_t*)(uintptr_t)(which - 22) = 1; break;
    case 23: if (thread == 5) bytes[0] = 10 / bytes[1]; break;
  }
"""

EXPECTED = {
    1: "thread 5: mbarrier_arrive at kernel.cu:{}: used before init: no mbarrier_init has reached byte 8 of shared",
    2: "thread 5: mbarrier_arrive at kernel.cu:{}: too many arrivals: phase 0 of the mbarrier of kernel.cu:7 has had",
    3: "named_barrier at kernel.cu:{}: barrier 1 for 64 threads, but named_barrier at kernel.cu:{} said 32",
    4: "named_barrier at kernel.cu:{}: barrier 1 for 40 threads; need a multiple of 32 up to the block's 64",
    5: "named_barrier at kernel.cu:{}: barrier id 16; named barriers are 1 to 15",
    6: "diverged: 16 other lanes of this warp are in warp_sum_f32 at kernel.cu:{}; all lanes must meet",
    7: "thread 0: bulk_copy at kernel.cu:{}: 24 bytes; a bulk copy moves a positive multiple of 16",
    8: "bulk_copy at kernel.cu:{}: destination bytes 1016 to 1032 leave the block's 1024 bytes of shared memory",
    9: "bulk_copy at kernel.cu:{}: destination at byte 72 of shared memory is not 16-byte aligned",
    10: "bulk_copy at kernel.cu:{}: bytes 248 to 264 of buffer bytes, which has 256",
    11: "bulk_copy at kernel.cu:{}: byte 8 of buffer bytes (at 0x",
    12: "lies in no buffer of this launch",
    13: "bulk_copy at kernel.cu:{}: still in flight when the block ended (1 in all); wait on its mbarrier",
    14: "mbarrier_init at kernel.cu:{}: already initialised at kernel.cu:7",
    15: "the mbarrier at byte 0 of shared memory, initialised at kernel.cu:7, has been overwritten",
    16: "wait_flagged4 at kernel.cu:{}: byte 8 of buffer bytes (at 0x",
    17: "publish_flagged at kernel.cu:{}: 0x",
    18: "mbarrier_wait at kernel.cu:{}: parity 2; a phase has parity 0 or 1",
    19: "mbarrier_init at kernel.cu:{}: mbarrier at byte 12 of shared memory; mbarriers are 8-byte aligned",
    20: "mbarrier_init at kernel.cu:{}: 0 arrivals; an mbarrier counts 1 to 1048575",
    21: "lies outside this block's shared memory",
    22: "block 0, thread 5: segmentation fault (bad or misaligned address), address (nil), after block_barrier at",
    24: "destination bytes 80 to 112 overlap those of the copy issued at kernel.cu:{}, still in flight",
    23: "block 0, thread 5: division by zero, address 0x",
}


def misuse_program() -> Program:
    return program(MISUSES, "uint8_t* bytes, int32_t which")


@pytest.mark.parametrize("which", EXPECTED)
def test_misuse_is_reported_by_place(which: int) -> None:
    lines = MISUSES.strip().splitlines()
    line = 5 + next(i for i, text in enumerate(lines) if f"case {which}:" in text)
    with pytest.raises(Misuse) as caught:
        misuse_program().launch(1, 64, 1024, [allocate(256, np.uint8, fill=0), which])
    assert EXPECTED[which].format(line, line) in str(caught.value)


def test_the_same_program_runs_on_after_a_misuse() -> None:
    misuse_program().launch(1, 64, 1024, [allocate(256, np.uint8, fill=0), 0])


def report_of(body: str, signature: str, arguments: list, blocks: int = 1, threads: int = 160) -> list[str]:
    with pytest.raises(Deadlock) as caught:
        program(body, signature).launch(blocks, threads, 1024, arguments)
    opening, *lines = str(caught.value).splitlines()
    assert opening == "deadlock: no thread can go on"
    return lines


def test_deadlock_names_each_place_and_state() -> None:
    body = """
      uint64_t* barrier = (uint64_t*)(shared_arena() + 8);
      if (threadIdx.x == 0) mbarrier_init(barrier, 160);
      block_barrier();
      if (threadIdx.x < 128) mbarrier_arrive(barrier);
      if (threadIdx.x >= 32 && threadIdx.x != 100) return;
      mbarrier_wait(barrier, 0);
    """
    state = "parity 0; phase 0 pending 32/160 tx 0; mbarrier at shared+8"
    assert report_of(body, "", [], blocks=2) == [
        f"block {block}: {line}"
        for block in range(2)
        for line in (f"mbarrier_wait at kernel.cu:10 [{state}]: threads 0-31, 100", "exited: threads 32-99, 101-159")
    ]


def test_deadlock_at_barriers_that_others_left() -> None:
    body = """
      if (threadIdx.x >= 128) return;
      if (threadIdx.x < 64) block_barrier();
      else if (threadIdx.x < 80) named_barrier(3, 64);
      else warp_barrier();
    """
    assert report_of(body, "", []) == [
        "block 0: block_barrier at kernel.cu:6 [arrived 64/160; 64 threads have exited]: threads 0-63",
        "block 0: named_barrier at kernel.cu:7 [barrier 3; arrived 16/64; 64 threads have exited]: threads 64-79",
        "block 0: warp_barrier at kernel.cu:8 [lanes 16/32]: threads 80-95",
        "block 0: exited: threads 96-159",
    ]


def test_deadlock_on_words_shows_what_they_hold() -> None:
    body = """
      if (threadIdx.x == 0) publish_flagged(&words[5], 7, 2);
      if (threadIdx.x == 0) wait_flagged4(&words[4], 2);
      if (threadIdx.x == 1) wait_at_least_u64(&words[0], 9);
    """
    assert report_of(body, "uint64_t* words", [allocate(8, np.uint64, fill=0)], threads=2) == [
        "block 0: wait_flagged4 at kernel.cu:6 [epoch 2; words carry 0 2 0 0; words+32]: threads 0",
        "block 0: wait_at_least_u64 at kernel.cu:7 [wants 9; is 0; words+0]: threads 1",
    ]


def test_threads_that_want_different_words_share_a_line() -> None:
    body = "if (threadIdx.x != 4) wait_flagged4(&words[threadIdx.x * 4], 2);"
    assert report_of(body, "uint64_t* words", [allocate(32, np.uint64, fill=0)], threads=8) == [
        "block 0: wait_flagged4 at kernel.cu:5 [epoch 2; words carry 0 0 0 0; words+0; 6 threads want other words]: "
        "threads 0-3, 5-7",
        "block 0: exited: threads 4",
    ]


def test_deadlock_tells_of_a_plain_store_that_should_be_a_publish() -> None:
    body = """
      if (threadIdx.x == 0) wait_at_least_u64(&words[0], 9);
      else words[0] = 9;
    """
    (line, _) = report_of(body, "uint64_t* words", [np.zeros(8, np.uint64)], threads=2)
    assert "there now, but written by a plain store: publish it with a primitive" in line


FOREVER = "for (;;) named_barrier(1, 64);"


def test_switch_limit_ends_a_livelock_with_a_report() -> None:
    with pytest.raises(SwitchLimit) as caught:
        program(FOREVER, "").launch(2, 64, 0, [], switch_limit=10_000)
    assert "block 1: named_barrier at kernel.cu:5 [" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("body", tiered([FOREVER, "for (;;) store_relaxed_u32(words, 1);"], [FOREVER]))
def test_time_limit_ends_a_livelock(body: str) -> None:
    signature = "uint32_t* words" if "words" in body else ""
    arguments = [np.zeros(1, np.uint32)] if signature else []
    with pytest.raises(TimeLimit, match="at kernel.cu:5"):
        program(body, signature).launch(1, 64, 0, arguments, timeout_s=0.2)


def test_interrupting_a_launch_reaches_python(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([0.0, 0.0, KeyboardInterrupt(), *[0.0] * 100])

    def clock() -> float:
        value = next(calls)
        if isinstance(value, BaseException):
            raise value
        return value

    kernel = program(FOREVER, "")
    monkeypatch.setattr("cheetah.emulator.program.time.perf_counter", clock)
    with pytest.raises(KeyboardInterrupt):
        kernel.launch(1, 64, 0, [], timeout_s=100)


SOME_TIME = "for (uint32_t i = 0; i < rounds; i++) named_barrier(1, 64); x[threadIdx.x] = rounds;"
ROUNDS = 20_000  # long enough to be watched, two switches a warp and round


def test_what_a_watch_raises_ends_the_launch_and_the_next_one_starts_afresh() -> None:
    kernel, x = program(SOME_TIME, "uint32_t* x, uint32_t rounds"), np.zeros(64, np.uint32)

    def enough() -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        kernel.launch(1, 64, 0, [x, 2**32 - 1], watch=enough)
    assert not x.any()
    kernel.launch(1, 64, 0, [x, 3])
    assert (x == 3).all()


def test_a_program_that_is_collected_in_the_middle_of_a_launch_leaves_it_alone() -> None:
    """By the thread that launched, with the library in use: it must neither wait for the launch nor free its stacks."""
    text = f'{OPENING}extern "C" __global__ void kernel(uint32_t* x, uint32_t rounds) {{ {SOME_TIME} }}'
    parameters = [("x", "uint32_t*"), ("rounds", "uint32_t")]
    programs = [compile_program(text, "kernel", parameters) for _ in range(2)]
    kernel, x, watched = programs.pop(), np.zeros(64, np.uint32), list[int]()

    def collect() -> None:
        programs.clear()
        watched.append(gc.collect())

    kernel.launch(1, 64, 0, [x, ROUNDS], watch=collect)
    assert watched and (x == ROUNDS).all()


def test_launches_of_several_threads_take_turns() -> None:
    signature = "uint32_t* x, uint32_t rounds"
    kernels = [program(SOME_TIME, signature), program(SOME_TIME.replace("= rounds", "= 2 * rounds"), signature)]

    def work(thread: int) -> bool:
        x = np.zeros(64, np.uint32)
        for rounds in range(1, 30):
            kernels[thread % 2].launch(1, 64, 0, [x, rounds], timeout_s=60)
            assert (x == rounds * (1 + thread % 2)).all()
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_wrong_arguments_are_refused_with_their_name() -> None:
    kernel = program("x[0] = n;", "uint32_t* x, uint32_t n")
    x = np.zeros(4, np.uint32)
    frozen = x.copy()
    frozen.flags.writeable = False
    for arguments, message in (
        ([x], r"kernel kernel takes 2 arguments \(x, n\), got 1"),
        ([x[::2], 1], r"parameter x \(uint32_t\*\): the array is not C-contiguous"),
        ([frozen, 1], r"parameter x \(uint32_t\*\): the array is read-only"),
        ([3, 1], r"parameter x \(uint32_t\*\): wants an array or None, got int"),
        ([x, None], r"parameter n \(uint32_t\): wants a number, got NoneType"),
    ):
        with pytest.raises(CheetahError, match=message):
            kernel.launch(1, 1, 0, arguments)
    with pytest.raises(CheetahError, match="no scheduler 'fair'; there are round_robin, random, priority"):
        kernel.launch(1, 1, 0, [x, 1], scheduler="fair")
    with pytest.raises(CheetahError, match="1025 threads in a block; a block has at most 1024"):
        kernel.launch(1, 1025, 0, [x, 1])
