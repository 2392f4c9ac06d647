#include "cuda/common/scores.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "cuda/common/expression.h"
#include "cuda/common/host_metadata.h"
#include "cuda/common/kernel_key.h"
#include "cuda/common/launch.h"
#include "cuda/common/planned_family.h"
#include "cuda/device/launch_memory.h"
#include "engine/workspace.h"
#include "kernels/common/scores_params.h"

namespace fulgur::cuda {
namespace {

static_assert(static_cast<int>(ScoreStage::kProbabilities) == ::kProbabilities);

constexpr int64_t kMaxScoredDim = 8192;  // of a row of Q in shared memory
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

/// Whether chosen rows lie in the host's memory, so that launches list them.
bool is_listed(const ConstTensor& rows) {
  return rows.given() && rows.device.type == DeviceType::kCpu;
}

/// The problem without the chosen rows, which are no numbers that a kernel uploads.
Problem without_rows(Problem p) {
  p.on_host.set(Arg::kRows, false);
  return p;
}

struct ScoresWorkspace {
  int64_t end = 0;
};
ScoresWorkspace workspace_of(const Problem& p, const ScoresPlan&) {
  return {host_metadata_bytes(without_rows(p))};
}

class ScoresExecutable final : public Executable {
 public:
  ScoresExecutable(const Problem& problem, Gpu& gpu, const ScoresPlan& plan, Reasons reasons)
      : problem_(without_rows(problem)),
        gpu_(gpu),
        plan_(plan),
        reasons_(std::move(reasons)),
        numbers_(problem_, gpu),
        expressions_(problem_),
        kernel_(gpu.kernel(kernels_of(plan)[0]).function) {}

  void run(const Call& call, const Run& run) const override {
    const ScoresArgs& args = *std::get<const ScoresArgs*>(call);
    const bool listed = is_listed(args.rows);
    if (listed) check_rows(args.rows);
    numbers_.check(args);
    const CurrentContext current(gpu_.context());
    const auto stream = static_cast<CUstream>(run.stream);
    const LaunchMemory::Lease lease = gpu_.launch_memory().of(run, workspace());
    ScoresParams params = params_of(numbers_.moved(args, lease.data));
    numbers_.store(args, stream, lease.data);
    if (!listed) return launch(params, stream);
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

  Explanation explain() const override {
    Explanation e = describe(plan_);
    numbers_.describe(e);
    return with_reasons(std::move(e), reasons_);
  }

  WorkspaceNeed workspace() const override {
    if (numbers_.bytes() == 0) return {};
    return {numbers_.bytes(), kWorkspaceAlignment, 0};
  }

 private:
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
    static_cast<CallParams&>(params) = call_params(p, band_of(plan_, p.mask));
    set_tensors(params, args);
    params.expression = expressions_.arguments(args.tensors);
    params.q = {const_cast<void*>(args.q.data), p.q.batch, p.q.row, p.q.head};
    params.k = {const_cast<void*>(args.k.data), p.k.batch, p.k.row, p.k.head};
    params.scores = static_cast<float*>(args.scores.data);
    params.scores_batch = args.scores.strides[0];
    params.scores_head = args.scores.strides[1];
    params.scores_row = args.scores.strides[2];
    params.stage = static_cast<::ScoreStage>(args.stage);
    params.batch = static_cast<int>(p.batch);
    params.queries = static_cast<int>(args.scores.shape[2]);
    if (!is_listed(args.rows)) params.query_device = static_cast<const long long*>(args.rows.data);
    params.pages = key_pages(p);
    params.pages.table = static_cast<const int*>(args.cache.page_table.data);
    params.pages.indptr = static_cast<const int*>(args.cache.page_indptr.data);
    params.cache_batch_idx = static_cast<const int*>(args.cache.cache_batch_idx.data);
    params.leftpad_k = static_cast<const int*>(args.cache.leftpad_k.data);
    params.sinks = sinks_of(args.sinks);
    params.tree_mask = static_cast<const unsigned long long*>(args.tree_mask.data);
    return params;
  }

  void launch(const ScoresParams& params, CUstream stream) const {
    const int64_t rows = int64_t{params.batch} * params.hq * params.queries;
    cuda::launch(stream, kernel_, &params, {static_cast<int>(std::min(rows, kMaxCtas))},
                 kScoreThreads, plan_.shared_bytes(), "launching the kernel of scores");
  }

  Problem problem_;
  Gpu& gpu_;
  ScoresPlan plan_;
  Reasons reasons_;
  HostMetadata numbers_;
  DeviceExpressions expressions_;
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
