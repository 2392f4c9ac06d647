#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fulgur/cache.h"
#include "fulgur/details.h"
#include "fulgur/export.h"
#include "fulgur/expression.h"
#include "fulgur/lengths.h"
#include "fulgur/mask.h"
#include "fulgur/tensor.h"

namespace fulgur {

/// The place of a call in a larger one, of which it computes some sequences, q heads, queries or
/// keys, side by side. Masks, ALiBi and dropout then count them as the larger call does. With
/// Options::invariant an output, and a gradient of the rows of q or of keys that the call has all
/// of the others for, has the bits of the larger call where `query` and `key` are multiples of 64
/// and inputs are finite. Only of sequences of one length, without caches and a tree mask, and on
/// GPUs without expressions.
struct Origin {
  int64_t batch = 0, head = 0, query = 0, key = 0;  ///< the first ones; key a multiple of 4
  int64_t heads = 0, queries = 0, keys = 0;  ///< of the larger call; 0: it ends where this one does
  bool operator==(const Origin&) const = default;
};

/// What is computed, the same in every call of a plan. Defaults give plain softmax(q k^T / sqrt(d))
/// v.
///
///   scores = scale * q k^T, then softcap * tanh(scores / softcap), then the ALiBi bias
///   -slope * |D(i) - j| (mask.h), then score_mod(scores), then the dense bias, then the masks,
///   then softmax (of these and the head's sink), then dropout, then v.
struct Options {
  Mask mask{};  ///< full(), causal(), window(left, right), chunked(chunk), top_left(mask)
  std::optional<double> scale{};  ///< |scale| * log2(e) <= the largest f32; default 1 / sqrt(d_qk)
  double softcap = 0;             ///< >= 0; 0 = off
  /// What scores become (expression.h): a number of `score` and its place. -inf hides the key. The
  /// tensors that it indexes are those of the call.
  Expr score_mod{};
  /// Whether the query sees the key, of those that `mask` shows: a bool of the place of a score.
  Expr mask_mod{};
  /// Dropout of the probabilities: an entry is dropped with this probability (0 <= p < 1), the kept
  /// ones are scaled by 1 / (1 - p). Run says which random numbers.
  double dropout_p = 0;
  /// Upper bounds of the packed sequence lengths, which no call may exceed. 0 = the longest in the
  /// cu_seqlens that are planned for (in host memory only). max_seqlen_k may bound seqused_k with
  /// a page_table, too: 0 = as many keys as the table has room for.
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  bool deterministic = false;  ///< backward gives the same bits in every run
  bool invariant = false;      ///< a sequence's bits do not depend on the batch or on `threads`
  /// Codes of e4m3 on Hopper GPUs: P V in e4m3, too, which is faster. V comes to it less its means,
  /// and with P is off by what e4m3 rounds: about 3% of sqrt(sum p^2 (v - mean)^2) (docs/gpu.md).
  bool fast_codes = false;
  /// k holds codes of rows that hadamard() has rotated (codes/hadamard.h): forward() rotates q like
  /// them, unless it holds codes, too, and append() the new keys before they become codes.
  bool hadamard = false;
  /// The max number of bytes of Plan::workspace(); 0 = any number. The plan is the fastest one that
  /// fits; if none does, the error says how many bytes are needed.
  int64_t max_workspace = 0;
  int threads = 0;       ///< CPU threads, at most 1024; 0 = OMP_NUM_THREADS or all cores
  std::string engine{};  ///< "" picks by device and dtype; "cpu", "cuda", "reference" force one
  /// "" picks; "standard" (S and P in memory), "fa1" (FlashAttention: keys in the outer loop),
  /// "fa2" (FlashAttention-2: queries) or "fa3" (FlashAttention-3: Hopper's instructions) force one
  /// of the papers' algorithms, of an engine that has it.
  std::string algorithm{};
  Origin origin{};  ///< of a call that is a part of a larger one
};

/// Tensors of the forward pass, in layout (batch, seqlen, heads, dim) or packed (total, heads,
/// dim):
///   q [b, sq, hq, d]   k [b, sk, hk, d]   v [b, sk, hk, dv]   out [b, sq, hq, dv]
///   lse f32 [b, hq, sq] (packed [hq, total_q]; f64 when q is), optional: natural log of the sum of
///   exp(scores) of each row, its sink's among them.
/// q, k, v, out share one dtype: f32, bf16, f16, or f64 (computed by the reference engine). On the
/// CPU k and v may each have any of the first three dtypes or a low-bit format (append.h), and q
/// may be e4m3 or e5m2, with out of f32, bf16 or f16. On GPUs k and v may be e4m3, e5m2, int8,
/// int4, q8_0 or q4_0, with q of bf16, f16, e4m3 or e5m2 and out of bf16 or f16.
/// hq % hk == 0; 1 <= d <= 576, 1 <= dv <= 512; any strides whose last is 1. A row that sees no key
/// has out = 0 and lse = -inf, with a sink lse = sink.
struct ForwardArgs {
  ConstTensor q{}, k{}, v{};
  Tensor out{}, lse{};
  /// f32 (hq) or (batch, hq). Slopes and sinks lie on the device of q or in host memory, where each
  /// run reads them; they may change once it has returned, and a graph keeps those of its capture.
  ConstTensor alibi_slopes{};
  VarLen lengths{};
  /// i64 (2): seed and offset of dropout instead of those of Run, as bits of unsigned numbers. They
  /// are read when the call computes, so that they may change between the replays of a graph.
  ConstTensor rng_state{};
  /// (hq), f32 or a 16-bit dtype of q: a score of each q head that joins the softmax of every row
  /// and brings no value (attention sinks): lse = log(exp(sink) + sum of exp(scores)), out = sum of
  /// exp(scores - lse) v. Not scaled, capped, masked or dropped. -inf: no sink; +inf: out = 0, lse
  /// = +inf.
  ConstTensor sinks{};
  /// i64 (batch, sq), packed (total_q), side by side; sq <= 64: a word of bits for each query. The
  /// last sq keys of a sequence are its queries' own tokens, and bit j says whether a query sees
  /// the jth of them, key sk - sq + j, where the mask shows it, too (speculative decoding). Earlier
  /// keys, and bits that have no key, are as without it.
  ConstTensor tree_mask{};
  /// (batch, hq, sq, sk), any of which may be 1 for all to have the same; bool, f32, bf16, f16, or
  /// f64 where q is; any strides. Score (i, j) of sequence b and q head h takes bias[b, h, i, j]
  /// after softcap and ALiBi and before the mask; -inf, or less than -2^115, hides the key, and a
  /// bool says whether the query sees it. Queries and keys count from the first one of their
  /// sequence that exists, and packed sequences and caches may have a bias of more of both.
  ConstTensor bias{};
  std::vector<TensorBinding> tensors{};  ///< those that the expressions of the options index
  KvCache cache{};  ///< k and v are caches whose sequences lie where tables say
  SharedPrefix shared_prefix{};
  Descales descales{};  ///< of codes in q, k and v
  /// New keys and values: the call appends them, as fulgur::append() does, and attends what the
  /// caches then hold, which gives the bits of both calls. The caches are those of `append`, so
  /// that k and v stay empty; so do cu_seqlens_k and seqused_k, as sequence b has cache_seqlens[b]
  /// and its new rows. Queries are rotated in workspace, and q keeps its values. A query without a
  /// position has any out and lse.
  NewRows append{};
};

/// Tensors of the backward pass: `out` and `lse` as the forward pass wrote them, `dout` the
/// gradient of out; dq, dk, dv take the gradients and have the shapes of q, k, v. dk and dv may
/// both be f32, to be added to others before they are rounded. dq may be left out, or dk and dv:
/// what is left out is not computed, and with Options::invariant the rest has the bits that it has
/// otherwise.
struct BackwardArgs {
  ConstTensor dout{}, q{}, k{}, v{}, out{}, lse{};
  Tensor dq{}, dk{}, dv{};
  /// As in ForwardArgs. Queries and keys that do not exist have gradients of 0.
  ConstTensor alibi_slopes{};
  VarLen lengths{};
  /// The gradient of lse, shape and dtype of lse; not given = 0. That of a row whose lse is -inf is
  /// not used.
  ConstTensor dlse{};
  ConstTensor rng_state{};  ///< as in ForwardArgs, with the values that the forward pass had
  /// As in ForwardArgs. dq, dk and dv know of them by lse.
  ConstTensor sinks{};
  Tensor
      dsinks{};  ///< (hq) of their dtype, the gradient of the sinks; optional, and with them alone
  ConstTensor bias{};  ///< as in ForwardArgs
  /// The gradient of the bias, in its shape: dimensions of 1 are summed over. f32, or the dtype of
  /// the bias; any strides. Optional, and with a bias of numbers alone; where no query sees a key
  /// it is 0.
  Tensor dbias{};
  /// The tensors that the expressions of the options index, with tensors for the gradients of some.
  std::vector<TensorBinding> tensors{};
};

/// Memory for a run besides its tensors. One run at a time may use it.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

/// What a workspace must be.
struct WorkspaceNeed {
  int64_t bytes = 0;         ///< at least
  int64_t alignment = 1;     ///< of its first byte
  int64_t zeroed_bytes = 0;  ///< at its beginning: 0 before the first run; every run leaves them 0
  bool operator==(const WorkspaceNeed&) const = default;
};

/// What else may change from call to call.
struct Run {
  /// cuda: the stream (cudaStream_t) that the work is put on; null = the default one.
  void* stream = nullptr;
  /// The caller's memory, as Plan::workspace() wants it, on the device that computes. Not given:
  /// the library's own, which a run has for as long as it can need it, captured ones included.
  Workspace workspace{};
  /// Which random numbers dropout uses: whether an entry is kept depends on (seed, offset, batch, q
  /// head, query, key) alone (Philox4x32-10), never on tiling, threads or engine. Both stay 0 where
  /// the tensors of the call bring an rng_state.
  uint64_t dropout_seed = 0, dropout_offset = 0;
};

/// What a tile of the score matrix needs: nothing, a mask, or no mask.
enum class Tile : uint8_t { kEmpty, kPartial, kFull };

/// The score matrix of one sequence cut into Br x Bc tiles, row-major [rows][cols].
struct TileMap {
  int64_t Br = 0, Bc = 0, rows = 0, cols = 0;
  std::vector<Tile> tiles;
};

/// Every decision about one shape of call, made once: validate, choose, compile. Running it only
/// computes. A Plan is a cheap handle; copies share it. It belongs to no stream and holds no memory
/// of a run: runs of one plan may overlap, in threads and on streams.
class FULGUR_API Plan {
 public:
  struct Impl;
  explicit Plan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

