// The cards that are known by name.
#include "cuda/engine/cards.h"

#include <gtest/gtest.h>

#include <string>

#include "engines.h"

namespace fulgur::cuda {
namespace {

TEST(Cards, ByName) {
  for (const char* name : {"a100",         "a30",
                           "a10",          "a40",
                           "a6000",        "3090",
                           "4090",         "5090",
                           "l4",           "l40",
                           "l40s",         "h100",
                           "h100-pcie",    "h200",
                           "b200",         "gb10",
                           "rtx-pro-6000", "rtx-6000-ada",
                           "rtx-3090",     "t4",
                           "2080-ti",      "quadro-rtx-8000"}) {
    EXPECT_NO_THROW(card_called(name)) << name;
  }
  EXPECT_EQ(card_called("l40s").name, "L40S");
  EXPECT_EQ(card_called("3090").name, "RTX 3090");
  for (const char* name : {"", "rtx", "v100", "100", "A100", "pro"}) {
    const auto call = [&] { card_called(name); };
    EXPECT_EQ(test::status_of(call), Status::kInvalidArgument) << name;
    EXPECT_NE(test::message_of(call).find("want one of t4, rtx-2080-ti, quadro-rtx-8000, a100, "),
              std::string::npos);
  }
}

// The peaks of products that the makers state, in TFLOP/s.
TEST(Cards, PeaksOfProducts) {
  const auto peak = [](const char* name) {
    const Card& card = card_called(name);
    return 1e-6 * card.sms * card.mma_rate * card.megahertz;
  };
  for (const auto& [name, stated] : {std::pair{"a100", 312.0},
                                     {"a30", 165.0},
                                     {"a10", 125.0},
                                     {"a10g", 70.0},
                                     {"a40", 149.7},
                                     {"a6000", 154.8},
                                     {"3080", 59.5},
                                     {"3090", 71.0},
                                     {"l4", 121.0},
                                     {"l20", 119.5},
                                     {"l40", 181.0},
                                     {"l40s", 362.0},
                                     {"rtx-6000-ada", 364.0},
                                     {"4080", 97.5},
                                     {"4090", 165.2},
                                     {"5080", 112.6},
                                     {"5090", 209.5},
                                     {"rtx-pro-6000", 503.8},
                                     {"gb10", 125.0},
                                     {"t4", 65.1},
                                     {"2080-ti", 53.8},
                                     {"quadro-rtx-8000", 130.5}}) {
    EXPECT_NEAR(peak(name) / stated, 1, 0.015) << name;
  }
}

TEST(Cards, ByWhatTheDriverSays) {
  const auto name = [](const char* device, int capability, int sms) {
    const Card* const card = known_card(device, capability, sms);
    return card == nullptr ? "" : std::string(card->name);
  };
  EXPECT_EQ(name("Tesla T4", 75, 40), "T4");
  EXPECT_EQ(name("NVIDIA GeForce RTX 2080 Ti", 75, 68), "RTX 2080 Ti");
  EXPECT_EQ(name("NVIDIA A100-SXM4-80GB", 80, 108), "A100");
  EXPECT_EQ(name("NVIDIA A10", 86, 72), "A10");
  EXPECT_EQ(name("NVIDIA A10G", 86, 80), "A10G");
  EXPECT_EQ(name("NVIDIA GeForce RTX 3090", 86, 82), "RTX 3090");
  EXPECT_EQ(name("NVIDIA GeForce RTX 3090 Ti", 86, 84), "");
  EXPECT_EQ(name("NVIDIA L40", 89, 142), "L40");
  EXPECT_EQ(name("NVIDIA L40S", 89, 142), "L40S");
  EXPECT_EQ(name("NVIDIA H100 PCIe", 90, 114), "H100 PCIe");
  EXPECT_EQ(name("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, 188), "RTX PRO 6000");
  EXPECT_EQ(name("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, 110), "");
}

}  // namespace
}  // namespace fulgur::cuda
