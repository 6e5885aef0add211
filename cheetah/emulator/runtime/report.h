#pragma once

#include <string>

namespace cheetah_emulator {

// One line for each (block, place, state) of the machine as it stands. Called by the launcher, not by fibres.
std::string waiting_report();

}  // namespace cheetah_emulator
