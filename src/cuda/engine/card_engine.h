#pragma once

#include "cuda/common/card.h"
#include "engine/engine.h"

namespace fulgur::cuda {

/// An engine that plans calls for a card that need not be in this machine, and predicts their
/// times. It needs neither a driver nor NVRTC, and runs nothing. `card`: one of known_cards().
const Engine& card_engine(const Card& card);

}  // namespace fulgur::cuda
