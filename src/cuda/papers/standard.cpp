#include "cuda/papers/standard.h"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "cuda/common/kernel_key.h"
#include "cuda/common/launch.h"
#include "cuda/common/planned_family.h"
#include "cuda/common/tensor_shape.h"
#include "cuda/device/launch_memory.h"
#include "cuda/papers/plain_call.h"
#include "kernels/papers/standard_params.h"

namespace fulgur::cuda::papers {
namespace {

constexpr int kProductRows = 128, kProductThreads = 256, kDepthBytes = 128;
constexpr int kCtaRows = 8, kSoftmaxThreads = 32 * kCtaRows;

/// The constants of kernel_config.h of papers/product.cu.
struct ProductKey : KernelKey {
  int columns = 128;
  bool transposed_a = false, transposed_b = false, scores = false;

  template <class F>
  void for_each_field(const F& f) const {
    KernelKey::for_each_field(f);
    f("kPackedK", false);
    f("kWholeColumns", false);
    f("kColumns", columns);
    f("kTransposedA", transposed_a);
    f("kTransposedB", transposed_b);
    f("kScores", scores);
  }
};

struct StandardPlan : KernelKey {
  bool backward = false;
  TileId tile() const { return {"standard", kProductRows, 128}; }
};

/// The products of both passes, named as in the papers by their results.
enum Product { kS, kO, kDv, kDp, kDq, kDk };

ProductKey product_key(const StandardPlan& plan, Product product) {
  ProductKey key;
  if (product == kS) static_cast<KernelKey&>(key) = plan;  // the kernel of S applies the mask
  key.dtypes = plan.dtypes;
  key.head_dim = key.value_dim = 0;
  key.transforms_scores = false;
  const int dims = product == kO || product == kDv ? plan.value_dim : plan.head_dim;
  key.columns = product != kS && product != kDp && dims <= 64 ? 64 : 128;
  key.transposed_a = product == kDv || product == kDk;
  key.transposed_b = product == kS || product == kDp;
  key.scores = product == kS;
  return key;
}

KernelUse product_kernel(const StandardPlan& plan, Product product) {
  const ProductKey key = product_key(plan, product);
  return {{"papers/product.cu", kernel_config(key)},
          "fulgur_product",
          2 * kDepthBytes * (kProductRows + key.columns)};
}

KernelUse rows_kernel(const StandardPlan& plan, const char* source, const char* entry) {
  KernelKey key;
  key.dtypes = plan.dtypes;
  return {{source, kernel_config(key)}, entry, 0};
}
KernelUse softmax_kernel(const StandardPlan& plan) {
  return rows_kernel(plan, "papers/softmax.cu", "fulgur_softmax");
}
KernelUse gradient_kernel(const StandardPlan& plan) {
  return rows_kernel(plan, "papers/softmax_gradient.cu", "fulgur_softmax_gradient");
}

std::vector<Product> products_of(const StandardPlan& plan) {
  if (plan.backward) return {kS, kDv, kDp, kDq, kDk};
  return {kS, kO};
}

std::vector<KernelUse> standard_kernels(const StandardPlan& plan) {
  std::vector<KernelUse> kernels;
  for (const Product product : products_of(plan)) kernels.push_back(product_kernel(plan, product));
  kernels.push_back(softmax_kernel(plan));
  if (plan.backward) kernels.push_back(gradient_kernel(plan));
  return kernels;
}

int64_t row_stride(const Problem& p) { return (p.sk + 7) / 8 * 8; }

struct StandardWorkspace {
  int64_t s = 0, dp = 0, end = 0;
};
StandardWorkspace workspace_of(const Problem& p, const StandardPlan& plan) {
  const int64_t elements = p.batch * p.hq * p.sq * row_stride(p);
  StandardWorkspace at;
  Arena arena;
  at.s = arena.take(elements * int64_t{sizeof(float)});
  at.dp = arena.take(plan.backward ? elements * size_of(p.dtypes.q) : 0);
  at.end = arena.end();
  return at;
}

Explanation describe(const StandardPlan& plan, const Problem& p) {
  Explanation e;
  e.Br = kProductRows;
  e.Bc = 128;
  describe_tile(plan.tile(), plan, e.details);
  e.decisions.push_back(
      fmt::format("standard attention (FlashAttention, algorithm {}): S [{}, {}, {}, {}] in memory "
                  "in f32, P in "
                  "its place in {}",
                  plan.backward ? 3 : 0, p.batch, p.hq, p.sq, p.sk, name_of(p.dtypes.q)));
  e.decisions.push_back(
      fmt::format("{} products by mma.sync, softmax by rows in place", products_of(plan).size()));
  return e;
}

StridedTensor strided(const Layout& layout, const void* data) {
  return {const_cast<void*>(data), layout.batch, layout.row, layout.head};
}

class StandardExecutable final : public Executable {
 public:
  StandardExecutable(const Problem& problem, Gpu& gpu, const StandardPlan& plan,
                     Explanation explanation)
      : p_(problem),
        gpu_(gpu),
        plan_(plan),
        explanation_(std::move(explanation)),
        at_(workspace_of(problem, plan)),
        softmax_(gpu.kernel(softmax_kernel(plan)).function) {
    for (const Product product : products_of(plan)) {
      products_[product] = gpu.kernel(product_kernel(plan, product)).function;
    }
    if (plan.backward) gradient_ = gpu.kernel(gradient_kernel(plan)).function;
  }

