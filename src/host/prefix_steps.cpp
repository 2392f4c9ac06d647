#include "host/prefix_steps.h"

#include <algorithm>

namespace fulgur::host {
namespace {

/// Threads read about so much from their caches while they start twice more and merge.
constexpr int64_t kCostBytes = int64_t{8} << 20;

class HostPrefixSteps final : public PrefixSteps {
 public:
  int64_t cost_bytes() const override { return kCostBytes; }

  int64_t metadata_bytes() const override { return 0; }
  ForwardArgs moved(const ForwardArgs& args, const Run&, void*) const override { return args; }

  void divide(const kernels::PrefixSplit& p, const Run&) const override {
    for (int group = 0; group < p.groups; ++group) {
      const int begin = first_member(p, group), end = first_member(p, group + 1);
      int keys = p.prefix_lens[group];
      for (int b = begin; b < end; ++b) keys = std::min(keys, keys_in_front(p, b));
      keys = kernels::shared_keys(end - begin, keys);
      std::fill(p.leftpad_k + begin, p.leftpad_k + end, keys);
      p.group_keys[group] = keys;
      p.group_rows[group] = first_row(p, begin);
      p.group_ids[group] = first_id(p, begin);
    }
    p.group_rows[p.groups] = first_row(p, p.batch);
    p.group_ids[p.groups] = first_id(p, p.batch);
  }
};

}  // namespace

std::unique_ptr<const PrefixSteps> prefix_steps() { return std::make_unique<HostPrefixSteps>(); }

}  // namespace fulgur::host
