#include "distributed/transport/mailbox.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <ctime>
#include <utility>

namespace fulgur::distributed {
namespace {

// Polling takes as long as a wake-up may take: first kSpins times without giving up the processor,
// then with sched_yield().
constexpr int kSpins = 2000;
constexpr std::chrono::microseconds kYielding{200};

/// Sleeps while the word has this value, at most until the timeout.
void sleep_while(const std::atomic<uint32_t>& word, uint32_t is,
                 std::chrono::milliseconds timeout) {
  timespec time{timeout.count() / 1000, timeout.count() % 1000 * 1'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, is, &time, nullptr, 0);
}

void wake(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

/// A message from one rank to another one.
struct alignas(64) Mailbox::Slot {
  std::atomic<uint32_t> step;    ///< of the message in the slot
  std::atomic<uint32_t> asleep;  ///< whether the receiver sleeps
  uint64_t size;
  std::byte message[kMaxBytes];
};

Mailbox::Mailbox(SharedMemory memory, int rank, int ranks)
    : memory_(std::move(memory)), rank_(rank), ranks_(ranks) {
  static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);
}

int64_t Mailbox::bytes(int ranks) {
  return kAnyBytes + 2 * int64_t{ranks} * ranks * static_cast<int64_t>(sizeof(Slot));
}

auto Mailbox::slot(int to, int from, uint64_t step) const -> Slot& {
  return reinterpret_cast<Slot*>(
      memory_.data() +
      kAnyBytes)[2 * (int64_t{to} * ranks_ + from) + static_cast<int64_t>(step % 2)];
}

void Mailbox::post(int to, uint64_t step, std::span<const std::byte> message) {
  Slot& s = slot(to, rank_, step);
  s.size = message.size();
  if (!message.empty() && message.size() <= kMaxBytes) {
    std::memcpy(s.message, message.data(), message.size());
  }
  s.step.store(static_cast<uint32_t>(step));
  if (s.asleep.load() != 0) wake(s.step);
}

std::optional<uint64_t> Mailbox::wait(int from, uint64_t step, std::chrono::milliseconds timeout) {
  Slot& s = slot(rank_, from, step);
  const auto there = [&] { return s.step.load() == static_cast<uint32_t>(step); };
  for (int i = 0; i < kSpins; ++i) {
    if (there()) return s.size;
    pause_briefly();
  }
  const auto end = std::chrono::steady_clock::now() + kYielding;
  do {
    if (there()) return s.size;
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  s.asleep.store(1);
  const uint32_t before = s.step.load();
  if (before != static_cast<uint32_t>(step)) sleep_while(s.step, before, timeout);
  s.asleep.store(0);
  return there() ? std::optional(s.size) : std::nullopt;
}

void Mailbox::take(int from, uint64_t step, std::span<std::byte> to) {
  if (!to.empty()) std::memcpy(to.data(), slot(rank_, from, step).message, to.size());
}

}  // namespace fulgur::distributed
