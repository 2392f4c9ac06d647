#pragma once

#include <string>

namespace emulator {

/// Makes of a kernel's text what the host's compiler and device.h read: inline PTX becomes calls of
/// emulator::execute, whose operands are those of the asm statement, and shared memory what the
/// emulator has for the CTA.
std::string translated(const std::string& text);

}  // namespace emulator
