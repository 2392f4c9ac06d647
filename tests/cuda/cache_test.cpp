// The cache folder, its kernels and its tunings: what is kept, when it is rebuilt or ignored, and
// what is left after.
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

#include "cuda/engine/tuning.h"
#include "cuda/jit/cubin_cache.h"
#include "cuda/jit/sha256.h"
#include "folder.h"
#include "fulgur/error.h"

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

class Cache : public test::InFolder {
 protected:
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
  const test::NotRoot user(root_);
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

mode_t mode_of(const fs::path& path) {
  struct stat info;
  return lstat(path.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
}

// However its path is written, and whatever this process leaves to others otherwise.
TEST_F(Cache, FoldersThatItMakesAreOfThisUserAlone) {
  const mode_t before = umask(0);
  CubinCache cache(folder() / "");
  get(cache);
  umask(before);
  EXPECT_EQ(mode_of(folder()), 0700u);
  EXPECT_EQ(mode_of(folder().parent_path()), 0700u);
  EXPECT_EQ(mode_of(entry("key")), 0600u);
  EXPECT_TRUE(cache.load("key"));
}

TEST_F(Cache, LinksMayLeadToTheFolderButAreNone) {
  fs::create_directory(root_ / "real");
  fs::create_symlink(root_ / "real", root_ / "a");
  CubinCache cache(folder());
  get(cache);
  EXPECT_TRUE(fs::exists(root_ / "real" / "b" / "key.cubin"));

  for (const fs::path& link : {root_ / "a", root_ / "a" / ""}) {
    CubinCache linked(link);
    testing::internal::CaptureStderr();
    get(linked);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find((root_ / "a").string() + " is a symbolic link; want a folder"),
              std::string::npos)
        << said;
    EXPECT_NE(Tunings(link).folder().unusable(), "");
  }
  EXPECT_FALSE(fs::exists(root_ / "real" / "key.cubin"));
}

// The folder's name may lead elsewhere from one moment to the next.
TEST_F(Cache, FolderThatIsReplacedWhileBuildingTakesNothing) {
  const fs::path moved = root_ / "moved", trap = root_ / "trap";
  fs::create_directory(trap);
  CubinCache cache(folder());
  testing::internal::CaptureStderr();
  const Cubin cubin = cache.get("key", [&] {
    fs::rename(folder(), moved);
    std::ofstream(trap / "key.lock") << "of another folder";
    fs::create_symlink(trap, folder());
    return build();
  });
  EXPECT_NE(testing::internal::GetCapturedStderr().find("symbolic link"), std::string::npos);
  EXPECT_EQ(cubin.log, "log\nof two lines");
  EXPECT_TRUE(fs::is_empty(moved)) << "the lock stayed";
  EXPECT_TRUE(fs::exists(trap / "key.lock")) << "another folder's file was removed";
  EXPECT_FALSE(fs::exists(trap / "key.cubin")) << "another folder was written to";
}

TEST_F(Cache, EntriesOfOthersAreMadeAnew) {
  CubinCache cache(folder());
  get(cache);
  fs::permissions(entry("key"), fs::perms(0606));
  EXPECT_FALSE(cache.load("key"));
  get(cache);
  EXPECT_EQ(built_, 2);
  EXPECT_EQ(mode_of(entry("key")), 0600u);

  fs::rename(entry("key"), root_ / "elsewhere");
  fs::create_symlink(root_ / "elsewhere", entry("key"));
  EXPECT_FALSE(cache.load("key"));
  get(cache);
  EXPECT_EQ(built_, 3);
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(entry("key"))));
  EXPECT_TRUE(cache.load("key"));

  fs::remove(entry("key"));
  ASSERT_EQ(mkfifo(entry("key").c_str(), 0600), 0);  // without a writer: it must not be waited for
  get(cache);
  EXPECT_EQ(built_, 4);
  if (geteuid() != 0) return;  // only root can give it to another user
  ASSERT_EQ(chown(entry("key").c_str(), 65534, 65534), 0);
  EXPECT_FALSE(cache.load("key"));
}

TEST_F(Cache, LinksInPlaceOfItsFilesAreNotFollowed) {
  std::ofstream(root_ / "precious") << "precious";
  fs::create_directories(folder());
  fs::permissions(folder(), fs::perms(0700));
  fs::create_symlink(root_ / "new", folder() / "key.lock");
  fs::create_symlink(root_ / "precious", folder() / fmt::format("other.cubin.{}.0.tmp", getpid()));
  CubinCache cache(folder());
  testing::internal::CaptureStderr();
  get(cache);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("cannot write to"), std::string::npos);
  EXPECT_FALSE(fs::exists(root_ / "new"));
  get(cache, "other");
  EXPECT_TRUE(cache.load("other"));
  EXPECT_EQ(fs::file_size(root_ / "precious"), 8u);
}

