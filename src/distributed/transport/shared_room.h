/// Memory of the host that processes of one machine have in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace fulgur::distributed {

class SharedRoom {
 public:
  /// What another process opens it by; no two have one mark.
  struct Name {
    int64_t process = 0, file = -1, mark = 0;
    bool operator==(const Name&) const = default;
  };

  SharedRoom() = default;
  /// New memory. Throws Error(kUnavailable).
  static SharedRoom make(int64_t bytes);
  /// That of a process, as long as this has it. Throws Error(kUnavailable).
  static SharedRoom open(const Name& name, int64_t bytes);
  SharedRoom(SharedRoom&& other) noexcept { *this = std::move(other); }
  SharedRoom& operator=(SharedRoom&& other) noexcept {
    std::swap(name_, other.name_);
    std::swap(file_, other.file_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~SharedRoom();

  const Name& name() const { return name_; }
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void map(int file, int64_t bytes);

  Name name_;
  int file_ = -1;  ///< of one that this process has made
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace fulgur::distributed
