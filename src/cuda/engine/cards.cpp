#include "cuda/engine/cards.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "cuda/engine/mma_rate.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

/// A card by its SMs, MB of L2 cache, GB/s of memory, MHz, and FLOP per clock and SM.
constexpr Card card(std::string_view name, int capability, int sms, int l2_megabytes,
                    double gigabytes, double megahertz, double mma_rate) {
  const Capability& row = capability_row(capability);
  const auto form = capability == 90 ? Target::Form::kSpecific : Target::Form::kCubin;
  return {.name = name,
          .sms = sms,
          .shared_bytes = row.shared_bytes,
          .l2_bytes = int64_t{l2_megabytes} << 20,
          .bytes_per_cycle = 1e3 * gigabytes / megahertz,
          .megahertz = megahertz,
          .capability = capability,
          .target = {capability, form},
          .sm_shared_bytes = row.sm_shared_bytes,
          .mma_rate = mma_rate};
}

constexpr std::array kCards = {
    card("T4", 75, 40, 4, 320, 1590, 1024),
    card("RTX 2080 Ti", 75, 68, 5, 616, 1545, 512),
    card("Quadro RTX 8000", 75, 72, 6, 672, 1770, 1024),
    card("A100", 80, 108, 40, 2039, 1410, 2048),
    card("A30", 80, 56, 24, 933, 1440, 2048),
    card("A10", 86, 72, 6, 600, 1695, 1024),
    card("A10G", 86, 80, 6, 600, 1710, 512),
    card("A40", 86, 84, 6, 696, 1740, 1024),
    card("RTX A6000", 86, 84, 6, 768, 1800, 1024),
    card("RTX 3080", 86, 68, 5, 760, 1710, 512),
    card("RTX 3090", 86, 82, 6, 936, 1695, 512),
    card("L4", 89, 58, 48, 300, 2040, 1024),
    card("L20", 89, 92, 96, 864, 2520, 512),
    card("L40", 89, 142, 96, 864, 2490, 512),
    card("L40S", 89, 142, 96, 864, 2520, 1024),
    card("RTX 6000 Ada", 89, 142, 96, 960, 2505, 1024),
    card("RTX 4080", 89, 76, 64, 717, 2505, 512),
    card("RTX 4090", 89, 128, 72, 1008, 2520, 512),
    card("H100", 90, 132, 50, 3350, 1755, 2560),
    card("H100 PCIe", 90, 114, 50, 2000, 1755, 2560),
    card("H200", 90, 132, 50, 4800, 1755, 2560),
    card("B200", 100, 148, 126, 8000, 1965, 2048),
    card("RTX 5080", 120, 84, 64, 960, 2617, 512),
    card("RTX 5090", 120, 170, 96, 1792, 2407, 512),
    card("RTX PRO 6000", 120, 188, 128, 1792, 2617, 1024),
    card("GB10", 121, 48, 24, 273, 2530, 1024),
};

/// The name of a card for users: "rtx-pro-6000" for "RTX PRO 6000".
std::string name_of(const Card& card) {
  std::string name(card.name);
  for (char& c : name) {
    c = c == ' ' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return name;
}

/// Whether `text` contains these words, without a letter or digit next to them.
bool has_words(std::string_view text, std::string_view words) {
  const auto ends = [&](size_t at) {
    return at >= text.size() || !std::isalnum(static_cast<unsigned char>(text[at]));
  };
  for (size_t at = text.find(words); at != text.npos; at = text.find(words, at + 1)) {
    if (ends(at + words.size()) && (at == 0 || ends(at - 1))) return true;
  }
  return false;
}

}  // namespace

std::span<const Card> known_cards() { return kCards; }

const Card& card_called(const std::string& name) {
  std::string names;
  for (const Card& card : kCards) {
    const std::string known = name_of(card);
    if (name == known || "rtx-" + name == known) return card;
    names += (names.empty() ? "" : ", ") + known;
  }
  throw Error(Status::kInvalidArgument,
              fmt::format("card: got \"{}\", want one of {}", name, names));
}

const Card* known_card(std::string_view device_name, int capability, int sms) {
  const auto found = std::ranges::find_if(kCards, [&](const Card& card) {
    return card.capability == capability && card.sms == sms && has_words(device_name, card.name);
  });
  return found == kCards.end() ? nullptr : &*found;
}

Card card_of_device(Gpu& gpu) {
  const Card* const known = known_card(gpu.name(), gpu.capability(), gpu.sms());
  Card card = known != nullptr ? *known : Card{.name = gpu.name()};
  card.sms = gpu.sms();
  card.capability = gpu.capability();
  card.target = gpu.target();
  card.shared_bytes = gpu.shared_bytes();
  card.sm_shared_bytes = capability_row(gpu.capability()).sm_shared_bytes;
  if (forced_target()) {
    const Capability row = features_of(card.target);
    card.shared_bytes = std::min(card.shared_bytes, row.shared_bytes);
    card.sm_shared_bytes = std::min(card.sm_shared_bytes, row.sm_shared_bytes);
  }
  // The driver may not know these: the memory of an integrated GPU has no clock of its own.
  if (gpu.l2_bytes() > 0) card.l2_bytes = gpu.l2_bytes();
  double memory = gpu.bytes_per_microsecond();
  if (memory == 0) {
    memory = known != nullptr ? card.bytes_per_cycle * card.megahertz : memory_rate(gpu);
  }
  if (gpu.megahertz() > 0) card.megahertz = gpu.megahertz();
  if (memory > 0) card.bytes_per_cycle = memory / card.megahertz;
  card.mma_rate = known != nullptr ? known->mma_rate : mma_rate(gpu);
  return card;
}

}  // namespace fulgur::cuda
