#pragma once

#include <span>
#include <string>
#include <string_view>

#include "cuda/common/card.h"
#include "cuda/device/gpu.h"

namespace fulgur::cuda {

/// Cards there are, with the peaks that their makers state. Each is compiled for as its compute
/// capability asks; which kernels that means is for architecture_of() to say.
std::span<const Card> known_cards();

/// The one of a name in small letters and without the makers' words: "a100", "3090" or "rtx-3090",
/// "rtx-pro-6000". Throws Error(kInvalidArgument) for another, which names all.
const Card& card_called(const std::string& name);

/// The one that the driver calls so, with as many SMs; null where it is not known.
const Card* known_card(std::string_view device_name, int capability, int sms);

/// A device by what its driver says, and by its rate of mma.sync, which is known of its model or
/// measured. Where FULGUR_CUDA_TARGET is set, with no more shared memory than its capability has.
Card card_of_device(Gpu& gpu);

}  // namespace fulgur::cuda
