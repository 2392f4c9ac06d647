#pragma once

#include <span>

#include "engine/engine.h"

namespace fulgur {

/// Every engine, in the order of preference.
std::span<const Engine* const> all_engines();

}  // namespace fulgur
