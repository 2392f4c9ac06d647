#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/hadamard.h"
#include "base/quantize.h"
#include "call/append_call.h"
#include "call/lengths.h"
#include "call/merge_call.h"
#include "call/problem.h"
#include "fulgur/attention.h"
#include "fulgur/details.h"
#include "fulgur/scores.h"
#include "kernels/host_device/prefix_split.h"

namespace fulgur {

/// The decisions of an engine about a problem.
struct Explanation {
  std::vector<std::string> decisions;  ///< one sentence each
  std::vector<std::string> rejected;   ///< the alternatives, each with the reason against it
  Details details;                     ///< the decisions as data
  /// The tile of the score matrix of a head. Where the q heads of a kv head share tiles, this is
  /// the first head's: the tiles of the others begin where it ends.
  int64_t Br = 0, Bc = 0;
};

/// How long a call is expected to take.
struct Estimate {
  double microseconds = 0;  ///< 0: unknown
  std::string bound;        ///< what limits it: "memory" or "products"
  bool at_least = false;    ///< a minimum, as a part of the call is not counted
  std::string sentence;     ///< the estimate in words
};

/// The tensors of one call, which outlive it.
using Call = std::variant<const ForwardArgs*, const BackwardArgs*, const ScoresArgs*>;

/// A problem planned by one engine: running it only computes. Runs may overlap.
class Executable {
 public:
  virtual ~Executable() = default;
  /// The caller has checked that the call is of the planned pass, its shapes and pointers, and the
  /// workspace, if one is given.
  virtual void run(const Call& call, const Run& run) const = 0;
  virtual Explanation explain() const = 0;
  /// The expected time of a call whose sequences have these lengths; one length stands for all if
  /// they are alike. May measure the machine first.
  virtual Estimate estimate(const std::vector<Sequence>&) const { return {}; }
  virtual WorkspaceNeed workspace() const = 0;
};

/// The step that appends the new rows of K and V of a forward call before its attention, planned
/// for one problem. Runs may overlap.
class AppendStep {
 public:
  virtual ~AppendStep() = default;
  /// The bytes of workspace that a run needs.
  virtual int64_t bytes() const = 0;
  /// Appends; `memory` has bytes(). Returns the lengths of the sequences after that, if they lie in
  /// this memory, or null if the host knows them.
  virtual const int32_t* append(const AppendCall& call, void* memory, const Run& run) const = 0;
};

/// The steps around the attention of a call that is divided at the ends of shared prefixes
/// (plan/shared_prefix.h), planned for one problem. Runs may overlap.
class PrefixSteps {
 public:
  virtual ~PrefixSteps() = default;
  /// The time that these steps take, as the bytes of K and V that attention reads in that time.
  virtual int64_t cost_bytes() const = 0;
  /// The bytes of workspace for lengths and tables that lie in host memory, and the arguments of
  /// the call after they are copied there.
  virtual int64_t metadata_bytes() const = 0;
  virtual ForwardArgs moved(const ForwardArgs& args, const Run& run, void* numbers) const = 0;
  /// Writes the arguments of both parts to memory of the device.
  virtual void divide(const kernels::PrefixSplit& split, const Run& run) const = 0;
};

/// The steps around the attention over codes of keys that are rotated, or from which their means
/// were subtracted (plan/code_steps.h), planned for one problem. Runs may overlap.
class CodeSteps {
 public:
  virtual ~CodeSteps() = default;
  /// The bytes of workspace for lengths that lie in host memory.
  virtual int64_t bytes() const = 0;
  /// Rotates rows of q as hadamard() does.
  virtual void rotate(const HadamardCall& call, const Run& run) const = 0;
  /// Adds the products of q and k_mean to LSE; `memory` has bytes(). `args` are the arguments of
  /// the attention, with q rotated.
  virtual void add_means(const ForwardArgs& args, void* memory, const Run& run) const = 0;
  /// Writes these products, scaled, to `to`, a dense tensor in the order and dtype of LSE.
  virtual void multiply_means(const ForwardArgs& args, void* to, void* memory,
                              const Run& run) const = 0;
};

/// One way to compute attention on one kind of device, to append to KV caches there, to merge
/// partial results, and to get memory for the runs of composite plans. `threads` is that of the
/// Options.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual std::string name() const = 0;
  virtual DeviceType device() const = 0;
  virtual std::string description() const = 0;
  /// Why the engine cannot be used on this machine; empty when it can.
  virtual std::string unavailable() const = 0;
  /// Why the engine does not compute this problem, in terms of what it computes; empty if it does.
  virtual std::string rejects(const Problem& problem) const = 0;
  /// Why the engine computes this problem only if the user names it; empty if it always may.
  virtual std::string only_by_name(const Problem&) const { return {}; }
  virtual std::unique_ptr<const Executable> plan(const Problem& problem, int threads) const = 0;
  /// The plan of a problem with new rows whose attention kernel also appends them; null, with the
  /// reason, if the engine has no such kernel.
  virtual std::unique_ptr<const Executable> plan_fused(const Problem&, std::string*) const {
    return {};
  }
  /// The step that appends the new rows of a problem before its attention.
  virtual std::unique_ptr<const AppendStep> append_step(const Problem& problem,
                                                        int threads) const = 0;
  /// The steps of a call that reads shared prefixes once; null if the engine has none.
  virtual std::unique_ptr<const PrefixSteps> prefix_steps(const Problem&, int) const { return {}; }
  /// The steps of a problem over codes; `problem` has q as the attention reads it.
  virtual std::unique_ptr<const CodeSteps> code_steps(const Problem& problem,
                                                      int threads) const = 0;
  /// Calls `compute` with memory for a run on the device, of the size that `need` has: the
  /// workspace of the run, or memory of the engine.
  virtual void with_workspace(Device device, const WorkspaceNeed& need, const Run& run,
                              const std::function<void(void*)>& compute) const = 0;
  /// Appends rows to caches; prepare() loads what such a call needs. Throws Error: kUnsupported for
  /// calls that the engine does not compute, kUnavailable without a device.
  virtual void append(const AppendCall& call, int threads, const Run& run) const = 0;
  virtual void prepare(const AppendCall&) const {}
  /// Merges partial results. Throws the same errors.
  virtual void merge(const MergeCall& call, int threads, const Run& run) const = 0;
  /// Makes codes of numbers, or numbers of codes. Throws Error likewise.
  virtual void quantize(const QuantizeCall& call, int threads, const Run& run) const = 0;
  virtual void dequantize(const DequantizeCall& call, int threads, const Run& run) const = 0;
  /// Rotates rows by a Hadamard matrix. Throws Error likewise.
  virtual void hadamard(const HadamardCall& call, int threads, const Run& run) const = 0;
  /// Throws Error(kInvalidArgument) when nothing may be planned while a call is made on the stream.
  virtual void check_plannable(const Problem&, const Run&) const {}
  /// Plans made under another number are out of date.
  virtual uint64_t generation() const { return 0; }
};

/// The first of `engines` that computes the problem, or the one of this name. Appends to `rejected`
/// why the others were not chosen. Throws Error: kInvalidArgument for an unknown name, kUnavailable
/// or kUnsupported when none computes it.
const Engine& choose_engine(std::span<const Engine* const> engines, const Problem& problem,
                            const std::string& name, std::vector<std::string>* rejected);

}  // namespace fulgur
