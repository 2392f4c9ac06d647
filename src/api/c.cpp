#include "fulgur/c.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "api/c_arguments.h"
#include "api/c_struct.h"
#include "fulgur/append.h"
#include "fulgur/attention.h"
#include "fulgur/codes/hadamard.h"
#include "fulgur/cuda.h"
#include "fulgur/distributed/plan.h"
#include "fulgur/error.h"
#include "fulgur/merge.h"
#include "fulgur/scores.h"
#include "fulgur/version.h"

struct fulgur_plan {
  fulgur::Plan plan;
};

struct fulgur_group {
  fulgur::Group group;
};

namespace {

using fulgur::AppendArgs, fulgur::BackwardArgs, fulgur::ForwardArgs, fulgur::Options, fulgur::Run;
using fulgur::ConstTensor, fulgur::Group, fulgur::ScoresArgs, fulgur::Status, fulgur::Tensor;
using fulgur::fail, fulgur::is_struct_size, fulgur::write_struct;
using fulgur::c_api::convert, fulgur::c_api::default_options, fulgur::c_api::kMinOptions,
    fulgur::c_api::Quantization, fulgur::c_api::read_tensor, fulgur::c_api::sharding_of;

static_assert(FULGUR_OK == static_cast<int>(Status::kOk) &&
              FULGUR_INVALID_ARGUMENT == static_cast<int>(Status::kInvalidArgument) &&
              FULGUR_UNSUPPORTED == static_cast<int>(Status::kUnsupported) &&
              FULGUR_UNAVAILABLE == static_cast<int>(Status::kUnavailable) &&
              FULGUR_OUT_OF_MEMORY == static_cast<int>(Status::kOutOfMemory) &&
              FULGUR_INTERNAL == static_cast<int>(Status::kInternal));

thread_local std::string last_error;

fulgur_status failed(fulgur_status status, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();  // there was no memory for the message
  }
  return status;
}

template <class Call>
fulgur_status guarded(Call call) noexcept {
  try {
    call();
    return FULGUR_OK;
  } catch (const fulgur::Error& e) {
    return failed(static_cast<fulgur_status>(e.status()), e.what());
  } catch (const std::bad_alloc&) {
    return failed(FULGUR_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return failed(FULGUR_INTERNAL, e.what());
  } catch (...) {
    return failed(FULGUR_INTERNAL, "an exception of unknown type");
  }
}

// The size in version 0.1.0, the first: no caller has a shorter struct.
constexpr size_t kMinNeed = offsetof(fulgur_workspace_need, zeroed_bytes) + sizeof(int64_t);

const Group& required(const fulgur_group* group) {
  if (group == nullptr) fail("group", "got null, want a group");
  return group->group;
}

/// Sets `*group` to the result of `make`.
template <class Make>
fulgur_status make_group(fulgur_group** group, const Make& make) {
  return guarded([&] {
    if (group == nullptr) fail("group", "got null, want where to put the group");
    *group = nullptr;
    *group = new fulgur_group{make()};
  });
}

double deadline_of(double seconds) { return seconds == 0 ? Group::kDeadline : seconds; }

/// The caller's function as an Exchange.
fulgur::Exchange exchange_by(fulgur_exchange exchange, void* context) {
  if (exchange == nullptr) return {};
  return [=](std::span<const std::span<const std::byte>> sends,
             std::span<const std::span<std::byte>> receives) {
    std::vector<const void*> from;
    std::vector<void*> to;
    std::vector<size_t> from_bytes, to_bytes;
    for (const auto& bytes : sends) {
      from.push_back(bytes.data());
      from_bytes.push_back(bytes.size());
    }
    for (const auto& bytes : receives) {
      to.push_back(bytes.data());
      to_bytes.push_back(bytes.size());
    }
    const int result =
        exchange(context, from.data(), from_bytes.data(), to.data(), to_bytes.data());
    if (result == 0) return;
    throw fulgur::Error(Status::kUnavailable, fmt::format("exchange returned {}", result));
  };
}

void give_text(const std::string& from, char* text, size_t size, size_t* length) {
  if (length != nullptr) *length = from.size();
  if (text == nullptr || size == 0) return;
  const size_t count = std::min(from.size(), size - 1);
  std::memcpy(text, from.data(), count);
  text[count] = 0;
}

/// The plan that a handle stands for.
const fulgur::Plan& required(const fulgur_plan* plan) {
  if (plan == nullptr) fail("plan", "got null, want a plan");
  return plan->plan;
}

/// Makes a handle of the plan that `planned(args, options)` returns.
template <class Args, class Planned>
fulgur_status make_plan(const Args* args, const fulgur_options* options, fulgur_plan** plan,
                        const Planned& planned) {
  return guarded([&] {
    if (plan == nullptr) fail("plan", "got null, want where to put it");
    *plan = nullptr;
    const auto call = convert(args);
    *plan = new fulgur_plan{planned(call, convert(options, &call.tensors))};
  });
}

template <class Args>
fulgur_status make_plan(const Args* args, const fulgur_options* options, fulgur_plan** plan) {
  return make_plan(args, options, plan,
                   [](const auto& call, const Options& o) { return fulgur::plan(call, o); });
}

template <class Args>
fulgur_status make_plan(const char* card, const Args* args, const fulgur_options* options,
                        fulgur_plan** plan) {
  return make_plan(args, options, plan, [&](const auto& call, const Options& o) {
    if (card == nullptr) fail("card", "got null, want a name, such as \"a100\"");
    return fulgur::cuda::plan_for_card(card, call, o);
  });
}

template <class Args>
fulgur_status prewarm(const Args* args, const fulgur_options* options, const char* folder,
                      int* compiled, int* present) {
  return guarded([&] {
    const auto call = convert(args);
    const fulgur::cuda::Prewarmed done = fulgur::cuda::prewarm(
        call, convert(options, &call.tensors), folder == nullptr ? "" : folder);
    if (compiled != nullptr) *compiled = done.compiled;
    if (present != nullptr) *present = done.present;
  });
}

template <class Args>
fulgur_status tune(const Args* args, const fulgur_options* options, const fulgur_run* run,
                   char* text, size_t size, size_t* length) {
  return guarded([&] {
    std::string lines;
    const auto call = convert(args);
    for (const fulgur::cuda::TileTime& tile :
         fulgur::cuda::tune(call, convert(options, &call.tensors), convert(run)).tiles) {
      lines += fmt::format("{} {} {} {}\n", tile.family, tile.Br, tile.Bc, tile.microseconds);
    }
    give_text(lines, text, size, length);
  });
}

}  // namespace

