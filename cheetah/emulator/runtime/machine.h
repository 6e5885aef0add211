// The emulated machine: its fibres, warps, blocks and barriers, and how a fibre stops and goes on.
//
// One operating-system thread runs everything: all blocks of the grid are resident, every CUDA thread is a fibre with
// its own stack. A fibre gives the processor away only inside a primitive; who goes next is the scheduler's choice
// (schedule.cpp). A failed check or a deadlock switches to the launcher, which drops all fibres and reports.
// Nothing here allocates while fibres run: everything is laid out at the launch (launch.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cheetah_emulator.h"

namespace cheetah_emulator {

constexpr uint32_t warp_lanes = 32;
constexpr uint32_t named_barriers = 16;
constexpr size_t message_bytes = 4096;

enum class Scheduler : uint32_t { round_robin, random, priority };

enum class Outcome : uint32_t { done, deadlock, misuse, switch_limit, interrupted, poll };

enum class Collective : uint8_t {
  none, warp_barrier, shuffle_xor, shuffle, sum, mma, mma_halves, mma_bytes, mma_2of4, mma_2of4_bytes, rows, transpose, wgmma_fence, wgmma, wgmma_commit,
  wgmma_wait
};

enum class WaitKind : uint8_t { none, collective, barrier, mbarrier, flags, tags, at_least };

struct Random {  // splitmix64: small, fast, and every seed is a good one
  uint64_t state;
  uint64_t next() {
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  uint32_t below(uint32_t limit) { return uint32_t((next() >> 32) * limit >> 32); }
  bool one_in(uint32_t count) { return below(count) == 0; }
};

struct Fibre;
struct WarpProducts;
struct Warp;
struct Block;

struct FibreList {  // first in, first out; links are the fibres' own
  Fibre* first = nullptr;
  Fibre* last = nullptr;
};

struct NamedBarrier {
  uint32_t expected, arrived, generation;
  Place place;       // of the first arrival of this generation, with its primitive, for disagreements
  const char* primitive;
  FibreList waiting;
  char order[2];     // addresses that carry happens-before, one for odd and one for even generations
};

struct MBarrier {
  uint64_t* storage;
  uint32_t arrivals, pending, phase;
  int64_t transaction_bytes;
  FibreList waiting;
  Place place;       // of its initialisation
  bool is_chunk;     // copies of memory that is read once are under way
  char order[2];
};

struct BulkCopy {
  uint8_t* destination;
  const uint8_t* source;
  uint32_t bytes, thread;
  MBarrier* barrier;
  Place place;
  const void* caller;       // address in the kernel text, for race reports
  void* sanitizer_fibre;
};

struct Wait {
  WaitKind kind = WaitKind::none;
  const char* primitive = nullptr;
  Place place;
  const void* object = nullptr;
  uint64_t value = 0;       // parity, epoch, tag or target
};

struct Slot {  // what a lane brings to a collective and takes from it
  union { uint32_t word; float number; };
  uint32_t argument;
  uint32_t a[4], b[4], metadata;
  union { float c[4]; int32_t sums_of_bytes[4]; };
  const uint32_t* a_place;  // of a wgmma: where its registers are kept
  float* sums;
  uint64_t descriptor;
  void* row;                // of an 8x8 matrix
  uint32_t* rows[4];
};

struct Fibre {
  Identity identity;
  void* stack_pointer;
  Fibre* next;              // in one list at a time: a barrier's, an mbarrier's or a hash bucket's
  Warp* warp;
  Block* block_state;
  uint32_t thread, lane;
  bool finished;
  Wait wait;                // what it waits for, or the last primitive it called
  void* sanitizer_fibre;
  uint8_t* stack;           // lowest address; holds the canary
  uint64_t waits;           // watched: for loads, so far
  uint64_t fence_moment;    // watched: when it made its last proxy fence
  uint32_t fences;          // watched: that it has made
  uint32_t stored;          // watched: the byte of shared memory that it stored to last
  uint32_t system_scope;    // not 0: it waits in the scope of the system
  uint8_t* fenced;          // its stack, from `fenced_from` on, as its last wgmma_fence found it; byte for byte
  const uint8_t* fenced_from;  // null: it has made none
};

struct WordWaits {          // on which lines a lane has waited for words since it met others, a bit a line
  uint64_t lines, last, before_last;
};

struct Warp {
  uint32_t runnable;        // a bit a lane
  uint32_t lanes;           // those that exist
  uint32_t arrived;         // at the collective
  Collective collective;
  const char* primitive;
  Place place;
  uint32_t first_fibre;
  uint32_t position;        // in the machine's list of runnable warps
  uint32_t priority;
  uint32_t block;
  uint32_t generation;
  bool waits_are_noted;     // in `word_waits`, since the warp last met
  WordWaits word_waits[warp_lanes];
  uint32_t unordered;       // watched: lanes with stores to shared memory that no barrier has ordered yet
  uint32_t passed_by;       // watched: those whose stores came before a collective that orders no memory
  char order[2];
  Slot slots[warp_lanes];
  WarpProducts* products;   // of wgmma, in flight
};

struct Block {
  uint8_t* arena;
  uint32_t index, live_threads, thread_count, first_fibre;
  uint32_t rank_number;     // which of the GPUs it is on; `index` counts the blocks of all
  NamedBarrier barriers[named_barriers];
  uint32_t mbarrier_count;
  MBarrier* mbarriers;
  uint32_t copy_count, engine_priority, rank;
  BulkCopy* copies;         // in flight, in the order in which they were issued
  uint32_t chunks;          // mbarriers to which memory that is read once is under way
  uint64_t* loads;          // watched: of each 16 bytes of the arena, whose load of them may be under way
};

struct Buffer {
  const uint8_t* start;
  uint64_t bytes;
  const char* name;
  uint64_t poison;          // not 0: a word of which the low half is this one's is read by nobody
  uint32_t rank, has_peers; // whose memory it is; whether other ranks have its address
  uint64_t is_noted;        // whether stores to it are noted, in a watched run
};

constexpr uint32_t every_rank = ~0u;  // of memory that is the host's, or that several ranks were given

constexpr uint32_t most_buffers = 256;
constexpr uint32_t mbarriers_a_block = 1024;
constexpr uint32_t copies_a_block = 1024;
constexpr uint32_t wait_buckets = 4096;
constexpr uint32_t words_together = 4;  // flagged or tagged words that a thread waits for together

struct Machine {
  Fibre* fibres;
  Warp* warps;
  Block* blocks;
  uint32_t fibre_count, warp_count, block_count, warps_a_block;
  uint32_t rank_count;
  uint32_t rank_priorities[8];      // drawn from the seed, where ranks are ranked first: one far ahead of another
  bool ranks_ranked_first;
  uint32_t live_blocks;
  uint64_t shared_bytes;

