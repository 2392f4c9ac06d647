#pragma once

#include <span>
#include <string>
#include <string_view>

#include "cuda/common/card.h"
#include "cuda/device/gpu.h"

namespace fulgur::cuda {

/// Known cards, with the peak rates that their vendors state. The target of a card follows from its
/// compute capability, and its kernels from architecture_of() the target.
std::span<const Card> known_cards();

/// The card of a name in lower case, without the vendor's name: "a100", "3090" or "rtx-3090",
/// "rtx-pro-6000". Throws Error(kInvalidArgument), which lists all names, for an unknown one.
const Card& card_called(const std::string& name);

/// The card with this name in the driver and as many SMs; null if it is not known.
const Card* known_card(std::string_view device_name, int capability, int sms);

/// The card of a device, from its driver and from its rate of mma.sync, which is that of a known
/// card or measured. If FULGUR_CUDA_TARGET is set, it has at most the shared memory of that
/// capability.
Card card_of_device(Gpu& gpu);

}  // namespace fulgur::cuda
