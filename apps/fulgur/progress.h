#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace fulgur::app {

/// A bar on stderr, where that is a terminal; silent elsewhere. It is wiped when destroyed.
class Progress {
 public:
  Progress(std::string label, int64_t steps);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step();

 private:
  void draw() const;

  std::string label_;
  int64_t done_ = 0, steps_;
  bool visible_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace fulgur::app
