#include "distributed/device/signals.h"

#include <atomic>
#include <cstddef>
#include <optional>
#include <utility>

#include "cuda/device/gpu.h"

namespace fulgur::distributed {

using namespace cuda;

Signals::Signals(Group::Impl& group) : rank_(group.rank), ranks_(group.ranks) {
  const int64_t bytes = int64_t{ranks_} * ranks_ * int64_t{sizeof(Cell)};
  std::optional<Error> error;
  const auto attempt = [&](const auto& body) {
    try {
      body();
    } catch (const Error& failed) {
      error = failed;
    }
  };
  SharedMemory made;
  if (rank_ == 0) attempt([&] { made = SharedMemory::make(bytes); });
  const auto& [process, file, id] = made.name();
  const std::vector<int64_t> name = group.agree(error, {}, {process, file, id})[0];
  attempt([&] {
    use(rank_ == 0 ? std::move(made) : SharedMemory::open({name[0], name[1], name[2]}, bytes));
  });
  group.agree(error, {}, {});  // a barrier: all ranks have opened it
}

void Signals::use(SharedMemory memory) {
  check(driver().cuMemHostRegister(memory.data(), memory.bytes(),
                                   CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
        "cuMemHostRegister");
  memory_ = std::move(memory);
  check(driver().cuMemHostGetDevicePointer(&on_device_, memory_.data(), 0),
        "cuMemHostGetDevicePointer");
}

Signals::~Signals() {
  if (memory_.data() != nullptr) driver().cuMemHostUnregister(memory_.data());
}

CUdeviceptr Signals::address(const uint32_t& count) const {
  return on_device_ + (reinterpret_cast<const std::byte*>(&count) - memory_.data());
}

void Signals::signal(CUstream stream, int to, What what, uint32_t count) const {
  check(driver().cuStreamWriteValue32(stream, address(cell(to, rank_).counts[what]), count, 0),
        "cuStreamWriteValue32");
}

void Signals::wait(CUstream stream, int from, What what, uint32_t count) const {
  check(driver().cuStreamWaitValue32(stream, address(cell(rank_, from).counts[what]), count,
                                     CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue32");
}

bool Signals::has_signaled(int to, What what, uint32_t count) const {
  const uint32_t last = std::atomic_ref(cell(to, rank_).counts[what]).load();
  return static_cast<int32_t>(last - count) >= 0;  // as cuStreamWaitValue32 compares
}

void Signals::end_waits(uint32_t count) const {
  for (int from = 0; from < ranks_; ++from) {
    for (uint32_t& counted : cell(rank_, from).counts) {
      std::atomic_ref(counted).store(
          count + (1u << 30));  // later than any count: GPUs compare by the difference
    }
  }
}

}  // namespace fulgur::distributed
