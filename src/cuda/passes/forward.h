#pragma once

#include <array>
#include <vector>

#include "call/problem.h"
#include "cuda/common/executable.h"
#include "cuda/common/kernel_key.h"
#include "cuda/common/launch.h"
#include "cuda/maps/tile_map.h"

namespace fulgur::cuda {

// What the forward passes of all families have in common. `Params`: AttentionParams, or the
// parameters of decode kernels, which have the same members in another order.

// Which sequences of an invariant call decode kernels compute, and which the forward kernel.

/// Rows (query, head of its group) of a kv head in a block of an invariant decode call.
inline constexpr int64_t kFewRows = 64;

/// Whether the kernel of each sequence is decided by its own rows: sequences of up to kFewRows rows
/// have a decode kernel, which splits keys, longer ones the forward kernel. So it is in invariant
/// calls on contiguous keys that are not quantized, because the longest sequence depends on the
/// batch.
bool rows_decide(const Problem& problem);
/// The maximum of queries of a sequence that a decode kernel computes then; 0: it computes none.
int64_t few_queries(const Problem& problem);
/// The queries that decide: of the longest sequence, or of the longer one that it is a part of.
int64_t deciding_queries(const Problem& problem);
/// Whether a decode kernel computes some sequences of a call and the forward kernel others, which
/// depends on their lengths.
bool takes_both(const Problem& problem);

/// The key that forward and decode kernels have which divide the sequences of a call.
AnyForwardKey forward_key_by_rows(const Problem& problem);

/// Adds the kernels that all families use: padding, map of tiles, copies.
template <class Plan>
void add_forward_kernels(const Plan& plan, std::vector<KernelUse>& kernels) {
  if (plan.has_padding()) kernels.push_back(padding_kernel());
  if constexpr (requires { plan.map_tiles(); }) add_map_kernels(plan, plan.map_tiles(), kernels);
  if (plan.copies()) kernels.push_back(copy_kernel());
}

/// Sets the arguments that are the same in every run, without addresses.
template <class Params>
void set_forward_call(Params& params, const Problem& p, const KernelKey& key) {
  static_cast<CallParams&>(params) = call_params(p, band_of(key, p));
  params.o = strided(p.out);
  params.lse_batch_stride = p.lse.batch;
  params.lse_head_stride = p.lse.head;
  params.pages = key_pages(p);
}

/// The base of the executables of all forward passes.
class ForwardPassExecutable : public AttentionExecutable<ForwardArgs> {
 protected:
  /// `out_aligned`: rows of out are stored 16 bytes at a time. `has_padding`: rows of q may belong
  /// to no sequence.
  ForwardPassExecutable(const Problem& problem, Gpu& gpu, Explanation explanation,
                        const CallWorkspace& workspace, bool launches, bool out_aligned,
                        bool has_padding);

  void check_addresses(const ForwardArgs& args) const override;

  /// Adds q, k and v as inputs, and sets their strides in the arguments.
  template <class Params>
  void add_operands(Params& params, const ForwardShapes& shapes,
                    const std::array<Copied, 3>& copied) {
    params.q = strided(add_input("q", &ForwardArgs::q, shapes.q, copied[0]).shape.strides);
    params.k = strided(add_input("k", &ForwardArgs::k, shapes.k, copied[1]).shape.strides);
    params.v = strided(add_input("v", &ForwardArgs::v, shapes.v, copied[2]).shape.strides);
  }

  /// Sets the arguments of a run.
  template <class Params>
  void set_run(Params& params, const ForwardArgs& args, const Run& run, char* workspace) const {
    params.q.data = inputs_[0].data(args, workspace);
    params.k.data = inputs_[1].data(args, workspace);
    params.v.data = inputs_[2].data(args, workspace);
    set_forward_tensors(params, args);
    set_random_numbers(params, run);
    params.o.data = args.out.data;
    params.lse = static_cast<float*>(args.lse.data);
    if (expressions_.given()) params.expression = expressions_.arguments(args.tensors);
  }

  /// Writes the rows of out and lse that belong to no sequence, if there may be any.
  void launch_padding(const ForwardArgs& args, CUstream stream) const;

 private:
  bool out_aligned_;
  CUfunction padding_kernel_ = nullptr;
  ForwardPaddingParams padding_;
};

}  // namespace fulgur::cuda
