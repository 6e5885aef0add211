// The memory of a launch: stacks, states and arenas, mapped once and used again by later launches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "machine.h"
#include "sanitizer.h"
#include "watch.h"

namespace cheetah_emulator {

constexpr size_t stack_bytes = sanitizer::enabled ? 256 * 1024 : 64 * 1024;
constexpr size_t arena_alignment = 1024;

// Points the machine's arrays at memory for its counts. False when the system has not enough.
bool lay_out_memory();
void release_memory();

// How many marks of loads a block has, where they are kept.
size_t load_marks();

// The stack of a fibre: its bytes begin `stack_bytes` below its top.
uint8_t* stack_of(uint32_t fibre);
// Where a copy of it is kept.
uint8_t* fenced_stack_of(uint32_t fibre);

// True when something has been written over the low end of a stack.
bool overflowed(const Fibre& fibre);

}  // namespace cheetah_emulator
