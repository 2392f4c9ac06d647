// The cubin cache and its hash: what is kept, when it is rebuilt, and what is left behind.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <thread>

#include "cuda/cubin_cache.h"
#include "cuda/sha256.h"

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

TEST(Sha256, FollowsStandard) {  // FIPS 180-4, and NIST's example of a million letters
  EXPECT_EQ(Sha256().hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256().add("abc").hex(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256().add("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq").hex(),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  Sha256 million;
  for (int i = 0; i < 1000; ++i) million.add(std::string(997, 'a')).add("aaa");
  EXPECT_EQ(million.hex(), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

class Cache : public testing::Test {
 protected:
  Cache() {
    std::string name = (fs::temp_directory_path() / "fulgur_cache_XXXXXX").string();
    root_ = mkdtemp(name.data());
  }
  ~Cache() override { fs::remove_all(root_); }

  fs::path folder() const { return root_ / "a" / "b"; }
  fs::path entry(const std::string& key) const { return folder() / (key + ".cubin"); }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& e : fs::directory_iterator(folder())) names.push_back(e.path().filename());
    return names;
  }
  Cubin build() {
    ++built_;
    return {std::string("image\0with\nanything", 19), "log\nof two lines"};
  }
  Cubin get(CubinCache& cache, const std::string& key = "key") {
    return cache.get(key, [&] { return build(); });
  }

  fs::path root_;
  std::atomic<int> built_ = 0;
};

TEST_F(Cache, BuildsOnceAndKeepsEveryByte) {
  CubinCache cache(folder());
  EXPECT_FALSE(cache.load("key"));
  const Cubin first = get(cache), second = get(cache);
  CubinCache other(folder());
  const Cubin third = get(other);
  EXPECT_EQ(built_, 1);
  for (const Cubin& cubin : {first, second, third}) {
    EXPECT_EQ(cubin.image, std::string("image\0with\nanything", 19));
    EXPECT_EQ(cubin.log, "log\nof two lines");
  }
  get(cache, "other");
  EXPECT_EQ(built_, 2);
}

TEST_F(Cache, IsOfThisUserAlone) {
  CubinCache cache(folder());
  get(cache);
  struct stat info;
  ASSERT_EQ(stat(folder().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  ASSERT_EQ(stat(entry("key").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(files(), std::vector<std::string>{"key.cubin"}) << "a lock or temporary file stayed";
}

TEST_F(Cache, RebuildsWhatIsDamaged) {
  CubinCache cache(folder());
  get(cache);
  std::string whole;
  {
    std::ifstream file(entry("key"), std::ios::binary);
    whole.assign(std::istreambuf_iterator<char>(file), {});
  }
  int damaged = 0;
  for (size_t i = 0; i <= whole.size(); ++i) {  // every byte changed, then every length cut
    for (const bool cut : {false, true}) {
      std::string bytes = whole;
      if (cut) {
        bytes.resize(i);
      } else if (i < whole.size()) {
        bytes[i] ^= 1;
      }
      if (bytes == whole) continue;
      std::ofstream(entry("key"), std::ios::binary) << bytes;
      EXPECT_FALSE(cache.load("key")) << (cut ? "cut to " : "changed at ") << i;
      ++damaged;
    }
  }
  EXPECT_GT(damaged, 100);
  get(cache);
  EXPECT_EQ(built_, 2);
  EXPECT_TRUE(cache.load("key"));
}

TEST_F(Cache, FailedBuildLeavesNothing) {
  CubinCache cache(folder());
  EXPECT_THROW(cache.get("key", []() -> Cubin { throw std::runtime_error("no"); }),
               std::runtime_error);
  EXPECT_TRUE(files().empty());
  get(cache);
  EXPECT_EQ(built_, 1);
}

TEST_F(Cache, ThreadsBuildOnce) {
  CubinCache cache(folder());
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      cache.get("key", [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return build();
      });
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(built_, 1);
  EXPECT_EQ(files(), std::vector<std::string>{"key.cubin"});
}

TEST_F(Cache, ProcessesBuildOnce) {
  fs::create_directory(root_ / "built");
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      CubinCache cache(folder());
      cache.get("key", [&]() -> Cubin {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        std::ofstream(root_ / "built" / std::to_string(getpid())) << "x";
        return {"image", "log"};
      });
      _exit(cache.load("key") ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(root_ / "built"), {}), 1);
}

TEST_F(Cache, UnusableFolderWarnsOnceAndBuilds) {
  std::ofstream(root_ / "a") << "a file where a folder should be";
  CubinCache cache(folder());
  testing::internal::CaptureStderr();
  EXPECT_EQ(get(cache).log, "log\nof two lines");
  EXPECT_EQ(get(cache).log, "log\nof two lines");
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(built_, 2);
  EXPECT_NE(said.find(folder().string()), std::string::npos) << said;
  EXPECT_NE(said.find("FULGUR_CACHE_DIR"), std::string::npos) << said;
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
}

TEST_F(Cache, ReadOnlyFolderIsRead) {
  constexpr uid_t kNobody = 65534;
  const uid_t me = geteuid();
  if (me == 0) {  // root may write anywhere
    fs::permissions(root_, fs::perms::all);
    ASSERT_EQ(seteuid(kNobody), 0);
  }
  CubinCache cache(folder());
  get(cache);
  fs::permissions(folder(), fs::perms::owner_read | fs::perms::owner_exec);
  testing::internal::CaptureStderr();
  get(cache);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(built_, 1);
  testing::internal::CaptureStderr();
  get(cache, "other");
  EXPECT_NE(testing::internal::GetCapturedStderr().find("Permission denied"), std::string::npos);
  EXPECT_EQ(built_, 2);
  fs::permissions(folder(), fs::perms::owner_all);
  ASSERT_EQ(seteuid(me), 0);
}

TEST_F(Cache, FolderOthersMayWriteIsNotTrusted) {
  CubinCache cache(folder());
  get(cache);
  fs::permissions(folder(), fs::perms::all);
  EXPECT_FALSE(cache.load("key"));
  testing::internal::CaptureStderr();
  get(cache);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("writable by other users"),
            std::string::npos);
  EXPECT_EQ(built_, 2);
}

TEST(CacheFolder, FollowsEnvironment) {
  const auto with = [](const char* own, const char* xdg, const char* home) {
    const auto set = [](const char* name, const char* value) {
      value == nullptr ? unsetenv(name) : setenv(name, value, 1);
    };
    set("FULGUR_CACHE_DIR", own);
    set("XDG_CACHE_HOME", xdg);
    set("HOME", home);
    return CubinCache::default_folder().string();
  };
  EXPECT_EQ(with("/own", "/xdg", "/home/x"), "/own");
  EXPECT_EQ(with("", "/xdg", "/home/x"), "/xdg/fulgur");
  EXPECT_EQ(with(nullptr, "relative", "/home/x"), "/home/x/.cache/fulgur");
  EXPECT_EQ(with(nullptr, nullptr, "/home/x"), "/home/x/.cache/fulgur");
}

}  // namespace
}  // namespace fulgur::cuda
