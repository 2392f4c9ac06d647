// FULGUR_CPU_TARGET forces the instruction set of the CPU engine. CTest runs the small list of
// attention cases with each target; this test, run with the same variable, shows that it obeyed.
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>

#include "engines.h"
#include "rejected.h"
#include "storage.h"

namespace fulgur::test {
namespace {

const int64_t kSupported = hwy::SupportedTargets();  // before the engine has chosen

EngineInfo cpu() {
  for (const EngineInfo& info : engines()) {
    if (info.name == "cpu") return info;
  }
  return {};
}

void run_forward() {
  Dense q(DType::kF32, {1, 8, 1, 16}), out(DType::kF32, {1, 8, 1, 16});
  std::mt19937_64 random(1);
  randomize(q, random);
  Options options;
  options.engine = "cpu";
  forward({q, q, q, out, {}}, options);
}

bool machine_has(const std::string& target) {
#if defined(__x86_64__)
  if (target == "amx" || target == "avx512_bf16") {
    std::ifstream file("/proc/cpuinfo");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    return text.find(target == "amx" ? " amx_bf16" : " avx512_bf16") != std::string::npos;
  }
  if (target == "sse4") return __builtin_cpu_supports("sse4.2");
  if (target == "avx2") return __builtin_cpu_supports("avx2");
  if (target == "avx512") return __builtin_cpu_supports("avx512bw");
  return false;
#else
  return target == "neon";
#endif
}

TEST(Target, IsTheForcedOne) {
  const char* forced = std::getenv("FULGUR_CPU_TARGET");
  if (forced == nullptr) GTEST_SKIP() << "FULGUR_CPU_TARGET is not set";
  if (!machine_has(forced)) {
    const std::string message = message_of(run_forward);
    EXPECT_NE(message.find("FULGUR_CPU_TARGET"), std::string::npos) << message;
    GTEST_SKIP() << "this machine lacks " << forced;
  }
  const std::map<std::string, std::string> names = {
      {"sse4", "SSE4"},
      {"avx2", "AVX2"},
      {"avx512", "AVX3"},
      {"amx", "AMX tiles for bf16 and f16"},
      {"avx512_bf16", "AVX512-BF16 dot products for bf16"},
      {"neon", "NEON"}};
  const EngineInfo info = cpu();
  EXPECT_EQ(info.unavailable, "");
  const std::string& name = names.at(forced);
  EXPECT_NE(info.description.find(name), std::string::npos) << info.description;
  EXPECT_EQ(info.description.find(" for bf16") != std::string::npos,
            name.find(" for bf16") != std::string::npos)
      << info.description;
  run_forward();
}

// The kernels of a plan, and that the others are rejected for a reason.
TEST(Target, IsExplained) {
  if (!cpu().unavailable.empty()) GTEST_SKIP() << cpu().unavailable;
  const std::string description = cpu().description;
  const bool tiles = description.find(" AMX tiles for bf16") != std::string::npos;
  const bool dots = description.find(" AVX512-BF16 dot products for bf16") != std::string::npos;
  const auto details = [](DType dtype, double scale) {
    const Dense q(dtype, {1, 100, 1, 16}), out(dtype, {1, 100, 1, 16});
    Options options;
    options.engine = "cpu";
    options.scale = scale;
    return plan(ForwardArgs{q, q, q, out, {}}, options).details();
  };
  const char *const amx = "AMX tiles: ", *const dot = "AVX512-BF16 dot products: ";
  for (const char* const path : {amx, dot}) {
    EXPECT_TRUE(rejects(details(DType::kF32, 1), path, "f32"));
    EXPECT_TRUE(rejects(details(DType::kBF16, 1e30), path));
    EXPECT_TRUE(rejects(details(DType::kF16, 1e30), path));
  }
  const auto rejects_vectors = [](const Details& plan) {
    const auto& rejected = plan.get<Details::Texts>("rejected");
    return std::ranges::any_of(
        rejected, [](const auto& what) { return what.find(" vectors: ") != std::string::npos; });
  };
  const auto expect = [&](const Details& plan, bool by_tiles, bool by_dots) {
    SCOPED_TRACE(plan.json());
    const auto& kernel = plan.get<std::string>("kernel");
    EXPECT_EQ(kernel == "AMX", by_tiles);
    EXPECT_EQ(kernel == "AVX512-BF16", by_dots);
    EXPECT_EQ(rejects(plan, amx), !by_tiles);
    EXPECT_EQ(rejects(plan, dot), !by_dots);
    EXPECT_EQ(rejects_vectors(plan), by_tiles || by_dots);
    EXPECT_EQ(plan.has("tiles_by_vectors"), by_tiles || by_dots);
    EXPECT_GT(plan.get<double>("estimate_us"), 0);
  };
  const Details bf16 = details(DType::kBF16, 1);
  expect(bf16, tiles, dots);
  expect(details(DType::kF16, 1), tiles, false);
#if defined(__x86_64__)
  if (__builtin_cpu_is("intel") && std::getenv("FULGUR_CPU_TARGET") == nullptr) {
    EXPECT_FALSE(dots) << description;
    if (machine_has("avx512_bf16")) {
      EXPECT_TRUE(rejects(bf16, dot, "Intel"));
    }
  }
#endif
}

#if defined(__x86_64__)
/// Whether this thread's tile registers hold anything, by what XGETBV calls XINUSE (Intel's manual,
/// volume 1, 13.6).
bool tiles_in_use() {
  constexpr uint32_t kTileState = 3u << 17;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return (low & kTileState) != 0;
}

// A thread that has used tiles gives them back: else the system would save 8 KB of them at each
// switch, and the CPU could not sleep as deeply.
TEST(Target, ReleasesTiles) {
  if (cpu().description.find(" AMX tiles for bf16") == std::string::npos)
    GTEST_SKIP() << "the engine has no tiles here";
  alignas(64) uint8_t config[64] = {1};
  config[16] = 64;  // bytes of a row of the first tile
  config[48] = 16;  // its rows
  asm volatile("ldtilecfg %0" : : "m"(config));
  EXPECT_TRUE(tiles_in_use());
  asm volatile("tilerelease");
  EXPECT_FALSE(tiles_in_use());
  Options options;
  options.engine = "cpu";
  options.threads = 1;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int64_t sq : {100, 1}) {
      std::mt19937_64 random(1);
      Dense q(dtype, {1, sq, 8, 64}), k(dtype, {1, 300, 1, 64}), out(dtype, {1, sq, 8, 64});
      Dense lse(DType::kF32, {1, 8, sq});
      Dense dq(dtype, {1, sq, 8, 64}), dk(dtype, {1, 300, 1, 64}), dv(dtype, {1, 300, 1, 64});
      for (Dense* t : {&q, &k}) randomize(*t, random);
      forward({q, k, k, out, lse}, options);
      EXPECT_FALSE(tiles_in_use()) << sq << " rows, forward";
      backward({q, q, k, k, out, lse, dq, dk, dv}, options);
      EXPECT_FALSE(tiles_in_use()) << sq << " rows, backward";
    }
  }
}
#endif

