// One launch: lays the machine out, gives the processor to the first fibre and reports how it ended.
#include "launch.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <string>

#include "context.h"
#include "faults.h"
#include "memory.h"
#include "ranks.h"
#include "report.h"
#include "sanitizer.h"
#include "watch.h"

namespace cheetah_emulator {
namespace {

constexpr uint64_t switches_between_polls = 1 << 18;
constexpr uint32_t patience_choices[] = {1, 4, 16, 64};
constexpr uint32_t period_choices[] = {32, 256, 2048, 16384};

void* const* kernel_arguments;
uint64_t kernel_parameters;
std::mutex one_launch;

void fibre_entry() {
  cheetah_emulator_kernel(kernel_arguments + machine.current->block_state->rank_number * kernel_parameters);
  finish_current();
}

uint32_t product(const uint32_t (&sizes)[3]) { return sizes[0] * sizes[1] * sizes[2]; }

Index3 position(uint32_t index, const uint32_t (&sizes)[3]) {
  return {index % sizes[0], index / sizes[0] % sizes[1], index / (sizes[0] * sizes[1])};
}

void* create_thread_fibre(uint32_t block, uint32_t thread) {
  if (!sanitizer::enabled) return nullptr;
  char name[64];
  std::snprintf(name, sizeof name, "block %u thread %u", block, thread);
  return sanitizer::create_fibre(name);
}

void prepare_fibre(uint32_t index, Block& block, uint32_t thread, const CheetahLaunch& launch) {
  Fibre& fibre = machine.fibres[index];
  fibre = {};
  fibre.identity = {position(thread, launch.block), position(block.index % product(launch.grid), launch.grid), block.arena};
  fibre.warp = &machine.warps[block.index * machine.warps_a_block + thread / warp_lanes];
  fibre.block_state = &block;
  fibre.thread = thread;
  fibre.lane = thread % warp_lanes;
  fibre.stack = stack_of(index);
  fibre.fenced = fenced_stack_of(index);
  // The canary at the low end stays outside.
  fibre.stack_pointer = prepare_context(fibre.stack + 64, stack_bytes - 64, fibre_entry);
  fibre.sanitizer_fibre = create_thread_fibre(block.index, thread);
}

void prepare_warps(Block& block) {
  for (uint32_t w = 0; w < machine.warps_a_block; w++) {
    Warp& warp = machine.warps[block.index * machine.warps_a_block + w];
    const uint32_t threads = std::min(warp_lanes, block.thread_count - w * warp_lanes);
    warp.lanes = threads == warp_lanes ? ~0u : (1u << threads) - 1;
    warp.runnable = warp.arrived = warp.generation = 0;
    warp.unordered = warp.passed_by = 0;
    begin_products(*warp.products);
    for (WordWaits& waits : warp.word_waits) waits = {};
    warp.waits_are_noted = false;
    warp.first_fibre = block.first_fibre + w * warp_lanes;
    warp.block = block.index;
    draw_priority(warp);
    wake_lanes(warp, warp.lanes);
  }
}

void prepare_block(uint32_t index, const CheetahLaunch& launch) {
  Block& block = machine.blocks[index];
  block.index = index;
  block.rank_number = index / product(launch.grid);
  block.thread_count = block.live_threads = product(launch.block);
  block.first_fibre = index * block.thread_count;
  block.mbarrier_count = block.copy_count = block.chunks = 0;
  for (NamedBarrier& barrier : block.barriers) barrier = {};
  fill_bytes(block.arena, 0xFF, machine.shared_bytes);
  if (watch::enabled) fill_bytes(block.loads, 0, load_marks() * sizeof(uint64_t));
  for (uint32_t t = 0; t < block.thread_count; t++) prepare_fibre(block.first_fibre + t, block, t, launch);
  prepare_warps(block);
  draw_priorities(block);
}

bool prepare_machine(const CheetahLaunch& launch) {
  machine.rank_count = launch.ranks;
  machine.block_count = machine.live_blocks = product(launch.grid) * launch.ranks;
  const uint32_t threads = product(launch.block);
  machine.warps_a_block = (threads + warp_lanes - 1) / warp_lanes;
  machine.fibre_count = machine.block_count * threads;
  machine.warp_count = machine.block_count * machine.warps_a_block;
  machine.shared_bytes = launch.shared_bytes;
  machine.scheduler = Scheduler(launch.scheduler);
  machine.random = {launch.seed};
  machine.copy_patience = patience_choices[machine.random.below(4)];
  machine.change_period = period_choices[machine.random.below(4)];
  machine.blocks_ranked_first = machine.random.below(2);
  machine.ranks_ranked_first = machine.rank_count > 1 && machine.random.below(2);
  for (uint32_t r = 0; machine.ranks_ranked_first && r < machine.rank_count; r++)
    machine.rank_priorities[r] = machine.random.below(16);
  machine.switches = machine.calls = machine.collectives = machine.copies = machine.copied_bytes = 0;
  machine.chunk_limit = launch.chunk_limit;
  machine.most_chunks = 0;
  machine.switch_limit = launch.switch_limit ? launch.switch_limit : ~uint64_t(0);
  machine.buffers = launch.buffers;
  machine.buffer_count = launch.buffer_count;
  machine.runnable_count = machine.copies_in_flight = 0;
  machine.priority_warp = nullptr;
  machine.message[0] = 0;
  for (FibreList& bucket : machine.word_waiters) bucket = {};
  begin_ranks();
  if (!lay_out_memory() || !watch::begin_launch()) return false;
  for (uint32_t i = 0; i < (machine.warp_count + 63) / 64; i++) machine.runnable_bits[i] = 0;
  block_dimensions = {launch.block[0], launch.block[1], launch.block[2]};
  grid_dimensions = {launch.grid[0], launch.grid[1], launch.grid[2]};
  machine.launcher_sanitizer_fibre = sanitizer::current_fibre();
  for (uint32_t b = 0; b < machine.block_count; b++) prepare_block(b, launch);
  return true;
}

void resume() {
  set_fibres_running(true);
  sanitizer::switch_to(machine.current->sanitizer_fibre);
  switch_context(&machine.launcher_stack_pointer, machine.current->stack_pointer);
  set_fibres_running(false);
}

void run_fibres(const CheetahLaunch& launch) {
  FaultGuard guard;
  machine.current = &machine.fibres[0];
  identity = &machine.current->identity;
  do {
    machine.check_at = std::min(machine.switch_limit, machine.switches + switches_between_polls);
    resume();
    if (machine.outcome == Outcome::poll && launch.poll && launch.poll()) machine.outcome = Outcome::interrupted;
  } while (machine.outcome == Outcome::poll);
}

void look_for_overflow() {
  for (uint32_t f = 0; f < machine.fibre_count; f++) {
    const Fibre& fibre = machine.fibres[f];
    if (!overflowed(fibre)) continue;
    machine.outcome = Outcome::misuse;
    std::snprintf(machine.message, message_bytes, "%s, thread %u: more than %lu bytes of local variables",
                  block_name(*fibre.block_state).c_str(), fibre.thread, (unsigned long)stack_bytes);
    return;
  }
}

std::string report() {
  switch (machine.outcome) {
    case Outcome::deadlock: case Outcome::switch_limit: case Outcome::interrupted: return waiting_report();
    case Outcome::misuse: return machine.message;
    default: return "";
  }
}

void give_results(CheetahLaunch& launch) {
  launch.outcome = uint32_t(machine.outcome);
  launch.switches = machine.switches;
  launch.collectives = machine.collectives;
  launch.copies = machine.copies;
  launch.copied_bytes = machine.copied_bytes;
  launch.most_chunks = machine.most_chunks;
  launch.overwritten = watch::overwritten(launch.overwritten_count);
  std::snprintf(launch.report, launch.report_bytes, "%s", report().c_str());
}

}  // namespace
}  // namespace cheetah_emulator

using namespace cheetah_emulator;

void cheetah_emulator_launch(CheetahLaunch* launch) {
  const std::lock_guard<std::mutex> lock(one_launch);
  kernel_arguments = launch->arguments;
  kernel_parameters = launch->parameters;
  if (prepare_machine(*launch)) {
    run_fibres(*launch);
    if (machine.outcome == Outcome::done) land_all_stores();
    look_for_overflow();
    watch::end_launch();
  } else {
    machine.outcome = Outcome::misuse;
    std::snprintf(machine.message, message_bytes, "no memory for %u threads of %lu bytes of stack",
                  machine.fibre_count, (unsigned long)stack_bytes);
  }
  give_results(*launch);
}

void cheetah_emulator_release() {
  const std::lock_guard<std::mutex> lock(one_launch);
  release_memory();
}
