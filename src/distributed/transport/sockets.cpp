#include "distributed/transport/sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "distributed/transport/mailbox.h"
#include "fulgur/error.h"

namespace fulgur::distributed {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr uint64_t kMagic = 0x66756c6775720001;  // "fulgur", and the version of the protocol
constexpr Seconds kGrace{2};  // time for the reason of a rank whose data connection has ended
constexpr size_t kMaxReason = 4096;  // bytes
// How often a rank that waits for a message checks whether the sender has left.
constexpr std::chrono::milliseconds kPollInterval{20};

[[noreturn]] void fail_unavailable(const std::string& what) {
  throw Error(Status::kUnavailable, what);
}

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

bool wait_for(int fd, short events, const Deadline& deadline) {
  while (!deadline.over()) {
    pollfd one{fd, events, 0};
    if (poll(&one, 1, deadline.milliseconds()) > 0) return true;
  }
  return false;
}

/// Transfers all bytes. Returns false if the connection ends or the deadline is over.
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

template <class T>
bool read_all(int fd, T* to, size_t bytes, const Deadline& deadline) {
  return transfer(fd, POLLIN, bytes, deadline, [&](size_t done) {
    return recv(fd, reinterpret_cast<char*>(to) + done, bytes - done, 0);
  });
}

template <class T>
bool write_all(int fd, const T* from, size_t bytes, const Deadline& deadline) {
  return transfer(fd, POLLOUT, bytes, deadline, [&](size_t done) {
    return send(fd, reinterpret_cast<const char*>(from) + done, bytes - done, MSG_NOSIGNAL);
  });
}

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

/// The connections of a rank to another one.
struct Peer {
  Socket data, control;
  bool silent = false;  ///< the control connection has ended
};

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
      if (!read_all(s.fd(), &hello, sizeof(hello), Deadline(kGrace)) || hello.magic != kMagic)
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

class Sockets final : public Transport {
 public:
  Sockets(int rank, std::vector<Peer> peers, double deadline)
      : rank_(rank), deadline_(deadline), peers_(std::move(peers)) {}

  void exchange(std::span<const std::span<const std::byte>> sends,
                std::span<const std::span<std::byte>> receives) override {
    ++step_;
    if (mailbox_) by_mailbox(sends, receives);
    const auto by_socket = [&](size_t bytes) { return !mailbox_ || bytes > Mailbox::kMaxBytes; };
    std::vector<Flow> flows(peers_.size());
    for (size_t r = 0; r < flows.size(); ++r) {
      if (static_cast<int>(r) == rank_) continue;
      flows[r].out = {step_, sends[r].size()};
      flows[r].send = sends[r];
      flows[r].receive = receives[r];
      flows[r].sending = by_socket(sends[r].size());
      flows[r].receiving = by_socket(receives[r].size());
    }
    Deadline deadline(deadline_);
    while (unfinished(flows)) {
      if (deadline.over()) {
        std::vector<size_t> late;
        for (size_t r = 0; r < flows.size(); ++r) {
          if (flows[r].sends() || flows[r].receives()) late.push_back(r);
        }
        fail_late(late);
      }
      if (progress(flows, deadline)) deadline = Deadline(deadline_);
    }
  }

  void abort(const std::string& why) override {
    const std::string_view text = std::string_view(why).substr(0, kMaxReason);
    for (Peer& peer : peers_) {
      if (!peer.control.open()) continue;
      write_all(peer.control.fd(), text.data(), text.size(), Deadline(kGrace));
      shutdown(peer.control.fd(), SHUT_RDWR);  // wakes a thread that waits for them
      shutdown(peer.data.fd(), SHUT_RDWR);
    }
  }

  /// Sends short messages by shared memory, if all ranks are on one machine.
  void share_memory() {
    const int ranks = static_cast<int>(peers_.size());
    const int64_t bytes = Mailbox::bytes(ranks);
    SharedMemory memory;
    const auto attempt = [&](const auto& of) {
      try {
        of();
      } catch (const Error&) {  // messages are sent by sockets
      }
    };
    if (rank_ == 0) {
      attempt([&] {
        memory = SharedMemory::make(bytes);
        std::memcpy(memory.data(), &memory.name(), sizeof(SharedMemory::Name));
      });
    }
    const SharedMemory::Name name = all_gather(memory.name())[0];
    attempt([&] {
      if (rank_ != 0) memory = SharedMemory::open(name, bytes);
    });
    const bool opened = memory.data() != nullptr &&
                        std::memcmp(memory.data(), &name, sizeof(SharedMemory::Name)) == 0;
    if (std::ranges::count(all_gather(char{opened}), 1) < ranks) return;
    mailbox_.emplace(std::move(memory), rank_, ranks);
  }

