// FULGUR_KERNEL_DIR: the text that is compiled instead of the library's, and wrong folders.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "cuda/kernel_sources.h"
#include "engines.h"
#include "folder.h"

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

class Sources : public test::InFolder {
 protected:
  Sources() { std::ofstream(root_ / "a.cu") << "text of a"; }
  ~Sources() override { fs::current_path("/"); }

  /// That the folder is refused with these words.
  void expect_refused(const std::string& folder, const std::string& why) {
    setenv("FULGUR_KERNEL_DIR", folder.c_str(), 1);
    const auto read = [] { kernel_sources(); };
    EXPECT_EQ(test::status_of(read), Status::kInvalidArgument);
    EXPECT_EQ(test::message_of(read), "FULGUR_KERNEL_DIR: got " + folder + ": " + why +
                                          "; want the absolute path of a folder of kernel sources");
  }
  void expect_refused(const std::string& why) { expect_refused(root_.string(), why); }
  std::string at(const char* name) const { return (root_ / name).string(); }
};

TEST_F(Sources, NoFolder) {
  expect_refused(at("none"), "No such file or directory");
  expect_refused(at("a.cu"), "Not a directory");
  fs::remove(root_ / "a.cu");
  expect_refused("there is no kernel in it");
}

TEST_F(Sources, RelativePath) {
  fs::current_path(root_);
  expect_refused(".", "it is relative");
}

TEST_F(Sources, UnreadableFolderBelow) {
  const test::NotRoot user(root_);
  fs::create_directory(root_ / "below");
  fs::permissions(root_ / "below", fs::perms::none);
  expect_refused("Permission denied");
  fs::permissions(root_ / "below", fs::perms::owner_all);
}

TEST_F(Sources, UnreadableFile) {
  const test::NotRoot user(root_);
  std::ofstream(root_ / "b.h") << "text of b";
  fs::permissions(root_ / "b.h", fs::perms::none);
  expect_refused(at("b.h") + " cannot be read");
}

TEST_F(Sources, FileThatVanished) {
  fs::create_symlink(root_ / "gone", root_ / "b.cuh");
  expect_refused(at("b.cuh") + " cannot be read: No such file or directory");
}

TEST_F(Sources, NoFile) {
  fs::create_directory(root_ / "b.cu");
  expect_refused(at("b.cu") + " is not a file");
  fs::remove(root_ / "b.cu");
  ASSERT_EQ(mkfifo(at("b.cu").c_str(), 0600), 0);
  expect_refused(at("b.cu") + " is not a file");
}

// The last one: sources are read once in a process.
TEST_F(Sources, OfAFolder) {
  fs::create_directory(root_ / "below");
  std::ofstream(root_ / "below" / "b.cuh") << "text of b";
  std::ofstream(root_ / "notes.txt") << "no source";
  setenv("FULGUR_KERNEL_DIR", root_.c_str(), 1);
  EXPECT_EQ(kernel_sources(), (KernelSources{{"a.cu", "text of a"}, {"below/b.cuh", "text of b"}}));
}

}  // namespace
}  // namespace fulgur::cuda
