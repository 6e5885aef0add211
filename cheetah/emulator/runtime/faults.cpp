#include "faults.h"

#include <pthread.h>
#include <signal.h>

#include <cstdio>

#include "machine.h"
#include "ranks.h"
#include "sanitizer.h"

namespace cheetah_emulator {
namespace {

constexpr int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr int signal_count = 4;

struct sigaction previous[signal_count];
stack_t previous_stack;
alignas(64) char handler_stack[64 * 1024];
pthread_t launching_thread;
volatile bool fibres_running = false;

const char* name_of(int signal) {
  switch (signal) {
    case SIGSEGV: return "segmentation fault (bad or misaligned address)";
    case SIGBUS: return "bus error (bad address)";
    case SIGFPE: return "division by zero";
    default: return "illegal instruction";
  }
}

// The handler never returns for a fault of ours: it runs on a stack of its own and leaves to the launcher.
void on_fault(int signal, siginfo_t* info, void*) {
  if (!fibres_running || !pthread_equal(pthread_self(), launching_thread)) {
    for (int i = 0; i < signal_count; i++)
      if (signals[i] == signal) sigaction(signal, &previous[i], nullptr);
    return;  // the instruction faults again, under the handler that was there before
  }
  const Fibre& self = *machine.current;
  int used = std::snprintf(machine.message, message_bytes, "%s, thread %u: %s, address %p",
                           block_name(*self.block_state).c_str(), self.thread, name_of(signal), info->si_addr);
  if (self.wait.primitive)
    std::snprintf(machine.message + used, message_bytes - used, ", after %s at %s:%u", self.wait.primitive,
                  self.wait.place.file_name(), unsigned(self.wait.place.line()));
  stop(Outcome::misuse);
}

}  // namespace

FaultGuard::FaultGuard() {
  if (sanitizer::enabled) return;
  launching_thread = pthread_self();
  stack_t stack = {};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &previous_stack);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < signal_count; i++) sigaction(signals[i], &action, &previous[i]);
}

FaultGuard::~FaultGuard() {
  if (sanitizer::enabled) return;
  for (int i = 0; i < signal_count; i++) sigaction(signals[i], &previous[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
}

void set_fibres_running(bool running) { fibres_running = running; }

}  // namespace cheetah_emulator
