#include "context.h"

#if defined(__x86_64__) && !defined(CHEETAH_EMULATOR_UCONTEXT)

// Signal masks and floating-point modes are the same in all fibres and are not saved.
asm(R"(
.text
.p2align 4
.type cheetah_emulator_switch, @function
.hidden cheetah_emulator_switch
.globl cheetah_emulator_switch
cheetah_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cheetah_emulator_switch, .-cheetah_emulator_switch
)");

namespace cheetah_emulator {

void* prepare_context(uint8_t* stack, size_t bytes, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(15);
  auto* words = reinterpret_cast<uint64_t*>(top);
  words[-1] = 0;  // where a return address would be: the ABI wants %rsp + 8 to be a multiple of 16 at entry
  words[-2] = reinterpret_cast<uint64_t>(entry);
  for (int i = 3; i <= 8; i++) words[-i] = 0;
  return words - 8;
}

}  // namespace cheetah_emulator

#else

#include <ucontext.h>

namespace cheetah_emulator {

static ucontext_t launcher_context;

// The ucontext lies at the high end of the stack it describes.
void* prepare_context(uint8_t* stack, size_t bytes, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + bytes - sizeof(ucontext_t)) & ~uintptr_t(63);
  auto* context = reinterpret_cast<ucontext_t*>(top);
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = reinterpret_cast<uint8_t*>(context) - stack;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}

// A null *from is the launcher's, whose context has no stack of ours.
void switch_context(void** from, void* to) {
  if (!*from) *from = &launcher_context;
  swapcontext(static_cast<ucontext_t*>(*from), static_cast<ucontext_t*>(to));
}

}  // namespace cheetah_emulator

#endif
