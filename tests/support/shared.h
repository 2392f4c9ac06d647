/// A cached workload whose sequences share their first keys by groups.
#pragma once

#include <optional>
#include <vector>

#include "cached.h"

namespace fulgur::test {

class Shared {
 public:
  /// Sequences groups[g] .. groups[g + 1] - 1 of `w` get the same first lens[g] keys, in pages of
  /// their own. Tables have room for so many keys that it is worth while reading them once.
  Shared(Workload& w, const CacheShape& shape, std::vector<int64_t> groups,
         std::vector<int64_t> lens);

  /// NaN in these keys where they are not read: those of all sequences but the first of a group.
  void poison();
  /// The details of the plan of the call.
  Details details(const Options& options) const;

  ForwardTensors forward;

 private:
  template <class Visit>
  void each_member(const Visit& visit) const;
  void copy_keys(const Tensor& t, int64_t from, int64_t to, int64_t keys) const;
  void make_room(const CacheShape& shape);

  Workload& w_;
  std::vector<int64_t> groups_, lens_;
  std::optional<Cached> cached_;
  std::optional<Dense> group_tensor_, len_tensor_, table_;
};

}  // namespace fulgur::test
