#include "distributed/transport/socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

#include "fulgur/error.h"

namespace fulgur::distributed {
namespace {

/// Calls step(bytes done), which returns the bytes that it has transferred, until all are.
template <class Step>
bool transfer(int fd, short events, size_t bytes, const Deadline& deadline, const Step& step) {
  for (size_t done = 0; done < bytes;) {
    if (!wait_for(fd, events, deadline)) return false;
    const ssize_t n = step(done);
    if (n > 0) {
      done += n;
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
      return false;
    }
  }
  return true;
}

}  // namespace

void fail_unavailable(const std::string& what) { throw Error(Status::kUnavailable, what); }

bool wait_for(int fd, short events, const Deadline& deadline) {
  while (!deadline.over()) {
    pollfd one{fd, events, 0};
    if (poll(&one, 1, deadline.milliseconds()) > 0) return true;
  }
  return false;
}

bool read_all(int fd, void* to, size_t bytes, const Deadline& deadline) {
  return transfer(fd, POLLIN, bytes, deadline, [&](size_t done) {
    return recv(fd, static_cast<char*>(to) + done, bytes - done, 0);
  });
}

bool write_all(int fd, const void* from, size_t bytes, const Deadline& deadline) {
  return transfer(fd, POLLOUT, bytes, deadline, [&](size_t done) {
    return send(fd, static_cast<const char*>(from) + done, bytes - done, MSG_NOSIGNAL);
  });
}

}  // namespace fulgur::distributed