  void run(const Call& call, const Run& run) const override {
    const CurrentContext current(gpu_.context());
    LaunchMemory::Lease lease;
    if (at_.end > 0) lease = gpu_.launch_memory().of(run, workspace());
    const auto stream = static_cast<CUstream>(run.stream);
    if (plan_.backward) {
      backward(*std::get<const BackwardArgs*>(call), lease.data, stream);
    } else {
      forward(*std::get<const ForwardArgs*>(call), lease.data, stream);
    }
  }

  Explanation explain() const override { return explanation_; }

  WorkspaceNeed workspace() const override {
    if (at_.end == 0) return {};
    return {at_.end, kWorkspaceAlignment, 0};
  }

 private:
  /// A matrix of a product, and how many heads of the product use the same head of the matrix.
  struct Matrix {
    StridedTensor at;
    int64_t group = 1;
  };

  void forward(const ForwardArgs& args, char* memory, CUstream stream) const {
    const Matrix q = operand("q", args.q, p_.q), k = of_group(operand("k", args.k, p_.k)),
                 v = of_group(operand("v", args.v, p_.v)), o = operand("out", args.out, p_.out);
    multiply(kS, stream, q, k, matrix(memory + at_.s), p_.sq, p_.sk, p_.d, p_.scale);
    SoftmaxParams rows = rows_of(memory + at_.s);
    rows.lse = static_cast<float*>(args.lse.data);
    launch_rows(softmax_, stream, rows);
    multiply(kO, stream, in_place_of_s(memory + at_.s), v, o, p_.sq, p_.dv, p_.sk, 1);
  }

  void backward(const BackwardArgs& args, char* memory, CUstream stream) const {
    const Matrix q = operand("q", args.q, p_.q), k = of_group(operand("k", args.k, p_.k)),
                 v = of_group(operand("v", args.v, p_.v)),
                 dout = operand("dout", args.dout, p_.dout), dq = operand("dq", args.dq, p_.dq),
                 dk = of_group(operand("dk", args.dk, p_.dk)),
                 dv = of_group(operand("dv", args.dv, p_.dv_grad));
    const Matrix P = in_place_of_s(memory + at_.s), dS = matrix(memory + at_.dp);
    multiply(kS, stream, q, k, matrix(memory + at_.s), p_.sq, p_.sk, p_.d, p_.scale);
    SoftmaxParams rows = rows_of(memory + at_.s);
    launch_rows(softmax_, stream, rows);
    multiply(kDv, stream, P, dout, dv, p_.sk, p_.dv, p_.sq, 1);
    multiply(kDp, stream, dout, v, dS, p_.sq, p_.sk, p_.dv, 1);
    rows.dp = dS.at.data;
    rows.dlse = static_cast<const float*>(args.dlse.data);
    launch_rows(gradient_, stream, rows);
    multiply(kDq, stream, dS, k, dq, p_.sq, p_.d, p_.sk, p_.scale);
    multiply(kDk, stream, dS, q, dk, p_.sk, p_.d, p_.sq, p_.scale);
  }

