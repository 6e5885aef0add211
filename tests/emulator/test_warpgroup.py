"""wgmma: what it computes, what it refuses, and that each mistake with something asynchronous is found."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cheetah.emulator import SCHEDULERS, Misuse, Program, Race, allocate, compile_program
from tests.emulator.kernels import OPENING, program, split_parameter
from tests.lang.compilers import compile_cuda

pytestmark = pytest.mark.compiler

COLUMNS, STEPS, STAGES, STAGE_BYTES = 16, 5, 2, 512
SIGNATURE = "const uint32_t* a, const uint8_t* b, float* d, uint32_t steps"

# a [steps][4 warps][32 lanes][4 words], fragments; b [steps][core matrix of k][of columns][8 columns][8 of k] bf16;
# d [64][16]. Warp 4 brings a step's B into one of two stages, the warpgroup multiplies one step while the one before
# may still be under way.
TEXT = """
  uint64_t* full = (uint64_t*)shared_arena();
  uint64_t* empty = full + 2;
  uint8_t* stages = shared_arena() + 128;
  const uint32_t thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  if (thread == 0) {
    for (uint32_t stage = 0; stage < 2; stage++) { mbarrier_init(full + stage, 1); mbarrier_init(empty + stage, 4); }
    mbarrier_fence_init();
  }
  block_barrier();
  if (warp == 4) {
    if (lane) return;
    for (uint32_t step = 0; step < steps; step++) {
      mbarrier_wait(empty + step % 2, step / 2 % 2 ^ 1);
      mbarrier_arrive_expect_tx(full + step % 2, 512);
      bulk_copy(stages + step % 2 * 512, b + step * 512, 512, full + step % 2);
    }
    return;
  }
  float sums[8];
  uint4 fragments[2];
  for (uint32_t step = 0; step < steps; step++) {
    fragments[step % 2] = *(const uint4*)(a + (step * 128 + thread) * 4);
    mbarrier_wait(full + step % 2, step / 2 % 2);
    wgmma_fence();
    wgmma_bf16_n16(sums, fragments[step % 2], matrix_descriptor(stages + step % 2 * 512, 128, 256), step > 0);
    wgmma_commit();
    wgmma_wait_but_one();
    if (step && lane == 0) mbarrier_arrive(empty + (step - 1) % 2);
  }
  wgmma_wait_all();
  for (uint32_t i = 0; i < 8; i++)
    d[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i];
