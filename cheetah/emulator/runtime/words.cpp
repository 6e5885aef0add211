// Waiting for words in global memory, and the bounds of what the launch was given.
//
// A waiting fibre sleeps in a bucket of its 32-byte line; who writes a word there through a primitive looks whether the
// whole condition holds now and wakes it. The loads that the kernel text sees stand in cheetah_emulator.h.
#include "machine.h"
#include "ranks.h"

namespace cheetah_emulator {
namespace {

uint64_t line_of(const void* address) { return reinterpret_cast<uint64_t>(address) >> 5; }

FibreList& bucket_of(const void* address) {
  return machine.word_waiters[(line_of(address) * 0x9E3779B97F4A7C15ull >> 32) % wait_buckets];
}

uint64_t read(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }

}  // namespace

const Buffer* buffer_of(const void* address) {
  const auto* byte = static_cast<const uint8_t*>(address);
  for (uint32_t i = 0; i < machine.buffer_count; i++) {
    const Buffer& buffer = machine.buffers[i];
    if (byte >= buffer.start && byte < buffer.start + buffer.bytes) return &buffer;
  }
  return nullptr;
}

namespace {

// One bit for a line of the text.
uint64_t bit_of(Place place) { return uint64_t(1) << (place.line() * 0x9E3779B97F4A7C15ull >> 58); }

// A lane that waits on behalf of its warp meets the other lanes behind its wait. Else they poll beside it, each for
// itself, which no result shows. Told here: since the warp last met, all lanes have waited on this line, and one came to
// it from a line on which no other lane has waited.
void check_together(const Warp& warp, uint64_t bit, Place place, const char* primitive) {
  uint64_t once = 0, more = 0;
  for (const WordWaits& lane : warp.word_waits) {
    if (!(lane.lines & bit)) return;
    more |= once & lane.lines;
    once |= lane.lines;
  }
  for (uint32_t lane = 0; lane < warp_lanes; lane++) {
    const WordWaits& waits = warp.word_waits[lane];
    if (waits.last == bit && waits.before_last & once & ~more)
      misuse(place, primitive,
             "lane %u of this warp alone has waited for words before, as if for all, and the others wait here without"
             " having met it: the lanes of the warp run apart and poll side by side; put a warp_barrier behind its wait",
             lane);
  }
}

void sleep_on(const Wait& wait) {
  append(bucket_of(wait.object), *machine.current);
  block_on(wait.kind, wait.primitive, wait.place, wait.object, wait.value);
}

bool tags_are_there(const Wait& wait) {
  const auto* words = static_cast<const uint32_t*>(wait.object);
  for (uint32_t i = 0; i < words_together; i++)
    if ((__atomic_load_n(words + i, __ATOMIC_RELAXED) ^ wait.value) & tag_bits) return false;
  return true;
}

}  // namespace

bool words_are_there(const Fibre& fibre) {
  if (fibre.wait.kind == WaitKind::tags) return tags_are_there(fibre.wait);
  const auto* words = static_cast<const uint64_t*>(fibre.wait.object);
  if (fibre.wait.kind == WaitKind::at_least) return read(words) >= fibre.wait.value;
  for (uint32_t i = 0; i < words_together; i++)
    if (read(words + i) >> 32 != fibre.wait.value) return false;
  return true;
}

void words_written(const void* address) {
  FibreList& bucket = bucket_of(address);
  if (!bucket.first) return;
  FibreList still_waiting;
  for (Fibre* fibre = bucket.first; fibre;) {
    Fibre* next = fibre->next;
    if (line_of(fibre->wait.object) == line_of(address) && words_are_there(*fibre)) wake(*fibre);
    else append(still_waiting, *fibre);
    fibre = next;
  }
  bucket = still_waiting;
}

void wait_for_flags(const uint64_t* words, uint32_t epoch, Place place, const char* primitive) {
  sleep_on({WaitKind::flags, primitive, place, words, epoch});
}

void wait_for_tags(const uint32_t* words, uint32_t tag, Place place, const char* primitive) {
  sleep_on({WaitKind::tags, primitive, place, words, tag});
}

void wait_for_at_least(const uint64_t* word, uint64_t value, Place place) {
  sleep_on({WaitKind::at_least, "wait_at_least_u64", place, word, value});
}

void check_bounds(const Buffer& buffer, const void* address, uint64_t bytes, uint64_t alignment, Place place,
                  const char* primitive) {
  const uint64_t offset = uint64_t(static_cast<const uint8_t*>(address) - buffer.start);
  if (offset + bytes > buffer.bytes)
    misuse(place, primitive, "bytes %lu to %lu of buffer %s, which has %lu", (unsigned long)offset,
           (unsigned long)(offset + bytes), buffer.name, (unsigned long)buffer.bytes);
  if (reinterpret_cast<uint64_t>(address) % alignment)
    misuse(place, primitive, "byte %lu of buffer %s (at %p) is not %lu-byte aligned", (unsigned long)offset,
           buffer.name, address, (unsigned long)alignment);
}

namespace {

// The buffer that an access of `bytes` bytes lies in; misuse if it leaves it, or lies in none, or in another rank's.
const Buffer& checked_buffer(const void* address, uint64_t bytes, uint64_t alignment, Place place,
                             const char* primitive) {
  const Buffer* buffer = buffer_of(address);
  if (!buffer) misuse(place, primitive, "%p lies in no buffer of this launch", address);
  check_bounds(*buffer, address, bytes, alignment, place, primitive);
  check_owner(*buffer, place, primitive);
  return *buffer;
}

}  // namespace

void begin_word_wait(const void* words, uint32_t word_bytes, Place place, const char* primitive) {
  const uint32_t bytes = word_bytes * words_together;
  preemption_point(place, primitive);
  note_wait(checked_buffer(words, bytes, bytes, place, primitive), words, bytes, place, primitive);
  Warp& warp = *machine.current->warp;
  WordWaits& own = warp.word_waits[machine.current->lane];
  const uint64_t bit = bit_of(place);
  if (!(own.lines & bit)) own = {own.lines | bit, bit, own.last};  // a loop comes back to a line from any other
  warp.waits_are_noted = true;
  check_together(warp, bit, place, primitive);
}

void begin_counter_wait(const uint64_t* counter, Place place, const char* primitive) {
  preemption_point(place, primitive);
  note_wait(checked_buffer(counter, 8, 8, place, primitive), counter, 8, place, primitive);
}

void check_constant(const void* address, uint32_t bytes, Place place, const char* primitive) {
  const Buffer& buffer = checked_buffer(address, bytes, 1, place, primitive);
  if (!buffer.poison) return;
  const auto* words = static_cast<const uint32_t*>(address);
  for (uint32_t i = 0; i < bytes / 4; i++)
    if (words[i] == uint32_t(buffer.poison))
      misuse(place, primitive, "byte %lu of buffer %s holds nothing (%u): it lies behind what the host wrote there",
             (unsigned long)(reinterpret_cast<const uint8_t*>(words + i) - buffer.start), buffer.name, words[i]);
}

void check_global(const void* address, uint64_t bytes, uint64_t alignment, Place place, const char* primitive) {
  preemption_point(place, primitive);
  checked_buffer(address, bytes, alignment, place, primitive);
}

}  // namespace cheetah_emulator
