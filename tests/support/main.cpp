// Runs GoogleTest and exits 77 (CTest's "skipped") when every test that was selected skipped
// itself, so that a machine without an engine never reports its tests as passed, and when a shard
// has no test.
#include <gtest/gtest.h>

#include <cstdlib>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int failed = RUN_ALL_TESTS();
  const auto& run = *testing::UnitTest::GetInstance();
  if (run.test_to_run_count() == 0)  // a filter that selects nothing tests nothing
    return getenv("GTEST_TOTAL_SHARDS") == nullptr ? 1 : 77;
  if (!failed && run.skipped_test_count() == run.test_to_run_count())
    return getenv("FULGUR_TEST_WITHOUT_SKIPS") == nullptr ? 77 : 1;
  return failed;
}
