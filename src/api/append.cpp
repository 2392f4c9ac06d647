#include "fulgur/append.h"

#include "api/prepare.h"
#include "call/append_call.h"
#include "call/check_tensors.h"
#include "call/make_problem.h"
#include "plan/engines.h"

namespace fulgur {

void append(const AppendArgs& args, const Options& options, const Run& run) {
  const AppendCall call = checked_append(args, checked_mask(options), options.hadamard);
  const Engine& engine = engine_on(call.p.device, options.engine, AppendCall::kLike);
  const int threads = checked_threads(options);
  check_memory(args);
  engine.append(call, threads, run);
}

void prepare(const AppendArgs& args, const Options& options) {
  const AppendCall call = checked_append(args, checked_mask(options), options.hadamard);
  engine_on(call.p.device, options.engine, AppendCall::kLike).prepare(call);
}

}  // namespace fulgur
