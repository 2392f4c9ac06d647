#include "cuda/passes/converted.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <utility>

#include "cuda/common/append_arguments.h"
#include "cuda/common/host_metadata.h"
#include "cuda/common/kernel_key.h"
#include "cuda/common/launch.h"
#include "engine/workspace.h"
#include "kernels/codes/convert_params.h"

namespace fulgur::cuda {
namespace {

constexpr int64_t kCtasOfSm = 16;
constexpr int64_t kMaxBytes = int64_t{2} << 30;  // of numbers of 16 bits, of the device's memory
// Of the memory bandwidth, measured on an H200: with codes of 8 bits, and of 4, whose conversion
// binds.
constexpr double kMemoryShare = 0.75, kMemoryShareOf4Bits = 0.4;

constexpr auto kPlacesOfKeys = {Arg::kCuSeqlensK, Arg::kSeqUsedK,      Arg::kPageTable,
                                Arg::kPageIndptr, Arg::kCacheBatchIdx, Arg::kLeftpadK};

int units_of(int64_t heads, int64_t dim) {
  return static_cast<int>(heads) * kernels::convert_chunks(static_cast<int>(dim));
}
int64_t keys_of(const Problem& p) { return p.packed_k ? p.total_k : p.batch * p.sk; }

/// Rows of whole chunks.
Layout contiguous(const Problem& p, int64_t dim, bool packed) {
  const int64_t head = units_of(1, dim) * kernels::kConvertColumns;
  return {packed ? 0 : p.sk * p.hk * head, p.hk * head, head};
}

/// The call on converted k and v.
Problem converted(const Problem& p) {
  Problem f = p;
  f.dtypes.k = f.dtypes.v = p.dtypes.q;
  const bool any_lengths = p.has(Arg::kSeqUsedK) || has_cache(p);
  for (const Arg a : kPlacesOfKeys) {
    if (a == Arg::kCuSeqlensK && p.packed_k) continue;
    f.given.set(a, false);
    f.on_host.set(a, false);
  }
  f.cache = {};
  f.given.set(Arg::kSeqUsedK, any_lengths);
  if (p.packed && !p.packed_k) {  // sequence b begins at row b * sk
    f.packed_k = true;
    f.given.set(Arg::kCuSeqlensK, true);
  }
  f.total_k = f.total_keys = keys_of(p);
  f.k = contiguous(p, p.d, f.packed_k);
  f.v = contiguous(p, p.dv, f.packed_k);
  f.k_descale = f.v_descale = f.k_zero_point = f.v_zero_point = {};
  for (const Arg a : {Arg::kKZeroPoint, Arg::kVZeroPoint}) f.given.set(a, false);
  return f;
}

/// Offsets in the workspace, in bytes. That of the forward kernel comes first.
struct Places {
  int64_t k = 0, v = 0, lengths = 0, starts = 0, metadata = 0, end = 0;
  int64_t converted_bytes = 0;
};
Places places_of(const Problem& p, int64_t begin) {
  const auto bytes = [&](int64_t dim) {
    return bytes_of(p.dtypes.q, keys_of(p) * units_of(p.hk, dim) * kernels::kConvertColumns);
  };
  Places at{.converted_bytes = bytes(p.d) + bytes(p.dv)};
  Arena arena(begin);
  at.k = arena.take(bytes(p.d));
  at.v = arena.take(bytes(p.dv));
  at.lengths = arena.take(p.batch * int64_t{sizeof(int)});
  at.starts = arena.take((p.batch + 1) * int64_t{sizeof(int)});
  at.metadata = arena.take(host_metadata_bytes(p));
  at.end = arena.end();
  return at;
}

/// Cycles of the conversion. The costs of kernels count sq rows for each sequence; where there are
/// fewer on average, each of them bears more of the conversion.
double conversion_cycles(const Problem& p, const Places& at, const Card& card) {
  const auto bytes = static_cast<double>(keys_of(p) * p.key_bytes() + at.converted_bytes);
  const auto rows = static_cast<double>(p.batch * p.sq);
  const double shares = p.packed ? rows / std::max(1.0 * static_cast<double>(p.total_q), 1.0) : 1;
  const auto has_4_bits = [](DType dtype) { return kernels::bits_of(element_of(dtype)) == 4; };
  const bool of_4_bits = has_4_bits(p.dtypes.k) || has_4_bits(p.dtypes.v);
  return card.launch_microseconds * card.megahertz +
         bytes / ((of_4_bits ? kMemoryShareOf4Bits : kMemoryShare) * card.bytes_per_cycle) *
             std::max(shares, 1.0);
}

Explanation described(Explanation forward, const Problem& p, const Places& at) {
  forward.details.add("converted", std::string(name_of(p.dtypes.q)));
  forward.details.add("converted_bytes", at.converted_bytes);
  forward.decisions.push_back(fmt::format(
      "k of {} and v of {} are converted to {} first, once for all rows of q: {} bytes",
      name_of(p.dtypes.k), name_of(p.dtypes.v), name_of(p.dtypes.q), at.converted_bytes));
  return forward;
}

class ConvertedExecutable final : public Executable {
 public:
  ConvertedExecutable(const Problem& p, Gpu& gpu, std::unique_ptr<const Executable> forward)
      : problem_(p),
        call_(converted(p)),
        gpu_(gpu),
        forward_(std::move(forward)),
        metadata_(with_places_alone(p), gpu),
        at_(places_of(p, forward_->workspace().bytes)),
        kernel_(gpu.kernel(convert_kernel(p.dtypes)).function) {
    params_.k = tensor_of(p.k, p.dtypes.k, p.d);
    params_.v = tensor_of(p.v, p.dtypes.v, p.dv);
    params_.batch = static_cast<int>(p.batch);
    params_.sk = static_cast<int>(p.sk);
    params_.total_k = static_cast<int>(p.total_k);
    params_.pages = key_pages(p);
    params_.page = static_cast<int>(p.cache.page);
    const int64_t rows = std::min(kernels::convert_rows(units_of(p.hk, p.d)),
                                  kernels::convert_rows(units_of(p.hk, p.dv)));
    const int64_t share = kCtasOfSm * gpu.sms() / std::max<int64_t>(p.batch, 1) + 1;
    params_.ctas = static_cast<int>(std::clamp<int64_t>((p.sk + rows - 1) / rows, 1, share));
  }

