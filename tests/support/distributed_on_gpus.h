/// Tests of ranks that compute on the GPUs of this machine.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "ranks.h"

namespace fulgur::test {

/// The number of GPUs of this machine. It is queried in a process of its own, as the processes that
/// compute are forked from one without a CUDA context.
int gpus();

class DistributedOnGpus : public testing::Test {
 protected:
  void SetUp() override {
    static const int count = gpus();
    if (count == 0) GTEST_SKIP() << "no GPU";
    count_ = count;
  }
  int count_ = 0;
};

}  // namespace fulgur::test
