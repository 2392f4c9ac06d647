// The emulator finds a race where an order is missing, and none where it is there.
#include <gtest/gtest.h>

#include <functional>

#include "machine.h"

namespace emulator {
namespace {

void launch(unsigned threads, const std::function<void()>& kernel) {
  run({{1, 1, 1}, {threads, 1, 1}, 4096, kernel});
}
unsigned me() { return place->thread.x; }

uint64_t address(uint32_t at) { return kSharedBase + at; }

void store(uint32_t at) {
  execute("st.shared.s32 [%0], %1;", "l", value(address(at)), "l", value(uint64_t{1}));
}
uint32_t load(uint32_t at) {
  uint32_t x = 0;
  execute("ld.shared.s32 %0, [%1];", "=r", variable(x), "l", value(address(at)));
  return x;
}
void barrier(uint64_t name, uint64_t threads) {
  execute("bar.sync %0, %1;", "l", value(name), "l", value(threads));
}
void arrive(uint64_t name, uint64_t threads) {
  execute("bar.arrive %0, %1;", "l", value(name), "l", value(threads));
}
void init(uint32_t at, uint64_t arrivals) {
  if (me() == 0)
    execute("mbarrier.init.b64 [%0], %1;", "l", value(address(at)), "l", value(arrivals));
  synchronize_block();
}
void arrive_at(uint32_t at) { execute("mbarrier.arrive.b64 _, [%0];", "l", value(address(at))); }
void wait_at(uint32_t at, uint64_t parity) {
  execute("{.reg .pred done; mbarrier.try_wait.parity.b64 done, [%0], %1;}", "l",
          value(address(at)), "l", value(parity));
}
/// D = A B, with both operands at the beginning of shared memory.
void start_product(float (&D)[4]) {
  const uint64_t both = uint64_t{1} << 62 | kSharedBase >> 4;
  execute(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, %6, 1, 1, 0, "
      "0;",
      "+f", variable(D[0]), "+f", variable(D[1]), "+f", variable(D[2]), "+f", variable(D[3]), "l",
      value(both), "l", value(both), "l", value(uint64_t{0}));
  execute("wgmma.commit_group.sync.aligned;");
}
void fence() { execute("fence.proxy.async.shared::cta;"); }
alignas(16) const float kGlobal[64] = {};
alignas(16) float stored[64];
/// 32 bytes to the beginning of shared memory, for the barrier at 64.
void start_bulk_load() {
  execute("mbarrier.arrive.expect_tx.b64 _, [%0], %1;", "l", value(address(64)), "l",
          value(uint64_t{32}));
  execute("cp.async.bulk.shared::cluster.global.mbarrier [%0], [%1], %2, [%3];", "l",
          value(address(0)), "l", value(kGlobal), "l", value(uint64_t{32}), "l",
          value(address(64)));
}
/// 128 bytes from there.
void start_bulk_store() {
  execute("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;", "l", value(stored), "l",
          value(address(0)), "l", value(uint64_t{128}));
  execute("cp.async.bulk.commit_group;");
}

struct Order {
  const char* what;
  unsigned threads;
  std::function<void(bool ordered)> kernel;
};

const Order kOrders[] = {
    {"a barrier of the CTA", 64,
     [](bool ordered) {
       if (me() == 40) store(0);
       if (ordered) synchronize_block();
       if (me() == 3) load(0);
     }},
    {"a barrier between reads and a write", 64,
     [](bool ordered) {
       load(0);
       if (ordered) synchronize_block();
       if (me() == 3) store(0);
     }},
    {"a barrier of these threads", 96,
     [](bool ordered) {
       const bool outside = me() >= 64;
       if (me() == (ordered ? 0 : 64)) store(0);
       barrier(1 + outside, outside ? 32 : 64);
       if (me() == 63) load(0);
     }},
    {"who arrives at a barrier writes before", 64,
     [](bool ordered) {
       if (me() < 32) {
         if (ordered) store(4 * me());
         arrive(1, 64);
         if (!ordered) store(4 * me());
       } else {
         barrier(1, 64);
         load(4 * (me() - 32));
       }
     }},
    {"a barrier of the warp", 32,
     [](bool ordered) {
       store(4 * me());
       if (ordered) synchronize_warp(~0u);
       load(4 * (me() ^ 1));
     }},
    {"an mbarrier", 64,
     [](bool ordered) {
       init(64, 32);
       if (me() < 32) {
         store(4 * me());
         arrive_at(64);
       } else {
         if (ordered) wait_at(64, 0);
         load(4 * (me() - 32));
       }
     }},
    {"the wait for one's own copy", 1,
     [](bool ordered) {
       for (const uint32_t at : {0, 16}) {
         execute("cp.async.cg.shared.global [%0], [%1], 16;", "l", value(address(at)), "l",
                 value(kGlobal));
         execute("cp.async.commit_group;");
       }
       ordered ? execute("cp.async.wait_group 0;") : execute("cp.async.wait_group 1;");
       load(16);
     }},
    {"copies that arrive at an mbarrier", 64,
     [](bool ordered) {
       init(1024, 32);
       if (me() < 32) {
         if (!ordered)
           execute("cp.async.mbarrier.arrive.noinc.b64 [%0];", "l", value(address(1024)));
         execute("cp.async.cg.shared.global [%0], [%1], 16;", "l", value(address(16 * me())), "l",
                 value(kGlobal));
         if (ordered)
           execute("cp.async.mbarrier.arrive.noinc.b64 [%0];", "l", value(address(1024)));
       } else {
         wait_at(1024, 0);
         load(16 * (me() - 32));
       }
     }},
    {"the wait for a bulk load", 2,
     [](bool ordered) {
       init(64, 1);
       if (me() == 0) {
         start_bulk_load();
       }
       if (ordered || me() == 0) wait_at(64, 0);
       load(16);
     }},
    {"readers arrive before a bulk load", 2,
     [](bool ordered) {
       init(64, 1);
       init(128, 1);
       if (me() == 1) {
         load(16);
         fence();
         arrive_at(128);
         return;
       }
       if (ordered) wait_at(128, 0);
       start_bulk_load();
       wait_at(64, 0);
     }},
    {"a load returns before its reader arrives", 2,
     [](bool ordered) {
       init(64, 1);
       init(128, 1);
       if (me() == 1) {
         load(16);
         if (ordered) fence();
         arrive_at(128);
         if (!ordered) fence();
         return;
       }
       wait_at(128, 0);
       start_bulk_load();
       wait_at(64, 0);
     }},
    {"a load is used before its reader arrives", 33,
     [](bool ordered) {
       init(64, 1);
       init(128, 1);
       if (me() < 32) {
         const uint32_t x = me() == 0 ? load(16) : 0;
         ordered ? void(shuffle(~0u, x, 0)) : synchronize_warp(~0u);
         if (me() == 0) arrive_at(128);
         return;
       }
       wait_at(128, 0);
       start_bulk_load();
       wait_at(64, 0);
     }},
    {"a load is stored before its reader arrives", 2,
     [](bool ordered) {
       init(64, 1);
       init(128, 1);
       if (me() == 1) {
         load(16);
         if (ordered) store(192);
         arrive_at(128);
         return;
       }
       wait_at(128, 0);
       start_bulk_load();
       wait_at(64, 0);
     }},
    {"a fence before a bulk store", 32,
     [](bool ordered) {
       store(4 * me());
       if (ordered) fence();
       synchronize_warp(~0u);
       if (me() != 0) return;
       start_bulk_store();
       execute("cp.async.bulk.wait_group 0;");
     }},
    {"the wait for a bulk store", 1,
     [](bool ordered) {
       fence();
       start_bulk_store();
       if (ordered) execute("cp.async.bulk.wait_group.read 0;");
       store(64);
     }},
    {"the wait for a product", 128,
     [](bool ordered) {
       float D[4] = {};
       start_product(D);
       if (ordered) execute("wgmma.wait_group.sync.aligned 0;");
       synchronize_block();
       if (me() == 0) store(0);
       execute("wgmma.wait_group.sync.aligned 0;");
     }},
    {"a fence before a product", 128,
     [](bool ordered) {
       float D[4] = {};
       if (me() == 0) store(0);
       synchronize_block();
       if (ordered) fence();
       start_product(D);
       execute("wgmma.wait_group.sync.aligned 0;");
     }},
};

// Kernels of which the second may start before the first has ended.

/// Two kernels of 64 threads, in which thread 40 of the first and thread `reader` of the second
/// access the same global memory.
void two_kernels(const std::function<void()>& first, const std::function<void()>& second) {
  run({{1, 1, 1}, {64, 1, 1}, 4096, first});
  run({{1, 1, 1}, {64, 1, 1}, 4096, second, true});
}
void store_global() {
  execute("st.release.gpu.global.s32 [%0], %1;", "l", value(stored), "l", value(uint64_t{1}));
}
void load_global() {
  uint32_t x = 0;
  execute("ld.global.cg.f32 %0, [%1];", "=r", variable(x), "l", value(stored));
}
void wait_for_kernels() { execute("griddepcontrol.wait;"); }
void store_one() {
  if (me() == 40) store_global();
}
void load_one() {
  if (me() == 40) load_global();
}

TEST(EarlyStart, ReadsWhatWasWrittenAfterItHasWaited) {
  two_kernels(store_one, [] {
    wait_for_kernels();
    load_global();
  });
  EXPECT_DEATH(two_kernels(store_one,
                           [] {
                             load_global();
                             wait_for_kernels();
                           }),
               "reads what a kernel before it writes");
}

TEST(EarlyStart, WritesWhatWasReadOrWrittenAfterItHasWaited) {
  for (void (*first)() : {store_one, load_one}) {
    two_kernels(first, [] {
      wait_for_kernels();
      store_one();
    });
    EXPECT_DEATH(two_kernels(first,
                             [] {
                               store_one();
                               wait_for_kernels();
                             }),
                 "writes what a kernel before it (reads|writes)");
  }
}

TEST(EarlyStart, OneThreadMayWaitForThoseThatABarrierTells) {
  two_kernels(store_one, [] {
    if (me() == 3) wait_for_kernels();
    synchronize_block();
    load_one();
  });
  EXPECT_DEATH(two_kernels(store_one,
                           [] {
                             synchronize_block();
                             if (me() == 3) wait_for_kernels();
                             load_one();
                           }),
               "reads what a kernel before it writes");
}

TEST(EarlyStart, BulkCopiesBeginAfterTheWait) {
  const auto load = [](bool waits) {
    return [waits] {
      init(64, 1);
      if (waits) wait_for_kernels();
      if (me() == 0) {
        execute("mbarrier.arrive.expect_tx.b64 _, [%0], %1;", "l", value(address(64)), "l",
                value(uint64_t{32}));
        execute("cp.async.bulk.shared::cluster.global.mbarrier [%0], [%1], %2, [%3];", "l",
                value(address(0)), "l", value(stored), "l", value(uint64_t{32}), "l",
                value(address(64)));
      }
      wait_at(64, 0);
      wait_for_kernels();
    };
  };
  two_kernels(store_one, load(true));
  EXPECT_DEATH(two_kernels(store_one, load(false)), "reads what a kernel before it writes");
}

// The kernel before has not ended when it has let the next one start, and has not waited then.
TEST(EarlyStart, WaitsForAllBeforeTheKernelBefore) {
  const auto three = [](bool waits) {
    two_kernels(store_one, wait_for_kernels);
    run({{1, 1, 1},
         {64, 1, 1},
         4096,
         [waits] {
           if (waits) wait_for_kernels();
           load_global();
           wait_for_kernels();
         },
         true});
  };
  three(true);
  EXPECT_DEATH(three(false), "reads what a kernel before it writes");
}

TEST(EarlyStart, EveryBlockWaits) {
  EXPECT_DEATH(two_kernels(store_one, [] {}), "ends without griddepcontrol.wait");
}

TEST(EarlyStart, KernelsThatComeAfterAllNeedNotWait) {
  run({{1, 1, 1}, {64, 1, 1}, 4096, store_one});
  run({{1, 1, 1}, {64, 1, 1}, 4096, load_global});
}

class Races : public testing::TestWithParam<Order> {};

TEST_P(Races, AreFound) {
  const Order& order = GetParam();
  launch(order.threads, [&] { order.kernel(true); });
  EXPECT_DEATH(launch(order.threads, [&] { order.kernel(false); }), "a race: ") << order.what;
}

INSTANTIATE_TEST_SUITE_P(Each, Races, testing::ValuesIn(kOrders), [](const auto& x) {
  std::string name = x.param.what;
  std::erase_if(name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
  return name;
});

TEST(Race, SaysWho) {
  EXPECT_DEATH(launch(64,
                      [] {
                        if (me() == 40) store(8);
                        if (me() == 3) load(8);
                      }),
               "a race: thread (3 reads|40 writes) byte 8 of shared memory, which thread "
               "(40 writes|3 reads), and nothing orders the two");
}

}  // namespace
}  // namespace emulator
