// How the 32 lanes of a warp meet: each leaves its operands in its slot, the last one computes for all.
#pragma once

#include "machine.h"
#include "watch.h"

namespace cheetah_emulator {

[[noreturn]] inline void diverged(const Warp& warp, Place place, const char* primitive) {
  misuse(place, primitive, "diverged: %u other lanes of this warp are in %s at %s:%u; all lanes must meet in one call",
         unsigned(__builtin_popcount(warp.arrived)), warp.primitive, warp.place.file_name(),
         unsigned(warp.place.line()));
}

// Leaves when all lanes of the warp have come; `compute` runs once, by the last.
template <class Compute>
void rendezvous(Collective collective, Place place, const char* primitive, Compute compute) {
  Fibre& self = *machine.current;
  Warp& warp = *self.warp;
  if (!warp.arrived) {
    warp.collective = collective;
    warp.place = place;
    warp.primitive = primitive;
  } else if (warp.collective != collective || warp.place.line() != place.line()) {
    diverged(warp, place, primitive);
  }
  const uint32_t bit = 1u << self.lane;
  warp.arrived |= bit;
  if (warp.arrived != warp.lanes) {
    block_on(WaitKind::collective, primitive, place, &warp, 0);
    return;
  }
  compute(warp);
  watch::warp_meets(warp, collective == Collective::warp_barrier);
  warp.arrived = 0;
  if (warp.waits_are_noted) {
    for (WordWaits& waits : warp.word_waits) waits = {};
    warp.waits_are_noted = false;
  }
  machine.collectives++;
  wake_lanes(warp, warp.lanes & ~bit);
  note(place, primitive);
  if (machine.scheduler != Scheduler::round_robin) yield();
}

inline Slot& my_slot() {
  const Fibre& self = *machine.current;
  return self.warp->slots[self.lane];
}

inline void require_whole_warp(Place place, const char* primitive) {
  const uint32_t lanes = machine.current->warp->lanes;
  if (lanes != ~0u)
    misuse(place, primitive, "needs 32 lanes, this warp has %u: launch a multiple of 32 threads",
           unsigned(__builtin_popcount(lanes)));
}

}  // namespace cheetah_emulator