  void run(const Call& call, const Run& run) const override {
    const ForwardArgs& args = *std::get<const ForwardArgs*>(call);
    metadata_.check(args);
    const CurrentContext current(gpu_.context());
    const LaunchMemory::Lease lease = gpu_.launch_memory().of(run, workspace());
    if (problem_.batch > 0) convert(args, static_cast<CUstream>(run.stream), lease.data);
    const ForwardArgs forward = forward_args(args, lease.data);
    Run same = run;
    same.workspace.data = lease.data;
    forward_->run(&forward, same);
  }

  Explanation explain() const override { return described(forward_->explain(), problem_, at_); }

  WorkspaceNeed workspace() const override {
    WorkspaceNeed need = forward_->workspace();
    need.bytes = at_.end;
    need.alignment = kWorkspaceAlignment;
    return need;
  }

 private:
  /// The problem, of whose tensors on the host those alone that say where keys lie.
  static Problem with_places_alone(Problem p) {
    const TensorSet on_host = p.on_host;
    p.on_host = {};
    for (const Arg a : kPlacesOfKeys) p.on_host.set(a, on_host.has(a));
    return p;
  }

  ConvertedTensor tensor_of(const Layout& at, DType dtype, int64_t dim) const {
    ConvertedTensor t{};
    t.from = {nullptr, bytes_of(dtype, at.batch), bytes_of(dtype, at.row),
              bytes_of(dtype, at.head)};
    t.heads = static_cast<int>(problem_.hk);
    t.dim = static_cast<int>(dim);
    return t;
  }

  void convert(const ForwardArgs& on_host, CUstream stream, char* workspace) const {
    metadata_.store(on_host, stream, workspace + at_.metadata);
    const ForwardArgs args = metadata_.moved(on_host, workspace + at_.metadata);
    ConvertParams p = params_;
    p.k.from.data = const_cast<void*>(args.k.data);  // the kernel reads it
    p.v.from.data = const_cast<void*>(args.v.data);
    p.k.to = workspace + at_.k;
    p.v.to = workspace + at_.v;
    const OperandScaling scaling(problem_, args);
    p.k.codes = codes_of(problem_.dtypes.k, scaling.k);
    p.v.codes = codes_of(problem_.dtypes.v, scaling.v);
    const auto ints = [](const ConstTensor& t) { return static_cast<const int*>(t.data); };
    p.cu_seqlens_k = ints(args.lengths.cu_seqlens_k);
    p.seqused_k = ints(args.lengths.seqused_k);
    p.cache_batch_idx = ints(args.cache.cache_batch_idx);
    p.leftpad_k = ints(args.cache.leftpad_k);
    p.pages.table = ints(args.cache.page_table);
    p.pages.indptr = ints(args.cache.page_indptr);
    p.lengths = reinterpret_cast<int*>(workspace + at_.lengths);
    if (call_.packed_k && !problem_.packed_k)
      p.starts = reinterpret_cast<int*>(workspace + at_.starts);
    launch(stream, kernel_, &p, {params_.batch * params_.ctas, 2}, kernels::kConvertThreads, 0,
           "launching the kernel that converts codes");
  }

