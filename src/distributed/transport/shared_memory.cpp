#include "distributed/transport/shared_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <string>

#include "fulgur/error.h"

namespace fulgur::distributed {
namespace {

void check_done(bool done, const char* what, int64_t bytes) {
  if (done) return;
  throw Error(Status::kUnavailable, fmt::format("{} {} bytes of memory that ranks share: {}", what,
                                                bytes, std::strerror(errno)));
}

}  // namespace

// An anonymous file: its memory is freed when no process has it open.
SharedMemory SharedMemory::make(int64_t bytes) {
  SharedMemory memory;
  memory.file_ = memfd_create("fulgur", MFD_CLOEXEC);
  check_done(memory.file_ >= 0 && ftruncate(memory.file_, bytes) == 0, "making", bytes);
  memory.map(memory.file_, bytes);
  std::random_device random;
  memory.name_ = {getpid(), memory.file_, int64_t{random()} << 32 | random()};
  return memory;
}

SharedMemory SharedMemory::open(const Name& name, int64_t bytes) {
  SharedMemory memory;
  const std::string path = fmt::format("/proc/{}/fd/{}", name.process, name.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  check_done(file >= 0, "opening", bytes);
  try {
    struct stat status {};
    const bool long_enough = fstat(file, &status) == 0 && status.st_size >= bytes;
    check_done(long_enough, "opening", bytes);  // the descriptor may have become another file's
    memory.map(file, bytes);
  } catch (...) {
    close(file);
    throw;
  }
  close(file);  // the mapping stays
  memory.name_ = name;
  return memory;
}

void SharedMemory::map(int file, int64_t bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  check_done(at != MAP_FAILED, "mapping", bytes);
  data_ = static_cast<std::byte*>(at);
  bytes_ = bytes;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (file_ >= 0) close(file_);
}

}  // namespace fulgur::distributed