fulgur_status fulgur_options_init(fulgur_options* options, size_t struct_size) {
  return guarded([&] {
    if (options == nullptr) fail("options", "got null, want a struct");
    if (!is_struct_size<fulgur_options>(struct_size, kMinOptions)) {
      fail("struct_size", "got {}, want sizeof(fulgur_options), at least {} and a multiple of {}",
           struct_size, kMinOptions, alignof(fulgur_options));
    }
    write_struct(options, struct_size, default_options());
  });
}

fulgur_status fulgur_forward(const fulgur_forward_args* args, const fulgur_options* options,
                             const fulgur_run* run) {
  return guarded([&] {
    const auto call = convert(args);
    fulgur::forward(call, convert(options, &call.tensors), convert(run));
  });
}

fulgur_status fulgur_backward(const fulgur_backward_args* args, const fulgur_options* options,
                              const fulgur_run* run) {
  return guarded([&] {
    const auto call = convert(args);
    fulgur::backward(call, convert(options, &call.tensors), convert(run));
  });
}

fulgur_status fulgur_plan_forward(const fulgur_forward_args* args, const fulgur_options* options,
                                  fulgur_plan** plan) {
  return make_plan(args, options, plan);
}

fulgur_status fulgur_plan_backward(const fulgur_backward_args* args, const fulgur_options* options,
                                   fulgur_plan** plan) {
  return make_plan(args, options, plan);
}

fulgur_status fulgur_plan_forward_for_card(const char* card, const fulgur_forward_args* args,
                                           const fulgur_options* options, fulgur_plan** plan) {
  return make_plan(card, args, options, plan);
}

fulgur_status fulgur_plan_backward_for_card(const char* card, const fulgur_backward_args* args,
                                            const fulgur_options* options, fulgur_plan** plan) {
  return make_plan(card, args, options, plan);
}

void fulgur_plan_free(fulgur_plan* plan) { delete plan; }

fulgur_status fulgur_plan_run_forward(const fulgur_plan* plan, const fulgur_forward_args* args,
                                      const fulgur_run* run) {
  return guarded([&] { required(plan).run(convert(args), convert(run)); });
}

fulgur_status fulgur_plan_run_backward(const fulgur_plan* plan, const fulgur_backward_args* args,
                                       const fulgur_run* run) {
  return guarded([&] { required(plan).run(convert(args), convert(run)); });
}

