#include "cuda/papers/fa1.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cuda/common/planned_family.h"
#include "cuda/common/tensor_shape.h"
#include "cuda/papers/plain_call.h"
#include "cuda/passes/forward.h"
#include "cuda/portable/backward.h"
#include "cuda/portable/forward_config.h"
#include "kernels/papers/fa1_params.h"

namespace fulgur::cuda::papers {
namespace {

constexpr int kMaxResidents = 2;

struct Fa1Plan : portable::ForwardKey {
  int shared_bytes = 0;
  int row_tiles = 0;    ///< of the longest sequence
  int slice_tiles = 0;  ///< per CTA
  int64_t heads = 0;    ///< of all sequences

  TileId tile() const { return {"fa1_forward", kernels::kStripRows, block_keys}; }
  int threads() const { return 128; }
  int slices() const { return ceil_div(row_tiles, slice_tiles); }
  int64_t ctas() const { return row_tiles == 0 ? 0 : heads * slices(); }
};

KernelUse fa1_kernel(const Fa1Plan& plan) {
  return {{"papers/fa1_forward.cu", kernel_config(plan)}, "fulgur_fa1_forward", plan.shared_bytes};
}

std::vector<KernelUse> fa1_kernels(const Fa1Plan& plan) { return {fa1_kernel(plan)}; }

struct Fa1Workspace : CallWorkspace {
  int64_t o = 0, statistics = 0;
};
Fa1Workspace workspace_of(const Problem&, const Fa1Plan& plan) {
  const int64_t rows = plan.heads * plan.row_tiles * kernels::kStripRows;
  Fa1Workspace at;
  Arena arena;
  at.o = arena.take(rows * plan.value_dim * int64_t{sizeof(float)});
  at.statistics = arena.take(rows * 2 * int64_t{sizeof(float)});
  at.end = arena.end();
  return at;
}

Explanation describe(const Fa1Plan& plan) {
  Explanation e;
  e.Br = kernels::kStripRows;
  e.Bc = plan.block_keys;
  describe_tile(plan.tile(), plan, e.details);
  e.details.add("shared_bytes", plan.shared_bytes);
  e.details.add("ctas", plan.ctas());
  e.decisions.push_back(
      fmt::format("FlashAttention (algorithm 2): {} keys in the outer loop, {} rows in the inner "
                  "one; O, l and m "
                  "make a round trip to memory for each",
                  plan.block_keys, int{kernels::kStripRows}));
  e.decisions.push_back(
      fmt::format("a CTA for {} row blocks of a head, {} in all", plan.slice_tiles, plan.ctas()));
  return e;
}

class Fa1Executable final : public ForwardPassExecutable {
 public:
  Fa1Executable(const Problem& p, Gpu& gpu, const Fa1Plan& plan, Explanation explanation)
      : ForwardPassExecutable(p, gpu, std::move(explanation), workspace_of(p, plan),
                              plan.ctas() > 0, /*out_aligned=*/true, /*has_padding=*/false),
        plan_(plan),
        at_(workspace_of(p, plan)) {
    if (plan.ctas() == 0) return;
    set_forward_call(params_, p, plan_);
    add_operands(params_, forward_shapes(p, plan.block_keys), {});
    params_.row_tiles = plan.row_tiles;
    params_.slice_tiles = plan.slice_tiles;
    params_.slices = plan.slices();
    kernel_ = gpu.kernel(fa1_kernel(plan)).function;
  }

 private:
  void launch(const ForwardArgs& args, const Run& run, char* workspace) const override {
    Fa1Params p = params_;
    set_run(p, args, run, workspace);
    p.o_rows = reinterpret_cast<float*>(workspace + at_.o);
    p.statistics = reinterpret_cast<float*>(workspace + at_.statistics);
    cuda::launch(static_cast<CUstream>(run.stream), kernel_, &p, {static_cast<int>(plan_.ctas())},
                 plan_.threads(), plan_.shared_bytes, "launching the kernel of FlashAttention");
  }

  Fa1Plan plan_;
  Fa1Workspace at_;
  Fa1Params params_{};
  CUfunction kernel_ = nullptr;
};

using Fa1Candidate = PlannedCandidate<Fa1Plan, Fa1Executable, fa1_kernels>;

std::string fa1_rejects(const Problem& p) { return plain_call_rejects(p, kMaxDim); }

/// Maximum of keys of a block, for which S and O of a row block fit registers.
int block_keys_of(int dim) { return dim <= 64 ? 128 : dim <= 128 ? 64 : 32; }

std::vector<Fitting<Fa1Plan>> fa1_plans(const Problem& p, const Card& card,
                                        std::vector<std::string>* rejected) {
  Fa1Plan plan;
  static_cast<AnyForwardKey&>(plan) = any_forward_key(p);
  plan.strips = plan.warp_strips = plan.stages = 1;
  plan.block_keys = block_keys_of(std::max(plan.head_dim, plan.value_dim));
  plan.whole_columns = plan.head_dim == p.d && plan.value_dim == p.dv;
  while (plan.block_keys > 16 && kernels::fa1_shared_bytes(plan.layout()) > card.shared_bytes) {
    plan.block_keys /= 2;
  }
  plan.shared_bytes = kernels::fa1_shared_bytes(plan.layout());
  if (plan.shared_bytes > card.shared_bytes) {
    rejected->push_back(fmt::format("tile {}: its {} bytes of shared memory do not fit {}",
                                    plan.tile().text(), plan.shared_bytes, card.shared_bytes));
    return {};
  }
  const int reserved = features_of(card.target).reserved_bytes;
  plan.residents =
      std::clamp(card.sm_shared_bytes / (plan.shared_bytes + reserved), 1, kMaxResidents);
  plan.heads = p.batch * p.hq;
  plan.row_tiles = ceil_div(p.sq, kernels::kStripRows);
  // As many slices per head as give each SM its CTAs.
  const int64_t slices =
      p.invariant ? 1 : ceil_div(card.sms * plan.residents, std::max<int64_t>(plan.heads, 1));
  plan.slice_tiles = std::max(ceil_div(plan.row_tiles, slices), 1);
  return {{plan}};
}

}  // namespace

const Family& fa1_forward_family() {
  static const PlannedFamily<Fa1Candidate> kFamily(
      [](const Problem& p) { return p.pass == Pass::kForward; }, fa1_rejects, fa1_plans);
  return kFamily;
}

const Family& fa1_backward_family() {
  static const PlannedFamily<portable::BackwardCandidate> kFamily(
      [](const Problem& p) { return p.pass == Pass::kBackward; }, fa1_rejects,
      portable::backward_candidates);
  return kFamily;
}

}  // namespace fulgur::cuda::papers
