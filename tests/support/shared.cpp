#include "shared.h"

#include <algorithm>
#include <limits>

#include "engine_memory.h"

namespace fulgur::test {
namespace {

constexpr int64_t kMinSaved = 256;  // keys, for which a group reads its prefix apart
constexpr int64_t kRoom = 400'000;  // keys of a table

const Tensor& vector(std::optional<Dense>& to, const std::vector<int64_t>& values) {
  to.emplace(DType::kI32, std::initializer_list<int64_t>{static_cast<int64_t>(values.size())});
  write(to->tensor(), std::vector<double>(values.begin(), values.end()));
  return to->tensor();
}

}  // namespace

Shared::Shared(Workload& w, const CacheShape& shape, std::vector<int64_t> groups,
               std::vector<int64_t> lens)
    : w_(w), groups_(std::move(groups)), lens_(std::move(lens)) {
  each_member([&](size_t g, int64_t b) {
    for (const Tensor& t : {w_.forward.k, w_.forward.v}) copy_keys(t, groups_[g], b, lens_[g]);
  });
  w_.seal();
  cached_.emplace(w_, shape, 5);
  forward = cached_->forward;
  forward.prefix_groups = vector(group_tensor_, groups_);
  forward.prefix_lens = vector(len_tensor_, lens_);
  make_room(shape);
}

void Shared::poison() {
  const int64_t page = cached_->shape.page;
  each_member([&](size_t g, int64_t b) {
    if ((groups_[g + 1] - groups_[g] - 1) * lens_[g] < kMinSaved) return;
    for (const Tensor& t : {forward.k, forward.v}) {
      for (int64_t j = 0; j < lens_[g]; ++j) {
        const int64_t at =
            cached_->entries[static_cast<size_t>(b)][static_cast<size_t>(j / page)] * t.strides[0] +
            j % page * t.strides[1];
        for (int64_t h = 0; h < t.shape[2]; ++h) {
          for (int64_t c = 0; c < t.shape[3]; ++c) {
            store(t.data, t.dtype, at + h * t.strides[2] + c,
                  std::numeric_limits<double>::quiet_NaN());
          }
        }
      }
    }
  });
}

Details Shared::details(const Options& options) const {
  EngineMemory memory(options.engine);
  return plan(memory.at(forward), memory.options(forward, options)).details();
}

// Calls visit(group, b) for all members of a group but the first.
template <class Visit>
void Shared::each_member(const Visit& visit) const {
  for (size_t g = 0; g < lens_.size(); ++g) {
    for (int64_t b = groups_[g] + 1; b < groups_[g + 1]; ++b) visit(g, b);
  }
}

void Shared::copy_keys(const Tensor& t, int64_t from, int64_t to, int64_t keys) const {
  std::vector<double> all = read(t);
  const int64_t row = t.shape[t.rank - 2] * t.shape[t.rank - 1];
  const auto at = [&](int64_t b) {
    return all.begin() + w_.sequences[static_cast<size_t>(b)].k_begin * row;
  };
  std::copy_n(at(from), keys * row, at(to));
  write(t, all);
}

// Ids after those that are needed.
void Shared::make_room(const CacheShape& shape) {
  const Tensor small = forward.page_table;
  const int64_t ids = kRoom / shape.page, last = small.rank - 1;
  if (small.rank == 2) {
    table_.emplace(DType::kI32, std::initializer_list<int64_t>{small.shape[0], ids});
  } else {
    table_.emplace(DType::kI32, std::initializer_list<int64_t>{small.shape[0] + ids});
  }
  forward.page_table = *table_;
  Tensor part = forward.page_table;
  part.shape[last] = small.shape[last];
  write(part, read(small));
}

}  // namespace fulgur::test
