#include "distributed/transport/nccl.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>
#include <vector>

#include "base/check.h"
#include "cuda/device/gpu.h"

namespace fulgur::distributed {
namespace {

using cuda::check;
using cuda::CUdeviceptr;
using cuda::CurrentContext;
using cuda::CUstream;
using cuda::driver;
using cuda::Gpu;

using Comm = void*;
using Result = int;
constexpr Result kSuccess = 0, kInProgress = 7;
constexpr int kBytes = 0;  // ncclInt8

// The functions of NCCL that are called; their symbols begin with "nccl".
#define FULGUR_NCCL_FUNCTIONS(F)                                                      \
  F(GetErrorString, const char*, (Result))                                            \
  F(CommCount, Result, (Comm, int*))                                                  \
  F(CommUserRank, Result, (Comm, int*))                                               \
  F(CommCuDevice, Result, (Comm, int*))                                               \
  F(CommGetAsyncError, Result, (Comm, Result*))                                       \
  F(CommAbort, Result, (Comm))                                                        \
  F(GroupStart, Result, ())                                                           \
  F(GroupEnd, Result, ())                                                             \
  F(Send, Result,                                                                     \
    (const void* data, size_t count, int type, int peer, Comm comm, CUstream stream)) \
  F(Recv, Result, (void* data, size_t count, int type, int peer, Comm comm, CUstream stream))

struct Nccl {
#define FULGUR_MEMBER(name, result, arguments) result(*name) arguments = nullptr;
  FULGUR_NCCL_FUNCTIONS(FULGUR_MEMBER)
#undef FULGUR_MEMBER
};

/// The functions of the NCCL that this process has loaded to make the communicator.
const Nccl& nccl() {
  static const Nccl found = [] {
    void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) {
      throw Error(Status::kUnavailable,
                  "comm: this process has not loaded libnccl.so.2, want a communicator of it");
    }
    Nccl all;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (function != nullptr) return;
      throw Error(Status::kUnavailable, fmt::format("comm: libnccl.so.2 has no {}", name));
    };
#define FULGUR_FIND(name, result, arguments) find(all.name, "nccl" #name);
    FULGUR_NCCL_FUNCTIONS(FULGUR_FIND)
#undef FULGUR_FIND
    return all;
  }();
  return found;
}

void check_nccl(Result result, const char* what) {
  if (result == kSuccess || result == kInProgress) return;
  throw Error(Status::kUnavailable, fmt::format("nccl{}: {}", what, nccl().GetErrorString(result)));
}

