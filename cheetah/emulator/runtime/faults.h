// A bad address in a kernel ends the launch with a report, not the process.
#pragma once

namespace cheetah_emulator {

// While it lives, faults of this thread inside a kernel become misuse; all others go where they went before.
// Empty under the race detector, which has handlers of its own and a process to itself.
class FaultGuard {
 public:
  FaultGuard();
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;
};

// Whether fibres run now (as opposed to the launcher or the poll).
void set_fibres_running(bool running);

}  // namespace cheetah_emulator
