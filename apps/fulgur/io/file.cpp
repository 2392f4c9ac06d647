#include "io/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

namespace fulgur::io {
namespace {

std::string reason() { return std::generic_category().message(errno); }

/// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  bool close() { return ::close(std::exchange(fd_, -1)) == 0; }

 private:
  int fd_;
};

/// Where `path` leads: a symbolic link is followed, so that the file that it points to is replaced,
/// or made where there is none.
std::string target_of(const std::string& path) {
  if (path.empty()) fail("output", "the path is empty");
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::status_known(status)) {
    fail(path, "cannot be written: {}", error.message());
  }
  if (!std::filesystem::exists(status)) {
    const std::filesystem::path link = path;
    if (!std::filesystem::is_symlink(std::filesystem::symlink_status(link, error))) return path;
    return target_of((link.parent_path() / std::filesystem::read_symlink(link)).string());
  }
  if (!std::filesystem::is_regular_file(status)) {
    fail(path, "exists and is not a regular file, so it cannot be replaced");
  }
  if (::access(path.c_str(), W_OK) != 0) fail(path, "cannot be written: {}", reason());
  const std::string target = std::filesystem::canonical(path, error).string();
  if (error) fail(path, "cannot be written: {}", error.message());  // a file that is deleted
  return target;
}

struct Temporary {
  std::string path;
  int fd;
};

Temporary create_beside(const std::string& path) {
  for (int i = 0;; ++i) {
    const std::string name = fmt::format("{}.{}.{}.tmp", path, ::getpid(), i);
    const int fd = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0) return {name, fd};
    if (errno != EEXIST) fail(path, "cannot be created: {}", reason());
  }
}

void write_all(int fd, Bytes bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path, "cannot be written: {}", reason());
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
}

void sync_directory_of(const std::string& path) {
  const auto directory = std::filesystem::absolute(path).parent_path();
  const Descriptor fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // The renames are done; a file system that cannot sync a directory is no reason to fail.
  if (fd.get() >= 0) (void)::fsync(fd.get());
}

}  // namespace

InputFile::InputFile(const std::string& path, std::string_view name) {
  // O_NONBLOCK: opening a pipe must not wait for its writer.
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info;
  if (fd.get() < 0 || ::fstat(fd.get(), &info) != 0) fail(name, "cannot be read: {}", reason());
  if (!S_ISREG(info.st_mode)) fail(name, "is not a regular file");
  if (info.st_size == 0) return;
  const auto size = static_cast<size_t>(info.st_size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (data == MAP_FAILED) fail(name, "cannot be read: {}", reason());
  bytes_ = {static_cast<const std::byte*>(data), size};
}

InputFile::~InputFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

OutputFiles::~OutputFiles() {
  for (const File& file : files_) ::unlink(file.temporary.c_str());
}

void OutputFiles::add(const std::string& path, std::span<const Bytes> pieces) {
  const std::string target = target_of(path);
  const Temporary temporary = create_beside(target);
  files_.push_back({target, temporary.path});
  Descriptor fd(temporary.fd);
  for (const Bytes piece : pieces) write_all(fd.get(), piece, path);
  if (::fsync(fd.get()) != 0 || !fd.close()) fail(path, "cannot be written: {}", reason());
}

void OutputFiles::commit() {
  for (const File& file : files_) {
    if (std::rename(file.temporary.c_str(), file.path.c_str()) != 0) {
      fail(file.path, "cannot be replaced: {}", reason());
    }
  }
  for (const File& file : std::exchange(files_, {})) sync_directory_of(file.path);
}

void check_writable(const std::string& path) {
  const Temporary temporary = create_beside(target_of(path));
  ::close(temporary.fd);
  ::unlink(temporary.path.c_str());
}

}  // namespace fulgur::io
