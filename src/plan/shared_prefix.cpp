#include "plan/shared_prefix.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "call/kv_locator.h"
#include "call/lengths.h"
#include "call/merge_call.h"
#include "call/prefix_split.h"
#include "engine/workspace.h"
#include "kernels/host_device/prefix_split.h"

namespace fulgur {
namespace {

int64_t part_out_bytes(const Problem& p) {
  return p.total_q * part_out(p).row * size_of(p.dtypes.out);
}
int64_t part_lse_bytes(const Problem& p) { return p.hq * p.total_q * size_of(DType::kF32); }
/// The maximum of the bytes of K and V that a divided call reads less: if all sequences are one
/// group and as long as the longest may be. The pages of a list count once, though many sequences
/// of the longest length would be more.
int64_t max_saved(const Problem& p) {
  int64_t saved = 0;
  return __builtin_mul_overflow(p.batch - 1, p.sk * p.key_bytes(), &saved) ? INT64_MAX : saved;
}

/// The minimum of the bytes that a divided call has to save: those of the steps, and of the partial
/// results, which are written, read and merged.
int64_t min_saved(const Problem& p, const PrefixSteps& steps) {
  return steps.cost_bytes() + 3 * (part_out_bytes(p) + part_lse_bytes(p));
}

class SharedPrefixes final : public Executable {
 public:
  SharedPrefixes(const Problem& p, std::unique_ptr<const PrefixSteps> steps, const Engine& engine,
                 int threads)
      : p_(p),
        engine_(engine),
        threads_(threads),
        steps_(std::move(steps)),
        prefix_(engine.plan(prefix_part(p), threads)),
        rest_(engine.plan(rest_part(p), threads)),
        part_need_{std::max(prefix_->workspace().bytes, rest_->workspace().bytes),
                   std::max(prefix_->workspace().alignment, rest_->workspace().alignment),
                   std::max(prefix_->workspace().zeroed_bytes, rest_->workspace().zeroed_bytes)} {
    Arena arena(part_need_.bytes);
    at_.host_numbers = arena.take(steps_->metadata_bytes());
    at_.group_rows = arena.take((groups() + 1) * int64_t{sizeof(int)});
    at_.group_keys = arena.take(groups() * int64_t{sizeof(int)});
    at_.group_ids = arena.take((groups() + 1) * int64_t{sizeof(int)});
    at_.leftpad_k = arena.take(p_.batch * int64_t{sizeof(int)});
    at_.prefix_out = arena.take(part_out_bytes(p_));
    at_.prefix_lse = arena.take(part_lse_bytes(p_));
    at_.rest_lse = arena.take(p_.has(Arg::kLse) ? 0 : part_lse_bytes(p_));
    at_.end = arena.end();
  }

  void run(const Call& call, const Run& run) const override {
    const ForwardArgs& args = *std::get<const ForwardArgs*>(call);
    // The members' own ids of their prefix, too, read or not: what is right depends on no plan.
    if (tables_readable(args.cache)) const KvLocator checked(p_, Sequences(p_, args), args);
    engine_.with_workspace(p_.device, workspace(), run, [&](void* memory) {
      compute(args, run, static_cast<std::byte*>(memory));
    });
  }

  Explanation explain() const override {
    Explanation prefix = prefix_->explain(), rest = rest_->explain();
    Explanation both{
        {fmt::format("shared prefixes: all rows of a group over its prefix, which saves reading up "
                     "to {} bytes of K and V where {} are worth it, then each sequence over the "
                     "rest, and their merge; a group of less than {} keys to save has no prefix",
                     max_saved(p_), min_saved(p_, *steps_), int{kernels::kMinSavedKeys})},
        {},
        {},
        rest.Br,
        rest.Bc};
    both.details.add("max_saved_bytes", max_saved(p_));
    both.details.add("min_saved_bytes", min_saved(p_, *steps_));
    both.details.add("prefix", prefix.details);
    both.details.add("rest", rest.details);
    const auto add = [](const char* part, const std::vector<std::string>& from,
                        std::vector<std::string>& to) {
      for (const std::string& sentence : from) to.push_back(fmt::format("{}: {}", part, sentence));
    };
    add("prefix", prefix.decisions, both.decisions);
    add("rest", rest.decisions, both.decisions);
    add("prefix", prefix.rejected, both.rejected);
    add("rest", rest.rejected, both.rejected);
    return both;
  }

