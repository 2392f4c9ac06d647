// Does what a sanitizer must find: sanitizer_test race | overflow. The tests under sanitizers mean
// something only if this is reported.
#include <chrono>
#include <cstdio>
#include <string_view>
#include <thread>
#include <vector>

#include "base/parallel.h"

namespace {

int64_t race() {
  int64_t sum = 0;
  fulgur::parallel_for(64, 4, [&](int64_t i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // so that every thread gets some
    sum += i;
  });
  return sum;
}

int64_t overflow() {
  const std::vector<int64_t> x(8);
  return x.data()[x.size()];
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc == 2 ? argv[1] : "";
  if (what != "race" && what != "overflow") return 2;
  std::printf("%lld\n", static_cast<long long>(what == "race" ? race() : overflow()));
}