// ------------------------------------------------------------------------------- tunings

const std::vector<MeasuredTile> kTiles = {{{"a", 192, 80}, 812.25}, {{"b", 192, 64}, 845}};
const std::string kKey = "device X\nkernels abc\nbf16 d 128\n";

class TuningCache : public Cache {
 protected:
  /// What another process finds.
  std::vector<MeasuredTile> found() { return Tunings(folder()).find(kKey); }
  /// That nothing is found, and what is said about it.
  std::string complaint() {
    testing::internal::CaptureStderr();
    Tunings tunings(folder());
    EXPECT_TRUE(tunings.find(kKey).empty());
    EXPECT_TRUE(tunings.find(kKey).empty());
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    EXPECT_NE(said.find("fulgur: tiles are chosen as if they had not been tuned"),
              std::string::npos);
    EXPECT_NE(said.find(folder().string()), std::string::npos) << said;
    return said;
  }
};

TEST_F(TuningCache, KeepsTheLastOfAKey) {
  testing::internal::CaptureStderr();
  Tunings tunings(folder());
  EXPECT_TRUE(tunings.find(kKey).empty());
  tunings.keep(kKey, {{{"a", 192, 80}, 900}});
  EXPECT_EQ(tunings.find(kKey), (std::vector<MeasuredTile>{{{"a", 192, 80}, 900}}));
  tunings.keep(kKey, kTiles);
  EXPECT_EQ(tunings.find(kKey), kTiles);
  EXPECT_EQ(found(), kTiles);
  for (const char* other : {"device Y\nkernels abc\nbf16 d 128\n", "device X\nkernels abd\n", ""}) {
    EXPECT_TRUE(Tunings(folder()).find(other).empty()) << other;
  }
  EXPECT_EQ(files(), std::vector<std::string>{tunings.path(kKey).filename()});
  struct stat info;
  ASSERT_EQ(stat(tunings.path(kKey).c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(TuningCache, ReadsAFileOnce) {
  Tunings tunings(folder());
  tunings.keep(kKey, kTiles);
  Tunings other(folder());
  EXPECT_EQ(other.find(kKey), kTiles);
  fs::remove_all(folder());
  EXPECT_EQ(other.find(kKey), kTiles);
  EXPECT_TRUE(found().empty());
}

TEST_F(TuningCache, DamagedOneIsNotUsed) {
  Tunings tunings(folder());
  tunings.keep(kKey, kTiles);
  std::string whole;
  {
    std::ifstream file(tunings.path(kKey), std::ios::binary);
    whole.assign(std::istreambuf_iterator<char>(file), {});
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    for (const bool cut : {false, true}) {
      std::string bytes = whole;
      if (cut) {
        bytes.resize(i);
      } else {
        bytes[i] ^= 1;
      }
      std::ofstream(tunings.path(kKey), std::ios::binary) << bytes;
      EXPECT_NE(complaint().find("is damaged"), std::string::npos) << i;
    }
  }
}

TEST_F(TuningCache, ContentIsReadStrictly) {
  Tunings tunings(folder());
  tunings.keep(kKey, kTiles);
  const std::string name = tunings.path(kKey).filename();
  for (const std::string tiles : {"",
                                  "\n",
                                  "a",
                                  "a 3",
                                  "a 3 80",
                                  "a 3 80 812",
                                  "a 3 80 812 \n",
                                  " a 3 80 812\n",
                                  "a  3 80 812\n",
                                  "3 80 812\n",
                                  "a 3  80 812\n",
                                  "a 3 80 812\n\n",
                                  "a 3 80 812\n3",
                                  "a x 80 812\n",
                                  "a\nb 3 80 812\n",
                                  "a 3 80 0\n",
                                  "a 3 80 -1\n",
                                  "a 3 80 nan\n",
                                  "a 3 80 inf\n",
                                  "a 3 80 1e999\n",
                                  "a 99999999999 80 812\n"}) {
    ASSERT_EQ(tunings.folder().store(name, kKey + tiles), "");
    EXPECT_NE(complaint().find("holds something else"), std::string::npos) << tiles;
  }
  ASSERT_EQ(tunings.folder().store(name, "device Y\na 3 80 812\n"), "");
  EXPECT_NE(complaint().find("holds something else"), std::string::npos);
  ASSERT_EQ(tunings.folder().store(name, kKey + "a 192 80 812.25\nb 192 64 845\n"), "");
  EXPECT_EQ(found(), kTiles);
}

TEST_F(TuningCache, FolderOfOthersIsNotTrusted) {
  Tunings(folder()).keep(kKey, kTiles);
  fs::permissions(folder(), fs::perms::all);
  EXPECT_NE(complaint().find("writable by other users"), std::string::npos);
  EXPECT_THROW(Tunings(folder()).keep(kKey, kTiles), Error);
  fs::permissions(folder(), fs::perms::owner_all);
  EXPECT_EQ(found(), kTiles);
  if (geteuid() != 0) return;  // only root can give it to another user
  ASSERT_EQ(chown(folder().c_str(), 65534, 65534), 0);
  EXPECT_NE(complaint().find("belongs to another user"), std::string::npos);
  EXPECT_THROW(Tunings(folder()).keep(kKey, kTiles), Error);
}

TEST_F(TuningCache, UnwritableFolderIsAnError) {
  std::ofstream(root_ / "a") << "a file where a folder should be";
  Tunings tunings(folder());
  EXPECT_TRUE(tunings.find(kKey).empty());
  try {
    tunings.keep(kKey, kTiles);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kUnavailable);
    EXPECT_NE(std::string(error.what()).find(folder().string()), std::string::npos);
  }
  EXPECT_TRUE(tunings.find(kKey).empty()) << "what was not kept is used";
}

TEST_F(TuningCache, WritersAtOnceLeaveOneWhole) {
  Tunings(folder()).keep(kKey, kTiles);
  std::vector<pid_t> children;
  for (int i = 1; i <= 4; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      Tunings tunings(folder());
      // Each process keeps lists of another length, so that a mixture of two would show.
      for (int n = 0; n < 20; ++n)
        tunings.keep(kKey, std::vector(i, MeasuredTile{{"c", i, 64}, 1.0 * i}));
      _exit(0);
    }
    children.push_back(child);
  }
  testing::internal::CaptureStderr();
  for (int n = 0; n < 50; ++n) {
    const std::vector<MeasuredTile> tiles = found();
    ASSERT_FALSE(tiles.empty());
    const int writer = tiles[0].tile.family == "c" ? tiles[0].tile.Br : 0;
    EXPECT_EQ(tiles, writer == 0
                         ? kTiles
                         : std::vector(writer, MeasuredTile{{"c", writer, 64}, 1.0 * writer}));
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(files().size(), 1u);
}

// ------------------------------------------------------------------------------- the default

void set(const char* name, const char* value) {
  value == nullptr ? unsetenv(name) : setenv(name, value, 1);
}

CacheFolder standard(const char* own, const char* xdg, const char* home) {
  set("FULGUR_CACHE_DIR", own);
  set("XDG_CACHE_HOME", xdg);
  set("HOME", home);
  return CacheFolder::standard();
}

TEST(CacheFolder, FollowsEnvironment) {
  EXPECT_EQ(standard("/own", "/xdg", "/home/x").path(), "/own");
  EXPECT_EQ(standard("/own/", "/xdg", "/home/x").path(), "/own");
  EXPECT_EQ(standard("", "/xdg", "/home/x").path(), "/xdg/fulgur");
  EXPECT_EQ(standard(nullptr, "relative", "/home/x").path(), "/home/x/.cache/fulgur");
  EXPECT_EQ(standard(nullptr, nullptr, "/home/x").path(), "/home/x/.cache/fulgur");
}

class NoDefault : public Cache {
 protected:
  NoDefault() { fs::current_path(root_); }
  ~NoDefault() override { fs::current_path("/"); }

  /// That nothing is kept, what is said of it, and how often.
  void expect_none(const CacheFolder& none, const std::string& why) {
    EXPECT_EQ(none.path(), "");
    EXPECT_EQ(none.unusable(), why);
    CubinCache cache(none);
    testing::internal::CaptureStderr();
    for (int i = 0; i < 3; ++i) EXPECT_EQ(get(cache).log, "log\nof two lines");
    EXPECT_FALSE(cache.load("key"));
    EXPECT_TRUE(Tunings(none).find(kKey).empty());
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    EXPECT_NE(said.find(why), std::string::npos) << said;
    EXPECT_NE(said.find("FULGUR_CACHE_DIR"), std::string::npos) << said;
    EXPECT_THROW(Tunings(none).keep(kKey, kTiles), Error);
    EXPECT_TRUE(fs::is_empty(root_)) << "written where the process stands";
  }
};

TEST_F(NoDefault, WithoutAHome) {
  constexpr const char* kWhy =
      "there is no cache folder: neither FULGUR_CACHE_DIR nor HOME is an absolute path";
  expect_none(standard(nullptr, nullptr, nullptr), kWhy);
  expect_none(standard("", "", ""), kWhy);
  expect_none(standard(nullptr, "relative", "relative"), kWhy);
  EXPECT_EQ(built_, 9);
}

TEST_F(NoDefault, RelativeFolderIsRefused) {
  expect_none(standard("relative", "/xdg", "/home/x"),
              "FULGUR_CACHE_DIR: got \"relative\", want an absolute path");
}

}  // namespace
}  // namespace fulgur::cuda
