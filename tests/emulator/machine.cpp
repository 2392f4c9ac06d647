#include "machine.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "fake_driver.h"

emulator::Counts emulator_counts;

namespace emulator {
namespace {

constexpr size_t kStackBytes = 1 << 17;

std::mt19937_64 chance;
std::vector<std::function<void()>> waiting_actions;
std::jmp_buf scheduler;
const Launch* launch = nullptr;
Grids grids;

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
  auto block = std::make_unique<Block>(launch.shared_bytes);
  const unsigned threads = launch.threads.x;
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
    block->races.add_actor("thread " + std::to_string(i));
  }
  block->before = block->races.add_actor("the kernels before");
  if (threads % 32 != 0) block->warps.back().gone = ~0u << threads % 32;
  return block;
}

}  // namespace

Thread* current = nullptr;
const Place* place = nullptr;

int sms() {
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

Access Groups::access() {
  if (!actor) {
    actor = current->block->races.add_actor(std::string(name) + " of thread " +
                                            std::to_string(current->actor()));
  }
  return {*actor, ++open.last};
}

void Groups::commit() {
  const uint32_t last = open.last;
  closed.push_back(std::move(open));
  open = {{}, {}, last};
}

void Groups::read(size_t pending) {
  for (size_t i = 0; i + pending < closed.size(); ++i) {
    for (const auto& read : closed[i].reads) read();
    closed[i].reads.clear();
    if (actor) current->learn(*actor, closed[i].last);
  }
}

void Groups::finish(size_t pending) {
  while (closed.size() > pending) {
    for (const auto& action : closed.front().actions) action();
    if (actor) current->learn(*actor, closed.front().last);
    closed.pop_front();
  }
}

void Thread::pass_on(Views& to) {
  views.seen.raise(actor(), accesses);
  uint32_t last = accesses++;
  for (const uint32_t first : {loading, loading_matrices})
    if (first != 0) last = std::min(last, first - 1);
  views.loaded.raise(actor(), last);
  to.join(views);
}

void Thread::learn(const Views& from) {
  views.join(from);
  news = true;
}

void Thread::learn(Actor actor, uint32_t number) {
  views.raise(actor, number);
  news = true;
}

void Thread::fence() {
  uses_loads();
  views.seen.raise(actor(), accesses++);
  views.fenced.join(views.seen);
  news = true;
}

void Thread::uses_words() {
  news = news || loading != 0;
  loading = 0;
}

void Thread::uses_loads() {
  uses_words();
  news = news || loading_matrices != 0;
  loading_matrices = 0;
}

void Thread::reads(const void* at, size_t bytes) {
  const auto place = static_cast<size_t>(static_cast<const unsigned char*>(at) - block->shared);
  news = true;
  if (loading == 0) loading = accesses;
  views.seen.raise(actor(), accesses);
  block->races.read(place, bytes, {actor(), accesses}, views.seen);
}

void Thread::reads_matrix(const void* at) {
  const uint32_t words = loading;
  reads(at, 16);
  loading = words;
  if (loading_matrices == 0) loading_matrices = accesses;
}

void Thread::writes(const void* at, size_t bytes) {
  const auto place = static_cast<size_t>(static_cast<const unsigned char*>(at) - block->shared);
  news = true;
  uses_words();
  views.seen.raise(actor(), accesses);
  block->races.write(place, bytes, {actor(), accesses}, views.seen, views.seen);
}

namespace {

/// Variables of the thread are no global memory.
bool on_stack(const Thread& thread, const void* at) {
  return static_cast<size_t>(static_cast<const unsigned char*>(at) - thread.stack) < kStackBytes;
}

}  // namespace

void Thread::reads_global(const void* at, size_t bytes) {
  if (on_stack(*this, at)) return;
  if (fulgur::test::is_allocated(at)) emulator_counts.read += bytes;
  grids.read(at, bytes, views.seen.of(block->before) > 0);
}

void Thread::writes_global(const void* at, size_t bytes) {
  if (on_stack(*this, at)) return;
  emulator_counts.written += bytes;
  grids.write(at, bytes, views.seen.of(block->before) > 0);
}

void wait_for_earlier_kernels() {
  current->block->waited = true;
  current->learn(current->block->before, 1);
}

void Mbarrier::settle() {
  if (missing != 0 || bytes != 0) return;
  missing = arrivals;
  ++phase;
  if (actor) views.arrived.raise(*actor, landed);
  views.pass();
}

Block::Block(size_t bytes)
    : shared_bytes(bytes),
      all_bytes((bytes + 63) / 64 * 64 + kVariableBytes),
      storage(all_bytes + 1024, 0xff),  // nobody may rely on what was there
      races(all_bytes) {
  const auto address = reinterpret_cast<uintptr_t>(storage.data());
  shared = storage.data() + (1024 - address % 1024) % 1024;
}

unsigned char* Block::at(uint32_t address, size_t bytes) {
  if (address < kSharedBase || address - kSharedBase + bytes > shared_bytes) {
    fail("shared memory has no bytes " + std::to_string(address) + " to " +
         std::to_string(address + bytes));
  }
  return shared + (address - kSharedBase);
}

size_t Block::place_of(uint32_t address, size_t bytes) {
  return static_cast<size_t>(at(address, bytes) - shared);
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

namespace {

/// A warp's accesses to shared memory happen in the order of its instructions, so that those before
/// lanes come together happen before those after.
void order(Thread* lanes, uint32_t present) {
  const auto for_lanes = [&](const auto& act) {
    for (int i = 0; i < 32; ++i)
      if (present >> i & 1) act(lanes[i]);
  };
  bool news = false;
  for_lanes([&](const Thread& lane) { news = news || lane.news; });
  if (!news) return;
  static Views all;
  all.clear();
  for_lanes([&](Thread& lane) { lane.pass_on(all); });
  for_lanes([&](Thread& lane) {
    lane.views = all;
    // Lanes of another mask may not have been here.
    lane.news = present != ~0u;
  });
}

}  // namespace

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
  order(&current->block->threads[place->thread.x / 32 * 32], meeting.arrived);
  meeting.arrived = 0;
  ++meeting.number;
}

void named_barrier(uint32_t name, uint32_t threads, bool waits) {
  NamedBarrier& barrier = current->block->barriers[name];
  const uint64_t phase = barrier.phase;
  current->uses_loads();
  current->pass_on(barrier.views.arrived);
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.phase;
    barrier.views.pass();
  }
  if (!waits) return;
  wait_until([&] { return barrier.phase != phase; });
  current->learn(barrier.views.passed);
}

