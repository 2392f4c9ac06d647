/// A multiprocessor's threads, as fibers of one thread of the host: a thread runs until it must
/// wait, and then another one that need not wait runs, in an order that a seed decides. Copies and
/// products that a thread starts and waits for later happen at some time between, which the seed
/// decides, too.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device.h"

namespace emulator {

struct Block;

/// What a thread has started and not waited for: groups of actions, the last of which is open.
struct Groups {
  std::deque<std::vector<std::function<void()>>> closed;
  std::vector<std::function<void()>> open;

  void commit();
  void finish(size_t pending);  ///< all but the last `pending` groups
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
  std::function<void()> compute;
};

struct Warpgroup {
  std::deque<Product> products;
  uint64_t first = 0;  ///< number of the first of them

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
  Groups copies, stores;                 ///< cp.async; bulk stores
  std::vector<uint64_t> product_groups;  ///< number behind the last product of each group
  uint64_t products = 0;
  std::jmp_buf context;
  bool started = false;
  unsigned char* stack;
};

struct Mbarrier {
  uint32_t arrivals, missing;
  int64_t bytes = 0;
  uint64_t phase = 0;
  void settle();
};

struct NamedBarrier {
  uint32_t arrived = 0;
  uint64_t phase = 0;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  std::vector<unsigned char> storage;
  unsigned char* shared;
  size_t shared_bytes;
  std::map<uint32_t, Mbarrier> mbarriers;
  std::map<uint32_t, NamedBarrier> barriers;
  std::map<int, std::vector<unsigned char>> variables;
  int running;

  unsigned char* at(uint32_t address, size_t bytes);  ///< of shared memory, checked
  Mbarrier& mbarrier(uint32_t address);
};

enum : uint32_t { kSharedBase = 1024 };  ///< address of the first byte of shared memory

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

/// Happens at any time from now on.
void later(std::function<void()> action);
/// Whether chance wants something to happen at once.
bool at_once();

struct Launch {
  Index blocks, threads;
  size_t shared_bytes;
  std::function<void()> kernel;
};
/// Runs all thread blocks, as many at a time as there are multiprocessors.
void run(const Launch& launch);

int multiprocessors();

}  // namespace emulator
