// Which text a kernel is compiled from. FULGUR_KERNEL_DIR: other text instead of the library's, and
// wrong folders.
#include "cuda/jit/sources.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "cuda/jit/compile.h"
#include "engines.h"
#include "folder.h"

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

const KernelSources kIncluding = {
    {"a.cu", "#pragma once\n#include \"kernel_config.h\"\n  # include \"below/b.cuh\"  // why\n"},
    {"below/b.cuh", "#include <c.h>\n#include <cstdint>\n#include \"a.cu\"\n"},
    {"c.h", "// #include \"d.h\"\n"},
    {"d.cu", "#include \"c.h\"\n"},
    {"d.h", "text of d"}};

TEST(SourcesOf, AllThatIsIncluded) {
  KernelSources want = kIncluding;
  want.erase("d.cu");
  want.erase("d.h");
  EXPECT_EQ(sources_of(kIncluding, "a.cu"), want);
  EXPECT_EQ(sources_of(kIncluding, "d.h"), (KernelSources{{"d.h", "text of d"}}));
}

TEST(SourcesOf, WhatIsMissing) {
  KernelSources sources = kIncluding;
  sources.erase("below/b.cuh");
  const auto read = [&] { sources_of(sources, "a.cu"); };
  EXPECT_EQ(test::status_of(read), Status::kInternal);
  EXPECT_EQ(test::message_of(read), "the kernel sources lack below/b.cuh, which a.cu includes");
  sources.erase("a.cu");
  EXPECT_EQ(test::message_of(read), "the kernel sources lack a.cu, which is to be compiled");
}

// A kernel's key outlives changes of the text of others.
TEST(SourcesOf, TheLibrarysKernels) {
  KernelSources sources = embedded_sources();
  const auto digests = [&] {
    return std::pair(digest(sources_of(sources, "sm90/forward/forward.cu")),
                     digest(sources_of(sources, "decode/decode_warp.cu")));
  };
  const auto [forward, decode] = digests();
  sources.at("decode/loads/lane_loader.cuh") += "\n";
  const auto [same_forward, changed_decode] = digests();
  EXPECT_EQ(same_forward, forward);
  EXPECT_NE(changed_decode, decode);
  sources.at("host_device/mask.h") += "\n";  // included over several others
  const auto [changed_forward, again_decode] = digests();
  EXPECT_NE(changed_forward, forward);
  EXPECT_NE(again_decode, changed_decode);
}

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

  /// The key of a.cu in a process of its own, which reads the folder; empty without NVRTC.
  std::string key_of_a() const {
    setenv("FULGUR_KERNEL_DIR", root_.c_str(), 1);
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
      const std::string key =
          nvrtc_unavailable().empty() ? cache_key({.source = "a.cu", .kernel_config = {}}, {}) : "";
      _exit(write(ends[1], key.data(), key.size()) == static_cast<ssize_t>(key.size()) ? 0 : 1);
    }
    close(ends[1]);
    std::string key(64, '\0');
    key.resize(std::max<ssize_t>(read(ends[0], key.data(), key.size()), 0));
    close(ends[0]);
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    return key;
  }
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

TEST_F(Sources, KeysAreOfWhatIsRead) {
  std::ofstream(root_ / "a.cu") << "#include \"b.h\"\n";
  std::ofstream(root_ / "b.h") << "text of b";
  const std::string key = key_of_a();
  if (key.empty()) GTEST_SKIP() << "no NVRTC";
  std::ofstream(root_ / "c.h") << "text of c";
  EXPECT_EQ(key_of_a(), key);
  std::ofstream(root_ / "b.h") << "other text of b";
  EXPECT_NE(key_of_a(), key);
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