"""


def operands(steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(a, b) as the kernel takes them, and the product in float64."""
    draw = np.random.default_rng(steps)
    rows = draw.standard_normal((64, steps * 16)).astype(ml_dtypes.bfloat16)
    columns = draw.standard_normal((steps * 16, COLUMNS)).astype(ml_dtypes.bfloat16)
    # Rows g and g + 8 of a warp; words at k = 2t of both, then at k = 2t + 8.
    axes = rows.reshape(4, 2, 8, steps, 2, 4, 2).transpose(3, 0, 2, 5, 4, 1, 6)
    a, b = allocate(steps * 512, np.uint32), allocate(steps * STAGE_BYTES, np.uint8)
    a[:] = np.ascontiguousarray(axes).view(np.uint32).ravel()
    # Core matrices of one half of k lie 128 bytes apart from those of the other, groups of columns 256.
    cores = columns.reshape(steps, 2, 8, COLUMNS // 8, 8).transpose(0, 3, 1, 4, 2)
    b[:] = np.ascontiguousarray(cores).view(np.uint8).ravel()
    return a, b, rows.astype(np.float64) @ columns.astype(np.float64)


def run(kernel: Program, scheduler: str = "round_robin", seed: int = 0, steps: int = STEPS) -> np.ndarray:
    """The product, less what it should be."""
    a, b, expected = operands(steps)
    d = allocate((64, COLUMNS), np.float32)
    kernel.launch(1, 160, 128 + STAGES * STAGE_BYTES, [a, b, d, steps], scheduler=scheduler, seed=seed)
    return d - expected


def mutated(old: str, new: str, *, sanitize: bool = False) -> Program:
    assert TEXT.count(old) == 1, old
    return program(TEXT.replace(old, new), SIGNATURE, sanitize=sanitize)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_chain_of_products(scheduler: str) -> None:
    for seed in range(5):
        assert np.abs(run(program(TEXT, SIGNATURE), scheduler, seed)).max() < 1e-4


@pytest.mark.slow
def test_one_step_and_no_race() -> None:
    assert np.abs(run(program(TEXT, SIGNATURE), steps=1)).max() < 1e-4
    assert np.abs(run(program(TEXT, SIGNATURE, sanitize=True), "random", 3)).max() < 1e-4


def test_the_same_text_is_cuda() -> None:
    """As text for the GPU: the primitives' bodies in front of it."""
    from cheetah import lang as ch
    from cheetah.lang import ty

    parameters = dict(split_parameter(part) for part in SIGNATURE.split(","))
    types = {"uint32_t": ty.u32, "const uint32_t*": ty.ptr(ty.u32), "const uint8_t*": ty.ptr(ty.u8)}
    types["float*"] = ty.ptr_mut(ty.f32)

    @ch.kernel(ch.Params(**{name: types[kind] for name, kind in parameters.items()}), max_threads=160)
    def product(a, b, d, steps):
        ch.raw_stmt(TEXT.strip())

    compile_cuda(ch.render_file(product))


BUGS = {
    "no fence": (
        "wgmma_fence();",
        "",
        "registers of A of thread \\d+ were stored to after the warp's last wgmma_fence",
    ),
    "a store behind the fence": (
        "wgmma_fence();",
        "wgmma_fence(); fragments[step % 2].y ^= 0x10001u;",
        r"registers of A of thread \d+ were stored to after the warp's last wgmma_fence",
    ),
    "a stage given back a step early": (
        "if (step && lane == 0) mbarrier_arrive(empty + (step - 1) % 2);",
        "if (lane == 0) mbarrier_arrive(empty + step % 2);",
        r"bulk_copy at .*: overwrites operand B \(from byte \d+ of shared memory on\) of the wgmma_bf16_n16 of line",
    ),
    "no wait in the loop": (
        "wgmma_wait_but_one();",
        "",
        "has stored to the registers of A of the wgmma_bf16_n16 of line .* while it was in flight|overwrites operand B",
    ),
    "one register for two steps": (
        "uint4 fragments[2];",
        "uint4 one[1]; struct { uint4* all; uint4& operator[](uint32_t) { return *all; } } fragments = {one};",
        r"thread \d+ has stored to the registers of A of the wgmma_bf16_n16 of line .* while it was in flight",
    ),
    "sums stored to before the last wait": (
        "wgmma_wait_all();",
        "sums[3] = 1.0f; wgmma_wait_all();",
        r"thread \d+ has stored to accumulator 3 of the wgmma_bf16_n16 of line .* while it was in flight",
    ),
    "nobody waits at the end": ("wgmma_wait_all();", "", "still in flight when the block ended; wait for it"),
    "one warp multiplies otherwise": (
        "step > 0);",
        "step > 0 && !(warp == 2 && step == 1));",
        "warp 2 has issued or waited for other products than the first of its warpgroup",
    ),
    "core matrices that overlap": (
        "128, 256)",
        "256, 256)",
        "256 bytes apart along k and 256 along the columns overlap",
    ),
    "core matrices too near": (
        "128, 256)",
        "64, 256)",
        "core matrices 64 bytes apart along k and 256 along the columns",
    ),
    "a descriptor that is not aligned": ("128, 256)", "128, 248)", "128 and 248 bytes apart: all are multiples of 16"),
    "B beyond the end": ("128, 256)", "128, 1024)", "operand B ends at byte \\d+ of the block's 1152 bytes"),
    "registers in shared memory": (
        "wgmma_bf16_n16(sums, fragments[step % 2]",
        "wgmma_bf16_n16(sums, *(const uint4*)stages",
        r"operands of thread \d+ lie in memory: both must be variables",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_each_mistake_is_told(bug: str) -> None:
    old, new, words = BUGS[bug]
    kernel = mutated(old, new)
    with pytest.raises(Misuse, match=words):
        for seed in range(20):
            run(kernel, "random", seed)


def test_sums_in_flight_are_not_numbers() -> None:
    kernel = mutated("wgmma_wait_all();", "const float early = sums[5]; wgmma_wait_all(); sums[5] = early;")
    assert np.isnan(run(kernel)).sum() == 128


def test_the_order_of_core_matrices_matters() -> None:
    """k and columns taken for one another: within bounds, and wrong numbers."""
    assert np.abs(run(mutated("128, 256)", "256, 128)"))).max() > 0.1


@pytest.mark.slow
def test_a_race_is_a_race_also_where_no_schedule_shows_it() -> None:
    old, new, _ = BUGS["a stage given back a step early"]
    with pytest.raises((Race, Misuse)):
        run(mutated(old, new, sanitize=True))


def test_three_warps_are_no_warpgroup() -> None:
    with pytest.raises(Misuse, match="warp 0 has no warpgroup: it needs 4 warps"):
        a, b, _ = operands(1)
        small = TEXT.replace("warp == 4", "warp == 2")
        text = f'{OPENING}extern "C" __global__ void kernel({SIGNATURE}) {{\n{small}\n}}\n'
        kernel = compile_program(text, "kernel", [split_parameter(part) for part in SIGNATURE.split(",")])
        kernel.launch(1, 96, 1152, [a, b, allocate((64, 16), np.float32), 1])


def test_a_stage_is_waited_for() -> None:
    """Without the wait for `full` B is poison when the product is issued, or changes before it is waited for."""
    kernel = mutated("mbarrier_wait(full + step % 2, step / 2 % 2);", "")
    with pytest.raises(Misuse, match="operand B of the wgmma_bf16_n16 of line .* has changed between its issue and"):
        for seed in range(20):
            run(kernel, "random", seed)
