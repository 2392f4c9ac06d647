/// Host memory that processes of one machine share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace fulgur::distributed {

class SharedMemory {
 public:
  /// By which another process opens it. `id` is random, so that no two are the same.
  struct Name {
    int64_t process = 0, file = -1, id = 0;
    bool operator==(const Name&) const = default;
  };

  SharedMemory() = default;
  /// New memory. Throws Error(kUnavailable).
  static SharedMemory make(int64_t bytes);
  /// Opens the memory of another process, which must still have it. Throws Error(kUnavailable).
  static SharedMemory open(const Name& name, int64_t bytes);
  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept {
    std::swap(name_, other.name_);
    std::swap(file_, other.file_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~SharedMemory();

  const Name& name() const { return name_; }
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void map(int file, int64_t bytes);

  Name name_;
  int file_ = -1;  ///< -1 unless this process has made it
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace fulgur::distributed
