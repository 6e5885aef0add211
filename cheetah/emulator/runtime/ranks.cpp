// Several GPUs (ranks) in one machine: whose memory is whose, and stores to other ranks' memory.
//
// A store to a peer crosses the link: it lands when the scheduler decides, in any order but that of its own word. One
// with release lands behind all that its block has stored to peers before it. What a rank's memory holds is seen by that
// rank alone; nobody loads from a peer. A word that a peer stores is waited for at system scope.
#include "ranks.h"

#include <cstdio>
#include <cstring>
#include <vector>

#include "watch.h"

namespace cheetah_emulator {
namespace {

constexpr uint32_t most_late_stores = 4096;
constexpr uint8_t stored_by_peer = 1, waited_for_here = 2;

enum class Stored : uint8_t { flagged, tagged, data, addition };

struct LateStore {
  uint8_t* to;
  uint64_t word[2];
  uint32_t bytes, epoch, block;
  Stored kind;
  bool is_release;
};

std::vector<LateStore> late;
std::vector<std::vector<uint8_t>> marks;  // of each buffer that peers store to, a byte for each 4 of its

uint32_t rank_of_current() { return machine.current->block_state->rank_number; }

bool is_peers(const Buffer& buffer) {
  return buffer.rank != every_rank && machine.rank_count > 1 && buffer.rank != rank_of_current();
}

// What is known of the words of a buffer that peers store to; null of another.
uint8_t* marks_of(const Buffer& buffer, const void* address) {
  std::vector<uint8_t>& known = marks[uint32_t(&buffer - machine.buffers)];
  return known.empty() ? nullptr : &known[(static_cast<const uint8_t*>(address) - buffer.start) / 4];
}

[[noreturn]] void scopes_differ(const Buffer& buffer, const void* address, Place place, const char* primitive) {
  misuse(place, primitive,
         "byte %ld of buffer %s is stored by another rank, and its own waits for it in the scope of one GPU: both are"
         " to say scope \"sys\"",
         long(static_cast<const uint8_t*>(address) - buffer.start), buffer.name);
}

void land(uint32_t index) {
  const LateStore store = late[index];
  late.erase(late.begin() + index);
  machine.late_stores--;
  watch::note_store(store.to, store.bytes);
  auto* word = reinterpret_cast<uint64_t*>(store.to);
  switch (store.kind) {
    case Stored::flagged: __atomic_store_n(word, store.word[0], __ATOMIC_RELEASE); break;
    case Stored::addition: __atomic_fetch_add(word, store.word[0], __ATOMIC_RELEASE); break;
    case Stored::data: std::memcpy(store.to, store.word, store.bytes); return;
    case Stored::tagged:
      __atomic_store_n(reinterpret_cast<uint32_t*>(store.to), uint32_t(store.word[0]), __ATOMIC_RELAXED);
      tagged(reinterpret_cast<uint32_t*>(store.to), store.epoch);
  }
  words_written(store.to);
}

// Whether the buffer is a peer's, in which these bytes may be stored.
bool is_stored_to_peer(const void* address, uint32_t bytes, Place place, const char* primitive) {
  if (machine.rank_count == 1) return false;
  const Buffer* buffer = buffer_of(address);
  if (!buffer || !is_peers(*buffer)) return false;
  preemption_point(place, primitive);
  check_bounds(*buffer, address, bytes, bytes, place, primitive);
  if (uint8_t* known = marks_of(*buffer, address)) {
    for (uint32_t i = 0; i < bytes / 4; i++) {
      known[i] |= stored_by_peer;
      if (known[i] & waited_for_here) scopes_differ(*buffer, address, place, primitive);
    }
  }
  return true;
}

// Which is to land so that one may: itself, an earlier one of its word, or what its block stored before it releases.
uint32_t before(uint32_t index) {
  for (uint32_t i = 0; i < index; i++)
    if (late[i].to == late[index].to || (late[index].is_release && late[i].block == late[index].block))
      return before(i);
  return index;
}

void store_late(LateStore store) {
  store.block = machine.current->block_state->index;
  if (late.size() == most_late_stores) land(before(0));
  late.push_back(store);
  machine.late_stores++;
}

uint8_t* to(void* address) { return static_cast<uint8_t*>(address); }

}  // namespace

void begin_ranks() {
  late.clear();
  late.reserve(most_late_stores);
  machine.late_stores = 0;
  marks.assign(machine.buffer_count, {});
  for (uint32_t i = 0; i < machine.buffer_count; i++)
    if (machine.buffers[i].has_peers) marks[i].assign(machine.buffers[i].bytes / 4 + 1, 0);
}

std::string block_name(const Block& block) {
  char name[64];
  const uint32_t blocks = machine.block_count / machine.rank_count;
  if (machine.rank_count == 1) std::snprintf(name, sizeof name, "block %u", block.index);
  else std::snprintf(name, sizeof name, "rank %u, block %u", block.rank_number, block.index % blocks);
  return name;
}

void check_owner(const Buffer& buffer, Place place, const char* primitive) {
  if (is_peers(buffer))
    misuse(place, primitive, "buffer %s is rank %u's: what is there is published to it, and nothing else", buffer.name,
           buffer.rank);
}

void note_wait(const Buffer& buffer, const void* words, uint32_t bytes, Place place, const char* primitive) {
  if (machine.rank_count == 1 || machine.current->system_scope) return;
  uint8_t* known = marks_of(buffer, words);
  for (uint32_t i = 0; known && i < bytes / 4; i++) {
    known[i] |= waited_for_here;
    if (known[i] & stored_by_peer) scopes_differ(buffer, static_cast<const uint8_t*>(words) + 4 * i, place, primitive);
  }
}

void enter_system_scope() { machine.current->system_scope++; }
void leave_system_scope() { machine.current->system_scope--; }

bool store_to_peer(void* address, uint64_t word, uint32_t bytes, uint32_t epoch, bool is_release, Place place,
                   const char* primitive) {
  if (!is_stored_to_peer(address, bytes, place, primitive)) return false;
  store_late({to(address), {word}, bytes, epoch, 0, bytes == 8 ? Stored::flagged : Stored::tagged, is_release});
  return true;
}

bool add_to_peer(uint64_t* address, uint64_t value, Place place, const char* primitive) {
  if (!is_stored_to_peer(address, 8, place, primitive)) return false;
  store_late({to(address), {value}, 8, 0, 0, Stored::addition, true});
  return true;
}

void data_to_peer(void* address, const void* data, uint32_t bytes, Place place, const char* primitive) {
  if (!is_stored_to_peer(address, bytes, place, primitive))
    misuse(place, primitive, "%p is no other rank's memory", address);
  LateStore store{to(address), {}, bytes, 0, 0, Stored::data, false};
  std::memcpy(store.word, data, bytes);
  store_late(store);
}

void land_a_store() { land(before(machine.random.below(machine.late_stores))); }

void land_all_stores() {
  while (machine.late_stores) land_a_store();
}

}  // namespace cheetah_emulator
