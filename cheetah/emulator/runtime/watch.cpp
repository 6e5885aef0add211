#include "watch.h"

#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "memory.h"

namespace cheetah_emulator::watch {

#if defined(CHEETAH_EMULATOR_WATCH)

namespace {

constexpr uint32_t unit_bytes = 16;

struct Stored {  // what is known of 16 bytes of a buffer
  uint32_t fibre;   // index + 1 of the thread that stored there last; 0: nobody has in this launch
  uint32_t fences;  // that it had made by then
  uint64_t moment;
};

struct Shadow {
  Stored* units;
  uint32_t* epochs;  // of each tagged word; 0: none was published in this launch
  bool has_stores;
};

Shadow shadows[most_buffers];
Stored* all_units;
uint32_t* all_epochs;
size_t all_bytes, epoch_bytes;
uint64_t moments;
uint32_t last_buffer;
std::vector<Overwritten> noted;
bool notes;  // whether a buffer of the launch is noted

uint64_t units_of(uint64_t bytes) { return (bytes + unit_bytes - 1) / unit_bytes + 1; }

// Whose load of these 16 bytes of shared memory may not have read yet: thread + 1 and the waits that it had made.
uint64_t load_mark(const Fibre& fibre) { return uint64_t(fibre.waits) << 16 | (fibre.thread + 1); }

const Fibre* reader_of(const Block& block, uint64_t mark) {
  if (!mark) return nullptr;
  const Fibre& fibre = machine.fibres[block.first_fibre + (mark & 0xFFFF) - 1];
  return load_mark(fibre) == mark ? &fibre : nullptr;
}

bool is_in(const Buffer& buffer, const uint8_t* byte) {
  return uint64_t(byte - buffer.start) < buffer.bytes;
}

// The buffer of a store; misuse where it has none or leaves it.
uint32_t buffer_of(const uint8_t* byte, uint32_t bytes) {
  if (last_buffer >= machine.buffer_count || !is_in(machine.buffers[last_buffer], byte)) {
    last_buffer = 0;
    while (last_buffer < machine.buffer_count && !is_in(machine.buffers[last_buffer], byte)) last_buffer++;
  }
  const Wait& last = machine.current->wait;
  const char* primitive = last.primitive ? last.primitive : "the kernel's beginning";
  if (last_buffer == machine.buffer_count)
    misuse(last.place, primitive, "behind it, a store of %u bytes to %p, which is no memory of this launch",
           bytes, (const void*)byte);
  const Buffer& buffer = machine.buffers[last_buffer];
  const uint64_t offset = uint64_t(byte - buffer.start);
  if (offset + bytes > buffer.bytes)
    misuse(last.place, primitive, "behind it, a store to bytes %lu to %lu of buffer %s, which has %lu",
           (unsigned long)offset, (unsigned long)(offset + bytes), buffer.name, (unsigned long)buffer.bytes);
  return last_buffer;
}

bool is_on_stack(const Fibre& fibre, const uint8_t* byte) { return uint64_t(byte - fibre.stack) < stack_bytes; }

void load(const void* address, uint32_t bytes) {
  const Fibre& self = *machine.current;
  const auto* byte = static_cast<const uint8_t*>(address);
  const uint64_t offset = uint64_t(byte - self.identity.arena);
  if (offset >= machine.shared_bytes) return;
  const Block& block = *self.block_state;
  for (uint64_t unit = offset / unit_bytes; unit <= (offset + bytes - 1) / unit_bytes; unit++)
    if (!reader_of(block, block.loads[unit])) block.loads[unit] = load_mark(self);
}

void store(const void* address, uint32_t bytes) {
  Fibre& self = *machine.current;
  const auto* byte = static_cast<const uint8_t*>(address);
  const uint64_t offset = uint64_t(byte - self.identity.arena);
  if (offset < machine.shared_bytes) {
    self.warp->unordered |= 1u << self.lane;
    self.stored = uint32_t(offset);
    return;
  }
  if (is_on_stack(self, byte)) return;
  const uint32_t number = buffer_of(byte, bytes);
  Shadow& shadow = shadows[number];
  shadow.has_stores = true;
  note_store(byte, bytes);
  const uint64_t first = uint64_t(byte - machine.buffers[number].start);
  for (uint64_t unit = first / unit_bytes; unit <= (first + bytes - 1) / unit_bytes; unit++)
    shadow.units[unit] = {uint32_t(&self - machine.fibres) + 1, self.fences, ++moments};
}

void check_loads(const uint8_t* destination, uint32_t bytes, Place place) {
  const Block& block = *machine.current->block_state;
  const uint64_t first = uint64_t(destination - block.arena) / unit_bytes;
  for (uint64_t unit = first; unit < first + bytes / unit_bytes; unit++) {
    const Fibre* reader = reader_of(block, block.loads[unit]);
    if (!reader) continue;
    const char* after = reader->wait.primitive ? reader->wait.primitive : "no primitive";
    misuse(place, "bulk_copy",
           "overwrites bytes of shared memory (from %lu on) which thread %u has loaded without waiting for them; a load"
           " that was issued has not read yet: wait_for_u32 with what came of it, before the stage is given back"
           " (the thread is now after %s at line %u)",
           (unsigned long)(unit * unit_bytes), reader->thread, after, unsigned(reader->wait.place.line()));
  }
}

void check_unit(const Buffer& buffer, uint64_t unit, const Stored& stored, Place place) {
  const Fibre& self = *machine.current;
  const Fibre& writer = machine.fibres[stored.fibre - 1];
  const bool writer_fenced = writer.fences != stored.fences;
  if (writer_fenced && self.fence_moment > stored.moment) return;
  misuse(place, "bulk_copy",
         "reads bytes of buffer %s (from %lu on) that block %u, thread %u stored in this launch; %s no"
         " fence_proxy_async since: the copy engine may not see the store",
         buffer.name, (unsigned long)(unit * unit_bytes), writer.block_state->index, writer.thread,
         writer_fenced ? "the thread that issues this copy has made" : "that thread has made");
}

void check_stores(const uint8_t* source, uint32_t bytes, Place place) {
  const uint32_t number = buffer_of(source, bytes);
  const Shadow& shadow = shadows[number];
  if (!shadow.has_stores) return;
  const uint64_t first = uint64_t(source - machine.buffers[number].start);
  for (uint64_t unit = first / unit_bytes; unit <= (first + bytes - 1) / unit_bytes; unit++)
    if (shadow.units[unit].fibre) check_unit(machine.buffers[number], unit, shadow.units[unit], place);
}

}  // namespace

namespace {

void* mapped(size_t bytes) {
  void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return start == MAP_FAILED ? nullptr : start;
}

}  // namespace

bool begin_launch() {
  uint64_t units = 0;
  for (uint32_t i = 0; i < machine.buffer_count; i++) units += units_of(machine.buffers[i].bytes);
  all_bytes = (units + 1) * sizeof(Stored);
  epoch_bytes = (units + 1) * unit_bytes;
  all_units = static_cast<Stored*>(mapped(all_bytes));
  all_epochs = static_cast<uint32_t*>(mapped(epoch_bytes));
  if (!all_units || !all_epochs) return false;
  uint64_t next = 0;
  for (uint32_t i = 0; i < machine.buffer_count; i++) {
    shadows[i] = {all_units + next, all_epochs + next * (unit_bytes / 4), false};
    next += units_of(machine.buffers[i].bytes);
  }
  moments = last_buffer = 0;
  noted.clear();
  notes = false;
  for (uint32_t i = 0; i < machine.buffer_count; i++) notes |= machine.buffers[i].is_noted != 0;
  return true;
}

void end_launch() {
  munmap(all_units, all_bytes);
  munmap(all_epochs, epoch_bytes);
}

const Overwritten* overwritten(uint64_t& count) {
  count = noted.size();
  return noted.data();
}

void note_store(const void* address, uint32_t bytes) {
  if (!notes) return;
  const auto* byte = static_cast<const uint8_t*>(address);
  for (uint32_t i = 0; i < machine.buffer_count; i++) {
    const Buffer& buffer = machine.buffers[i];
    if (!buffer.is_noted || !is_in(buffer, byte)) continue;
    const uint64_t first = uint64_t(byte - buffer.start);
    for (uint64_t word = first / 4; word <= (first + bytes - 1) / 4; word++) {
      uint32_t before;
      std::memcpy(&before, buffer.start + 4 * word, 4);
      noted.push_back({i, uint32_t(word), before});
    }
  }
}

void loads_have_read(Fibre& fibre) { fibre.waits++; }

void meets(Fibre& fibre) {
  fibre.waits++;
  fibre.warp->unordered &= ~(1u << fibre.lane);
  fibre.warp->passed_by &= ~(1u << fibre.lane);
}

void warp_meets(Warp& warp, bool orders_memory) {
  warp.passed_by = orders_memory ? 0 : warp.passed_by | warp.unordered;
  warp.unordered = 0;
}

void fence(Fibre& fibre) {
  fibre.fences++;
  fibre.fence_moment = ++moments;
}

void check_arrival(Place place, const char* primitive) {
  const Fibre& self = *machine.current;
  const uint32_t others = self.warp->passed_by & ~(1u << self.lane);
  if (!others) return;
  const Fibre& other = machine.fibres[self.warp->first_fibre + uint32_t(__builtin_ctz(others))];
  misuse(place, primitive,
         "thread %u of this warp has stored to shared memory (byte %u) before the lanes last met, and a shuffle orders no"
         " memory: put a warp_barrier before this arrival",
         other.thread, other.stored);
}

void check_copy(const uint8_t* destination, const uint8_t* source, uint32_t bytes, Place place) {
  check_loads(destination, bytes, place);
  check_stores(source, bytes, place);
}

#else

bool begin_launch() { return true; }
void end_launch() {}
const Overwritten* overwritten(uint64_t& count) {
  count = 0;
  return nullptr;
}
void note_store(const void*, uint32_t) {}
void loads_have_read(Fibre&) {}
void meets(Fibre&) {}
void warp_meets(Warp&, bool) {}
void fence(Fibre&) {}
void check_arrival(Place, const char*) {}
void check_copy(const uint8_t*, const uint8_t*, uint32_t, Place) {}

#endif

}  // namespace cheetah_emulator::watch