  static Matrix operand(const char* name, const ConstTensor& tensor, const Layout& layout) {
    return {strided(layout, aligned_data(name, tensor, tensor.numel() == 0))};
  }
  Matrix of_group(Matrix matrix) const {
    matrix.group = p_.group();
    return matrix;
  }
  /// The matrix of S, or of dP and dS.
  Matrix matrix(char* memory) const {
    const int64_t head = p_.sq * row_stride(p_);
    return {{memory, p_.hq * head, row_stride(p_), head}};
  }
  /// The matrix of P, which has the row stride of S.
  Matrix in_place_of_s(char* memory) const {
    Matrix p = matrix(memory);
    const auto ratio = static_cast<int64_t>(sizeof(float)) / size_of(p_.dtypes.q);
    p.at.batch *= ratio;
    p.at.row *= ratio;
    p.at.head *= ratio;
    return p;
  }

  /// C = scale A B. A head of C is the sum over the q heads that use it.
  void multiply(Product product, CUstream stream, const Matrix& a, const Matrix& b, const Matrix& c,
                int64_t m, int64_t n, int64_t depth, double scale) const {
    ProductParams params{};
    static_cast<CallParams&>(params) = call_params(p_, band_of(plan_, p_));
    params.a = a.at;
    params.b = b.at;
    params.c = c.at;
    params.a_group = static_cast<int>(a.group);
    params.b_group = static_cast<int>(b.group);
    params.summed = static_cast<int>(c.group);
    params.heads = static_cast<int>(p_.hq / c.group);
    params.m = static_cast<int>(m);
    params.n = static_cast<int>(n);
    params.depth = static_cast<int>(depth);
    params.scale = static_cast<float>(scale);
    const KernelUse use = product_kernel(plan_, product);
    const int64_t tiles =
        int64_t{ceil_div(m, kProductRows)} * ceil_div(n, product_key(plan_, product).columns);
    const int64_t ctas = tiles * params.heads * p_.batch;
    if (ctas == 0) return;
    launch(stream, products_[product], &params, {static_cast<int>(ctas)}, kProductThreads,
           use.shared_bytes, "launching a product of standard attention");
  }

  SoftmaxParams rows_of(char* s) const {
    SoftmaxParams rows{};
    rows.s = reinterpret_cast<float*>(s);
    rows.stride = row_stride(p_);
    rows.lse_batch_stride = p_.lse.batch;
    rows.lse_head_stride = p_.lse.head;
    rows.dlse_batch_stride = p_.dlse.batch;
    rows.dlse_head_stride = p_.dlse.head;
    rows.rows = static_cast<int>(p_.batch * p_.hq * p_.sq);
    rows.hq = static_cast<int>(p_.hq);
    rows.sq = static_cast<int>(p_.sq);
    rows.sk = static_cast<int>(p_.sk);
    return rows;
  }

  static void launch_rows(CUfunction kernel, CUstream stream, const SoftmaxParams& rows) {
    if (rows.rows == 0) return;
    launch(stream, kernel, &rows, {ceil_div(rows.rows, kCtaRows)}, kSoftmaxThreads, 0,
           "launching the softmax of standard attention");
  }

  Problem p_;
  Gpu& gpu_;
  StandardPlan plan_;
  Explanation explanation_;
  StandardWorkspace at_;
  std::array<CUfunction, kDk + 1> products_{};
  CUfunction softmax_, gradient_ = nullptr;
};

using StandardCandidate = PlannedCandidate<StandardPlan, StandardExecutable, standard_kernels>;

bool is_attention(const Problem& p) { return p.pass != Pass::kScores; }

std::string standard_rejects(const Problem& p) { return plain_call_rejects(p, kMaxDim); }

std::vector<Fitting<StandardPlan>> standard_plans(const Problem& p, const Card&,
                                                  std::vector<std::string>*) {
  StandardPlan plan;
  static_cast<KernelKey&>(plan) = kernel_key(p);
  plan.backward = p.pass == Pass::kBackward;
  return {{plan}};
}

}  // namespace

const Family& standard_family() {
  static const PlannedFamily<StandardCandidate> kFamily(is_attention, standard_rejects,
                                                        standard_plans);
  return kFamily;
}

}  // namespace fulgur::cuda::papers
