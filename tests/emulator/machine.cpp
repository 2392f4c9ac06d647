#include "machine.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace emulator {
namespace {

constexpr size_t kStackBytes = 1 << 17;

std::mt19937_64 chance;
std::vector<std::function<void()>> waiting_actions;
std::jmp_buf scheduler;
const Launch* launch = nullptr;

/// Stacks of threads that are done.
std::vector<unsigned char*> stacks;
unsigned char* new_stack() {
  if (stacks.empty()) {
    void* const memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for the stack of a thread");
    return static_cast<unsigned char*>(memory);
  }
  unsigned char* const stack = stacks.back();
  stacks.pop_back();
  return stack;
}

void leave_thread() {
  Thread& thread = *current;
  thread.done = true;
  --thread.block->running;
  thread.warp->gone |= 1u << thread.place.thread.x % 32;
  std::longjmp(scheduler, 1);
}

void thread_main() {
  launch->kernel();
  current->copies.finish(0);
  current->stores.finish(0);
  leave_thread();
}

void resume(Thread& thread) {
  current = &thread;
  place = &thread.place;
  if (setjmp(scheduler) != 0) return;
  if (thread.started) std::longjmp(thread.context, 1);
  thread.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, thread_main, 0);
  setcontext(&context);
}

bool some_action() {
  if (waiting_actions.empty()) return false;
  std::swap(waiting_actions[chance() % waiting_actions.size()], waiting_actions.back());
  const std::function<void()> action = std::move(waiting_actions.back());
  waiting_actions.pop_back();
  action();
  return true;
}

std::unique_ptr<Block> start_block(const Launch& launch, unsigned number) {
  auto block = std::make_unique<Block>();
  const unsigned threads = launch.threads.x;
  block->storage.resize(launch.shared_bytes + 1024);
  const auto address = reinterpret_cast<uintptr_t>(block->storage.data());
  block->shared = block->storage.data() + (1024 - address % 1024) % 1024;
  block->shared_bytes = launch.shared_bytes;
  // Nobody may rely on what was there.
  for (size_t i = 0; i < launch.shared_bytes; ++i) block->shared[i] = 0xff;
  block->threads.resize(threads);
  block->warps.resize((threads + 31) / 32);
  block->warpgroups.resize((threads + 127) / 128);
  block->running = static_cast<int>(threads);
  for (unsigned i = 0; i < threads; ++i) {
    Thread& thread = block->threads[i];
    thread.place = {{i, 0, 0},
                    {number % launch.blocks.x, number / launch.blocks.x, 0},
                    launch.threads,
                    launch.blocks};
    thread.block = block.get();
    thread.warp = &block->warps[i / 32];
    thread.warpgroup = &block->warpgroups[i / 128];
    thread.stack = new_stack();
  }
  if (threads % 32 != 0) block->warps.back().gone = ~0u << threads % 32;
  return block;
}

}  // namespace

Thread* current = nullptr;
const Place* place = nullptr;

int multiprocessors() {
  const char* const text = std::getenv("FAKE_CUDA_MULTIPROCESSORS");
  return text == nullptr ? 132 : std::atoi(text);
}

void fail(const std::string& what) {
  std::fprintf(stderr, "emulator: %s\n", what.c_str());
  if (current != nullptr) {
    std::fprintf(stderr, "  in thread %u of thread block %u, %u\n", place->thread.x, place->block.x,
                 place->block.y);
  }
  std::abort();
}

void Groups::commit() {
  closed.push_back(std::move(open));
  open.clear();
}

void Groups::finish(size_t pending) {
  while (closed.size() > pending) {
    for (const auto& action : closed.front()) action();
    closed.pop_front();
  }
}

void Mbarrier::settle() {
  if (missing != 0 || bytes != 0) return;
  missing = arrivals;
  ++phase;
}

unsigned char* Block::at(uint32_t address, size_t bytes) {
  if (address < kSharedBase || address - kSharedBase + bytes > shared_bytes) {
    fail("shared memory has no bytes " + std::to_string(address) + " to " +
         std::to_string(address + bytes));
  }
  return shared + (address - kSharedBase);
}

Mbarrier& Block::mbarrier(uint32_t address) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) fail("no barrier was made at " + std::to_string(address));
  return found->second;
}

void wait(bool (*ready)(const void*), const void* waiting) {
  Thread& thread = *current;
  thread.ready = ready;
  thread.waiting = waiting;
  if (setjmp(thread.context) == 0) std::longjmp(scheduler, 1);
}

void meet(uint32_t mask, void* mine, void (*act)(void* const* lanes, uint32_t mask)) {
  const Warp& warp = *current->warp;
  Meeting& meeting = current->warp->meetings[mask];
  const uint32_t lane = place->thread.x % 32;
  if ((mask >> lane & 1) == 0) fail("a lane waits for others and not for itself");
  if (meeting.arrived >> lane & 1) fail("lanes of a warp meet at two places");
  meeting.lanes[lane] = mine;
  meeting.arrived |= 1u << lane;
  const uint64_t number = meeting.number;
  const auto complete = [&] { return ((meeting.arrived | warp.gone) & mask) == mask; };
  wait_until([&] { return meeting.number != number || complete(); });
  if (meeting.number != number) return;
  act(meeting.lanes, meeting.arrived);
  meeting.arrived = 0;
  ++meeting.number;
}