fulgur_status fulgur_plan_workspace(const fulgur_plan* plan, fulgur_workspace_need* need) {
  return guarded([&] {
    if (need == nullptr) fail("need", "got null, want a struct");
    const size_t size = need->struct_size;
    if (!is_struct_size<fulgur_workspace_need>(size, kMinNeed)) {
      fail(
          "need",
          "struct_size is {}, want sizeof(fulgur_workspace_need), at least {} and a multiple of {}",
          size, kMinNeed, alignof(fulgur_workspace_need));
    }
    const fulgur::WorkspaceNeed n = required(plan).workspace();
    write_struct(need, size, {size, n.bytes, n.alignment, n.zeroed_bytes});
  });
}

fulgur_status fulgur_plan_explain(const fulgur_plan* plan, char* text, size_t size,
                                  size_t* length) {
  return guarded([&] { give_text(required(plan).explain(), text, size, length); });
}

fulgur_status fulgur_plan_details(const fulgur_plan* plan, char* text, size_t size,
                                  size_t* length) {
  return guarded([&] { give_text(required(plan).details().json(), text, size, length); });
}

fulgur_status fulgur_engines(char* text, size_t size, size_t* length) {
  return guarded([&] {
    std::string lines;
    for (const fulgur::EngineInfo& engine : fulgur::engines()) {
      lines += fmt::format("{}\t{}", engine.name, engine.description);
      if (!engine.unavailable.empty()) lines += "\t" + engine.unavailable;
      lines += "\n";
    }
    give_text(lines, text, size, length);
  });
}

fulgur_status fulgur_cuda_allocate(int64_t bytes, int device, void** data) {
  return guarded([&] {
    if (data == nullptr) fail("data", "got null, want where to put it");
    *data = nullptr;
    *data = fulgur::cuda::allocate(bytes, device);
  });
}

fulgur_status fulgur_cuda_free(void* data, int device) {
  return guarded([&] { fulgur::cuda::deallocate(data, device); });
}

fulgur_status fulgur_cuda_copy(void* to, const void* from, int64_t bytes, int device) {
  return guarded([&] { fulgur::cuda::copy(to, from, bytes, device); });
}

fulgur_status fulgur_cuda_synchronize(int device) {
  return guarded([&] { fulgur::cuda::synchronize(device); });
}

fulgur_status fulgur_prewarm_forward(const fulgur_forward_args* args, const fulgur_options* options,
                                     const char* folder, int* compiled, int* present) {
  return prewarm(args, options, folder, compiled, present);
}
fulgur_status fulgur_prewarm_backward(const fulgur_backward_args* args,
                                      const fulgur_options* options, const char* folder,
                                      int* compiled, int* present) {
  return prewarm(args, options, folder, compiled, present);
}

fulgur_status fulgur_tune_forward(const fulgur_forward_args* args, const fulgur_options* options,
                                  const fulgur_run* run, char* text, size_t size, size_t* length) {
  return tune(args, options, run, text, size, length);
}
fulgur_status fulgur_tune_backward(const fulgur_backward_args* args, const fulgur_options* options,
                                   const fulgur_run* run, char* text, size_t size, size_t* length) {
  return tune(args, options, run, text, size, length);
}

fulgur_status fulgur_merge(const DLTensor* const* part_outs, const DLTensor* const* part_lses,
                           size_t count, const DLTensor* out, const DLTensor* lse,
                           const fulgur_run* run) {
  return guarded([&] {
    if (count > 0 && (part_outs == nullptr || part_lses == nullptr))
      fail("parts", "got null, want {} tensors", count);
    std::vector<fulgur::Partial> parts;
    for (size_t i = 0; i < count; ++i) {
      parts.push_back(
          {read_tensor<ConstTensor>(part_outs[i], fmt::format("parts[{}].out", i).c_str(), true),
           read_tensor<ConstTensor>(part_lses[i], fmt::format("parts[{}].lse", i).c_str(), true)});
    }
    fulgur::merge(parts,
                  {read_tensor<Tensor>(out, "out", true), read_tensor<Tensor>(lse, "lse", false)},
                  convert(run));
  });
}

fulgur_status fulgur_append(const fulgur_append_args* args, const fulgur_options* options,
                            const fulgur_run* run) {
  return guarded([&] { fulgur::append(convert(args), convert(options), convert(run)); });
}

