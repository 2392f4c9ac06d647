/// Processes forked from a test, and the bytes that they return.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace fulgur::test {

using Bytes = std::vector<std::byte>;

/// A port of this machine that nothing listens to.
int free_port();

/// Processes that each compute what `body` of their rank returns. The parent has had no threads.
class Processes {
 public:
  Processes(int ranks, const std::function<Bytes(int rank)>& body);
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  /// What a rank returned: of one that was killed nothing.
  Bytes result(int rank);
  std::string text(int rank);

 private:
  std::vector<pid_t> pids_;
  std::vector<int> pipes_;
};

Bytes bytes_of(const std::string& text);

}  // namespace fulgur::test
