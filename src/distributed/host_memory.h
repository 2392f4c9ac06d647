/// Memory of the host: all is done at once.
#pragma once

#include <array>
#include <vector>

#include "distributed/group.h"
#include "distributed/memory.h"

namespace fulgur::distributed {

class HostMemory final : public Memory {
 public:
  explicit HostMemory(Group::Impl& group) : group_(group) {}
  void copy(const Part& from, const Part& to) override;
  void add(const Part& from, const Part& to) override;
  void round(const Part& from, const Part& to) override;
  void clear(const Part& part) override;
  void download(void* to, const void* from, int64_t bytes) override;
  void upload(void* to, const void* from, int64_t bytes) override;
  Mark mark() override { return nullptr; }
  void after(const Mark&) override {}
  void finish() override {}
  std::byte* room(Use use, int64_t bytes) override;
  void exchange(std::span<const std::span<const std::byte>> sends,
                std::span<const std::span<std::byte>> receives) override;
  void settle() override {}
  std::unique_ptr<Order> computing(const Run& run) override;

 private:
  struct Room {
    std::unique_ptr<std::byte[]> data;
    int64_t bytes = 0;
  };
  Group::Impl& group_;
  std::array<Room, kUses> rooms_;
};

}  // namespace fulgur::distributed
