"""The ways in which an exchange by flagged words goes wrong, each shown by some schedule; and the right one by none."""

import numpy as np
import pytest

from cheetah.emulator import SCHEDULERS, Program, allocate, compile_program, explore
from tests.emulator.kernels import OPENING

pytestmark = pytest.mark.compiler

BLOCKS, THREADS, PHASES = 4, 64, 8

# Every block makes 64 words a phase and needs the 256 of all blocks. `words` has two buffers of [BLOCKS * 64].
TEXT = (
    OPENING
    + r"""
extern "C" __global__ void __launch_bounds__(64, 1)
exchange(uint64_t* words, uint32_t* sums, uint32_t phases, uint32_t epoch) {
  const uint32_t count = gridDim.x * 64, mine = blockIdx.x * 64 + threadIdx.x;
  uint32_t* shared = (uint32_t*)shared_arena();
  uint32_t value = mine;
  for (uint32_t phase = 0; phase < phases; phase++, epoch++) {
    uint64_t* buffer = words + (phase & 1) * count;
    publish_flagged(&buffer[mine], value, epoch);
    const uint4 got = wait_flagged4(&buffer[threadIdx.x * gridDim.x], epoch);
    shared[threadIdx.x] = got.x + 3 * got.y + 5 * got.z + 7 * got.w;
    block_barrier();
    value = shared[threadIdx.x] + shared[(threadIdx.x + 33) % 64];
    block_barrier();
  }
  sums[mine] = value;
}
"""
)

BUGS = {
    "buffer reused one phase early": ("words + (phase & 1) * count", "words", "Deadlock"),
    "epoch not advanced": ("phase++, epoch++", "phase++", "different output"),
    "missing wait": (
        "wait_flagged4(&buffer[threadIdx.x * gridDim.x], epoch)",
        "*(const uint4*)&buffer[threadIdx.x * gridDim.x]",
        "different output",
    ),
    "wrong epoch": ("threadIdx.x * gridDim.x], epoch)", "threadIdx.x * gridDim.x], epoch + 1)", "Deadlock"),
    "read before the block has written": ("+ 7 * got.w;\n    block_barrier();", "+ 7 * got.w;", "different output"),
    "written before the block has read": ("% 64];\n    block_barrier();", "% 64];", "different output"),
}


def exchange(text: str) -> Program:
    parameters = [("words", "uint64_t*"), ("sums", "uint32_t*"), ("phases", "uint32_t"), ("epoch", "uint32_t")]
    return compile_program(text, "exchange", parameters)


def run(program: Program, scheduler: str, seed: int) -> np.ndarray:
    words = allocate((2, BLOCKS * 64), np.uint64, fill=0)
    sums = allocate((BLOCKS, 64), np.uint32)
    program.launch(BLOCKS, THREADS, 256, [words, sums, PHASES, 1], scheduler=scheduler, seed=seed)
    return sums


def expected() -> np.ndarray:
    values = np.arange(BLOCKS * 64, dtype=np.uint32).reshape(BLOCKS, 64)
    for _ in range(PHASES):
        mixed = values.reshape(64, 4) @ np.array([1, 3, 5, 7], np.uint32)
        values = np.tile(mixed + np.roll(mixed, -33), (BLOCKS, 1))
    return values


def test_the_right_exchange_is_the_same_under_every_schedule() -> None:
    program = exchange(TEXT)
    report = explore(lambda scheduler, seed: run(program, scheduler, seed), range(50), expected=expected())
    assert report.ok, str(report)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_shown_by_some_schedule(name: str) -> None:
    old, new, kind = BUGS[name]
    assert TEXT.count(old) == 1
    program = exchange(TEXT.replace(old, new))
    report = explore(lambda scheduler, seed: run(program, scheduler, seed), range(20), expected=expected())
    assert any(report.failed[scheduler] for scheduler in SCHEDULERS[1:]), f"{name}: {report}"
    assert kind in {failure.kind for failure in report.failures}
