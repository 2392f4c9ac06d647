/// Helpers for tests that run on every engine, and for those that expect an error.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "fulgur/attention.h"
#include "fulgur/error.h"
#include "workload.h"

namespace fulgur {

// For GoogleTest.
inline void PrintTo(const EngineInfo& info, std::ostream* os) { *os << info.name; }

}  // namespace fulgur

namespace fulgur::test {

/// engines(); where the CPU engine refuses the forced FULGUR_CPU_TARGET, an engine that says so.
/// (target_test shows that it refuses only what the machine lacks.)
inline std::vector<EngineInfo> engines_here() {
  try {
    return engines();
  } catch (const Error& error) {
    return {{"cpu", "", error.what()}};
  }
}

/// The engines that compute tensors in the CPU's memory.
inline std::vector<EngineInfo> cpu_memory_engines() {
  std::vector<EngineInfo> all = engines_here();
  std::erase_if(all, [](const EngineInfo& info) { return info.name == "cuda"; });
  return all;
}

/// Status of the Error that `call` throws; kOk when it throws none.
template <class Call>
Status status_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.status();
  }
  return Status::kOk;
}

/// Message of the Error that `call` throws; empty when it throws none.
template <class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

inline const EngineInfo& engine_of(const EngineInfo& engine) { return engine; }
template <class T>
const EngineInfo& engine_of(const std::tuple<T, EngineInfo>& param) {
  return std::get<EngineInfo>(param);
}

/// A test that runs once per engine, or per engine and value; it skips itself where the engine
/// cannot be used, and where it has refused every case of the test.
template <class Param>
class OnEngine : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    if (const auto& why = info().unavailable; !why.empty()) {
      GTEST_SKIP() << info().name << ": " << why;
    }
  }
  void TearDown() override {
    if (refused_ == 0) return;
    testing::Test::RecordProperty("computed", computed_);
    testing::Test::RecordProperty("refused", refused_);
    if (computed_ == 0) GTEST_SKIP() << why_refused_;
  }
  std::string engine() const { return info().name; }

  /// Makes a call, unless the engine answers that it does not compute such (kUnsupported). Then the
  /// case counts as refused, which is not passed, and this is false.
  template <class Call>
  bool computes(Call call) {
    try {
      call();
    } catch (const Error& error) {
      if (error.status() != Status::kUnsupported) throw;
      ++refused_;
      why_refused_ = error.what();
      return false;
    }
    ++computed_;
    return true;
  }
  /// Both passes, the second where the engine computes the first. False where it computes neither.
  bool runs(Workload& w) {
    if (!computes([&] { w.run_forward(); })) return false;
    computes([&] { w.run_backward(); });
    return true;
  }

 private:
  static const EngineInfo& info() { return engine_of(testing::TestWithParam<Param>::GetParam()); }

  int computed_ = 0, refused_ = 0;
  std::string why_refused_;
};
using EveryEngine = OnEngine<EngineInfo>;

inline std::string engine_name(const testing::TestParamInfo<EngineInfo>& info) {
  return info.param.name;
}

// The CUDA engine's tests end in "/cuda", by which CTest runs them apart.
#define FULGUR_EVERY_ENGINE(Suite) \
  INSTANTIATE_TEST_SUITE_P(, Suite, testing::ValuesIn(engines_here()), engine_name)
// Tests of tensors in the CPU's memory.
#define FULGUR_CPU_MEMORY_ENGINES(Suite) \
  INSTANTIATE_TEST_SUITE_P(, Suite, testing::ValuesIn(cpu_memory_engines()), engine_name)

}  // namespace fulgur::test
