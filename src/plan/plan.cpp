#include "plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <type_traits>

#include "call/append_then_attend.h"
#include "call/check_tensors.h"
#include "call/make_problem.h"
#include "call/mask.h"
#include "call/prefix_split.h"
#include "expression/hulls.h"
#include "fulgur/error.h"
#include "plan/append_executable.h"
#include "plan/code_steps.h"
#include "plan/shared_prefix.h"

namespace fulgur {

double visible_scores(const Problem& p, const std::vector<Sequence>& lengths) {
  double n = 0;
  for (const Sequence& s : lengths) n += visible_scores(p.mask, s);
  return n * static_cast<double>(p.hq) * (p.alike() ? static_cast<double>(p.batch) : 1);
}

double flops(const Problem& p, const std::vector<Sequence>& lengths) {
  return visible_scores(p, lengths) * flops_per_score(p);
}

namespace {

void require(const Plan::Impl& impl, Pass pass) {
  if (impl.problem.pass == pass) return;
  const bool forward = pass == Pass::kForward;
  fail("args", "got tensors of the {} pass, want {} as planned", forward ? "forward" : "backward",
       forward ? "BackwardArgs" : "ForwardArgs");
}

void check_workspace(const WorkspaceNeed& need, const Workspace& given) {
  if (given.data == nullptr) {
    if (given.bytes != 0) fail("workspace", "data is null, but not its {} bytes", given.bytes);
    return;
  }
  if (given.bytes < need.bytes) fail("workspace", "got {} bytes, want {}", given.bytes, need.bytes);
  if (reinterpret_cast<uintptr_t>(given.data) % static_cast<uintptr_t>(need.alignment) != 0) {
    fail("workspace", "data {} is not aligned to {} bytes", given.data, need.alignment);
  }
}

/// The lengths of a call if the host can read them; one that all sequences have if they are alike.
template <class Args>
std::optional<std::vector<Sequence>> lengths_of(const Problem& p, const Args& args) {
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    if (appends(args)) {
      return lengths_of(p, AppendThenAttend(args, p.mask, p.hadamard).attention());
    }
  }
  if (!lengths_on_host(args)) return std::nullopt;
  const Sequences sequences(p, args);
  std::vector<Sequence> lengths;
  const int64_t count = p.alike() ? std::min<int64_t>(p.batch, 1) : p.batch;
  for (int64_t b = 0; b < count; ++b) lengths.push_back(sequences[b]);
  return lengths;
}

const std::vector<Sequence>& known_lengths(const Plan::Impl& impl, const char* what) {
  if (impl.lengths) return *impl.lengths;
  throw Error(Status::kUnsupported,
              fmt::format("{}: the lengths of the sequences are on the device", what));
}

/// Checks that a tensor has values in host memory.
void check_values(const TensorBinding& t) {
  const char* const name = t.name.c_str();
  if (t.tensor.device.type != DeviceType::kCpu) {
    fail(name, "is on {}, want its values in host memory", name_of(t.tensor.device));
  }
  if (t.tensor.data == nullptr && t.tensor.numel() > 0) fail(name, "data is null");
}

/// Checks that the tensors that expressions index have the planned shapes and dtypes, and values in
/// host memory; returns them.
std::vector<TensorBinding> bound_as_planned(const Plan::Impl& impl,
                                            std::span<const TensorBinding> tensors) {
  for (const TensorBinding& t : tensors) check_values(t);
  const auto check = [&](const auto& planned) {
    auto args = planned;
    args.tensors.assign(tensors.begin(), tensors.end());
    for (size_t i = 0; i < std::min(args.tensors.size(), planned.tensors.size()); ++i) {
      args.tensors[i].grad = planned.tensors[i].grad;
      args.tensors[i].tensor.device = planned.tensors[i].tensor.device;
    }
    check_as_planned(planned, args);
  };
  std::visit(check, impl.planned);
  return impl.problem.expressions.bound(tensors);
}

/// The bool mask of a call, if it is given, and the tensors that expressions index.
struct GivenTensors {
  ConstTensor mask{};
  std::vector<TensorBinding> of_expressions;
};

/// Sorts the tensors that Plan::explain() gets into a mask and those of expressions. Checks that
/// the mask is as planned.
GivenTensors given_tensors(const Plan::Impl& impl, std::span<const TensorBinding> tensors) {
  const ConstTensor planned = std::visit([](const auto& args) { return args.bias; }, impl.planned);
  const auto indexed = std::visit([](const auto& args) { return args.tensors; }, impl.planned);
  const auto is_mask = [](const TensorBinding& t) { return t.name == "bias"; };
  const bool has_mask = planned.given() && planned.dtype == DType::kBool &&
                        std::none_of(indexed.begin(), indexed.end(), is_mask);
  GivenTensors given;
  for (const TensorBinding& t : tensors) {
    if (!has_mask || !is_mask(t)) {
      given.of_expressions.push_back(t);
      continue;
    }
    check_values(t);
    given.mask = t.tensor;
    const auto check = [&](const auto& as_planned) {
      auto args = as_planned;
      args.bias = given.mask;
      args.bias.device = planned.device;
      check_as_planned(as_planned, args);
    };
    std::visit(check, impl.planned);
  }
  return given;
}

/// Marks the tiles of a sequence and q head that a bool mask hides as empty, and those of which it
/// hides a part as partial.
void hide(const ConstTensor& mask, int64_t b, int64_t h, const Sequence& s, TileMap* map) {
  const auto stride = [&](int i) { return mask.shape[i] == 1 ? 0 : mask.strides[i]; };
  const auto* const values =
      static_cast<const unsigned char*>(mask.data) + b * stride(0) + h * stride(1);
  const int64_t row = stride(2), key = stride(3);
  const auto tile_of = [&](int64_t i0, int64_t j0) {
    bool shows = false, hides = false;
    for (int64_t i = i0; i < std::min(s.sq, i0 + map->Br); ++i) {
      for (int64_t j = j0; j < std::min(s.sk, j0 + map->Bc); ++j) {
        const bool seen = values[i * row + j * key] != 0;
        shows = shows || seen;
        hides = hides || !seen;
      }
      if (shows && hides) return Tile::kPartial;
    }
    return shows ? Tile::kFull : Tile::kEmpty;
  };
  for (int64_t n = 0; n < map->rows * map->cols; ++n) {
    Tile& tile = map->tiles[n];
    if (tile == Tile::kEmpty) continue;
    const Tile is = tile_of(n / map->cols * map->Br, n % map->cols * map->Bc);
    if (is != Tile::kFull) tile = is;
  }
}

/// The engine's plan of a problem that it computes.
std::unique_ptr<const Executable> executable_of(const Problem& p, const Engine& engine, int threads,
                                                std::vector<std::string>* rejected) {
  const auto plan_attention = [&](const Problem& follows, std::vector<std::string>* reasons) {
    return executable_of(follows, engine, threads, reasons);
  };
  if (p.append.given) return plan_append(p, engine, threads, plan_attention, rejected);
  if (has_code_steps(p)) return plan_code_steps(p, engine, threads, plan_attention, rejected);
  if (p.prefix_groups == 0) return engine.plan(p, threads);
  std::string why;
  if (auto divided = plan_shared_prefixes(p, engine, threads, &why)) return divided;
  rejected->push_back(fmt::format("shared prefixes read once: {}", why));
  return engine.plan(without_prefixes(p), threads);
}

}  // namespace

