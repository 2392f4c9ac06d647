// Who decides what is loaded, executed and trusted.
#include "cuda/driver/trust.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <filesystem>

#include "cuda/driver/shared_library.h"
#include "cuda/jit/cache_folder.h"
#include "cuda/jit/sources.h"
#include "folder.h"

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

class Trust : public test::InFolder {};

TEST_F(Trust, EveryFolderOnTheWayCounts) {
  const fs::path low = root_ / "a" / "b";
  fs::create_directories(low);
  EXPECT_EQ(distrusted(low), "");  // below /tmp, which is sticky
  for (const fs::path& open : {root_, root_ / "a", low}) {
    for (const unsigned mode : {0702u, 0777u}) {
      fs::permissions(open, fs::perms(mode));
      const std::string why = distrusted(low);
      EXPECT_TRUE(why.starts_with(open.string() + " is writable by other users")) << why;
    }
    fs::permissions(open, fs::perms(01777));
    EXPECT_EQ(distrusted(low).empty(), open != low) << "others may add to a sticky folder";
    fs::permissions(open, fs::perms(0700));
  }
  EXPECT_NE(distrusted(root_ / "none").find("No such file"), std::string::npos);
}

// umask 002 and a group of the user's own are what Ubuntu and Fedora set up.
TEST_F(Trust, GroupOfTheUserAlone) {
  constexpr uid_t kUser = 54321, kOther = 54322;  // nobody's
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  fs::permissions(root_, fs::perms(0770));
  EXPECT_NE(distrusted(root_), "") << "root's own group is no private one";
  ASSERT_EQ(chown(root_.c_str(), kUser, kUser), 0);
  EXPECT_NE(distrusted(root_), "");
  ASSERT_EQ(seteuid(kUser), 0);
  const std::string own = distrusted(root_);
  ASSERT_EQ(seteuid(0), 0);
  EXPECT_EQ(own, "");
  ASSERT_EQ(chown(root_.c_str(), kUser, kOther), 0);
  ASSERT_EQ(seteuid(kUser), 0);
  const std::string other = distrusted(root_);
  ASSERT_EQ(seteuid(0), 0);
  EXPECT_NE(other.find("writable by other users"), std::string::npos) << other;
}

TEST(Environment, NamesFoldersByAbsolutePaths) {
  for (const auto& [value, folder] :
       {std::pair{"/a/b", "/a/b"}, {"a/b", ""}, {".", ""}, {"", ""}}) {
    setenv("FULGUR_TEST_FOLDER", value, 1);
    EXPECT_EQ(folder_in_environment("FULGUR_TEST_FOLDER"), folder);
  }
  unsetenv("FULGUR_TEST_FOLDER");
  EXPECT_EQ(folder_in_environment("FULGUR_TEST_FOLDER"), "");
}

constexpr const char* kVariables[] = {"CUDA_HOME", "CUDA_PATH",        "VIRTUAL_ENV",
                                      "HOME",      "XDG_CACHE_HOME",   "FULGUR_CACHE_DIR",
                                      "PATH",      "FULGUR_KERNEL_DIR"};

// What the next test runs, as a program that is another user than the one who calls it.
TEST(SetUserId, DISABLED_ProgramIgnoresItsCallersVariables) {
  ASSERT_NE(getuid(), geteuid());
  for (const char* name : kVariables) {
    ASSERT_NE(getenv(name), nullptr) << name;
    EXPECT_EQ(trusted_environment(name), "");
  }
  for (const fs::path& place : toolkit_places()) {
    EXPECT_EQ(place.string().find("fulgur_test_"), std::string::npos) << place;
  }
  EXPECT_EQ(CacheFolder::standard().path(), "");
  EXPECT_EQ(kernel_sources(), embedded_sources());
}

class SetUserIdProgram : public test::InFolder {};

TEST_F(SetUserIdProgram, IsNotLedByItsCaller) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can make a program of another user";
  if (prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1) GTEST_SKIP() << "this process gains no rights";
  fs::create_directories(root_ / "lib64");
  fs::create_directories(root_ / "lib/python3.11/site-packages/nvidia/cu13/lib");
  fs::permissions(root_, fs::perms(0755));
  const fs::path program = root_ / "program";
  fs::copy_file("/proc/self/exe", program);
  ASSERT_EQ(chown(program.c_str(), test::NotRoot::kNobody, 0), 0);
  ASSERT_EQ(chmod(program.c_str(), 04755), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (const char* name : kVariables) setenv(name, root_.c_str(), 1);
    execl(program.c_str(), program.c_str(), "--gtest_also_run_disabled_tests", "--gtest_brief=1",
          "--gtest_filter=SetUserId.DISABLED_*", nullptr);
    _exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace fulgur::cuda
