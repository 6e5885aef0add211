// Who runs next. Three schedulers, each a pure function of the seed:
//   round_robin  every runnable lane of every warp in turn; one copy a block lands at the end of a pass
//   random       any runnable warp, any of its lanes, or any copy
//   priority     the warp (or copy engine) with the highest random priority runs until it blocks; priorities change at
//                random. Finds what needs one warp, or one block, to run far ahead of another. How often they change,
//                and whether warps or blocks are ranked first, is drawn from the seed.
#include <cstdarg>
#include <cstdio>

#include "context.h"
#include "machine.h"
#include "ranks.h"
#include "sanitizer.h"

namespace cheetah_emulator {

Machine machine;
const Identity* identity;
Index3 block_dimensions, grid_dimensions;

namespace {

constexpr uint32_t random_preemption_period = 4;           // primitives that need not wait
constexpr uint32_t round_robin_preemption_period = 1024;  // only so that limits are looked at
constexpr uint64_t calls_between_polls = 1 << 22;         // in round_robin, where a loop of stores hardly ever switches

void set_runnable(Warp& warp) {
  const uint32_t index = uint32_t(&warp - machine.warps);
  warp.position = machine.runnable_count;
  machine.runnable_warps[machine.runnable_count++] = index;
  machine.runnable_bits[index / 64] |= uint64_t(1) << index % 64;
}

void unset_runnable(Warp& warp) {
  const uint32_t index = uint32_t(&warp - machine.warps);
  const uint32_t last = machine.runnable_warps[--machine.runnable_count];
  machine.runnable_warps[warp.position] = last;
  machine.warps[last].position = warp.position;
  machine.runnable_bits[index / 64] &= ~(uint64_t(1) << index % 64);
}

void sleep(Fibre& fibre) {
  Warp& warp = *fibre.warp;
  warp.runnable &= ~(1u << fibre.lane);
  if (!warp.runnable) unset_runnable(warp);
}

Fibre& lane_of(const Warp& warp, uint32_t lane) { return machine.fibres[warp.first_fibre + lane]; }

Fibre& random_lane(const Warp& warp, uint32_t draw) {
  const uint32_t turn = draw % warp_lanes;
  const uint32_t turned = warp.runnable >> turn | warp.runnable << (-turn & 31);
  return lane_of(warp, (uint32_t(__builtin_ctz(turned)) + turn) % warp_lanes);
}

// The first runnable warp at or after `from`; -1 if there is none before the end.
int64_t runnable_from(uint32_t from) {
  const uint32_t words = (machine.warp_count + 63) / 64;
  for (uint32_t word = from / 64; word < words; word++) {
    uint64_t bits = machine.runnable_bits[word];
    if (word == from / 64) bits &= ~uint64_t(0) << from % 64;
    if (bits) return word * 64 + __builtin_ctzll(bits);
  }
  return -1;
}

void land_one_copy_a_block() {
  for (uint32_t b = 0; b < machine.block_count && machine.copies_in_flight; b++) {
    Block& block = machine.blocks[b];
    if (block.copy_count) land_copy(block, machine.random.below(block.copy_count));
  }
}

void land_some_stores() {
  for (uint32_t count = 1 + machine.random.below(machine.late_stores); count; count--) land_a_store();
}

Fibre* next_round_robin() {
  const Fibre& self = *machine.current;
  const uint32_t later = self.lane == 31 ? 0 : self.warp->runnable & ~uint32_t(0) << (self.lane + 1);
  if (later) return &lane_of(*self.warp, __builtin_ctz(later));
  int64_t index = runnable_from(uint32_t(self.warp - machine.warps) + 1);
  if (index < 0) {
    if (machine.copies_in_flight) land_one_copy_a_block();
    if (machine.late_stores) land_some_stores();
    index = runnable_from(0);
  }
  if (index < 0) return nullptr;
  const Warp& warp = machine.warps[index];
  return &lane_of(warp, __builtin_ctz(warp.runnable));
}

Fibre* next_random() {
  const uint64_t draw = machine.random.next();
  if (machine.copies_in_flight) {
    const uint32_t actors = machine.copies_in_flight + machine.runnable_count * machine.copy_patience;
    if (machine.random.below(actors) < machine.copies_in_flight) land_any_copy();
  }
  if (machine.late_stores) {
    const uint32_t actors = machine.late_stores + machine.runnable_count * machine.copy_patience;
    if (machine.random.below(actors) < machine.late_stores) land_a_store();
  }
  if (!machine.runnable_count) return nullptr;
  const uint32_t pick = uint32_t((draw >> 32) * machine.runnable_count >> 32);
  return &random_lane(machine.warps[machine.runnable_warps[pick]], uint32_t(draw));
}

void change_a_priority() {
  const uint32_t pick = machine.random.below(machine.warp_count + machine.block_count);
  if (pick < machine.warp_count) draw_priority(machine.warps[pick]);
  else draw_priorities(machine.blocks[pick - machine.warp_count]);
  machine.priority_warp = nullptr;
}

Warp* highest_priority_warp() {
  Warp* best = nullptr;
  for (uint32_t i = 0; i < machine.runnable_count; i++) {
    Warp& warp = machine.warps[machine.runnable_warps[i]];
    if (!best || warp.priority > best->priority) best = &warp;
  }
  return best;
}

void land_copies_above(const Warp* warp) {
  for (uint32_t b = 0; b < machine.block_count && machine.copies_in_flight; b++) {
    Block& block = machine.blocks[b];
    while (block.copy_count && (!warp || block.engine_priority > warp->priority)) {
      land_copy(block, machine.random.below(block.copy_count));
      if (!warp) return;
    }
  }
}

Fibre* next_priority() {
  const uint64_t draw = machine.random.next();
  if ((draw >> 32) % machine.change_period == 0) change_a_priority();
  if (machine.late_stores && machine.random.one_in(machine.change_period)) land_some_stores();
  Warp* warp = machine.priority_warp;
  if (!warp || !warp->runnable) {
    if (machine.copies_in_flight) land_copies_above(highest_priority_warp());
    warp = machine.priority_warp = highest_priority_warp();
  }
  return warp ? &random_lane(*warp, uint32_t(draw)) : nullptr;
}

Fibre* next_of_scheduler() {
  switch (machine.scheduler) {
    case Scheduler::round_robin: return next_round_robin();
    case Scheduler::random: return next_random();
    case Scheduler::priority: return next_priority();
  }
  return nullptr;
}

// Nobody can run: copies in flight land until somebody can.
Fibre& next_fibre() {
  for (;;) {
    if (Fibre* next = next_of_scheduler()) return *next;
    if (machine.runnable_count) continue;
    if (machine.late_stores && (!machine.copies_in_flight || machine.random.below(2))) land_a_store();
    else if (machine.copies_in_flight) land_any_copy();
    else stop(Outcome::deadlock);
  }
}

void give_launcher_the_processor() {
  Fibre& self = *machine.current;
  sanitizer::switch_to(machine.launcher_sanitizer_fibre);
  switch_context(&self.stack_pointer, machine.launcher_stack_pointer);
}

void check_limits() {
  if (machine.switches >= machine.switch_limit) stop(Outcome::switch_limit);
  machine.outcome = Outcome::poll;
  give_launcher_the_processor();
}

void reschedule() {
  if (++machine.switches >= machine.check_at) check_limits();
  Fibre& self = *machine.current;
  Fibre& next = next_fibre();
  if (&next == &self) return;
  machine.current = &next;
  identity = &next.identity;
  sanitizer::switch_to(next.sanitizer_fibre);
  switch_context(&self.stack_pointer, next.stack_pointer);
}

}  // namespace

void draw_priority(Warp& warp) {
  const uint32_t block_part = machine.blocks_ranked_first ? machine.blocks[warp.block].rank << 16 : 0;
  warp.priority = block_part | uint32_t(machine.random.next()) >> (machine.blocks_ranked_first ? 16 : 0);
}

void draw_priorities(Block& block) {
  block.rank = machine.random.below(1 << 16);
  if (machine.ranks_ranked_first) block.rank = machine.rank_priorities[block.rank_number] << 12 | block.rank >> 4;
  block.engine_priority = uint32_t(machine.random.next());
  if (!machine.blocks_ranked_first) return;
  for (uint32_t w = 0; w < machine.warps_a_block; w++) draw_priority(machine.warps[block.index * machine.warps_a_block + w]);
}

void wake(Fibre& fibre) {
  fibre.wait.kind = WaitKind::none;
  Warp& warp = *fibre.warp;
  if (!warp.runnable) set_runnable(warp);
  warp.runnable |= 1u << fibre.lane;
}

void wake_all(FibreList& list) {
  for (Fibre* fibre = list.first; fibre;) {
    Fibre* next = fibre->next;
    wake(*fibre);
    fibre = next;
  }
  list = {};
}

void wake_lanes(Warp& warp, uint32_t lanes) {
  if (!lanes) return;
  if (!warp.runnable) set_runnable(warp);
  warp.runnable |= lanes;
}

void block_on(WaitKind kind, const char* primitive, Place place, const void* object, uint64_t value) {
  Fibre& self = *machine.current;
  self.wait.kind = kind;
  self.wait.primitive = primitive;
  self.wait.place = place;
  self.wait.object = object;
  self.wait.value = value;
  sleep(self);
  reschedule();
  self.wait.kind = WaitKind::none;
}

void yield() { reschedule(); }

void preemption_point(Place place, const char* primitive) {
  note(place, primitive);
  if (machine.scheduler == Scheduler::random) {
    if (machine.random.one_in(random_preemption_period)) yield();
  } else if (machine.scheduler == Scheduler::priority) {
    if (!machine.random.one_in(machine.change_period)) return;
    draw_priority(*machine.current->warp);
    machine.priority_warp = nullptr;
    yield();
  } else if (++machine.calls % round_robin_preemption_period == 0) {
    if (machine.calls % calls_between_polls == 0) machine.check_at = machine.switches;
    yield();
  }
}

void finish_current() {
  Fibre& self = *machine.current;
  Block& block = *self.block_state;
  self.finished = true;
  sleep(self);
  if (--block.live_threads == 0) {
    if (block.copy_count) {
      const BulkCopy& copy = block.copies[0];
      misuse(copy.place, "bulk_copy", "still in flight when the block ended (%u in all); wait on its mbarrier",
             block.copy_count);
    }
    check_products_ended(block);
    if (--machine.live_blocks == 0) stop(Outcome::done);
  }
  reschedule();
  __builtin_unreachable();
}

void stop(Outcome outcome) {
  machine.outcome = outcome;
  give_launcher_the_processor();
  __builtin_unreachable();
}

void misuse(Place place, const char* primitive, const char* format, ...) {
  const Fibre& self = *machine.current;
  sanitizer::switch_to(machine.launcher_sanitizer_fibre);  // the message is the launcher's, not an access of the kernel
  int used = std::snprintf(machine.message, message_bytes, "%s, thread %u: %s at %s:%u: ",
                           block_name(*self.block_state).c_str(), self.thread, primitive, place.file_name(), unsigned(place.line()));
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(machine.message + used, message_bytes - used, format, arguments);
  va_end(arguments);
  stop(Outcome::misuse);
}

uint64_t virtual_nanoseconds() { return machine.switches * 100; }

}  // namespace cheetah_emulator