  /// Computes. The tensors must have the shapes, strides, dtypes and devices planned for; the data
  /// may be elsewhere, but on cuda at a multiple of 16 bytes where it was when planned, or was
  /// null. Lengths and tables in host memory are read and checked. On cuda it only launches, and
  /// may be captured into a graph. Throws Error(kInvalidArgument) otherwise, before anything is
  /// written.
  void run(const ForwardArgs& args, const Run& run = {}) const;
  void run(const BackwardArgs& args, const Run& run = {}) const;

  /// The plan in words: engine, tiles, splits, bytes moved, flops, and what was rejected and why;
  /// on the CPU also how long a call of the lengths planned for is expected to take and what binds
  /// it, by peaks of the machine that are measured in some 10 to 40 ms when first asked for.
  std::string explain() const;
  /// With what mask_mod hides of the tiles, by the values of the tensors that it indexes, of those
  /// planned for, in host memory; likewise what a bool mask does, whose values are those of
  /// "bias".
  std::string explain(std::span<const TensorBinding> tensors) const;
  /// The same as data. Every plan has `engine`; `call`, which has its pass, dtype, device, sizes
  /// and options; `bytes` and, where the host knows the lengths, `flops`; `workspace_bytes`;
  /// `rejected`, a text for each alternative, its name first. The kernel's part is `kernel`, its
  /// tile `Br` and `Bc`, and what it decides besides; where prefixes are read once there are two of
  /// them, `prefix` and `rest`. `estimate_us` (microseconds) and what limits it (`bound`: "memory"
  /// or "products") where they are known, as explain() says.
  Details details() const;
  /// "cpu", "cuda" or "reference".
  std::string engine() const;
  /// Floating-point operations of the matrix products over the visible scores: 4 (forward) or 10
  /// (backward) per visible score and dim (2 (d + dv) and 6 d + 4 dv where they differ); of the
  /// lengths that were planned for. Throws Error(kUnsupported) where they are on a device.
  double flops() const;
  /// Bytes of the tensors read and written once.
  double bytes() const;
  /// What a run needs besides the caller's tensors.
  WorkspaceNeed workspace() const;
  /// The tiles of sequence b, of the lengths that were planned for, as the mask shows them,
  /// whatever mask_mod hides. Throws as flops() does.
  TileMap tiles(int64_t b = 0) const;
  /// Likewise of q head h with mask_mod and a bool mask, by the values of the tensors, as explain()
  /// has them. By mask_mod a tile is empty or full where that follows without a look at each score.
  TileMap tiles(int64_t b, std::span<const TensorBinding> tensors, int64_t h = 0) const;

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Validates and plans. Of data pointers only the alignment is looked at, but for cu_seqlens_*,
/// seqused_*, leftpad_k and page_indptr on the CPU, which are read if they are there.
FULGUR_API Plan plan(const ForwardArgs& args, const Options& options = {});
FULGUR_API Plan plan(const BackwardArgs& args, const Options& options = {});

/// Exact attention (FlashAttention-2, Alg. 1): plans, or finds the plan of an earlier call of this
/// shape, and runs it. On a stream that is being captured such a call must have been made before.
FULGUR_API void forward(const ForwardArgs& args, const Options& options = {}, const Run& run = {});
/// The gradient of attention (FlashAttention-2, Alg. 2); plans and runs likewise.
FULGUR_API void backward(const BackwardArgs& args, const Options& options = {},
                         const Run& run = {});

/// An engine and whether it can be used on this machine.
struct EngineInfo {
  std::string name;
  std::string description;  ///< e.g. "AVX3, 2 threads"
  std::string unavailable;  ///< why not; empty when it can be used
};
FULGUR_API std::vector<EngineInfo> engines();

}  // namespace fulgur
