// Computes the scores of attention, or their softmax, which the forward pass never stores: row by row, in f32, from the
// definition. A CTA computes a query of a head, a thread every kScoreThreads-th key; Q is in shared memory. It is
// written for every card, not for speed.
#include "attention/fragment_store.cuh"
#include "common/scores_params.h"
#include "device/operands.cuh"
#include "device/schedule.cuh"
#include "device/score.cuh"

constexpr float kLn2 = 0.693147180559945f;

extern __shared__ __align__(1024) unsigned char raw[];

// A sequence: its lengths, of which n.k_start is the row of its first key, and the place of its keys.
struct ScoreSequence {
  Lengths n;
  int entry;  // its row of the batch or of the page table; kPageLists: its first entry in the lists of pages
};

__device__ __forceinline__ ScoreSequence sequence_of(const ScoresParams& p, int batch) {
  ScoreSequence s = {lengths_of(p, batch), batch};
  if (kPage > 0) {
    int ids = p.pages.ids;
    if (kPageLists) packed_rows(p.pages.indptr, batch, p.pages.ids, p.pages.ids, s.entry, ids);
    s.n.sk = int(min((long long)(ids) * kPage, (long long)(s.n.sk)));
  }
  int begin = 0;
  if (kLeftPad) begin = min(max(p.leftpad_k[batch], 0), s.n.sk);
  if (kBatchIdx) {
    s.entry = p.cache_batch_idx[batch];
    if (u32(s.entry) >= u32(p.pages.entries)) s.n.sk = begin;
  }
  s.n.k_start += begin;
  s.n.sk -= begin;
  return s;
}

// A row of K; null if no page has it: then its elements count as 0.
__device__ __forceinline__ const ElementK::Memory* key_row(const ScoresParams& p, const ScoreSequence& s, int head,
                                                           int key) {
  int entry = kPackedK ? 0 : s.entry;
  int row = s.n.k_start + key;
  if (kPage > 0) {
    const long long list = kPageLists ? s.entry * p.pages.id_stride : s.entry * p.pages.table_stride;
    entry = p.pages.table[list + row / max_of(kPage, 1) * p.pages.id_stride];
    if (u32(entry) >= u32(p.pages.entries)) return nullptr;
    row %= max_of(kPage, 1);
  }
  return static_cast<const ElementK::Memory*>(p.k.data) + entry * p.k.batch + row * p.k.row + head * p.k.head;
}

__device__ __forceinline__ float product(const ScoresParams& p, const float* q, const ElementK::Memory* k) {
  float sum = 0;
  if (k == nullptr) return sum;
  for (int i = 0; i < p.d; ++i) sum = __fmaf_rn(q[i], ElementK::to_float(k[i]), sum);
  return sum;
}

// The score of a product up to a stage, before keys are hidden.
__device__ __forceinline__ float score_until(const ScoresParams& p, const ScoreContext& at, float s) {
  if (p.stage >= kMaskedScores) return score(p, at, s, bias_of(p, at)) * score_factor(p) * kLn2;
  if (kSoftcap && p.stage == kCappedScores) return softcap_score(p, s) * kLn2;
  return s * p.scale_log2 * kLn2;
}

// Reduces a number of every thread of the CTA by `both`.
template <class Both>
__device__ __forceinline__ float of_all_threads(float x, float* of_warps, Both both) {
  for (int bit = 1; bit < 32; bit *= 2) x = both(x, __shfl_xor_sync(0xffffffff, x, bit));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = of_warps[0];
  for (int warp = 1; warp < kScoreThreads / 32; ++warp) x = both(x, of_warps[warp]);
  __syncthreads();
  return x;
}

// The softmax of a row of scores with the head's sink, in place.
__device__ __forceinline__ void softmax_of_row(const ScoresParams& p, int head, float* scores, float max,
                                               float* of_warps) {
  const float sink = kHasSinks ? element_at(p.sinks.data, p.sinks.type, head) : -infinity();
  max = fmaxf(of_all_threads(max, of_warps, [](float x, float y) { return fmaxf(x, y); }), sink);
  const auto weight = [&](float score) {
    return score == -infinity() ? 0 : exp2_fast((score - max) * 1.4426950408889634f);
  };
  float sum = 0;
  for (int key = threadIdx.x; key < p.sk; key += kScoreThreads) sum += weight(scores[key]);
  sum = of_all_threads(sum, of_warps, [](float x, float y) { return x + y; }) + weight(sink);
  for (int key = threadIdx.x; key < p.sk; key += kScoreThreads) {
    const float x = weight(scores[key]);
    scores[key] = sum == 0 ? 0 : x / sum;
  }
}

__device__ __forceinline__ void compute_row(const ScoresParams& p, int batch, int head, int number) {
  float* const of_warps = reinterpret_cast<float*>(raw);
  float* const q = of_warps + kScoreThreads / 32;
  const ScoreSequence s = sequence_of(p, batch);
  long long query = p.query_device != nullptr ? p.query_device[number] : p.lists ? p.listed[number] : number;
  const bool exists = query >= 0 && query < s.n.sq;
  const int row = exists ? int(query) : 0;
  if (exists) {
    const ElementQ::Memory* from = row_of<ElementQ>(p.q, batch, s.n.q_start + row, head);
    for (int i = threadIdx.x; i < p.d; i += kScoreThreads) q[i] = ElementQ::to_float(from[i]);
  }
  __syncthreads();
  KeyRange keys = {0, exists ? s.n.sk : 0};
  unsigned long long tree = ~0ull;
  if (exists && p.stage >= kMaskedScores) {
    keys = visible_keys(band_of(p), s.n, row);
    if (kTree) tree = p.tree_mask[(kPacked ? s.n.q_start : (long long)(batch) * p.sq) + row];
  }
  const auto sees = [&](int key) {
    const int token = key - (s.n.sk - s.n.sq);
    const bool shown = !kTree || token < 0 || (tree >> min(token, 63) & 1);
    return key >= keys.begin && key < keys.end && shown;
  };
  const ScoreHead of_head = score_head(p, s.n, batch, head);
  const int diagonal = diagonal_of(band_of(p), s.n, row);
  float* scores = p.scores + batch * p.scores_batch + head * p.scores_head + number * p.scores_row;
  float max = -infinity();
  for (int key = threadIdx.x; key < p.sk; key += kScoreThreads) {
    float x = -infinity();
    if (sees(key)) {
      const float s_of_key = product(p, q, key_row(p, s, head / p.group, key));
      x = score_until(p, score_context(of_head, row, diagonal, key), s_of_key);
    }
    scores[key] = x;
    max = fmaxf(max, x);
  }
  if (p.stage == kProbabilities) softmax_of_row(p, head, scores, max, of_warps);
  __syncthreads();  // before the next row's Q
}

// Grid: rows of the result, or less.
extern "C" __global__ void __launch_bounds__(kScoreThreads) fulgur_scores(const __grid_constant__ ScoresParams p) {
  const long long rows = (long long)(p.batch) * p.hq * p.queries;
  for (long long i = blockIdx.x; i < rows; i += gridDim.x) {
    const int number = int(i % p.queries);
    compute_row(p, int(i / p.queries / p.hq), int(i / p.queries % p.hq), number);
  }
}
