#include "fulgur/append.h"

#include <string>

#include "api/prepare.h"
#include "call/append_call.h"
#include "call/make_problem.h"
#include "cpu/append.h"
#include "cuda/engine/append.h"

namespace fulgur {
namespace {

/// An engine that is named for the attention that follows must be one of the tensors' device.
void check_engine(const std::string& name, Device device) {
  const bool on_cpu = device.type == DeviceType::kCpu;
  if (name.empty() || (on_cpu ? name == "cpu" || name == "reference" : name == "cuda")) return;
  fail("engine", "got \"{}\", want {}: {} is on {}", name, on_cpu ? "cpu or reference" : "cuda",
       AppendCall::kLike, name_of(device));
}

}  // namespace

void append(const AppendArgs& args, const Options& options, const Run& run) {
  const AppendCall call = checked_append(args, checked_mask(options));
  check_engine(options.engine, call.p.device);
  const int threads = checked_threads(options);
  check_pointers(args);
  if (call.p.device.type == DeviceType::kCpu) {
    cpu::append(call, threads);
  } else {
    cuda::append(call, run);
  }
}

void prepare(const AppendArgs& args, const Options& options) {
  const AppendCall call = checked_append(args, checked_mask(options));
  if (call.p.device.type == DeviceType::kCuda) cuda::prepare(call);
}

}  // namespace fulgur