class NcclTransport final : public Transport, public GpuTransport {
 public:
  NcclTransport(Comm comm, double deadline)
      : comm_(comm), ranks_(place_of_nccl(comm).ranks), deadline_(deadline) {
    check_nccl(nccl().CommCuDevice(comm, &device_), "CommCuDevice");
    const CurrentContext current(gpu().context());
    check(driver().cuStreamCreate(&stream_, cuda::CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
  ~NcclTransport() override {
    try {
      const CurrentContext current(gpu().context());
      driver().cuStreamDestroy(stream_);
      if (staging_ != 0) driver().cuMemFree(staging_);
    } catch (const Error&) {  // at the end of the process the driver may be gone already
    }
  }

  /// An exchange of host memory, which is copied to the device and back.
  void exchange(std::span<const std::span<const std::byte>> sends,
                std::span<const std::span<std::byte>> receives) override {
    const CurrentContext current(gpu().context());
    int64_t bytes = 0;
    for (int r = 0; r < ranks_; ++r) bytes += placed(sends[r]) + placed(receives[r]);
    stage(bytes);
    std::vector<std::span<const std::byte>> out(ranks_);
    std::vector<std::span<std::byte>> in(ranks_);
    CUdeviceptr at = staging_;
    for (int r = 0; r < ranks_; ++r) {
      out[r] = {reinterpret_cast<std::byte*>(at), sends[r].size()};
      copy(at, address(sends[r].data()), sends[r].size());
      at += placed(sends[r]);
      in[r] = {reinterpret_cast<std::byte*>(at), receives[r].size()};
      at += placed(receives[r]);
    }
    exchange(out, in, stream_);
    for (int r = 0; r < ranks_; ++r) {
      copy(address(receives[r].data()), address(in[r].data()), receives[r].size());
    }
    check(driver().cuStreamSynchronize(stream_), "cuStreamSynchronize");
  }

  /// Runs in a thread of its own, because NCCL blocks the host when two ranks first connect.
  void exchange(std::span<const std::span<const std::byte>> sends,
                std::span<const std::span<std::byte>> receives, void* stream) override {
    wait_for(std::async(std::launch::async, [&, comm = comm_] {
      const CurrentContext current(gpu().context());
      auto* const on = static_cast<CUstream>(stream);
      check_nccl(nccl().GroupStart(), "GroupStart");
      for (int r = 0; r < ranks_; ++r) {
        if (!sends[r].empty()) {
          check_nccl(nccl().Send(sends[r].data(), sends[r].size(), kBytes, r, comm, on), "Send");
        }
        if (!receives[r].empty()) {
          check_nccl(nccl().Recv(receives[r].data(), receives[r].size(), kBytes, r, comm, on),
                     "Recv");
        }
      }
      check_nccl(nccl().GroupEnd(), "GroupEnd");
      check(driver().cuStreamSynchronize(on), "cuStreamSynchronize");
    }));
  }

  /// Ends the waits for other ranks on streams of this process.
  void abort(const std::string&) override {
    if (Comm const comm = std::exchange(comm_, nullptr); comm != nullptr) nccl().CommAbort(comm);
  }

  GpuTransport* gpu_transport() override { return this; }
  int device() const override { return device_; }

 private:
  static constexpr size_t kAlignment = 256;
  static CUdeviceptr address(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }
  static int64_t placed(std::span<const std::byte> x) {
    return static_cast<int64_t>((x.size() + kAlignment - 1) / kAlignment * kAlignment);
  }
  Gpu& gpu() const { return Gpu::at(device_); }

  void copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    if (bytes == 0) return;
    check(driver().cuMemcpyAsync(to, from, bytes, stream_), "cuMemcpyAsync");
  }

  void stage(int64_t bytes) {
    if (bytes <= staged_) return;
    if (staging_ != 0) check(driver().cuMemFree(std::exchange(staging_, 0)), "cuMemFree");
    staged_ = std::max<int64_t>(bytes, 1 << 20);
    check(driver().cuMemAlloc(&staging_, staged_), "memory for messages");
  }

  /// Waits until a step is done; fails if a rank has left or makes no progress.
  void wait_for(std::future<void> step) {
    using namespace std::chrono_literals;
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(deadline_);
    std::string why;
    while (why.empty() && step.wait_for(2ms) != std::future_status::ready) {
      Result result = kSuccess;
      nccl().CommGetAsyncError(comm_, &result);
      if (result != kSuccess && result != kInProgress) {
        why = fmt::format("a rank left: {}", nccl().GetErrorString(result));
      } else if (std::chrono::steady_clock::now() > end) {
        why = fmt::format("a rank made no step for {} s", deadline_);
      }
    }
    if (why.empty()) return step.get();
    abort(why);  // ends the step
    throw Error(Status::kUnavailable, why);
  }

  Comm comm_;
  int ranks_, device_ = 0;
  double deadline_;
  CUstream stream_ = nullptr;
  CUdeviceptr staging_ = 0;
  int64_t staged_ = 0;
};

}  // namespace

NcclPlace place_of_nccl(void* comm) {
  if (comm == nullptr) fail("comm", "got null, want a communicator of NCCL");
  NcclPlace place;
  check_nccl(nccl().CommCount(comm, &place.ranks), "CommCount");
  check_nccl(nccl().CommUserRank(comm, &place.rank), "CommUserRank");
  return place;
}

std::unique_ptr<Transport> connect_nccl(void* comm, double deadline) {
  return std::make_unique<NcclTransport>(comm, deadline);
}

}  // namespace fulgur::distributed