  WorkspaceNeed workspace() const override {
    return {at_.end, std::max(part_need_.alignment, kWorkspaceAlignment), part_need_.zeroed_bytes};
  }

 private:
  int64_t groups() const { return p_.prefix_groups; }

  void compute(const ForwardArgs& args, const Run& run, std::byte* memory) const {
    const ForwardArgs here = steps_->moved(args, run, memory + at_.host_numbers);
    const kernels::PrefixSplit split = split_of(here, memory);
    steps_->divide(split, run);
    Run part = run;
    part.workspace = {memory, part_need_.bytes};

    // The problems of both parts have the layouts of the tensors; only addresses are taken from the
    // call.
    ForwardArgs rest = here;
    rest.cache.leftpad_k = vector(split.leftpad_k, p_.batch);
    if (!args.lse.given()) rest.lse = lse_at(memory + at_.rest_lse);
    ForwardArgs prefix = here;
    prefix.out = out_at(memory + at_.prefix_out);
    prefix.lse = lse_at(memory + at_.prefix_lse);
    prefix.lengths.cu_seqlens_q = vector(split.group_rows, groups() + 1);
    prefix.lengths.seqused_k = vector(split.group_keys, groups());
    prefix.cache.page_indptr = vector(split.group_ids, groups() + 1);
    prefix_->run(&prefix, part);
    rest_->run(&rest, part);

    const std::array<Partial, 2> parts{{{prefix.out, prefix.lse}, {rest.out, rest.lse}}};
    engine_.merge(checked_merge(parts, {args.out, args.lse}), threads_, run);
  }

  kernels::PrefixSplit split_of(const ForwardArgs& args, std::byte* memory) const {
    const auto ints = [](const ConstTensor& t) { return static_cast<const int*>(t.data); };
    const auto at = [&](int64_t offset) { return reinterpret_cast<int*>(memory + offset); };
    kernels::PrefixSplit split{};
    split.groups = static_cast<int>(groups());
    split.batch = static_cast<int>(p_.batch);
    split.sq = static_cast<int>(p_.sq);
    split.total_q = static_cast<int>(p_.total_q);
    split.sk = static_cast<int>(p_.sk);
    split.ids = static_cast<int>(ids_of(p_));
    split.table_stride = p_.cache.table_stride;
    split.prefix_groups = ints(args.shared_prefix.prefix_groups);
    split.prefix_lens = ints(args.shared_prefix.prefix_lens);
    split.cu_seqlens_q = ints(args.lengths.cu_seqlens_q);
    split.seqused_k = ints(args.lengths.seqused_k);
    split.page_indptr = ints(args.cache.page_indptr);
    split.group_rows = at(at_.group_rows);
    split.group_keys = at(at_.group_keys);
    split.group_ids = at(at_.group_ids);
    split.leftpad_k = at(at_.leftpad_k);
    return split;
  }

  Tensor vector(int* data, int64_t size) const {
    return Tensor::contiguous(data, DType::kI32, {size}, p_.device);
  }
  /// The results of a part, in the shapes of the results of the call.
  Tensor out_at(void* data) const {
    const Layout to = part_out(p_);
    if (p_.packed) {
      return {data, p_.dtypes.out, p_.device, 3, {p_.total_q, p_.hq, p_.dv}, {to.row, to.head, 1}};
    }
    return {data,
            p_.dtypes.out,
            p_.device,
            4,
            {p_.batch, p_.sq, p_.hq, p_.dv},
            {p_.sq * to.row, to.row, to.head, 1}};
  }
  Tensor lse_at(void* data) const {
    const Layout to = part_lse(p_);
    if (p_.packed) {
      return {data, DType::kF32, p_.device, 2, {p_.hq, p_.total_q}, {to.head, to.row}};
    }
    return {data, DType::kF32, p_.device, 3, {p_.batch, p_.hq, p_.sq}, {to.batch, to.head, to.row}};
  }

