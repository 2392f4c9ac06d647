#include "distributed/pages.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "base/check.h"
#include "call/mask.h"
#include "distributed/elements.h"
#include "distributed/shipment.h"
#include "fulgur/merge.h"

namespace fulgur::distributed {

/// The keys on this rank that each query sees, where each query is a sequence of its own.
struct PagesPlan::Rows {
  std::vector<int32_t> first, end, diagonal;
};

namespace {

Tensor contiguous(const Part& x, std::initializer_list<int64_t> shape) {
  Tensor t = Tensor::contiguous(x.data, x.dtype, shape);
  t.device = x.device;
  return t;
}

/// Contiguous rows, and their LSE, with each query as a sequence of its own.
Tensor by_rows(const Part& x) { return contiguous(x, {x.shape[1], 1, x.shape[2], x.shape[3]}); }
Tensor lse_by_rows(const Part& x) { return contiguous(x, {x.shape[1], x.shape[2], 1}); }

/// The rows of all sequences as one sequence, if all rows have the same stride: copies are larger.
Part as_one(const Part& x) {
  const auto& [batches, rows, heads, dim] = x.shape;
  if (rows != 1 && x.strides[0] != rows * x.strides[1]) return x;
  Part one = x;
  one.shape = {1, batches * rows, heads, dim};
  one.strides = {0, x.strides[rows == 1 ? 0 : 1], x.strides[2], x.strides[3]};
  return one;
}

/// Contiguous rows with the shape of another part.
Part like(const Part& other, const Part& x) {
  const int64_t rows = other.shape[1], heads = x.shape[2], dim = x.shape[3];
  Part part = x;
  part.shape = {other.shape[0], rows, heads, dim};
  part.strides = {rows * heads * dim, heads * dim, dim, 1};
  return part;
}

}  // namespace

struct PagesPlan::Memory {
  Part q, out, lse;              // all heads, over the keys of this rank
  std::vector<Part> outs, lses;  // the heads that this rank merges, from all ranks
  Part merged, merged_lse;
  Part table, diagonal, first;  // for each query: its pages, and its Rows