template <class Args>
std::shared_ptr<const Plan::Impl> make_plan(Problem problem, const Args& args,
                                            const Options& options, const Run* run,
                                            std::span<const Engine* const> engines) {
  auto impl = std::make_shared<Plan::Impl>();
  impl->problem = std::move(problem);
  impl->planned = args;
  impl->lengths = lengths_of(impl->problem, args);
  const int threads = checked_threads(options);
  impl->engine = &choose_engine(engines, without_code_steps(without_append(impl->problem)),
                                options.engine, &impl->rejected);
  if (run != nullptr) impl->engine->check_plannable(impl->problem, *run);
  impl->generation = impl->engine->generation();
  impl->executable = executable_of(impl->problem, *impl->engine, threads, &impl->rejected);
  if (const int64_t want = impl->executable->workspace().bytes; !impl->problem.has_room(want)) {
    fail("max_workspace", "got {} bytes, want at least {}", impl->problem.max_workspace, want);
  }
  return impl;
}

template std::shared_ptr<const Plan::Impl> make_plan(Problem, const ForwardArgs&, const Options&,
                                                     const Run*, std::span<const Engine* const>);
template std::shared_ptr<const Plan::Impl> make_plan(Problem, const BackwardArgs&, const Options&,
                                                     const Run*, std::span<const Engine* const>);

