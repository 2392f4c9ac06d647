#include "fulgur/scores.h"

#include <string>
#include <vector>

#include "call/check_tensors.h"
#include "call/make_problem.h"
#include "plan/engines.h"

namespace fulgur {

void scores(const ScoresArgs& args, const Options& options, const Run& run) {
  const Problem p = make_problem(args, options);
  check_scores(args, p);
  const int threads = checked_threads(options);
  std::vector<std::string> rejected;
  const Engine& engine = choose_engine(all_engines(), p, options.engine, &rejected);
  check_memory(args);
  if (args.scores.numel() == 0) return;
  engine.plan(p, threads)->run(&args, run);
}

std::array<int64_t, 4> scores_shape(const ScoresArgs& args, const Options& options) {
  return sizes_of_scores(args, make_problem(args, options));
}

}  // namespace fulgur
