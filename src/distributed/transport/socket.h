/// Sockets, and transfers that end by a deadline.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace fulgur::distributed {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

/// Throws Error(kUnavailable).
[[noreturn]] void fail_unavailable(const std::string& what);

/// An open socket.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() { close(); }
  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

/// A point in time at which a wait ends.
class Deadline {
 public:
  explicit Deadline(Seconds seconds)
      : end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(seconds)) {}
  bool over() const { return Clock::now() >= end_; }
  int milliseconds() const {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now());
    return static_cast<int>(std::clamp<int64_t>(left.count() + 1, 0, 1000));
  }

 private:
  Clock::time_point end_;
};

/// Waits for events of poll(). Returns false if the deadline is over.
bool wait_for(int fd, short events, const Deadline& deadline);
/// Transfer all bytes. Return false if the connection ends or the deadline is over.
bool read_all(int fd, void* to, size_t bytes, const Deadline& deadline);
bool write_all(int fd, const void* from, size_t bytes, const Deadline& deadline);

}  // namespace fulgur::distributed
