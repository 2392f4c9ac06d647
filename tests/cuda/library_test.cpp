// How CUDA's libraries are looked for, which of them are passed over, and what is said of them.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>

#include "cuda/driver/shared_library.h"
#include "cuda/jit/nvrtc.h"
#include "folder.h"

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

class Libraries : public test::InFolder {
 protected:
  ~Libraries() override { fs::current_path("/"); }

  fs::path make(const std::string& folder) const {
    fs::create_directories(root_ / folder);
    return root_ / folder;
  }
  /// A library called `name` in a folder of the test's.
  fs::path add(const std::string& folder, const std::string& name, const char* what) const {
    const fs::path there = make(folder);
    fs::copy_file(what, there / name);
    fs::permissions(there / name, fs::perms(0755));
    return there;
  }
  static size_t position(const std::vector<fs::path>& all, const fs::path& one) {
    return static_cast<size_t>(std::find(all.begin(), all.end(), one) - all.begin());
  }
};

constexpr std::array<const char*, 1> kName = {"libfulgur_test.so.1"};

TEST_F(Libraries, OpensFromFolderAndFindsSymbols) {
  const fs::path none = make("none"), there = add("there", "libfulgur_test.so.2", FAKE_DRIVER);
  const std::array<const char*, 2> names = {"libfulgur_test.so.1", "libfulgur_test.so.2"};
  const std::array<fs::path, 3> places = {"", none, there};
  const SharedLibrary library = open_library(names, places);
  ASSERT_TRUE(library);
  EXPECT_EQ(library.path, there / "libfulgur_test.so.2");
  EXPECT_NE(library.symbol("cuInit"), nullptr);
  EXPECT_EQ(library.symbol("no_such_function"), nullptr);
}

TEST_F(Libraries, SaysWhatWasSearched) {
  const fs::path one = make("one"), two = make("two");
  std::ofstream(two / "libfulgur_none.so.1") << "not a library";
  const std::array<const char*, 2> names = {"libfulgur_none.so.1", "libfulgur_none.so"};
  const std::array<fs::path, 3> places = {one, "", two};
  const SharedLibrary library = open_library(names, places);
  ASSERT_FALSE(library);
  const std::string file = (two / "libfulgur_none.so.1").string();
  EXPECT_EQ(library.searched,
            fmt::format("libfulgur_none.so.1, libfulgur_none.so in {}, on the loader's path, in {} "
                        "({}: file too short)",
                        one.string(), two.string(), file));
}

TEST_F(Libraries, OneThatDoesNotLoadIsPassedOver) {
  const fs::path broken = make("broken"), good = add("good", kName[0], FAKE_DRIVER);
  std::ofstream(broken / kName[0]) << "not a library";
  const SharedLibrary library = open_library(kName, std::array{broken, good});
  ASSERT_TRUE(library);
  EXPECT_EQ(library.path, good / kName[0]);
  EXPECT_NE(library.searched.find("file too short"), std::string::npos) << library.searched;
}

TEST_F(Libraries, WhatOthersMayWriteIsPassedOver) {
  const fs::path good = add("good", kName[0], FAKE_DRIVER);
  const fs::path bad = add("above/bad", kName[0], FAKE_DRIVER), file = bad / kName[0];
  const auto expect_refused = [&](const fs::path& named, const char* why) {
    const SharedLibrary library = open_library(kName, std::array{bad, good});
    EXPECT_EQ(library.path, good / kName[0]);
    const std::string reason = fmt::format(" ({}{}", named.string(), why);
    EXPECT_NE(library.searched.find(reason), std::string::npos) << library.searched;
  };
  for (const fs::path& open : {file, bad, root_ / "above"}) {
    fs::permissions(open, fs::perms(0757));
    expect_refused(open, " is writable by other users (mode 757)");
    fs::permissions(open, fs::perms(0755));
  }
  if (geteuid() != 0) return;  // only root can give them to another user
  for (const fs::path& given : {file, bad, root_ / "above"}) {
    ASSERT_EQ(chown(given.c_str(), 65534, 65534), 0);
    expect_refused(given, " belongs to another user");
    ASSERT_EQ(chown(given.c_str(), 0, 0), 0);
  }
  EXPECT_EQ(open_library(kName, std::array{bad, good}).path, file);
}

TEST_F(Libraries, LinkToWhatOthersMayWriteIsPassedOver) {
  const fs::path bad = add("bad", kName[0], FAKE_DRIVER), linked = make("linked");
  fs::permissions(bad, fs::perms(0757));
  fs::create_symlink(bad / kName[0], linked / kName[0]);
  EXPECT_FALSE(open_library(kName, std::array{linked}));
}

