#include "cuda/common/scores.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "cuda/common/executable.h"
#include "cuda/common/kernel_key.h"
#include "cuda/common/launch.h"
#include "cuda/common/planned_family.h"
#include "engine/workspace.h"
#include "kernels/common/scores_params.h"

namespace fulgur::cuda {
namespace {

static_assert(static_cast<int>(ScoreStage::kProbabilities) == ::kProbabilities);

constexpr int64_t kMaxScoredDim = 8192;  // a row of Q must fit shared memory
constexpr int64_t kMaxCtas = 1 << 20;

struct ScoresPlan : AnyForwardKey {
  TileId tile() const { return {"scores", 1, kScoreThreads}; }
  int shared_bytes() const {
    return static_cast<int>(sizeof(float)) * (kScoreThreads / 32 + head_dim);
  }
};

std::vector<KernelUse> kernels_of(const ScoresPlan& plan) {
  return {{{"common/scores.cu", kernel_config(plan)}, "fulgur_scores", plan.shared_bytes()}};
}

Explanation describe(const ScoresPlan& plan) {
  Explanation e;
  e.decisions.push_back("scores row by row in f32, a CTA a query of a head");
  describe_tile(plan.tile(), plan, e.details);
  return e;
}

/// Whether the chosen rows lie in host memory, so that the arguments of launches list them.
bool is_listed(const ConstTensor& rows) {
  return rows.given() && rows.device.type == DeviceType::kCpu;
}

/// The problem without the chosen rows, which are not uploaded as host metadata.
Problem without_rows(Problem p) {
  p.on_host.set(Arg::kRows, false);
  return p;
}

CallWorkspace workspace_of(const Problem& p, const ScoresPlan&) {
  return {.end = host_metadata_bytes(without_rows(p))};
}

class ScoresExecutable final : public AttentionExecutable<ScoresArgs> {
 public:
  ScoresExecutable(const Problem& problem, Gpu& gpu, const ScoresPlan& plan,
                   Explanation explanation)
      : AttentionExecutable(without_rows(problem), gpu, std::move(explanation),
                            workspace_of(problem, plan), /*launches=*/true),
        problem_(problem),
        plan_(plan),
        kernel_(gpu.kernel(kernels_of(plan)[0]).function) {}

 private:
  void check_addresses(const ScoresArgs& args) const override {
    if (is_listed(args.rows)) check_rows(args.rows);
  }

  void launch(const ScoresArgs& args, const Run& run, char*) const override {
    const auto stream = static_cast<CUstream>(run.stream);
    ScoresParams params = params_of(args);
    if (!is_listed(args.rows)) return launch(params, stream);
    const auto* rows = static_cast<const int64_t*>(args.rows.data);
    for (int64_t done = 0; done < args.rows.shape[0]; done += kListedQueries) {
      params.lists = true;
      params.queries =
          static_cast<int>(std::min<int64_t>(args.rows.shape[0] - done, kListedQueries));
      std::copy_n(rows + done, params.queries, params.listed);
      launch(params, stream);
      params.scores += params.queries * params.scores_row;
    }
  }

  void check_rows(const ConstTensor& rows) const {
    const auto* chosen = static_cast<const int64_t*>(rows.data);
    for (int64_t r = 0; r < rows.shape[0]; ++r) {
      if (chosen[r] >= 0 && chosen[r] < problem_.sq) continue;
      fail("rows", "got {} at {}, want a query of the {} of a sequence", chosen[r], r, problem_.sq);
    }
  }

  ScoresParams params_of(const ScoresArgs& args) const {
    const Problem& p = problem_;
    ScoresParams params{};
    static_cast<CallParams&>(params) = call_params(p, band_of(plan_, p));
    if (expressions_.given()) params.expression = expressions_.arguments(args.tensors);
    params.q = strided(p.q);
    params.k = strided(p.k);
    params.q.data = const_cast<void*>(args.q.data);
    params.k.data = const_cast<void*>(args.k.data);
    params.scores = static_cast<float*>(args.scores.data);
    params.scores_batch = args.scores.strides[0];
    params.scores_head = args.scores.strides[1];
    params.scores_row = args.scores.strides[2];
    params.stage = static_cast<::ScoreStage>(args.stage);
    params.batch = static_cast<int>(p.batch);
    params.queries = static_cast<int>(args.scores.shape[2]);
    if (!is_listed(args.rows)) params.query_device = static_cast<const long long*>(args.rows.data);
    params.pages = key_pages(p);
    set_forward_tensors(params, args);
    return params;
  }

  void launch(const ScoresParams& params, CUstream stream) const {
    const int64_t rows = int64_t{params.batch} * params.hq * params.queries;
    cuda::launch(stream, kernel_, &params, {static_cast<int>(std::min(rows, kMaxCtas))},
                 kScoreThreads, plan_.shared_bytes(), "launching the kernel of scores");
  }

  Problem problem_;
  ScoresPlan plan_;
  CUfunction kernel_;
};

using ScoresCandidate = PlannedCandidate<ScoresPlan, ScoresExecutable, kernels_of>;

bool is_for_scores(const Problem& p) { return p.pass == Pass::kScores; }

std::string scores_rejects(const Problem& p) {
  if (!p.dtypes.in({DType::kBF16, DType::kF16, DType::kF32}))
    return "computes scores of bf16, f16 and f32";
  if (p.d > kMaxScoredDim)
    return fmt::format("computes scores of d up to {}, got {}", kMaxScoredDim, p.d);
  if (std::max({p.sq, p.sk, p.total_q, p.total_k}) >= kMaxRows) {
    return fmt::format("computes scores of less than 2^29 rows, got {} of q and {} of k",
                       std::max(p.sq, p.total_q), std::max(p.sk, p.total_k));
  }
  return {};
}

std::vector<Fitting<ScoresPlan>> scores_plans(const Problem& p, const Card&,
                                              std::vector<std::string>*) {
  ScoresPlan plan;
  static_cast<AnyForwardKey&>(plan) = any_forward_key(p);
  plan.transforms_scores = true;
  return {{plan}};
}

}  // namespace

const Family& scores_family() {
  static const PlannedFamily<ScoresCandidate> kFamily(is_for_scores, scores_rejects, scores_plans);
  return kFamily;
}

}  // namespace fulgur::cuda
