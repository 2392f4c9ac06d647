#include "distributed/transport/sockets.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "distributed/transport/mailbox.h"
#include "distributed/transport/rendezvous.h"
#include "fulgur/error.h"

namespace fulgur::distributed {
namespace {

constexpr Seconds kGrace{2};  // time for the reason of a rank whose data connection has ended
constexpr size_t kMaxReason = 4096;  // bytes
// How often a rank that waits for a message checks whether the sender has left.
constexpr std::chrono::milliseconds kPollInterval{20};

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
  auto sockets =
      std::make_unique<Sockets>(rank, rendezvous(rank, ranks, host, port, deadline), deadline);
  sockets->share_memory();
  return sockets;
}

}  // namespace fulgur::distributed
