#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

namespace fulgur::app {

Progress::Progress(std::string label, int64_t steps)
    : label_(std::move(label)), steps_(steps), visible_(::isatty(STDERR_FILENO)) {
  if (visible_) draw();
}

Progress::~Progress() {
  if (visible_) std::fputs("\r\033[K", stderr);
}

void Progress::step() {
  ++done_;
  if (visible_) draw();
}

void Progress::draw() const {
  constexpr int64_t kWidth = 40;
  const int64_t filled = kWidth * done_ / steps_;
  std::string left;
  if (done_ > 0) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
    left = fmt::format(", {:.0f} s left", spent.count() * static_cast<double>(steps_ - done_) /
                                              static_cast<double>(done_));
  }
  fmt::print(stderr, "\r{} [{:#<{}}{:<{}}] {:3}%{}\033[K", label_, "", filled, "", kWidth - filled,
             100 * done_ / steps_, left);
}

}  // namespace fulgur::app