namespace cheetah_emulator {

#if defined(CHEETAH_EMULATOR_WATCH)

// A word's place among the epochs.
static uint32_t& epoch_of(const uint32_t* word) {
  const auto* byte = reinterpret_cast<const uint8_t*>(word);
  const uint32_t number = watch::buffer_of(byte, 4);
  return watch::shadows[number].epochs[uint64_t(byte - machine.buffers[number].start) / 4];
}

void tagged(const uint32_t* word, uint32_t epoch) { epoch_of(word) = epoch; }

void check_epochs(const uint32_t* words, uint32_t epoch, Place place, const char* primitive) {
  for (uint32_t i = 0; i < words_together; i++)
    if (const uint32_t found = epoch_of(words + i); found != epoch)
      misuse(place, primitive, "takes a word of epoch %u for one of epoch %u: the tag of both is the same", found, epoch);
}

#else

void tagged(const uint32_t*, uint32_t) {}
void check_epochs(const uint32_t*, uint32_t, Place, const char*) {}

#endif

}  // namespace cheetah_emulator

// The calls that g++ puts around accesses with -fsanitize=thread. Its own library is not linked: these are all there is.
#if defined(CHEETAH_EMULATOR_WATCH)

using cheetah_emulator::watch::load;
using cheetah_emulator::watch::note_store;
using cheetah_emulator::watch::store;

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define CHEETAH_WATCH(bytes)                                                              \
  void __tsan_read##bytes(void* address) { load(address, bytes); }                        \
  void __tsan_write##bytes(void* address) { store(address, bytes); }                      \
  void __tsan_unaligned_read##bytes(void* address) { load(address, bytes); }              \
  void __tsan_unaligned_write##bytes(void* address) { store(address, bytes); }