 private:
  /// Sent before the bytes of a step: the number of the step, and the number of bytes.
  using Header = std::array<uint64_t, 2>;

  /// The values of all ranks.
  template <class T>
  std::vector<T> all_gather(const T& mine) {
    std::vector<T> all(peers_.size(), mine);
    std::vector<std::span<const std::byte>> sends(peers_.size());
    std::vector<std::span<std::byte>> receives(peers_.size());
    for (size_t r = 0; r < peers_.size(); ++r) {
      if (static_cast<int>(r) == rank_) continue;
      sends[r] = std::as_bytes(std::span(&mine, 1));
      receives[r] = std::as_writable_bytes(std::span(&all[r], 1));
    }
    exchange(sends, receives);
    return all;
  }

  /// Exchanges short messages, and the sizes of the others.
  void by_mailbox(std::span<const std::span<const std::byte>> sends,
                  std::span<const std::span<std::byte>> receives) {
    for (size_t r = 0; r < peers_.size(); ++r) {
      if (static_cast<int>(r) != rank_) mailbox_->post(static_cast<int>(r), step_, sends[r]);
    }
    for (size_t r = 0; r < peers_.size(); ++r) {
      if (static_cast<int>(r) == rank_) continue;
      check_header(r, {step_, posted(r)}, {step_, receives[r].size()});
      if (receives[r].size() > Mailbox::kMaxBytes) continue;
      mailbox_->take(static_cast<int>(r), step_, receives[r]);
    }
  }

  /// The size of the message of a rank; waits until it has posted one.
  uint64_t posted(size_t r) {
    const auto wait = [&](std::chrono::milliseconds timeout) {
      return mailbox_->wait(static_cast<int>(r), step_, timeout);
    };
    for (const Deadline deadline(deadline_); !deadline.over();) {
      if (const auto size = wait(kPollInterval)) return *size;
      for (size_t other = 0; other < peers_.size(); ++other) {
        if (static_cast<int>(other) != rank_ && !peers_[other].silent) receive_reason(other);
      }
      if (!has_left(r)) continue;
      if (const auto size = wait({})) return *size;  // posted before the rank left
      fail_left(r);
    }
    std::vector<size_t> late;
    for (size_t other = r; other < peers_.size(); ++other) {
      const auto rank = static_cast<int>(other);
      if (rank != rank_ && !mailbox_->wait(rank, step_, {})) late.push_back(other);
    }
    fail_late(late);
  }

  /// Whether the data connection of a rank has ended.
  bool has_left(size_t r) const {
    char byte;
    const ssize_t n = recv(peers_[r].data.fd(), &byte, 1, MSG_PEEK);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
  }

  /// The transfers of a step with one rank.
  struct Flow {
    Header out{}, in{};
    std::span<const std::byte> send;
    std::span<std::byte> receive;
    bool sending = false, receiving = false;
    size_t sent = 0, received = 0;  // bytes, with headers

    bool sends() const { return sending && sent < sizeof(Header) + send.size(); }
    bool receives() const { return receiving && received < sizeof(Header) + receive.size(); }
  };

  static bool unfinished(const std::vector<Flow>& flows) {
    return std::ranges::any_of(flows, [](const Flow& f) { return f.sends() || f.receives(); });
  }

  [[noreturn]] void fail_late(const std::vector<size_t>& late) const {
    fail_unavailable(
        fmt::format("rank {} made no step for {} s", fmt::join(late, ", "), deadline_.count()));
  }

