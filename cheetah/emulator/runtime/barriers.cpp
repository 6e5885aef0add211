// bar.sync and bar.arrive: named barriers 1 to 15, and barrier 0 for the whole block.
#include "machine.h"
#include "sanitizer.h"
#include "watch.h"

namespace cheetah_emulator {
namespace {

void check_named(uint32_t id, uint32_t threads, Place place, const char* primitive) {
  if (id < 1 || id >= named_barriers)
    misuse(place, primitive, "barrier id %u; named barriers are 1 to %u (0 is block_barrier)", id, named_barriers - 1);
  if (threads % warp_lanes || !threads || threads > machine.current->block_state->thread_count)
    misuse(place, primitive, "barrier %u for %u threads; need a multiple of 32 up to the block's %u", id, threads,
           machine.current->block_state->thread_count);
}

// Adds the running thread to the barrier; true when it was the last and the others have been woken.
bool arrive(NamedBarrier& barrier, uint32_t id, uint32_t threads, Place place, const char* primitive) {
  if (!barrier.arrived) {
    barrier.expected = threads;
    barrier.place = place;
    barrier.primitive = primitive;
  } else if (barrier.expected != threads) {
    misuse(place, primitive, "barrier %u for %u threads, but %s at %s:%u said %u; all must name the same count", id,
           threads, barrier.primitive, barrier.place.file_name(), unsigned(barrier.place.line()), barrier.expected);
  }
  sanitizer::release(barrier.order[barrier.generation & 1]);
  if (++barrier.arrived != barrier.expected) return false;
  barrier.arrived = 0;
  barrier.generation++;
  wake_all(barrier.waiting);
  return true;
}

void synchronise(uint32_t id, uint32_t threads, Place place, const char* primitive) {
  Fibre& self = *machine.current;
  NamedBarrier& barrier = self.block_state->barriers[id];
  const char& order = barrier.order[barrier.generation & 1];
  note(place, primitive);
  self.warp->word_waits[self.lane] = {};
  watch::meets(self);
  if (arrive(barrier, id, threads, place, primitive)) {
    if (machine.scheduler != Scheduler::round_robin) yield();
  } else {
    append(barrier.waiting, self);
    block_on(WaitKind::barrier, primitive, place, &barrier, id);
  }
  sanitizer::acquire(order);
}

}  // namespace

void block_barrier(Place place) {
  synchronise(0, machine.current->block_state->thread_count, place, "block_barrier");
}

void named_barrier(uint32_t id, uint32_t threads, Place place) {
  check_named(id, threads, place, "named_barrier");
  synchronise(id, threads, place, "named_barrier");
}

}  // namespace cheetah_emulator