  /// The call on what was converted.
  ForwardArgs forward_args(const ForwardArgs& args, char* workspace) const {
    ForwardArgs f = args;
    const auto at = [&](int64_t offset, DType dtype, std::initializer_list<int64_t> shape) {
      return ConstTensor::contiguous(workspace + offset, dtype, shape, problem_.device);
    };
    const auto rows = [&](int64_t offset, const Layout& layout, int64_t dim) {
      const DType dtype = call_.dtypes.q;
      ConstTensor t = call_.packed_k ? at(offset, dtype, {call_.total_k, call_.hk, dim})
                                     : at(offset, dtype, {call_.batch, call_.sk, call_.hk, dim});
      if (!call_.packed_k) t.strides[0] = layout.batch;
      t.strides[t.rank - 3] = layout.row;
      t.strides[t.rank - 2] = layout.head;
      return t;
    };
    f.k = rows(at_.k, call_.k, call_.d);
    f.v = rows(at_.v, call_.v, call_.dv);
    f.descales = {};
    f.cache = {};
    f.lengths.seqused_k = {};
    if (call_.has(Arg::kSeqUsedK))
      f.lengths.seqused_k = at(at_.lengths, DType::kI32, {call_.batch});
    if (call_.packed_k && !problem_.packed_k)
      f.lengths.cu_seqlens_k = at(at_.starts, DType::kI32, {call_.batch + 1});
    return f;
  }

  Problem problem_, call_;
  Gpu& gpu_;
  std::unique_ptr<const Executable> forward_;
  HostMetadata metadata_;
  Places at_;
  CUfunction kernel_;
  ConvertParams params_{};  ///< without addresses
};

class ConvertedCandidate final : public Candidate {
 public:
  ConvertedCandidate(const Problem& p, std::shared_ptr<const Candidate> forward, const Card& card)
      : problem_(p), forward_(std::move(forward)), at_(places_of(p, forward_->workspace)) {
    tile = forward_->tile;
    cycles = forward_->cycles + conversion_cycles(p, at_, card);
    workspace = at_.end;
    tuned_only = forward_->tuned_only;
  }

  Explanation explain() const override { return described(forward_->explain(), problem_, at_); }
  std::vector<KernelUse> kernels() const override {
    std::vector<KernelUse> kernels = forward_->kernels();
    kernels.push_back(convert_kernel(problem_.dtypes));
    return kernels;
  }
  std::unique_ptr<const Executable> executable(Gpu& gpu, const Reasons& reasons) const override {
    return std::make_unique<ConvertedExecutable>(problem_, gpu, forward_->executable(gpu, reasons));
  }

 private:
  Problem problem_;
  std::shared_ptr<const Candidate> forward_;
  Places at_;
};

Candidates converting(const Candidates& forward, const Problem& p, const Card& card) {
  Candidates result;
  for (const auto& candidate : forward)
    result.push_back(std::make_shared<ConvertedCandidate>(p, candidate, card));
  return result;
}

}  // namespace

KernelUse convert_kernel(const OperandTypes& dtypes) {
  return {{"codes/convert.cu", config_text({{},
                                            {{"kTo", element_of(dtypes.q)},
                                             {"kFromK", element_of(dtypes.k)},
                                             {"kFromV", element_of(dtypes.v)}}})},
          "fulgur_convert_codes"};
}

bool ConvertedFamily::is_for(const Problem& p) const {
  return p.pass == Pass::kForward && (is_low_bit(p.dtypes.k) || is_low_bit(p.dtypes.v)) &&
         (exceeds_16_bits(p.dtypes) || !f32_alone_) && forward_.is_for(converted(p));
}

std::string ConvertedFamily::rejects(const Problem& p) const {
  // Numbers of codes, times any scale, have no range that f16 could hold.
  if (is_low_bit(p.dtypes.q) || p.dtypes.q == DType::kF16)
    return "converts k and v of codes for a q of bf16 and f32";
  if (p.invariant) return "converts k and v of codes without `invariant`";
  if (p.of_groups) return "converts k and v of codes without shared prefixes";
  if (keys_of(p) >= kMaxRows)
    return fmt::format("converts less than {} keys of codes, got {}", kMaxRows, keys_of(p));
  const int64_t bytes = places_of(p, 0).converted_bytes;
  if (bytes > kMaxBytes && !exceeds_16_bits(p.dtypes))
    return fmt::format("converts k and v of codes to up to {} bytes, got {}", kMaxBytes, bytes);
  return forward_.rejects(converted(p));
}

Candidates ConvertedFamily::candidates(const Problem& p, const Card& card,
                                       std::vector<std::string>* rejected) const {
  return converting(forward_.candidates(converted(p), card, rejected), p, card);
}

Candidates ConvertedFamily::reachable(const Problem& p, const Card& card) const {
  if (!is_for(p) || !rejects(p).empty()) return {};
  return converting(forward_.reachable(converted(p), card), p, card);
}

}  // namespace fulgur::cuda