template <class Args>
void run_plan(const Plan::Impl& plan, const Args& args, const Run& run) {
  check_memory(args);
  check_random_numbers(args, run);
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    if (!appends(args)) check_prefixes(plan.problem, args);
  }
  check_workspace(plan.executable->workspace(), run.workspace);
  plan.executable->run(&args, run);
}

template void run_plan(const Plan::Impl&, const ForwardArgs&, const Run&);
template void run_plan(const Plan::Impl&, const BackwardArgs&, const Run&);

void Plan::run(const ForwardArgs& args, const Run& run) const {
  require(*impl_, Pass::kForward);
  check_as_planned(std::get<ForwardArgs>(impl_->planned), args);
  run_plan(*impl_, args, run);
}

void Plan::run(const BackwardArgs& args, const Run& run) const {
  require(*impl_, Pass::kBackward);
  check_as_planned(std::get<BackwardArgs>(impl_->planned), args);
  run_plan(*impl_, args, run);
}

std::string Plan::engine() const { return impl_->engine->name(); }
double Plan::flops() const { return fulgur::flops(impl_->problem, known_lengths(*impl_, "flops")); }
double Plan::bytes() const { return fulgur::bytes(impl_->problem); }
WorkspaceNeed Plan::workspace() const { return impl_->executable->workspace(); }

TileMap Plan::tiles(int64_t b) const {
  const Problem& p = impl_->problem;
  if (b < 0 || b >= p.batch) fail("b", "got {}, want a sequence of the batch of {}", b, p.batch);
  const std::vector<Sequence>& lengths = known_lengths(*impl_, "tiles");
  const Explanation e = impl_->executable->explain();
  return tile_map(p.mask, lengths[std::min<size_t>(b, lengths.size() - 1)], e.Br, e.Bc);
}

TileMap Plan::tiles(int64_t b, std::span<const TensorBinding> tensors, int64_t h) const {
  const Problem& p = impl_->problem;
  TileMap map = tiles(b);
  if (h < 0 || h >= p.hq) fail("h", "got {}, want a q head of {}", h, p.hq);
  const GivenTensors given = given_tensors(*impl_, tensors);
  const std::vector<TensorBinding> bound = bound_as_planned(*impl_, given.of_expressions);
  const std::vector<Sequence>& lengths = known_lengths(*impl_, "tiles");
  const Sequence& s = lengths[std::min<size_t>(b, lengths.size() - 1)];
  if (given.mask.given()) hide(given.mask, b, h, s, &map);
  if (!p.expressions.masks()) return map;
  std::vector<ConstTensor> data;
  for (const TensorBinding& t : bound) data.push_back(t.tensor);
  expression::hide(expression::StagedGraph(p.expressions.graph(false)), data, place_of(p, b, h, s),
                   &map);
  return map;
}

}  // namespace fulgur
