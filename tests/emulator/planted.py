"""A kernel with every kind of synchronisation that Cheetah's kernels use, and the bugs that can be planted in it.

Each block multiplies its weights, which a producer warp brings through a ring, by the totals that all blocks made in
the layer before. A bug is one replacement in the text, so that what is tested is what a reader would see."""

from dataclasses import dataclass

import numpy as np

from cheetah.emulator import Program, allocate, compile_program

BLOCKS, THREADS, LAYERS, CHUNKS = 3, 160, 6, 2
SHARED_BYTES = 1024 + 3 * 512

PARAMETERS = (
    ("weights", "const float*"),
    ("values", "float*"),
    ("counter", "uint64_t*"),
    ("totals", "float*"),
    ("kept", "float*"),
    ("layers", "uint32_t"),
    ("chunks", "uint32_t"),
)

TEXT = r"""
#ifdef CHEETAH_EMULATOR
#include "cheetah_emulator.h"
#endif

// weights [blocks][layers * chunks][128], values [2][blocks], totals [layers][blocks], kept [blocks][128]
extern "C" __global__ void __launch_bounds__(160, 1)
planted(const float* weights, float* values, uint64_t* counter, float* totals, float* kept, uint32_t layers,
        uint32_t chunks) {
  uint64_t* full = (uint64_t*)shared_arena();
  uint64_t* empty = full + 3;
  float* reduction = (float*)(shared_arena() + 64);
  float* ring = (float*)(shared_arena() + 1024);
  const uint32_t thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  if (thread == 0) {
    for (uint32_t stage = 0; stage < 3; stage++) {
      mbarrier_init(&full[stage], 1);
      mbarrier_init(&empty[stage], 128);
    }
    mbarrier_fence_init();
  }
  block_barrier();
  if (warp == 4) {
    if (lane == 0) {
      for (uint32_t i = 0; i < layers * chunks; i++) {
        const uint32_t stage = i % 3, round = i / 3;
        mbarrier_wait(&empty[stage], (round & 1) ^ 1);
        mbarrier_arrive_expect_tx(&full[stage], 512);
        bulk_copy(ring + stage * 128, weights + (blockIdx.x * layers * chunks + i) * 128, 512, &full[stage]);
      }
    }
    return;
  }
  float all = 0.0f;
  uint32_t i = 0;
  for (uint32_t layer = 0; layer < layers; layer++) {
    float sum = 0.0f;
    for (uint32_t chunk = 0; chunk < chunks; chunk++, i++) {
      const uint32_t stage = i % 3, round = i / 3;
      const float x = layer == 0 ? 1.0f : values[((layer - 1) & 1) * gridDim.x + (thread + chunk) % gridDim.x];
      mbarrier_wait(&full[stage], round & 1);
      sum += ring[stage * 128 + thread] * x;
      mbarrier_arrive(&empty[stage]);
    }
    sum = warp_sum_f32(sum);
    float* buffer = reduction + (layer & 1) * 4;
    if (lane == 0) buffer[warp] = sum;
    named_barrier(1, 128);
    const float total = (buffer[0] + buffer[1] + buffer[2] + buffer[3]) * 0.01f;
    all += total;
    if (thread == 0) {
      values[(layer & 1) * gridDim.x + blockIdx.x] = total;
      totals[layer * gridDim.x + blockIdx.x] = total;
      add_release_u64(counter, 1);
    }
    wait_at_least_u64(counter, (layer + 1) * gridDim.x);
  }
  kept[blockIdx.x * 128 + thread] = all;
}
"""


@dataclass(frozen=True)
class Bug:
    """A replacement in the text; the schedulers that must see it within 20 seeds, and whether the sanitizer does."""

    name: str
    old: str
    new: str
    seen_by: tuple[str, ...]
    is_race: bool
    kind: str = ""


BUGS = (
    Bug("reduction without its barrier", "named_barrier(1, 128);", "", ("round_robin", "random", "priority"), True),
    Bug("no grid barrier", "wait_at_least_u64(counter, (layer + 1) * gridDim.x);", "", ("random", "priority"), True),
    Bug(
        "producer warp ignores empty",
        "mbarrier_wait(&empty[stage], (round & 1) ^ 1);",
        "",
        ("round_robin", "random", "priority"),
        True,
    ),
    Bug(
        "consumer warps ignore full",
        "mbarrier_wait(&full[stage], round & 1);",
        "",
        ("round_robin", "random", "priority"),
        True,
    ),
    Bug(
        "wrong arrival count",
        "mbarrier_init(&empty[stage], 128);",
        "mbarrier_init(&empty[stage], 160);",
        ("round_robin", "random", "priority"),
        False,
        "Deadlock",
    ),
    Bug("no block barrier after mbarrier init", "block_barrier();", "", ("random", "priority"), True, "Misuse"),
    Bug("one reduction buffer", "reduction + (layer & 1) * 4", "reduction", ("priority",), True),
    Bug(
        "barrier without release",
        "add_release_u64(counter, 1);",
        "__atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); cheetah_emulator::words_written(counter);",
        (),
        True,
    ),
)


def planted_program(bug: Bug | None = None, *, sanitize: bool = False) -> Program:
    text = TEXT
    if bug:
        assert text.count(bug.old) == 1, f"{bug.name}: the text to replace stands {text.count(bug.old)} times"
        text = text.replace(bug.old, bug.new)
    return compile_program(text, "planted", PARAMETERS, sanitize=sanitize)


def run(program: Program, scheduler: str = "round_robin", seed: int = 0) -> list[np.ndarray]:
    """One launch on fresh buffers; outputs and exchanged values begin as NaN."""
    weights = allocate((BLOCKS, LAYERS * CHUNKS, 128), np.float32)
    weights[:] = np.random.default_rng(7).standard_normal(weights.shape)
    counter = allocate(1, np.uint64, fill=0)
    values = allocate((2, BLOCKS), np.float32)
    totals = allocate((LAYERS, BLOCKS), np.float32)
    kept = allocate((BLOCKS, 128), np.float32)
    arguments = [weights, values, counter, totals, kept, LAYERS, CHUNKS]
    program.launch(BLOCKS, THREADS, SHARED_BYTES, arguments, scheduler=scheduler, seed=seed)
    return [totals, kept]


def expected_totals() -> np.ndarray:
    """The totals of all layers in float64, [layers, blocks]."""
    weights = np.random.default_rng(7).standard_normal((BLOCKS, LAYERS, CHUNKS, 128))
    thread, chunk = np.arange(128), np.arange(CHUNKS)[:, None]
    x = np.ones((CHUNKS, 128))
    totals = []
    for layer in range(LAYERS):
        totals.append((weights[:, layer] * x).sum(axis=(1, 2)) * 0.01)
        x = totals[-1][(thread + chunk) % BLOCKS]
    return np.array(totals)
