#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/export.h"
#include "fulgur/mask.h"
#include "fulgur/tensor.h"

namespace fulgur {

/// Dropout of the attention probabilities: an entry is dropped with probability p (0 <= p < 1) and
/// the kept ones are scaled by 1 / (1 - p). Whether an entry is kept depends on (seed, offset,
/// batch, q head, query, key) alone (Philox4x32-10), never on tiling, threads or engine.
struct Dropout {
  double p = 0;
  uint64_t seed = 0;
  uint64_t offset = 0;
  bool operator==(const Dropout&) const = default;
};

/// What is computed. Defaults give plain softmax(q k^T / sqrt(d)) v.
///
///   scores = scale * q k^T, then softcap * tanh(scores / softcap), then the ALiBi bias
///   -slope * |i + sk - sq - j|, then the mask, then softmax, then dropout, then v.
struct Options {
  Mask mask{};                    ///< full(), causal() or window(left, right)
  std::optional<double> scale{};  ///< finite; default 1 / sqrt(d_qk)
  double softcap = 0;             ///< >= 0; 0 = off
  Tensor alibi_slopes{};          ///< f32 (hq) or (batch, hq)
  Dropout dropout{};
  /// Packed variable length: i32 (batch + 1), non-decreasing, first 0, last <= total. Both or none.
  /// Sequence b is rows cu_seqlens[b] .. cu_seqlens[b+1]-1. CPU tensors are read when planning.
  Tensor cu_seqlens_q{}, cu_seqlens_k{};
  /// Upper bounds of the packed sequence lengths. 0 = read from cu_seqlens (CPU tensors only).
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  Tensor seqused_k{};  ///< i32 (batch): only the first seqused_k[b] keys of sequence b exist
  bool deterministic = false;  ///< backward gives the same bits in every run
  bool invariant = false;      ///< a sequence's bits do not depend on the batch or on `threads`
  int threads = 0;             ///< CPU threads, at most 1024; 0 = OMP_NUM_THREADS or all cores
  std::string engine{};    ///< "" picks by device and dtype; "cpu", "cuda", "reference" force one
  void* stream = nullptr;  ///< CUDA stream (cudaStream_t); null = the default stream
};

/// Tensors of the forward pass, in layout (batch, seqlen, heads, dim) or packed (total, heads,
/// dim):
///   q [b, sq, hq, d]   k [b, sk, hk, d]   v [b, sk, hk, dv]   out [b, sq, hq, dv]
///   lse f32 [b, hq, sq] (packed [hq, total_q]; f64 when q is), optional: natural log of the sum of
///   exp(scores) of each row.
/// q, k, v, out share one dtype: f32, bf16, f16, or f64 (computed by the reference engine).
/// hq % hk == 0; 1 <= d, dv <= 512; any strides whose last is 1. A row that sees no key has out = 0
/// and lse = -inf.
struct ForwardArgs {
  Tensor q{}, k{}, v{}, out{}, lse{};
};

/// Tensors of the backward pass: `out` and `lse` as the forward pass wrote them, `dout` the
/// gradient of out; dq, dk, dv take the gradients and have the shapes of q, k, v.
struct BackwardArgs {
  Tensor dout{}, q{}, k{}, v{}, out{}, lse{}, dq{}, dk{}, dv{};
};

/// What a tile of the score matrix needs: nothing, a mask, or no mask.
enum class Tile : uint8_t { kEmpty, kPartial, kFull };

/// The score matrix of one sequence cut into Br x Bc tiles, row-major [rows][cols].
struct TileMap {
  int64_t Br = 0, Bc = 0, rows = 0, cols = 0;
  std::vector<Tile> tiles;
};

/// Every decision about one shape of call, made once: validate, choose, allocate. Running it only
/// computes. A Plan is a cheap handle; copies share it. Runs of one plan may not overlap in time.
class FULGUR_API Plan {
 public:
  struct Impl;
  explicit Plan(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  /// Computes. The tensors must have the shapes, strides, dtypes and devices planned for; the data
  /// may be elsewhere, but on cuda at a multiple of 16 bytes where it was when planned, or was
  /// null. Throws Error(kInvalidArgument) otherwise, before anything is written.
  void run(const ForwardArgs& args) const;
  void run(const BackwardArgs& args) const;

  /// The plan in words: engine, tiles, splits, bytes moved, flops, and what was rejected and why.
  std::string explain() const;
  /// "cpu", "cuda" or "reference".
  std::string engine() const;
  /// Floating-point operations of the matrix products over the visible scores: 4 (forward) or 10
  /// (backward) per visible score and dim (2 (d + dv) and 6 d + 4 dv where they differ).
  double flops() const;
  /// Bytes of the tensors read and written once.
  double bytes() const;
  /// Bytes the plan allocates besides the caller's tensors.
  int64_t workspace_bytes() const;
  /// The tiles of sequence b.
  TileMap tiles(int64_t b = 0) const;

 private:
  std::shared_ptr<Impl> impl_;
};

/// Validates and plans. Of data pointers only the alignment is looked at, but for cu_seqlens_*,
/// seqused_k and alibi_slopes on the CPU.
FULGUR_API Plan plan(const ForwardArgs& args, const Options& options = {});
FULGUR_API Plan plan(const BackwardArgs& args, const Options& options = {});

/// plan(args, options).run(args): exact attention (FlashAttention-2, Alg. 1).
FULGUR_API void forward(const ForwardArgs& args, const Options& options = {});
/// plan(args, options).run(args): its gradient (FlashAttention-2, Alg. 2).
FULGUR_API void backward(const BackwardArgs& args, const Options& options = {});

/// An engine and whether it can be used on this machine.
struct EngineInfo {
  std::string name;
  std::string description;  ///< e.g. "AVX3, 2 threads"
  std::string unavailable;  ///< why not; empty when it can be used
};
FULGUR_API std::vector<EngineInfo> engines();

}  // namespace fulgur
