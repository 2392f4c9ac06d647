#include "sequences.h"

#include <algorithm>

namespace fulgur {
namespace {

/// The values of a vector in host memory.
const int32_t* values(const char* name, const ConstTensor& t) {
  check_data(name, t);
  return static_cast<const int32_t*>(t.data);
}

}  // namespace

int64_t longest_sequence(const char* name, const ConstTensor& cu_seqlens, const char* tensor,
                         int64_t total) {
  const int32_t* cu = values(name, cu_seqlens);
  const int64_t batch = cu_seqlens.shape[0] - 1;
  if (cu[0] != 0) fail(name, "starts with {}, want 0", cu[0]);
  int64_t longest = 0;
  for (int64_t i = 1; i <= batch; ++i) {
    if (cu[i] < cu[i - 1]) {
      fail(name, "decreases at {}: {} after {}, want non-decreasing", i, cu[i], cu[i - 1]);
    }
    longest = std::max<int64_t>(longest, int64_t{cu[i]} - cu[i - 1]);
  }
  if (cu[batch] > total) {
    fail(name, "ends with {}, want at most {} (rows of {})", cu[batch], total, tensor);
  }
  return longest;
}

Sequences::Sequences(const Problem& problem, const ConstTensor& cu_q, const ConstTensor& cu_k,
                     const ConstTensor& used_k)
    : p_(&problem) {
  const auto read = [](const char* name, const ConstTensor& cu, const char* tensor, int64_t total,
                       int64_t most) {
    const int64_t longest = longest_sequence(name, cu, tensor, total);
    if (longest > most)
      fail(name, "has a sequence of {} rows, want at most {}, the longest as planned", longest,
           most);
    return static_cast<const int32_t*>(cu.data);
  };
  if (problem.packed) {
    cu_q_ = read("cu_seqlens_q", cu_q, "q", problem.total_q, problem.sq);
    cu_k_ = read("cu_seqlens_k", cu_k, "k", problem.total_k, problem.sk);
  }
  if (problem.seqused_k) {
    const int32_t* used = values("seqused_k", used_k);
    for (int64_t b = 0; b < size(); ++b) {
      if (used[b] < 0 || used[b] > room_k(b))
        fail("seqused_k", "got {} at {}, want 0 to {}", used[b], b, room_k(b));
    }
    used_k_ = used;
  }
}

int64_t Sequences::room_k(int64_t b) const {
  return cu_k_ == nullptr ? p_->sk : cu_k_[b + 1] - cu_k_[b];
}

Sequence Sequences::operator[](int64_t b) const {
  Sequence s{0, 0, p_->sq, p_->sk};
  if (cu_q_ != nullptr) s = {cu_q_[b], cu_k_[b], cu_q_[b + 1] - cu_q_[b], cu_k_[b + 1] - cu_k_[b]};
  if (used_k_ != nullptr) s.sk = used_k_[b];
  return s;
}

Sequence Sequences::padding() const {
  if (cu_q_ == nullptr) return {};
  const int64_t end_q = cu_q_[p_->batch], end_k = cu_k_[p_->batch];
  return {end_q, end_k, p_->total_q - end_q, p_->total_k - end_k};
}

}  // namespace fulgur
