// Switching stacks. A suspended context is its stack pointer (x86-64) or a ucontext_t (elsewhere).
#pragma once

#include <cstddef>
#include <cstdint>

namespace cheetah_emulator {

// A context that will call `entry`, which never returns, on the stack [stack, stack + bytes).
void* prepare_context(uint8_t* stack, size_t bytes, void (*entry)());

#if defined(__x86_64__) && !defined(CHEETAH_EMULATOR_UCONTEXT)
// Saves the callee-saved registers and the stack pointer in *from, takes those of `to`: about 5 ns, no system call.
extern "C" void cheetah_emulator_switch(void** from, void* to);
inline void switch_context(void** from, void* to) { cheetah_emulator_switch(from, to); }
#else
void switch_context(void** from, void* to);
#endif

}  // namespace cheetah_emulator
