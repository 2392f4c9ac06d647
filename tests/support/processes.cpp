#include "processes.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

namespace fulgur::test {

int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(at);
  bind(fd, reinterpret_cast<sockaddr*>(&at), size);
  getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size);
  close(fd);
  return ntohs(at.sin_port);
}

Processes::Processes(int ranks, const std::function<Bytes(int rank)>& body) {
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    const pid_t pid = fork();
    if (pid == 0) {
      close(ends[0]);
      Bytes all;
      try {
        all = body(rank);
      } catch (const std::exception& error) {
        const std::string text = std::string("error: ") + error.what();
        all.resize(text.size());
        std::memcpy(all.data(), text.data(), text.size());
      }
      for (size_t done = 0; done < all.size();) {
        const ssize_t n = ::write(ends[1], all.data() + done, all.size() - done);
        if (n <= 0) break;
        done += n;
      }
      _exit(0);
    }
    close(ends[1]);
    pids_.push_back(pid);
    pipes_.push_back(ends[0]);
  }
}

Processes::~Processes() {
  for (const pid_t pid : pids_) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  for (const int fd : pipes_) close(fd);
}

Bytes Processes::result(int rank) {
  Bytes all;
  std::byte some[4096];
  for (ssize_t n = 0; (n = ::read(pipes_[rank], some, sizeof(some))) > 0;) {
    all.insert(all.end(), some, some + n);
  }
  return all;
}

std::string Processes::text(int rank) {
  const Bytes all = result(rank);
  return {reinterpret_cast<const char*>(all.data()), all.size()};
}

Bytes bytes_of(const std::string& text) {
  Bytes all(text.size());
  std::memcpy(all.data(), text.data(), text.size());
  return all;
}

}  // namespace fulgur::test