  /// Waits for sockets and transfers what can be transferred. Returns whether anything was.
  bool progress(std::vector<Flow>& flows, const Deadline& deadline) {
    std::vector<pollfd> fds;
    std::vector<size_t> ranks;
    for (size_t r = 0; r < flows.size(); ++r) {
      if (static_cast<int>(r) == rank_) continue;
      const int events = (flows[r].sends() ? POLLOUT : 0) | (flows[r].receives() ? POLLIN : 0);
      fds.push_back({peers_[r].silent ? -1 : peers_[r].control.fd(), POLLIN, 0});
      fds.push_back({events != 0 ? peers_[r].data.fd() : -1, static_cast<short>(events), 0});
      ranks.push_back(r);
    }
    if (poll(fds.data(), fds.size(), deadline.milliseconds()) <= 0) return false;
    bool moved = false;
    for (size_t i = 0; i < ranks.size(); ++i) {
      Flow& flow = flows[ranks[i]];
      const short ready = fds[2 * i + 1].revents;
      // Bytes that arrived before the rank left are received.
      if ((ready & (POLLIN | POLLHUP | POLLERR)) != 0 && flow.receives()) {
        moved |= receive_some(ranks[i], flow);
      }
      if ((ready & POLLOUT) != 0 && flow.sends()) moved |= send_some(ranks[i], flow);
    }
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (fds[2 * i].revents != 0) receive_reason(ranks[i]);
    }
    return moved;
  }

  bool send_some(size_t r, Flow& flow) {
    const bool head = flow.sent < sizeof(Header);
    const char* const from =
        head ? reinterpret_cast<const char*>(&flow.out) + flow.sent
             : reinterpret_cast<const char*>(flow.send.data()) + (flow.sent - sizeof(Header));
    const size_t left =
        head ? sizeof(Header) - flow.sent : flow.send.size() + sizeof(Header) - flow.sent;
    const ssize_t n = ::send(peers_[r].data.fd(), from, left, MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n < 0) fail_left(r);
    flow.sent += n;
    return n > 0;
  }

  bool receive_some(size_t r, Flow& flow) {
    const bool head = flow.received < sizeof(Header);
    char* const to =
        head ? reinterpret_cast<char*>(&flow.in) + flow.received
             : reinterpret_cast<char*>(flow.receive.data()) + (flow.received - sizeof(Header));
    const size_t left = head ? sizeof(Header) - flow.received
                             : flow.receive.size() + sizeof(Header) - flow.received;
    const ssize_t n = recv(peers_[r].data.fd(), to, left, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n <= 0) fail_left(r);
    flow.received += n;
    if (head && flow.received == sizeof(Header)) {
      check_header(r, flow.in, {flow.out[0], flow.receive.size()});
    }
    return true;
  }

  static void check_header(size_t r, const Header& in, const Header& want) {
    if (in == want) return;
    fail_unavailable(
        fmt::format("rank {} is at step {} with {} bytes, want step {} with {}: all ranks make "
                    "the same calls of a group in one order",
                    r, in[0], in[1], want[0], want[1]));
  }

  /// Throws the reason of a rank that leaves with one. A rank that is done ends its control
  /// connection without a reason: the data that it has sent may still arrive.
  void receive_reason(size_t r) {
    char text[kMaxReason];
    const ssize_t n = recv(peers_[r].control.fd(), text, sizeof(text), 0);
    if (n > 0) fail_unavailable(std::string(text, n));
    peers_[r].silent = n == 0 || (errno != EAGAIN && errno != EINTR);
  }

  /// The data connection of a rank has ended: throws the reason that it, or another rank, sends.
  [[noreturn]] void fail_left(size_t left) {
    const Deadline deadline(kGrace);
    do {
      for (size_t r = 0; r < peers_.size(); ++r) {
        if (static_cast<int>(r) != rank_ && !peers_[r].silent) receive_reason(r);
      }
      if (!peers_[left].silent) wait_for(peers_[left].control.fd(), POLLIN, deadline);
    } while (!peers_[left].silent && !deadline.over());
    fail_unavailable(fmt::format("rank {} left", left));
  }

  int rank_;
  Seconds deadline_;
  std::vector<Peer> peers_;
  uint64_t step_ = 0;
  std::optional<Mailbox> mailbox_;
};

}  // namespace

std::unique_ptr<Transport> connect_sockets(int rank, int ranks, const std::string& host, int port,
                                           double deadline) {
  Rendezvous rendezvous(rank, ranks, host, port, deadline);
  auto sockets = std::make_unique<Sockets>(rank, std::move(rendezvous.peers), deadline);
  sockets->share_memory();
  return sockets;
}

}  // namespace fulgur::distributed