// Whatever else in the process computes with Highway chooses as before.
TEST(Target, IsForcedHereAlone) {
  const char* forced = std::getenv("FULGUR_CPU_TARGET");
  if (forced == nullptr || !machine_has(forced)) GTEST_SKIP() << "no target is forced";
  run_forward();
  EXPECT_EQ(hwy::SupportedTargets(), kSupported);
}

// In a process of its own, because the choice is made once.
[[noreturn]] void report_error(const char* target) {
  setenv("FULGUR_CPU_TARGET", target, 1);
  try {
    run_forward();
  } catch (const Error& error) {
    std::cerr << error.what() << std::endl;
    std::exit(error.status() == Status::kUnavailable ? 0 : 2);
  }
  std::exit(1);
}

TEST(TargetDeathTest, UnknownTargetIsAnError) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      report_error("avx9"), testing::ExitedWithCode(0),
      "FULGUR_CPU_TARGET: got \"avx9\", which is none; want one of those here: .*sse4|neon");
}

TEST(TargetDeathTest, MissingTargetIsAnErrorThatListsTheOthers) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
#if defined(__x86_64__)
  EXPECT_EXIT(report_error("neon"), testing::ExitedWithCode(0), "neon.*lacks.*want.*here: sse4");
  for (const char* const target : {"amx", "avx512_bf16"}) {
    if (machine_has(target)) continue;
    EXPECT_EXIT(report_error(target), testing::ExitedWithCode(0),
                "(has no .* of bf16|lacks AVX-512).*here: sse4");
  }
#endif
}

}  // namespace
}  // namespace fulgur::test