TEST_F(Libraries, ToolkitPlacesInOrder) {
  const fs::path home = make("home/lib64"), path = make("path/targets/x86_64-linux/lib");
  const fs::path venv = make("venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib");
  const fs::path other = make("other/lib/python3.9/site-packages/nvidia/cu13/lib");
  const fs::path own = make("own/site-packages/nvidia/cu13/lib");
  const fs::path older = make("own/site-packages/nvidia/cuda_nvrtc/lib");
  make("other/bin");
  std::ofstream(root_ / "other/bin/python3") << "";
  setenv("CUDA_HOME", (root_ / "home").c_str(), 1);
  setenv("CUDA_PATH", (root_ / "path").c_str(), 1);
  setenv("VIRTUAL_ENV", (root_ / "venv").c_str(), 1);
  setenv("PATH", ("/nonexistent:" + (root_ / "other/bin").string()).c_str(), 1);
  const auto all = toolkit_places(root_ / "own/site-packages/fulgur/_fulgur.abi3.so");
  EXPECT_EQ(position(all, home), 0u);
  EXPECT_EQ(position(all, path), 1u);
  const size_t loader = position(all, ""),
               system = position(all, fs::weakly_canonical("/usr/local/cuda/lib"));
  for (const fs::path& wheel : {own, older}) {
    EXPECT_LT(position(all, wheel), loader);
    EXPECT_LT(position(all, wheel), system);
  }
  EXPECT_LT(loader, position(all, venv));
  EXPECT_LT(position(all, venv), position(all, other));
  EXPECT_LT(position(all, other), all.size());
  for (const fs::path& place : all) EXPECT_TRUE(place.empty() || fs::is_directory(place)) << place;
  for (const fs::path& one : {home, fs::path()})
    EXPECT_EQ(std::count(all.begin(), all.end(), one), 1);
}

// Among the folders above this library, NVRTC is looked for only in those of Python packages.
TEST_F(Libraries, OtherFoldersAboveAreNoPlaces) {
  const fs::path stray = make("nvidia/cuda_nvrtc/lib"), lower = make("a/nvidia/cu13/lib");
  const fs::path debian = make("a/dist-packages/nvidia/cu13/lib");
  const auto all = toolkit_places(root_ / "a/dist-packages/fulgur/_fulgur.abi3.so");
  EXPECT_EQ(position(all, stray), all.size());
  EXPECT_EQ(position(all, lower), all.size());
  EXPECT_LT(position(all, debian), all.size());
  EXPECT_TRUE(own_path().is_absolute()) << own_path();
}

// The working directory of the process has no influence.
TEST_F(Libraries, RelativePathsAreNoPlaces) {
  make("lib64");
  make("lib/python3.11/site-packages/nvidia/cu13/lib");
  make(".local/lib/python3.11/site-packages/nvidia/cu13/lib");
  std::ofstream(root_ / "python3") << "";
  make("bin");
  std::ofstream(root_ / "bin/python3") << "";
  fs::current_path(root_);
  for (const char* folder : {"", ".", "bin", "../"}) {
    for (const char* name : {"CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "HOME"})
      setenv(name, folder, 1);
    setenv("PATH", fmt::format(":{}::bin:/nonexistent", folder).c_str(), 1);
    for (const fs::path& place : toolkit_places()) {
      EXPECT_FALSE(place.string().starts_with(root_.string())) << place;
    }
  }
}

// A driver loads no code of a newer major version.
TEST_F(Libraries, NvrtcIsNoNewerThanDriver) {
  const fs::path newest = add("newest", "libnvrtc.so.13", FAKE_NVRTC);
  const fs::path both = add("both", "libnvrtc.so.13", FAKE_NVRTC);
  add("both", "libnvrtc.so.12", FAKE_NVRTC);
  const fs::path old = add("old", "libnvrtc.so", FAKE_NVRTC);
  const std::array places = {old, newest, both};
  for (const auto& [driver, want] : {std::pair{0, newest / "libnvrtc.so.13"},
                                     {13000, newest / "libnvrtc.so.13"},
                                     {14010, newest / "libnvrtc.so.13"},
                                     {12040, both / "libnvrtc.so.12"}}) {
    const SharedLibrary library = open_nvrtc(places, driver);
    EXPECT_EQ(library.path, want) << driver;
    EXPECT_NE(library.searched.find("libnvrtc.so is 11.0; want 12.0 or newer"), std::string::npos);
  }
  const SharedLibrary none = open_nvrtc(std::array{newest}, 12040);
  EXPECT_FALSE(none);
  EXPECT_EQ(none.path, "");
  const std::string why =
      (newest / "libnvrtc.so.13").string() +
      " is 13.0; the driver, for CUDA 12.4, loads no code of a newer major version";
  EXPECT_NE(none.searched.find(why), std::string::npos) << none.searched;
}

TEST_F(Libraries, NvrtcThatLacksFunctionsIsPassedOver) {
  const fs::path broken = add("broken", "libnvrtc.so.12", FAKE_DRIVER);
  const fs::path good = add("good", "libnvrtc.so.12", FAKE_NVRTC);
  const SharedLibrary library = open_nvrtc(std::array{broken, good}, 0);
  EXPECT_EQ(library.path, good / "libnvrtc.so.12");
  EXPECT_NE(library.searched.find("libnvrtc.so.12 lacks nvrtc"), std::string::npos);
}

}  // namespace
}  // namespace fulgur::cuda