  uint32_t runnable_count;
  uint32_t* runnable_warps;         // in no order
  uint64_t* runnable_bits;          // the same, a bit a warp
  uint32_t copies_in_flight;
  uint32_t late_stores;             // to other ranks, which have not landed

  Scheduler scheduler;
  Random random;
  uint32_t copy_patience;           // how much rarer a copy lands than a warp runs, drawn from the seed
  uint32_t change_period;           // how rarely priorities change, in decisions, drawn from the seed
  bool blocks_ranked_first;         // a whole block goes before another, drawn from the seed
  Warp* priority_warp;              // the one that the priority scheduler lets run on

  uint64_t switches, calls, collectives, copies, copied_bytes;
  uint32_t chunk_limit, most_chunks;  // in flight in a block: allowed (0: any number), and reached
  uint64_t check_at, switch_limit;  // in switches
  Fibre* current;
  void* launcher_stack_pointer;
  void* launcher_sanitizer_fibre;

  const Buffer* buffers;
  uint32_t buffer_count;
  FibreList word_waiters[wait_buckets];

  Outcome outcome;
  char message[message_bytes];
};

extern Machine machine;

// -- schedule.cpp

// Makes a blocked fibre runnable.
void wake(Fibre& fibre);
void wake_all(FibreList& list);
void wake_lanes(Warp& warp, uint32_t lanes);
// Blocks the running fibre on a `Wait` of these fields and returns when somebody has woken it. They come in registers:
// a structure that was just written field by field and is copied whole stalls the processor for as long as a switch takes.
void block_on(WaitKind kind, const char* primitive, Place place, const void* object, uint64_t value);
// New random priorities, for the priority scheduler.
void draw_priority(Warp& warp);
void draw_priorities(Block& block);
// Lets others run; the running fibre stays runnable.
void yield();
// Called by a fibre whose kernel function has returned. Never returns.
[[noreturn]] void finish_current();
// Gives the launcher the processor for good (any outcome but poll).
[[noreturn]] void stop(Outcome outcome);
// Reports a misuse of the running fibre: "block 0, thread 3: PRIMITIVE at FILE:LINE: " + the message.
[[noreturn, gnu::format(printf, 3, 4)]] void misuse(Place place, const char* primitive, const char* format, ...);

// -- copies.cpp

void land_copy(Block& block, uint32_t index);
void land_any_copy();

// -- mbarriers.cpp

void complete_transaction(Block& block, MBarrier& barrier, uint32_t bytes);

// -- warpgroup.cpp

void begin_products(WarpProducts& products);
// Misuse if a copy to these bytes of shared memory would change what a wgmma in flight reads.
void check_no_product_reads(const Block& block, const uint8_t* destination, uint32_t bytes, Place place);
// Misuse if the block ends with a wgmma in flight, or its warpgroups' warps have issued different ones.
void check_products_ended(const Block& block);

// -- words.cpp

bool words_are_there(const Fibre& fibre);

// -- small shared things

inline void append(FibreList& list, Fibre& fibre) {
  fibre.next = nullptr;
  if (list.last) list.last->next = &fibre; else list.first = &fibre;
  list.last = &fibre;
}

inline void note(Place place, const char* primitive) {
  machine.current->wait.place = place;
  machine.current->wait.primitive = primitive;
}

// An uninstrumented copy that is not the C library's: the race detector intercepts that one.
inline void copy_bytes(void* destination, const void* source, size_t bytes) {
#if defined(__x86_64__)
  asm volatile("rep movsb" : "+D"(destination), "+S"(source), "+c"(bytes) : : "memory");
#else
  auto* to = static_cast<volatile uint8_t*>(destination);
  auto* from = static_cast<const uint8_t*>(source);
  for (size_t i = 0; i < bytes; i++) to[i] = from[i];
#endif
}

inline void fill_bytes(void* destination, uint8_t value, size_t bytes) {
#if defined(__x86_64__)
  asm volatile("rep stosb" : "+D"(destination), "+c"(bytes) : "a"(value) : "memory");
#else
  auto* to = static_cast<volatile uint8_t*>(destination);
  for (size_t i = 0; i < bytes; i++) to[i] = value;
#endif
}

}  // namespace cheetah_emulator
