// Bulk copies: queued and their destination poisoned when issued, landing when the scheduler decides, in any order.
//
// For the race detector each copy is a fibre of its own, which begins after its issue, reads and writes when it lands
// and orders that before the mbarrier's next phase.
#include <cstdio>

#include "machine.h"
#include "sanitizer.h"
#include "watch.h"

namespace cheetah_emulator {

MBarrier& initialised_mbarrier(uint64_t* storage, Place place, const char* primitive, const void* caller);
void begin_chunk(Block& block, MBarrier& barrier, Place place, const char* primitive);

namespace {

constexpr uint8_t poison = 0xFF;

void check_copy(const uint8_t* destination, const uint8_t* source, uint32_t bytes, Place place, const char* primitive) {
  const Block& block = *machine.current->block_state;
  if (!bytes || bytes % 16) misuse(place, primitive, "%u bytes; a bulk copy moves a positive multiple of 16", bytes);
  if (destination < block.arena || destination + bytes > block.arena + machine.shared_bytes)
    misuse(place, primitive, "destination bytes %ld to %ld leave the block's %lu bytes of shared memory",
           long(destination - block.arena), long(destination - block.arena + bytes), (unsigned long)machine.shared_bytes);
  if ((destination - block.arena) % 16)
    misuse(place, primitive, "destination at byte %ld of shared memory is not 16-byte aligned",
           long(destination - block.arena));
  check_global(source, bytes, 16, place, primitive);
  for (uint32_t i = 0; i < block.copy_count; i++) {
    const BulkCopy& other = block.copies[i];
    if (destination < other.destination + other.bytes && other.destination < destination + bytes)
      misuse(place, primitive, "destination bytes %ld to %ld overlap those of the copy issued at %s:%u, still in flight",
             long(destination - block.arena), long(destination - block.arena + bytes), other.place.file_name(),
             unsigned(other.place.line()));
  }
  check_no_product_reads(block, destination, bytes, place);
  watch::check_copy(destination, source, bytes, place);
  if (block.copy_count == copies_a_block)
    misuse(place, primitive, "more than %u copies of one block in flight", copies_a_block);
}

void* create_copy_fibre() {
  if (!sanitizer::enabled) return nullptr;
  char name[64];
  std::snprintf(name, sizeof name, "copy of block %u thread %u", machine.current->block_state->index,
                machine.current->thread);
  return sanitizer::create_fibre(name);
}

}  // namespace

namespace {

void issue_copy(void* destination, const void* source, uint32_t bytes, uint64_t* storage, bool is_read_once, Place place,
                const char* primitive, const void* caller) {
  auto* to = static_cast<uint8_t*>(destination);
  auto* from = static_cast<const uint8_t*>(source);
  check_copy(to, from, bytes, place, primitive);
  MBarrier& barrier = initialised_mbarrier(storage, place, primitive, caller);
  Block& block = *machine.current->block_state;
  if (is_read_once) begin_chunk(block, barrier, place, primitive);
  fill_bytes(to, poison, bytes);
  block.copies[block.copy_count++] = {to, from, bytes, machine.current->thread, &barrier, place, caller,
                                      create_copy_fibre()};
  machine.copies_in_flight++;
  machine.copies++;
  machine.copied_bytes += bytes;
}

}  // namespace

[[gnu::noinline]] void bulk_copy(void* destination, const void* source, uint32_t bytes, uint64_t* storage, Place place) {
  issue_copy(destination, source, bytes, storage, true, place, "bulk_copy", __builtin_return_address(0));
}

[[gnu::noinline]] void bulk_copy_shared(void* destination, const void* source, uint32_t bytes, uint64_t* storage,
                                        Place place) {
  issue_copy(destination, source, bytes, storage, false, place, "bulk_copy_shared", __builtin_return_address(0));
}

void fence_proxy_async(Place place) {
  preemption_point(place, "fence_proxy_async");
  watch::fence(*machine.current);
}

void loads_have_read(Place place) {
  note(place, "wait_for_u32");
  watch::loads_have_read(*machine.current);
}

void land_copy(Block& block, uint32_t index) {
  const BulkCopy copy = block.copies[index];
  machine.copies_in_flight--;
  block.copy_count--;
  for (uint32_t i = index; i < block.copy_count; i++) block.copies[i] = block.copies[i + 1];
  copy_bytes(copy.destination, copy.source, copy.bytes);
  sanitizer::switch_to(copy.sanitizer_fibre);
  sanitizer::read_range(copy.source, copy.bytes, copy.caller);
  sanitizer::write_range(copy.destination, copy.bytes, copy.caller);
  complete_transaction(block, *copy.barrier, copy.bytes);
  sanitizer::switch_to(machine.current->sanitizer_fibre);
  sanitizer::destroy_fibre(copy.sanitizer_fibre);
}

void land_any_copy() {
  uint32_t pick = machine.random.below(machine.copies_in_flight);
  for (uint32_t b = 0;; b++) {
    Block& block = machine.blocks[b];
    if (pick < block.copy_count) return land_copy(block, pick);
    pick -= block.copy_count;
  }
}

}  // namespace cheetah_emulator