CHEETAH_WATCH(1)
CHEETAH_WATCH(2)
CHEETAH_WATCH(4)
CHEETAH_WATCH(8)
CHEETAH_WATCH(16)
#undef CHEETAH_WATCH

void __tsan_read_range(void* address, unsigned long bytes) { load(address, uint32_t(bytes)); }
void __tsan_write_range(void* address, unsigned long bytes) { store(address, uint32_t(bytes)); }

// Atomics are the primitives' and order themselves; the emulator runs one thing after another.
#define CHEETAH_WATCH_ATOMIC(bits)                                                                                  \
  uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t* word, int) { return *word; }                      \
  void __tsan_atomic##bits##_store(uint##bits##_t* word, uint##bits##_t value, int) {                               \
    note_store(word, bits / 8);                                                                                     \
    *word = value;                                                                                                  \
  }                                                                                                                 \
  uint##bits##_t __tsan_atomic##bits##_fetch_add(uint##bits##_t* word, uint##bits##_t value, int) {                 \
    note_store(word, bits / 8);                                                                                     \
    const uint##bits##_t before = *word;                                                                            \
    *word = before + value;                                                                                         \
    return before;                                                                                                  \
  }

CHEETAH_WATCH_ATOMIC(32)
CHEETAH_WATCH_ATOMIC(64)
#undef CHEETAH_WATCH_ATOMIC

}  // extern "C"

#endif
