#pragma once

#include <span>
#include <string>

#include "engine/engine.h"

namespace fulgur {

/// Every engine, in the order of preference.
std::span<const Engine* const> all_engines();

/// The engine that plans for a card by its name. Throws Error(kInvalidArgument) for an unknown one.
const Engine& engine_for_card(const std::string& card);

/// The engine of calls that are no attention: of the device of the tensor `like`, the first one or
/// the one of this name. Throws Error(kInvalidArgument) where there is none of that name.
const Engine& engine_on(Device device, const std::string& name, const char* like);

}  // namespace fulgur
