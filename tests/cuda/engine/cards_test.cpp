// What planning knows of a device: by its name, by what the driver says, by a measurement.
#include "cuda/engine/cards.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "cuda/jit/cache_folder.h"
#include "on_fake_gpu.h"

namespace fulgur::test {
namespace {

/// A process of its own, whose cache folder no other test looks into.
class CardOfDevice : public OnFakeGpu {
 protected:
  void SetUp() override {
    std::error_code none;
    std::filesystem::remove_all(cuda::CacheFolder::standard().path(), none);
    setenv("FAKE_CUDA_CAPABILITY", "86", 1);
  }
  cuda::Card card() {
    cuda::Gpu& gpu = cuda::Gpu::at(0);
    find_state();
    return cuda::card_of_device(gpu);
  }
};

TEST_F(CardOfDevice, IsKnown) {
  setenv("FAKE_CUDA_NAME", "NVIDIA RTX A6000", 1);
  setenv("FAKE_CUDA_MULTIPROCESSORS", "84", 1);
  if (!cuda::nvrtc_unavailable().empty()) GTEST_SKIP() << cuda::nvrtc_unavailable();
  const cuda::Card card = this->card();
  EXPECT_EQ(card.mma_rate, 1024);
  EXPECT_EQ(card.sms, 84);
  EXPECT_EQ(card.target.name(), "sm_86");
  EXPECT_EQ(card.shared_bytes, 232448);  // as the driver says
  EXPECT_NEAR(card.bytes_per_cycle * card.megahertz, 4.8e6, 1);
  EXPECT_TRUE(state_->launches.empty());
}

TEST_F(CardOfDevice, IsMeasured) {
  setenv("FAKE_CUDA_MMA_CYCLES", "16500", 1);  // of 64 x 8 x 8 products of 4096 FLOP: 1017 a cycle
  if (!cuda::nvrtc_unavailable().empty()) GTEST_SKIP() << cuda::nvrtc_unavailable();
  EXPECT_EQ(card().mma_rate, 1024);
  ASSERT_EQ(state_->launches.size(), 1u);
  EXPECT_STREQ(state_->launches[0].kernel, "fulgur_mma_rate");
  EXPECT_EQ(state_->launches[0].block, 256u);
  EXPECT_EQ(state_->allocated, state_->freed);
  EXPECT_EQ(card().mma_rate, 1024);
  EXPECT_TRUE(state_->launches.empty());
}

// Where the driver does not know the clock of the memory, copies are timed, once.
TEST_F(CardOfDevice, ItsMemoryIsMeasured) {
  setenv("FAKE_CUDA_MMA_CYCLES", "16500", 1);
  setenv("FAKE_CUDA_MEMORY_KHZ", "0", 1);
  if (!cuda::nvrtc_unavailable().empty()) GTEST_SKIP() << cuda::nvrtc_unavailable();
  const double bytes = card().bytes_per_cycle;
  EXPECT_GT(bytes, 0);
  EXPECT_NE(bytes, cuda::Card{}.bytes_per_cycle);
  EXPECT_EQ(state_->allocated, state_->freed);
  EXPECT_EQ(card().bytes_per_cycle, bytes);
  int kept = 0;
  for (const auto& f : std::filesystem::directory_iterator(cuda::CacheFolder::standard().path())) {
    kept += f.path().extension() == ".bandwidth";
  }
  EXPECT_EQ(kept, 1);
}

// What another process measured is found.
TEST_F(CardOfDevice, IsKept) {
  setenv("FAKE_CUDA_MMA_CYCLES", "16500", 1);
  const pid_t other = fork();
  if (other == 0) _exit(cuda::nvrtc_unavailable().empty() && card().mma_rate == 1024 ? 0 : 1);
  int status = 0;
  waitpid(other, &status, 0);
  if (!cuda::nvrtc_unavailable().empty()) GTEST_SKIP() << cuda::nvrtc_unavailable();
  EXPECT_EQ(status, 0);
  setenv("FAKE_CUDA_MMA_CYCLES", "33000", 1);
  EXPECT_EQ(card().mma_rate, 1024);
  EXPECT_TRUE(state_->launches.empty());
}

// What cannot be is not kept.
TEST_F(CardOfDevice, HasNoClock) {
  if (!cuda::nvrtc_unavailable().empty()) GTEST_SKIP() << cuda::nvrtc_unavailable();
  EXPECT_EQ(card().mma_rate, 512);
  EXPECT_EQ(state_->launches.size(), 1u);
  EXPECT_EQ(card().mma_rate, 512);
  EXPECT_TRUE(state_->launches.empty());
  for (const auto& f : std::filesystem::directory_iterator(cuda::CacheFolder::standard().path())) {
    EXPECT_NE(f.path().extension(), ".rate");
  }
}

// As on the device that is forced.
TEST_F(CardOfDevice, IsForced) {
  setenv("FAKE_CUDA_CAPABILITY", "90", 1);
  setenv("FULGUR_CUDA_TARGET", "compute_86", 1);
  if (!cuda::nvrtc_unavailable().empty()) GTEST_SKIP() << cuda::nvrtc_unavailable();
  const cuda::Card card = this->card();
  EXPECT_EQ(card.capability, 90);
  EXPECT_EQ(card.target.name(), "compute_86");
  EXPECT_EQ(card.shared_bytes, cuda::capability_row(86).shared_bytes);
  EXPECT_EQ(card.sm_shared_bytes, cuda::capability_row(86).sm_shared_bytes);
}

}  // namespace
}  // namespace fulgur::test
