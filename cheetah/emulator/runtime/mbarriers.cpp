// mbarriers: phases that complete when all arrivals have come and all announced bytes have landed.
//
// The eight bytes in shared memory hold a mark and the index of the barrier's state, which the runtime keeps apart. So
// a barrier that was never initialised, or over which something was written, is noticed at its next use.
#include "machine.h"
#include "sanitizer.h"
#include "watch.h"

namespace cheetah_emulator {
namespace {

constexpr uint64_t mark = 0xC4EE7A4Bull << 32;
constexpr uint32_t most_arrivals = (1u << 20) - 1;
constexpr int64_t most_transaction_bytes = (1 << 20) - 1;

uint64_t marked(const Block& block, const MBarrier& barrier) {
  return mark | uint64_t(block.index & 0xFFF) << 20 | uint64_t(&barrier - block.mbarriers);
}

void check_address(const uint64_t* storage, Place place, const char* primitive) {
  const Block& block = *machine.current->block_state;
  const auto* address = reinterpret_cast<const uint8_t*>(storage);
  if (address < block.arena || address + 8 > block.arena + machine.shared_bytes)
    misuse(place, primitive, "mbarrier at %p lies outside this block's shared memory", (const void*)storage);
  if ((address - block.arena) % 8)
    misuse(place, primitive, "mbarrier at byte %ld of shared memory; mbarriers are 8-byte aligned",
           long(address - block.arena));
}

MBarrier* find(Block& block, const uint64_t* storage) {
  const uint64_t index = *storage & 0xFFFFF;
  if (index >= block.mbarrier_count) return nullptr;
  MBarrier& barrier = block.mbarriers[index];
  return barrier.storage == storage && *storage == marked(block, barrier) ? &barrier : nullptr;
}

[[noreturn]] void not_initialised(Block& block, const uint64_t* storage, Place place, const char* primitive) {
  const long offset = long(reinterpret_cast<const uint8_t*>(storage) - block.arena);
  for (uint32_t i = 0; i < block.mbarrier_count; i++)
    if (block.mbarriers[i].storage == storage)
      misuse(place, primitive, "the mbarrier at byte %ld of shared memory, initialised at %s:%u, has been overwritten",
             offset, block.mbarriers[i].place.file_name(), unsigned(block.mbarriers[i].place.line()));
  misuse(place, primitive, "used before init: no mbarrier_init has reached byte %ld of shared memory", offset);
}

MBarrier& initialised(uint64_t* storage, Place place, const char* primitive, const void* caller) {
  check_address(storage, place, primitive);
  Block& block = *machine.current->block_state;
  MBarrier* barrier = find(block, storage);
  if (!barrier) not_initialised(block, storage, place, primitive);
  sanitizer::read8(storage, caller);
  return *barrier;
}

void complete_if_done(MBarrier& barrier) {
  if (barrier.pending || barrier.transaction_bytes) return;
  barrier.phase++;
  barrier.pending = barrier.arrivals;
  wake_all(barrier.waiting);
}

}  // namespace

MBarrier& initialised_mbarrier(uint64_t* storage, Place place, const char* primitive, const void* caller) {
  return initialised(storage, place, primitive, caller);
}

// A chunk is what copies of memory that is read once bring to an mbarrier: under way until all announced bytes have
// landed. What other blocks read too comes from L2 and is not bounded.
void begin_chunk(Block& block, MBarrier& barrier, Place place, const char* primitive) {
  if (barrier.is_chunk) return;
  if (machine.chunk_limit && block.chunks == machine.chunk_limit)
    misuse(place, primitive, "%u chunks of this block are under way, and %u is what its plan allows: wait for the chunk"
           " %u places earlier to land first", block.chunks, machine.chunk_limit, machine.chunk_limit);
  barrier.is_chunk = true;
  block.chunks++;
  if (block.chunks > machine.most_chunks) machine.most_chunks = block.chunks;
}

void complete_transaction(Block& block, MBarrier& barrier, uint32_t bytes) {
  sanitizer::release(barrier.order[barrier.phase & 1]);
  barrier.transaction_bytes -= bytes;
  if (barrier.is_chunk && barrier.transaction_bytes <= 0) {
    barrier.is_chunk = false;
    block.chunks--;
  }
  complete_if_done(barrier);
}

[[gnu::noinline]] void mbarrier_init(uint64_t* storage, uint32_t arrivals, Place place) {
  constexpr const char* primitive = "mbarrier_init";
  preemption_point(place, primitive);
  check_address(storage, place, primitive);
  Block& block = *machine.current->block_state;
  if (MBarrier* live = find(block, storage))
    misuse(place, primitive, "already initialised at %s:%u; one thread initialises each mbarrier once",
           live->place.file_name(), unsigned(live->place.line()));
  if (!arrivals || arrivals > most_arrivals)
    misuse(place, primitive, "%u arrivals; an mbarrier counts 1 to %u", arrivals, most_arrivals);
  if (block.mbarrier_count == mbarriers_a_block)
    misuse(place, primitive, "more than %u mbarriers in a block", mbarriers_a_block);
  MBarrier& barrier = block.mbarriers[block.mbarrier_count++];
  barrier = {};
  barrier.storage = storage;
  barrier.arrivals = barrier.pending = arrivals;
  barrier.place = place;
  *storage = marked(block, barrier);
  sanitizer::write8(storage, __builtin_return_address(0));
}

[[gnu::noinline]] void mbarrier_arrive(uint64_t* storage, uint32_t bytes, Place place, const char* primitive) {
  preemption_point(place, primitive);
  MBarrier& barrier = initialised(storage, place, primitive, __builtin_return_address(0));
  if (!barrier.pending)
    misuse(place, primitive, "too many arrivals: phase %u of the mbarrier of %s:%u has had all its %u", barrier.phase,
           barrier.place.file_name(), unsigned(barrier.place.line()), barrier.arrivals);
  if (barrier.transaction_bytes + int64_t(bytes) > most_transaction_bytes)
    misuse(place, primitive, "%ld bytes announced in one phase; an mbarrier counts up to %ld",
           long(barrier.transaction_bytes + bytes), long(most_transaction_bytes));
  sanitizer::release(barrier.order[barrier.phase & 1]);
  barrier.transaction_bytes += bytes;
  if (!bytes) watch::check_arrival(place, primitive);
  barrier.pending--;
  complete_if_done(barrier);
}

[[gnu::noinline]] void mbarrier_wait(uint64_t* storage, uint32_t parity, Place place) {
  constexpr const char* primitive = "mbarrier_wait";
  preemption_point(place, primitive);
  MBarrier& barrier = initialised(storage, place, primitive, __builtin_return_address(0));
  if (parity > 1) misuse(place, primitive, "parity %u; a phase has parity 0 or 1", parity);
  while ((barrier.phase & 1) == parity) {
    append(barrier.waiting, *machine.current);
    block_on(WaitKind::mbarrier, primitive, place, &barrier, parity);
  }
  sanitizer::acquire(barrier.order[parity]);
}

}  // namespace cheetah_emulator
