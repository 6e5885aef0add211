// The C interface of a compiled program: one function that runs one launch.
#pragma once

#include <cstdint>

#include "machine.h"
#include "watch.h"

extern "C" {

// Laid out as cheetah/emulator/program.py declares it.
struct CheetahLaunch {
  uint32_t grid[3], block[3];
  uint64_t shared_bytes;
  uint32_t scheduler, buffer_count;
  uint64_t seed, switch_limit;       // switch_limit 0: none
  void* const* arguments;            // one pointer to the value of each parameter, of rank 0, then of rank 1, ...
  const cheetah_emulator::Buffer* buffers;
  int (*poll)();                     // called every few milliseconds; not 0 ends the launch; may be null
  uint32_t outcome;
  uint32_t chunk_limit;              // chunks of a block under way; 0: any number
  uint32_t most_chunks;              // reached
  uint32_t ranks;                    // GPUs, with a grid each
  uint64_t switches, collectives, copies, copied_bytes;
  char* report;                      // zero-terminated, cut to report_bytes
  uint64_t report_bytes;
  uint64_t parameters;               // of a rank
  const cheetah_emulator::watch::Overwritten* overwritten;  // stores to buffers that are noted, until the next launch
  uint64_t overwritten_count;
};

// Runs the launch to its end; outcome and report say how it ended. One launch at a time in a process.
__attribute__((visibility("default"))) void cheetah_emulator_launch(CheetahLaunch* launch);

// Gives the memory of stacks and states back; the next launch maps it anew.
__attribute__((visibility("default"))) void cheetah_emulator_release();

// The kernel, its arguments unpacked: written beside the kernel text by cheetah/emulator/build.py.
__attribute__((visibility("hidden"))) void cheetah_emulator_kernel(void* const* arguments);

}  // extern "C"
