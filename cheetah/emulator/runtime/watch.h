// What the kernel's own loads and stores are held to, where its text is compiled with calls around them (WATCHED).
//
// Three rules that no schedule shows, because here an instruction is done when the next one begins, and there is one
// proxy. A load from shared memory has read only once its thread has waited for it (wait_for_u32, or a barrier of the
// block): until then no bulk copy may be issued over its bytes. An ordinary store is seen by the copy engine only if the
// storing thread has made a fence_proxy_async behind it, and the thread that issues the copy one since. A lane that
// arrives at an mbarrier speaks for its warp: what other lanes stored to shared memory before a shuffle that they shared
// with it is not ordered before the arrival without a warp barrier, since a shuffle orders no memory. (Not what they
// have stored since: lanes that ran ahead of the arrival have, too; the race detector knows those apart.) Besides, every
// store must go to memory that the launch has; and beside each tagged word stands its whole epoch: a wait must not end
// with a word of another one, whose tag is the same.
#pragma once

#include "machine.h"

namespace cheetah_emulator::watch {

#if defined(CHEETAH_EMULATOR_WATCH)
constexpr bool enabled = true;
#else
constexpr bool enabled = false;
#endif

// Memory for what is known of the launch's buffers; false when the system has not enough.
bool begin_launch();
void end_launch();

// A store to 4 bytes of a buffer that is noted: number `word` of buffer `buffer`, and what they held before.
struct Overwritten {
  uint32_t buffer, word, before;
};

// All of them, in their order, until the next launch begins; the count is in `count`.
const Overwritten* overwritten(uint64_t& count);
// Called before bytes are stored otherwise than by the kernel's text.
void note_store(const void* address, uint32_t bytes);

// The running thread's loads have read; its stores are seen by who meets it.
void loads_have_read(Fibre& fibre);
void meets(Fibre& fibre);
// All lanes of a warp met, in a warp barrier or in a collective that orders no memory.
void warp_meets(Warp& warp, bool orders_memory);
void fence(Fibre& fibre);

// Misuse unless the running thread may say that its whole warp has come.
void check_arrival(Place place, const char* primitive);
// Misuse unless a copy may be issued now from `source` to `destination`.
void check_copy(const uint8_t* destination, const uint8_t* source, uint32_t bytes, Place place);

}  // namespace cheetah_emulator::watch
