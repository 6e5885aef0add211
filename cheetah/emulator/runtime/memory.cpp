#include "memory.h"

#include <sys/mman.h>

#include "warpgroup.h"

namespace cheetah_emulator {
namespace {

// Stacks stand a little more than a power of two apart: at equal distances the hot ends of all of them would fall into
// the same sets of the caches.
constexpr size_t stack_stride = stack_bytes + 17 * 64;
constexpr uint64_t canary = 0x57AC4E4DC4EE7A4Bull;

struct Mapping {
  uint8_t* start = nullptr;
  size_t bytes = 0;
};

Mapping stacks, states, fenced_stacks;

bool ensure(Mapping& mapping, size_t bytes) {
  if (mapping.bytes >= bytes) return true;
  if (mapping.start) munmap(mapping.start, mapping.bytes);
  mapping = {};
  void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return false;
  mapping = {static_cast<uint8_t*>(start), bytes};
  return true;
}

void release(Mapping& mapping) {
  if (mapping.start) munmap(mapping.start, mapping.bytes);
  mapping = {};
}

// Hands out pieces of a mapping; with no mapping it only measures.
struct Cutter {
  uint8_t* start;
  size_t used = 0;
  template <class T>
  T* take(size_t count, size_t alignment = 64) {
    used = (used + alignment - 1) / alignment * alignment;
    uint8_t* piece = start ? start + used : nullptr;
    used += count * sizeof(T);
    return reinterpret_cast<T*>(piece);
  }
};

size_t cut(uint8_t* start) {
  Cutter cutter{start};
  const size_t arena_bytes = (machine.shared_bytes + arena_alignment - 1) / arena_alignment * arena_alignment;
  auto* arenas = cutter.take<uint8_t>(arena_bytes * machine.block_count, arena_alignment);
  machine.fibres = cutter.take<Fibre>(machine.fibre_count);
  machine.warps = cutter.take<Warp>(machine.warp_count);
  machine.blocks = cutter.take<Block>(machine.block_count);
  machine.runnable_warps = cutter.take<uint32_t>(machine.warp_count);
  machine.runnable_bits = cutter.take<uint64_t>((machine.warp_count + 63) / 64);
  auto* mbarriers = cutter.take<MBarrier>(size_t(mbarriers_a_block) * machine.block_count);
  auto* loads = cutter.take<uint64_t>(load_marks() * machine.block_count);
  auto* copies = cutter.take<BulkCopy>(size_t(copies_a_block) * machine.block_count);
  auto* products = cutter.take<WarpProducts>(machine.warp_count);
  for (uint32_t w = 0; start && w < machine.warp_count; w++) machine.warps[w].products = &products[w];
  for (uint32_t b = 0; start && b < machine.block_count; b++) {
    machine.blocks[b].arena = arenas + b * arena_bytes;
    machine.blocks[b].mbarriers = mbarriers + b * size_t(mbarriers_a_block);
    machine.blocks[b].loads = loads + b * load_marks();
    machine.blocks[b].copies = copies + b * size_t(copies_a_block);
  }
  return cutter.used;
}

}  // namespace

bool lay_out_memory() {
  if (!ensure(states, cut(nullptr)) || !ensure(stacks, machine.fibre_count * stack_stride)) return false;
  // Room alone: a page of it exists once a wgmma_fence has written there.
  if (!ensure(fenced_stacks, machine.fibre_count * stack_bytes)) return false;
  cut(states.start);
  for (uint32_t f = 0; f < machine.fibre_count; f++) *reinterpret_cast<uint64_t*>(stack_of(f)) = canary;
  return true;
}

size_t load_marks() { return watch::enabled ? machine.shared_bytes / 16 + 1 : 0; }

void release_memory() {
  release(stacks);
  release(states);
  release(fenced_stacks);
}

uint8_t* stack_of(uint32_t fibre) { return stacks.start + fibre * stack_stride; }

uint8_t* fenced_stack_of(uint32_t fibre) { return fenced_stacks.start + fibre * stack_bytes; }

bool overflowed(const Fibre& fibre) { return *reinterpret_cast<const uint64_t*>(fibre.stack) != canary; }

}  // namespace cheetah_emulator
