/// An SM's threads, as fibers of one thread of the host: a thread runs until it must
/// wait, and then another one that need not wait runs, in an order that a seed decides. Copies and
/// products that a thread starts and waits for later happen at some time between, which the seed
/// decides, too.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "counts.h"
#include "device.h"
#include "grids.h"
#include "races.h"

namespace emulator {

struct Block;

/// What a thread has started and not waited for: groups of actions, the last of which is open.
struct Groups {
  struct Group {
    std::vector<std::function<void()>> actions;
    std::vector<std::function<void()>> reads;  ///< of shared memory, the first part of stores
    uint32_t last = 0;                         ///< number of its last access
  };
  const char* name;
  std::deque<Group> closed{};
  Group open{};
  std::optional<Actor> actor{};  ///< of what is started, once there is something

  Access access();  ///< the next one of the thread that runs
  void commit();
  void finish(size_t pending);  ///< all but the last `pending` groups
  void read(size_t pending);    ///< likewise, what they read of shared memory alone
};

/// Lanes of one mask that wait for each other.
struct Meeting {
  void* lanes[32] = {};
  uint32_t arrived = 0;
  uint64_t number = 0;
};

struct Warp {
  std::map<uint32_t, Meeting> meetings;  ///< by mask
  uint32_t gone = 0;
};

/// A product of a warpgroup: what each of its threads brings.
struct Product {
  std::shared_ptr<void> shares;
  int arrived = 0;
  View writes{};  ///< that all of them may read
  std::function<void()> compute;
};

struct Warpgroup {
  std::deque<Product> products;
  uint64_t first = 0;  ///< number of the first of them
  std::optional<Actor> actor{};

  bool arrived(uint64_t end) const;  ///< all threads, at the products before `end`
  void finish(uint64_t end);
};

struct Thread {
  Place place;
  Block* block;
  Warp* warp;
  Warpgroup* warpgroup;
  bool done = false;
  bool (*ready)(const void*) = nullptr;
  const void* waiting = nullptr;
  Groups copies{"a copy"};  ///< cp.async
  Groups stores{"a bulk store"};
  std::vector<uint64_t> product_groups;  ///< number after the last product of each group
  uint64_t products = 0;
  Views views;
  uint32_t accesses = 1;  ///< number of the next; one number for all up to a barrier or a fence
  /// Numbers of the first loads that may be in flight: of words, and of matrices. 0: there is none.
  uint32_t loading = 0, loading_matrices = 0;
  std::jmp_buf context;
  bool started = false;
  unsigned char* stack;

  const volatile void* asked =
      nullptr;  ///< the last number that may be waited for, and what it was
  uint32_t answer = 0;

  bool news = false;  ///< whether it has changed memory since other lanes of its warp ran

  Actor actor() const { return place.thread.x; }
  void pass_on(Views& to);  ///< what it knows and has done itself
  void learn(const Views& from);
  void learn(Actor actor, uint32_t number);
  void fence();       ///< lets the asynchronous proxy see what it knows
  void uses_words();  ///< a vote, shuffle or store takes words that it has loaded
  void uses_loads();  ///< and for matrices
  void reads(const void* at, size_t bytes);  ///< of shared memory
  void reads_matrix(const void* at);         ///< 16 bytes of one
  void writes(const void* at, size_t bytes);
  void reads_global(const void* at, size_t bytes);  ///< also what another one will read for it
  void writes_global(const void* at, size_t bytes);
};

/// What those who arrive at a barrier know, and with the last one those who wait for it.
struct Gathering {
  Views arrived, passed;
  void pass() {
    passed.join(arrived);
    arrived.clear();
  }
};

struct Mbarrier {
  uint32_t arrivals, missing;
  int64_t bytes = 0;
  uint64_t phase = 0;
  Gathering views{};
  std::optional<Actor> actor{};  ///< copies that arrive here
  uint32_t started = 0, landed = 0;
  void settle();
};

struct NamedBarrier {
  uint32_t arrived = 0;
  uint64_t phase = 0;
  Gathering views{};
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  size_t shared_bytes;        ///< of the launch
  size_t all_bytes;           ///< variables are after them
  size_t variable_bytes = 0;  ///< used
  bool voted = false;         ///< by a thread, in the vote under way
  std::vector<unsigned char> storage;
  unsigned char* shared;
  std::map<uint32_t, Mbarrier> mbarriers;
  std::map<uint32_t, NamedBarrier> barriers;
  std::map<int, size_t> variables;  ///< their places
  Races races;
  Actor before = 0;     ///< the kernels before, whose end is one access
  bool waited = false;  ///< for them, by a thread
  int running;

  explicit Block(size_t bytes);
  unsigned char* at(uint32_t address, size_t bytes);  ///< of shared memory, checked
  size_t place_of(uint32_t address, size_t bytes);    ///< as `races` counts
  Mbarrier& mbarrier(uint32_t address);
};

enum : uint32_t {
  kSharedBase = 1024,     ///< address of the first byte of shared memory
  kVariableBytes = 49152  ///< most of variables
};

extern Thread* current;

/// Ends the process with what went wrong and where.
[[noreturn]] void fail(const std::string& what);

/// The thread that runs goes on when `ready()` is true.
void wait(bool (*ready)(const void*), const void* waiting);
template <class Ready>
void wait_until(const Ready& ready) {
  if (!ready()) wait([](const void* at) { return (*static_cast<const Ready*>(at))(); }, &ready);
}

/// All lanes of the mask bring something, and the last one acts for all.
void meet(uint32_t mask, void* mine, void (*act)(void* const* lanes, uint32_t mask));

void named_barrier(uint32_t name, uint32_t threads, bool waits);

/// Until the kernels before have ended.
void wait_for_earlier_kernels();

/// Happens at any time from now on.
void later(std::function<void()> action);
/// Whether chance wants something to happen at once.
bool at_once();

struct Launch {
  Index blocks, threads;
  size_t shared_bytes;
  std::function<void()> kernel;
  bool early = false;  ///< may start before the kernel before it has ended
};
/// Runs all CTAs, as many at a time as there are SMs.
void run(const Launch& launch);

int sms();

}  // namespace emulator