void named_barrier(uint32_t name, uint32_t threads, bool waits) {
  NamedBarrier& barrier = current->block->barriers[name];
  const uint64_t phase = barrier.phase;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.phase;
  }
  if (waits) wait_until([&] { return barrier.phase != phase; });
}

void later(std::function<void()> action) { waiting_actions.push_back(std::move(action)); }

bool at_once() { return chance() % 4 == 0; }

void run(const Launch& work) {
  launch = &work;
  const char* const seed = std::getenv("EMULATOR_SEED");
  chance.seed(seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10));
  const unsigned count = work.blocks.x * work.blocks.y;
  unsigned next = 0;
  std::vector<std::unique_ptr<Block>> blocks;
  for (;;) {
    while (next < count && blocks.size() < static_cast<size_t>(multiprocessors()))
      blocks.push_back(start_block(work, next++));
    if (blocks.empty()) break;
    bool progress = false;
    std::shuffle(blocks.begin(), blocks.end(), chance);
    for (const auto& block : blocks) {
      // Warps take turns in any order, and lanes of a warp one after another.
      const size_t warps = block->warps.size();
      const size_t first = chance() % warps;
      for (size_t w = 0; w < warps; ++w) {
        const size_t warp = (first + w) % warps;
        for (size_t i = 32 * warp; i < std::min(32 * warp + 32, block->threads.size()); ++i) {
          Thread& thread = block->threads[i];
          if (thread.done) continue;
          current = &thread;
          place = &thread.place;
          if (thread.ready != nullptr && !thread.ready(thread.waiting)) continue;
          thread.ready = nullptr;
          resume(thread);
          progress = true;
        }
      }
      if (chance() % 8 == 0) progress = some_action() || progress;
    }
    current = nullptr;
    if (!progress && !some_action()) {
      for (const auto& block : blocks)
        for (const Thread& thread : block->threads)
          if (!thread.done && thread.place.thread.x % 32 == 0)
            std::fprintf(stderr, "emulator: thread %u of thread block %u waits\n",
                         thread.place.thread.x, thread.place.block.x);
      fail("every thread waits for another");
    }
    std::erase_if(blocks, [](const auto& block) {
      if (block->running > 0) return false;
      for (const Thread& thread : block->threads) stacks.push_back(thread.stack);
      return true;
    });
  }
  while (some_action()) {
  }
  current = nullptr;
}

// What the kernels' text calls.

void synchronize_block() {
  NamedBarrier& barrier = current->block->barriers[0];
  const uint64_t phase = barrier.phase;
  ++barrier.arrived;
  Block& block = *current->block;
  wait_until(
      [&] { return barrier.phase != phase || static_cast<int>(barrier.arrived) == block.running; });
  if (barrier.phase != phase) return;
  barrier.arrived = 0;
  ++barrier.phase;
}

void synchronize_warp(unsigned mask) {
  meet(mask, nullptr, [](void* const*, uint32_t) {});
}

unsigned shuffle(unsigned mask, unsigned bits, int from) {
  struct Lane {
    unsigned bits, from, got;
  } mine{bits, static_cast<unsigned>(from), 0};
  meet(mask, &mine, [](void* const* lanes, uint32_t present) {
    for (int i = 0; i < 32; ++i) {
      if ((present >> i & 1) == 0) continue;
      Lane& lane = *static_cast<Lane*>(lanes[i]);
      lane.got = present >> lane.from & 1 ? static_cast<Lane*>(lanes[lane.from])->bits : 0xdeadbeef;
    }
  });
  return mine.got;
}

unsigned ballot(unsigned mask, bool vote) {
  struct Lane {
    bool vote;
    unsigned all;
  } mine{vote, 0};
  meet(mask, &mine, [](void* const* lanes, uint32_t present) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i)
      if (present >> i & 1) all |= static_cast<unsigned>(static_cast<Lane*>(lanes[i])->vote) << i;
    for (int i = 0; i < 32; ++i)
      if (present >> i & 1) static_cast<Lane*>(lanes[i])->all = all;
  });
  return mine.all;
}

unsigned char* dynamic_shared() { return current->block->shared; }

void* static_shared(int line, size_t bytes) {
  auto& variable = current->block->variables[line];
  if (variable.empty()) variable.assign(bytes + 64, 0xff);
  const auto address = reinterpret_cast<uintptr_t>(variable.data());
  return variable.data() + (64 - address % 64) % 64;
}

size_t shared_address(const void* at) {
  return kSharedBase +
         static_cast<size_t>(static_cast<const unsigned char*>(at) - current->block->shared);
}

}  // namespace emulator