  Memory(const PagesPlan& plan, StepMemory arena) {
    const Problem& p = plan.problem_;
    const DType partial = plan.partial_dtype(), of_lse = p.lse_dtype();
    const int64_t heads = plan.heads(plan.me_).count;
    const auto rows = [&](DType dtype, int64_t of_heads, int64_t dim) {
      return arena.rows(dtype, 1, plan.rows(), of_heads, dim);
    };
    q = rows(partial, p.hq, p.d);
    out = rows(partial, p.hq, p.dv);
    lse = rows(of_lse, p.hq, 1);
    for (int r = 0; r < plan.ranks_; ++r) {
      outs.push_back(rows(partial, heads, p.dv));
      lses.push_back(rows(of_lse, heads, 1));
    }
    merged = rows(p.dtypes.out, heads, p.dv);
    merged_lse = rows(of_lse, heads, 1);
    if (p.sq > 1) table = rows(DType::kI32, 1, plan.planned_.cache.page_table.shape[1]);
    diagonal = rows(DType::kI32, 1, 1);
    first = rows(DType::kI32, 1, 1);
    bytes = arena.used();
  }
  int64_t bytes;
};

namespace {

void check_by_page(const ForwardArgs& args, const Options& options,
                   const Distribution& distribution) {
  if (distribution.head_ranks != 1) {
    fail("head_ranks", "got {}, want 1 with rows by page", distribution.head_ranks);
  }
  if (!args.cache.page_table.given()) fail("page_table", "not given, want it with rows by page");
  const auto refuse = [](const char* name, bool given) {
    if (given) fail(name, "given with rows by page, which take none");
  };
  refuse("page_indptr", args.cache.page_indptr.given());
  refuse("leftpad_k", args.cache.leftpad_k.given());
  refuse("cu_seqlens_q", args.lengths.cu_seqlens_q.given());
  refuse("seqused_q", args.lengths.seqused_q.given());
  refuse("prefix_groups", args.shared_prefix.prefix_groups.given());
  refuse("tree_mask", args.tree_mask.given());
  refuse("bias", args.bias.given());
  refuse("k_mean", args.descales.k_mean.given());
  refuse("score_mod", options.score_mod.given());
  refuse("mask_mod", options.mask_mod.given());
  refuse("dropout_p", options.dropout_p != 0);
  refuse("origin", options.origin != Origin{});
  const ConstTensor& used = args.lengths.seqused_k;
  if (used.given() && !on_host(used)) fail("seqused_k", "got {}, want cpu", name_of(used.device));
}

/// Rejects descales of each sequence, which a call with queries as sequences cannot have.
void check_scales(const ForwardArgs& args, const Problem& p) {
  const Descales& d = args.descales;
  for (const auto& [name, t] :
       {std::pair{"k_descale", &d.k_descale}, std::pair{"v_descale", &d.v_descale},
        std::pair{"k_zero_point", &d.k_zero_point}, std::pair{"v_zero_point", &d.v_zero_point}}) {
    if (t->given() && t->rank == 2 && t->shape[0] > 1 && p.sq > 1) {
      fail(name, "got one for each sequence with {} queries each, want one for all", p.sq);
    }
  }
}

/// ALiBi by the positions of keys among those of all ranks: page j of this rank is page
/// j * ranks + rank of its sequence.
Expr alibi(const ConstTensor& slopes, int64_t sq, int64_t page, int rank, int ranks) {
  using namespace symbols;
  const auto literal = [](int64_t n) { return Expr(static_cast<int32_t>(n)); };
  const TensorSymbol slope("slope", DType::kF32, slopes.rank), diagonal("diagonal", DType::kI32, 1),
      first("first", DType::kI32, 1);
  const Expr own = k + first(b), size = literal(page);
  const Expr key = floor_div(own, size) * literal(page * ranks) + literal(page * rank) + own % size;
  const Expr of_head = slopes.rank == 1 ? slope(h) : slope(floor_div(b, literal(sq)), h);
  return score - of_head * to_float(abs(diagonal(b) - key));
}

}  // namespace

PagesPlan::PagesPlan(const ForwardArgs& args, const Options& options, const Group& group,
                     const Distribution& distribution)
    : group_(group), me_(group.rank()), ranks_(group.size()), options_(options), planned_(args) {
  std::optional<Error> error;
  Fields fields;
  try {
    check_by_page(args, options, distribution);
    problem_ = make_problem(args, options);
    check_scales(args, problem_);
    fields = fields_of(args, problem_, distribution);
    fields.emplace_back("page", fmt::format("{}", problem_.cache.page));
    rows_of(args);  // checks the lengths
    fields.emplace_back("seqused_k", values_of(args.lengths.seqused_k));
    const int64_t bytes = workspace_bytes();
    if (!problem_.has_room(bytes)) {
      fail("max_workspace", "got {} bytes, want at least {}", options.max_workspace, bytes);
    }
  } catch (const Error& wrong) {
    error = wrong;
  }
  group_.impl().agree(error, fields, {});
  transfers_ = &memory_of(group_.impl(), problem_.device);
}

Heads PagesPlan::heads(int rank) const {
  const int64_t begin = problem_.hq * rank / ranks_;
  return {begin, problem_.hq * (rank + 1) / ranks_ - begin};
}

int64_t PagesPlan::keys_before(int64_t key) const {
  const int64_t size = problem_.cache.page, page = key / size;
  const int64_t pages = (page - me_ + ranks_ - 1) / ranks_;  // earlier pages that lie on this rank
  return pages * size + (page % ranks_ == me_ ? key % size : 0);
}

PagesPlan::Rows PagesPlan::rows_of(const ForwardArgs& args) const {
  const ConstTensor& table = args.cache.page_table;
  check_data("seqused_k", args.lengths.seqused_k);
  check_data("page_table", table);
  const auto* const lengths = static_cast<const int32_t*>(args.lengths.seqused_k.data);
  const int64_t pages = table.shape[1];
  Rows all;
  for (int64_t n = 0; n < problem_.batch; ++n) {
    const int64_t keys = lengths[n];
    if (keys < 0) fail("seqused_k", "got {} at {}, want >= 0", keys, n);
    if (keys_before(keys) > pages * problem_.cache.page) {
      fail("seqused_k", "got {} at {}, of which {} lie here, want at most the {} of page_table",
           keys, n, keys_before(keys), pages * problem_.cache.page);
    }
    const Sequence sequence{0, 0, problem_.sq, keys};
    for (int64_t i = 0; i < problem_.sq; ++i) {
      const KeyRange seen = visible_keys(problem_.mask, sequence, i);
      all.first.push_back(static_cast<int32_t>(seen.empty() ? 0 : keys_before(seen.begin)));
      all.end.push_back(static_cast<int32_t>(seen.empty() ? 0 : keys_before(seen.end)));
      all.diagonal.push_back(static_cast<int32_t>(diagonal_of(problem_.mask, sequence, i)));
    }
  }
  return all;
}

void PagesPlan::run(const ForwardArgs& args, const Run& run) const {
  run_as_planned(group_.impl(), planned_, args, run, [&] { compute(args, run); });
}

void PagesPlan::compute(const ForwardArgs& args, const Run& run) const {
  const Problem& p = problem_;
  const int64_t n = rows();
  if (n == 0) return;
  const std::unique_ptr<Queue> queue = transfers_->compute_queue(run);
  transfers_->wait(queue->record());
  std::byte* const buffer = transfers_->buffer(distributed::Memory::kStep, workspace_bytes());
  queue->wait(transfers_->record());
  const Memory memory(*this, StepMemory(buffer, p.device));
  Rows of_rows = rows_of(args);
  const auto numbers = [](std::vector<int32_t>& of, std::initializer_list<int64_t> shape) {
    return ConstTensor::contiguous(of.data(), DType::kI32, shape);
  };
  const auto placed = [&](const std::vector<int32_t>& of, const Part& at) {
    queue->upload(at.data, of.data(), at.bytes());
    return contiguous(at, {n});
  };
  const Part queries = as_one(Part::of_rows(args.q));
  queue->round(queries, like(queries, memory.q));

  ForwardArgs call;
  call.q = by_rows(memory.q);
  call.k = args.k;
  call.v = args.v;
  call.out = by_rows(memory.out);
  call.lse = lse_by_rows(memory.lse);
  call.descales = args.descales;
  call.cache.page_table = args.cache.page_table;
  if (p.sq > 1) {  // each query has the pages of its sequence
    const ConstTensor& table = args.cache.page_table;
    const Part of_queries{static_cast<std::byte*>(const_cast<void*>(table.data)),
                          table.dtype,
                          {p.batch, p.sq, 1, table.shape[1]},
                          {table.strides[0], 0, 0, 1},
                          table.device};
    queue->copy(of_queries, like(of_queries, memory.table));
    call.cache.page_table = contiguous(memory.table, {n, table.shape[1]});
  }
  call.cache.leftpad_k = numbers(of_rows.first, {n});
  call.lengths.seqused_k = numbers(of_rows.end, {n});
  std::vector<float> sinks(p.hq);
  if (me_ == 0 && args.sinks.given()) {  // only rank 0 adds them to the softmax
    call.sinks = args.sinks;
    if (p.device == Device{}) {
      const Tensor own = Tensor::contiguous(sinks.data(), DType::kF32, {p.hq});
      convert(args.sinks, own);
      call.sinks = own;
    }
  }
  Options options = options_;
  options.mask = full();
  options.scale = p.scale;
  options.max_seqlen_q = options.max_seqlen_k = options.max_workspace = 0;
  if (args.alibi_slopes.given()) {
    options.score_mod = alibi(args.alibi_slopes, p.sq, p.cache.page, me_, ranks_);
    call.tensors = {{"slope", args.alibi_slopes},
                    {"diagonal", placed(of_rows.diagonal, memory.diagonal)},
                    {"first", placed(of_rows.first, memory.first)}};
  }
  fulgur::forward(call, options, run);

  Group::Impl& group = group_.impl();
  transfers_->wait(queue->record());
  Shipment partials(group, *transfers_);
  for (int r = 0; r < ranks_; ++r) {
    for (const auto& [all, from] :
         {std::pair{&memory.out, &memory.outs[r]}, std::pair{&memory.lse, &memory.lses[r]}}) {
      partials.send(r, all->heads(heads(r).begin, heads(r).count));
      partials.receive(r, *from);
    }
  }
  partials.run(false);
  queue->wait(transfers_->record());
  if (heads(me_).count > 0) {
    std::vector<Partial> parts;
    for (int r = 0; r < ranks_; ++r) {
      parts.push_back({by_rows(memory.outs[r]), lse_by_rows(memory.lses[r])});
    }
    merge(parts, {by_rows(memory.merged), lse_by_rows(memory.merged_lse)}, run);
  }
  transfers_->wait(queue->record());
  Shipment results(group, *transfers_);
  for (int r = 0; r < ranks_; ++r) {
    const auto exchange = [&](const Part& own, const Part& all) {
      results.send(r, like(all, own));
      results.receive(r, all.heads(heads(r).begin, heads(r).count));
    };
    exchange(memory.merged, as_one(Part::of_rows(args.out)));
    if (args.lse.given()) exchange(memory.merged_lse, as_one(Part::of_lse(args.lse)));
  }
  results.run(false);
  transfers_->complete_transfers();
  queue->wait(transfers_->record());
  transfers_->wait(queue->record());
}

int64_t PagesPlan::workspace_bytes() const { return Memory(*this, StepMemory(nullptr)).bytes; }

std::string PagesPlan::explain() const {
  const Problem& p = problem_;
  return fmt::format(
      "rank {} of {}: all of {} queries of {} sequences, over every {}th page of {} keys\n"
      "  merges the results of all ranks of {} of {} q heads, in the order of ranks\n"
      "  {} bytes of memory",
      me_, ranks_, p.sq, p.batch, ranks_, p.cache.page, heads(me_).count, p.hq, workspace_bytes());
}

}  // namespace fulgur::distributed