  Problem p_;
  const Engine& engine_;
  int threads_;
  std::unique_ptr<const PrefixSteps> steps_;
  std::unique_ptr<const Executable> prefix_, rest_;
  WorkspaceNeed part_need_;  ///< of both, one after the other
  struct {
    int64_t host_numbers, group_rows, group_keys, group_ids, leftpad_k;
    int64_t prefix_out, prefix_lse, rest_lse, end;
  } at_{};  ///< places in the workspace, after that of the parts
};

}  // namespace

void check_prefixes(const Problem& p, const ForwardArgs& args) {
  if (p.prefix_groups == 0) return;
  const auto* lens = static_cast<const int32_t*>(args.shared_prefix.prefix_lens.data);
  const auto* groups = static_cast<const int32_t*>(args.shared_prefix.prefix_groups.data);
  if (on_host(args.shared_prefix.prefix_groups)) {
    longest_sequence("prefix_groups", args.shared_prefix.prefix_groups, "sequences", p.batch);
    if (groups[0] != 0) fail("prefix_groups", "starts with {}, want 0", groups[0]);
    if (groups[p.prefix_groups] != p.batch) {
      fail("prefix_groups", "ends with {}, want {}, the batch", groups[p.prefix_groups], p.batch);
    }
  }
  if (!on_host(args.shared_prefix.prefix_lens)) return;
  const Sequences sequences(p, args);
  const bool knows_queries = lengths_on_host(ForwardArgs{
      .lengths = {.cu_seqlens_q = args.lengths.cu_seqlens_q, .seqused_q = args.lengths.seqused_q}});
  for (int64_t g = 0; g < p.prefix_groups; ++g) {
    if (lens[g] < 0 || lens[g] > p.sk) {
      fail("prefix_lens", "got {} at {}, want 0 to {}", lens[g], g, p.sk);
    }
    if (!on_host(args.shared_prefix.prefix_groups)) continue;
    for (int64_t b = groups[g]; b < groups[g + 1]; ++b) {
      const Sequence s = sequences[b];
      const int64_t in_front = std::max<int64_t>(s.sk - (knows_queries ? s.sq : 0), 0);
      if (lens[g] <= in_front) continue;
      fail("prefix_lens",
           "got {} at {}, want 0 to {}, the keys of sequence {} before its queries' own", lens[g],
           g, in_front, b);
    }
  }
}

std::unique_ptr<const Executable> plan_shared_prefixes(const Problem& p, const Engine& engine,
                                                       int threads, std::string* why_not) {
  std::unique_ptr<const PrefixSteps> steps = engine.prefix_steps(p, threads);
  std::string& why = *why_not;
  why = steps == nullptr ? "not by this engine" : undivided(p);
  if (!why.empty()) return nullptr;
  if (const int64_t max = max_saved(p), min = min_saved(p, *steps); max < min) {
    why = fmt::format("at most {} bytes of K and V are read less, {} would be worth it", max, min);
    return nullptr;
  }
  for (const Problem& part : {prefix_part(p), rest_part(p)}) {
    why = engine.rejects(part);
    if (!why.empty()) return nullptr;
  }
  auto divided = std::make_unique<SharedPrefixes>(p, std::move(steps), engine, threads);
  if (const int64_t wants = divided->workspace().bytes; !p.has_room(wants)) {
    why = fmt::format("wants {} bytes of workspace, max_workspace is {}", wants, p.max_workspace);
    return nullptr;
  }
  return divided;
}

}  // namespace fulgur
