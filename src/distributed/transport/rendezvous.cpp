#include "distributed/transport/rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

namespace fulgur::distributed {
namespace {

constexpr uint64_t kMagic = 0x66756c6775720001;  // "fulgur", and the version of the protocol
constexpr Seconds kHelloTime{2};                 // for the first message of a connection

/// The first message of a connection.
struct Hello {
  uint64_t magic = kMagic;
  int32_t ranks = 0, rank = 0, port = 0;  ///< port: at which the rank listens
  int32_t data = 0;  ///< 1: the data connection; 0: control, by which a rank sends why it leaves
};

/// The address at which a rank listens.
struct Address {
  char host[INET6_ADDRSTRLEN] = {};
  int32_t port = 0;
};

void prepare(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
}

/// Calls use(address) for each address of a host until it returns a socket.
Socket resolved(const std::string& host, int port, int flags,
                const std::function<Socket(const addrinfo&)>& use) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* all = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &all);
  if (error != 0) fail_unavailable(fmt::format("host \"{}\": {}", host, gai_strerror(error)));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(all, freeaddrinfo);
  for (const addrinfo* one = all; one != nullptr; one = one->ai_next) {
    Socket socket = use(*one);
    if (socket.open()) return socket;
  }
  return {};
}

Socket listen_at(const std::string& host, int port) {
  std::string why;
  Socket listener = resolved(host, port, AI_PASSIVE, [&](const addrinfo& at) {
    Socket s(socket(at.ai_family, at.ai_socktype, at.ai_protocol));
    const int on = 1;
    setsockopt(s.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (!s.open() || bind(s.fd(), at.ai_addr, at.ai_addrlen) != 0 ||
        listen(s.fd(), SOMAXCONN) != 0) {
      why = std::strerror(errno);
      return Socket();
    }
    prepare(s.fd());
    return s;
  });
  if (!listener.open())
    fail_unavailable(fmt::format("rank 0 cannot listen at {}:{}: {}", host, port, why));
  return listener;
}

/// Connects to a rank that may not listen yet.
Socket connect_to(const std::string& host, int port, const Hello& hello, const Deadline& deadline,
                  const std::string& whom) {
  std::string why = "nobody listens there";
  do {
    Socket s = resolved(host, port, 0, [&](const addrinfo& at) {
      Socket one(socket(at.ai_family, at.ai_socktype, at.ai_protocol));
      if (!one.open() || connect(one.fd(), at.ai_addr, at.ai_addrlen) != 0) {
        why = std::strerror(errno);
        return Socket();
      }
      return one;
    });
    if (s.open()) {
      prepare(s.fd());
      if (write_all(s.fd(), &hello, sizeof(hello), deadline)) return s;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } while (!deadline.over());
  fail_unavailable(fmt::format("{} at {}:{} cannot be reached: {}", whom, host, port, why));
}

/// Address and port of one end of a connection.
template <class Name>
Address address_of(int fd, const Name& name) {
  sockaddr_storage at{};
  socklen_t size = sizeof(at);
  name(fd, reinterpret_cast<sockaddr*>(&at), &size);
  Address address;
  const bool v6 = at.ss_family == AF_INET6;
  const auto* four = reinterpret_cast<const sockaddr_in*>(&at);
  const auto* six = reinterpret_cast<const sockaddr_in6*>(&at);
  const void* const from = v6 ? static_cast<const void*>(&six->sin6_addr) : &four->sin_addr;
  inet_ntop(at.ss_family, from, address.host, sizeof(address.host));
  address.port = ntohs(v6 ? six->sin6_port : four->sin_port);
  return address;
}

/// Connects each rank with all others.
class Rendezvous {
 public:
  Rendezvous(int rank, int ranks, const std::string& host, int port, double deadline)
      : rank_(rank), ranks_(ranks), deadline_(Seconds(deadline)), peers(ranks) {
    if (rank == 0) {
      listener_ = listen_at(host, port);
      invite();
    } else {
      join(host, port);
    }
  }

 private:
  bool complete(bool data, int from) const {
    for (int r = from; r < ranks_; ++r) {
      if (r != rank_ && !(data ? peers[r].data : peers[r].control).open()) return false;
    }
    return true;
  }

  /// Accepts the control connections, and the data connections if asked, of ranks `from` on. Calls
  /// visit(hello, socket) for each.
  template <class Visit>
  void accept_all(int from, bool wait_for_data, const Visit& visit) {
    while (!complete(false, from) || (wait_for_data && !complete(true, from))) {
      if (!wait_for(listener_.fd(), POLLIN, deadline_)) fail_missing(from);
      Socket s(accept(listener_.fd(), nullptr, nullptr));
      if (!s.open()) continue;
      prepare(s.fd());
      Hello hello;
      // A connection without the magic number is not of the group.
      if (!read_all(s.fd(), &hello, sizeof(hello), Deadline(kHelloTime)) || hello.magic != kMagic)
        continue;
      if (hello.ranks != ranks_ || hello.rank < from || hello.rank >= ranks_) {
        fail_unavailable(fmt::format("a process connected as rank {} of {}, want {} to {} of {}",
                                     hello.rank, hello.ranks, from, ranks_ - 1, ranks_));
      }
      Socket& place = hello.data != 0 ? peers[hello.rank].data : peers[hello.rank].control;
      if (place.open())
        fail_unavailable(fmt::format("two processes connected as rank {}", hello.rank));
      place = std::move(s);
      visit(hello, place);
    }
  }

  [[noreturn]] void fail_missing(int from) const {
    std::vector<int> missing;
    for (int r = from; r < ranks_; ++r) {
      if (r != rank_ && !(peers[r].control.open() && peers[r].data.open())) missing.push_back(r);
    }
    fail_unavailable(
        fmt::format("rank {} did not come within the deadline", fmt::join(missing, ", ")));
  }

  /// Rank 0: sends the addresses of all ranks to all ranks.
  void invite() {
    std::vector<Address> addresses(ranks_);
    accept_all(1, false, [&](const Hello& hello, const Socket& s) {
      addresses[hello.rank] = address_of(s.fd(), getpeername);
      addresses[hello.rank].port = hello.port;
    });
    for (int r = 1; r < ranks_; ++r) {
      if (!write_all(peers[r].control.fd(), addresses.data(), sizeof(Address) * ranks_,
                     deadline_)) {
        fail_unavailable(fmt::format("rank {} left", r));
      }
    }
    accept_all(1, true, [](const Hello&, const Socket&) {});
  }

  void join(const std::string& host, int port) {
    // The other ranks reach this one at the address by which it reaches rank 0.
    const Hello probe{.magic = 0};
    const Address here =
        address_of(connect_to(host, port, probe, deadline_, "rank 0").fd(), getsockname);
    listener_ = listen_at(here.host, 0);
    Hello hello{
        .ranks = ranks_, .rank = rank_, .port = address_of(listener_.fd(), getsockname).port};
    peers[0].control = connect_to(host, port, hello, deadline_, "rank 0");
    std::vector<Address> addresses(ranks_);
    if (!read_all(peers[0].control.fd(), addresses.data(), sizeof(Address) * ranks_, deadline_)) {
      fail_unavailable("rank 0 left, or some rank did not come within the deadline");
    }
    for (int r = 0; r < rank_; ++r) {
      const std::string at = r == 0 ? host : addresses[r].host;
      const int its = r == 0 ? port : addresses[r].port;
      const std::string whom = fmt::format("rank {}", r);
      hello.data = 0;
      if (r > 0) peers[r].control = connect_to(at, its, hello, deadline_, whom);
      hello.data = 1;
      peers[r].data = connect_to(at, its, hello, deadline_, whom);
    }
    accept_all(rank_ + 1, true, [](const Hello&, const Socket&) {});
  }

  int rank_, ranks_;
  Deadline deadline_;
  Socket listener_;

 public:
  std::vector<Peer> peers;
};

}  // namespace

std::vector<Peer> rendezvous(int rank, int ranks, const std::string& host, int port,
                             double deadline) {
  return std::move(Rendezvous(rank, ranks, host, port, deadline).peers);
}

}  // namespace fulgur::distributed