void later(std::function<void()> action) { waiting_actions.push_back(std::move(action)); }

bool at_once() { return chance() % 4 == 0; }

void run(const Launch& work) {
  launch = &work;
  grids.start(work.early);
  const char* const seed = std::getenv("EMULATOR_SEED");
  // Each launch has an order of its own, so that what is run again may give other bits.
  static uint64_t launches = 0;
  chance.seed((seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10)) + (launches++ << 32));
  const unsigned count = work.blocks.x * work.blocks.y;
  unsigned next = 0;
  std::vector<std::unique_ptr<Block>> blocks;
  for (;;) {
    while (next < count && blocks.size() < static_cast<size_t>(sms()))
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
    std::erase_if(blocks, [&](const auto& block) {
      if (block->running > 0) return false;
      if (work.early && !block->waited)
        fail("a thread block of a kernel that starts early ends without griddepcontrol.wait");
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
  current->uses_loads();
  current->pass_on(barrier.views.arrived);
  wait_until(
      [&] { return barrier.phase != phase || static_cast<int>(barrier.arrived) == block.running; });
  if (barrier.phase == phase) {
    barrier.arrived = 0;
    ++barrier.phase;
    barrier.views.pass();
  }
  current->learn(barrier.views.passed);
}

bool vote_of_block(bool vote) {
  bool& voted = current->block->voted;
  synchronize_block();  // all have read the vote before
  voted = false;
  synchronize_block();
  voted = voted || vote;
  synchronize_block();
  return voted;
}

void synchronize_warp(unsigned mask) {
  meet(mask, nullptr, [](void* const*, uint32_t) {});
}

unsigned shuffle(unsigned mask, unsigned bits, int from) {
  struct Lane {
    unsigned bits, from, got;
  } mine{bits, static_cast<unsigned>(from), 0};
  current->uses_words();
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
  current->uses_words();
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
  Block& block = *current->block;
  const auto [found, is_new] = block.variables.try_emplace(line, block.variable_bytes);
  if (is_new) block.variable_bytes += (bytes + 63) / 64 * 64;
  if (block.variable_bytes > kVariableBytes) fail("too much shared memory for variables");
  return block.shared + (block.all_bytes - kVariableBytes) + found->second;
}

size_t shared_address(const void* at) {
  return kSharedBase +
         static_cast<size_t>(static_cast<const unsigned char*>(at) - current->block->shared);
}

}  // namespace emulator
