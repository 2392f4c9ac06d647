#include "call/lengths.h"

#include <algorithm>

namespace fulgur {
namespace {

/// The values of a vector in host memory.
const int32_t* values(const char* name, const ConstTensor& t) {
  check_data(name, t);
  return static_cast<const int32_t*>(t.data);
}

}  // namespace

int64_t longest_sequence(const char* name, const ConstTensor& cu_seqlens, const char* things,
                         int64_t total) {
  const int32_t* cu = values(name, cu_seqlens);
  const int64_t batch = cu_seqlens.shape[0] - 1;
  if (cu[0] < 0) fail(name, "starts with {}, want >= 0", cu[0]);
  int64_t longest = 0;
  for (int64_t i = 1; i <= batch; ++i) {
    if (cu[i] < cu[i - 1]) {
      fail(name, "decreases at {}: {} after {}, want non-decreasing", i, cu[i], cu[i - 1]);
    }
    longest = std::max<int64_t>(longest, int64_t{cu[i]} - cu[i - 1]);
  }
  if (cu[batch] > total) {
    fail(name, "ends with {}, want at most {} ({})", cu[batch], total, things);
  }
  return longest;
}

Sequences::Sequences(const Problem& problem, const ConstTensor& cu_q, const ConstTensor& cu_k,
                     const ConstTensor& used_q, const ConstTensor& used_k, const KvCache& cache)
    : p_(&problem) {
  const auto read = [](const char* name, const ConstTensor& cu, const char* things, int64_t total,
                       int64_t max_rows) {
    const int64_t longest = longest_sequence(name, cu, things, total);
    if (longest > max_rows)
      fail(name, "has a sequence of {} rows, want at most {}, the longest as planned", longest,
           max_rows);
    return static_cast<const int32_t*>(cu.data);
  };
  if (problem.packed && on_host(cu_q))
    cu_q_ = read("cu_seqlens_q", cu_q, "rows of q", problem.total_q, problem.sq);
  if (problem.packed_k && on_host(cu_k)) {
    cu_k_ = read("cu_seqlens_k", cu_k, "rows of k", problem.total_k, problem.sk);
  }
  if (size() == 0) return;  // nothing is written, and the vectors may be too long to walk
  if (problem.cache.pages == Problem::Cache::Pages::kLists && on_host(cache.page_indptr)) {
    longest_sequence("page_indptr", cache.page_indptr, "ids of page_table", problem.cache.ids);
    indptr_ = static_cast<const int32_t*>(cache.page_indptr.data);
  }
  const auto read_used = [&](const char* name, const ConstTensor& t, auto room_of) {
    const int32_t* used = values(name, t);
    for (int64_t b = 0; b < size(); ++b) {
      const int64_t room = room_of(b);
      if (used[b] < 0 || used[b] > room) fail(name, "got {} at {}, want 0 to {}", used[b], b, room);
    }
    return used;
  };
  if (problem.has(Arg::kSeqUsedQ) && on_host(used_q)) {
    used_q_ = read_used("seqused_q", used_q, [&](int64_t b) { return room_q(b); });
  }
  if (problem.has(Arg::kSeqUsedK) && on_host(used_k)) {
    used_k_ = read_used("seqused_k", used_k, [&](int64_t b) { return room_k(b); });
  }
  if (problem.has(Arg::kLeftpadK) && on_host(cache.leftpad_k)) {
    const int32_t* leftpad = values("leftpad_k", cache.leftpad_k);
    for (int64_t b = 0; b < size(); ++b) {
      const int64_t keys = (*this)[b].sk;
      if (leftpad[b] < 0 || leftpad[b] > keys)
        fail("leftpad_k", "got {} at {}, want 0 to {}, the keys of the sequence", leftpad[b], b,
             keys);
    }
    leftpad_ = leftpad;
  }
}

int64_t Sequences::room_q(int64_t b) const {
  return cu_q_ == nullptr ? p_->sq : cu_q_[b + 1] - cu_q_[b];
}

int64_t Sequences::room_k(int64_t b) const {
  if (cu_k_ != nullptr) return cu_k_[b + 1] - cu_k_[b];
  if (indptr_ == nullptr) return p_->sk;
  return std::min(p_->sk, (indptr_[b + 1] - indptr_[b]) * p_->cache.page);
}

Sequence whole_sequence(const Problem& p) {
  Sequence s{0, 0, p.sq, p.sk};
  if (p.origin == Origin{}) return s;
  s.first_key = p.origin.key;
  s.shift = p.origin.query - p.origin.key;
  if (!p.mask.top_left) s.shift += (p.origin.keys - p.origin.queries) - (p.sk - p.sq);
  return s;
}

expression::Place place_of(const Problem& p, int64_t b, int64_t h, const Sequence& s) {
  expression::Place place{
      .b = b, .h = h, .hk = h / p.group(), .sq = s.sq, .sk = s.sk, .q0 = p.packed ? s.q_begin : 0};
  if (const Origin& o = p.origin; o != Origin{}) {
    place.larger = {o.batch, o.head,           o.head / p.group(), o.query,
                    o.key,   o.queries - p.sq, o.keys - p.sk};
  }
  return place;
}

Sequence Sequences::operator[](int64_t b) const {
  if (p_->origin != Origin{}) return whole_sequence(*p_);
  Sequence s{0, 0, used_q_ == nullptr ? room_q(b) : used_q_[b],
             used_k_ == nullptr ? room_k(b) : used_k_[b]};
  if (cu_q_ != nullptr) s.q_begin = cu_q_[b];
  if (cu_k_ != nullptr) s.k_begin = cu_k_[b];
  if (leftpad_ != nullptr) {
    s.k_begin += leftpad_[b];
    s.sk -= leftpad_[b];
  }
  return s;
}

std::array<Sequence, 2> Sequences::padding() const {
  Sequence before, after;
  if (cu_q_ != nullptr) {
    before.sq = cu_q_[0];
    after.q_begin = cu_q_[p_->batch];
    after.sq = p_->total_q - after.q_begin;
  }
  if (cu_k_ != nullptr) {
    before.sk = cu_k_[0];
    after.k_begin = cu_k_[p_->batch];
    after.sk = p_->total_k - after.k_begin;
  }
  return {before, after};
}

}  // namespace fulgur
