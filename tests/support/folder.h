/// A folder for one test, and this process as another user for a scope.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace fulgur::test {

/// A test with a folder of its own, which is removed after it.
class InFolder : public testing::Test {
 protected:
  InFolder() {
    namespace fs = std::filesystem;
    std::string name = (fs::temp_directory_path() / "fulgur_test_XXXXXX").string();
    root_ = fs::canonical(mkdtemp(name.data()));
  }
  ~InFolder() override { std::filesystem::remove_all(root_); }

  std::filesystem::path root_;
};

/// Root may read and write anything: a test of what is refused becomes another user meanwhile.
class NotRoot {
 public:
  explicit NotRoot(const std::filesystem::path& folder) {
    if (me_ != 0) return;
    std::filesystem::permissions(folder, std::filesystem::perms::all);
    EXPECT_EQ(seteuid(kNobody), 0);
  }
  ~NotRoot() { EXPECT_EQ(seteuid(me_), 0); }
  NotRoot(const NotRoot&) = delete;
  NotRoot& operator=(const NotRoot&) = delete;

  static constexpr uid_t kNobody = 65534;

 private:
  uid_t me_ = geteuid();
};

}  // namespace fulgur::test
