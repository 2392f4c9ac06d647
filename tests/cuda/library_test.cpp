// How CUDA's libraries are looked for, and what is said when they are not there.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>

#include "cuda/shared_library.h"

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

class Libraries : public testing::Test {
 protected:
  Libraries() {
    std::string name = (fs::temp_directory_path() / "fulgur_library_XXXXXX").string();
    root_ = fs::canonical(mkdtemp(name.data()));
  }
  ~Libraries() override { fs::remove_all(root_); }

  fs::path make(const std::string& folder) const {
    fs::create_directories(root_ / folder);
    return root_ / folder;
  }
  static size_t position(const std::vector<fs::path>& all, const fs::path& one) {
    return static_cast<size_t>(std::find(all.begin(), all.end(), one) - all.begin());
  }

  fs::path root_;
};

TEST_F(Libraries, OpensFromFolderAndFindsSymbols) {
  const fs::path none = make("none"), there = make("there");
  fs::copy_file(FAKE_DRIVER, there / "libfulgur_test.so.2");
  const std::array<const char*, 2> names = {"libfulgur_test.so.1", "libfulgur_test.so.2"};
  const std::array<fs::path, 2> folders = {none, there};
  const SharedLibrary library = open_library(names, folders);
  ASSERT_TRUE(library);
  EXPECT_EQ(library.path, there / "libfulgur_test.so.2");
  EXPECT_NE(library.symbol("cuInit"), nullptr);
  EXPECT_EQ(library.symbol("no_such_function"), nullptr);
}

TEST_F(Libraries, SaysWhatWasSearched) {
  const fs::path one = make("one"), two = make("two");
  std::ofstream(two / "libfulgur_none.so.1") << "not a library";
  const std::array<const char*, 2> names = {"libfulgur_none.so.1", "libfulgur_none.so"};
  const std::array<fs::path, 2> folders = {one, two};
  const SharedLibrary library = open_library(names, folders);
  ASSERT_FALSE(library);
  for (const std::string& part :
       {std::string("libfulgur_none.so.1, libfulgur_none.so on the loader's path"), one.string(),
        two.string(), std::string("file too short")}) {
    EXPECT_NE(library.searched.find(part), std::string::npos) << library.searched;
  }
}

TEST_F(Libraries, ToolkitFoldersInOrder) {
  const fs::path home = make("home/lib64"), path = make("path/targets/x86_64-linux/lib");
  const fs::path venv = make("venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib");
  const fs::path other = make("other/lib/python3.9/site-packages/nvidia/cu13/lib");
  make("other/bin");
  std::ofstream(root_ / "other/bin/python3") << "";
  setenv("CUDA_HOME", (root_ / "home").c_str(), 1);
  setenv("CUDA_PATH", (root_ / "path").c_str(), 1);
  setenv("VIRTUAL_ENV", (root_ / "venv").c_str(), 1);
  setenv("PATH", ("/nonexistent:" + (root_ / "other/bin").string()).c_str(), 1);
  const std::vector<fs::path> all = toolkit_folders();
  EXPECT_EQ(position(all, home), 0u);
  EXPECT_EQ(position(all, path), 1u);
  EXPECT_LT(position(all, venv), position(all, other));
  EXPECT_LT(position(all, other), all.size());
  for (const fs::path& folder : all) EXPECT_TRUE(fs::is_directory(folder)) << folder;
  EXPECT_EQ(std::count(all.begin(), all.end(), home), 1);
}

}  // namespace
}  // namespace fulgur::cuda