fulgur_status fulgur_scores(const fulgur_scores_args* args, const fulgur_options* options,
                            const fulgur_run* run) {
  return guarded([&] {
    const auto call = convert(args);
    fulgur::scores(call, convert(options, &call.tensors), convert(run));
  });
}

fulgur_status fulgur_expand_blocks(const DLTensor* offsets, const DLTensor* indices,
                                   const DLTensor* blocks) {
  return guarded([&] {
    fulgur::expand_blocks({read_tensor<ConstTensor>(offsets, "offsets", true),
                           read_tensor<ConstTensor>(indices, "indices", true)},
                          read_tensor<Tensor>(blocks, "blocks", true));
  });
}

fulgur_status fulgur_quantize(const fulgur_quantize_args* args, const fulgur_options* options) {
  return guarded([&] {
    const Quantization q(args);
    fulgur::quantize({q.x, q.codes, q.scale, q.zero_point, q.from.static_scale != 0, q.mean,
                      q.from.static_mean != 0},
                     convert(options), {.stream = q.from.stream});
  });
}

fulgur_status fulgur_dequantize(const fulgur_quantize_args* args, const fulgur_options* options) {
  return guarded([&] {
    const Quantization q(args);
    fulgur::dequantize({q.codes, q.scale, q.zero_point, q.x, q.mean}, convert(options),
                       {.stream = q.from.stream});
  });
}

fulgur_status fulgur_hadamard(const DLTensor* x, const DLTensor* y, int inverse,
                              const fulgur_options* options, const fulgur_run* run) {
  return guarded([&] {
    fulgur::hadamard(
        {read_tensor<ConstTensor>(x, "x", true), read_tensor<Tensor>(y, "y", true), inverse != 0},
        convert(options), convert(run));
  });
}

fulgur_status fulgur_rows_of(int sharding, int64_t length, int ranks, int rank,
                             const fulgur_options* options, int64_t* rows, size_t size,
                             size_t* count) {
  return guarded([&] {
    const fulgur::Mask mask = options == nullptr ? fulgur::causal() : convert(options).mask;
    const std::vector<int64_t> all =
        fulgur::rows_of(sharding_of(sharding), length, ranks, rank, mask);
    if (count != nullptr) *count = all.size();
    if (rows != nullptr) std::copy_n(all.begin(), std::min(size, all.size()), rows);
  });
}

fulgur_status fulgur_group_from_env(double deadline, fulgur_group** group) {
  return make_group(group, [&] { return Group::from_env(deadline_of(deadline)); });
}

fulgur_status fulgur_group_connect(int rank, int ranks, const char* host, int port, double deadline,
                                   fulgur_group** group) {
  return make_group(group, [&] {
    if (host == nullptr) fail("host", "got null, want where rank 0 listens");
    return Group::connect(rank, ranks, host, port, deadline_of(deadline));
  });
}

fulgur_status fulgur_group_from_nccl(void* comm, double deadline, fulgur_group** group) {
  return make_group(group, [&] { return Group::from_nccl(comm, deadline_of(deadline)); });
}

fulgur_status fulgur_group_from_exchange(int rank, int ranks, fulgur_exchange exchange,
                                         void* context, fulgur_group** group) {
  return make_group(
      group, [&] { return Group::from_exchange(rank, ranks, exchange_by(exchange, context)); });
}

fulgur_status fulgur_group_place(const fulgur_group* group, int* rank, int* ranks) {
  return guarded([&] {
    const Group& its = required(group);
    if (rank != nullptr) *rank = its.rank();
    if (ranks != nullptr) *ranks = its.size();
  });
}

void fulgur_group_free(fulgur_group* group) { delete group; }

fulgur_status fulgur_group_forward(const fulgur_forward_args* args, const fulgur_options* options,
                                   const fulgur_group* group,
                                   const fulgur_distribution* distribution, const fulgur_run* run) {
  return guarded([&] {
    const auto call = convert(args);
    fulgur::forward(call, convert(options, &call.tensors), required(group), convert(distribution),
                    convert(run));
  });
}

fulgur_status fulgur_group_backward(const fulgur_backward_args* args, const fulgur_options* options,
                                    const fulgur_group* group,
                                    const fulgur_distribution* distribution,
                                    const fulgur_run* run) {
  return guarded([&] {
    const auto call = convert(args);
    fulgur::backward(call, convert(options, &call.tensors), required(group), convert(distribution),
                     convert(run));
  });
}

const char* fulgur_last_error(void) { return last_error.c_str(); }
const char* fulgur_version(void) { return FULGUR_VERSION; }
