// Several GPUs (ranks) in one machine.
#pragma once

#include <string>

#include "machine.h"

namespace cheetah_emulator {

// At the begin of a launch, when its buffers are known.
void begin_ranks();

// "block 3", or of several ranks "rank 1, block 3".
std::string block_name(const Block& block);

// Misuse where the running fibre touches another rank's memory.
void check_owner(const Buffer& buffer, Place place, const char* primitive);
// The running fibre waits for words of a buffer.
void note_wait(const Buffer& buffer, const void* words, uint32_t bytes, Place place, const char* primitive);

void land_a_store();
void land_all_stores();

// -- words.cpp

const Buffer* buffer_of(const void* address);
void check_bounds(const Buffer& buffer, const void* address, uint64_t bytes, uint64_t alignment, Place place,
                  const char* primitive);

}  // namespace cheetah_emulator
