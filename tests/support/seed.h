#pragma once

#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <string>

namespace fulgur::test {

/// What random tests draw by: FULGUR_TEST_SEED, or the day's number.
inline uint64_t test_seed() {
  const char* const given = std::getenv("FULGUR_TEST_SEED");
  return given != nullptr ? std::stoull(given) : static_cast<uint64_t>(std::time(nullptr) / 86400);
}

}  // namespace fulgur::test
