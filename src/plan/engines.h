#pragma once

#include <span>
#include <string>

#include "engine/engine.h"

namespace fulgur {

/// Every engine, in the order of preference.
std::span<const Engine* const> all_engines();

/// The engine that plans for the card of this name. Throws Error(kInvalidArgument) for an unknown
/// card.
const Engine& engine_for_card(const std::string& card);

/// The engine of calls other than attention, on the device of the tensor `like`: the one of this
/// name, or the first one. Throws Error(kInvalidArgument) for an unknown name.
const Engine& engine_on(Device device, const std::string& name, const char* like);

}  // namespace fulgur
