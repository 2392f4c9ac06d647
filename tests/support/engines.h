/// Helpers for tests that run on every engine, and for those that expect an error.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "fulgur/attention.h"
#include "fulgur/error.h"

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

/// Those that compute tensors in the CPU's memory.
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

/// A test on tensors in the CPU's memory that runs once per engine; it skips itself where the
/// engine cannot be used.
class EveryEngine : public testing::TestWithParam<EngineInfo> {
 protected:
  void SetUp() override {
    if (const auto& why = GetParam().unavailable; !why.empty()) {
      GTEST_SKIP() << GetParam().name << ": " << why;
    }
  }
  std::string engine() const { return GetParam().name; }
};

inline std::string engine_name(const testing::TestParamInfo<EngineInfo>& info) {
  return info.param.name;
}

#define FULGUR_EVERY_ENGINE(Suite) \
  INSTANTIATE_TEST_SUITE_P(, Suite, testing::ValuesIn(cpu_memory_engines()), engine_name)

}  // namespace fulgur::test
