#pragma once

#include <array>
#include <vector>

#include "call/problem.h"
#include "cuda/common/executable.h"
#include "cuda/common/kernel_key.h"
#include "cuda/common/launch.h"
#include "cuda/maps/tile_map.h"

namespace fulgur::cuda {

// What the forward passes of all families have in common. `Params`: AttentionParams, or those of
// the decode kernels, which have the same names in another order.

// Which sequences of an invariant call decode kernels compute, and which the forward kernel.

/// Rows of a kv head, (query, head of its group), that a block of an invariant decode call has.
inline constexpr int64_t kFewRows = 64;

/// Whether each sequence of a forward pass has the kernel that its own rows ask for, as in
/// invariant calls on contiguous keys that both compute, which are no codes: a decode kernel, which
/// splits its keys, where it has up to kFewRows, and the forward kernel where it has more. Which
/// the longest one is depends on the batch.
bool rows_decide(const Problem& problem);
/// The most queries of a sequence that a decode kernel computes then; 0: it computes none.
int64_t few_queries(const Problem& problem);
/// Queries of the longest sequence, or of the longer one that it is a part of: these decide.
int64_t deciding_queries(const Problem& problem);
/// Whether a decode kernel computes some sequences of one call and the forward kernel others, as
/// lengths say.
bool takes_both(const Problem& problem);

/// What a problem fixes of the text of the forward and decode kernels that share calls so.
AnyForwardKey forward_key_by_rows(const Problem& problem);

/// Adds the kernels of no family that a plan launches.
template <class Plan>
void add_forward_kernels(const Plan& plan, std::vector<KernelUse>& kernels) {
  if (plan.has_padding()) kernels.push_back(padding_kernel());
  if constexpr (requires { plan.map_tiles(); }) add_map_kernels(plan, plan.map_tiles(), kernels);
  if (plan.copies()) kernels.push_back(copy_kernel());
}

/// What kernels are told of a call in every run, without addresses.
template <class Params>
void set_forward_call(Params& params, const Problem& p, const KernelKey& key) {
  static_cast<CallParams&>(params) = call_params(p, band_of(key, p));
  params.o = strided(p.out);
  params.lse_batch_stride = p.lse.batch;
  params.lse_head_stride = p.lse.head;
  params.pages = key_pages(p);
}

/// What their executables do, besides.
class ForwardPassExecutable : public AttentionExecutable<ForwardArgs> {
 protected:
  /// `out_aligned`: rows of out are stored 16 bytes at a time. `has_padding`: rows of q may belong
  /// to no sequence.
  ForwardPassExecutable(const Problem& problem, Gpu& gpu, Explanation explanation,
                        const CallWorkspace& workspace, bool launches, bool out_aligned,
                        bool has_padding);

  void check_addresses(const ForwardArgs& args) const override;

  /// Adds q, k and v, and tells kernels their strides.
  template <class Params>
  void add_operands(Params& params, const ForwardShapes& shapes,
                    const std::array<Copied, 3>& copied) {
    params.q = strided(add_input("q", &ForwardArgs::q, shapes.q, copied[0]).shape.strides);
    params.k = strided(add_input("k", &ForwardArgs::k, shapes.k, copied[1]).shape.strides);
    params.v = strided(add_input("v", &ForwardArgs::v, shapes.v, copied[2]).shape.strides);
  }

  /// What kernels are told in a run besides.
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
